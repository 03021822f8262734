"""Two at once, a hundred times."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpuspawner import schema
from gpuspawner.client import AllocatorError
from tests.service.harness import Site, acquire_body, gpu_in, lease_in

GPU = "0000:40:00.0"
ROUNDS = 100


@pytest.fixture
async def site(tmp_path: Path, db_url: str | None):
    """One host with one GPU."""
    site = Site(tmp_path, db_url)
    world = site.world(gpus=1)
    yield site
    await world.close()
    assert world.overlaps == []


async def test_two_users_ask_for_the_last_gpu(site: Site) -> None:
    """One gets it; the other reads why not, and holds nothing."""
    async with site.running() as client:
        await site.add_host(client, 0)
        for number in range(ROUNDS):
            start = f"start-{number:04}"
            results = await asyncio.gather(
                client.acquire(acquire_body("ada", start)),
                client.acquire(acquire_body("bob", start)),
                return_exceptions=True,
            )
            leases = [one for one in results if isinstance(one, schema.Lease)]
            refused = [one for one in results if isinstance(one, AllocatorError)]
            assert (len(leases), len(refused)) == (1, 1), results
            assert refused[0].refusal.message.startswith("The only GPU is in use.")
            await client.release(schema.ReleaseLease(username=leases[0].username, start_id=start))
            await lease_in(client, leases[0].id, "ended")
            await gpu_in(client, GPU, "unassigned")


async def test_a_cancel_followed_at_once_by_a_new_start(site: Site) -> None:
    """The new server lives, however the two meet."""
    async with site.running() as client:
        await site.add_host(client, 0)
        for number in range(ROUNDS):
            old, new = f"start-{number:04}a", f"start-{number:04}b"
            await client.acquire(acquire_body("ada", old))
            cancel = client.release(schema.ReleaseLease(username="ada", start_id=old))
            _released, lease = await asyncio.gather(
                cancel, client.acquire(acquire_body("ada", new))
            )
            running = await lease_in(client, lease.id, "running", "ended")
            assert running.state == "running", running.message
            await client.release(schema.ReleaseLease(username="ada", start_id=new))
            await lease_in(client, lease.id, "ended")
            await gpu_in(client, GPU, "unassigned")
