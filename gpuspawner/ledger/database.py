"""One writer thread, one transaction at a time, and an epoch that deposes a second allocator."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config as AlembicConfig
from sqlalchemy import Connection, Engine, event

from gpuspawner.ledger import tables
from gpuspawner.ledger.changes import OPTION, Changes, Stale

log = logging.getLogger(__name__)
T = TypeVar("T")

Transaction = Connection  # what the functions of this package take first

# PostgreSQL's "could not serialize" and "deadlock detected": run the transaction again.
_RETRY_STATES = frozenset({"40001", "40P01"})
_MAX_TRIES = 30


class Deposed(Exception):
    """Another allocator has taken over this database; this one must write nothing more."""


class LedgerUnwritable(Exception):
    """The database cannot be written now (disk full, server away). Nothing was changed."""


class Ledger:
    """The database behind one writer thread.

    ``write`` runs a function in a transaction that is whole or not at all; ``read`` does the same
    without holding up writers for longer than the query. Both raise ``Deposed`` once another
    allocator has started on the same database.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.instance = ""
        self.epoch = 0
        self._changes = Changes()
        self._engine = _engine(url)
        self._engine.update_execution_options(**{OPTION: self._changes})
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self.deposed = asyncio.Event()

    def open_sync(self) -> None:
        """Migrate the schema, learn the installation's id, take the next epoch."""
        migrate(self._engine)
        with self._engine.begin() as tx:
            row = tx.execute(sa.select(tables.installation)).one_or_none()
            if row is None:
                self.instance, self.epoch = secrets.token_hex(4), 1
                tx.execute(
                    tables.installation.insert().values(
                        id=1, instance=self.instance, epoch=self.epoch
                    )
                )
            else:
                self.instance, self.epoch = row.instance, row.epoch + 1
                tx.execute(tables.installation.update().values(epoch=self.epoch))

    async def open(self) -> None:
        """As ``open_sync``, in the writer thread."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self.open_sync)

    async def close(self) -> None:
        """Finish the transaction in progress and let go of the database."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.dispose)
        self._thread.shutdown(wait=True)

    async def write(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run ``fn(transaction, *args, **kwargs)`` in one transaction."""

        def run() -> T:
            return self._transaction(lambda tx: fn(tx, *args, **kwargs))

        # A cancelled caller must not leave half of a thought behind: the transaction runs to its
        # end either way, and the caller learns of the cancellation after it.
        try:
            return await asyncio.shield(
                asyncio.get_running_loop().run_in_executor(self._thread, run)
            )
        except Deposed:
            self.deposed.set()
            raise

    read = write  # one thread keeps reads in order with writes; pools are small enough

    def _transaction(self, fn: Callable[[Connection], T]) -> T:
        for attempt in range(1, _MAX_TRIES + 1):
            try:
                return self._try(fn)
            except Stale as error:
                if attempt == _MAX_TRIES:
                    raise
                log.warning("stale_snapshot error=%s: the decision is made again", error)
            except sa.exc.DBAPIError as error:
                if attempt < _MAX_TRIES and _may_retry(error):
                    time.sleep(random.uniform(0, 0.002 * 2 ** min(attempt, 6)))
                    continue
                if isinstance(error, sa.exc.OperationalError):
                    raise LedgerUnwritable(
                        f"The allocator's database does not take the change: {error.orig}. "
                        "Nothing was changed. Check the disk's free space and the database "
                        "server, then try again."
                    ) from error
                raise
        raise AssertionError("unreachable")

    def _try(self, fn: Callable[[Connection], T]) -> T:
        began = self._changes.now
        try:
            with self._engine.begin() as tx:
                epoch = tx.execute(sa.select(tables.installation.c.epoch)).scalar_one()
                if epoch != self.epoch:
                    raise Deposed(
                        f"Another allocator (epoch {epoch}) uses this database; this one is "
                        f"epoch {self.epoch} and stops."
                    )
                return fn(tx)
        except BaseException:
            self._changes.undone(began)
            raise


def _may_retry(error: sa.exc.DBAPIError) -> bool:
    return getattr(error.orig, "sqlstate", None) in _RETRY_STATES


def _engine(url: str) -> Engine:
    if url.startswith("sqlite"):
        engine = sa.create_engine(url, connect_args={"timeout": 30, "check_same_thread": False})
        event.listen(engine, "connect", _sqlite_connect)
        # The driver's default starts a transaction late, as a reader; two of those over-grant.
        event.listen(engine, "begin", lambda conn: conn.exec_driver_sql("BEGIN IMMEDIATE"))
        return engine
    return sa.create_engine(
        url, isolation_level="SERIALIZABLE", pool_pre_ping=True, connect_args=_POSTGRES_LIMITS
    )


# A server that is there and does not answer must not hold the one writer thread for ever.
_POSTGRES_LIMITS = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 15000,
    "options": "-c statement_timeout=30000 -c lock_timeout=10000"
    " -c idle_in_transaction_session_timeout=60000",
}


def _sqlite_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def migrate(engine: Engine, revision: str = "head") -> None:
    """Bring the schema to a revision, step by step, in one transaction."""
    config = AlembicConfig()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
