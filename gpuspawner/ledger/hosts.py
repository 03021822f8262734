"""Hosts in the ledger, and the views of them that placement decides on."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from gpuspawner.ledger import gpus as gpu_ledger
from gpuspawner.ledger import tables as t
from gpuspawner.ledger.records import INVENTORY, HostRecord, host_record
from gpuspawner.pool.states import COMING, GpuState
from gpuspawner.pool.topology import HostView, Inventory


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
    return True


def get(tx: Connection, name: str) -> HostRecord | None:
    """One host."""
    row = tx.execute(sa.select(t.hosts).where(t.hosts.c.name == name)).one_or_none()
    return None if row is None else host_record(row)


def every(tx: Connection) -> list[HostRecord]:
    """All hosts by name."""
    return [host_record(row) for row in tx.execute(sa.select(t.hosts).order_by(t.hosts.c.name))]


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


class Views:
    """Snapshots of hosts for placement, rebuilt only for hosts whose generation has changed."""

    def __init__(self) -> None:
        self._cache: dict[str, tuple[int, HostView]] = {}

    def load(self, tx: Connection) -> list[HostView]:
        """The views as they are in this transaction. Hosts never surveyed have none."""
        views: list[HostView] = []
        for name, generation in tx.execute(
            sa.select(t.hosts.c.name, t.hosts.c.generation).order_by(t.hosts.c.name)
        ):
            cached = self._cache.get(name)
            if cached is None or cached[0] != generation:
                view = _build(tx, name)
                if view is None:
                    continue
                cached = (generation, view)
                self._cache[name] = cached
            views.append(cached[1])
        return views


def _build(tx: Connection, name: str) -> HostView | None:
    host = get(tx, name)
    if host is None or host.inventory is None:
        return None
    records = gpu_ledger.of_host(tx, name)
    cpus = tx.execute(sa.select(t.claimed_cpus.c.cpu).where(t.claimed_cpus.c.host == name))
    addresses = tx.execute(
        sa.select(sa.func.count())
        .select_from(t.claimed_addresses)
        .where(t.claimed_addresses.c.host == name)
    ).scalar_one()
    # Without the network's own address, the broadcast address and the gateway.
    range_size = ipaddress.ip_network(host.settings["cidr"], strict=False).num_addresses - 3
    used_mib: dict[int, int] = defaultdict(int)
    for node, mib in tx.execute(
        sa.select(t.claimed_memory.c.node, t.claimed_memory.c.mib).where(
            t.claimed_memory.c.host == name
        )
    ):
        used_mib[node] += mib
    return HostView(
        inventory=host.inventory,
        free_gpus=frozenset(
            gpu.address for gpu in records if gpu.state is GpuState.UNASSIGNED and not gpu.holds
        ),
        coming_gpus=frozenset(
            gpu.address for gpu in records if gpu.state in COMING and not gpu.holds
        ),
        used_cpus=frozenset(cpus.scalars()),
        used_mib=dict(used_mib),
        drained=host.drained,
        reachable=host.state == "ready",
        connecting=host.state == "new",
        free_addresses=max(0, range_size - addresses),
        images=host.images,
    )
