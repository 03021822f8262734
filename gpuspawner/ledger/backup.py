"""A copy of the ledger in one file, and the way back.

What a backup says about GPUs is old: whoever had one since then left no trace in it. So a restore
makes every free GPU *used* in the same transaction, or in the same rename, that brings the rest
back; there is no moment at which the restored ledger would give it out.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from gpuspawner.ledger import tables

REASON = "The ledger was restored from a backup: who used it since is unknown."
_NEEDED = {"installation", "hosts", "gpus", "leases", "homes"}


class BackupError(Exception):
    """It was not done, and nothing was changed; the text says what to do."""


def backup(url: str, target: Path) -> None:
    """Write the ledger at ``url`` into ``target`` (mode 0600), whole or not at all. The allocator
    may run meanwhile."""
    with _draft(target) as draft:
        if _is_sqlite(url):
            _copy_sqlite(_sqlite_path(url), draft)
        else:
            _pg(url, "pg_dump", "--format=custom", "--no-owner", "--no-privileges",
                f"--file={draft}")  # fmt: skip


def restore(url: str, source: Path, now_ms: int) -> None:
    """Replace the ledger at ``url`` by the backup ``source``. No allocator may run."""
    if not source.is_file():
        raise BackupError(f"{source} is not a file. Name one that 'gpuspawner backup' wrote.")
    if _is_sqlite(url):
        _restore_sqlite(_sqlite_path(url), source, now_ms)
    else:
        _restore_postgres(url, source, now_ms)


def _statements(epoch: int, now_ms: int, schema: str = "") -> list[str]:
    """No free GPU is free any more, and no allocator that still runs may write."""
    return [
        f"INSERT INTO {schema}gpu_history (host, address, at_ms, old, new, reason) SELECT host, "
        f"address, {now_ms}, state, 'used', '{REASON}' FROM {schema}gpus "
        "WHERE state = 'unassigned'",
        f"UPDATE {schema}gpus SET state = 'used', since_ms = {now_ms}, reason = '{REASON}', "
        "dirty = true, attempt = 0, retry_ms = NULL WHERE state = 'unassigned'",
        f"UPDATE {schema}installation SET epoch = {epoch} WHERE epoch < {epoch}",
        f"UPDATE {schema}installation SET epoch = epoch + 1",
    ]


def _is_sqlite(url: str) -> bool:
    return url.startswith("sqlite")


@contextlib.contextmanager
def _draft(target: Path, like: Path | None = None) -> Iterator[Path]:
    """A file beside ``target`` that takes its place when the block is through."""
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        if like is not None and like.exists():
            owner = like.stat()
            os.chown(draft, owner.st_uid, owner.st_gid)
        yield draft
        with draft.open("rb") as stream:
            os.fsync(stream.fileno())
        draft.replace(target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise BackupError(
            f"{target} cannot be written: {error.strerror}. Choose another place, or run this as "
            "the user that owns it."
        ) from error
    finally:
        for leftover in (draft, *_beside(draft)):
            leftover.unlink(missing_ok=True)


# ------------------------------------------------------------------ SQLite


def _sqlite_path(url: str) -> Path:
    return Path(sa.make_url(url).database or "")


def _beside(path: Path) -> tuple[Path, Path]:
    return path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")


def _copy_sqlite(source: Path, target: Path) -> None:
    """A consistent copy, checked; raises ``BackupError``."""
    try:
        with (
            contextlib.closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True,
                                               timeout=30)) as old,
            contextlib.closing(sqlite3.connect(target)) as new,
        ):  # fmt: skip
            old.backup(new)
            new.execute("PRAGMA journal_mode=DELETE")
            found = new.execute("PRAGMA integrity_check").fetchone()[0]
            names = {name for (name,) in new.execute("SELECT name FROM sqlite_master")}
    except sqlite3.Error as error:
        raise BackupError(f"{source} cannot be read as a ledger: {error}. Is it one?") from error
    if found != "ok":
        raise BackupError(f"{source} is damaged ({str(found)[:200]}). Take another backup.")
    if not names >= _NEEDED:
        raise BackupError(f"{source} is a database, but not a ledger of gpuspawner.")


def _restore_sqlite(target: Path, source: Path, now_ms: int) -> None:
    with _draft(target, like=target) as draft:
        _copy_sqlite(source, draft)
        epoch = _close_old(target)
        with contextlib.closing(sqlite3.connect(draft)) as db, db:
            for statement in _statements(epoch, now_ms):
                db.execute(statement)
        # The journal belongs to the file that goes; its content is in that file by now.
        for journal in _beside(target):
            journal.unlink(missing_ok=True)


def _close_old(path: Path) -> int:
    """Bring a ledger's journal into its file; its epoch. A ledger that is missing or damaged is
    why one restores."""
    if not path.exists():
        return 0
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=5)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return int(db.execute("SELECT epoch FROM installation").fetchone()[0])
    except (sqlite3.Error, TypeError):
        return 0


# ------------------------------------------------------------------ PostgreSQL


def _restore_postgres(url: str, source: Path, now_ms: int) -> None:
    listed = _pg(url, "pg_restore", "--list", str(source))
    if not all(f" TABLE DATA public {name} " in listed for name in _NEEDED):
        raise BackupError(f"{source} is a dump, but not of a ledger of gpuspawner.")
    script = _pg(
        url, "pg_restore", "--clean", "--if-exists", "--no-owner", "--no-privileges", "--file=-",
        str(source),
    )  # fmt: skip
    # Also tables that are younger than the backup: its migration will make them again.
    names = [*tables.metadata.tables, "alembic_version"]
    begin = "".join(f"DROP TABLE IF EXISTS public.{name} CASCADE;\n" for name in names)
    ending = ";\n".join(_statements(_pg_epoch(url), now_ms, "public."))
    _pg(
        url, "psql", "--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1",
        "--file=-", stdin=f"{begin}{script}\n{ending};\n",
    )  # fmt: skip


def _pg_epoch(url: str) -> int:
    engine = sa.create_engine(url)
    try:
        with engine.connect() as tx:
            return int(tx.execute(sa.text("SELECT epoch FROM installation")).scalar_one())
    except sa.exc.ProgrammingError:
        return 0  # an empty database
    except sa.exc.SQLAlchemyError as error:
        raise BackupError(
            f"The database does not answer: {getattr(error, 'orig', error)}"
        ) from error
    finally:
        engine.dispose()


def _pg(url: str, program: str, *words: str, stdin: str | None = None) -> str:
    """One of PostgreSQL's programs on the database; its output. The password goes by the
    environment: command lines are for everybody to see."""
    found = shutil.which(program)
    if found is None:
        raise BackupError(f"{program} is missing. Install postgresql-client, then try again.")
    parsed = sa.make_url(url)
    query = {name: str(value) for name, value in parsed.query.items()}
    given = {
        "PGHOST": parsed.host or query.get("host"),
        "PGPORT": str(parsed.port) if parsed.port else query.get("port"),
        "PGUSER": parsed.username or query.get("user"),
        "PGPASSWORD": parsed.password,
        "PGDATABASE": parsed.database,
        "PGSSLMODE": query.get("sslmode"),
    }
    environment = {**os.environ, **{name: str(value) for name, value in given.items() if value}}
    done = subprocess.run(
        [found, *words], env=environment, input=stdin, capture_output=True, check=False,
        encoding="utf-8", errors="surrogateescape",
    )  # fmt: skip
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[:500]
        raise BackupError(f"{program} failed, and nothing was changed: {said}")
    return done.stdout
