"""Whether a request fits on one host, exactly, and how its parts lie on the NUMA nodes.

The functions here see numbers only: how many GPUs, cores and MiB each node has free (`Room`) and
how many are asked for (`Need`). Which GPU and which core is the caller's choice, because on one
node they are all alike. Three answers, each allowing more than the one before:

* `on_one_node`: all of it on one node. The guest has one NUMA cell.
* `split`: over as few nodes as possible, each with some of the GPUs and, in proportion to them,
  its share of the cores and of the memory. The guest's cells mirror the host's nodes.
* `scatter`: GPUs anywhere; cores and memory over as few nodes as possible, in any proportion.

A guest cell always has at least one core and one page of memory of its node: QEMU takes no cell
without memory, and a guest's GPU would have no near core. So a node without free cores, or
without free memory, carries no cell; nor does it fit a share.

All three are exact: they answer ``None`` only where no division of the kind exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Need:
    """What is asked for: whole GPUs, whole cores, MiB. ``huge_mib`` is the size of the pages that
    the host makes guests' memory of, of which ``memory_mib`` must be a multiple; 0 for ordinary
    ones."""

    gpus: int
    cores: int
    memory_mib: int
    huge_mib: int = 0

    @property
    def page_mib(self) -> int:
        """Memory is divided in steps of the host's huge pages; where it has none in steps of
        2 MiB, which the kernel can make huge by itself, and an odd request in steps of 1 MiB."""
        return self.huge_mib or (1 if self.memory_mib % 2 else 2)

    @property
    def pages(self) -> int:
        """``memory_mib`` in those steps."""
        return self.memory_mib // self.page_mib


@dataclass(frozen=True, slots=True)
class Room:
    """What one node has free. GPUs of other models than the one asked for are not in it."""

    node: int
    gpus: int
    cores: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class Part:
    """What a request takes of one node. Without cores it is no cell, only GPUs."""

    node: int
    gpus: int
    cores: int
    memory_mib: int


def on_one_node(need: Need, rooms: Sequence[Room]) -> list[Part]:
    """Every node that takes all of it."""
    return [
        Part(room.node, need.gpus, need.cores, need.memory_mib)
        for room in rooms
        if room.gpus >= need.gpus
        and room.cores >= need.cores
        and room.memory_mib >= need.memory_mib
    ]


class _Sums(NamedTuple):
    """What some parts come to. A part's share of cores is a whole number next to its proportion,
    so the parts together may have any number from ``least_cores`` to ``most_cores``; so for
    memory."""

    parts: int
    gpus: int
    least_cores: int
    most_cores: int
    least_pages: int
    most_pages: int


class _Choice(NamedTuple):
    """GPUs taken of each node, and its rank: less left over first, then lower node numbers."""

    gpus_left: int
    cores_left: int
    taken: tuple[tuple[int, int], ...]  # (index of the room, GPUs)


def split(need: Need, rooms: Sequence[Room]) -> tuple[Part, ...] | None:
    """The request over as few nodes as possible, each GPU with its share on its own node.

    A node with g of the G GPUs gets the fraction g/G of the cores, rounded down or up to a whole
    core, and at least one; so for pages of memory. Two nodes with the same GPUs may so differ by
    one core: which of them gets more is decided by what each has free, then by node number.

    The search goes node by node and keeps, for each sum that can be reached, the best way to it.
    It is exact because the rest of the search depends on nothing but the sum.
    """
    if need.gpus == 0 or sum(room.gpus for room in rooms) < need.gpus:
        return None
    reached = {_Sums(0, 0, 0, 0, 0, 0): _Choice(0, 0, ())}
    for index, room in enumerate(rooms):
        for sums, choice in list(reached.items()):
            for gpus in range(1, min(room.gpus, need.gpus - sums.gpus) + 1):
                cores = _share(need.cores, gpus, need.gpus, room.cores)
                pages = _share(need.pages, gpus, need.gpus, room.memory_mib // need.page_mib)
                if cores is None or pages is None:
                    break  # more GPUs need more beside them
                after = _Sums(
                    sums.parts + 1,
                    sums.gpus + gpus,
                    sums.least_cores + cores[0],
                    sums.most_cores + cores[1],
                    sums.least_pages + pages[0],
                    sums.most_pages + pages[1],
                )
                better = _Choice(
                    choice.gpus_left + room.gpus - gpus,
                    choice.cores_left + room.cores - cores[0],
                    (*choice.taken, (index, gpus)),
                )
                if after not in reached or better < reached[after]:
                    reached[after] = better
    whole = [
        (sums.parts, choice)
        for sums, choice in reached.items()
        if sums.gpus == need.gpus
        and sums.least_cores <= need.cores <= sums.most_cores
        and sums.least_pages <= need.pages <= sums.most_pages
    ]
    if not whole:
        return None
    _, best = min(whole)
    taken = [(rooms[index], gpus) for index, gpus in best.taken]
    shares = [gpus for _, gpus in taken]
    cores_of = _divide(need.cores, shares, [room.cores for room, _ in taken])
    pages_of = _divide(need.pages, shares, [room.memory_mib // need.page_mib for room, _ in taken])
    return tuple(
        Part(room.node, gpus, cores, pages * need.page_mib)
        for (room, gpus), cores, pages in zip(taken, cores_of, pages_of, strict=True)
    )


def _share(total: int, gpus: int, of: int, free: int) -> tuple[int, int] | None:
    """The least and the most that ``gpus`` of ``of`` GPUs may have of ``total`` where ``free``
    are free; ``None`` if the least is more than that."""
    least = max(1, total * gpus // of)
    most = min(-(-total * gpus // of), free)
    return (least, most) if least <= most else None


def _divide(total: int, gpus: Sequence[int], free: Sequence[int]) -> list[int]:
    """``total`` over nodes with so many GPUs: each its least, then one more for those that are
    furthest below their proportion and have it."""
    of = sum(gpus)
    ranges = [_share(total, count, of, room) for count, room in zip(gpus, free, strict=True)]
    given = [bounds[0] for bounds in ranges if bounds is not None]
    most = [bounds[1] for bounds in ranges if bounds is not None]
    neediest = sorted(range(len(gpus)), key=lambda i: (-(total * gpus[i] % of), i))
    for index in [i for i in neediest if given[i] < most[i]][: total - sum(given)]:
        given[index] += 1
    return given


def scatter(need: Need, rooms: Sequence[Room]) -> tuple[Part, ...] | None:
    """The request anywhere on the host: cores and memory over as few nodes as possible, GPUs on
    those nodes first, then where the fewest are free.

    For each number of nodes and each number of cores on them (more than asked for is as good as
    just enough) the search keeps the nodes with the most memory.
    """
    if sum(room.gpus for room in rooms) < need.gpus:
        return None
    most: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {(0, 0): (0, ())}
    for index, room in enumerate(rooms):
        pages = room.memory_mib // need.page_mib
        if room.cores < 1 or pages < 1:
            continue
        for (count, cores), (held, chosen) in list(most.items()):
            key = (count + 1, min(need.cores, cores + room.cores))
            if count < min(need.cores, need.pages) and held + pages > most.get(key, (0, ()))[0]:
                most[key] = (held + pages, (*chosen, index))
    enough = [
        (count, -held, chosen)
        for (count, cores), (held, chosen) in most.items()
        if count and cores == need.cores and held >= need.pages
    ]
    if not enough:
        return None
    cells = min(enough)[2]
    cores_of = _pour(need.cores, [rooms[index].cores for index in cells])
    pages_of = _pour(need.pages, [rooms[index].memory_mib // need.page_mib for index in cells])
    others = [index for index in range(len(rooms)) if index not in cells]
    order = [*cells, *sorted(others, key=lambda index: rooms[index].gpus)]
    gpus_of: dict[int, int] = {}
    left = need.gpus
    for index in order:
        gpus_of[index] = min(left, rooms[index].gpus)
        left -= gpus_of[index]
    parts = [
        Part(rooms[index].node, gpus_of[index], cores, pages * need.page_mib)
        for index, cores, pages in zip(cells, cores_of, pages_of, strict=True)
    ]
    parts += [Part(rooms[i].node, gpus_of[i], 0, 0) for i in others if gpus_of[i]]
    return tuple(parts)


def _pour(total: int, free: Sequence[int]) -> list[int]:
    """``total`` into these nodes in order, each filled before the next, at least one in each."""
    given: list[int] = []
    for position, room in enumerate(free):
        for_the_rest = len(free) - position - 1
        given.append(min(room, total - sum(given) - for_the_rest))
    return given
