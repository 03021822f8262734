"""What a host's faults look like on real passthrough: the table in docs/lab.md, by hand.

    tests/run lab --all

Each fault is made on the lab host; what the host showed, what became of the GPU, why, and what its
user was told is noted and printed as a table at the end. A fault that comes out otherwise than it
should fails its test all the same. The tests run in the order of this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from deploy.labhost import network
from deploy.labhost.machine import GPUS, LabGpu
from deploy.labhost.running import Lab
from gpuspawner import schema
from tests.lab.conftest import note, timed
from tests.lab.pool import START_S, LabPool
from tests.layers import wait_for_async
from tests.vm.pool import Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

GPU = {gpu.name: gpu for gpu in GPUS}
WORK, FREE, SLOW = GPU["gpu0"], GPU["gpu3"], GPU["gpu4"]
DONE = ("unassigned", "failed", "lost", "quarantined")
BACK_S = 400.0  # an emulated host boots, libvirt answers, the allocator finds it


async def server(pool: LabPool, user: str) -> Server:
    """A tiny guest that answers, with one GPU."""
    lease = await pool.acquire(user, start=f"start-{user}")
    return Server(pool, await pool.running(lease, START_S))


async def told(pool: LabPool, lease_id: str) -> str:
    """The last thing that a lease's user has read."""
    return [event.message async for event in pool.client.events(lease_id)][-1]


async def host_state(pool: LabPool, *states: str, timeout: float = BACK_S) -> schema.Host:
    """Wait until the host is in one of these states."""

    async def look() -> schema.Host | None:
        record = await pool.record()
        return record if record.state in states else None

    return await wait_for_async(look, timeout, f"the host to be {' or '.join(states)}", 0.2)


async def only(pool: LabPool, *wanted: LabGpu) -> None:
    """Hold every other GPU, so that none of them is diagnosed or given out."""
    held = {gpu.address for gpu in await pool.client.gpus() if gpu.holds}
    for gpu in GPUS:
        if gpu in wanted and gpu.address in held:
            await pool.unhold(gpu)
        elif gpu not in wanted and gpu.address not in held:
            await pool.hold(gpu)


async def test_degraded_link(pool: LabPool) -> None:
    await only(pool, WORK)
    found = await pool.client.check_host(pool.host)
    (text,) = (each.text for each in found.findings if SLOW.address in each.text)
    assert "2.5" in text
    note("degraded link", text, "held by the test", "-", "-")


async def test_a_free_gpu_is_unplugged(pool: LabPool, lab: Lab) -> None:
    await only(pool, FREE)
    with timed("fault table: first diagnosis"):
        assert (await pool.lab_gpu_in(FREE, *DONE)).state == "unassigned"

    def pull() -> None:
        with lab.monitor() as monitor:
            monitor.do("device_del", id=FREE.name)

    with timed("fault: free GPU unplugged, until it is lost"):
        await asyncio.to_thread(pull)
        found = await pool.lab_gpu_in(FREE, "lost")
    witness = await pool.shell.probe("witness", FREE.address)
    note("free GPU unplugged", witness["note"], found.state, found.reason or "", "-")


@pytest.fixture(scope="module")
def servers() -> dict[str, Server]:
    """Servers that outlive a test."""
    return {}


async def test_qemu_is_killed(pool: LabPool) -> None:
    await only(pool, WORK)
    assert (await pool.lab_gpu_in(WORK, *DONE)).state == "unassigned"
    here = await server(pool, "kilda")
    pid = await pool.qemu_pid(here.lease.id)
    with timed("fault: QEMU killed, until its lease has ended"):
        await pool.on_host("kill", "-9", str(pid))
        ended = await pool.ended(here.lease.id)
    found = await pool.lab_gpu_in(WORK, *DONE)
    assert (ended.reason, found.state) == ("guest-gone", "unassigned")
    note("QEMU killed", "process gone", f"used, then {found.state}", ended.reason or "",
         await told(pool, ended.id))  # fmt: skip


async def test_libvirtd_is_killed(pool: LabPool, servers: dict[str, Server]) -> None:
    servers["main"] = here = await server(pool, "lida")
    states: set[str] = set()

    async def answers() -> bool:
        states.add((await pool.record()).state)
        found = await pool.client.check_host(pool.host)
        return not any("cannot be asked" in each.text for each in found.findings)

    with timed("fault: libvirtd killed, until it answers the pool again"):
        await pool.on_host("systemctl", "kill", "--signal=KILL", "libvirtd.service")
        await wait_for_async(answers, BACK_S, "libvirtd to answer", 0.5)
        await host_state(pool, "ready")
    shown = await pool.on_host("systemctl", "show", "--property=NRestarts", "libvirtd.service")
    assert int(shown.split("=")[1]) >= 1
    await here.ask("state")
    assert (await pool.client.lease(here.lease.id)).state == "running"
    note("libvirtd killed", shown.strip(), "assigned", f"host {' and '.join(sorted(states))}",
         "nothing: it runs on")  # fmt: skip


