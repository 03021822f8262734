"""A disk runs full, the host's or the allocator's: clear words, nothing lost, no restart needed."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from gpuspawner import schema
from gpuspawner.client import AllocatorError
from gpuspawner.errors import from_lease, from_problem
from tests.layers import wait_for_async
from tests.vm.daemon import Daemon
from tests.vm.picture import check_picture, seeds
from tests.vm.pool import GPU, TWO_GPUS, Pool, declaration, pool_of
from tests.vm.small_disk import small_disk

SECOND_GPU = "0000:42:00.0"
MIB = 1 << 20


@pytest.fixture
async def pool(site_folder: Path, images_dir: Path, libvirtd: Daemon) -> AsyncIterator[Pool]:
    """A pool that has no host yet."""
    async with pool_of(site_folder / "pool", images_dir, diagnosis_attempts=9) as pool:
        yield pool


async def test_the_hosts_disk_is_full(pool: Pool, libvirtd: Daemon) -> None:
    """A start tells its user that the disk is full, the log which one and what to do, and nothing
    is left; a diagnosis says nothing about its GPU; a server that writes into its home waits. With
    room again all three go on."""
    place = pool.libvirt_pools / f"gs-{pool.instance}-emu1"
    # libvirtd may have a mount namespace of its own.
    pool.libvirt_pools = Path(f"/proc/{libvirtd.pid}/root{pool.libvirt_pools}")
    with small_disk(place, 230, libvirtd.enter) as disk:
        await pool.add_host(declaration(TWO_GPUS))
        for address in (GPU, SECOND_GPU):
            await pool.gpu_in("unassigned", address=address)
        ada = await pool.start_server("ada")
        await ada.ask("home/write", b"fsynced", name="kept.txt")
        other = SECOND_GPU if ada.lease.gpus == [GPU] else GPU
        # The memory of a pretended GPU takes room as soon as it is written to.
        memory = str(place / pool.gpu_memory(other).name)
        disk.run("fallocate", "--punch-hole", "-o", str(MIB), "-l", str(15 * MIB), memory)
        before = volumes(pool)
        disk.fill()

        lease = await pool.acquire("bob")
        ended = await pool.ended(lease.id)
        assert ended.reason == "host-error"
        for told in (ended.message or "", str(from_lease(ended).jupyterhub_message)):
            assert "The disk of host emu1 is full" in told, told
            assert "in their log" in told, told
            assert "Free some space" not in told, told
        (logged,) = [
            line
            for line in pool.log.read_text().splitlines()
            if f"lease_host_error lease={lease.id}" in line
        ]
        assert "no room for the volume" in logged, logged
        assert f"pool gs-{pool.instance}-emu1 at {place}" in logged, logged
        assert "Free some space on that disk" in logged, logged
        assert seeds(pool) == []

        run = await inconclusive(pool, other)
        assert run.reasons
        assert (await pool.gpu_in("used", "diagnosing", address=other)).dirty

        # A guest that finds no room for what it writes is stopped, not failed.
        writing = asyncio.create_task(ada.ask("home/write", b"x" * 8 * MIB, name="big.bin"))

        async def paused() -> bool:
            state = pool.virsh("domstate", pool.domain(ada.lease.id), "--reason")
            return state.strip() == "paused (I/O error)"

        await wait_for_async(paused, 60, "ada's machine to stop where it is", 0.2)
        assert (await pool.client.lease(ada.lease.id)).state == "running"
        assert not writing.done()

        disk.free()
        await asyncio.wait_for(writing, 90)
        assert await ada.ask("home/read", name="kept.txt") == b"fsynced"
        assert await ada.ask("home/read", name="big.bin") == b"x" * 8 * MIB
        story = [event.message async for event in pool.client.events(lease.id)]
        assert ended.message in story

        await pool.gpu_in("unassigned", address=other)
        left = volumes(pool) - before
        assert [name for name in left if not name.startswith("home-")] == [], left
        await pool.start_server("bob", "start-0002")
        await check_picture(pool, "there is room again")
        await ada.stop()
        told_ada = [event.message async for event in pool.client.events(ada.lease.id)]
        assert any("disk of host emu1 is full" in text for text in told_ada), told_ada
        await pool.remove()


def volumes(pool: Pool) -> set[str]:
    """Names of all files in the host's pool."""
    return {path.name for path in pool.libvirt_pools.glob("*/*")} - {"filler"}


async def inconclusive(pool: Pool, address: str) -> schema.Diagnosis:
    """The newest diagnosis of a GPU that has ended; it must say nothing."""

    async def look() -> schema.Diagnosis | None:
        runs = [run for run in await pool.client.diagnoses(gpu=address) if run.state == "done"]
        return runs[0] if len(runs) > 1 else None  # the first one was before

    run = await wait_for_async(look, 120, "a diagnosis on the full disk to end", 0.5)
    assert run.outcome == "inconclusive", run
    return run


async def test_the_allocators_disk_is_full(
    site_folder: Path, images_dir: Path, libvirtd: Daemon
) -> None:
    """What would have to be written is refused, with what to do; what runs goes on and is shown.
    With room again everything works, with the same process."""
    state = site_folder / "state"
    with small_disk(state, 16) as disk:
        async with pool_of(site_folder / "pool", images_dir, state=state) as pool:
            await pool.add_host(declaration(TWO_GPUS))
            for address in (GPU, SECOND_GPU):
                await pool.gpu_in("unassigned", address=address)
            ada = await pool.start_server("ada")
            await ada.ask("home/write", b"fsynced", name="kept.txt")
            process = pool.process
            # As long as its log has room of its own, the database does not notice a full disk.
            await wait_for_async(lambda: log_is_short(pool), 30, "the database's log to be empty")
            disk.fill()

            with pytest.raises(AllocatorError) as caught:
                await pool.acquire("bob")
            refusal = caught.value.refusal
            assert (refusal.status, refusal.reason) == (503, "database")
            assert "disk is full" in refusal.message
            assert "free space" in refusal.message
            told = from_problem(caught.value)
            assert "Try again in a few minutes" in told.jupyterhub_message
            with pytest.raises(AllocatorError, match="free space"):
                await pool.client.stop(ada.lease.id)
            # Reading needs no room.
            assert (await pool.client.lease(ada.lease.id)).state == "running"
            assert [host.name for host in await pool.client.hosts()] == ["emu1"]
            async with (
                aiohttp.ClientSession() as session,
                session.get(pool.url + "metrics") as page,
            ):
                assert page.status == 200
            assert await ada.ask("home/read", name="kept.txt") == b"fsynced"
            # A machine that ends meanwhile is not forgotten.
            pool.kill_qemu(ada.lease.id)

            async def noticed() -> bool:
                return f"lease_retry lease={ada.lease.id}" in pool.log.read_text()

            await wait_for_async(noticed, 60, "the allocator to notice", 0.2)
            assert (await pool.client.lease(ada.lease.id)).state == "running"

            disk.free()
            ended = await pool.ended(ada.lease.id)
            assert ended.reason == "guest-gone"
            again = await pool.start_server("ada", "start-0002")
            assert await again.ask("home/read", name="kept.txt") == b"fsynced"
            await pool.gpu_in("unassigned", address=ada.lease.gpus[0])
            await check_picture(pool, "there is room again")
            assert pool.process is process
            assert process is not None
            assert process.poll() is None


def log_is_short(pool: Pool) -> bool:
    """Have SQLite move what is in its write-ahead log into the database and cut it off."""
    with contextlib.closing(sqlite3.connect(pool.ledger, isolation_level=None)) as ledger:
        busy, _log, _moved = ledger.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy
