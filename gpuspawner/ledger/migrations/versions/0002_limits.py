"""Limits, their audit, and the groups that a lease counts for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change the schema."""
    op.create_table(
        "limits",
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "name", name=op.f("pk_limits")),
    )
    op.create_table(
        "audit",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("who", sa.String(length=255), nullable=False),
        sa.Column("what", sa.String(length=300), nullable=False),
        sa.Column("old", sa.Integer(), nullable=True),
        sa.Column("new", sa.Integer(), nullable=True),
        sa.Column("why", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.add_column(
        "leases",
        sa.Column("groups", sa.JSON(), server_default=sa.text("'[]'"), nullable=False),
    )
