"""From the first schema to the newest, with data in every table, on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from gpuspawner.client import AllocatorClient
from gpuspawner.ledger import tables
from gpuspawner.ledger.database import migrate
from gpuspawner.pool.states import GpuState
from tests.layers import wait_for_async
from tests.service.harness import Site, acquire_body, gpu_in, lease_in

FIRST = "0001"
STATES = [state.value for state in GpuState]
Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture
async def site(tmp_path: Path, db_url: str | None):
    """A host with one GPU more than there are states."""
    site = Site(tmp_path, db_url)
    world = site.world(gpus=len(STATES) + 1, cores=16)
    yield site
    await world.close()
    assert world.overlaps == []


@pytest.fixture
def engine(site: Site) -> Iterator[sa.Engine]:
    """The ledger, past the allocator."""
    engine = sa.create_engine(site.db_url or f"sqlite:///{site.folder}/ledger.sqlite")
    yield engine
    engine.dispose()


def rows(engine: sa.Engine) -> Rows:
    """Every row of every table, as the database itself describes them."""
    found: Rows = {}
    with engine.connect() as tx:
        reflected = sa.MetaData()
        reflected.reflect(tx)
        for name, table in sorted(reflected.tables.items()):
            if name != "alembic_version":
                all_rows = [dict(row._mapping) for row in tx.execute(sa.select(table))]
                found[name] = sorted(all_rows, key=repr)
    return found


def write(engine: sa.Engine, found: Rows) -> None:
    """Into the tables that there are, as the database describes them. Numbers that the database
    gives itself, it gives again."""
    with engine.begin() as tx:
        reflected = sa.MetaData()
        reflected.reflect(tx)
        for name, all_rows in found.items():
            table = reflected.tables.get(name)
            if table is None:
                continue
            numbered = name in ("events", "gpu_history")
            for row in sorted(all_rows, key=lambda row: row["id"]) if numbered else all_rows:
                values = {k: v for k, v in row.items() if k in table.c}
                if numbered:
                    del values["id"]
                tx.execute(table.insert().values(values))


def empty(engine: sa.Engine) -> None:
    """No table is left."""
    with engine.begin() as tx:
        reflected = sa.MetaData()
        reflected.reflect(tx)
        reflected.drop_all(tx)


async def lived_in(site: Site, engine: sa.Engine) -> Rows:
    """What a real allocator has written: a running lease, ended ones, diagnoses, homes, events;
    then a GPU in every state and a release that came before its acquire."""
    async with site.running() as client:
        await site.add_host(client, 0)
        ended = await client.acquire(acquire_body("bob", "start-0001"))
        await lease_in(client, ended.id, "running")
        await client.stop(ended.id, wait_s=20)
        await gpu_in(client, ended.gpus[0], "unassigned")
        lease = await client.acquire(acquire_body("ada", "start-0001", "Ünï <server>"))
        await lease_in(client, lease.id, "running")
    found = rows(engine)
    free = [gpu for gpu in found["gpus"] if gpu["state"] == "unassigned"]
    others = [state for state in STATES if state not in ("reserved", "assigned", "unassigned")]
    for gpu, state in zip(free, others, strict=False):
        gpu.update(state=state, reason=f"it is {state}", holds=["a hold"], attempt=1)
    key = {"hub_id": "hub", "username": "eve", "server_name": "", "start_id": "start-0009"}
    found["early_releases"].append({**key, "at_ms": 1_900_000_000_000})
    return found


async def test_nothing_is_lost_from_the_first_schema_on(site: Site, engine: sa.Engine) -> None:
    """Every row stands after the migration as it stood before it; the allocator goes on with the
    leases and the GPUs that it finds."""
    found = await lived_in(site, engine)
    empty(engine)
    migrate(engine, FIRST)
    write(engine, found)
    before = rows(engine)
    assert not set(before) & {"limits", "audit"}, "this is the first schema"
    assert [name for name, all_rows in before.items() if not all_rows] == []
    migrate(engine)
    after = rows(engine)
    for name, all_rows in before.items():
        kept = [{k: row[k] for k in all_rows[0]} for row in after[name]]
        assert sorted(kept, key=repr) == all_rows, name
    assert [lease["groups"] for lease in after["leases"]] == [[]] * len(after["leases"])
    async with site.running() as client:
        await goes_on(client, before)


async def goes_on(client: AllocatorClient, before: Rows) -> None:
    """Open leases run, GPUs that nobody moves by itself stay as they are, new leases start."""
    open_before = {row["id"] for row in before["leases"] if row["state"] != "ended"}
    assert {lease.id for lease in await client.leases()} == open_before
    still = {"assigned", "failed", "lost", "new", "quarantined", "retired"}

    async def as_before() -> bool:
        states = {gpu.address: gpu.state for gpu in await client.gpus()}
        return all(
            states[row["address"]] == row["state"]
            for row in before["gpus"]
            if row["state"] in still
        )

    await wait_for_async(as_before, 10, "the GPUs' states")
    lease = await client.acquire(acquire_body("carl", "start-0001"))
    assert (await lease_in(client, lease.id, "running")).gpus
    assert {one.id for one in await client.leases()} == open_before | {lease.id}
    await client.set_limit("user", "ada", 3, "after the migration")
    assert (await client.audit(limit=1))[0].what == "limit user ada"


def test_the_migrations_make_what_the_code_expects(site: Site, engine: sa.Engine) -> None:
    """Alembic finds nothing to change: tables, columns, types, indexes."""
    migrate(engine)
    with engine.connect() as tx:
        context = MigrationContext.configure(tx, opts={"compare_type": True})
        assert compare_metadata(context, tables.metadata) == []
