"""What must be true of an installation whatever was killed: ledger and host agree."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

from tests.vm.pool import Pool

SEED = re.compile(r"guest-([0-9a-f-]{36})-seed$")


async def check_picture(pool: Pool, point: str) -> None:
    """Every VM has an owner and every GPU that is not free has one too; each GPU, core and page of
    memory is held by one lease at most; a seed exists only for a server that is starting."""
    leases = {lease.id: lease for lease in await pool.client.leases()}
    running = {run.id for run in await pool.client.diagnoses() if run.state == "running"}
    known = {owner[:8]: kind for kind, owners in (("lease", leases), ("service", running))
             for owner in owners}  # fmt: skip
    for name in pool.domains():
        match = re.fullmatch(rf"gs-{pool.instance}-(lease|service)-([0-9a-f]{{8}})", name)
        assert match, f"{point}: {name}"
        assert known.get(match[2]) == match[1], f"{point}: nobody owns {name}"
    for gpu in await pool.client.gpus():
        owned = bool(gpu.lease_id) + bool(gpu.diagnosis_id)
        held = gpu.state in ("reserved", "assigned", "diagnosing")
        assert owned == (1 if held else 0), f"{point}: {json.dumps(gpu.model_dump(mode='json'))}"
    check_claims(pool, point)
    for seed in seeds(pool):
        lease = leases.get(seed)
        assert lease is not None, f"{point}: a seed of {seed} is left"
        assert lease.state == "starting", f"{point}: seed of a lease {lease.state}"


def seeds(pool: Pool) -> list[str]:
    """The guests whose seed lies in a pool of libvirt's."""
    found = (SEED.fullmatch(path.name) for path in pool.libvirt_pools.glob("*/*"))
    return [match[1] for match in found if match]


def check_claims(pool: Pool, point: str) -> None:
    """The ledger's tables: what is held is what the open leases and the running diagnoses were
    given, nothing of it twice, and no more than there is."""
    with contextlib.closing(sqlite3.connect(pool.ledger)) as ledger:
        ledger.execute("BEGIN")  # one picture
        open_leases = rows(ledger, "SELECT id, claim, host FROM leases WHERE state != 'ended'")
        runs = rows(ledger, "SELECT id, host, address FROM diagnoses WHERE state = 'running'")
        hosts = rows(ledger, "SELECT name, inventory FROM hosts")
        gpus = Counter(rows(ledger, "SELECT host, address, owner FROM claimed_gpus"))
        cpus = Counter(rows(ledger, "SELECT host, cpu, owner FROM claimed_cpus"))
        memory = Counter(rows(ledger, "SELECT host, node, owner, mib FROM claimed_memory"))
    due_gpus = Counter((host, address, run) for run, host, address in runs)
    due_cpus: Counter[Any] = Counter()
    due_memory: Counter[Any] = Counter()
    for lease, text, host in open_leases:
        claim = json.loads(text) if text else None
        if claim is None:  # it waits for a place
            continue
        due_gpus.update((host, address, lease) for address in claim["gpus"])
        for cell in claim["cells"]:
            due_cpus.update((host, cpu, lease) for core in cell["cores"] for cpu in core)
            due_memory[(host, cell["node"], lease, cell["memory_mib"])] += 1
    assert gpus == due_gpus, f"{point}: GPUs"
    assert cpus == due_cpus, f"{point}: cores"
    assert memory == due_memory, f"{point}: memory"
    for kind, held in (("GPU", gpus), ("core", cpus)):
        twice = [thing for thing, n in Counter(row[:2] for row in held.elements()).items() if n > 1]
        assert not twice, f"{point}: {kind} with two owners: {twice}"
    for name, text in hosts:
        for node in json.loads(text)["nodes"] if text else ():
            used = sum(row[3] for row in memory.elements() if row[:2] == (name, node["id"]))
            assert used + node["reserve_mib"] <= node["memory_mib"], f"{point}: memory of {name}"


def rows(ledger: sqlite3.Connection, query: str) -> list[tuple[Any, ...]]:
    """All rows of a query."""
    return [tuple(row) for row in ledger.execute(query)]


def dump(database: Path) -> str:
    """All that stands in a SQLite database, as text."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return "\n".join(connection.iterdump())
