"""The main loop on real guests: one tenant's data never reaches the next, faults are found."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from gpuspawner import schema
from tests.layers import wait_for_async
from tests.vm.daemon import Daemon
from tests.vm.pool import GPU, Pool, declaration, pool_of
from tests.vm.variants import build_variant

PATTERN = "5345435245542d4f462d414441"
SECRET = bytes.fromhex(PATTERN)
DEEP = 9 * 1024 * 1024  # beyond one chunk of the wipe


@pytest.fixture
async def pool(site_folder: Path, images_dir: Path, libvirtd: Daemon):
    """A pool with one host of one GPU; no diagnosis has ended yet."""
    async with pool_of(site_folder / "pool", images_dir) as pool:
        yield pool


def build(site_folder: Path, variant: str) -> Path:
    """A service image that is not honest."""
    cache = Path(os.environ.get("GPUSPAWNER_CACHE") or "/var/cache/gpuspawner")
    return build_variant(variant, site_folder / "variants", cache)


async def test_the_next_user_finds_nothing(pool: Pool) -> None:
    """User A fills GPU memory, user B is given the same GPU and reads zeros; the diagnosis in
    between says how much it found. A's home outlives all of it."""
    await pool.add_host(declaration())
    await pool.gpu_in("unassigned")
    ada = await pool.start_server("ada")
    await ada.ask("gpu/write", offset=4096, pattern=PATTERN, bytes=65536)
    await ada.ask("gpu/write", offset=DEEP, pattern=PATTERN, bytes=65536)
    await ada.ask("home/write", b"what ada wrote", name="notes.txt")
    assert SECRET in await ada.gpu(DEEP, 4096)
    env = json.loads(await ada.ask("env"))
    assert "JUPYTERHUB_API_TOKEN" in env
    lease = await ada.stop()
    assert lease.reason == "released"
    memory = pool.gpu_memory().read_bytes()
    assert SECRET in memory or (await pool.client.gpus())[0].state == "unassigned"

    await pool.gpu_in("unassigned")
    assert SECRET not in pool.gpu_memory().read_bytes()
    newest = (await pool.client.diagnoses(gpu=GPU))[0]
    checks = {check["check"]: check for check in newest.checks}
    assert checks["residue"]["metrics"]["residue_words"] > 16000
    assert checks["read_back"]["metrics"]["errors"] == 0

    bob = await pool.start_server("bob")
    assert bob.lease.gpus == [GPU]
    for offset in (4096, DEEP):
        assert await bob.gpu(offset, 65536) == bytes(65536)
    assert json.loads(await bob.ask("home/state"))["formatted"]
    await bob.stop()

    await pool.gpu_in("unassigned")
    again = await pool.start_server("ada", start="start-0002")
    assert await again.ask("home/read", name="notes.txt") == b"what ada wrote"
    assert not json.loads(await again.ask("home/state"))["formatted"]
    await again.stop()


async def test_a_service_vm_that_only_claims_the_wipe(
    site_folder: Path, images_dir: Path, libvirtd: Daemon
) -> None:
    """The test above can see: with an image that reports a wipe and does none, B reads A's data."""
    service = build(site_folder, "claims_wipe")
    async with pool_of(site_folder / "pool", images_dir, service) as pool:
        await pool.add_host(declaration())
        await pool.gpu_in("unassigned")
        ada = await pool.start_server("ada")
        await ada.ask("gpu/write", offset=DEEP, pattern=PATTERN, bytes=4096)
        await ada.stop()
        await pool.gpu_in("unassigned")
        bob = await pool.start_server("bob")
        assert SECRET in await bob.gpu(DEEP, 4096)


@pytest.mark.parametrize(
    ("variant", "why"),
    [
        ("skips_wipe", "overwrite is missing"),
        ("never_boots", "ended before its report was complete"),
        ("wrong_nonce", "wrong nonce"),
        ("truncated_lines", "malformed"),
        ("repeated_lines", "repeated"),
        ("oversized_line", "longer than"),
    ],
)
async def test_service_vms_that_cannot_be_believed(
    site_folder: Path, images_dir: Path, libvirtd: Daemon, variant: str, why: str
) -> None:
    """They end inconclusive, then in quarantine; never does such a GPU become free."""
    async with pool_of(
        site_folder / "pool",
        images_dir,
        build(site_folder, variant),
        diagnosis_attempts=2,
        diagnosis_silence_s=20.0,
    ) as pool:
        await pool.add_host(declaration())
        gpu = await pool.gpu_in("quarantined", "unassigned", "failed", "lost")
        assert gpu.state == "quarantined"
        assert why in (gpu.reason or "")
        runs = await pool.client.diagnoses(gpu=GPU)
        assert [run.outcome for run in runs] == ["inconclusive", "inconclusive"]
        assert gpu.dirty


