"""200 users start, watch and stop their servers through a real hub. How long do they wait, what
does it cost, and is anything lost?

    tests/run exec -- python -m tests.bench.hub_load --json

JupyterHub with this repository's ``jupyterhub_config.py``, the allocator, and this program with
its users are three processes. The GPU host is scripted: it has as many GPUs as there are users,
does at once whatever it is asked, and its guests answer ``--boot`` seconds after they were made.
Nothing is booted and nothing is wiped, but every lease, event and diagnosis is a real one. The
proxy is left out.

The users come within ``--within`` seconds. Each asks the hub for a server (and again, as the hub
says, when it has too many starts at a time), reads the stream of progress up to its end, and looks
at her own page now and then. When all servers run they are left alone for ``--stay`` seconds;
then all users stop theirs, and every GPU must come back through a diagnosis.

Nothing may be lost: each stream ends with "ready" and has each line that the ledger has of its
lease, in that order; the numbers of a lease's events, read once more as a stream, are those of the
ledger. Nothing may be left: no open lease, claim, step, guest, seed or disk. All times are in
seconds, CPU times user and system together. The exit status is 1 if anything was lost or left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from gpuspawner import schema
from gpuspawner.client import AllocatorClient
from tests.bench import figures
from tests.bench.scripted_pool import HOST
from tests.layers import wait_for, wait_for_async
from tests.service.harness import TOKEN
from tests.service.real_hub import ADMIN_TOKEN, RealHub

# JupyterHub's own settings again, where its tests need others. A start is answered after 1 s, as
# the start page answers it, and then followed by its progress.
QUIET = """
c.JupyterHub.log_level = 20
c.Spawner.poll_interval = 30
c.GPUSpawner.allocator_patience = 60
"""
CLAIMS = ("claimed_gpus", "claimed_cpus", "claimed_memory", "claimed_addresses", "steps")
LIMIT_S = 900.0


# -- the two processes ----------------------------------------------------------------------------


class Allocator:
    """``tests.bench.scripted_pool`` on the hub's state folder."""

    def __init__(self, hub: RealHub, gpus: int, boot_s: float) -> None:
        self.folder = hub.folder
        self.url = f"http://127.0.0.1:{hub.allocator_port}/services/gpu/"
        self.log = hub.folder / "allocator.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.scripted_pool", str(hub.folder), self.url,
                 f"http://127.0.0.1:{hub.port}/hub/api", str(gpus), str(boot_s)],
                stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        wait_for(self._listens, 60, "the allocator to listen", 0.1)

    def _listens(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        return "allocator_ready" in self.log.read_text()

    def stop(self) -> dict[str, int]:
        """What is left on its host."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=60)
        left: dict[str, int] = json.loads(out)
        return left

    def rows(self, query: str, *values: object) -> list[Any]:
        """Rows of the ledger."""
        ledger = f"file:{self.folder}/ledger.sqlite?mode=ro"
        with contextlib.closing(sqlite3.connect(ledger, uri=True)) as db:
            return db.execute(query, values).fetchall()


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid: int) -> float:
    """The most memory that a process had resident so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise RuntimeError(f"process {pid} tells no VmHWM")


class Costs:
    """CPU seconds of each process, phase by phase."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.pids = pids
        self.phases: dict[str, dict[str, float]] = {}
        self._mark()

    def _mark(self) -> None:
        self._at = time.monotonic()
        self._before = {name: cpu_s(pid) for name, pid in self.pids.items()}

    def end(self, phase: str) -> None:
        """A phase is over, the next one begins."""
        spent = {f"{name}_cpu_s": cpu_s(pid) - self._before[name]
                 for name, pid in self.pids.items()}  # fmt: skip
        spent["seconds"] = time.monotonic() - self._at
        self.phases[phase] = {name: round(value, 2) for name, value in spent.items()}
        self._mark()


# -- the users ------------------------------------------------------------------------------------


@dataclass
class User:
    """One user, and what she saw."""

    name: str
    hub: str
    session: aiohttp.ClientSession
    turned_away: int = 0
    asked_s: float = 0.0  # from her first request to "ready"
    spawn_s: float = 0.0  # from the request that the hub took
    stop_s: float = 0.0
    told: list[dict[str, Any]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    async def start(self) -> None:
        """Until the stream of progress has ended."""
        began = time.monotonic()
        while True:
            taken = time.monotonic()
            async with self.session.post(f"{self.hub}api/users/{self.name}/server") as answer:
                if answer.status in (201, 202):
                    break
                if answer.status != 429:
                    raise RuntimeError(f"{self.name}: {answer.status} {await answer.text()}")
                pause_s = float(answer.headers.get("Retry-After", "1"))
            self.turned_away += 1
            await asyncio.sleep(pause_s)
        looking = asyncio.create_task(self._look())
        try:
            await self._progress()
        finally:
            looking.cancel()
        self.spawn_s = time.monotonic() - taken
        self.asked_s = time.monotonic() - began

    async def _progress(self) -> None:
        url = f"{self.hub}api/users/{self.name}/server/progress"
        async with self.session.get(url) as stream:
            if stream.status != 200:
                raise RuntimeError(f"{self.name}: {stream.status} {await stream.text()}")
            async for line in stream.content:
                if line.startswith(b"data: "):
                    self.told.append(json.loads(line[6:]))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(random.uniform(1, 3))
            model = await self.model()
            server = model["servers"].get("")
            self.seen.add("none" if server is None else server["pending"] or "ready")

    async def model(self) -> Any:
        """The user as the hub's API shows her."""
        async with self.session.get(f"{self.hub}api/users/{self.name}") as answer:
            return await answer.json()

    async def stop(self) -> None:
        """Until the hub has her server no more."""
        began = time.monotonic()
        async with self.session.delete(f"{self.hub}api/users/{self.name}/server") as answer:
            if answer.status not in (202, 204):
                raise RuntimeError(f"{self.name}: {answer.status} {await answer.text()}")

        async def gone() -> bool:
            return not (await self.model())["servers"]

        await wait_for_async(gone, LIMIT_S, f"the server of {self.name} to be gone", 0.5)
        self.stop_s = time.monotonic() - began

    @property
    def ready(self) -> bool:
        """The last that she was told."""
        return bool(self.told) and bool(self.told[-1].get("ready"))


def missed(written: Iterable[str], told: Sequence[str]) -> list[str]:
    """Lines of a lease's story that its user was not told, or not in this order. No line is told
    twice in a row."""
    lines = [line for line, _ in itertools.groupby(written)]
    lacking, at = [], 0
    for line in lines:
        try:
            at = told.index(line, at) + 1
        except ValueError:
            lacking.append(line)
    return lacking


# -- the whole ------------------------------------------------------------------------------------


async def bench(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start everything, let the users in, and look at what is left."""
    before = figures.machine()
    hub = RealHub(folder)
    with (folder / "test_config.py").open("a") as config:
        config.write(QUIET)
    allocator = await asyncio.to_thread(Allocator, hub, options.users, options.boot)
    client = AllocatorClient(allocator.url, TOKEN)
    try:
        await asyncio.to_thread(hub.start)
        await client.add_host(
            schema.AddHost(
                name=HOST, uri="test:///default", cidr="127.201.0.0/22", emulated="scripted"
            )
        )
        await all_free(client, options.users)
        result = await load(options, hub, allocator, client)
        result["left"] |= await asyncio.to_thread(allocator.stop)
    except BaseException:
        print(allocator.log.read_text()[-3000:], hub.log_text()[-3000:], file=sys.stderr)
        raise
    finally:
        await client.close()
        await asyncio.to_thread(hub.stop)
        if allocator.process.poll() is None:
            allocator.process.kill()
            allocator.process.wait()
    return {
        "versions": figures.versions("gpuspawner", "jupyterhub", "sqlalchemy"),
        "machine": {"before": before, "after": figures.machine()},
        **result,
    }


async def all_free(client: AllocatorClient, count: int) -> None:
    """Wait until every GPU has passed a diagnosis."""

    async def free() -> bool:
        gpus = await client.gpus()
        return len(gpus) == count and all(gpu.state == "unassigned" for gpu in gpus)

    await wait_for_async(free, LIMIT_S, f"{count} GPUs to be free", 0.5)


async def load(
    options: argparse.Namespace, hub: RealHub, allocator: Allocator, client: AllocatorClient
) -> dict[str, Any]:
    """All users, from the first start to the last GPU's diagnosis."""
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"token {ADMIN_TOKEN}"}
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=timeout
    ) as session:
        users = [User(f"user{n:03d}", hub.url, session) for n in range(options.users)]
        names = {"usernames": [user.name for user in users]}
        async with session.post(f"{hub.url}api/users", json=names) as answer:
            assert answer.status == 201, await answer.text()
        costs = Costs({"hub": hub.pid, "allocator": allocator.process.pid})

        await crowd([user.start for user in users], options.within)
        costs.end("start")
        await asyncio.sleep(options.stay)
        costs.end("run")
        running = allocator.rows("SELECT count(*) FROM leases WHERE state = 'running'")[0][0]
        await crowd([user.stop for user in users], options.within)
        costs.end("stop")
        await all_free(client, options.users)
        costs.end("diagnose")
    peaks = {name: peak_mib(pid) for name, pid in costs.pids.items()}
    return {
        "users": options.users,
        "asked_to_ready_s": spread([user.asked_s for user in users]),
        "taken_to_ready_s": spread([user.spawn_s for user in users]),
        "stop_s": spread([user.stop_s for user in users]),
        "boot_s": options.boot,
        "turned_away": sum(user.turned_away for user in users),
        "running_at_once": running,
        "phases": costs.phases,
        "peak_mib": peaks,
        "lost": await lost(users, allocator, client),
        "left": left(allocator),
        "diagnoses_passed": allocator.rows("SELECT count(*) FROM diagnoses WHERE outcome = 'pass'")[
            0
        ][0],
    }


