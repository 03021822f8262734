"""The replay's arithmetic, on clusters small enough to reckon by hand."""

from __future__ import annotations

import random

from tests.bench.fragmentation import grow, replay
from tests.bench.policies import Ask, BestFit, Fgd, Ours, State, choices, fits, take

SHARE = Ask(1000, 100, 1, 600, frozenset())
PAIR = Ask(2000, 100, 2, 1000, frozenset())
NODE = State("A", 4000, 1000, (300, 700, 700, 1000, 1000))


def test_fits_looks_at_every_resource_and_the_model() -> None:
    assert fits(NODE, PAIR)
    assert not fits(NODE, PAIR._replace(gpus=3))
    assert not fits(NODE, PAIR._replace(cpu=4001))
    assert not fits(NODE, PAIR._replace(memory=1001))
    assert not fits(NODE, PAIR._replace(models=frozenset("B")))


def test_a_share_has_a_choice_for_each_different_gpu_and_whole_gpus_have_one() -> None:
    assert [NODE.gpus[index] for index in choices(NODE, SHARE)] == [700, 1000]
    assert take(NODE, PAIR, choices(NODE, PAIR)[0]).gpus == (0, 0, 300, 700, 700)


def test_a_replay_gives_out_what_fits_and_drops_the_rest() -> None:
    rng = random.Random(1)
    nodes = [State("A", 4000, 1000, (1000, 1000)), State("A", 1000, 1000, (1000, 1000))]
    for policy in (BestFit(rng, []), Fgd(rng, [(SHARE, 1)]), Ours(rng, [(SHARE, 1)])):
        outcome = replay(nodes, [PAIR, PAIR, SHARE], policy, rng)
        assert outcome.allocated_pct == 65.0
        assert outcome.placements == 3


def test_growing_reaches_the_demand() -> None:
    grown = grow([SHARE, PAIR], 10_000, random.Random(1))
    assert 13_000 <= sum(ask.gpus * ask.milli for ask in grown) < 15_000
