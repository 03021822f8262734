"""The domain: GPUs on NUMA hosts, who holds them, and what may happen next.

Everything here is pure. No I/O, no clock, no SQL: time, inventories and records are passed in,
decisions come out.
"""
