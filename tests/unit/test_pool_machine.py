"""Whatever happens in whatever order, the pool's invariants hold.

Hypothesis plays users, admins, service VMs, failing cards and rebooting hosts against the real
decisions and the real ledger; only the hosts' answers are made up. After every step all that is
claimed is counted again, from the tables and not from what the code believes.
"""

from __future__ import annotations

import shutil
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpuspawner import schema
from gpuspawner.allocator import acquire, api_pool
from gpuspawner.allocator.diagnosis import due
from gpuspawner.ledger import diagnoses, gpus, hosts, leases
from gpuspawner.ledger import tables as t
from gpuspawner.ledger.database import Ledger, Transaction
from gpuspawner.ledger.records import GpuRecord, LeaseRecord
from gpuspawner.ledger.views import Views
from gpuspawner.pool.states import EndReason, GpuState, IllegalTransition, LeaseState, Outcome
from gpuspawner.pool.topology import Gpu, Inventory, Node
from gpuspawner.pool.verdict import Identity, Verdict

IMAGE = "sha256:" + "a" * 64
RULES = acquire.Rules(max_wait_ms=50)
ON_HOST = (LeaseState.PLACED, LeaseState.STARTING, LeaseState.RUNNING, LeaseState.STOPPING)


def cores(first: int, count: int) -> tuple[tuple[int, int], ...]:
    """Cores of two threads each."""
    return tuple((cpu, cpu + 1) for cpu in range(first, first + 2 * count, 2))


def host(name: str, nodes: tuple[Node, ...], gpus_of: dict[int, int]) -> Inventory:
    """A host whose first core of each node is the host's own."""
    return Inventory(
        host=name,
        boot_id="boot-0",
        nodes=nodes,
        gpus=tuple(
            Gpu(f"0000:{0x40 + node * 8 + n:02x}:00.0", "A", node, ids=("1234:11e8",))
            for node, count in gpus_of.items()
            for n in range(count)
        ),
        system_cores=tuple(node.cores[0] for node in nodes),
    )


# Node numbers with a gap, a node without GPUs, and reserves.
WHOLE = {
    "h1": host(
        "h1",
        (Node(0, cores(0, 4), 4096, 1024), Node(2, cores(8, 4), 6144, 1024)),
        {0: 2, 2: 2},
    ),
    "h2": host(
        "h2", (Node(0, cores(0, 3), 4096, 512), Node(1, cores(6, 5), 2048)), {0: 1}
    ),
}  # fmt: skip
SLOTS = [(name, gpu.address) for name, whole in WHOLE.items() for gpu in whole.gpus]


