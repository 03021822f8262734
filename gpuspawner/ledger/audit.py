"""The audit: what admins did, who, when and why. Lines are added, never changed."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from gpuspawner.ledger import tables as t


def add(
    tx: Connection,
    now_ms: int,
    who: str,
    what: str,
    why: str = "",
    *,
    old: int | None = None,
    new: int | None = None,
) -> None:
    """One line, in the transaction of the act itself. ``what`` begins with the verb and the
    thing; whatever is too long for its column is cut at the end."""
    tx.execute(
        t.audit.insert().values(
            at_ms=now_ms,
            who=who[: t.audit.c.who.type.length],  # type: ignore[attr-defined]
            what=what[: t.audit.c.what.type.length],  # type: ignore[attr-defined]
            old=old,
            new=new,
            why=why,
        )
    )


def newest(tx: Connection, limit: int, before: int | None = None) -> list[dict[str, Any]]:
    """The newest lines first; with ``before`` those that are older than the line of that id."""
    query = sa.select(t.audit).order_by(t.audit.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(t.audit.c.id < before)
    return [dict(row._mapping) for row in tx.execute(query)]


def last_of_limits(tx: Connection) -> dict[str, dict[str, Any]]:
    """The newest line about each limit, by ``what``."""
    newest_ids = (
        sa.select(sa.func.max(t.audit.c.id))
        .where(t.audit.c.what.startswith("limit ", autoescape=True))
        .group_by(t.audit.c.what)
    )
    rows = tx.execute(sa.select(t.audit).where(t.audit.c.id.in_(newest_ids)))
    return {row.what: dict(row._mapping) for row in rows}
