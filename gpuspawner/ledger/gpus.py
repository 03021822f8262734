"""GPUs in the ledger: every change of state goes through ``move`` and leaves a line of history."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from gpuspawner.ledger import tables as t
from gpuspawner.ledger.changes import Changes
from gpuspawner.ledger.records import IDENTITY, GpuRecord, gpu_record
from gpuspawner.pool.states import GpuState, check_gpu_step
from gpuspawner.pool.topology import Gpu
from gpuspawner.pool.verdict import Identity


def touch_host(tx: Connection, host: str, seen: int | None = None) -> bool:
    """Something about what is free on the host has changed: snapshots of it are stale.

    With ``seen`` only if that still is the host's generation; false if it is not.
    """
    Changes.of(tx).note(host)
    change = t.hosts.update().where(t.hosts.c.name == host)
    if seen is not None:
        change = change.where(t.hosts.c.generation == seen)
    return tx.execute(change.values(generation=secrets.randbits(62))).rowcount == 1


def add(tx: Connection, host: str, gpu: Gpu, now_ms: int) -> None:
    """A GPU that the pool has not seen before: dirty, until a wipe is proved."""
    tx.execute(
        t.gpus.insert().values(
            host=host,
            address=gpu.address,
            model=gpu.model,
            state=GpuState.NEW,
            since_ms=now_ms,
            dirty=True,
            attempt=0,
            holds=[],
        )
    )


def get(tx: Connection, host: str, address: str) -> GpuRecord | None:
    """One GPU."""
    row = tx.execute(
        sa.select(t.gpus).where(t.gpus.c.host == host, t.gpus.c.address == address)
    ).one_or_none()
    return None if row is None else gpu_record(row)


def of_host(tx: Connection, host: str, state: GpuState | None = None) -> list[GpuRecord]:
    """A host's GPUs by address, all or those in one state."""
    query = sa.select(t.gpus).where(t.gpus.c.host == host)
    if state is not None:
        query = query.where(t.gpus.c.state == state)
    return [gpu_record(row) for row in tx.execute(query.order_by(t.gpus.c.address))]


def every(tx: Connection) -> list[GpuRecord]:
    """All GPUs by host and address."""
    rows = tx.execute(sa.select(t.gpus).order_by(t.gpus.c.host, t.gpus.c.address))
    return [gpu_record(row) for row in rows]


def count(tx: Connection, model: str | None = None) -> Counter[GpuState]:
    """How many GPUs, all or those of one model, are in each state."""
    query = sa.select(t.gpus.c.state, sa.func.count()).group_by(t.gpus.c.state)
    if model is not None:
        query = query.where(t.gpus.c.model == model)
    return Counter({GpuState(state): number for state, number in tx.execute(query)})


def move(
    tx: Connection,
    gpu: GpuRecord,
    state: GpuState,
    now_ms: int,
    *,
    reason: str | None = None,
    owner: str | None = None,
    **changes: Any,
) -> None:
    """Take a GPU one step on, if it still is in the state that ``gpu`` says.

    Reservation makes it dirty. Raises ``IllegalTransition`` for a step that the table lacks, and
    ``RuntimeError`` if the GPU has moved meanwhile, which one writer rules out.
    """
    _step(tx, gpu.host, (gpu.address,), gpu.state, state, now_ms, reason, owner, **changes)
    touch_host(tx, gpu.host)


def reserve(
    tx: Connection,
    host: str,
    addresses: Sequence[str],
    now_ms: int,
    *,
    owner: str,
    lease_id: str,
) -> None:
    """Take free GPUs for a lease, as ``move`` would one by one. Who claims touches the host."""
    old, new = GpuState.UNASSIGNED, GpuState.RESERVED
    _step(tx, host, addresses, old, new, now_ms, None, owner, lease_id=lease_id)


def _step(
    tx: Connection,
    host: str,
    addresses: Sequence[str],
    old: GpuState,
    new: GpuState,
    now_ms: int,
    reason: str | None,
    owner: str | None,
    **changes: Any,
) -> None:
    check_gpu_step(old, new)
    if new is GpuState.RESERVED:
        changes["dirty"] = True
    changed = tx.execute(
        t.gpus.update()
        .where(t.gpus.c.host == host, t.gpus.c.address.in_(addresses), t.gpus.c.state == old)
        .values(state=new, since_ms=now_ms, reason=reason, **changes)
    ).rowcount
    if changed != len(addresses):
        raise RuntimeError(f"GPU {host} {', '.join(addresses)} is not in state {old} any more")
    line = {"host": host, "at_ms": now_ms, "old": old, "new": new, "reason": reason, "owner": owner}
    tx.execute(t.gpu_history.insert(), [{**line, "address": address} for address in addresses])


def set_model(tx: Connection, host: str, address: str, model: str) -> None:
    """The host now names this GPU's model so."""
    tx.execute(
        t.gpus.update()
        .where(t.gpus.c.host == host, t.gpus.c.address == address)
        .values(model=model)
    )


def enrol(tx: Connection, host: str, address: str, identity: Identity) -> None:
    """Store who the GPU is; every later diagnosis is compared with it."""
    tx.execute(
        t.gpus.update()
        .where(t.gpus.c.host == host, t.gpus.c.address == address)
        .values(enrolled=IDENTITY.dump_python(identity, mode="json"))
    )


def set_holds(tx: Connection, gpu: GpuRecord, holds: tuple[str, ...]) -> None:
    """Reasons that keep a GPU out of use, whatever its state."""
    tx.execute(
        t.gpus.update()
        .where(t.gpus.c.host == gpu.host, t.gpus.c.address == gpu.address)
        .values(holds=list(holds))
    )
    touch_host(tx, gpu.host)


def history(tx: Connection, host: str, address: str, limit: int = 100) -> list[dict[str, Any]]:
    """The last changes of state, newest first."""
    rows = tx.execute(
        sa.select(t.gpu_history)
        .where(t.gpu_history.c.host == host, t.gpu_history.c.address == address)
        .order_by(t.gpu_history.c.id.desc())
        .limit(limit)
    )
    return [dict(row._mapping) for row in rows]


def pool_history(tx: Connection, limit: int = 50) -> list[dict[str, Any]]:
    """The last changes of state of all GPUs, newest first."""
    rows = tx.execute(sa.select(t.gpu_history).order_by(t.gpu_history.c.id.desc()).limit(limit))
    return [dict(row._mapping) for row in rows]
