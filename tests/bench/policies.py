"""Placement policies for the replay of a trace: what a node can hold, and what a place costs.

``Random`` and ``BestFit`` are those of Weng et al., "Beware of Fragmentation" (USENIX ATC 2023),
``FGD`` is their own; all three written anew from how they score. ``ours`` is the candidate.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

WHOLE = 1000  # thousandths of a GPU


class Ask(NamedTuple):
    """A request: CPU and GPU in thousandths, memory in MiB; no models means any."""

    cpu: int
    memory: int
    gpus: int
    milli: int  # of each GPU
    models: frozenset[str]

    @property
    def demand(self) -> int:
        """Thousandths of GPUs in all."""
        return self.gpus * self.milli


class State(NamedTuple):
    """What a node has free; ``gpus`` in ascending order, because equal GPUs are alike."""

    model: str
    cpu: int
    memory: int
    gpus: tuple[int, ...]


class Way(NamedTuple):
    """One way to place a request on a node: its cost, lower is better, and the state after."""

    cost: float
    after: State


Mix = Sequence[tuple[Ask, int]]  # what is asked for, and how often


class Policy(Protocol):
    """What the replay asks of a policy."""

    random_ties: bool  # else the node that comes first by name

    def way(self, state: State, ask: Ask) -> Way:
        """The best way to place a request on a node where it fits."""

    def look(self, states: Sequence[State], free: int) -> bool:
        """See the whole pool before a decision, and how many thousandths of its GPUs are free.
        True if costs given earlier hold no more."""


def fits(state: State, ask: Ask) -> bool:
    """Whether a node has all that is asked for."""
    return (
        state.cpu >= ask.cpu
        and state.memory >= ask.memory
        and (
            not ask.gpus
            or (
                len(state.gpus) >= ask.gpus
                and state.gpus[-ask.gpus] >= ask.milli
                and (not ask.models or state.model in ask.models)
            )
        )
    )


def take(state: State, ask: Ask, index: int) -> State:
    """The state after a request; ``index`` is the first of the GPUs that it takes."""
    model, cpu, memory, gpus = state
    if ask.gpus:
        left = list(gpus)
        for position in range(index, index + ask.gpus):
            left[position] -= ask.milli
        left.sort()
        gpus = tuple(left)
    return State(model, cpu - ask.cpu, memory - ask.memory, gpus)


def choices(state: State, ask: Ask) -> list[int]:
    """The GPUs to choose from: for whole GPUs all are alike, for a share each different one."""
    if ask.gpus == 0:
        return [0]
    if ask.gpus > 1 or ask.milli == WHOLE:
        return [len(state.gpus) - ask.gpus]
    seen = {left: position for position, left in enumerate(state.gpus) if left >= ask.milli}
    return sorted(seen.values())


class _Blind:
    """A policy that sees one node at a time."""

    random_ties = False

    def __init__(self, _rng: random.Random, _mix: Mix) -> None:
        pass

    def look(self, _states: Sequence[State], _free: int) -> bool:
        """Nothing to learn from the pool."""
        return False


class Random(_Blind):
    """Any node, any GPU of it that has room."""

    random_ties = True

    def __init__(self, rng: random.Random, _mix: Mix) -> None:
        self.rng = rng

    def way(self, state: State, ask: Ask) -> Way:
        """All nodes cost the same."""
        if ask.gpus == 1 and ask.milli < WHOLE:
            able = [n for n, left in enumerate(state.gpus) if left >= ask.milli]
            return Way(0, take(state, ask, self.rng.choice(able)))
        return Way(0, take(state, ask, choices(state, ask)[0]))


class BestFit(_Blind):
    """The node with the least CPU and GPU left, in steps of a percent; the fullest GPU."""

    def way(self, state: State, ask: Ask) -> Way:
        """CPU counts as much as GPU, each relative to a large node."""
        after = take(state, ask, choices(state, ask)[0])
        left = after.cpu / 128_000 / 2 + sum(after.gpus) / 8_000 / 2
        return Way(-int((1 - left) * 100), after)


class _Shape(NamedTuple):
    """The kinds of request that want the same of GPUs, by the CPU that they want beside it."""

    gpus: int
    milli: int
    models: frozenset[str]
    cpus: list[int]  # ascending


class _Room(NamedTuple):
    """What some GPUs have for a shape: for how many requests, and the thousandths on GPUs where
    one finds room."""

    shape: int
    times: int
    usable: int


class Strands:
    """How many thousandths of a node's GPUs are of no use to a weighted mix of kinds.

    Two measures are added. The next request of a kind finds useless: all GPUs of a node where it
    does not fit, else those with too little left; that is FGD's. And when a node is *filled* with
    requests of the kind, so much remains; times ``filling``. That one sees that the CPU will not
    last for all GPUs, and that a half-used GPU has room for one share, not two.

    Memory is left out, as in FGD: in this trace it hardly ever is what lacks. What a kind finds
    then depends on its GPUs and on the CPU alone, each of few values, so that tables do for most
    of the work: min(t, cpu // c) requests of c CPU fit beside GPUs for t, which is how many of c,
    2c, ..., tc are no more than the CPU there is.
    """

    def __init__(self, kinds: Iterable[Ask], filling: float, step: int = 1) -> None:
        """CPU is counted in steps of so many thousandths, against the request."""
        self.filling, self.step = filling, step
        self.kinds = [ask._replace(memory=0, cpu=-(-ask.cpu // step)) for ask in kinds]
        by_shape: dict[tuple[int, int, frozenset[str]], set[int]] = defaultdict(set)
        for ask in self.kinds:
            if ask.gpus:
                by_shape[ask.gpus, ask.milli, ask.models].add(ask.cpu)
        self.shapes = [_Shape(*shape, sorted(cpus)) for shape, cpus in by_shape.items()]
        self._sizes = [filling * shape.gpus * shape.milli for shape in self.shapes]
        self._rooms: dict[tuple[str, tuple[int, ...]], list[_Room]] = {}
        self.weigh([1.0] * len(self.kinds))

    def weigh(self, weights: Sequence[float]) -> None:
        """Give each kind a weight; those without GPUs can use none."""
        weight_of: dict[Ask, float] = defaultdict(float)
        for ask, weight in zip(self.kinds, weights, strict=True):
            weight_of[ask] += weight  # kinds may differ in memory alone
        self._sums = [  # of the kinds with up to so much CPU together
            [0.0, *accumulate(weight_of[Ask(cpu, 0, s.gpus, s.milli, s.models)] for cpu in s.cpus)]
            for s in self.shapes
        ]
        self._total = sum(weights) + self.filling * sum(sums[-1] for sums in self._sums)
        self._beside: dict[int, list[list[float]]] = {}
        self._known: dict[tuple[str, int, tuple[int, ...]], float] = {}

    def of(self, state: State) -> float:
        """Thousandths, weighted; what no kind can use counts with all the weights."""
        cpu = state.cpu // self.step
        key = (state.model, cpu, state.gpus)
        known = self._known.get(key)
        if known is None:
            known = self._total * sum(state.gpus) - self._useful(*key)
            self._known[key] = known
        return known

    def rooms(self, model: str, gpus: tuple[int, ...]) -> list[_Room]:
        """The shapes that some GPUs have room for."""
        key = (model, gpus)
        known = self._rooms.get(key)
        if known is None:
            known = self._rooms[key] = []
            for number, shape in enumerate(self.shapes):
                able = [left for left in gpus if left >= shape.milli]
                if len(able) < shape.gpus or (shape.models and model not in shape.models):
                    continue
                if shape.gpus == 1:
                    times = sum([left // shape.milli for left in able])
                else:
                    times = len(able) // shape.gpus
                known.append(_Room(number, times, sum(able)))
        return known

    def _useful(self, model: str, cpu: int, gpus: tuple[int, ...]) -> float:
        """Thousandths that the kinds can use, weighted, in both measures."""
        beside = self._beside.get(cpu)
        if beside is None:
            beside = self._beside[cpu] = [
                [0.0, sums[bisect_right(shape.cpus, cpu)]]
                for shape, sums in zip(self.shapes, self._sums, strict=True)
            ]
        useful, sizes = 0.0, self._sizes
        for number, times, usable in self.rooms(model, gpus):
            # Of each number of requests: the weights of those kinds of which so many fit, summed.
            fitting = beside[number]
            if times >= len(fitting):
                self._extend(fitting, number, times, cpu)
            useful += usable * fitting[1] + sizes[number] * fitting[times]
        return useful

    def _extend(self, fitting: list[float], number: int, times: int, cpu: int) -> None:
        cpus, sums = self.shapes[number].cpus, self._sums[number]
        for filled in range(len(fitting), times + 1):
            fitting.append(fitting[-1] + sums[bisect_right(cpus, cpu // filled)])


class Fgd(_Blind):
    """The place that adds the least to the GPU thousandths that the mix cannot use.

    As published: the mix is its most frequent kinds that make up 95 percent; the score is a
    sigmoid of the difference in whole GPUs, cut to whole percent; of equals the first by name.
    Scores are so coarse that most places are equal, so the order by name decides much: broken at
    random, the last step costs several points where all requests are shares.
    """

    def __init__(self, _rng: random.Random, mix: Mix) -> None:
        enough = 0.95 * sum(times for _, times in mix)
        most: list[tuple[Ask, float]] = []
        for ask, times in sorted(mix, key=lambda kind: -kind[1]):
            if sum(n for _, n in most) >= enough:
                break
            most.append((ask, times))
        whole = sum(n for _, n in most)
        self.strands = Strands([ask for ask, _ in most], filling=0)
        self.strands.weigh([n / whole for _, n in most])

    def way(self, state: State, ask: Ask) -> Way:
        """Of the GPUs of a node, the first by what it has left."""
        before = self.strands.of(state)
        ways = []
        for index in choices(state, ask):
            after = take(state, ask, index)
            grown = (self.strands.of(after) - before) / WHOLE
            ways.append(Way(-int(100 / (1 + math.exp(grown))), after))
        return min(ways, key=lambda way: way.cost)


class Ours:
    """The place that strands the fewest GPUs at their price.

    Beside what the next request could not use stands a fifth of what would remain if the node were
    filled with one kind (``Strands``). And each kind counts not only as often as it is asked for,
    but also by how scarce its places are: all free GPUs over those that a pool filled with it
    would use. So the few nodes that can take eight GPUs with many cores, and models that some ask
    for by name, are spared for those who can use nothing else, the more the fewer are left. Prices
    are set anew whenever a tenth of what was free is gone.
    """

    EVERY = 0.9  # of what was free when prices were set last
    STEP = 1000  # thousandths of a CPU: many states then are the same
    random_ties = False

    def __init__(self, _rng: random.Random, mix: Mix) -> None:
        kinds = [(ask, times) for ask, times in mix if ask.gpus]
        total = sum(times for _, times in kinds)
        self.strands = Strands([ask for ask, _ in kinds], filling=0.2, step=self.STEP)
        self.shares = [times / total for _, times in kinds]
        self.next_prices = math.inf

    def look(self, states: Sequence[State], free: int) -> bool:
        """Set the prices, when it is time."""
        if free > self.next_prices:
            return False
        self.next_prices = self.EVERY * free
        places = self._places(states)
        prices = [free / max(places[ask], ask.demand) for ask in self.strands.kinds]
        self.strands.weigh(
            [share * price for share, price in zip(self.shares, prices, strict=True)]
        )
        return True

    def _places(self, states: Sequence[State]) -> Counter[Ask]:
        """Thousandths in use when the pool is filled with one kind, for each."""
        places: Counter[Ask] = Counter()
        shapes = self.strands.shapes
        alike = Counter((state.model, state.cpu // self.STEP, state.gpus) for state in states)
        for (model, cpu, gpus), count in alike.items():
            for number, times, _ in self.strands.rooms(model, gpus):
                _, milli, models, cpus = shape = shapes[number]
                for wanted in cpus:
                    filled = min(times, cpu // wanted) if wanted else times
                    if filled:
                        ask = Ask(wanted, 0, shape.gpus, milli, models)
                        places[ask] += filled * count * ask.demand
        return places

    def way(self, state: State, ask: Ask) -> Way:
        """The difference that each GPU makes."""
        before = self.strands.of(state)
        ways = []
        for index in choices(state, ask):
            after = take(state, ask, index)
            ways.append(Way(round(self.strands.of(after) - before, 6), after))
        return min(ways, key=lambda way: way.cost)
