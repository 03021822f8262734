"""The allocator goes away at any moment and comes back to a true picture."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gpuspawner import schema
from gpuspawner.ledger.database import Deposed, Ledger
from tests.layers import wait_for_async
from tests.service.harness import Site, acquire_body, gpu_in, lease_in
from tests.service.scripted import inventory


@pytest.fixture
async def site(tmp_path: Path, db_url: str | None):
    """One host with two GPUs."""
    site = Site(tmp_path, db_url)
    world = site.world()
    yield site
    await world.close()
    assert world.overlaps == []


async def test_a_running_lease_goes_on(site: Site) -> None:
    """The VM is the same one, and a stop after the restart works."""
    async with site.running() as client:
        await site.add_host(client, 0)
        lease = await client.acquire(acquire_body())
        await lease_in(client, lease.id, "running")
    async with site.running() as client:
        assert (await client.lease(lease.id)).state == "running"
        assert lease.id in site.worlds["h1"].specs
        await client.stop(lease.id, wait_s=20)
        await gpu_in(client, lease.gpus[0], "unassigned")


@pytest.mark.parametrize(
    "call", ["make_home", "make_disks", "put_seed", "create", "guest", "eject_seed"]
)
async def test_stopped_in_the_middle_of_a_start(site: Site, call: str) -> None:
    """The allocator is gone while a call to the host is under way; the new one finishes the start.

    The boot payload died with the old allocator: where it is still needed, it is asked for.
    """
    world = site.worlds["h1"]
    async with site.running() as client:
        await site.add_host(client, 0)
        world.history.clear()
        world.gates[call] = asyncio.Event()
        lease = await client.acquire(acquire_body())
        await wait_for_async(lambda: any(h[0] == call for h in world.history), 10, call)
    world.gates.pop(call).set()
    async with site.running() as client:

        async def run_or_ask() -> bool:
            now = await client.lease(lease.id)
            if now.payload_needed:
                await client.put_payload(lease.id, acquire_body().payload)
            return now.state == "running"

        await wait_for_async(run_or_ask, 60, "the lease to run")
        assert world.seeds == {}
        assert len([s for s in world.specs.values() if s.kind == "lease"]) == 1


@pytest.mark.parametrize("call", ["shutdown", "destroy", "released", "drop_disks"])
async def test_stopped_in_the_middle_of_a_stop(site: Site, call: str) -> None:
    """The new allocator finishes the stop, and the GPU is wiped."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await site.add_host(client, 0)
        lease = await client.acquire(acquire_body())
        await lease_in(client, lease.id, "running")
        world.history.clear()
        world.gates[call] = asyncio.Event()
        await client.release(
            schema.ReleaseLease(username="ada", server_name="", start_id="start-0001")
        )
        await wait_for_async(lambda: any(h[0] == call for h in world.history), 10, call)
    world.gates.pop(call).set()
    async with site.running() as client:
        assert (await lease_in(client, lease.id, "ended")).reason == "released"
        await gpu_in(client, lease.gpus[0], "unassigned")


@pytest.mark.parametrize("call", ["witness", "reset", "create", "open_channel", "destroy"])
async def test_stopped_in_the_middle_of_a_diagnosis(site: Site, call: str) -> None:
    """No pass is inferred: the GPU is diagnosed anew, and no attempt is charged."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await site.add_host(client, 0)
        lease = await client.acquire(acquire_body())
        await lease_in(client, lease.id, "running")
        await client.stop(lease.id, wait_s=20)
        await gpu_in(client, lease.gpus[0], "unassigned")
        world.history.clear()
        world.gates[call] = asyncio.Event()
        await client.gpu_action("h1", lease.gpus[0], schema.GpuAction(action="retest"))
        await wait_for_async(lambda: any(h[0] == call for h in world.history), 10, call)
    world.gates.pop(call).set()
    async with site.running() as client:
        gpu = await gpu_in(client, lease.gpus[0], "unassigned")
        runs = await client.diagnoses(gpu=gpu.address)
        assert [run.outcome for run in runs[:2]] == ["pass", "inconclusive"]
        assert runs[0].attempt == 1
        assert not [s for s in world.specs.values() if s.kind == "service"]


async def test_a_vm_that_no_lease_owns_is_ended(site: Site) -> None:
    """Found by listing, not by memory."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await site.add_host(client, 0)
        lease = await client.acquire(acquire_body())
        await lease_in(client, lease.id, "running")
        spec = world.specs[lease.id]
        await client.stop(lease.id, wait_s=20)
        await gpu_in(client, lease.gpus[0], "unassigned")
    await world.boot(spec)
    async with site.running():
        await wait_for_async(lambda: lease.id not in world.specs, 45, "the orphan to be ended")


