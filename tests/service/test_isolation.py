"""One host that hangs delays nobody on the others, and is used again when it comes back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuspawner import schema
from gpuspawner.client import AllocatorClient, AllocatorError
from gpuspawner.ledger import database
from gpuspawner.ledger.database import LedgerUnwritable
from tests.layers import wait_for_async
from tests.service import scripted
from tests.service.harness import Site, acquire_body, gpu_in, lease_in


@pytest.fixture
async def site(tmp_path: Path):
    """Two hosts of two GPUs, alike but for the model, so that a test chooses where it goes."""
    site = Site(tmp_path, boot_s=30)
    for name, model in (("h1", "Model A"), ("h2", "Model B")):
        world = site.world(name)
        _rename(world, model)
    yield site
    for world in site.worlds.values():
        await world.close()
        assert world.overlaps == []


def _rename(world: scripted.World, model: str) -> None:
    gpus = tuple(replace(gpu, model=model) for gpu in world.inventory.gpus)
    world.inventory = replace(world.inventory, gpus=gpus)


async def _add_both(site: Site, client: AllocatorClient) -> None:
    await site.add_host(client, 0, "h1")
    await site.add_host(client, 1, "h2")


async def _state(client: AllocatorClient, name: str) -> str:
    return next(host.state for host in await client.hosts() if host.name == name)


async def _loop(client: AllocatorClient, user: str, **request: Any) -> float:
    """Start a server, stop it, wait for its GPU; the seconds that took."""
    begun = time.monotonic()
    lease = await client.acquire(acquire_body(user, **request))
    lease = await lease_in(client, lease.id, "running")
    assert lease.host == "h2"
    ended = await client.stop(lease.id, wait_s=20)
    assert ended.state == "ended"
    return time.monotonic() - begun


@pytest.mark.parametrize("patience_s", [0.3, 3600.0], ids=["deadline", "no deadline"])
async def test_a_frozen_host_delays_no_other(site: Site, patience_s: float) -> None:
    """With each call to h1 hanging, given up in time or not, a server on h2 takes what it took."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await _add_both(site, client)
        calm_s = await _loop(client, "before", gpu_model="Model B")
        stuck = await client.acquire(acquire_body("stuck", gpu_model="Model A"))
        await lease_in(client, stuck.id, "running")
        world.freeze(patience_s)
        starting = await client.acquire(acquire_body("starting", gpu_model="Model A"))
        stopping = asyncio.create_task(client.stop(stuck.id, wait_s=15))
        for number in range(3):
            took_s = await _loop(client, f"user{number}", gpu_model="Model B")
            assert took_s < calm_s + 1.0
        assert (await client.lease(starting.id)).state == "starting"
        world.thaw()
        assert (await stopping).state == "ended"
        await lease_in(client, starting.id, "running")


async def test_it_is_found_out_at_once_and_used_again_by_itself(site: Site) -> None:
    """The first call that is given up has the host looked at: it does not take the next lease.
    Nobody has to do anything when it is back."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await _add_both(site, client)
        world.freeze()
        first = await client.acquire(acquire_body("first", gpu_model="Model A"))
        await wait_for_async(
            lambda: _is(client, "h1", "unreachable"), 45, "h1 to be known as unreachable"
        )
        texts = await _story(client, first)
        assert "Host h1 does not answer; waiting for it." in texts
        second = await client.acquire(acquire_body("second"))
        assert second.host == "h2", "a lease went to the host that does not answer"
        with pytest.raises(AllocatorError, match=r"h1") as caught:
            await client.acquire(acquire_body("third", gpu_model="Model A"))
        assert caught.value.status == 503
        world.thaw()
        await lease_in(client, first.id, "running")
        await wait_for_async(lambda: _is(client, "h1", "ready"), 45, "h1 to be ready")
        third = await client.acquire(acquire_body("third", "start-0002", gpu_model="Model A"))
        await lease_in(client, third.id, "running")
        assert texts.count("Host h1 does not answer; waiting for it.") == 1


async def _is(client: AllocatorClient, name: str, state: str) -> bool:
    return await _state(client, name) == state


async def _story(client: AllocatorClient, lease: schema.Lease) -> list[str]:
    """What has been told so far."""
    texts: list[str] = []
    try:
        async with asyncio.timeout(0.5):
            async for event in client.events(lease.id):
                texts.append(event.message)
    except TimeoutError:
        pass
    return texts


@pytest.mark.parametrize("patience_s", [0.3, 3600.0], ids=["deadline", "no deadline"])
async def test_a_host_that_hangs_at_the_start(site: Site, patience_s: float) -> None:
    """An allocator that starts while h1 hangs works with h2 at once, and with h1 when it can."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await _add_both(site, client)
        kept = await client.acquire(acquire_body("kept", gpu_model="Model A"))
        await lease_in(client, kept.id, "running")
    world.freeze(patience_s)
    async with site.running() as client:
        await wait_for_async(lambda: _is(client, "h2", "ready"), 2, "h2 to be ready")
        await _loop(client, "ada", gpu_model="Model B")
        assert (await client.lease(kept.id)).state == "running"
        world.thaw()
        await wait_for_async(lambda: _is(client, "h1", "ready"), 45, "h1 to be ready")
        assert (await client.stop(kept.id, wait_s=20)).state == "ended"
        await gpu_in(client, kept.gpus[0], "unassigned")


