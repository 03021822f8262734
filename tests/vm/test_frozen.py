"""Two hosts, each with a libvirtd of its own; one of them stops in its tracks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gpuspawner import schema
from gpuspawner.client import AllocatorError
from tests.layers import wait_for_async
from tests.service.front import visitor
from tests.vm.daemon import Daemon, second_daemon
from tests.vm.hub import BASE, PASSWORD, HubSite
from tests.vm.picture import check_picture
from tests.vm.pool import GPU, Pool, declaration

OTHER_GPU = "0000:81:00.0"
ONE_OF = """\
nodes:
  - {id: 0, cores: 4, memory_mib: 8192, reserve_mib: 512}
gpus:
  - {address: "ADDRESS", node: 0, memory_mib: 16, model: MODEL}
"""


def one_of(address: str, model: str) -> str:
    """A host with one GPU, by whose model a test chooses where it goes."""
    return declaration(ONE_OF.replace("ADDRESS", address).replace("MODEL", model))


async def host(pool: Pool, name: str) -> schema.Host:
    """A host as the API shows it."""
    return next(host for host in await pool.client.hosts() if host.name == name)


async def in_state(pool: Pool, name: str, state: str) -> None:
    """Wait until a host is in this state."""

    async def look() -> bool:
        return (await host(pool, name)).state == state

    await wait_for_async(look, 120, f"{name} to be {state}", 0.5)


def frozen(daemon: Daemon) -> bool:
    """Whether its process stands still now."""
    stat = Path(f"/proc/{daemon.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


@pytest.fixture
async def site(site_folder: Path, images_dir: Path, libvirtd: Daemon) -> AsyncIterator[HubSite]:
    """Allocator, proxy and hub; the leases are not the hub's, which must not end them."""
    site = HubSite(site_folder / "site", hub_forgot_s=3600.0)
    site.use_image(images_dir / "service")
    site.use_image(images_dir / "tiny")
    try:
        await asyncio.to_thread(site.start)
        yield site
    finally:
        await site.remove()
        print(site.log.read_text()[-8000:])


@pytest.fixture
def second() -> Iterator[Daemon]:
    """The other host's libvirtd."""
    with second_daemon() as daemon:
        yield daemon


async def test_a_frozen_libvirtd_delays_nobody_elsewhere(second: Daemon, site: HubSite) -> None:
    """While it is frozen, a server on the other host starts, stops and has its GPU cleaned; the
    frozen host is shown as unreachable and takes nothing new, and who runs there goes on. It comes
    back by itself."""
    uri = f"qemu+unix:///system?socket={second.socket}"
    await site.add_host(one_of(GPU, "Model A"))
    # On one machine, two libvirtds must not make their firewall's chains at once.
    await in_state(site, "emu1", "ready")
    await site.add_host(one_of(OTHER_GPU, "Model B"), "emu2", uri, "10.237.0.0/24")
    site.start_proxy()
    await site.start_hub()
    await site.gpu_in("unassigned")
    await site.gpu_in("unassigned", address=OTHER_GPU)
    kept = await site.start_server("kept", gpu_model="Model B")
    assert kept.lease.host == "emu2"
    await kept.ask("home/write", b"fsynced", name="kept.txt")
    uptime_s = json.loads(await kept.ask("state"))["uptime_s"]

    second.freeze()
    try:
        ada = await site.start_server("ada", gpu_model="Model A")
        assert ada.lease.host == "emu1"
        assert (await ada.stop()).reason == "released"
        await site.gpu_in("unassigned")
        assert (await site.client.diagnoses(gpu=GPU))[0].outcome == "pass"

        await in_state(site, "emu2", "unreachable")
        assert "Host emu2" in ((await host(site, "emu2")).reason or "")
        assert (await host(site, "emu1")).state == "ready"
        async with visitor(BASE) as admin:
            page = await admin.log_in("admin", PASSWORD * 2, "/services/gpu/admin")
        assert page.status == 200
        assert "unreachable" in page.text.lower()
        assert "Host emu2" in page.text, "the reason"
        with pytest.raises(AllocatorError, match="emu2") as caught:
            await site.acquire("late", gpu_model="Model B")
        assert caught.value.status == 503
        assert (await site.client.lease(kept.lease.id)).state == "running"
        assert json.loads(await kept.ask("state"))["uptime_s"] >= uptime_s
        assert frozen(second), "all of that was while it stood still"
    finally:
        second.thaw()

    await in_state(site, "emu2", "ready")
    assert (await site.client.lease(kept.lease.id)).state == "running"
    assert json.loads(await kept.ask("state"))["uptime_s"] >= uptime_s
    await check_picture(site, "thawed")
    assert (await kept.stop()).reason == "released"
    await site.gpu_in("unassigned", address=OTHER_GPU)
    again = await site.start_server("kept", "start-0002", gpu_model="Model B")
    assert await again.ask("home/read", name="kept.txt") == b"fsynced"
    await again.stop()
    await check_picture(site, "used again")
