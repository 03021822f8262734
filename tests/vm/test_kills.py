"""The allocator is killed before and after the commit of every step; the picture stays true."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from gpuspawner.client import AllocatorProblem
from tests.layers import wait_for_async
from tests.vm.daemon import Daemon
from tests.vm.picture import check_picture, seeds
from tests.vm.pool import GPU, Pool, Server, declaration, pool_of

STEPS = (
    "acquire:hub",
    "commit:home",
    "commit:disks",
    "commit:seed",
    "commit:guest",
    "commit:eject",
    "running",
    "release",
    "finish",
    "begin",
    "commit",
)
POINTS = [f"{when}:{step}" for step in STEPS for when in ("before", "after")]


async def test_every_point(images_dir: Path, libvirtd: Daemon, site_folder: Path) -> None:
    """One user with one home lives through all of them; each start and stop of hers is cut
    somewhere else. What she fsynced stays, and the GPU always comes back through a diagnosis."""
    async with pool_of(site_folder / "pool", images_dir, diagnosis_attempts=30) as pool:
        await pool.add_host(declaration())
        await pool.gpu_in("unassigned")
        ada = await pool.start_server("ada", start="start-first")
        await ada.ask("home/write", b"fsynced", name="kept.txt")
        await ada.stop()
        await pool.gpu_in("unassigned")
        for number, point in enumerate(POINTS):
            await asyncio.to_thread(pool.stop)
            os.environ["GPUSPAWNER_TEST_KILL"] = point
            await asyncio.to_thread(pool.start, [sys.executable, "-m", "tests.vm.killer"])
            await one_life(pool, f"start-{number:04}", point)


async def one_life(pool: Pool, start: str, point: str) -> None:
    """Start, stop, diagnose, with one kill in between."""
    lease_id = ""
    deaths = pool.deaths

    async def revive() -> None:
        assert pool.process is not None
        if pool.process.poll() is not None:
            pool.deaths += 1
            await asyncio.to_thread(pool.start)

    async def until(state: str) -> None:
        async def look() -> bool:
            nonlocal lease_id
            try:
                lease = await pool.acquire("ada", start) if not lease_id else (
                    await pool.client.lease(lease_id)
                )  # fmt: skip
                lease_id = lease.id
                if lease.payload_needed:
                    await pool.send_payload(lease_id, "ada")
                return lease.state == state
            except AllocatorProblem:
                await revive()
                return False

        await wait_for_async(look, 120, f"{point}: the lease to be {state}", 0.3)

    await until("running")
    lease = await pool.client.lease(lease_id)
    assert await Server(pool, lease).ask("home/read", name="kept.txt") == b"fsynced", point
    assert seeds(pool) == [], f"{point}: a seed is left"
    await check_picture(pool, point)

    async def released() -> bool:
        try:
            await pool.release("ada", start)
        except AllocatorProblem:
            await revive()
            return False
        return True

    await wait_for_async(released, 60, f"{point}: the release", 0.3)
    await until("ended")
    ended = await pool.client.lease(lease_id)
    assert ended.message, f"{point}: the user is not told why"

    async def free() -> bool:
        try:
            return (await pool.client.gpus())[0].state == "unassigned"
        except AllocatorProblem:
            await revive()
            return False

    await wait_for_async(free, 120, f"{point}: the GPU to come back", 0.3)
    assert pool.deaths == deaths + 1, f"{point} was never reached"
    await check_picture(pool, point)
    assert (await pool.client.diagnoses(gpu=GPU))[0].outcome == "pass"
