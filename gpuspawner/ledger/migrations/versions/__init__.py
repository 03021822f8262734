"""Schema migrations, run by Alembic at each start of the allocator."""
