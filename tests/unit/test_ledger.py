"""The ledger: what the database itself refuses, and that transactions are whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from gpuspawner.ledger import gpus, hosts, leases, tables
from gpuspawner.ledger.database import Ledger, Transaction, migrate
from gpuspawner.ledger.views import Views
from gpuspawner.pool.states import GpuState, IllegalTransition
from gpuspawner.pool.topology import Gpu, HostView, Inventory, Node


@pytest.fixture
async def ledger(tmp_path: Path):
    """An empty ledger with one surveyed host of one GPU."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'l.sqlite'}")
    await ledger.open()
    inventory = Inventory("h1", "b1", (Node(0, ((0,),), 4096),), (Gpu("0000:40:00.0", "A", 0),))

    def fill(tx: Transaction) -> None:
        hosts.add(tx, "h1", {"uri": "x", "cidr": "10.0.0.0/24"})
        hosts.record_survey(tx, inventory, 1)
        hosts.set_state(tx, "h1", "ready")

    await ledger.write(fill)
    yield ledger
    await ledger.close()


def test_migrations_make_exactly_the_tables(tmp_path: Path) -> None:
    """No table may differ between the code and what the migrations make."""
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'm.sqlite'}")
    migrate(engine)
    with engine.connect() as connection:
        difference = compare_metadata(MigrationContext.configure(connection), tables.metadata)
    assert difference == []
    migrate(engine)  # again: nothing to do, and no error


async def test_the_database_refuses_a_second_owner(ledger: Ledger) -> None:
    """Whatever the code does: one owner per GPU and per CPU."""

    def twice(tx: Transaction) -> None:
        for owner in ("a", "b"):
            tx.execute(tables.claimed_gpus.insert().values(host="h1", address="x", owner=owner))

    with pytest.raises(sa.exc.IntegrityError):
        await ledger.write(twice)


async def test_a_failed_transaction_leaves_nothing(ledger: Ledger) -> None:
    """Also not in the snapshots that placement uses."""
    views = Views()
    inventory = Inventory("h2", "b1", (Node(0, ((0,),), 4096),), ())

    def seen(tx: Transaction) -> dict[str, HostView]:
        return dict(views.load(tx).views)

    def fails(tx: Transaction) -> None:
        gpu = gpus.get(tx, "h1", "0000:40:00.0")
        assert gpu is not None
        gpus.move(tx, gpu, GpuState.USED, 2)
        hosts.add(tx, "h2", {"uri": "x", "cidr": "10.0.1.0/24"})
        hosts.record_survey(tx, inventory, 2)
        hosts.set_drained(tx, "h1", True)
        assert seen(tx)["h1"].drained  # a snapshot of what will never have been
        assert "h2" in seen(tx)
        raise RuntimeError("killed here")

    before = await ledger.read(seen)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            await ledger.write(fails)
    assert await ledger.read(seen) == before


async def test_a_snapshot_is_read_again_for_changed_hosts_only(ledger: Ledger) -> None:
    """Without a change there is not one query; with one, other hosts stay as they are."""
    views = Views()
    queries: list[str] = []

    def join(tx: Transaction) -> None:
        hosts.add(tx, "h2", {"uri": "x", "cidr": "10.0.1.0/24"})
        hosts.record_survey(tx, Inventory("h2", "b1", (Node(0, ((0,),), 4096),), ()), 1)

    def look(tx: Transaction) -> dict[str, HostView]:
        queries.clear()
        with listening(tx, queries):
            return dict(views.load(tx).views)

    await ledger.write(join)
    before = await ledger.read(look)
    assert queries
    assert await ledger.read(look) == before
    assert queries == []
    await ledger.write(hosts.set_drained, "h2", True)
    after = await ledger.read(look)
    assert after["h2"].drained
    assert after["h1"] is before["h1"]
    assert await ledger.read(lambda tx: dict(Views().load(tx).views)) == after


@contextmanager
def listening(tx: Transaction, queries: list[str]) -> Iterator[None]:
    """What a transaction asks the database."""

    def note(_connection: object, _cursor: object, statement: str, *_more: object) -> None:
        queries.append(statement)

    sa.event.listen(tx, "before_cursor_execute", note)
    yield
    sa.event.remove(tx, "before_cursor_execute", note)


async def test_states_move_by_the_table_only(ledger: Ledger) -> None:
    """A new GPU cannot become free, whoever asks."""

    def jump(tx: Transaction) -> None:
        gpu = gpus.get(tx, "h1", "0000:40:00.0")
        assert gpu is not None
        gpus.move(tx, gpu, GpuState.UNASSIGNED, 2)

    with pytest.raises(IllegalTransition):
        await ledger.write(jump)


async def test_a_vanished_gpu_keeps_its_row(ledger: Ledger) -> None:
    """It becomes lost; its history stays."""
    empty = Inventory("h1", "b1", (Node(0, ((0,),), 4096),), ())
    await ledger.write(hosts.record_survey, empty, 3)
    gpu = await ledger.read(gpus.get, "h1", "0000:40:00.0")
    assert gpu is not None
    assert gpu.state is GpuState.LOST
    history = await ledger.read(gpus.history, "h1", "0000:40:00.0")
    assert [(row["old"], row["new"]) for row in history] == [("new", "lost")]


async def test_a_full_disk_is_said_and_nothing_is_changed(ledger: Ledger, tmp_path: Path) -> None:
    """SQLite's own limit on the file's size plays the full disk."""
    from gpuspawner.ledger.database import LedgerUnwritable

    def shrink(tx: Transaction) -> None:
        pages = tx.exec_driver_sql("PRAGMA page_count").scalar_one()
        tx.exec_driver_sql(f"PRAGMA max_page_count={pages}")

    def fill(tx: Transaction) -> None:
        for number in range(2000):
            leases.early_release(tx, ("hub", "u" * 200, str(number)), "s" * 60, 1)

    await ledger.write(shrink)
    with pytest.raises(LedgerUnwritable, match="free space"):
        await ledger.write(fill)
    assert not await ledger.read(leases.was_released_early, ("hub", "u" * 200, "0"), "s" * 60)