class Pool(RuleBasedStateMachine):
    """A ledger with two hosts, four users and everything that befalls them."""

    template: Path  # an empty ledger of the newest schema

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory(dir="/dev/shm")
        shutil.copy(self.template, Path(self.folder.name) / "ledger.sqlite")
        self.now = 1000
        self.inventories = dict(WHOLE)
        self.proved: set[tuple[str, str]] = set()  # passed, and nothing has befallen it since
        self.begin_ledger()

    def teardown(self) -> None:
        self.ledger._engine.dispose()
        self.folder.cleanup()

    def begin_ledger(self) -> None:
        self.ledger = Ledger(f"sqlite:///{self.folder.name}/ledger.sqlite")
        self.ledger.open_sync()
        self.placing = acquire.Placing()

    def do(self, fn, *args, **kwargs):  # type: ignore[no-untyped-def]
        """One transaction, a little later than the last."""
        self.now += 7
        return self.ledger._transaction(lambda tx: fn(tx, *args, **kwargs))

    def serve(self) -> None:
        self.do(acquire.serve_queue, self.placing, self.now)

    def leases_in(self, *states: LeaseState) -> list[LeaseRecord]:
        return [lease for lease in self.do(leases.open_leases) if lease.state in states]

    # ------------------------------------------------------------------ what happens

    @initialize()
    def hosts_join(self) -> None:
        for name, whole in WHOLE.items():
            self.do(hosts.add, name, {"uri": "x", "cidr": "10.0.0.0/27"})
            self.do(hosts.record_survey, whole, self.now)
            self.do(hosts.set_images, name, [IMAGE])
            self.do(hosts.set_state, name, "ready")
        for name, address in SLOTS:
            self.admin((name, address), "enroll")
        for _ in SLOTS[:3]:
            self.diagnosis_begins(0)
            self.diagnosis_ends(0, Outcome.PASS)

    @rule(
        user=st.sampled_from(["ada", "bob", "eve", "kim"]),
        start=st.integers(0, 3),
        count=st.integers(0, 3),
        cores=st.integers(1, 4),
        memory=st.sampled_from([1000, 2048, 3072, 3500, 4096, 5120]),
        policy=st.sampled_from(["strict", "split"]),
    )
    def start(
        self, user: str, start: int, count: int, cores: int, memory: int, policy: str
    ) -> None:
        body = schema.AcquireLease(
            username=user,
            start_id=f"start-{start:04}",
            request=schema.LeaseRequest(
                gpus=count, cores=cores, memory_mib=memory, image="lab", policy=policy
            ),
            payload=schema.BootPayload(argv=["x"], env={}),
            ready_path="/",
        )
        try:
            got = self.do(acquire.acquire, "hub", body, IMAGE, self.placing, RULES, self.now)
        except acquire.ApiError as error:
            if error.body.status != 409:  # this start already asked for something else
                raise
            return
        assert got.lease.state in LeaseState
        if got.refusal is not None:
            assert got.lease.state is LeaseState.ENDED
            assert got.refusal.body.message

    @rule(user=st.sampled_from(["ada", "bob", "eve", "kim"]), start=st.integers(0, 3))
    def release(self, user: str, start: int) -> None:
        self.do(acquire.release, ("hub", user, ""), f"start-{start:04}", self.now)

    @rule(which=st.integers(0, 7))
    def lease_goes_on(self, which: int) -> None:
        found = self.leases_in(LeaseState.PLACED, LeaseState.STARTING)
        if not found:
            return
        lease = found[which % len(found)]
        if lease.state is LeaseState.STARTING:
            self.do(leases.gpus_assigned, lease, self.now)
        following = {
            LeaseState.PLACED: LeaseState.STARTING,
            LeaseState.STARTING: LeaseState.RUNNING,
        }[lease.state]
        self.do(leases.move, lease, following, self.now, 50, "On it goes.")

    @rule(which=st.integers(0, 7))
    def guest_dies(self, which: int) -> None:
        found = self.leases_in(LeaseState.STARTING, LeaseState.RUNNING)
        if found:
            lease = found[which % len(found)]
            self.do(leases.stop, lease.id, EndReason.GUEST_GONE, "It is gone.", self.now)

    @rule(which=st.integers(0, 7))
    def guest_is_gone(self, which: int) -> None:
        found = self.leases_in(LeaseState.STOPPING)
        if found:
            self.do(leases.finish, found[which % len(found)], self.now)
            self.serve()

    @rule(which=st.integers(0, 7))
    def diagnosis_begins(self, which: int) -> None:
        waiting: list[GpuRecord] = [
            gpu
            for name in WHOLE
            for gpu in self.do(due, name, self.now)
            if self.do(hosts.get, name).state == "ready"
        ]
        if waiting:
            gpu = waiting[which % len(waiting)]
            self.do(diagnoses.begin, gpu, str(uuid.uuid4()), "n" * 32, IMAGE, self.now)

    @rule(which=st.integers(0, 7), outcome=st.sampled_from(Outcome))
    def diagnosis_ends(self, which: int, outcome: Outcome) -> None:
        found = self.do(diagnoses.running)
        if not found:
            return
        run = found[which % len(found)]
        state = self.do(
            diagnoses.finish, run, Verdict(outcome, ()),
            identity=Identity("emulated", "s", "u", "A", "v", 16, ("1234:11e8",)),
            report={}, witness={}, console="", now_ms=self.now, max_attempts=3, backoff_ms=20,
        )  # fmt: skip
        assert (state is GpuState.UNASSIGNED) == (outcome is Outcome.PASS)
        if outcome is Outcome.PASS:
            self.proved.add((run.host, run.address))
        self.serve()

    @rule(
        slot=st.sampled_from(SLOTS),
        action=st.sampled_from(["enroll", "retest", "hold", "unhold", "retire"]),
    )
    def admin(self, slot: tuple[str, str], action: str) -> None:
        gpu = self.do(gpus.get, *slot)
        if gpu is None:
            return
        body = schema.GpuAction(action=action, reason="because")
        try:
            self.do(api_pool._act, gpu, body, "admin")
        except IllegalTransition:
            return
        if action in ("retest", "retire"):
            self.proved.discard(slot)
        self.serve()

    @rule(name=st.sampled_from(list(WHOLE)), state=st.sampled_from(["ready", "unreachable"]))
    def host_comes_and_goes(self, name: str, state: str) -> None:
        self.do(hosts.set_state, name, state, "as the test says")
        self.serve()

    @rule(name=st.sampled_from(list(WHOLE)), drained=st.booleans())
    def drain(self, name: str, drained: bool) -> None:
        self.do(hosts.set_drained, name, drained)
        self.serve()

    @rule(name=st.sampled_from(list(WHOLE)))
    def host_reboots(self, name: str) -> None:
        boot = f"boot-{self.now}"
        self.inventories[name] = replace(self.inventories[name], boot_id=boot)
        self.proved = {slot for slot in self.proved if slot[0] != name}
        assert self.do(hosts.record_survey, self.inventories[name], self.now)
        for run in self.do(diagnoses.running, name):
            self.do(diagnoses.abort, run, "The host has rebooted.", self.now)
        for lease in self.do(leases.open_leases, name):
            self.do(leases.stop, lease.id, EndReason.HOST_LOST, "Rebooted.", self.now)

    @rule(slot=st.sampled_from(SLOTS), there=st.booleans())
    def card_comes_and_goes(self, slot: tuple[str, str], there: bool) -> None:
        name, address = slot
        now = self.inventories[name]
        cards = tuple(
            gpu
            for gpu in WHOLE[name].gpus
            if (there if gpu.address == address else gpu in now.gpus)
        )
        self.inventories[name] = replace(now, gpus=cards)
        if not there:
            self.proved.discard(slot)
        self.do(hosts.record_survey, self.inventories[name], self.now)
        self.serve()

    @rule()
    def allocator_is_killed(self) -> None:
        self.ledger._engine.dispose()
        self.begin_ledger()
        for run in self.do(diagnoses.running):
            self.do(diagnoses.abort, run, "The allocator stopped during the run.", self.now)
        self.serve()

    @precondition(lambda self: self.leases_in(LeaseState.QUEUED))
    @rule()
    def time_passes(self) -> None:
        self.now += 100
        self.serve()
        assert not self.leases_in(LeaseState.QUEUED)

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def all_is_well(self) -> None:
        self.do(self.check)

    def check(self, tx: Transaction) -> None:
        found = leases.open_leases(tx)
        on_host = [lease for lease in found if lease.state in ON_HOST]
        assert all((lease.claim is not None) == (lease in on_host) for lease in found)
        self.everything_has_one_owner(tx, on_host)
        self.nothing_is_given_out_twice(tx, on_host)
        for lease in on_host:
            self.a_claim_is_what_was_asked_for(lease)
        kept = self.placing.views.load(tx).views
        assert kept == Views().load(tx).views, "a snapshot is out of date"
        alive = Counter(lease.key for lease in found if lease.state in leases.LIVE)
        assert not [key for key, count in alive.items() if count > 1], "a server lives twice"

    def everything_has_one_owner(self, tx: Transaction, on_host: list[LeaseRecord]) -> None:
        running = {run.id for run in diagnoses.running(tx)}
        held = {(row.host, row.address): row.owner for row in tx.execute(sa.select(t.claimed_gpus))}
        for lease in on_host:
            assert lease.claim is not None
            for address in lease.claim.gpus:
                assert held[lease.claim.host, address] == lease.id
        for gpu in gpus.every(tx):
            slot = (gpu.host, gpu.address)
            owner = held.get(slot)
            if gpu.state in (GpuState.RESERVED, GpuState.ASSIGNED):
                assert owner == gpu.lease_id
                assert owner in {lease.id for lease in on_host}
                assert gpu.dirty
                self.proved.discard(slot)
            elif gpu.state is GpuState.DIAGNOSING:
                assert owner == gpu.diagnosis_id
                assert owner in running
            else:
                assert owner is None, f"{slot} is {gpu.state} and {owner} holds it"
                assert not gpu.lease_id
                assert not gpu.diagnosis_id
            if gpu.state is GpuState.UNASSIGNED:
                assert not gpu.dirty
                assert slot in self.proved, f"{slot} is free without a proof"

    def nothing_is_given_out_twice(self, tx: Transaction, on_host: list[LeaseRecord]) -> None:
        claims = [lease.claim for lease in on_host if lease.claim is not None]
        system = {
            (name, cpu)
            for name, whole in WHOLE.items()
            for core in whole.system_cores
            for cpu in core
        }
        cpus = [(row.host, row.cpu) for row in tx.execute(sa.select(t.claimed_cpus))]
        assert Counter(cpus) == Counter((claim.host, cpu) for claim in claims for cpu in claim.cpus)
        assert len(cpus) == len(set(cpus))
        assert not system & set(cpus)
        memory: Counter[tuple[str, int]] = Counter()
        for row in tx.execute(sa.select(t.claimed_memory)):
            assert row.owner in {lease.id for lease in on_host}
            memory[row.host, row.node] += row.mib
        for (name, number), mib in memory.items():
            node = WHOLE[name].node(number)
            assert mib <= node.memory_mib - node.reserve_mib, f"node {number} of {name}: {mib}"
        addresses = [(row.host, row.address) for row in tx.execute(sa.select(t.claimed_addresses))]
        assert len(addresses) == len(set(addresses)) == len(on_host)

    def a_claim_is_what_was_asked_for(self, lease: LeaseRecord) -> None:
        claim, wanted = lease.claim, lease.request
        assert claim is not None
        assert len(claim.gpus) == wanted["gpus"]
        assert sum(len(cell.cores) for cell in claim.cells) == wanted["cores"]
        assert claim.memory_mib == wanted["memory_mib"]
        near = {cell.node for cell in claim.cells}
        assert {WHOLE[claim.host].gpu(address).node for address in claim.gpus} <= near
        if wanted["policy"] == "strict":
            assert len(near) == 1
        for cell in claim.cells:
            assert set(cell.cores) <= set(WHOLE[claim.host].node(cell.node).cores)


def test_the_pool(tmp_path: Path) -> None:
    """At least a thousand steps, each with all invariants checked."""
    Pool.template = tmp_path / "template.sqlite"
    empty = Ledger(f"sqlite:///{Pool.template}")
    empty.open_sync()
    empty._engine.dispose()  # the last connection takes the write-ahead log with it
    Pool.TestCase.settings = settings(
        max_examples=20,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        phases=(Phase.generate,),  # shrinking takes minutes, and forty steps can be read
        suppress_health_check=list(HealthCheck),
    )
    Pool.TestCase("runTest").runTest()