async def test_settings_that_make_no_driver_keep_no_other_host_out(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host whose stored settings a new version refuses is unreachable, with the reason."""
    async with site.running() as client:
        await _add_both(site, client)
    worlds = scripted.WORLDS.copy()

    def refuse(name: str, *rest: Any) -> scripted.ScriptedHost:
        if name == "h1":
            raise ValueError("its emulated hardware is not YAML.")
        return scripted.ScriptedHost(worlds[name])

    monkeypatch.setattr(scripted, "scripted_host", refuse)
    async with site.running() as client:
        await wait_for_async(lambda: _is(client, "h2", "ready"), 45, "h2 to be ready")
        h1 = next(host for host in await client.hosts() if host.name == "h1")
        assert h1.state == "unreachable"
        assert "not YAML" in (h1.reason or "")
        await _loop(client, "ada", gpu_model="Model B")
        with pytest.raises(AllocatorError, match="was not added"):
            await client.add_host(schema.AddHost(name="h1", uri="test:///other"))
        h1 = next(host for host in await client.hosts() if host.name == "h1")
        assert h1.uri == "test:///default", "settings that were refused are stored"


async def test_the_home_is_on_the_host_that_hangs(site: Site) -> None:
    """The refusal names the host of the home and what is wrong, not some other host."""
    world = site.worlds["h1"]
    async with site.running() as client:
        await _add_both(site, client)
        lease = await client.acquire(acquire_body("ada", gpu_model="Model A"))
        await lease_in(client, lease.id, "running")
        await client.stop(lease.id, wait_s=20)
        await gpu_in(client, lease.gpus[0], "unassigned")
        world.freeze()
        # Somebody else's start finds out.
        await client.acquire(acquire_body("bert", gpu_model="Model A"))
        await wait_for_async(lambda: _is(client, "h1", "unreachable"), 45, "h1 to be unreachable")
        with pytest.raises(AllocatorError) as caught:
            await client.acquire(acquire_body("ada", "start-0002"))
        assert caught.value.refusal.constraint == "home"
        assert caught.value.refusal.message.startswith(
            "Your home is on host h1, which does not answer."
        )
        world.thaw()


async def test_a_previous_server_that_cannot_stop_is_named(tmp_path: Path) -> None:
    """A new start waits for the old VM's end; if its host hangs, the user reads that."""
    site = Site(tmp_path, wait_s=15.0)
    world = site.world()
    async with site.running() as client:
        await site.add_host(client, 0)
        old = await client.acquire(acquire_body())
        await lease_in(client, old.id, "running")
        world.freeze()
        new = await client.acquire(acquire_body(start="start-0002"))
        assert new.state == "queued"
        ended = await lease_in(client, new.id, "ended")
        assert ended.reason == "wait-timeout"
        assert "previous server did not stop" in (ended.message or "")
        assert "Host h1" in (ended.message or "")
        world.thaw()
        await lease_in(client, old.id, "ended")
    await world.close()


async def test_guests_that_say_nothing_hide_no_other(tmp_path: Path) -> None:
    """Twelve machines that take the connection and never answer; the thirteenth is seen."""
    site = Site(tmp_path)
    mute = site.world("h1", cores=16)
    site.world("h2")
    async with site.running() as client:
        await site.add_host(client, 0, "h1")
        mute.mute = True
        for number in range(12):
            await client.acquire(acquire_body(f"mute{number}", gpus=0))
        await wait_for_async(lambda: len(mute.servers) == 12, 45, "the mute machines")
        await site.add_host(client, 1, "h2")
        await client.change_host("h1", schema.ChangeHost(drained=True))
        lease = await client.acquire(acquire_body("ada"))
        await lease_in(client, lease.id, "running")
        assert len(mute.servers) == 12, "they were seen only when the others had given up"
    for world in site.worlds.values():
        await world.close()


async def test_a_host_without_addresses_holds_up_nobody(tmp_path: Path) -> None:
    """h1's range has room for one guest; the second goes to h2, and the third is told why not."""
    site = Site(tmp_path)
    site.world("h1", gpus=4)
    async with site.running() as client:
        await client.add_host(
            schema.AddHost(name="h1", uri="test:///default", cidr="127.200.0.0/30")
        )
        await wait_for_async(lambda: site._all_free(client, "h1"), 20, "the GPUs of h1")
        first = await client.acquire(acquire_body("first"))
        with pytest.raises(AllocatorError) as caught:
            await client.acquire(acquire_body("second"))
        assert caught.value.refusal.constraint == "address"
        site.world("h2")
        await site.add_host(client, 1, "h2")
        third = await client.acquire(acquire_body("third"))
        assert (first.host, third.host) == ("h1", "h2")
    for world in site.worlds.values():
        await world.close()


async def test_a_full_disk_costs_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The database takes nothing for a while: when it does again, the host is used again."""
    site = Site(tmp_path)
    world = site.world()
    app = site.app()
    async with contextlib.AsyncExitStack() as stack:
        await app.serve(stack)
        client = AllocatorClient(site.url, "t" * 40)
        stack.push_async_callback(client.close)
        await site.add_host(client, 0)
        real = database.Ledger._transaction

        def full(self: database.Ledger, fn: Any) -> Any:
            raise LedgerUnwritable("The disk is full.")

        monkeypatch.setattr(database.Ledger, "_transaction", full)
        with pytest.raises(AllocatorError) as caught:
            await client.check_host("h1")
        assert caught.value.status == 503
        monkeypatch.setattr(database.Ledger, "_transaction", real)
        await client.check_host("h1")  # has it looked at again
        monkeypatch.setattr(database.Ledger, "_transaction", full)
        await wait_for_async(
            lambda: "host_failed host=h1" in caplog.text, 45, "a round on a full disk"
        )
        monkeypatch.setattr(database.Ledger, "_transaction", real)
        lease = await client.acquire(acquire_body())
        await lease_in(client, lease.id, "running")
        seen = world.history.count(("survey", ""))

        async def surveyed() -> bool:
            await client.check_host("h1")
            return world.history.count(("survey", "")) > seen + 1

        await wait_for_async(surveyed, 45, "the host to be surveyed again")
    await world.close()
