"""What people have asked for lately: with it, placement keeps room for what will be asked next."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Connection

from gpuspawner.ledger import tables as t
from gpuspawner.pool.choosing import Mix, mix_of
from gpuspawner.pool.topology import Request

WINDOW = 500  # requests
_EVERY = 20  # decisions between two looks: the mix of 500 changes slowly


class Demand:
    """The kinds among the newest ``WINDOW`` requests, refused ones included. Looked up again
    every few decisions, so that a decision does not read hundreds of rows."""

    def __init__(self) -> None:
        self._mix: Mix = ()
        self._left = 0

    def mix(self, tx: Connection) -> Mix:
        """The mix as of the last look."""
        if self._left == 0:
            self._mix = mix_of(recent_requests(tx, WINDOW))
            self._left = _EVERY
        self._left -= 1
        return self._mix


def recent_requests(tx: Connection, limit: int) -> list[Request]:
    """What the newest leases asked for, newest first."""
    rows = tx.execute(
        sa.select(t.leases.c.request).order_by(t.leases.c.created_ms.desc()).limit(limit)
    )
    return [
        Request(
            gpus=wanted["gpus"],
            cores=wanted["cores"],
            memory_mib=wanted["memory_mib"],
            gpu_model=wanted["gpu_model"],
        )
        for wanted in rows.scalars()
    ]
