"""Where a request goes.

``place`` asks every host whether the whole request fits there under its policy (the arithmetic is
in ``fitting``), and takes the place that strands the fewest GPUs (``choosing``), or of equals the
tightest. A request
that fits nowhere is refused with each constraint that failed and its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gpuspawner.pool.choosing import Mix, newly_stranded
from gpuspawner.pool.fitting import Need, Part, Room, on_one_node, scatter, split
from gpuspawner.pool.topology import Cell, Claim, Gpu, HostView, Request

Preference = Literal["pack", "spread"]


@dataclass(frozen=True, slots=True)
class Shortfall:
    """One constraint that failed on one host. ``waiting_helps`` says that GPUs which are being
    wiped would satisfy it; ``hopeless``, that the host never has what is asked for. ``alike`` are
    other hosts of which the same is true but for the name, where they are not listed themselves.
    """

    host: str
    constraint: str  # reachable, drained, address, image, home, gpu, cores, memory
    text: str
    waiting_helps: bool = False
    hopeless: bool = False
    alike: tuple[str, ...] = ()

    @property
    def nearness(self) -> int:
        """How near the host came to taking the request."""
        return -1 if self.hopeless else _NEARNESS.get(self.constraint, 0)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no host takes the request."""

    shortfalls: tuple[Shortfall, ...]

    @classmethod
    def of(cls, request: Request, shortfalls: Iterable[Shortfall]) -> Refusal:
        """In order of the hosts, that of the home first: no other could have taken the request."""
        return cls(tuple(sorted(shortfalls, key=lambda s: (s.host != request.home_host, s.host))))

    @property
    def can_wait(self) -> bool:
        """A fitting GPU is used or being diagnosed: waiting may be enough."""
        return any(shortfall.waiting_helps for shortfall in self.shortfalls)

    @property
    def helping(self) -> frozenset[str]:
        """The hosts on which waiting may be enough."""
        return frozenset(
            name for one in self.shortfalls if one.waiting_helps for name in (one.host, *one.alike)
        )

    @property
    def constraint(self) -> str:
        """The constraint of the host that came nearest to taking the request; of equals, the
        first."""
        if not self.shortfalls:
            return "hosts"
        return max(self.shortfalls, key=lambda s: s.nearness).constraint

    def sentence(self) -> str:
        """The reason in one sentence, the nearest fit first."""
        if not self.shortfalls:
            return "There is no GPU host in the pool."
        return max(self.shortfalls, key=lambda s: s.nearness).text