async def test_a_vm_that_appears_after_its_lease_has_ended(site: Site) -> None:
    """A creation that was given up and took effect later: found without any restart."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await site.add_host(client, 0)
        lease = await client.acquire(acquire_body())
        await lease_in(client, lease.id, "running")
        spec = world.specs[lease.id]
        await client.stop(lease.id, wait_s=20)
        await gpu_in(client, lease.gpus[0], "unassigned")
        await world.boot(spec)
        diagnosed = len(world.resets)
        await client.check_host("h1")  # surveys now instead of within a minute
        await wait_for_async(lambda: lease.id not in world.specs, 45, "the orphan to be ended")
        await wait_for_async(lambda: len(world.resets) > diagnosed, 45, "a new diagnosis")
        world.seeds[lease.id] = b"a seed that was written too late"
        await client.check_host("h1")
        await wait_for_async(lambda: world.seeds == {}, 45, "the late seed to be deleted")
        assert (await gpu_in(client, lease.gpus[0], "unassigned")).dirty is False


async def test_who_waits_goes_on_waiting(site: Site) -> None:
    """A restart empties no queue: hosts that have not been looked at yet may still help."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await site.add_host(client, 0)
        holders = [await client.acquire(acquire_body(f"holder{n}")) for n in range(2)]
        for holder in holders:
            await lease_in(client, holder.id, "running")
        world.gates["witness"] = asyncio.Event()
        await client.stop(holders[0].id, wait_s=20)
        waiting = await client.acquire(acquire_body("waiting"))
        assert waiting.state == "queued"
    world.gates["open"] = asyncio.Event()
    async with site.running() as client:
        early = await client.acquire(acquire_body("early"))
        assert early.state == "queued"
        async for event in client.events(waiting.id):
            assert event.state == "queued"
            if "being looked at" in event.message:
                break  # the queue was served without ending anybody's waiting
        world.gates.pop("open").set()
        world.gates.pop("witness").set()
        await client.put_payload(waiting.id, acquire_body("waiting").payload)
        await lease_in(client, waiting.id, "running")


async def test_the_verdict_of_a_run_that_was_cut_off_counts_for_nothing(site: Site) -> None:
    """The host reboots while a run is being cleaned up; the next run has the GPU by the time the
    first one's pass would be stored."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await site.add_host(client, 0)
        gpu = (await client.gpus())[0]
        world.gates["drop_disks"] = asyncio.Event()
        await client.gpu_action("h1", gpu.address, schema.GpuAction(action="retest"))
        await wait_for_async(
            lambda: any(h[0] == "ack" for h in world.history[-20:]), 45, "the first run's report"
        )
        first = (await client.diagnoses(gpu=gpu.address))[0]
        world.inventory = inventory("h1", boot_id="boot-2")
        del world.gates["drop_disks"]
        world.gates["witness"] = asyncio.Event()
        await client.check_host("h1")
        await gpu_in(client, gpu.address, "diagnosing")
        runs = await client.diagnoses(gpu=gpu.address)
        assert first.id in {run.id for run in runs}
        world.gates.pop("witness").set()
        await gpu_in(client, gpu.address, "unassigned")
        newest = (await client.diagnoses(gpu=gpu.address))[0]
        assert newest.outcome == "pass"


async def test_a_host_that_rebooted(site: Site) -> None:
    """A changed boot id: leases there are over, and nothing that was proved counts any more."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await site.add_host(client, 0)
        lease = await client.acquire(acquire_body())
        await lease_in(client, lease.id, "running")
    await world.end(lease.id)
    diagnosed = len(world.resets)
    world.inventory = inventory("h1", boot_id="boot-2")
    async with site.running() as client:
        ended = await lease_in(client, lease.id, "ended")
        assert ended.reason == "host-lost"
        for gpu in inventory("h1").gpus:
            await gpu_in(client, gpu.address, "unassigned")
        assert len(world.resets) == diagnosed + 2


async def test_a_second_allocator_deposes_the_first(tmp_path: Path) -> None:
    """Two writers on one pool would give a GPU twice: the older one can write nothing more."""
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    old, new = Ledger(url), Ledger(url)
    await old.open()
    await new.open()

    def nothing(_tx: Any) -> None:
        return None

    await new.write(nothing)
    with pytest.raises(Deposed):
        await old.write(nothing)
    await old.close()
    await new.close()
