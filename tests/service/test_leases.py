"""The life of a lease, from the API's side, against a real allocator with scripted hosts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpuspawner import schema
from gpuspawner.client import AllocatorError
from gpuspawner.errors import from_lease
from gpuspawner.host.api import HostError, HostFull
from tests.layers import wait_for_async
from tests.service.harness import Site, acquire_body, gpu_in, lease_in


@pytest.fixture
async def site(tmp_path: Path, db_url: str | None):
    """A site with one host of two GPUs."""
    site = Site(tmp_path, db_url)
    world = site.world()
    yield site
    await world.close()
    assert world.overlaps == []


async def test_the_whole_loop(site: Site) -> None:
    """Ask, run, stop; the GPU is wiped before it is free again."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await site.add_host(client, 0)
        lease = await client.acquire(acquire_body())
        assert lease.state in ("placed", "starting")
        lease = await lease_in(client, lease.id, "running")
        assert lease.gpu_models == ["Emulated GPU 16M"]
        assert lease.address == "127.200.0.2"
        assert world.seeds == {}, "the seed with the token stays on the host"
        gpu = await gpu_in(client, lease.gpus[0], "assigned")
        assert gpu.dirty
        assert gpu.username == "ada"

        diagnosed = len([h for h in world.history if h[0] == "open_channel"])
        ended = await client.stop(lease.id, wait_s=20)
        assert ended.state == "ended"
        assert ended.reason == "released"
        assert lease.id not in world.specs
        assert lease.id not in world.disks
        gpu = await gpu_in(client, lease.gpus[0], "unassigned")
        assert not gpu.dirty
        assert len([h for h in world.history if h[0] == "open_channel"]) == diagnosed + 1
        assert world.homes, "the home is kept"


async def test_two_gpus_of_two_nodes_only_for_those_who_may_be_split(site: Site) -> None:
    """The host has one GPU on each node: strict is refused, split gets a cell on both."""
    async with site.running() as client:
        await site.add_host(client, 0)
        with pytest.raises(AllocatorError, match="2 × GPU asked for; node 0 of host h1 has 1"):
            await client.acquire(acquire_body(start="start-0001", gpus=2, cores=4))
        lease = await client.acquire(
            acquire_body(start="start-0002", gpus=2, cores=4, policy="split")
        )
        lease = await lease_in(client, lease.id, "running")
        assert lease.node is None
        assert len(lease.gpus) == 2
        assert lease.cpus == [0, 1, 4, 5]
        await client.stop(lease.id, wait_s=20)
        told = [event.message async for event in client.events(lease.id)]
        assert any("host h1, NUMA nodes 0, 1." in message for message in told)


async def test_the_story_is_told_in_order_and_replayed(site: Site) -> None:
    """Two listeners hear the same; one that comes back goes on after what it has heard."""
    async with site.running() as client:
        await site.add_host(client, 0)
        lease = await client.acquire(acquire_body())
        await lease_in(client, lease.id, "running")
        await client.stop(lease.id, wait_s=20)
        first = [event async for event in client.events(lease.id)]
        second = [event async for event in client.events(lease.id)]
        assert first == second
        states = list(dict.fromkeys(event.state for event in first))
        assert states == ["queued", "placed", "starting", "running", "stopping", "ended"]
        later = [event async for event in client.events(lease.id, last_id=first[2].id)]
        assert later == first[3:]


async def test_same_start_is_the_same_lease(site: Site) -> None:
    """Asking twice is asking once; asking for something else under the same start is refused."""
    async with site.running() as client:
        await site.add_host(client, 0)
        one, two = await asyncio.gather(
            client.acquire(acquire_body()), client.acquire(acquire_body())
        )
        assert one.id == two.id
        with pytest.raises(AllocatorError) as caught:
            await client.acquire(acquire_body(memory_mib=2048))
        assert caught.value.status == 409


async def test_release_before_acquire(site: Site) -> None:
    """A release that overtakes its acquire wins."""
    async with site.running() as client:
        await site.add_host(client, 0)
        body = acquire_body()
        released = await client.release(
            schema.ReleaseLease(username="ada", server_name="", start_id=body.start_id)
        )
        assert released is None
        lease = await client.acquire(body)
        assert (lease.state, lease.reason) == ("ended", "never-started")
        assert all(gpu.state == "unassigned" for gpu in await client.gpus())


