"""Backup and restore of the ledger on both databases, by the command line."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import Result
from typer.testing import CliRunner

from gpuspawner.cli import app
from gpuspawner.ledger import tables
from gpuspawner.ledger.database import migrate
from tests.service.harness import Site, acquire_body, gpu_in, lease_in


@pytest.fixture
async def site(tmp_path: Path, db_url: str | None, monkeypatch: pytest.MonkeyPatch):
    """A site whose configuration file the command line reads."""
    site = Site(tmp_path / "state", db_url)
    world = site.world()
    config = tmp_path / "gpuspawner_config.py"
    config.write_text(
        f"c.Installation.state_dir = {str(site.folder)!r}\n"
        f"c.Installation.allocator_url = {site.url!r}\n"
        + (f"c.Allocator.db_url = {db_url!r}\n" if db_url else "")
    )
    monkeypatch.setenv("GPUSPAWNER_CONFIG", str(config))
    yield site
    await world.close()
    assert world.overlaps == []


async def run(*words: str) -> Result:
    """The command in a thread: the allocator answers in this one."""
    return await asyncio.to_thread(CliRunner().invoke, app, list(words))


def gpus(site: Site) -> list[tuple[str, str | None]]:
    """State and reason of each GPU as they are stored."""
    engine = sa.create_engine(site.db_url or f"sqlite:///{site.folder}/ledger.sqlite")
    with engine.connect() as tx:
        rows = tx.execute(sa.select(tables.gpus.c.state, tables.gpus.c.reason)).all()
    engine.dispose()
    return [(row.state, row.reason) for row in rows]


async def test_a_restored_ledger_frees_no_gpu(site: Site, tmp_path: Path) -> None:
    """What was free when the backup was made may have had any user since: each GPU is wiped and
    diagnosed before it is given out, and the users' homes are known as before."""
    world = site.worlds["h1"]
    target = tmp_path / "ledger.backup"
    async with site.running() as client:
        await site.add_host(client, 0)
        lease = await client.acquire(acquire_body())
        await lease_in(client, lease.id, "running")
        await client.stop(lease.id, wait_s=20)
        await gpu_in(client, lease.gpus[0], "unassigned")
        done = await run("backup", str(target))
        assert done.exit_code == 0, done.output
        assert stat.S_IMODE(target.stat().st_mode) == 0o600
        await client.set_limit("default", "", 1, "after the backup")
        refused = await run("restore", str(target), "--yes")
        assert refused.exit_code == 1
        assert "still answers" in refused.output
        assert [state for state, _ in gpus(site)] == ["unassigned"] * 2
    epoch_before = epoch(site)
    done = await run("restore", str(target), "--yes")
    assert done.exit_code == 0, done.output
    assert [state for state, _ in gpus(site)] == ["used"] * 2
    assert all("restored from a backup" in (reason or "") for _, reason in gpus(site))
    assert epoch(site) > epoch_before
    world.history.clear()
    async with site.running() as client:
        for gpu in await client.gpus():
            await gpu_in(client, gpu.address, "unassigned")
        assert len([h for h in world.history if h[0] == "open_channel"]) == 2
        assert await client.limits() == []
        again = await client.acquire(acquire_body(start="start-0002"))
        await lease_in(client, again.id, "running")
        assert len(world.homes) == 1
    names = os.listdir(tmp_path) + os.listdir(site.folder)
    assert not [name for name in names if name.startswith(".")], "a draft is left"


def epoch(site: Site) -> int:
    """The epoch as it is stored."""
    engine = sa.create_engine(site.db_url or f"sqlite:///{site.folder}/ledger.sqlite")
    with engine.connect() as tx:
        found: int = tx.execute(sa.select(tables.installation.c.epoch)).scalar_one()
    engine.dispose()
    return found


async def test_a_backup_of_the_first_schema(site: Site, tmp_path: Path) -> None:
    """A backup of an older version goes over a newer ledger, and the allocator brings it on."""
    url = site.db_url or f"sqlite:///{site.folder}/ledger.sqlite"
    engine = sa.create_engine(url)
    migrate(engine, "0001")
    with engine.begin() as tx:
        tx.execute(tables.installation.insert().values(id=1, instance="abcd0123", epoch=7))
    engine.dispose()
    assert (await run("backup", str(tmp_path / "old"))).exit_code == 0
    async with site.running() as client:
        await client.set_limit("default", "", 1, "a test")
    done = await run("restore", str(tmp_path / "old"), "--yes")
    assert done.exit_code == 0, done.output
    async with site.running() as client:
        assert await client.limits() == []
        assert (await client.health()).epoch > 8


async def test_what_is_no_backup_replaces_nothing(site: Site, tmp_path: Path) -> None:
    """A missing, a damaged and a foreign file: an error, and the ledger is as it was."""
    async with site.running() as client:
        await site.add_host(client, 0)
        good = tmp_path / "good"
        assert (await run("backup", str(good))).exit_code == 0
    damaged, foreign = tmp_path / "damaged", tmp_path / "foreign"
    damaged.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE users (name TEXT)")
    for source in (tmp_path / "missing", damaged, foreign, tmp_path):
        done = await run("restore", str(source), "--yes")
        assert done.exit_code == 1, source
        assert "gpuspawner: " in done.output
        assert [state for state, _ in gpus(site)] == ["unassigned"] * 2
    assert (await run("backup", str(tmp_path / "no" / "folder"))).exit_code == 1


async def test_missing_programs_are_named(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without PostgreSQL's programs the error says what to install; SQLite needs none."""
    async with site.running():
        monkeypatch.setenv("PATH", str(tmp_path))
        done = await run("backup", str(tmp_path / "file"))
    if site.db_url is None:
        assert done.exit_code == 0, done.output
    else:
        assert done.exit_code == 1
        assert "postgresql-client" in done.output
        assert not (tmp_path / "file").exists()
