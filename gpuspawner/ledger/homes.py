"""Home volumes: one for each server, kept when it stops, in the trash for a while when deleted."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Connection

from gpuspawner.ledger import tables as t
from gpuspawner.ledger.records import HomeRecord, home_record


def of_key(tx: Connection, key: tuple[str, str, str]) -> HomeRecord | None:
    """The server's home."""
    row = tx.execute(
        sa.select(t.homes).where(
            t.homes.c.hub_id == key[0],
            t.homes.c.username == key[1],
            t.homes.c.server_name == key[2],
            t.homes.c.trashed_ms.is_(None),
        )
    ).one_or_none()
    return None if row is None else home_record(row)


def add(
    tx: Connection,
    key: tuple[str, str, str],
    home_id: str,
    host: str,
    volume: str,
    size_mib: int,
    now_ms: int,
) -> None:
    """A home for a server that has none. The volume's name is stored, never derived again."""
    tx.execute(
        t.homes.insert().values(
            id=home_id,
            hub_id=key[0],
            username=key[1],
            server_name=key[2],
            host=host,
            volume=volume,
            size_mib=size_mib,
            used=False,
            created_ms=now_ms,
        )
    )


def mark_used(tx: Connection, home_id: str) -> None:
    """A server has answered on this home: from now on no guest may format it."""
    tx.execute(t.homes.update().where(t.homes.c.id == home_id).values(used=True))


def trash(tx: Connection, key: tuple[str, str, str], now_ms: int) -> HomeRecord | None:
    """Put the server's home into the trash; the next start makes a new one."""
    home = of_key(tx, key)
    if home is not None:
        tx.execute(t.homes.update().where(t.homes.c.id == home.id).values(trashed_ms=now_ms))
    return home


def trashed_before(tx: Connection, before_ms: int) -> list[HomeRecord]:
    """Homes that were in the trash long enough."""
    rows = tx.execute(sa.select(t.homes).where(t.homes.c.trashed_ms < before_ms))
    return [home_record(row) for row in rows]


def forget(tx: Connection, home_id: str) -> None:
    """The volume is deleted: drop the row too."""
    tx.execute(t.homes.delete().where(t.homes.c.id == home_id))
