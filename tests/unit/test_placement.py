"""Where requests go, and what is said when they go nowhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.pool.placement import Refusal, place
from gpuspawner.pool.topology import Claim, Gpu, HostView, Inventory, Node, Request


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
