"""Limits under load and in words, on both databases."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpuspawner import schema
from gpuspawner.client import AllocatorError
from tests.service.harness import Site, acquire_body, lease_in


@pytest.fixture
async def site(tmp_path: Path, db_url: str | None):
    """One host of twelve GPUs: enough that limits alone refuse."""
    site = Site(tmp_path, db_url, diagnoses_per_host=12)
    world = site.world(gpus=12, cores=16)
    yield site
    await world.close()
    assert world.overlaps == []


def split(results: list[object]) -> tuple[list[schema.Lease], list[AllocatorError]]:
    """Those who got a lease, those who were refused; any other failure is one of the test."""
    for one in results:
        assert isinstance(one, (schema.Lease, AllocatorError)), one
    leases = [one for one in results if isinstance(one, schema.Lease)]
    return leases, [one for one in results if isinstance(one, AllocatorError)]


async def test_fifty_clients_never_pass_a_users_limit(site: Site) -> None:
    """One user, fifty servers at once, a limit of three: three start."""
    async with site.running() as client:
        await site.add_host(client, 0)
        await client.set_limit("user", "ada", 3, "a test")
        results = await asyncio.gather(
            *(
                client.acquire(acquire_body("ada", f"start-{n:04}", server=f"s{n}"))
                for n in range(50)
            ),
            return_exceptions=True,
        )
        leases, refused = split(list(results))
        assert (len(leases), len(refused)) == (3, 47)
        for error in refused:
            assert (error.status, error.refusal.reason) == (403, "limit")
            assert "You already use 3 of the 3 GPUs" in error.refusal.message


async def test_fifty_clients_never_pass_a_groups_limit(site: Site) -> None:
    """Fifty members of one group, a limit of four on the group: four start."""
    async with site.running() as client:
        await site.add_host(client, 0)
        await client.set_limit("group", "sar lab/ä", 4, "a test")
        bodies = [
            acquire_body(f"user{n}").model_copy(update={"groups": ["sar lab/ä"]}) for n in range(50)
        ]
        results = await asyncio.gather(
            *(client.acquire(body) for body in bodies), return_exceptions=True
        )
        leases, refused = split(list(results))
        assert (len(leases), len(refused)) == (4, 46)
        await client.stop(leases[0].id, wait_s=20)
        again = await client.acquire(bodies[49].model_copy(update={"start_id": "start-0002"}))
        await lease_in(client, again.id, "running")


async def test_the_own_server_does_not_count_when_it_starts_anew(site: Site) -> None:
    """A limit of one lets a user restart her one server."""
    async with site.running() as client:
        await site.add_host(client, 0)
        await client.set_limit("default", "", 1, "a test")
        first = await client.acquire(acquire_body())
        await lease_in(client, first.id, "running")
        second = await client.acquire(acquire_body(start="start-0002"))
        await lease_in(client, second.id, "running")


async def test_every_change_is_on_record(site: Site) -> None:
    """Who, what, old, new, why."""
    async with site.running() as client:
        await client.set_limit("user", "ada", 3, "she trains a model")
        await client.set_limit("user", "ada", None, "she is done")
        assert await client.limits() == []
        entries = await client.audit()
        assert [(e.what, e.old, e.new, e.why) for e in entries] == [
            ("limit user ada", 3, None, "she is done"),
            ("limit user ada", None, 3, "she trains a model"),
        ]
        assert entries[0].who == "spawner of hub"
