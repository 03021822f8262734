"""Alembic's entry: the connection comes from ``ledger.database.migrate``."""

from __future__ import annotations

from alembic import context

from gpuspawner.ledger import tables

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=tables.metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