@contextlib.asynccontextmanager
async def cut(seconds: float) -> AsyncIterator[None]:
    """The cable to the host's shell and libvirt is out, for so long at least."""
    began = time.monotonic()
    await ip("link", "set", "dev", network.ADMIN.tap, "down")
    try:
        yield
        await asyncio.sleep(max(0.0, seconds - (time.monotonic() - began)))
    finally:
        await ip("link", "set", "dev", network.ADMIN.tap, "up")


async def ip(*words: str) -> None:
    """One command."""
    process = await asyncio.create_subprocess_exec("ip", *words)
    assert await process.wait() == 0


@pytest.mark.parametrize("seconds", [5, 30])
async def test_the_connection_is_cut(
    pool: LabPool, servers: dict[str, Server], seconds: int
) -> None:
    here = servers["main"]
    states = set()
    with timed(f"fault: connection cut for {seconds} s, until the host is ready"):
        async with cut(seconds):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                states.add((await pool.record()).state)
                await asyncio.sleep(0.5)
        await host_state(pool, "ready")
    assert seconds > 10 or states == {"ready"}
    await here.ask("state")
    assert (await pool.client.lease(here.lease.id)).state == "running"
    note(f"connection cut for {seconds} s", "nothing: it runs on", "assigned",
         f"host {' and '.join(sorted(states))}", "nothing: it runs on")  # fmt: skip


async def reboot(pool: LabPool) -> None:
    """At once, as a watchdog would."""
    words = ("sh", "-c", "(sleep 0.2; echo b > /proc/sysrq-trigger) >/dev/null 2>&1 &")
    await pool.on_host(*words)


async def test_the_host_reboots_under_a_lease(pool: LabPool, servers: dict[str, Server]) -> None:
    here = servers.pop("main")
    with timed("fault: reboot under a lease, until it has ended"):
        await reboot(pool)
        ended = await pool.ended(here.lease.id, timeout=BACK_S)
    assert ended.reason == "host-lost"
    with timed("fault: reboot under a lease, until its GPU is free again"):
        found = await pool.lab_gpu_in(WORK, *DONE)
    assert found.state == "unassigned", found.reason
    note("host rebooted under a lease", "another boot id", f"used, then {found.state}",
         ended.reason or "", await told(pool, ended.id))  # fmt: skip


async def test_the_host_reboots_under_a_diagnosis(pool: LabPool) -> None:
    await pool.client.gpu_action(pool.host, WORK.address, schema.GpuAction(action="retest"))
    run = (await pool.lab_gpu_in(WORK, "diagnosing")).diagnosis_id
    assert run is not None

    async def booting() -> bool:
        return pool.service_domain(run) in await asyncio.to_thread(pool.domains)

    await wait_for_async(booting, START_S, "the service VM", 1.0)
    with timed("fault: reboot under a diagnosis, until the GPU is free again"):
        await reboot(pool)
        await host_state(pool, "unreachable")
        await host_state(pool, "ready")
        found = await pool.lab_gpu_in(WORK, *DONE)
    assert found.state == "unassigned", found.reason
    assert found.attempt == 0
    runs = await pool.client.diagnoses(host=pool.host, gpu=WORK.address)
    cut_off = next(run for run in runs if run.outcome != "pass")
    note("host rebooted under a diagnosis", "another boot id", f"used, then {found.state}",
         f"{cut_off.outcome}: {' '.join(cut_off.reasons)}", "-")  # fmt: skip


async def test_versions(lab: Lab) -> None:
    """What it was measured with."""
    words = "uname -r; libvirtd --version; qemu-system-x86_64 --version | head -1"
    done = await asyncio.to_thread(lab.ssh, ["sh", "-c", words])
    assert done.returncode == 0
    note("(versions)", f"{done.stdout.strip()}; outside: Linux {os.uname().release}", "", "", "")


async def test_jupyterlab_in_a_guest_of_the_lab(pool: LabPool, images_dir: Path) -> None:
    """The users' image on a passed-through GPU, reached over the guests' bridge as the proxy would.
    Most of the time goes into the image's copy over an emulated machine's ssh."""
    await only(pool, WORK)
    assert (await pool.lab_gpu_in(WORK, *DONE)).state == "unassigned"
    pool.use_image(images_dir / "lab")
    with timed("JupyterLab: its image is copied to the host"):
        await wait_for_async(lambda: has_image(pool, "lab"), 1800, "the image on the host", 2.0)
    with timed("JupyterLab: from the request until it answers"):
        asked = await pool.acquire("jo", image="lab", memory_mib=1536, home_mib=1024)
        lease = await pool.running(asked, 1200)
    url = f"http://{lease.address}:{lease.port}/user/jo/api"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        assert "version" in await answer.json()
    await Server(pool, lease).stop()
    assert (await pool.lab_gpu_in(WORK, *DONE)).state == "unassigned"


async def has_image(pool: LabPool, name: str) -> bool:
    """The host has it, whole."""
    images = await pool.client.images()
    return any(image.name == name and pool.host in image.hosts for image in images)
