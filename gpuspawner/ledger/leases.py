"""Leases in the ledger: acquire, release, and every step between.

Place and claims are one transaction with the decision that led to them. Each change of state
writes its event in the same transaction, so that the story a user reads is the story that was.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from gpuspawner.ledger import gpus as gpu_ledger
from gpuspawner.ledger import tables as t
from gpuspawner.ledger.changes import Stale
from gpuspawner.ledger.records import CLAIM, EventRecord, LeaseRecord, event_record, lease_record
from gpuspawner.pool.states import (
    OPEN_LEASES,
    EndReason,
    GpuState,
    LeaseState,
    check_lease_step,
)
from gpuspawner.pool.topology import Claim

EVENTS_AT_ONCE = 500
LIVE = (LeaseState.QUEUED, LeaseState.PLACED, LeaseState.STARTING, LeaseState.RUNNING)


def body_hash(body: dict[str, Any]) -> str:
    """Fingerprint of what a start asks for, without the payload: its token leaves no trace."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def get(tx: Connection, lease_id: str) -> LeaseRecord | None:
    """One lease."""
    row = tx.execute(sa.select(t.leases).where(t.leases.c.id == lease_id)).one_or_none()
    return None if row is None else lease_record(row)


def need(tx: Connection, lease_id: str) -> LeaseRecord:
    """One lease that must exist; ``LookupError`` otherwise."""
    lease = get(tx, lease_id)
    if lease is None:
        raise LookupError(lease_id)
    return lease


def of_start(tx: Connection, key: tuple[str, str, str], start_id: str) -> LeaseRecord | None:
    """The lease of one start of one server."""
    row = tx.execute(
        sa.select(t.leases).where(*_key(t.leases, key), t.leases.c.start_id == start_id)
    ).one_or_none()
    return None if row is None else lease_record(row)


def of_server(tx: Connection, key: tuple[str, str, str], start_id: str) -> list[LeaseRecord]:
    """The server's open leases and the one of this start, oldest first."""
    rows = tx.execute(
        sa.select(t.leases)
        .where(
            *_key(t.leases, key),
            sa.or_(t.leases.c.start_id == start_id, t.leases.c.state != LeaseState.ENDED),
        )
        .order_by(t.leases.c.created_ms)
    )
    return [lease_record(row) for row in rows]


def live_of_key(tx: Connection, key: tuple[str, str, str]) -> LeaseRecord | None:
    """The server's lease that is not ending."""
    row = tx.execute(
        sa.select(t.leases).where(*_key(t.leases, key), t.leases.c.state.in_(LIVE))
    ).one_or_none()
    return None if row is None else lease_record(row)


def of_key(tx: Connection, key: tuple[str, str, str]) -> list[LeaseRecord]:
    """The server's open leases and its newest ended one, newest first."""
    rows = tx.execute(
        sa.select(t.leases).where(*_key(t.leases, key)).order_by(t.leases.c.created_ms.desc())
    )
    found = [lease_record(row) for row in rows]
    ended = [lease for lease in found if lease.state is LeaseState.ENDED][:1]
    return [lease for lease in found if lease.state in OPEN_LEASES] + ended


def stopping_of_key(tx: Connection, key: tuple[str, str, str]) -> LeaseRecord | None:
    """The oldest predecessor of the server's lease that still has its VM."""
    row = tx.execute(
        sa.select(t.leases)
        .where(*_key(t.leases, key), t.leases.c.state == LeaseState.STOPPING)
        .order_by(t.leases.c.created_ms)
        .limit(1)
    ).one_or_none()
    return None if row is None else lease_record(row)


def open_leases(tx: Connection, host: str | None = None) -> list[LeaseRecord]:
    """All leases that have not ended, oldest first."""
    query = sa.select(t.leases).where(t.leases.c.state != LeaseState.ENDED)
    if host is not None:
        query = query.where(t.leases.c.host == host)
    return [lease_record(row) for row in tx.execute(query.order_by(t.leases.c.created_ms))]


def stirred_by(tx: Connection, key: tuple[str, str, str]) -> list[LeaseRecord]:
    """Open leases that a new start of this server may have moved: its own, and those that have
    just got a place."""
    query = sa.select(t.leases).where(
        t.leases.c.state != LeaseState.ENDED,
        sa.or_(t.leases.c.state == LeaseState.PLACED, sa.and_(*_key(t.leases, key))),
    )
    return [lease_record(row) for row in tx.execute(query.order_by(t.leases.c.created_ms))]


def queued(tx: Connection) -> list[LeaseRecord]:
    """Leases that wait for a place, first come first."""
    rows = tx.execute(
        sa.select(t.leases)
        .where(t.leases.c.state == LeaseState.QUEUED)
        .order_by(t.leases.c.created_ms, t.leases.c.id)
    )
    return [lease_record(row) for row in rows]


