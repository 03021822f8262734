"""Among places that fit, the one that leaves the pool most useful."""

from __future__ import annotations

from dataclasses import replace

from gpuspawner.pool.choosing import Free, Kind, mix_of, newly_stranded, stranded, usable
from gpuspawner.pool.placement import place
from gpuspawner.pool.topology import Claim, Request
from tests.unit.test_placement import ONE, host

PAIRS = Kind(gpus=2, cores=2, memory_mib=4096, gpu_model=None, times=3)
SMALL = Kind(gpus=1, cores=1, memory_mib=1024, gpu_model="A", times=1)


def test_usable_is_bounded_by_each_resource() -> None:
    assert usable(Free(8, 65536, {"A": 5}), PAIRS) == 4
    assert usable(Free(3, 65536, {"A": 5}), PAIRS) == 2
    assert usable(Free(8, 4095, {"A": 5}), PAIRS) == 0
    assert usable(Free(8, -5, {"A": 5}), PAIRS) == 0
    assert usable(Free(8, 65536, {"A": 1, "B": 4}), SMALL) == 1


def test_stranded_counts_each_kind_as_often_as_it_is_asked_for() -> None:
    assert stranded(Free(8, 65536, {"A": 3}), (PAIRS, SMALL)) == 3 * 1 + 0
    assert stranded(Free(0, 65536, {"A": 3}), (PAIRS, SMALL)) == 3 * 3 + 1 * 3


def test_mix_of_counts_kinds_and_leaves_out_those_without_gpus() -> None:
    asked = [ONE, ONE, replace(ONE, gpus=0), replace(ONE, gpus=2, gpu_model="A")]
    assert mix_of(asked) == (Kind(1, 2, 4096, None, 2), Kind(2, 2, 4096, "A", 1))
    assert mix_of(asked, most=1) == (Kind(1, 2, 4096, None, 2),)


def test_a_pair_is_kept_whole_for_those_who_ask_for_pairs() -> None:
    """Without a mix the tightest fit breaks the pair of h1; with it the odd GPU of h2 is taken."""
    pair = replace(host("h1", gpus=3), free_gpus=frozenset({"0000:40:00.0", "0000:42:00.0"}))
    three = host("h2", gpus=5)
    three = replace(three, free_gpus=three.free_gpus - {"0000:41:00.0", "0000:43:00.0"})
    without = place(ONE, [pair, three])
    with_mix = place(ONE, [pair, three], mix=(PAIRS,))
    assert isinstance(without, Claim)
    assert isinstance(with_mix, Claim)
    assert (without.host, with_mix.host) == ("h1", "h2")
    assert newly_stranded(three, with_mix, (PAIRS,)) == -3


def test_cores_beside_a_gpu_are_kept_for_it() -> None:
    """A server without GPUs goes where its cores strand no GPU."""
    no_gpu = Request(gpus=0, cores=3, memory_mib=2048, image="img")
    view = replace(host(gpus=2), free_gpus=frozenset({"0000:40:00.0"}))
    claim = place(no_gpu, [view], mix=(replace(PAIRS, gpus=1),))
    assert isinstance(claim, Claim)
    assert claim.cells[0].node == 1


def test_spread_takes_the_emptiest_host_and_pack_the_fullest() -> None:
    full = replace(host("h1", gpus=4), free_gpus=frozenset({"0000:40:00.0"}))
    empty = host("h2", gpus=4)
    packed, spread = place(ONE, [full, empty]), place(ONE, [full, empty], prefer="spread")
    assert isinstance(packed, Claim)
    assert isinstance(spread, Claim)
    assert (packed.host, spread.host) == ("h1", "h2")