async def test_a_new_start_supersedes_the_old(site: Site) -> None:
    """The old VM is gone before the new one is made, and the home is the same."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await site.add_host(client, 0)
        old = await client.acquire(acquire_body())
        await lease_in(client, old.id, "running")
        new = await client.acquire(acquire_body(start="start-0002"))
        assert new.state == "queued"
        await lease_in(client, new.id, "running")
        assert (await client.lease(old.id)).reason == "superseded"
        order = [
            what for what in world.history if what in (("destroy", old.id), ("create", new.id))
        ]
        assert order == [("destroy", old.id), ("create", new.id)]
        assert len(world.homes) == 1


async def test_the_last_gpu_and_the_reason_why_not(site: Site) -> None:
    """With every GPU in use a request is refused at once, with numbers; the loser holds nothing."""
    async with site.running() as client:
        await site.add_host(client, 0)
        results = await asyncio.gather(
            *(client.acquire(acquire_body(f"user{n}")) for n in range(4)), return_exceptions=True
        )
        leases = [one for one in results if isinstance(one, schema.Lease)]
        refused = [one for one in results if isinstance(one, AllocatorError)]
        assert (len(leases), len(refused)) == (2, 2)
        assert {address for lease in leases for address in lease.gpus} == {
            "0000:40:00.0",
            "0000:41:00.0",
        }
        for error in refused:
            assert error.status == 503
            assert error.refusal.constraint == "gpu"
            assert error.refusal.message.startswith("All 2 GPUs are in use.")


async def test_waiting_for_a_gpu_that_is_being_wiped(site: Site) -> None:
    """First come, first served, and the story says what is waited for."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await site.add_host(client, 0)
        holders = [await client.acquire(acquire_body(f"holder{n}")) for n in range(2)]
        for holder in holders:
            await lease_in(client, holder.id, "running")
        world.gates["witness"] = asyncio.Event()
        await client.stop(holders[0].id, wait_s=20)
        first = await client.acquire(acquire_body("first"))
        second = await client.acquire(acquire_body("second"))
        assert (first.state, second.state) == ("queued", "queued")
        world.gates["witness"].set()
        await lease_in(client, first.id, "running")
        assert (await client.lease(second.id)).state in ("queued", "ended")
        story = [event.message async for event in _until_running(client, first.id)]
        assert any("being wiped" in line for line in story)


async def _until_running(client, lease_id: str):
    async for event in client.events(lease_id):
        yield event
        if event.state == "running":
            return


async def test_waiting_ends_when_the_hope_is_gone(site: Site) -> None:
    """A GPU that fails its diagnosis takes the hope with it; the user is told at once."""
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
        world.gone.add(holders[0].gpus[0])
        world.gates["witness"].set()
        ended = await lease_in(client, waiting.id, "ended")
        assert ended.reason == "wait-timeout"
        assert "in use" in (ended.message or "")


async def test_a_guest_that_dies_ends_its_lease(site: Site) -> None:
    """The hub is not needed for it: the GPU comes back by itself."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await site.add_host(client, 0)
        lease = await client.acquire(acquire_body())
        await lease_in(client, lease.id, "running")
        await world.end(lease.id)
        ended = await lease_in(client, lease.id, "ended")
        assert ended.reason == "guest-gone"
        await gpu_in(client, lease.gpus[0], "unassigned")


async def test_cancel_while_booting(site: Site) -> None:
    """A stop during the boot ends the VM at once and gives everything back."""
    world = site.worlds["h1"]
    world.silent = True
    async with site.running() as client:
        await site.add_host(client, 0)
        lease = await client.acquire(acquire_body())
        await wait_for_async(lambda: lease.id in world.specs, 45, "the VM to be made")
        released = await client.release(
            schema.ReleaseLease(username="ada", server_name="", start_id="start-0001")
        )
        assert released is not None
        await lease_in(client, lease.id, "ended")
        assert world.seeds == {}
        assert lease.id not in world.specs
        await gpu_in(client, lease.gpus[0], "unassigned")


async def test_a_boot_that_never_answers_shows_its_console(tmp_path: Path) -> None:
    """The boot time-out ends the lease with the last words of the console."""
    site = Site(tmp_path, boot_s=0.5, wait_s=0.5)
    world = site.world()
    world.silent = True
    async with site.running() as client:
        await site.add_host(client, 0)
        lease = await client.acquire(acquire_body())
        ended = await lease_in(client, lease.id, "ended")
        assert ended.reason == "boot-failed"
        assert "the last line of the console" in (ended.message or "")
        await gpu_in(client, lease.gpus[0], "unassigned")
    await world.close()


async def test_a_host_that_refuses_says_why(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """The user reads the host's reason, its admin what to do about it, and the GPU goes through
    the wipe all the same."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await site.add_host(client, 0)
        world.fail["create"] = HostError("QEMU cannot pass /srv.", "chmod o+x /srv")
        lease = await client.acquire(acquire_body())
        ended = await lease_in(client, lease.id, "ended")
        assert ended.reason == "host-error"
        assert (
            ended.message == "Host h1 could not start the virtual machine: QEMU cannot pass /srv."
        )
        assert "QEMU cannot pass /srv. chmod o+x /srv" in caplog.text
        del world.fail["create"]
        await gpu_in(client, lease.gpus[0], "unassigned")


