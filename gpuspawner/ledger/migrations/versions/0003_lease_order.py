"""The newest leases are found without reading all of them."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change the schema."""
    op.create_index(op.f("ix_leases_created_ms"), "leases", ["created_ms"])
