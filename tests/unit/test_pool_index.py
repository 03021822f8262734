"""The index decides as the function does that asks every host, whatever has happened before."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpuspawner.pool.choosing import Mix, mix_of
from gpuspawner.pool.index import HostIndex
from gpuspawner.pool.placement import Preference, Refusal, Shortfall, place
from gpuspawner.pool.topology import Claim, Gpu, HostView, Inventory, Node, Request
from tests.bench.used_pool import given_back, without

HOSTS = [f"h{number}" for number in range(8)]


def shape(name: str, kind: int) -> HostView:
    """A host with all of its GPUs free; few kinds, so that many hosts are alike."""
    count = 1 if kind == 4 else 2
    ids = (0, 3) if kind == 3 else tuple(range(count))  # node numbers may have gaps
    nodes = tuple(
        Node(number, tuple((8 * at + c, 100 + 8 * at + c) for c in range(4)), 8192 + 1024 * at, 512)
        for at, number in enumerate(ids)
    )
    models = {0: "AAAA", 1: "AAAA", 2: "ABBA", 3: "AB", 4: ""}[kind]
    gpus = tuple(
        Gpu(
            f"0000:{0x40 + n:02x}:00.0",
            model,
            -1 if kind == 3 and n == 1 else nodes[n % len(nodes)].id,
            problems=("cannot be reset",) if kind == 2 and n == 3 else (),
        )
        for n, model in enumerate(models)
    )
    return HostView(
        Inventory(
            name, "b", nodes, gpus,
            system_cores=(nodes[0].cores[0],) if kind == 1 else (),
            hugepages_kib=1048576 if kind == 1 else 0,
        ),
        free_gpus=frozenset(gpu.address for gpu in gpus),
        images=frozenset({"img"}),
    )  # fmt: skip


def each(refusal: Refusal) -> list[Shortfall]:
    """Every host's shortfall by itself."""
    return sorted(
        (
            replace(one, host=name, alike=(), text=one.text.replace(one.host, name))
            for one in refusal.shortfalls
            for name in (one.host, *one.alike)
        ),
        key=lambda one: one.host,
    )


REQUESTS = st.builds(
    Request,
    gpus=st.integers(0, 4),
    cores=st.integers(1, 6),
    memory_mib=st.sampled_from([512, 1000, 1024, 2048, 3072, 4096, 8192]),
    gpu_model=st.sampled_from([None, None, "A", "B", "C"]),
    image=st.sampled_from(["", "img", "img", "new"]),
    home_host=st.sampled_from([None, None, None, "h0", "h3", "h9"]),
    policy=st.sampled_from(["strict", "split", "any"]),
)


def both(
    index: HostIndex, request: Request, mix: Mix, instead: Mapping[str, HostView] | None = None
) -> Claim | Refusal:
    """What both answer, which must be the same."""
    mine = index.place(request, mix, instead or {})
    views = {**index.views, **(instead or {})}
    theirs = place(request, [views[name] for name in sorted(views)], mix, index.prefer)
    if isinstance(mine, Claim) or isinstance(theirs, Claim):
        assert mine == theirs
        return mine
    assert each(mine) == sorted(theirs.shortfalls, key=lambda one: one.host)
    assert mine.sentence() == theirs.sentence()
    assert mine.constraint == theirs.constraint
    assert mine.can_wait == theirs.can_wait
    return mine


