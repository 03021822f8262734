"""Hosts in the ledger."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from gpuspawner.ledger import gpus as gpu_ledger
from gpuspawner.ledger import tables as t
from gpuspawner.ledger.records import INVENTORY, HostRecord, host_record
from gpuspawner.pool.states import GpuState
from gpuspawner.pool.topology import Inventory


def add(tx: Connection, name: str, settings: dict[str, Any]) -> bool:
    """Add a host, or give a known one new settings. True if it is new."""
    changed = tx.execute(
        t.hosts.update().where(t.hosts.c.name == name).values(settings=settings)
    ).rowcount
    if changed:
        gpu_ledger.touch_host(tx, name)
        return False
    tx.execute(
        t.hosts.insert().values(
            name=name, settings=settings, state="new", drained=False, images=[], generation=1
        )
    )
    gpu_ledger.touch_host(tx, name)
    return True


def get(tx: Connection, name: str) -> HostRecord | None:
    """One host."""
    row = tx.execute(sa.select(t.hosts).where(t.hosts.c.name == name)).one_or_none()
    return None if row is None else host_record(row)


def every(tx: Connection) -> list[HostRecord]:
    """All hosts by name."""
    return [host_record(row) for row in tx.execute(sa.select(t.hosts).order_by(t.hosts.c.name))]


def guest_addresses(tx: Connection, name: str) -> tuple[str, frozenset[str]]:
    """The range of a host's guests, and the addresses of it that leases hold.

    Raises ``LookupError`` if there is no such host.
    """
    held = t.claimed_addresses.c
    rows = tx.execute(
        sa.select(t.hosts.c.settings, held.address)
        .select_from(t.hosts.outerjoin(t.claimed_addresses, held.host == t.hosts.c.name))
        .where(t.hosts.c.name == name)
    ).all()
    if not rows:
        raise LookupError(name)
    return rows[0].settings["cidr"], frozenset(row.address for row in rows if row.address)


def set_state(tx: Connection, name: str, state: str, reason: str | None = None) -> None:
    """``ready`` or ``unreachable``, and why."""
    tx.execute(t.hosts.update().where(t.hosts.c.name == name).values(state=state, reason=reason))
    gpu_ledger.touch_host(tx, name)


def set_drained(tx: Connection, name: str, drained: bool) -> bool:
    """Take nothing new, or take again; false if there is no such host."""
    found = tx.execute(
        t.hosts.update().where(t.hosts.c.name == name).values(drained=drained)
    ).rowcount
    gpu_ledger.touch_host(tx, name)
    return bool(found)


def set_images(tx: Connection, name: str, digests: Iterable[str]) -> None:
    """The images that lie on the host, whole."""
    tx.execute(t.hosts.update().where(t.hosts.c.name == name).values(images=sorted(digests)))
    gpu_ledger.touch_host(tx, name)


def set_accel(tx: Connection, name: str, accel: str) -> None:
    """How guests run there: ``kvm`` or ``tcg``."""
    tx.execute(t.hosts.update().where(t.hosts.c.name == name).values(accel=accel))


def record_survey(tx: Connection, inventory: Inventory, now_ms: int) -> bool:
    """Store what a host has. True if it has rebooted since the last survey.

    GPUs that are new become ``new``; a GPU that is gone keeps its row, its owner and its history.
    One that was free is ``used`` then: its diagnosis tries to bring it back, or finds it ``lost``.
    One that comes back by itself stays lost until an admin has it retested. After a reboot
    everything that was proved about a free GPU is old news, and so it is when other devices are in
    its slot: it must be diagnosed again. A host without a shell cannot tell whether it has
    rebooted: that comes out at the first survey with one.
    """
    old = get(tx, inventory.host)
    boot_id = inventory.boot_id or (old.boot_id if old is not None else None)
    rebooted = old is not None and old.boot_id not in (None, boot_id)
    tx.execute(
        t.hosts.update()
        .where(t.hosts.c.name == inventory.host)
        .values(inventory=INVENTORY.dump_python(inventory, mode="json"), boot_id=boot_id)
    )
    known = {gpu.address: gpu for gpu in gpu_ledger.of_host(tx, inventory.host)}
    for gpu in inventory.gpus:
        if gpu.address not in known:
            gpu_ledger.add(tx, inventory.host, gpu, now_ms)
        elif known[gpu.address].model != gpu.model:
            gpu_ledger.set_model(tx, inventory.host, gpu.address, gpu.model)
    present = {gpu.address for gpu in inventory.gpus}
    swapped = {
        gpu.address
        for gpu in (old.inventory.gpus if old is not None and old.inventory is not None else ())
        if gpu.address in present and inventory.gpu(gpu.address).ids != gpu.ids
    }
    for record in known.values():
        if record.address not in present and record.state in (GpuState.NEW, GpuState.UNASSIGNED):
            state = GpuState.LOST if record.state is GpuState.NEW else GpuState.USED
            reason = "It does not answer on the host's bus."
            gpu_ledger.move(tx, record, state, now_ms, reason=reason)
        elif rebooted and record.state is GpuState.UNASSIGNED:
            gpu_ledger.move(tx, record, GpuState.USED, now_ms, reason="The host has rebooted.")
        elif record.address in swapped and record.state is GpuState.UNASSIGNED:
            reason = "Other devices are in its slot than before."
            gpu_ledger.move(tx, record, GpuState.USED, now_ms, reason=reason)
    gpu_ledger.touch_host(tx, inventory.host)
    return rebooted
