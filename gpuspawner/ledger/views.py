"""The pool in memory, as placement sees it.

A decision must not read every host, nor may it be made on what is not so any more. So views are
kept, and each transaction reads again those hosts alone that were changed since (``changes``). At
the first look, which is after every start, all are read. A claim compares the generation of its
host's view with the ledger's in its own transaction (``leases.claim``).
"""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from gpuspawner.ledger import tables as t
from gpuspawner.ledger.changes import Changes
from gpuspawner.ledger.records import INVENTORY
from gpuspawner.pool.index import HostIndex
from gpuspawner.pool.placement import Preference
from gpuspawner.pool.states import COMING, GpuState
from gpuspawner.pool.topology import HostView

_AT_ONCE = 500  # hosts in one query


class Views:
    """Snapshots of all hosts. Used in the ledger's thread alone."""

    def __init__(self, prefer: Preference = "pack") -> None:
        self._index = HostIndex(prefer)
        self.hoped = HostIndex(prefer)  # as the hosts will be once their GPUs are wiped
        self._generations: dict[str, int] = {}
        self._changes: Changes | None = None
        self._seen = 0

    def load(self, tx: Connection) -> HostIndex:
        """The hosts as they are in this transaction, until the next call. Hosts that were never
        surveyed are not among them."""
        changes = Changes.of(tx)
        if self._changes is not changes:
            names = list(tx.execute(sa.select(t.hosts.c.name)).scalars())
            self._refresh(tx, {*names, *self._index.views})
        elif changes.now != self._seen:
            self._refresh(tx, changes.since(self._seen))
        self._changes, self._seen = changes, changes.now
        return self._index

    def generation(self, host: str) -> int:
        """That of the host's view; ``KeyError`` if it has none."""
        return self._generations[host]

    def _refresh(self, tx: Connection, names: Iterable[str]) -> None:
        left = iter(names)
        while some := list(islice(left, _AT_ONCE)):
            for name in some:
                self._drop(name)
            for generation, view in _build(tx, some):
                self._index.put(view)
                self.hoped.put(view.once_wiped())
                self._generations[view.inventory.host] = generation

    def _drop(self, name: str) -> None:
        self._index.drop(name)
        self.hoped.drop(name)
        self._generations.pop(name, None)


def _build(tx: Connection, names: Collection[str]) -> Iterator[tuple[int, HostView]]:
    """Generations and views of these hosts, without those that were never surveyed."""

    def rows(of: sa.Column[str], *columns: sa.ColumnElement[Any]) -> Iterator[Any]:
        return iter(tx.execute(sa.select(of, *columns).where(of.in_(names))))

    gpus, cpus, memory = t.gpus.c, t.claimed_cpus.c, t.claimed_memory.c
    free: dict[str, set[str]] = defaultdict(set)
    coming: dict[str, set[str]] = defaultdict(set)
    for host, address, state, holds in rows(gpus.host, gpus.address, gpus.state, gpus.holds):
        if state == GpuState.UNASSIGNED and not holds:
            free[host].add(address)
        elif state in COMING and not holds:
            coming[host].add(address)
    used_cpus: dict[str, set[int]] = defaultdict(set)
    for host, cpu in rows(cpus.host, cpus.cpu):
        used_cpus[host].add(cpu)
    used_mib: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for host, node, mib in rows(memory.host, memory.node, memory.mib):
        used_mib[host][node] += mib
    addresses = Counter(host for (host,) in rows(t.claimed_addresses.c.host))
    known = t.hosts.c
    for host in rows(
        known.name, known.generation, known.settings, known.inventory, known.state, known.drained,
        known.images,
    ):  # fmt: skip
        if host.inventory is None:
            continue
        # Without the network's own address, the broadcast address and the gateway.
        network = ipaddress.ip_network(host.settings["cidr"], strict=False)
        range_size = network.num_addresses - 3
        view = HostView(
            inventory=INVENTORY.validate_python(host.inventory),
            free_gpus=frozenset(free[host.name]),
            coming_gpus=frozenset(coming[host.name]),
            used_cpus=frozenset(used_cpus[host.name]),
            used_mib=dict(used_mib[host.name]),
            drained=host.drained,
            reachable=host.state == "ready",
            connecting=host.state == "new",
            free_addresses=max(0, range_size - addresses[host.name]),
            images=frozenset(host.images),
        )
        yield host.generation, view