class Comparing(RuleBasedStateMachine):
    """The same hosts in the index and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.views: dict[str, HostView] = {}
        self.claims: list[Claim] = []
        self.refused: list[Request] = []

    @initialize(
        prefer=st.sampled_from(["pack", "pack", "spread"]),
        asked=st.lists(REQUESTS, max_size=6),
        kinds=st.lists(st.integers(0, 4), min_size=3, max_size=len(HOSTS)),
    )
    def begin(self, prefer: Preference, asked: list[Request], kinds: list[int]) -> None:
        self.index = HostIndex(prefer)
        self.mix = mix_of(asked)
        for name, kind in zip(HOSTS, kinds, strict=False):
            self.put(shape(name, kind))

    def put(self, view: HostView) -> None:
        self.views[view.inventory.host] = view
        self.index.put(view)

    def known(self, which: int) -> HostView:
        return self.views[sorted(self.views)[which % len(self.views)]]

    def both(self, request: Request, instead: Mapping[str, HostView]) -> Claim | Refusal:
        return both(self.index, request, self.mix, instead)

    @rule(request=REQUESTS)
    def acquire(self, request: Request) -> None:
        found = self.both(request, {})
        if isinstance(found, Claim):
            self.put(without(self.views[found.host], found))
            self.claims.append(found)
        else:
            self.refused.append(request)

    @rule(which=st.integers(0, 99))
    def ask_again(self, which: int) -> None:
        """For what was refused before, on whatever has become of the hosts."""
        if self.refused:
            self.both(self.refused[which % len(self.refused)], {})

    @rule(request=REQUESTS, seen=st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=3))
    def look(self, request: Request, seen: list[tuple[int, bool]]) -> None:
        """Some hosts are seen as they will be, or without what others wait for."""
        instead = {}
        for which, hoped in seen:
            view = self.known(which)
            free = view.free_gpus | view.coming_gpus if hoped else frozenset()
            instead[view.inventory.host] = replace(view, free_gpus=free)
        self.both(request, instead)

    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        if self.claims:
            claim = self.claims.pop(which % len(self.claims))
            if claim.host in self.views:
                self.put(given_back(self.views[claim.host], claim, wiped=False))

    @rule(which=st.integers(0, 7))
    def wiped(self, which: int) -> None:
        view = self.known(which)
        self.put(
            replace(view, free_gpus=view.free_gpus | view.coming_gpus, coming_gpus=frozenset())
        )

    @rule(which=st.integers(0, 7), drained=st.booleans())
    def drain(self, which: int, drained: bool) -> None:
        self.put(replace(self.known(which), drained=drained))

    @rule(which=st.integers(0, 7), state=st.sampled_from(["ready", "new", "unreachable"]))
    def host_comes_and_goes(self, which: int, state: str) -> None:
        self.put(replace(self.known(which), reachable=state == "ready", connecting=state == "new"))

    @rule(which=st.integers(0, 7), count=st.integers(0, 5))
    def addresses(self, which: int, count: int) -> None:
        self.put(replace(self.known(which), free_addresses=count))

    @rule(which=st.integers(0, 7))
    def image_comes(self, which: int) -> None:
        self.put(replace(self.known(which), images=frozenset({"img", "new"})))

    @rule(which=st.integers(0, 7))
    def card_falls_off(self, which: int) -> None:
        view = self.known(which)
        cards = view.inventory.gpus[:-1]
        self.put(replace(view, inventory=replace(view.inventory, gpus=cards)))

    @rule(which=st.integers(0, 7), number=st.integers(0, 3), free=st.booleans())
    def admin(self, which: int, number: int, free: bool) -> None:
        """A GPU is held back, or a new one is let in."""
        view = self.known(which)
        name = view.inventory.host
        address = {f"0000:{0x40 + number:02x}:00.0"}
        held = {gpu for claim in self.claims for gpu in claim.gpus if claim.host == name}
        if free and not address & held:
            self.put(replace(view, free_gpus=view.free_gpus | address))
        elif not free:
            self.put(replace(view, free_gpus=view.free_gpus - address))

    @rule(name=st.sampled_from(HOSTS), kind=st.integers(0, 4))
    def host_joins(self, name: str, kind: int) -> None:
        if name not in self.views:
            self.put(shape(name, kind))

    @rule(which=st.integers(0, 7))
    def host_leaves(self, which: int) -> None:
        if len(self.views) > 1:
            name = self.known(which).inventory.host
            del self.views[name]
            self.index.drop(name)
            self.claims = [claim for claim in self.claims if claim.host != name]

    @rule(asked=st.lists(REQUESTS, max_size=6))
    def others_are_asked_for(self, asked: list[Request]) -> None:
        self.mix = mix_of(asked)

    @invariant()
    def nothing_is_forgotten(self) -> None:
        if hasattr(self, "index"):
            assert self.index.views == self.views


TestComparing = Comparing.TestCase
TestComparing.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),  # shrinking takes minutes, and thirty steps can be read
    suppress_health_check=list(HealthCheck),
)


def befallen(view: HostView, rng: random.Random) -> HostView:
    """The host in some state; one in two has two models of GPUs in any order, and servers."""
    plain = rng.random() < 0.5
    used = 0.0 if plain else 0.3
    gpus = tuple(
        gpu if plain else replace(gpu, model=rng.choice("AB")) for gpu in view.inventory.gpus
    )
    states = {gpu.address: rng.choice(["free", "free", "coming", "held"]) for gpu in gpus}
    cores = [core for node in view.inventory.nodes for core in node.cores]
    return replace(
        view,
        inventory=replace(view.inventory, gpus=gpus),
        free_gpus=frozenset(gpu for gpu, state in states.items() if state == "free"),
        coming_gpus=frozenset(gpu for gpu, state in states.items() if state == "coming"),
        used_cpus=frozenset(cpu for core in cores if rng.random() < used for cpu in core),
        used_mib={
            node.id: 0 if plain else rng.choice([0, 1024, 4096]) for node in view.inventory.nodes
        },
    )


@pytest.mark.parametrize("prefer", ["pack", "spread"])
def test_hosts_in_any_state(prefer: Preference) -> None:
    """Ties and near ties, over more hosts than a sequence of steps can bring into disorder."""
    rng = random.Random(7)
    claimed = 0
    for _ in range(400):
        index = HostIndex(prefer)
        names = [f"h{number:02}" for number in range(12)]
        rng.shuffle(names)
        for name in names:
            index.put(befallen(shape(name, rng.choice([0, 0, 0, 1, 4])), rng))
        requests = [
            Request(
                rng.randint(0, 4), rng.randint(1, 6), rng.choice([512, 1024, 3072]),
                rng.choice([None, "A", "B"]), "img", None, rng.choice(["strict", "split", "any"]),
            )
            for _ in range(8)
        ]  # fmt: skip
        mix = mix_of(requests[: rng.choice([0, 8])])
        claimed += sum(isinstance(both(index, one, mix), Claim) for one in requests)
    assert 0.2 < claimed / 3200 < 0.9


@pytest.mark.parametrize("prefer", ["pack", "spread"])
def test_equal_hosts_cost_one_look(prefer: Preference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 hosts in four states few are asked about."""
    rng = random.Random(1)
    index = HostIndex(prefer)
    for number in range(300):
        view = shape(f"h{number:03}", 0)
        free = sorted(view.free_gpus)[rng.randrange(4) :]
        index.put(replace(view, free_gpus=frozenset(free)))
    asked: list[int] = []

    def counted(
        request: Request, hosts: list[HostView], mix: Mix, prefer: Preference
    ) -> Claim | Refusal:
        asked.append(len(hosts))
        return place(request, hosts, mix, prefer)

    monkeypatch.setattr("gpuspawner.pool.index.place", counted)
    for gpus in (1, 2, 3):
        request = Request(gpus=gpus, cores=gpus, memory_mib=1024 * gpus, policy="split")
        assert isinstance(index.place(request, mix_of([request])), Claim)
    assert max(asked) <= 4
