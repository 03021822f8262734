"""QEMU and libvirtd are killed while servers start, run, stop, and while a GPU is diagnosed.

The four moments are held at once, each with a GPU and a user of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpuspawner import schema
from tests.layers import wait_for_async
from tests.vm.daemon import Daemon
from tests.vm.picture import check_picture, seeds
from tests.vm.pool import Pool, Server, declaration, pool_of

FOUR_GPUS = """\
nodes:
  - {id: 0, cores: 8, memory_mib: 8192, reserve_mib: 512}
gpus:
  - {address: "0000:41:00.0", node: 0, memory_mib: 16}
  - {address: "0000:42:00.0", node: 0, memory_mib: 16}
  - {address: "0000:43:00.0", node: 0, memory_mib: 16}
  - {address: "0000:44:00.0", node: 0, memory_mib: 16}
"""
WITH_HOME = ("running", "stopping", "diagnosed")


@dataclass
class Moments:
    """Leases by the moment that they are held in, and the diagnosis that is held."""

    starting: schema.Lease
    running: Server
    stopping: Server
    run: schema.Diagnosis
    uptime_s: float  # of the guest that runs


@pytest.fixture
async def pool(site_folder: Path, images_dir: Path, libvirtd: Daemon) -> AsyncIterator[Pool]:
    """A pool with one host of four GPUs, all of them free."""
    traits = {"diagnosis_attempts": 5, "diagnoses_per_host": 4, "diagnosis_silence_s": 120.0}
    async with pool_of(site_folder / "pool", images_dir, **traits) as pool:
        await pool.add_host(declaration(FOUR_GPUS))
        await all_free(pool, "at first")
        yield pool


async def all_free(pool: Pool, point: str) -> None:
    """Each GPU is free again, and the last word on it was a diagnosis that passed."""

    async def look() -> bool:
        return [gpu.state for gpu in await pool.client.gpus()] == ["unassigned"] * 4

    await wait_for_async(look, 180, f"{point}: all GPUs to be free", 0.5)
    for gpu in await pool.client.gpus():
        newest = (await pool.client.diagnoses(gpu=gpu.address))[0]
        assert newest.outcome == "pass", f"{point}: {gpu.address} is free after {newest}"


async def at_the_four_moments(pool: Pool, libvirtd: Daemon, start: str) -> Moments:
    """QEMU of the guest that stops and of the service VM stand still until somebody acts."""
    servers = dict(
        zip(
            WITH_HOME,
            await asyncio.gather(*(pool.start_server(user, start) for user in WITH_HOME)),
            strict=True,
        )
    )
    for user, server in servers.items():
        await server.ask("home/write", f"of {user}".encode(), name=f"{start}.txt")
    await servers["diagnosed"].stop()

    async def diagnosis() -> schema.Diagnosis | None:
        runs = [run for run in await pool.client.diagnoses() if run.state == "running"]
        return next((run for run in runs if run.progress), None)

    run = await wait_for_async(diagnosis, 90, "a service VM to say something", 0.1)
    os.kill(libvirtd.qemu(pool.service_domain(run.id)), signal.SIGSTOP)

    starting = await pool.acquire("starting", start)

    async def booting() -> bool:
        gpus = [gpu for gpu in await pool.client.gpus() if gpu.lease_id == starting.id]
        return [gpu.state for gpu in gpus] == ["assigned"]

    await wait_for_async(booting, 60, "the machine to be made", 0.1)
    uptime_s = json.loads(await servers["running"].ask("state"))["uptime_s"]

    stopping = servers["stopping"]
    os.kill(libvirtd.qemu(pool.domain(stopping.lease.id)), signal.SIGSTOP)
    await pool.release("stopping", start)
    assert (await pool.client.lease(stopping.lease.id)).state == "stopping"
    assert (await pool.client.lease(starting.id)).state == "starting"
    return Moments(starting, servers["running"], stopping, run, uptime_s)


async def kept(pool: Pool, user: str, start: str, wrote: str) -> None:
    """What a user had fsynced is in her home at the next start."""
    server = await pool.start_server(user, start)
    found = await server.ask("home/read", name=f"{wrote}.txt")
    assert found == f"of {user}".encode(), f"{user}: {found!r}"
    state = json.loads(await server.ask("home/state"))
    assert not state["formatted"], user
    assert not state["read_only"], user
    await server.stop()


async def test_qemu_is_killed(pool: Pool, libvirtd: Daemon) -> None:
    """Each lease ends with a reason of its own, the diagnosis says nothing about its GPU, and all
    four GPUs come back through a diagnosis that passes."""
    now = await at_the_four_moments(pool, libvirtd, "start-0001")
    names = [
        *(pool.domain(id) for id in (now.starting.id, now.running.lease.id, now.stopping.lease.id)),
        pool.service_domain(now.run.id),
    ]
    for name in names:
        os.kill(libvirtd.qemu(name), signal.SIGKILL)
    for lease_id, reason, text in (
        (now.starting.id, "boot-failed", "ended while it was starting"),
        (now.running.lease.id, "guest-gone", "ended by itself"),
        (now.stopping.lease.id, "released", ""),
    ):
        ended = await pool.ended(lease_id)
        assert ended.reason == reason, f"{ended.username}: {ended.message}"
        assert text in (ended.message or ""), ended.username
        assert ended.message, ended.username
    await all_free(pool, "QEMU")
    runs = {run.id: run for run in await pool.client.diagnoses()}
    assert runs[now.run.id].outcome == "inconclusive"
    assert "ended before its report" in str(runs[now.run.id].reasons)
    assert seeds(pool) == []
    await check_picture(pool, "QEMU")
    await asyncio.gather(
        *(kept(pool, user, "start-0002", "start-0001") for user in ("running", "stopping"))
    )


async def test_libvirtd_is_killed(pool: Pool, libvirtd: Daemon) -> None:
    """Its guests go on without it, and so do their leases: the allocator finds it again by itself.
    The server that stopped has stopped, the one that started starts, and the diagnosis says
    something true of its GPU or nothing."""
    now = await at_the_four_moments(pool, libvirtd, "start-0001")
    still = [libvirtd.qemu(pool.domain(now.stopping.lease.id)),
             libvirtd.qemu(pool.service_domain(now.run.id))]  # fmt: skip
    libvirtd.kill()
    for pid in still:
        os.kill(pid, signal.SIGCONT)
    # Without libvirtd nobody's work stops, and nothing is concluded from its silence.
    assert json.loads(await now.running.ask("state"))["uptime_s"] >= now.uptime_s
    assert (await pool.client.lease(now.running.lease.id)).state == "running"
    await asyncio.to_thread(libvirtd.start)

    started = Server(pool, await pool.running(now.starting))
    ended = await pool.ended(now.stopping.lease.id)
    assert ended.reason == "released", ended.message
    assert (await pool.client.lease(now.running.lease.id)).state == "running"
    assert json.loads(await now.running.ask("state"))["uptime_s"] >= now.uptime_s

    async def two_free() -> bool:
        states = sorted(gpu.state for gpu in await pool.client.gpus())
        return states == ["assigned", "assigned", "unassigned", "unassigned"]

    await wait_for_async(two_free, 180, "the other two GPUs to be free", 0.5)
    runs = {run.id: run for run in await pool.client.diagnoses()}
    assert runs[now.run.id].outcome in ("pass", "inconclusive"), runs[now.run.id].reasons
    assert runs[now.run.id].outcome == "pass" or runs[now.run.id].reasons
    assert (await pool.client.hosts())[0].state == "ready"
    assert seeds(pool) == []
    await check_picture(pool, "libvirtd")

    # It can still be used as before: these two stop, and one that was written to is read.
    await asyncio.gather(started.stop(), now.running.stop(),
                         kept(pool, "stopping", "start-0002", "start-0001"))  # fmt: skip
