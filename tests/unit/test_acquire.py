"""Decisions about leases, on a real ledger: what is asked for lately counts, and who came first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from gpuspawner import schema
from gpuspawner.allocator.acquire import Acquired, Placing, Rules, acquire, serve_queue
from gpuspawner.ledger import gpus, hosts, leases, tables
from gpuspawner.ledger.database import Ledger, Transaction
from gpuspawner.pool.states import GpuState, LeaseState
from gpuspawner.pool.topology import Gpu, Inventory, Node

IMAGE = "sha256:" + "a" * 64


class Pool:
    """A ledger whose hosts have one NUMA node each, and GPUs that are free or being wiped."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.placing = Placing()
        self.now = 1000

    def do(self, fn: Any, *args: Any) -> Any:
        """One transaction."""
        self.now += 1
        return self.ledger._transaction(lambda tx: fn(tx, *args))

    def host(self, name: str, free: int, wiped: int = 0, cores: int = 8) -> None:
        """A host that has this many GPUs free and this many on their way back."""
        cards = tuple(Gpu(f"0000:{0x40 + n:02x}:00.0", "A", 0) for n in range(free + wiped))
        node = Node(0, tuple((cpu,) for cpu in range(cores)), 65536)

        def join(tx: Transaction) -> None:
            hosts.add(tx, name, {"uri": "x", "cidr": "10.0.0.0/24"})
            hosts.record_survey(tx, Inventory(name, "boot", (node,), cards), 1)
            hosts.set_images(tx, name, [IMAGE])
            hosts.set_state(tx, name, "ready")
            for number, card in enumerate(cards):
                state = GpuState.UNASSIGNED if number < free else GpuState.USED
                where = (tables.gpus.c.host == name, tables.gpus.c.address == card.address)
                tx.execute(tables.gpus.update().where(*where).values(state=state))
            gpus.touch_host(tx, name)

        self.do(join)

    def ask(self, user: str, count: int = 1, cores: int = 1) -> Acquired:
        """A start of this user's."""
        body = schema.AcquireLease(
            username=user,
            start_id="start-0001",
            request=schema.LeaseRequest(gpus=count, cores=cores, memory_mib=1024, image="lab"),
            payload=schema.BootPayload(argv=["x"], env={}),
            ready_path="/",
        )
        found: Acquired = self.do(
            acquire, "hub", body, IMAGE, self.placing, Rules(max_wait_ms=10**6), self.now
        )
        return found


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """No hosts yet."""
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.sqlite")
    ledger.open_sync()
    yield Pool(ledger)
    ledger._engine.dispose()


@pytest.mark.parametrize(("pairs", "chosen"), [(0, "h1"), (30, "h2")])
def test_what_was_asked_for_lately_decides_between_places(
    pool: Pool, pairs: int, chosen: str
) -> None:
    """Nobody has asked for anything: the tightest place. Everybody asks for two GPUs: the place
    whose third GPU they could not use anyway, which keeps a pair together."""
    for number in range(pairs):  # refused ones say what is wanted as well
        assert pool.ask(f"pair{number}", count=2).refusal is not None
    pool.host("h1", free=2)
    pool.host("h2", free=3)
    assert pool.ask("first").lease.host == chosen


def test_a_server_is_spread_where_the_admin_says_so(pool: Pool) -> None:
    pool.host("h1", free=2)
    pool.host("h2", free=3)
    pool.placing = Placing(prefer="spread")
    assert pool.ask("first").lease.host == "h2"


def test_cores_of_who_waits_longer_are_not_given_away(pool: Pool) -> None:
    """Six of eight cores are promised to a lease whose GPU is being wiped: a later server without
    a GPU gets the other two, and no more."""
    pool.host("h1", free=0, wiped=1)
    waiting = pool.ask("waiting", cores=6)
    assert waiting.lease.state is LeaseState.QUEUED
    refused = pool.ask("greedy", count=0, cores=3)
    assert refused.refusal is not None
    assert refused.refusal.body.constraint == "cores"
    assert "2 are free" in refused.refusal.body.message
    assert pool.ask("modest", count=0, cores=2).lease.state is LeaseState.PLACED

    def wiped(tx: Transaction) -> None:
        tx.execute(tables.gpus.update().values(state=GpuState.UNASSIGNED))
        gpus.touch_host(tx, "h1")

    pool.do(wiped)
    pool.do(serve_queue, pool.placing, pool.now)
    assert pool.do(leases.need, waiting.lease.id).state is LeaseState.PLACED


def test_a_place_on_a_host_that_has_changed_is_looked_for_again(pool: Pool) -> None:
    """Somebody writes past us: the claim finds that the host is not the one that was looked at,
    and the decision is made again on what there is."""
    pool.host("h1", free=1)
    pool.host("h2", free=2)
    pool.do(pool.placing.views.load)
    with sa.create_engine(pool.ledger.url).begin() as other:
        other.execute(tables.hosts.update().values(generation=7))
        gone = tables.gpus.c.host == "h1"
        other.execute(tables.gpus.update().where(gone).values(state=GpuState.LOST))
    assert pool.ask("first").lease.host == "h2"