async def test_a_flipped_bit(site_folder: Path, images_dir: Path, libvirtd: Daemon) -> None:
    """A bit of GPU memory flips between write and read: failed, with the place of the bit."""
    pause = "gpuspawner.pause=read_back:6"
    async with pool_of(site_folder / "pool", images_dir, cmdline=pause) as pool:
        await pool.add_host(declaration())
        offset = 5_243_496

        async def paused() -> bool:
            return any(
                run.progress and run.progress.startswith("read_back")
                for run in await pool.client.diagnoses(gpu=GPU)
            )

        await wait_for_async(paused, 120, "the service VM to pause before reading back", 0.1)
        with pool.gpu_memory().open("r+b") as memory:
            memory.seek(offset)
            byte = memory.read(1)[0]
            memory.seek(offset)
            memory.write(bytes([byte ^ 0x10]))
        gpu = await pool.gpu_in("failed", "unassigned", "quarantined")
        assert gpu.state == "failed"
        assert "read_back failed" in (gpu.reason or "")
        assert "xor=16" in (gpu.reason or "")
        assert f"first_bad_offset={offset}" in (gpu.reason or "")
        counts = (await pool.client.gpu_counts()).models[0]
        assert (counts.free, counts.out) == (0, 1)


async def test_a_dma_fault_and_a_gpu_that_is_gone(pool: Pool) -> None:
    """A GPU that writes where it should not is failed; one that leaves the bus is lost; repaired
    and retested by an admin, both come back."""
    await pool.add_host(declaration())
    await pool.gpu_in("unassigned")
    await pool.add_host(declaration(fault="dma_mask"))
    gpu = await pool.retest("failed", "quarantined")
    assert gpu.state == "failed"
    assert "Check dma failed" in (gpu.reason or "")

    await pool.add_host(declaration(fault="gone"))
    gpu = await pool.retest("lost", "quarantined")
    assert gpu.state == "lost"
    assert "does not answer on the bus" in (gpu.reason or "")

    await pool.add_host(declaration())
    gpu = await pool.retest("unassigned", "quarantined", "failed")
    assert gpu.state == "unassigned"


async def test_qemu_is_killed_under_a_user(pool: Pool) -> None:
    """The lease ends by itself, the GPU is wiped, and what was fsynced is in the home."""
    await pool.add_host(declaration())
    await pool.gpu_in("unassigned")
    ada = await pool.start_server("ada")
    await ada.ask("home/write", b"fsynced", name="kept.txt")
    await ada.ask("gpu/write", offset=DEEP, pattern=PATTERN, bytes=4096)
    pool.kill_qemu(ada.lease.id)
    ended = await pool.ended(ada.lease.id)
    assert ended.reason == "guest-gone"
    await pool.gpu_in("unassigned")
    assert SECRET not in pool.gpu_memory().read_bytes()
    again = await pool.start_server("ada", start="start-0002")
    assert await again.ask("home/read", name="kept.txt") == b"fsynced"
    await again.ask("poweroff")
    assert (await pool.ended(again.lease.id)).reason == "guest-gone"


async def test_the_allocator_is_killed_under_a_user(pool: Pool) -> None:
    """``kill -9`` while a server runs and another GPU is being diagnosed: the guest goes on, no
    token is left in the database, the picture afterwards is true."""
    await pool.add_host(declaration())
    await pool.gpu_in("unassigned")
    ada = await pool.start_server("ada")
    uptime = json.loads(await ada.ask("state"))["uptime_s"]
    pool.kill()
    assert json.loads(await ada.ask("state"))["uptime_s"] >= uptime
    await asyncio.to_thread(pool.start)
    lease = await pool.client.lease(ada.lease.id)
    assert lease.state == "running"
    for file in pool.folder.glob("ledger.sqlite*"):
        assert b"secret-of-ada" not in file.read_bytes()
    assert "secret-of-ada" not in pool.log.read_text()
    assert "secret-of-ada" not in pool.virsh("dumpxml", pool.domain(ada.lease.id))
    await ada.stop()
    await pool.gpu_in("unassigned")


async def test_a_full_pool_says_so(pool: Pool) -> None:
    """The second user of the only GPU is told at once; nothing of hers is left."""
    await pool.add_host(declaration())
    await pool.gpu_in("unassigned")
    ada = await pool.acquire("ada")
    from gpuspawner.client import AllocatorError

    with pytest.raises(AllocatorError, match="in use"):
        await pool.acquire("bob")
    await pool.client.release(
        schema.ReleaseLease(username="ada", server_name="", start_id="start-0001")
    )
    ended = await pool.ended(ada.id)
    assert ended.reason == "released"
