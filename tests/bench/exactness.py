"""Is the fitting exact? Random small hosts and requests against a brute force of its own.

    python -m tests.bench.exactness [--cases 10000] [--seed 1]

prints ``{"cases": …, "disagreements": …, "seconds": …}`` and, to stderr, the first cases where
``place`` and the brute force differ. The brute force is written here from the rules and shares
nothing with ``gpuspawner.pool`` but the types; it lists every division with ``itertools``.

A case disagrees when ``place`` refuses what fits or accepts what does not; when its claim holds
something twice, not free, or not where its policy says; when it uses more nodes than necessary;
when it is wrong about whether waiting helps; when a refusal has no numbers; when the order of
nodes and GPUs in the inventory changes its answer, or it changed its arguments.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import sys
import time
from collections import Counter
from dataclasses import replace

from gpuspawner.pool.placement import Refusal, place
from gpuspawner.pool.topology import Claim, Gpu, HostView, Inventory, Node, Policy, Request


def random_host(rng: random.Random) -> HostView:
    """Up to four nodes with gaps in their numbers, some without CPUs, memory or GPUs; up to nine
    GPUs of two models, some of unknown node, broken, in use or being wiped."""
    numbers = rng.sample(range(8), rng.randint(1, 4))
    cpu = itertools.count()
    threads = rng.choice((1, 2))
    nodes = []
    for number in numbers:
        cores = tuple(
            tuple(next(cpu) for _ in range(threads)) for _ in range(rng.choice((0, 1, 2, 3, 4, 5)))
        )
        memory = rng.choice((0, *range(3, 14)))
        nodes.append(Node(number, cores, memory, rng.choice((0, 0, 1))))
    every_core = [core for node in nodes for core in node.cores]
    gpus = tuple(
        Gpu(
            f"0000:{0x10 + n:02x}:00.0",
            rng.choice("AAAB"),
            rng.choice((*numbers, *numbers, *numbers, -1, 9)),
            problems=("broken",) if rng.random() < 0.05 else (),
        )
        for n in range(rng.randint(0, 9))
    )
    states = {gpu.address: rng.choice(("free", "free", "free", "coming", "held")) for gpu in gpus}
    return HostView(
        Inventory(
            "h",
            "b",
            tuple(nodes),
            gpus,
            system_cores=tuple(core for core in every_core if rng.random() < 0.05),
        ),
        free_gpus=frozenset(a for a, state in states.items() if state == "free"),
        coming_gpus=frozenset(a for a, state in states.items() if state == "coming"),
        used_cpus=frozenset(core[-1] for core in every_core if rng.random() < 0.15),
        used_mib={node.id: rng.randint(0, 4) for node in nodes if rng.random() < 0.3},
    )


def random_request(rng: random.Random, view: HostView) -> Request:
    """Mostly within what the host has in all, so that where things lie decides."""
    policies: tuple[Policy, ...] = ("strict", "split", "split", "split", "any", "any")
    policy = rng.choice(policies)
    model = rng.choice((None, None, None, "A", "B"))
    in_all = Oracle(Request(0, 1, 2, model), view)
    kind = rng.choice(("whatever", "within", "per GPU", "per GPU"))
    if kind == "whatever":
        gpus, cores, memory = rng.randint(0, 5), rng.randint(1, 8), rng.randint(2, 20)
    elif kind == "within":
        gpus = min(rng.randint(1, 4), sum(in_all.gpus))
        cores = rng.randint(1, max(1, sum(in_all.cores)))
        memory = rng.randint(2, max(2, sum(in_all.memory)))
    else:
        gpus = min(rng.randint(2, 6), sum(in_all.gpus))
        cores = max(1, gpus * rng.randint(1, 2) + rng.randint(-2, 1))
        memory = max(2, gpus * rng.randint(1, 4) + rng.randint(-2, 1))
    return Request(gpus, cores, memory, gpu_model=model, policy=policy)


class Oracle:
    """What fits on a host, by trying everything."""

    def __init__(self, request: Request, view: HostView, also_coming: bool = False) -> None:
        self.request = request
        self.step = 1 if request.memory_mib % 2 else 2
        allowed = view.free_gpus | (view.coming_gpus if also_coming else frozenset())
        self.node_of = {
            gpu.address: gpu.node
            for gpu in view.inventory.gpus
            if gpu.address in allowed
            and not gpu.problems
            and request.gpu_model in (None, gpu.model)
            and any(node.id == gpu.node for node in view.inventory.nodes)
        }
        self.nodes = [node.id for node in view.inventory.nodes]
        self.gpus = [sum(n == node for n in self.node_of.values()) for node in self.nodes]
        self.cores_of = {
            node.id: [
                core
                for core in node.cores
                if core not in view.inventory.system_cores
                and not any(cpu in view.used_cpus for cpu in core)
            ]
            for node in view.inventory.nodes
        }
        self.cores = [len(self.cores_of[node]) for node in self.nodes]
        self.memory = [
            max(0, node.memory_mib - node.reserve_mib - view.used_mib.get(node.id, 0))
            for node in view.inventory.nodes
        ]

    def fewest_cells(self) -> int | None:
        """Guest cells of the best placement; ``None`` if there is none."""
        if self._strict():
            return 1
        if self.request.policy == "strict":
            return None
        split = self._split() if self.request.gpus else None
        if split is None and self.request.policy == "any":
            return self._any()
        return split

    def _strict(self) -> bool:
        wanted = self.request
        return any(
            gpus >= wanted.gpus and cores >= wanted.cores and memory >= wanted.memory_mib
            for gpus, cores, memory in zip(self.gpus, self.cores, self.memory, strict=True)
        )

    def _split(self) -> int | None:
        found = [
            sum(count > 0 for count in counts)
            for counts in itertools.product(*(range(free + 1) for free in self.gpus))
            if sum(counts) == self.request.gpus
            and self._shares_exist(counts, self.request.cores, self.cores, 1)
            and self._shares_exist(counts, self.request.memory_mib, self.memory, self.step)
        ]
        return min(found, default=None)

    def _shares_exist(
        self, counts: tuple[int, ...], total: int, free: list[int], step: int
    ) -> bool:
        choices = [
            [share for share in near(total, count, sum(counts), step) if share <= room]
            for count, room in zip(counts, free, strict=True)
            if count
        ]
        return any(sum(shares) == total for shares in itertools.product(*choices))

    def _any(self) -> int | None:
        if sum(self.gpus) < self.request.gpus:
            return None
        both = supports(self.request.cores, self.cores, 1) & supports(
            self.request.memory_mib, self.memory, self.step
        )
        return min(map(len, both), default=None)


def near(total: int, part: int, whole: int, step: int) -> list[int]:
    """The positive multiples of ``step`` that are next to ``total * part / whole``."""
    return [
        share
        for share in range(step, total + 1, step)
        if abs(share * whole - total * part) < step * whole
    ]


def supports(total: int, free: list[int], step: int) -> set[frozenset[int]]:
    """The sets of nodes over which ``total`` can be laid in steps, something on each."""
    ranges = (range(0, room + 1, step) for room in free)
    return {
        frozenset(index for index, amount in enumerate(amounts) if amount)
        for amounts in itertools.product(*ranges)
        if sum(amounts) == total
    }


def fault(request: Request, view: HostView) -> str | None:
    """What is wrong with the answer of ``place``; ``None`` if nothing."""
    before = copy.deepcopy((request, view))
    found = place(request, [view])
    if (request, view) != before:
        return "arguments were changed"
    turned = replace(
        view.inventory, nodes=view.inventory.nodes[::-1], gpus=view.inventory.gpus[::-1]
    )
    again = place(request, [replace(view, inventory=turned)])
    oracle = Oracle(request, view)
    cells = oracle.fewest_cells()
    if isinstance(found, Refusal):
        if cells is not None:
            return "refused what fits"
        if not isinstance(again, Refusal) or again.can_wait != found.can_wait:
            return "the order in the inventory changes the answer"
        if found.can_wait != (Oracle(request, view, also_coming=True).fewest_cells() is not None):
            return "wrong about waiting"
        if not any(character.isdigit() for character in found.sentence()):
            return "a refusal without numbers"
        return None
    if cells is None:
        return "accepted what does not fit"
    if found != again:
        return "the order in the inventory changes the answer"
    return claim_fault(request, oracle, found, cells)


def claim_fault(request: Request, oracle: Oracle, claim: Claim, cells: int) -> str | None:
    """What is wrong with a claim where one with this many cells was possible."""
    if len(claim.cells) != cells:
        return f"{len(claim.cells)} cells where {cells} are enough"
    if len(set(claim.gpus)) != len(claim.gpus) or not set(claim.gpus) <= set(oracle.node_of):
        return "a GPU twice, or one that is not to be had"
    sums = (len(claim.gpus), sum(len(c.cores) for c in claim.cells), claim.memory_mib)
    if sums != (request.gpus, request.cores, request.memory_mib):
        return "not what was asked for"
    if len({cell.node for cell in claim.cells}) != len(claim.cells):
        return "two cells on one node"
    free = dict(zip(oracle.nodes, oracle.memory, strict=True))
    for cell in claim.cells:
        if len(set(cell.cores)) != len(cell.cores):
            return "a core twice"
        if not cell.cores or not set(cell.cores) <= set(oracle.cores_of[cell.node]):
            return "a core that is not free there"
        if not 0 < cell.memory_mib <= free[cell.node] or cell.memory_mib % oracle.step:
            return "memory that is not free there"
    gpus_on = Counter(oracle.node_of[address] for address in claim.gpus)
    if request.policy == "strict" or (request.policy == "split" and request.gpus):
        if not set(gpus_on) <= {cell.node for cell in claim.cells}:
            return "a GPU outside the cells"
        for cell in claim.cells if request.gpus else ():
            mine = gpus_on[cell.node]
            if len(cell.cores) not in near(request.cores, mine, request.gpus, 1):
                return "cores out of proportion"
            if cell.memory_mib not in near(request.memory_mib, mine, request.gpus, oracle.step):
                return "memory out of proportion"
    return None


def faults(cases: int, seed: int) -> list[str]:
    """What is wrong in so many random cases."""
    rng = random.Random(seed)
    wrong = []
    for number in range(cases):
        view = random_host(rng)
        request = random_request(rng, view)
        text = fault(request, view)
        if text is not None:
            wrong.append(f"case {number} of seed {seed}: {text}\n  {request}\n  {view}")
    return wrong


def main() -> int:
    """Run the bench; the exit status says whether all agreed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started = time.perf_counter()
    wrong = faults(options.cases, options.seed)
    seconds = round(time.perf_counter() - started, 1)
    for text in wrong[:5]:
        print(text, file=sys.stderr)
    print(json.dumps({"cases": options.cases, "disagreements": len(wrong), "seconds": seconds}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