async def crowd(calls: Sequence[Any], within_s: float) -> None:
    """Each call at its own moment; the first error ends all."""

    async def later(call: Any, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        await call()

    moments = random.Random(1)
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(later(call, moments.uniform(0, within_s)))


def spread(values: list[float]) -> dict[str, float | int]:
    """With the middle under the name that goes with p99."""
    return {"p50": round(figures.quantile(values, 0.5), 3), **figures.spread(values)}


async def lost(
    users: Sequence[User], allocator: Allocator, client: AllocatorClient
) -> dict[str, Any]:
    """What users were not told, and gaps in the streams of their leases."""
    unready = [user.name for user in users if not user.ready]
    untold: dict[str, list[str]] = {}
    gaps = []
    for user in users:
        for (lease_id,) in allocator.rows("SELECT id FROM leases WHERE username = ?", user.name):
            rows = allocator.rows(
                "SELECT id, state, message FROM events WHERE lease_id = ? ORDER BY id", lease_id
            )
            written = [
                " ".join(text.split()) for _, state, text in rows if state not in _AFTERWARDS
            ]
            lines = missed(written, [event.get("message", "") for event in user.told])
            if lines:
                print(user.told, file=sys.stderr)
                untold[user.name] = lines
            async with asyncio.timeout(30):
                streamed = [event.id async for event in client.events(lease_id)]
            if streamed != [row[0] for row in rows]:
                gaps.append(user.name)
    return {"not_ready": unready, "not_told": untold, "gaps_in_numbers": gaps}


_AFTERWARDS = ("stopping", "ended")


def left(allocator: Allocator) -> dict[str, int]:
    """What is open in the ledger when all is over."""
    counts = {table: allocator.rows(f"SELECT count(*) FROM {table}")[0][0] for table in CLAIMS}
    open_leases = allocator.rows("SELECT count(*) FROM leases WHERE state != 'ended'")[0][0]
    dirty = allocator.rows("SELECT count(*) FROM gpus WHERE state != 'unassigned' OR dirty")[0][0]
    return {"open_leases": open_leases, "gpus_not_free": dirty, **counts}


def sound(result: dict[str, Any]) -> bool:
    """Nothing was lost and nothing is left; every GPU passed before and after its user."""
    return (
        not any(result["lost"].values())
        and not any(result["left"].values())
        and result["running_at_once"] == result["users"]
        and result["diagnoses_passed"] == 2 * result["users"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--within", type=float, default=20.0, help="seconds in which they come")
    parser.add_argument("--boot", type=float, default=10.0, help="seconds until a guest answers")
    parser.add_argument("--stay", type=float, default=60.0, help="seconds for which all run")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gs-load-") as folder:
        result = asyncio.run(bench(options, Path(folder)))
    result["sound"] = sound(result)
    print(json.dumps(result, indent=None if options.json else 2))
    return 0 if result["sound"] else 1


if __name__ == "__main__":
    sys.exit(main())
