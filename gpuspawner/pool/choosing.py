"""Which of several places: the one that leaves the pool most useful for what is asked for.

A free GPU is *stranded* for a kind of request when requests of that kind could not use it: too
few GPUs beside it, or too few cores, or too little memory. Counted over the kinds that people do
ask for, each as often as it is asked for, that is the measure of Weng et al., "Beware of
Fragmentation" (USENIX ATC 2023), here per NUMA node. Of two places, the better is the one that
strands fewer GPUs.

Everything is counted in whole numbers, so equal places are equal on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpuspawner.pool.topology import Claim, HostView, Request


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request, and how often it was made. Only kinds with GPUs strand any."""

    gpus: int
    cores: int
    memory_mib: int
    gpu_model: str | None
    times: int


Mix = tuple[Kind, ...]


def mix_of(requests: Iterable[Request], most: int = 32) -> Mix:
    """The kinds among some requests, the ``most`` frequent ones; ties in order of size."""
    kinds = Counter((r.gpus, r.cores, r.memory_mib, r.gpu_model or "") for r in requests if r.gpus)
    ranked = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))[:most]
    return tuple(Kind(*shape[:3], shape[3] or None, times) for shape, times in ranked)


@dataclass(frozen=True, slots=True)
class Free:
    """What one node has free: GPUs of each model, cores, MiB."""

    cores: int
    memory_mib: int
    gpus: Mapping[str, int] = field(default_factory=dict)


def usable(free: Free, kind: Kind) -> int:
    """GPUs of a node that requests of one kind, and no others, could use at the same time."""
    fitting = sum(n for model, n in free.gpus.items() if kind.gpu_model in (None, model))
    times = fitting // kind.gpus
    if kind.cores:
        times = min(times, free.cores // kind.cores)
    if kind.memory_mib:
        times = min(times, max(0, free.memory_mib) // kind.memory_mib)
    return times * kind.gpus


def stranded(free: Free, mix: Mix) -> int:
    """GPUs of a node that each kind could not use, summed with its frequency. Divided by all
    the frequencies it is the number of GPUs that an average request finds useless."""
    total = sum(free.gpus.values())
    return sum(kind.times * (total - usable(free, kind)) for kind in mix)


def newly_stranded(view: HostView, claim: Claim, mix: Mix) -> int:
    """How much a claim adds to what is stranded on its host. Negative where it takes GPUs that
    were stranded already, which is the best that can be done with them."""
    if not mix:
        return 0
    taken = {address: view.inventory.gpu(address) for address in claim.gpus}
    cells = {cell.node: cell for cell in claim.cells}
    added = 0
    for node in sorted({*cells, *(gpu.node for gpu in taken.values())}):
        before = Counter(
            gpu.model
            for gpu in view.inventory.gpus
            if gpu.node == node and gpu.address in view.free_gpus and not gpu.problems
        )
        after = before - Counter(gpu.model for gpu in taken.values() if gpu.node == node)
        cores, memory_mib = len(view.free_cores(node)), view.free_mib(node)
        cell = cells.get(node)
        left = Free(
            cores - (len(cell.cores) if cell else 0),
            memory_mib - (cell.memory_mib if cell else 0),
            after,
        )
        added += stranded(left, mix) - stranded(Free(cores, memory_mib, before), mix)
    return added
