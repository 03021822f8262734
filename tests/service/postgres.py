"""A real PostgreSQL for as long as the tests run: its own cluster, on a socket of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _bin() -> Path:
    for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (path / "initdb").exists():
            return path
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    pytest.exit("PostgreSQL's server is missing: run 'tests/run'.", returncode=4)


class Cluster:
    """A running server; ``database()`` makes an empty database and gives its URL."""

    def __init__(self, folder: Path, user: str, prefix: list[str], programs: Path) -> None:
        self.folder = folder
        self.user = user
        self.prefix = prefix
        self.programs = programs

    def run(self, program: str, *words: str) -> None:
        """One of PostgreSQL's programs, as the account that owns the cluster."""
        subprocess.run(
            [*self.prefix, str(self.programs / program), *words],
            check=True,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
        )

    def database(self) -> str:
        """The URL of a new database."""
        name = f"t{uuid.uuid4().hex[:12]}"
        self.run("createdb", "-h", str(self.folder), name)
        return f"postgresql+psycopg://{self.user}@/{name}?host={self.folder}"


@contextmanager
def cluster(durable: bool = False) -> Iterator[Cluster]:
    """Start a server; root may not run one, so then it belongs to the account ``postgres``. Only
    a ``durable`` one waits until what is committed is on the disk."""
    programs = _bin()
    user, prefix = pwd.getpwuid(os.geteuid()).pw_name, []
    folder = Path(tempfile.mkdtemp(prefix="gs-pg-"))
    if os.geteuid() == 0:
        user, prefix = "postgres", ["runuser", "-u", "postgres", "--"]
        os.chown(folder, pwd.getpwnam("postgres").pw_uid, -1)
    one = Cluster(folder, user, prefix, programs)
    data = str(folder / "data")
    fsync = "on" if durable else "off"
    options = f"-k {folder} -c listen_addresses='' -c fsync={fsync} -c max_connections=50"
    try:
        one.run("initdb", "-D", data, "-A", "trust", "-U", user, "--no-sync")
        one.run("pg_ctl", "-D", data, "-l", str(folder / "log"), "-o", options, "-w", "start")
        try:
            yield one
        finally:
            one.run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
