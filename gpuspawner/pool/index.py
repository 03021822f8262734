"""Where a request goes, without a look at every host.

``placement.place`` is the definition: it asks each host. Here hosts that are alike, which is to say
equal in all that a decision depends on but their names, are kept together, and ``place`` is asked
about the first of each group only: ties go to the host that sorts first, so it would choose no
other of them. Hosts are grouped twice:

* by each of their NUMA nodes, because a request goes onto one node wherever it can, and there are
  far fewer different nodes than different hosts; only those that suit best are asked about;
* as a whole, for requests that need several nodes, and to say why nothing fits.

So a decision costs as much as there are different nodes in the pool, however many hosts it has.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from gpuspawner.pool.choosing import Free, Mix, stranded
from gpuspawner.pool.placement import Preference, Refusal, Shortfall, on_host, place
from gpuspawner.pool.topology import Claim, HostView, Request

_REFUSED_KEPT = 8  # requests; people ask for few kinds
_AS_THEY_ARE: Mapping[str, HostView] = MappingProxyType({})


class _Node(NamedTuple):
    """All that decides whether a node takes a request, and how well it suits. ``models`` are those
    of its free GPUs in the order in which they are given out."""

    models: tuple[str, ...]
    cores: int
    memory_mib: int
    hugepages_kib: int
    images: frozenset[str]
    host_gpus: int  # free ones of the whole host, where that matters

    def takes(self, request: Request) -> bool:
        """The whole request fits here."""
        huge_mib = self.hugepages_kib // 1024
        return (
            _count(self.models, request) >= request.gpus
            and self.cores >= request.cores
            and self.memory_mib >= request.memory_mib
            and not (huge_mib and request.memory_mib % huge_mib)
            and (not request.image or request.image in self.images)
        )


class _Host(NamedTuple):
    """All that decides what a host takes, and what is said if it does not."""

    reachable: bool
    connecting: bool
    drained: bool
    has_address: bool
    hugepages_kib: int
    images: frozenset[str]
    free: int
    models: tuple[str, ...]  # of the free GPUs that can be given out
    nodes: tuple[tuple[int, int, int], ...]  # (number, free cores, free MiB)
    gpus: tuple[tuple[int, str, bool, bool, bool], ...]  # node, model, problems, free, coming

    @property
    def open(self) -> bool:
        """Servers may come here at all."""
        return self.reachable and self.has_address and not self.connecting and not self.drained

    def might_divide(self, request: Request) -> bool:
        """The request could fit onto several nodes: the host as a whole has enough."""
        return (
            request.policy != "strict"
            and self.open
            and _count(self.models, request) >= request.gpus
            and sum(cores for _, cores, _ in self.nodes) >= request.cores
            and sum(max(0, mib) for _, _, mib in self.nodes) >= request.memory_mib
        )


class HostIndex:
    """The hosts of a pool. ``prefer`` is as in ``placement.place``."""

    def __init__(self, prefer: Preference = "pack") -> None:
        self.prefer = prefer
        self._views: dict[str, HostView] = {}
        self._nodes: dict[_Node, list[str]] = {}  # names in order
        self._hosts: dict[_Host, list[str]] = {}
        # What nodes strand, by the mix that it was reckoned with.
        self._mix: Mix = ()
        self._stranded: dict[tuple[tuple[str, ...], int, int], int] = {}
        # Why a request was refused the last time, by the first host of each kind.
        self._refused: dict[Request, dict[str, tuple[_Host, Shortfall]]] = {}

    @property
    def views(self) -> Mapping[str, HostView]:
        """The hosts as they were put here, by name."""
        return MappingProxyType(self._views)

    def put(self, view: HostView) -> None:
        """Add a host, or see it anew."""
        name = view.inventory.host
        self.drop(name)
        self._views[name] = view
        host, nodes = self._kinds(view)
        insort(self._hosts.setdefault(host, []), name)
        for node in nodes:
            insort(self._nodes.setdefault(node, []), name)

    def drop(self, name: str) -> None:
        """Know a host no longer. Nothing happens if it is not known."""
        view = self._views.pop(name, None)
        if view is None:
            return
        host, nodes = self._kinds(view)
        _remove(self._hosts, host, name)
        for node in nodes:
            _remove(self._nodes, node, name)

    def place(
        self, request: Request, mix: Mix = (), instead: Mapping[str, HostView] = _AS_THEY_ARE
    ) -> Claim | Refusal:
        """What ``placement.place`` says of all hosts, except that one shortfall of a refusal
        stands for all hosts that are alike.

        :param instead: hosts that are to be seen otherwise than they were put here, by name.
        """
        alone = dict(instead)
        names: list[str] = []
        if request.home_host is None:
            names = self._best_nodes(request, mix, alone) or self._whole_hosts(request, alone)
        elif request.home_host in self._views:  # no other host takes it
            alone.setdefault(request.home_host, self._views[request.home_host])
        views = [*alone.values(), *(self._views[name] for name in names)]
        found = place(request, views, mix, self.prefer)
        return self._refusal(request, alone) if isinstance(found, Refusal) else found

    def _best_nodes(self, request: Request, mix: Mix, besides: Collection[str]) -> list[str]:
        """Hosts with a node that takes all of it, the first of each kind of node that suits best:
        as ``placement.place`` ranks them before it looks at names."""
        ranked = [
            (self._rank(node, request, mix), names[0])
            for node, names in _others(self._nodes, besides)
            if node.takes(request)
        ]
        if not ranked:
            return []
        best = min(ranked)[0]
        return sorted({name for rank, name in ranked if rank == best})

    def _rank(self, node: _Node, request: Request, mix: Mix) -> tuple[int, int, int, int]:
        suiting = [
            number for number, model in enumerate(node.models) if request.gpu_model in (None, model)
        ]
        taken = suiting[: request.gpus]
        left = tuple(model for n, model in enumerate(node.models) if n not in taken)
        cores, memory_mib = node.cores - request.cores, node.memory_mib - request.memory_mib
        strands = 0
        if mix:
            before = self._strands(node.models, node.cores, node.memory_mib, mix)
            strands = self._strands(left, cores, memory_mib, mix) - before
        return -node.host_gpus, strands, len(suiting) - request.gpus, cores

    def _strands(self, models: tuple[str, ...], cores: int, memory_mib: int, mix: Mix) -> int:
        """As ``choosing.stranded``, reckoned once for all nodes that are alike."""
        if mix != self._mix:
            self._mix = mix
            self._stranded.clear()
        key = (models, cores, memory_mib)
        if key not in self._stranded:
            self._stranded[key] = stranded(Free(cores, memory_mib, Counter(models)), mix)
        return self._stranded[key]

    def _whole_hosts(self, request: Request, besides: Collection[str]) -> list[str]:
        """The first of each kind of host that may take it on several nodes."""
        return [
            names[0] for host, names in _others(self._hosts, besides) if host.might_divide(request)
        ]

    def _refusal(self, request: Request, alone: Mapping[str, HostView]) -> Refusal:
        """What is refused once is mostly asked for again, when few hosts have changed."""
        before = self._refused.pop(request, {})
        now: dict[str, tuple[_Host, Shortfall]] = {}
        found = [_shortfall(request, view) for view in alone.values()]
        for host, (first, *others) in _others(self._hosts, alone):
            known, why = before.get(first, (None, None))
            if why is None or known is not host:
                why = _shortfall(request, self._views[first])
            now[first] = host, why
            found.append(replace(why, alike=tuple(others)) if others else why)
        self._refused[request] = now
        if len(self._refused) > _REFUSED_KEPT:
            del self._refused[next(iter(self._refused))]
        return Refusal.of(request, found)

    def _kinds(self, view: HostView) -> tuple[_Host, set[_Node]]:
        """What the host is alike others in: as a whole, and by each of its nodes if servers may
        come to it."""
        inventory = view.inventory
        cores = {node.id: len(view.free_cores(node.id)) for node in inventory.nodes}
        gpus = sorted(inventory.gpus, key=lambda gpu: gpu.address)
        models: dict[int, list[str]] = {}
        for gpu in gpus:
            if gpu.address in view.free_gpus and not gpu.problems:
                models.setdefault(gpu.node, []).append(gpu.model)
        host = _Host(
            view.reachable,
            view.connecting,
            view.drained,
            view.free_addresses > 0,
            inventory.hugepages_kib,
            view.images,
            len(view.free_gpus),
            tuple(model for node in inventory.nodes for model in models.get(node.id, ())),
            tuple((node.id, cores[node.id], view.free_mib(node.id)) for node in inventory.nodes),
            tuple(
                (
                    gpu.node,
                    gpu.model,
                    bool(gpu.problems),
                    gpu.address in view.free_gpus,
                    gpu.address in view.coming_gpus,
                )
                for gpu in gpus
            ),
        )
        if not host.open:
            return host, set()
        return host, {
            _Node(
                tuple(models.get(number, ())),
                free,
                memory_mib,
                inventory.hugepages_kib,
                view.images,
                len(view.free_gpus) if self.prefer == "spread" else 0,
            )
            for number, free, memory_mib in host.nodes
            if number >= 0
        }


def _shortfall(request: Request, view: HostView) -> Shortfall:
    found = on_host(request, view)
    assert isinstance(found, Shortfall)  # it would have been placed there
    return found


def _count(models: tuple[str, ...], request: Request) -> int:
    """How many of these the request could use."""
    return len(models) if request.gpu_model is None else models.count(request.gpu_model)


_Kind = TypeVar("_Kind", _Node, _Host)


def _others(
    groups: Mapping[_Kind, list[str]], besides: Collection[str]
) -> Iterator[tuple[_Kind, list[str]]]:
    """The groups without some hosts."""
    for kind, names in groups.items():
        others = [name for name in names if name not in besides] if besides else names
        if others:
            yield kind, others


def _remove(groups: dict[_Kind, list[str]], kind: _Kind, name: str) -> None:
    names = groups[kind]
    del names[bisect_left(names, name)]
    if not names:
        del groups[kind]
