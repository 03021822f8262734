"""Where requests go, and what is said when they go nowhere."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.pool.fitting import Need, Room, split
from gpuspawner.pool.placement import Refusal, place
from gpuspawner.pool.topology import Cell, Claim, Gpu, HostView, Inventory, Node, Policy, Request
from tests.bench.exactness import faults


def host(
    name: str = "h1",
    gpus: int = 2,
    cores: int = 4,
    memory_mib: int = 16384,
    reserve_mib: int = 1024,
) -> HostView:
    """Two nodes with two threads a core; GPU n on node n % 2, all free."""
    nodes = tuple(
        Node(
            n,
            tuple((n * cores + c, 100 + n * cores + c) for c in range(cores)),
            memory_mib,
            reserve_mib,
        )
        for n in range(2)
    )
    cards = tuple(Gpu(f"0000:{0x40 + n:02x}:00.0", "A", n % 2) for n in range(gpus))
    return HostView(
        Inventory(name, "b", nodes, cards),
        free_gpus=frozenset(card.address for card in cards),
        images=frozenset({"img"}),
    )


ONE = Request(gpus=1, cores=2, memory_mib=4096, image="img")


def test_gpu_cores_and_memory_are_of_one_node() -> None:
    claim = place(ONE, [host()])
    assert isinstance(claim, Claim)
    assert claim.gpus == ("0000:40:00.0",)
    assert claim.cells[0].node == 0
    assert claim.cpus == (0, 100, 1, 101), "whole cores, siblings together"


def test_the_tightest_host_is_taken_first() -> None:
    full = replace(host("h2"), free_gpus=frozenset({"0000:41:00.0"}))
    claim = place(ONE, [host("h1", gpus=4), full])
    assert isinstance(claim, Claim)
    assert claim.host == "h2"


def test_memory_elsewhere_does_not_help() -> None:
    view = replace(host(), used_mib={0: 12000, 1: 12000})
    refusal = place(ONE, [view])
    assert isinstance(refusal, Refusal)
    assert refusal.constraint == "memory"
    assert "4096 MiB asked for on node" in refusal.sentence()
    assert "3360 MiB are free there" in refusal.sentence()


@pytest.mark.parametrize(
    ("view", "request_", "constraint"),
    [
        (replace(host(), reachable=False), ONE, "reachable"),
        (replace(host(), drained=True), ONE, "drained"),
        (host(), replace(ONE, home_host="h9"), "home"),
        (host(), replace(ONE, image="other"), "image"),
        (host(), replace(ONE, gpus=2), "gpu"),
        (host(), replace(ONE, gpu_model="B"), "gpu"),
        (host(), replace(ONE, cores=5), "cores"),
        (host(), replace(ONE, memory_mib=16000), "memory"),
    ],
)
def test_every_refusal_names_its_constraint(
    view: HostView, request_: Request, constraint: str
) -> None:
    refusal = place(request_, [view])
    assert isinstance(refusal, Refusal)
    assert refusal.constraint == constraint
    assert refusal.sentence()


def test_no_host_at_all() -> None:
    refusal = place(ONE, [])
    assert isinstance(refusal, Refusal)
    assert refusal.sentence() == "There is no GPU host in the pool."


def test_waiting_helps_only_where_the_rest_fits() -> None:
    coming = replace(host(), free_gpus=frozenset(), coming_gpus=frozenset({"0000:40:00.0"}))
    refusal = place(ONE, [coming])
    assert isinstance(refusal, Refusal)
    assert refusal.can_wait
    hopeless = place(replace(ONE, cores=5), [coming])
    assert isinstance(hopeless, Refusal)
    assert not hopeless.can_wait


def test_a_gpu_with_a_problem_is_none() -> None:
    view = host(gpus=1)
    broken = replace(view.inventory.gpus[0], problems=("node unknown",))
    view = replace(view, inventory=replace(view.inventory, gpus=(broken,)))
    assert isinstance(place(ONE, [view]), Refusal)


requests = st.builds(
    Request,
    gpus=st.integers(0, 3),
    cores=st.integers(1, 6),
    memory_mib=st.integers(256, 20000),
    image=st.just("img"),
)


@given(st.lists(requests, max_size=12))
def test_claims_never_overlap_and_keep_the_reserve(wanted: list[Request]) -> None:
    """Whatever is asked for in whatever order: no GPU and no CPU twice, the reserve is kept, and
    what was refused does not fit."""
    view = host(gpus=4)
    held: list[Claim] = []
    for request in wanted:
        found = place(request, [view])
        if isinstance(found, Refusal):
            assert not _fits_somewhere(request, view)
            continue
        held.append(found)
        used = dict(view.used_mib)
        for cell in found.cells:
            used[cell.node] = used.get(cell.node, 0) + cell.memory_mib
        view = replace(
            view,
            free_gpus=view.free_gpus - set(found.gpus),
            used_cpus=view.used_cpus | set(found.cpus),
            used_mib=used,
        )
    gpus = [gpu for claim in held for gpu in claim.gpus]
    cpus = [cpu for claim in held for cpu in claim.cpus]
    assert len(gpus) == len(set(gpus))
    assert len(cpus) == len(set(cpus))
    for node in view.inventory.nodes:
        assert view.used_mib.get(node.id, 0) <= node.memory_mib - node.reserve_mib


def _fits_somewhere(request: Request, view: HostView) -> bool:
    return any(
        len([g for g in view.inventory.gpus if g.node == n.id and g.address in view.free_gpus])
        >= request.gpus
        and len([c for c in n.cores if not view.used_cpus & set(c)]) >= request.cores
        and n.memory_mib - n.reserve_mib - view.used_mib.get(n.id, 0) >= request.memory_mib
        for n in view.inventory.nodes
    )


def test_three_hundred_random_cases_agree_with_a_brute_force() -> None:
    assert faults(300, seed=7) == []


FOUR = Request(gpus=4, cores=5, memory_mib=9000, image="img", policy="split")


def test_split_gives_each_gpu_its_share_on_its_own_node() -> None:
    view = host(gpus=4)
    claim = place(FOUR, [view])
    assert isinstance(claim, Claim)
    assert claim.cells == (
        Cell(0, ((0, 100), (1, 101), (2, 102)), 4500),
        Cell(1, ((4, 104), (5, 105)), 4500),
    )
    assert claim.gpus == ("0000:40:00.0", "0000:42:00.0", "0000:41:00.0", "0000:43:00.0")


def test_split_takes_uneven_numbers_of_gpus_in_proportion() -> None:
    view = replace(host(gpus=4, cores=8), free_gpus=host(gpus=4).free_gpus - {"0000:43:00.0"})
    claim = place(replace(FOUR, gpus=3, cores=6, memory_mib=9000), [view])
    assert isinstance(claim, Claim)
    assert [(len(cell.cores), cell.memory_mib) for cell in claim.cells] == [(4, 6000), (2, 3000)]


def test_the_odd_core_goes_where_there_is_one() -> None:
    """Five cores for two and two GPUs: node 0 has only two left, so node 1 gives three."""
    view = replace(host(gpus=4), used_cpus=frozenset({0, 1}))
    claim = place(FOUR, [view])
    assert isinstance(claim, Claim)
    assert [len(cell.cores) for cell in claim.cells] == [2, 3]


def test_split_and_any_stay_on_one_node_where_they_can() -> None:
    policies: tuple[Policy, ...] = ("split", "any")
    for policy in policies:
        claim = place(replace(FOUR, gpus=2, cores=4, policy=policy), [host(gpus=4)])
        assert isinstance(claim, Claim)
        assert [cell.node for cell in claim.cells] == [0]


def test_any_takes_gpus_far_from_their_cores() -> None:
    view = replace(host(gpus=4), used_cpus=frozenset({0, 1, 2, 3}))
    assert isinstance(place(replace(FOUR, cores=4), [view]), Refusal)
    claim = place(replace(FOUR, cores=4, policy="any"), [view])
    assert isinstance(claim, Claim)
    assert [cell.node for cell in claim.cells] == [1]
    assert len(claim.gpus) == 4


def test_refusals_of_several_nodes_show_what_each_has() -> None:
    short = place(replace(FOUR, memory_mib=40000), [host(gpus=4)])
    assert isinstance(short, Refusal)
    assert short.constraint == "memory"
    assert short.sentence() == (
        "40000 MiB asked for beside 4 × GPU, each GPU with its share on its own node; free GPUs "
        "and MiB on host h1: node 0 2 and 15360, node 1 2 and 15360."
    )
    far = place(replace(FOUR, cores=9, policy="any"), [host(gpus=4)])
    assert isinstance(far, Refusal)
    assert far.sentence() == (
        "9 cores asked for; host h1 has 8 free on nodes that also have memory: node 0 4, node 1 4."
    )
    few = place(replace(FOUR, gpus=5), [host(gpus=4)])
    assert isinstance(few, Refusal)
    assert few.sentence() == "5 × GPU asked for; host h1 has 4, of which 4 free."


@pytest.mark.parametrize("policy", ["strict", "split", "any"])
def test_a_gpu_of_unknown_node_is_never_placed(policy: Policy) -> None:
    view = host(gpus=1)
    lost = replace(view.inventory.gpus[0], node=-1)
    minus_one = Node(-1, ((90,), (91,)), 16384)
    nodes = (*view.inventory.nodes, minus_one)
    view = replace(view, inventory=replace(view.inventory, gpus=(lost,), nodes=nodes))
    assert isinstance(place(replace(ONE, policy=policy), [view]), Refusal)


def test_a_node_of_memory_only_carries_no_cell() -> None:
    view = host(gpus=4)
    first, second = view.inventory.nodes
    bare = replace(second, cores=(), id=5)
    gpus = tuple(replace(gpu, node=gpu.node * 5) for gpu in view.inventory.gpus)
    view = replace(view, inventory=replace(view.inventory, nodes=(bare, first), gpus=gpus))
    assert isinstance(place(replace(FOUR, cores=4), [view]), Refusal)
    claim = place(replace(FOUR, cores=4, policy="any"), [view])
    assert isinstance(claim, Claim)
    assert [cell.node for cell in claim.cells] == [0]


def test_impossible_splits_are_refused_at_once() -> None:
    """Eight nodes, four cells: the search must not list what cannot be."""
    rooms = [Room(node, 1, 16, 1 << 18) for node in range(8)]
    assert split(Need(4, 64, 1 << 22), rooms) is None
    started = time.process_time()
    for _ in range(20):
        split(Need(4, 64, 1 << 22), rooms)
    assert (time.process_time() - started) / 20 < 0.005


def huge(pages_kib: int) -> HostView:
    """A host that makes guests' memory of pages of this size."""
    view = host(gpus=4)
    return replace(view, inventory=replace(view.inventory, hugepages_kib=pages_kib))


def test_memory_is_made_of_whole_pages() -> None:
    """A guest whose memory does not fill its last page would not start."""
    refused = place(replace(ONE, memory_mib=1536), [huge(1 << 20)])
    assert isinstance(refused, Refusal)
    assert refused.constraint == "memory"
    assert "pages of 1024 MiB" in refused.sentence()
    assert not refused.can_wait
    assert isinstance(place(replace(ONE, memory_mib=1536), [huge(2048)]), Claim)
    assert isinstance(place(ONE, [huge(1 << 20)]), Claim)


def test_each_part_of_a_split_is_made_of_whole_pages() -> None:
    request = Request(gpus=3, cores=3, memory_mib=7 * 1024, image="img", policy="split")
    claim = place(request, [huge(1 << 20)])
    assert isinstance(claim, Claim)
    assert sorted(cell.memory_mib for cell in claim.cells) == [2048, 5120]