def placeable(tx: Connection) -> list[LeaseRecord]:
    """Leases that wait for a place, first come first, without those whose server still has the VM
    of a predecessor."""
    rows = tx.execute(
        sa.select(t.leases)
        .where(t.leases.c.state.in_((LeaseState.QUEUED, LeaseState.STOPPING)))
        .order_by(t.leases.c.created_ms, t.leases.c.id)
    )
    found = [lease_record(row) for row in rows]
    stopping = {lease.key for lease in found if lease.state is LeaseState.STOPPING}
    return [
        lease for lease in found if lease.state is LeaseState.QUEUED and lease.key not in stopping
    ]


def recent(tx: Connection, limit: int, username: str | None = None) -> list[LeaseRecord]:
    """The newest leases, ended ones included."""
    query = sa.select(t.leases).order_by(t.leases.c.created_ms.desc()).limit(limit)
    if username is not None:
        query = query.where(t.leases.c.username == username)
    return [lease_record(row) for row in tx.execute(query)]


def failed_boots_since(tx: Connection, since_ms: int) -> frozenset[str]:
    """Leases whose guests did not come up, and whose consoles may still be read."""
    rows = tx.execute(
        sa.select(t.leases.c.id).where(
            t.leases.c.reason == EndReason.BOOT_FAILED, t.leases.c.ended_ms > since_ms
        )
    )
    return frozenset(rows.scalars())


def insert(tx: Connection, values: dict[str, Any], message: str) -> LeaseRecord:
    """A new lease with its first event."""
    row = tx.execute(t.leases.insert().values(**values).returning(t.leases)).one()
    lease = lease_record(row)
    add_event(tx, lease, values["created_ms"], "state", 0, message)
    return lease


def claim(
    tx: Connection,
    lease: LeaseRecord,
    wanted: Claim,
    seen: int,
    address: str,
    mac: str,
    now_ms: int,
    message: str,
) -> LeaseRecord:
    """Give a lease its place, which was found on the host as it was in generation ``seen``.

    Raises ``Stale`` if the host has changed since; and the primary keys of the claim tables refuse
    a second owner whatever was seen.
    """
    if not gpu_ledger.touch_host(tx, wanted.host, seen):
        raise Stale(f"host {wanted.host} is not in generation {seen} any more")
    rows = [{"host": wanted.host, "address": gpu, "owner": lease.id} for gpu in wanted.gpus]
    if rows:
        tx.execute(t.claimed_gpus.insert(), rows)
        gpu_ledger.reserve(
            tx, wanted.host, wanted.gpus, now_ms, owner=lease.username, lease_id=lease.id
        )
    tx.execute(
        t.claimed_cpus.insert(),
        [{"host": wanted.host, "cpu": cpu, "owner": lease.id} for cpu in wanted.cpus],
    )
    tx.execute(
        t.claimed_memory.insert(),
        [
            {"host": wanted.host, "node": c.node, "owner": lease.id, "mib": c.memory_mib}
            for c in wanted.cells
        ],
    )
    tx.execute(
        t.claimed_addresses.insert().values(host=wanted.host, address=address, owner=lease.id)
    )
    return move(
        tx,
        lease,
        LeaseState.PLACED,
        now_ms,
        5,
        message,
        host=wanted.host,
        claim=CLAIM.dump_python(wanted, mode="json"),
        address=address,
        mac=mac,
        wait_until_ms=None,
    )


def move(
    tx: Connection,
    lease: LeaseRecord,
    state: LeaseState,
    now_ms: int,
    progress: int,
    told: str,
    **changes: Any,
) -> LeaseRecord:
    """Take a lease one step on and tell its story."""
    check_lease_step(lease.state, state)
    row = tx.execute(
        t.leases.update()
        .where(t.leases.c.id == lease.id, t.leases.c.state == lease.state)
        .values(state=state, **changes)
        .returning(t.leases)
    ).one_or_none()
    if row is None:
        raise RuntimeError(f"lease {lease.id} is not in state {lease.state} any more")
    moved = lease_record(row)
    add_event(tx, moved, now_ms, "state", progress, told)
    return moved


def gpus_assigned(tx: Connection, lease: LeaseRecord, now_ms: int) -> None:
    """The VM runs: its GPUs are in it."""
    assert lease.claim is not None
    for address in lease.claim.gpus:
        gpu = gpu_ledger.get(tx, lease.claim.host, address)
        if gpu is not None and gpu.state is GpuState.RESERVED and gpu.lease_id == lease.id:
            gpu_ledger.move(tx, gpu, GpuState.ASSIGNED, now_ms, owner=lease.username)


def stop(
    tx: Connection, lease_id: str, reason: EndReason, message: str, now_ms: int
) -> LeaseRecord:
    """Begin to end a lease. A lease without a place ends at once; one that is ending already
    keeps its first reason."""
    lease = need(tx, lease_id)
    if lease.state in (LeaseState.STOPPING, LeaseState.ENDED):
        return lease
    if lease.state is LeaseState.QUEUED:
        return move(
            tx, lease, LeaseState.ENDED, now_ms, 100, message,
            reason=reason, message=message, ended_ms=now_ms,
        )  # fmt: skip
    return move(tx, lease, LeaseState.STOPPING, now_ms, 0, message, reason=reason, message=message)


