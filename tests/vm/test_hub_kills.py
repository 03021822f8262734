"""The hub is killed while a start and while a stop is pending; it never was the truth."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpuspawner import schema
from tests.layers import wait_for_async
from tests.vm.daemon import Daemon
from tests.vm.hub import TINY, HubSite
from tests.vm.picture import check_picture, seeds
from tests.vm.pool import TWO_GPUS, Server, declaration


@pytest.fixture
async def site(site_folder: Path, images_dir: Path, libvirtd: Daemon) -> AsyncIterator[HubSite]:
    """Allocator, proxy and hub, a host of two GPUs, and a profile with the tiny guest."""
    site = HubSite(
        site_folder / "site", TINY, hub_watch_s=1.0, hub_forgot_s=3.0, diagnosis_attempts=5
    )
    site.use_image(images_dir / "service")
    site.use_image(images_dir / "tiny")
    try:
        await asyncio.to_thread(site.start)
        await site.add_host(declaration(TWO_GPUS))
        site.start_proxy()
        await all_free(site)
        await site.start_hub()
        yield site
    finally:
        await site.remove()
        print(site.log.read_text()[-8000:])


async def all_free(site: HubSite) -> None:
    """Both GPUs are free."""

    async def look() -> bool:
        return [gpu.state for gpu in await site.client.gpus()] == ["unassigned"] * 2

    await wait_for_async(look, 180, "all GPUs to be free", 0.5)


async def lease_of(site: HubSite, user: str) -> schema.Lease:
    """A user's newest lease, when its machine has been made and its server is still starting."""

    async def look() -> schema.Lease | None:
        leases = await site.client.leases(user, "")
        if not leases or leases[0].state != "starting":
            return None
        made = site.domain(leases[0].id) in site.domains()
        return leases[0] if made else None

    return await wait_for_async(look, 90, f"the machine of {user} to be made", 0.1)


async def has_server(site: HubSite, user: str) -> bool:
    """Whether the hub shows a server of the user's."""
    _status, model = await site.hub("GET", f"users/{user}")
    return bool(model["servers"])


async def test_the_hub_is_killed(site: HubSite, libvirtd: Daemon) -> None:
    """Killed while ada's server starts: it comes up without the hub, which shows it again. While
    bob's starts, and the new hub knows nothing of it: it ends, with a reason. While ada's stops:
    it stops. No GPU is lost and nobody's file."""
    for user in ("ada", "bob"):
        await site.token_of(user)

    # A start is pending: the machine comes up, and is the user's when the hub is back.
    await site.ask_for_lab("ada")
    lease = await lease_of(site, "ada")
    site.kill_child("hub")
    ada = Server(site, await site.running(lease))
    await ada.ask("home/write", b"fsynced", name="kept.txt")
    await check_picture(site, "a start was pending")
    await site.start_hub()
    await site.lab_ready("ada")
    assert (await site.client.lease(lease.id)).state == "running"

    # A start is pending, and is still when the hub is back: nobody waits for it any more.
    await site.ask_for_lab("bob")
    lost = await lease_of(site, "bob")
    qemu = libvirtd.qemu(site.domain(lost.id))
    os.kill(qemu, signal.SIGSTOP)
    site.kill_child("hub")
    await site.start_hub()
    assert not await has_server(site, "bob")
    os.kill(qemu, signal.SIGCONT)
    ended = await site.ended(lost.id)
    assert ended.reason == "hub-forgot"
    assert ended.message
    assert (await site.client.lease(lease.id)).state == "running", "ada's is known"

    # A stop is pending: the allocator goes on with it, and the hub believes it.
    qemu = libvirtd.qemu(site.domain(lease.id))
    os.kill(qemu, signal.SIGSTOP)
    status, answer = await site.hub("DELETE", "users/ada/server")
    assert status in (202, 204), answer

    async def stopping() -> bool:
        return (await site.client.lease(lease.id)).state == "stopping"

    await wait_for_async(stopping, 30, "the allocator to hear of the stop", 0.1)
    site.kill_child("hub")
    os.kill(qemu, signal.SIGCONT)
    assert (await site.ended(lease.id)).reason == "released"
    await site.start_hub()

    async def gone() -> bool:
        return not await has_server(site, "ada")

    await wait_for_async(gone, 60, "the hub to see that ada's server is gone", 0.5)
    await all_free(site)
    assert seeds(site) == []
    await check_picture(site, "a stop was pending")

    await site.start_lab("ada")
    again = Server(site, (await site.client.leases("ada", ""))[0])
    assert await again.ask("home/read", name="kept.txt") == b"fsynced"
    await site.stop_lab("ada")
    await all_free(site)
    await check_picture(site, "afterwards")
