"""Does a request fit on a host, and how long does the answer take? Ours and Nova's, side by side.

    python -m tests.bench.fit_vs_nova --json [--cases 300] [--seed 1]

The same hosts and requests go through ``pool.placement.place`` and through Nova's
``numa_fit_instance_to_host`` (nova 34.0.0, in a virtual environment of its own, made at the first
run). Guest cells are equal, CPUs are dedicated, memory is made of 1 GiB pages, GPUs must be on the
guest's nodes. So that both are asked the same thing, a request of several cells asks for one GPU
each and no node has more than one. Seconds are CPU time of the one call, without the making of its
arguments.

Where the two differ, a brute force decides (all choices of nodes); ``ours_wrong`` and
``nova_wrong`` count whose error it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from statistics import median
from typing import Any

from gpuspawner.pool.placement import place
from gpuspawner.pool.topology import Claim, Gpu, HostView, Inventory, Node, Request
from tests.bench.figures import machine, versions
from tests.bench.rivals import ask, environment

NOVA = "nova==34.0.0"
Case = dict[str, Any]

EIGHT = [{"cpus": 32, "gib": 256, "gpus": 1} for _ in range(8)]
IMPOSSIBLE: dict[str, Case] = {
    "8 nodes, 4 cells, GPUs on 3 nodes": {
        "nodes": [{**node, "gpus": int(number < 3)} for number, node in enumerate(EIGHT)],
        "request": {"cells": 4, "cpus": 16, "gib": 64, "gpus": 4},
        "known": True,
    },
    "8 nodes, 4 cells, GPUs on unknown nodes": {
        "nodes": EIGHT,
        "request": {"cells": 4, "cpus": 16, "gib": 64, "gpus": 4},
        "known": False,
    },
}


def random_case(rng: random.Random) -> Case:
    """A host that is partly in use, and a request of one to three equal cells."""
    count = rng.choice((2, 4, 8))
    cells = rng.choice((1, 1, 2, 3)) if count > 2 else rng.choice((1, 2))
    most = 4 if cells == 1 else 1
    nodes = [
        {"cpus": rng.randint(0, 32), "gib": rng.randint(0, 256), "gpus": rng.randint(0, most)}
        for _ in range(count)
    ]
    each = {"cpus": rng.choice((4, 8, 16)), "gib": rng.choice((16, 64, 128))}
    gpus = rng.randint(0, most) if cells == 1 else cells
    return {"nodes": nodes, "request": {"cells": cells, **each, "gpus": gpus}, "known": True}


def ours(case: Case) -> tuple[Request, HostView]:
    """The case in our own types."""
    cpu = itertools.count()
    nodes, gpus = [], []
    for number, node in enumerate(case["nodes"]):
        cores = tuple((next(cpu),) for _ in range(node["cpus"]))
        nodes.append(Node(number, cores, node["gib"] * 1024))
        for _ in range(node["gpus"]):
            where = number if case["known"] else -1
            gpus.append(Gpu(f"0000:{len(gpus) + 16:02x}:00.0", "A", where))
    wanted = case["request"]
    request = Request(
        gpus=wanted["gpus"],
        cores=wanted["cpus"] * wanted["cells"],
        memory_mib=wanted["gib"] * 1024 * wanted["cells"],
        policy="strict" if wanted["cells"] == 1 else "split",
    )
    inventory = Inventory("h", "b", tuple(nodes), tuple(gpus), hugepages_kib=1 << 20)
    return request, HostView(inventory, frozenset(gpu.address for gpu in gpus))


def fits(case: Case) -> bool:
    """By trying every choice of nodes."""
    wanted = case["request"]
    able = [
        node["gpus"] if case["known"] else 0
        for node in case["nodes"]
        if node["cpus"] >= wanted["cpus"] and node["gib"] >= wanted["gib"]
    ]
    choices = itertools.combinations(able, wanted["cells"])
    return any(sum(chosen) >= wanted["gpus"] for chosen in choices)


def timed(case: Case) -> tuple[bool, float]:
    """Whether ours fits it, and the CPU seconds of the call (the best of five: the clock ticks
    coarsely beside it)."""
    request, view = ours(case)
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        found = place(request, [view])
        best = min(best, time.process_time() - began)
    return isinstance(found, Claim), best


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the only form there is")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    cases = [random_case(rng) for _ in range(options.cases)]
    python = environment("Nova", NOVA)
    before = machine()
    ratios, wrong = [], {"ours_wrong": 0, "nova_wrong": 0}
    ours_s, nova_s = [], []
    for case, theirs in zip(cases, ask(python, "nova_side.py", cases), strict=True):
        fitted, seconds = timed(case)
        truth = fits(case)
        wrong["ours_wrong"] += fitted != truth
        wrong["nova_wrong"] += (theirs["cells"] is not None) != truth
        if fitted and theirs["cells"] is not None:
            ours_s.append(seconds)
            nova_s.append(theirs["seconds"])
            ratios.append(theirs["seconds"] / seconds)
    impossible = {}
    answers = ask(python, "nova_side.py", IMPOSSIBLE.values())
    for (name, case), theirs in zip(IMPOSSIBLE.items(), answers, strict=True):
        fitted, seconds = timed(case)
        assert not fitted
        assert theirs["cells"] is None
        impossible[name] = {
            "ours_ms": round(seconds * 1000, 3),
            "nova_ms": round(theirs["seconds"] * 1000, 1),
        }
    result = {
        "versions": {**versions(), "nova": NOVA},
        "machine": {"before": before, "after": machine()},
        "cases": len(cases),
        **wrong,
        "feasible": {
            "n": len(ratios),
            "ours_ms": round(median(ours_s) * 1000, 3),
            "nova_ms": round(median(nova_s) * 1000, 3),
            "times_faster": round(median(ratios), 1),
        },
        "impossible": impossible,
    }
    print(json.dumps(result, indent=2))
    return 1 if wrong["ours_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
