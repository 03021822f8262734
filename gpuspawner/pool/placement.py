"""Where a request goes.

``place`` looks at every host, keeps those where the whole request fits on one NUMA node (GPUs,
whole cores and memory together), and takes the tightest fit. A request that fits nowhere is
refused with each constraint that failed and its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuspawner.pool.topology import Cell, Claim, Gpu, HostView, Request


@dataclass(frozen=True, slots=True)
class Shortfall:
    """One constraint that failed on one host. ``waiting_helps`` says that GPUs which are being
    wiped would satisfy it; ``hopeless``, that the host never has what is asked for."""

    host: str
    constraint: str  # reachable, drained, address, image, home, gpu, cores, memory
    text: str
    waiting_helps: bool = False
    hopeless: bool = False

    @property
    def nearness(self) -> int:
        """How near the host came to taking the request."""
        return -1 if self.hopeless else _NEARNESS.get(self.constraint, 0)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no host takes the request."""

    shortfalls: tuple[Shortfall, ...]

    @property
    def can_wait(self) -> bool:
        """A fitting GPU is used or being diagnosed: waiting may be enough."""
        return any(shortfall.waiting_helps for shortfall in self.shortfalls)

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


def place(request: Request, hosts: Sequence[HostView]) -> Claim | Refusal:
    """The best claim for a request, or why there is none.

    Deterministic: equal fits go to the host, node and addresses that sort first.
    """
    shortfalls: list[Shortfall] = []
    best: tuple[tuple[int, int, str, int], Claim] | None = None
    for view in hosts:
        found = _on_host(request, view)
        if isinstance(found, Shortfall):
            shortfalls.append(found)
            continue
        leftover, claim = found
        rank = (*leftover, claim.host, claim.cells[0].node)
        if best is None or rank < best[0]:
            best = (rank, claim)
    if best is not None:
        return best[1]
    # The host of the home comes first: no other could have taken the request.
    return Refusal(tuple(sorted(shortfalls, key=lambda s: (s.host != request.home_host, s.host))))


def _on_host(request: Request, view: HostView) -> tuple[tuple[int, int], Claim] | Shortfall:
    name = view.inventory.host

    def short(constraint: str, text: str, waiting: bool = False) -> Shortfall:
        return Shortfall(name, constraint, text, waiting)

    if request.gpus and request.home_host != name and not _could_ever(request, view):
        what = request.gpu_model or "GPU"
        return Shortfall(name, "gpu", f"Host {name} has no {what} to give out.", hopeless=True)
    # A home binds its server: what is wrong with its host is what the user needs to know.
    if request.home_host is not None and request.home_host != name:
        return short("home", f"Your home is on host {request.home_host}, and {name} is not it.")
    if not view.reachable and request.home_host is not None:
        return short(
            "home",
            f"Your home is on host {name}, which does not answer. Try again later; an admin sees "
            "why it does not.",
        )
    if not view.reachable:
        return short("reachable", f"Host {name} does not answer.")
    if view.drained and request.home_host is not None:
        return short(
            "home",
            f"Your home is on host {name}, which is being drained for maintenance. Try again when "
            "that is over.",
        )
    if view.drained:
        return short("drained", f"Host {name} is being drained for maintenance.")
    fits: list[tuple[tuple[int, int], Claim]] = []
    worst: Shortfall | None = None
    for node in view.inventory.nodes:
        result = _on_node(request, view, node.id)
        if isinstance(result, Shortfall):
            worst = result if worst is None else _nearer(worst, result)
        else:
            fits.append(result)
    if fits and request.image and request.image not in view.images:
        return short("image", f"The image is not on host {name} yet.", waiting=True)
    if fits:
        return min(fits, key=lambda fit: (fit[0], fit[1].cells[0].node))
    if worst is None:
        return short("gpu", f"Host {name} has no NUMA node.")
    return worst


def _could_ever(request: Request, view: HostView) -> bool:
    """The host has a GPU such as is asked for, whatever its state."""
    return any(
        found
        for node in view.inventory.nodes
        for found in _matching(request, view.inventory.gpus, node.id)
    )


def _nearer(a: Shortfall, b: Shortfall) -> Shortfall:
    """Of two failures on one host, the one that waiting helps, else the one that came nearer."""
    key_a = (a.waiting_helps, _NEARNESS[a.constraint])
    key_b = (b.waiting_helps, _NEARNESS[b.constraint])
    return b if key_b > key_a else a


def _on_node(
    request: Request, view: HostView, node_id: int
) -> tuple[tuple[int, int], Claim] | Shortfall:
    name = view.inventory.host
    cores = view.free_cores(node_id)
    free_mib = view.free_mib(node_id)
    matching = list(_matching(request, view.inventory.gpus, node_id))
    free = sorted(gpu.address for gpu in matching if gpu.address in view.free_gpus)
    coming = [gpu for gpu in matching if gpu.address in view.coming_gpus]
    enough_beside = len(cores) >= request.cores and free_mib >= request.memory_mib
    if len(free) < request.gpus:
        what = request.gpu_model or "GPU"
        text = (
            f"{request.gpus} × {what} asked for; node {node_id} of host {name} has "
            f"{len(matching)}, of which {len(free)} free"
            + (f" and {len(coming)} being wiped." if coming else ".")
        )
        helps = enough_beside and len(free) + len(coming) >= request.gpus
        return Shortfall(name, "gpu", text, helps)
    if len(cores) < request.cores:
        return Shortfall(
            name,
            "cores",
            f"{request.cores} cores asked for on node {node_id} of host {name}, beside the GPU; "
            f"{len(cores)} are free there.",
        )
    if free_mib < request.memory_mib:
        return Shortfall(
            name,
            "memory",
            f"{request.memory_mib} MiB asked for on node {node_id} of host {name}, beside the "
            f"GPU; {max(0, free_mib)} MiB are free there.",
        )
    claim = Claim(
        host=name,
        gpus=tuple(free[: request.gpus]),
        cells=(Cell(node_id, cores[: request.cores], request.memory_mib),),
    )
    leftover = (len(free) - request.gpus, len(cores) - request.cores)
    return leftover, claim


def _matching(request: Request, gpus: Iterable[Gpu], node_id: int) -> Iterable[Gpu]:
    return (
        gpu
        for gpu in gpus
        if gpu.node == node_id
        and not gpu.problems
        and (request.gpu_model is None or gpu.model == request.gpu_model)
    )
