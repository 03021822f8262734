"""Limits in the ledger. Every change leaves a line of audit."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Connection

from gpuspawner.ledger import audit as audit_ledger
from gpuspawner.ledger import tables as t
from gpuspawner.pool.quota import Holding, Limits
from gpuspawner.pool.states import OPEN_LEASES


def load(tx: Connection) -> Limits:
    """All limits."""
    rows = tx.execute(sa.select(t.limits)).all()
    by_kind = {
        kind: {row.name: row.gpus for row in rows if row.kind == kind} for kind in ("user", "group")
    }
    default = next((row.gpus for row in rows if row.kind == "default"), None)
    return Limits(default, by_kind["user"], by_kind["group"])


def holdings(
    tx: Connection, besides: tuple[str, str, str] | None = None, username: str | None = None
) -> list[Holding]:
    """What all open leases hold, or those of one user, except those of one server."""
    of = t.leases.c
    query = sa.select(of.hub_id, of.username, of.server_name, of.groups, of.request)
    query = query.where(of.state.in_(sorted(OPEN_LEASES)))
    if username is not None:
        query = query.where(of.username == username)
    rows = tx.execute(query)
    return [
        Holding(row.username, row.server_name, tuple(row.groups), row.request["gpus"])
        for row in rows
        if (row.hub_id, row.username, row.server_name) != besides
    ]


def title(kind: str, name: str) -> str:
    """What the audit calls a limit."""
    return f"limit {kind} {name}".rstrip()


def put(
    tx: Connection, kind: str, name: str, gpus: int | None, who: str, why: str, now_ms: int
) -> None:
    """Set a limit, or take it away with ``None``."""
    where = (t.limits.c.kind == kind, t.limits.c.name == name)
    old = tx.execute(sa.select(t.limits.c.gpus).where(*where)).scalar_one_or_none()
    tx.execute(t.limits.delete().where(*where))
    if gpus is not None:
        tx.execute(t.limits.insert().values(kind=kind, name=name, gpus=gpus))
    audit_ledger.add(tx, now_ms, who, title(kind, name), why, old=old, new=gpus)
