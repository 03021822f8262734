"""How much of a GPU cluster a placement policy can give out: a replay of Alibaba's trace.

    python -m tests.bench.fragmentation --workload default --seeds 3 --json
    python -m tests.bench.fragmentation --all --seeds 1 --policy ours

The work is that of Weng et al., "Beware of Fragmentation" (USENIX ATC 2023): 1,213 nodes, all
empty; the request list grown by drawing from itself until it asks for 1.3 times the GPUs there
are, then shuffled; each request placed on one node or dropped, none ever leaves. One row for each
policy and seed: ``allocated_pct`` is the share of all GPU capacity given out at the end;
``allocated_at`` the same when 90 and 100 percent had been asked for, as the authors count it: the
mean over all requests that came when it was so much, rounded to whole percent. ``placements`` is
the number of decisions, ``seconds`` the CPU time of all of them. ``published`` and
``published_at`` are the means that the authors' simulator reached.

Policies (``tests/bench/policies.py``): ``Random`` and ``BestFit`` are theirs and prove the replay;
``FGD`` is their own; ``ours`` is to give out more. It is a candidate that stands here alone: the
allocator gives out whole GPUs only, and goes by what a place would strand for recent requests
(``gpuspawner/pool/choosing.py``).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from tests.bench.policies import WHOLE, Ask, BestFit, Fgd, Mix, Ours, Policy, Random, State, fits

DATA = Path(__file__).resolve().parents[3] / "shared" / "bench"
GROWN_TO = 1.3

POLICIES: dict[str, Callable[[random.Random, Mix], Policy]] = {
    "Random": Random,
    "BestFit": BestFit,
    "FGD": Fgd,
    "ours": Ours,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run gave out, in percent of the capacity, by percent asked for."""

    allocated_pct: float
    allocated_at: dict[str, float]
    placements: int


class Costs:
    """What one kind of request costs on each node, as of the last look at it."""

    def __init__(self, nodes: int) -> None:
        self.seen = 0  # changes of the pool that the costs know of
        self.era = -1
        self.by_node = [math.inf] * nodes
        self.after: list[State | None] = [None] * nodes


def replay(
    nodes: Sequence[State], asks: Sequence[Ask], policy: Policy, rng: random.Random
) -> Outcome:
    """Place a list of requests in order.

    For each kind of request the cost on every node is remembered, and worked out anew only where
    the node has changed since, or everywhere when the policy says that costs hold no more.
    """
    states = list(nodes)
    capacity = sum(len(node.gpus) for node in nodes) * WHOLE
    costs: dict[Ask, Costs] = {}
    changes: list[int] = []
    era = given = asked = 0
    at: dict[int, list[int]] = {90: [], 100: []}
    for ask in asks:
        era += policy.look(states, capacity - given)
        known = costs.get(ask)
        if known is None:
            known = costs[ask] = Costs(len(states))
        by_node = known.by_node
        _look(known, ask, states, changes, era, policy)
        lowest = min(by_node)
        asked += ask.demand
        if lowest < math.inf:
            chosen = by_node.index(lowest)
            if policy.random_ties:
                chosen = rng.choice([n for n, cost in enumerate(by_node) if cost == lowest])
            after = known.after[chosen]
            assert after is not None
            states[chosen] = after
            changes.append(chosen)
            given += ask.demand
        percent = round(100 * asked / capacity)
        if percent in at:
            at[percent].append(given)
    return Outcome(
        round(100 * given / capacity, 2),
        {
            str(percent): round(100 * fmean(sums) / capacity, 2)
            for percent, sums in at.items()
            if sums  # a short list of requests may pass by a percent
        },
        len(asks),
    )