_NEARNESS = {
    "reachable": 0, "drained": 1, "address": 2, "image": 2, "home": 3, "gpu": 4, "cores": 5,
    "memory": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fit:
    """One way to place a request on one host, and what was free there before."""

    view: HostView
    rooms: tuple[Room, ...]
    parts: tuple[Part, ...]

    @property
    def tightness(self) -> tuple[int, int, str, tuple[int, ...]]:
        """Sorts the tightest fit first: fewest GPUs and then fewest cores left on its nodes;
        equal fits by the host and the nodes that sort first."""
        nodes = tuple(part.node for part in self.parts)
        used = [room for room in self.rooms if room.node in nodes]
        return (
            sum(room.gpus for room in used) - sum(part.gpus for part in self.parts),
            sum(room.cores for room in used) - sum(part.cores for part in self.parts),
            self.view.inventory.host,
            nodes,
        )


def place(
    request: Request, hosts: Sequence[HostView], mix: Mix = (), prefer: Preference = "pack"
) -> Claim | Refusal:
    """The best claim for a request, or why there is none.

    :param mix: what people ask for, so that the choice keeps room for it.
    :param prefer: ``pack`` fills hosts one after another; ``spread`` takes the host with the most
        free GPUs first, for cooling and so that a lost host ends few servers.

    Fewer NUMA nodes always come first. Deterministic: equal fits go to the host, nodes and
    addresses that sort first.
    """
    shortfalls: list[Shortfall] = []
    fits: list[Fit] = []
    for view in hosts:
        found = on_host(request, view)
        if isinstance(found, Shortfall):
            shortfalls.append(found)
        else:
            fits.extend(found)
    if not fits:
        return Refusal.of(request, shortfalls)

    def rank(fit: Fit) -> tuple[int, int, int, tuple[int, int, str, tuple[int, ...]]]:
        emptiest_first = -len(fit.view.free_gpus) if prefer == "spread" else 0
        strands = newly_stranded(fit.view, _claim(request, fit), mix) if mix else 0
        return len(fit.parts), emptiest_first, strands, fit.tightness

    return _claim(request, min(fits, key=rank))


def on_host(request: Request, view: HostView) -> list[Fit] | Shortfall:
    """The ways to place a request on one host, or the constraint that rules the host out."""
    name = view.inventory.host
    out = _out(request, view)
    if out is not None:
        return out
    huge_mib = view.inventory.hugepages_kib // 1024
    if huge_mib and request.memory_mib % huge_mib:
        text = (
            f"{request.memory_mib} MiB asked for; host {name} gives out memory in pages of "
            f"{huge_mib} MiB. Ask for a multiple of that."
        )
        return Shortfall(name, "memory", text, hopeless=True)
    need = Need(request.gpus, request.cores, request.memory_mib, huge_mib)
    rooms = _rooms(request, view, view.free_gpus)
    ways = _ways(request, need, rooms)
    if not ways:
        return _SHORT[request.policy](request, need, view, rooms)
    if request.image and request.image not in view.images:
        text = f"The image is not on host {name} yet."
        return Shortfall(name, "image", text, waiting_helps=True)
    return [Fit(view, rooms, parts) for parts in ways]


def _out(request: Request, view: HostView) -> Shortfall | None:
    """What rules a host out before anything is counted. A home binds its server: what is wrong
    with its host is what the user needs to know."""
    name = view.inventory.host
    mine = request.home_host == name
    if request.gpus and not mine and not any(_suits(request, g) for g in view.inventory.gpus):
        what = f"{request.gpus} × {request.gpu_model or 'GPU'}"
        text = f"{what} asked for; host {name} has 0 to give out."
        return Shortfall(name, "gpu", text, hopeless=True)
    if request.home_host is not None and not mine:
        text = f"Your home is on host {request.home_host}, and {name} is not it."
        return Shortfall(name, "home", text)
    if view.connecting:
        text = f"Host {name} has not been looked at yet."
        return Shortfall(name, "reachable", text, waiting_helps=True)
    if not view.reachable:
        if mine:
            text = (
                f"Your home is on host {name}, which does not answer. Try again later; an admin "
                "sees why it does not."
            )
            return Shortfall(name, "home", text)
        return Shortfall(name, "reachable", f"Host {name} does not answer.")
    if view.drained:
        if mine:
            text = (
                f"Your home is on host {name}, which is being drained for maintenance. Try again "
                "when that is over."
            )
            return Shortfall(name, "home", text)
        return Shortfall(name, "drained", f"Host {name} is being drained for maintenance.")
    if view.free_addresses < 1:
        return Shortfall(name, "address", f"All guest addresses of host {name} are in use.")
    return None


def _ways(request: Request, need: Need, rooms: Sequence[Room]) -> list[tuple[Part, ...]]:
    """The nearest that the policy allows: one node before several, each GPU beside its cores
    before scattered."""
    ways: list[tuple[Part, ...]] = [(part,) for part in on_one_node(need, rooms)]
    if not ways and request.policy != "strict":
        parts = split(need, rooms)
        if parts is None and request.policy == "any":
            parts = scatter(need, rooms)
        if parts is not None:
            ways.append(parts)
    return ways


def _rooms(request: Request, view: HostView, gpus: frozenset[str]) -> tuple[Room, ...]:
    """What is free on each node of a host, if these GPUs are.

    Node numbers may have gaps, and a node may lack GPUs, CPUs or memory. A GPU whose node is
    unknown (-1) or is not among the host's is in no room, so it is never given out.
    """
    count: dict[int, int] = {}
    for gpu in view.inventory.gpus:
        if gpu.address in gpus and _suits(request, gpu):
            count[gpu.node] = count.get(gpu.node, 0) + 1
    return tuple(
        Room(number, count.get(number, 0), len(view.free_cores(number)), view.free_mib(number))
        for number in sorted(node.id for node in view.inventory.nodes)
        if number >= 0
    )


def _matching(request: Request, view: HostView, among: frozenset[str]) -> list[str]:
    """Addresses of the GPUs that the request could use, of those given."""
    return sorted(
        gpu.address for gpu in view.inventory.gpus if gpu.address in among and _suits(request, gpu)
    )


def _suits(request: Request, gpu: Gpu) -> bool:
    return not gpu.problems and request.gpu_model in (None, gpu.model)


def _claim(request: Request, fit: Fit) -> Claim:
    """The fit in GPUs and cores by name: on each node those that sort first."""
    inventory = fit.view.inventory
    matching = _matching(request, fit.view, fit.view.free_gpus)
    gpus: list[str] = []
    for part in fit.parts:
        near = [address for address in matching if inventory.gpu(address).node == part.node]
        gpus += near[: part.gpus]
    cells = tuple(
        Cell(part.node, fit.view.free_cores(part.node)[: part.cores], part.memory_mib)
        for part in fit.parts
        if part.cores or len(fit.parts) == 1
    )
    return Claim(inventory.host, tuple(gpus), cells)


# Why a host does not take a request, in numbers.


def _waiting_helps(request: Request, need: Need, view: HostView) -> bool:
    """It would fit if the GPUs that are being wiped were free."""
    return bool(_ways(request, need, _rooms(request, view, view.free_gpus | view.coming_gpus)))


def _strict_short(request: Request, need: Need, view: HostView, rooms: Sequence[Room]) -> Shortfall:
    """The node that came nearest: one where waiting helps, else the one with the fewest
    constraints broken before it."""
    name = view.inventory.host
    if not rooms:
        return Shortfall(name, "gpu", f"Host {name} has no NUMA node.")
    after = _rooms(request, view, view.free_gpus | view.coming_gpus)
    every = _rooms(request, view, frozenset(gpu.address for gpu in view.inventory.gpus))
    nearest: Shortfall | None = None
    for room, later, all_of_it in zip(rooms, after, every, strict=True):
        where = f"on node {room.node} of host {name}, beside the GPU"
        if room.gpus < need.gpus:
            coming = later.gpus - room.gpus
            found = Shortfall(
                name,
                "gpu",
                f"{need.gpus} × {request.gpu_model or 'GPU'} asked for; node {room.node} of host "
                f"{name} has {all_of_it.gpus}, of which {room.gpus} free"
                + (f" and {coming} being wiped." if coming else "."),
                waiting_helps=bool(on_one_node(need, [later])),
            )
        elif room.cores < need.cores:
            text = f"{need.cores} cores asked for {where}; {room.cores} are free there."
            found = Shortfall(name, "cores", text)
        else:
            free = max(0, room.memory_mib)
            text = f"{need.memory_mib} MiB asked for {where}; {free} MiB are free there."
            found = Shortfall(name, "memory", text)
        if nearest is None or _near(found) > _near(nearest):
            nearest = found
    assert nearest is not None
    return nearest


def _near(shortfall: Shortfall) -> tuple[bool, int]:
    return shortfall.waiting_helps, _NEARNESS[shortfall.constraint]


def _gpu_short(
    request: Request, need: Need, view: HostView, rooms: Sequence[Room]
) -> Shortfall | None:
    """The host as a whole has too few free GPUs."""
    if sum(room.gpus for room in rooms) >= need.gpus:
        return None
    name = view.inventory.host
    every = _rooms(request, view, frozenset(gpu.address for gpu in view.inventory.gpus))
    after = _rooms(request, view, view.free_gpus | view.coming_gpus)
    free = sum(room.gpus for room in rooms)
    coming = sum(room.gpus for room in after) - free
    text = (
        f"{need.gpus} × {request.gpu_model or 'GPU'} asked for; host {name} has "
        f"{sum(room.gpus for room in every)}, of which {free} free"
        + (f" and {coming} being wiped." if coming else ".")
    )
    return Shortfall(name, "gpu", text, _waiting_helps(request, need, view))


def _split_short(request: Request, need: Need, view: HostView, rooms: Sequence[Room]) -> Shortfall:
    """Too few GPUs on the host, or too few cores or MiB beside them."""
    if need.gpus == 0:  # nothing to split by: one node or none
        return _strict_short(request, need, view, rooms)
    short = _gpu_short(request, need, view, rooms)
    if short is not None:
        return short
    plenty = [Room(room.node, room.gpus, room.cores, need.memory_mib) for room in rooms]
    constraint = "memory" if split(need, plenty) is not None else "cores"
    unit = "MiB" if constraint == "memory" else "cores"
    asked = need.memory_mib if constraint == "memory" else need.cores
    beside = ", ".join(
        f"node {room.node} {room.gpus} and "
        f"{max(0, room.memory_mib) if constraint == 'memory' else room.cores}"
        for room in rooms
        if room.gpus
    )
    name = view.inventory.host
    return Shortfall(
        name,
        constraint,
        f"{asked} {unit} asked for beside {need.gpus} × {request.gpu_model or 'GPU'}, each GPU "
        f"with its share on its own node; free GPUs and {unit} on host {name}: {beside}.",
        _waiting_helps(request, need, view),
    )


def _any_short(request: Request, need: Need, view: HostView, rooms: Sequence[Room]) -> Shortfall:
    """Too few GPUs, cores or MiB on the host as a whole."""
    short = _gpu_short(request, need, view, rooms)
    if short is not None:
        return short
    name = view.inventory.host
    usable = [room for room in rooms if room.cores and room.memory_mib >= need.page_mib]
    cores = sum(room.cores for room in usable)
    if cores < need.cores:
        each = ", ".join(f"node {room.node} {room.cores}" for room in usable) or "none"
        text = (
            f"{need.cores} cores asked for; host {name} has {cores} free on nodes that also have "
            f"memory: {each}."
        )
        return Shortfall(name, "cores", text)
    each = ", ".join(f"node {room.node} {room.memory_mib}" for room in usable) or "none"
    text = (
        f"{need.memory_mib} MiB asked for, with {need.cores} cores; host {name} has "
        f"{sum(room.memory_mib for room in usable)} MiB free on nodes that also have cores: "
        f"{each}; each node used needs a core."
    )
    return Shortfall(name, "memory", text)


_Short = Callable[[Request, Need, HostView, Sequence[Room]], Shortfall]
_SHORT: dict[str, _Short] = {"strict": _strict_short, "split": _split_short, "any": _any_short}