def finish(tx: Connection, lease: LeaseRecord, now_ms: int) -> LeaseRecord:
    """The VM is gone and its GPUs are let go: give everything back. The GPUs become *used*."""
    for table in (t.claimed_gpus, t.claimed_cpus, t.claimed_memory, t.claimed_addresses):
        tx.execute(table.delete().where(table.c.owner == lease.id))
    if lease.claim is not None:
        for address in lease.claim.gpus:
            gpu = gpu_ledger.get(tx, lease.claim.host, address)
            if gpu is not None and gpu.lease_id == lease.id:
                gpu_ledger.move(
                    tx, gpu, GpuState.USED, now_ms,
                    reason=None, owner=lease.username, lease_id=None, attempt=0, retry_ms=None,
                )  # fmt: skip
        gpu_ledger.touch_host(tx, lease.claim.host)
    tx.execute(t.steps.delete().where(t.steps.c.owner == lease.id))
    return move(
        tx, lease, LeaseState.ENDED, now_ms, 100, lease.message or "Ended.", ended_ms=now_ms
    )


def step_done(tx: Connection, owner: str, name: str, now_ms: int) -> None:
    """A step is through; doing it again would be harmless but is not needed."""
    if name not in steps_done(tx, owner):
        tx.execute(t.steps.insert().values(owner=owner, name=name, at_ms=now_ms))


def steps_done(tx: Connection, owner: str) -> frozenset[str]:
    """Names of the steps that are through."""
    return frozenset(
        tx.execute(sa.select(t.steps.c.name).where(t.steps.c.owner == owner)).scalars()
    )


def early_release(tx: Connection, key: tuple[str, str, str], start_id: str, now_ms: int) -> None:
    """Remember a release that came before its acquire."""
    if not was_released_early(tx, key, start_id):
        tx.execute(
            t.early_releases.insert().values(
                hub_id=key[0], username=key[1], server_name=key[2], start_id=start_id, at_ms=now_ms
            )
        )


def was_released_early(tx: Connection, key: tuple[str, str, str], start_id: str) -> bool:
    """This start was released before it was acquired."""
    table = t.early_releases
    row = tx.execute(
        sa.select(table.c.at_ms).where(*_key(table, key), table.c.start_id == start_id)
    ).one_or_none()
    return row is not None


def forget_old(tx: Connection, before_ms: int) -> None:
    """Drop early releases that nobody will ask for any more."""
    tx.execute(t.early_releases.delete().where(t.early_releases.c.at_ms < before_ms))


def add_event(
    tx: Connection,
    lease: LeaseRecord,
    now_ms: int,
    kind: str,
    progress: int,
    message: str,
) -> None:
    """One more line in the lease's story."""
    tx.execute(
        t.events.insert().values(
            lease_id=lease.id,
            at_ms=now_ms,
            kind=kind,
            state=lease.state,
            progress=progress,
            message=message,
            reason=lease.reason,
        )
    )


def was_told(tx: Connection, lease_id: str, message: str) -> bool:
    """This line is in the lease's story already."""
    query = sa.select(t.events.c.id).where(
        t.events.c.lease_id == lease_id, t.events.c.message == message
    )
    return tx.execute(query.limit(1)).one_or_none() is not None


def last_event(tx: Connection, lease_id: str) -> EventRecord | None:
    """The newest line of the lease's story."""
    row = tx.execute(
        sa.select(t.events)
        .where(t.events.c.lease_id == lease_id)
        .order_by(t.events.c.id.desc())
        .limit(1)
    ).one_or_none()
    return None if row is None else event_record(row)


def events_after(tx: Connection, lease_id: str, after: int) -> list[EventRecord]:
    """The lease's story from a number on, ``EVENTS_AT_ONCE`` lines of it at most."""
    rows = tx.execute(
        sa.select(t.events)
        .where(t.events.c.lease_id == lease_id, t.events.c.id > after)
        .order_by(t.events.c.id)
        .limit(EVENTS_AT_ONCE)
    )
    return [event_record(row) for row in rows]


def count_by_state(tx: Connection) -> dict[str, int]:
    """How many leases are in each open state."""
    rows: Any = tx.execute(
        sa.select(t.leases.c.state, sa.func.count())
        .where(t.leases.c.state != LeaseState.ENDED)
        .group_by(t.leases.c.state)
    )
    return {row[0]: row[1] for row in rows}


def _key(table: sa.Table, key: tuple[str, str, str]) -> tuple[sa.ColumnElement[bool], ...]:
    return (
        table.c.hub_id == key[0],
        table.c.username == key[1],
        table.c.server_name == key[2],
    )
