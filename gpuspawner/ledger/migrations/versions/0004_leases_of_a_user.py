"""What a user holds is found without reading what all others hold."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change the schema."""
    op.create_index(op.f("ix_leases_username_state"), "leases", ["username", "state"])