async def test_a_full_disk_is_told_to_each_in_her_words(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """The user learns that it is not her fault and what she can do, the admin which disk it is and
    what to delete."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await site.add_host(client, 0)
        world.fail["create"] = HostFull("There is no room in pool p at /srv/p.", "Delete homes.")
        ended = await lease_in(client, (await client.acquire(acquire_body())).id, "ended")
        assert ended.reason == "host-error"
        told = from_lease(ended).jupyterhub_message
        assert told.startswith("The disk of host h1 is full, so your server could not start.")
        assert "Start the server again." in told
        assert "/srv/p" not in told
        assert "Delete" not in told
        assert "no room in pool p at /srv/p. Delete homes." in caplog.text


async def test_a_gpu_is_not_released_while_somebody_holds_it(site: Site) -> None:
    """libvirt's word is not enough: the lease stays until the device is really free."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await site.add_host(client, 0)
        lease = await client.acquire(acquire_body())
        await lease_in(client, lease.id, "running")
        world.held.add(lease.gpus[0])
        await client.release(
            schema.ReleaseLease(username="ada", server_name="", start_id="start-0001")
        )
        await lease_in(client, lease.id, "stopping")
        asked = ("released", lease.gpus[0])
        await wait_for_async(lambda: asked in world.history, 45, "the host to be asked")
        assert (await client.lease(lease.id)).state == "stopping"
        world.held.clear()
        await lease_in(client, lease.id, "ended")


async def test_a_home_that_was_never_used_binds_nobody(site: Site) -> None:
    """The first start failed on one host; the next may go to another."""
    world, other = site.worlds["h1"], site.world("h2", gpus=1)
    async with site.running() as client:
        await site.add_host(client, 0)
        await site.add_host(client, 1, "h2")
        await client.change_host("h2", schema.ChangeHost(drained=True))
        world.fail["create"] = HostError("QEMU says no.")
        failed = await client.acquire(acquire_body())
        await lease_in(client, failed.id, "ended")
        await client.change_host("h2", schema.ChangeHost(drained=False))
        await client.change_host("h1", schema.ChangeHost(drained=True))
        lease = await client.acquire(acquire_body(start="start-0002"))
        assert (await lease_in(client, lease.id, "running")).host == "h2"
    await other.close()


async def test_unknown_image_and_too_little_memory(site: Site) -> None:
    """Bad requests say what to do."""
    async with site.running() as client:
        await site.add_host(client, 0)
        with pytest.raises(AllocatorError, match="there are: lab"):
            await client.acquire(acquire_body(image="nothing"))


async def test_a_full_home_name_never_leaves_the_ledger(site: Site) -> None:
    """No user name stands in a volume's name, whatever it is."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await site.add_host(client, 0)
        for name in ("../../etc", "a b", "ä/ö\\", "x" * 255):
            lease = await client.acquire(acquire_body(name))
            await lease_in(client, lease.id, "running")
            await client.stop(lease.id, wait_s=20)
        assert len(world.homes) == 4
        assert all(volume.isascii() and "/" not in volume for volume in world.homes)