def _look(
    known: Costs,
    ask: Ask,
    states: Sequence[State],
    changes: Sequence[int],
    era: int,
    policy: Policy,
) -> None:
    """Bring a request's costs up to date. Nodes in the same state cost the same, except where
    the policy throws a die for each."""
    numbers: Iterable[int] = set(changes[known.seen :]) if era == known.era else range(len(states))
    known.seen, known.era = len(changes), era
    alike: dict[State, tuple[float, State | None]] = {}
    for number in numbers:
        state = states[number]
        found = alike.get(state)
        if found is None:
            found = policy.way(state, ask) if fits(state, ask) else (math.inf, None)
            if not policy.random_ties:
                alike[state] = found
        known.by_node[number], known.after[number] = found


def read_nodes(folder: Path) -> list[State]:
    """The trace's nodes, empty."""
    with (folder / "openb_node_list_gpu_node.csv").open(newline="") as file:
        return [
            State(
                row["model"],
                int(row["cpu_milli"]),
                int(row["memory_mib"]),
                (WHOLE,) * int(row["gpu"]),
            )
            for row in csv.DictReader(file)
        ]


def read_asks(folder: Path, workload: str) -> list[Ask]:
    """The trace's requests in one mix."""
    with (folder / f"openb_pod_list_{workload}.csv").open(newline="") as file:
        return [
            Ask(
                int(row["cpu_milli"]),
                int(row["memory_mib"]),
                int(row["num_gpu"]),
                int(row["gpu_milli"] or 0) if int(row["num_gpu"]) else 0,
                # The mixes without this column ask for no model.
                frozenset(filter(None, (row.get("gpu_spec") or "").split("|"))),
            )
            for row in csv.DictReader(file)
        ]


def grow(asks: Sequence[Ask], capacity: int, rng: random.Random) -> list[Ask]:
    """The list with draws from itself until its GPU demand is 1.3 times the capacity, shuffled."""
    grown = list(asks)
    demand = sum(ask.demand for ask in grown)
    while demand < GROWN_TO * capacity:
        grown.append(rng.choice(asks))
        demand += grown[-1].demand
    rng.shuffle(grown)
    return grown


def published(data: Path, workload: str, policy: str, percent: str) -> float | None:
    """What the authors' simulator gave out when so much had been asked for, mean of ten runs;
    beside ``ours`` stands their FGD, the figure to beat."""
    policy = "FGD" if policy == "ours" else policy
    with (data / "published.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["workload"], row["policy"]) == (workload, policy):
                return float(row[f"allocated_at_{percent}"])
    return None


def workloads(data: Path) -> list[str]:
    """The mixes that results were published for."""
    with (data / "published.csv").open(newline="") as file:
        return sorted({row["workload"] for row in csv.DictReader(file)})


def rows(
    data: Path, workload: str, policies: Iterable[str], seeds: int
) -> Iterable[dict[str, object]]:
    """Every run's row."""
    folder = data / "openb"
    nodes, asks = read_nodes(folder), read_asks(folder, workload)
    capacity = sum(len(node.gpus) for node in nodes) * WHOLE
    for policy in policies:
        for seed in range(seeds):
            rng = random.Random(f"{workload} {seed}")
            grown = grow(asks, capacity, rng)
            started = time.process_time()
            chooser = POLICIES[policy](rng, Counter(asks).most_common())
            outcome = replay(nodes, grown, chooser, rng)
            yield {
                "workload": workload,
                "policy": policy,
                "seed": seed,
                "allocated_pct": outcome.allocated_pct,
                "allocated_at": outcome.allocated_at,
                "placements": outcome.placements,
                "seconds": round(time.process_time() - started, 2),
                "published": published(data, workload, policy, "130"),
                "published_at": {
                    percent: published(data, workload, policy, percent)
                    for percent in outcome.allocated_at
                },
            }


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--workload", default="default")
    parser.add_argument(
        "--all", action="store_true", help="every mix that results were published for"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--policy", action="append", choices=sorted(POLICIES))
    parser.add_argument("--data", type=Path, default=DATA, help="folder with openb/, published.csv")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    for workload in workloads(options.data) if options.all else [options.workload]:
        for row in rows(options.data, workload, options.policy or list(POLICIES), options.seeds):
            if options.json:
                print(json.dumps(row), flush=True)
            else:
                print("  ".join(f"{value!s:<10}" for value in row.values()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
