"""The only door to SQL: tables, migrations, transactions.

Functions of this package take an open transaction and plain values. Times are UTC milliseconds
since 1970 (columns ``*_ms``).
"""
