"""The allocator's pages: what a user has and what is free, and the whole pool for its admins.

``data``, ``details`` and ``limit_data`` turn what the API shows into what a page shows and are
pure; ``handlers``, ``limits`` and ``actions`` answer requests; ``live`` tells open pages that
something has changed.
"""
