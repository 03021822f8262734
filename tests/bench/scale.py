"""Does a decision cost more in a larger pool?

    python -m tests.bench.scale [--json] [--hosts 10 100 1000 10000] [--decisions 200]
                                [--commits 60] [--postgresql URL]

The hosts are partly used, in many ways (``used_pool``). Two figures, each with servers that come at
random while as many others end:

* the decision alone: where the server goes among all hosts (``pool.index``), and the host as it is
  afterwards put back, CPU time; beside it the function that asks each host, and a request that is
  refused because it fits nowhere, for the first time and once more when another server has ended;
* with the commit: the whole of ``POST /leases`` (limits, queue, place, claims, events) in one
  durable transaction, on SQLite and on PostgreSQL, CPU and wall time.

Sizes take turns decision by decision, so that other load on the machine meets all alike. Without
``--postgresql`` a private PostgreSQL is started, as for the service tests; with it, databases are
made on that server and dropped again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sqlalchemy as sa

from gpuspawner import schema
from gpuspawner.allocator.acquire import Placing, Rules, acquire
from gpuspawner.ledger import gpus as gpu_ledger
from gpuspawner.ledger import leases as lease_ledger
from gpuspawner.ledger import tables as t
from gpuspawner.ledger.database import Ledger, Transaction
from gpuspawner.pool.placement import place
from gpuspawner.pool.states import EndReason, GpuState, LeaseState
from gpuspawner.pool.topology import Claim, Request
from tests.bench.figures import machine, spread, versions
from tests.bench.pool_rows import fill
from tests.bench.used_pool import IMAGE, Pool, used_pool
from tests.service.postgres import cluster

# No host has 129 cores.
NOWHERE = [Request(8, 129, gib << 10, image=IMAGE, policy="split") for gib in range(64, 69)]


# ---------------------------------------------------------------------- the decision alone


def decisions(pools: Sequence[Pool], count: int) -> list[dict[str, Any]]:
    """Milliseconds of CPU time, for each pool."""
    taken: list[list[float]] = [[] for _ in pools]
    for _ in range(count):
        for pool, times in zip(pools, taken, strict=True):
            request = pool.request()
            began = time.process_time()
            found = pool.start(request)
            spent = time.process_time() - began
            if found is not None:
                times.append(spent * 1000)
                pool.end_one()
    return [
        {
            "decision_ms": spread(times),
            "each_host_asked_ms": spread([_linear(pool) for _ in range(3)]),
            "refusal_ms": spread([_refused(pool, one) for one in NOWHERE]),
            "refusal_again_ms": spread([_refused(pool, one) for one in NOWHERE]),
        }
        for pool, times in zip(pools, taken, strict=True)
    ]


def _linear(pool: Pool) -> float:
    request, views = pool.request(), list(pool.index.views.values())
    began = time.process_time()
    place(request, views, pool.mix)
    return (time.process_time() - began) * 1000


def _refused(pool: Pool, request: Request) -> float:
    pool.end_one()
    began = time.process_time()
    found = pool.index.place(request, pool.mix)
    taken = (time.process_time() - began) * 1000
    assert not isinstance(found, Claim)
    return taken


# ---------------------------------------------------------------------- with the commit


class Store:
    """A pool in a database, and an allocator's decisions on it."""

    def __init__(self, url: str, pool: Pool) -> None:
        self.ledger = Ledger(url)
        self.ledger.open_sync()
        self.rng = random.Random(1)
        self.now = 1_000_000
        self.placing = Placing()
        self.open: list[str] = self.do(fill, pool)
        if self.ledger._engine.dialect.name == "postgresql":
            self.do(lambda tx: tx.exec_driver_sql("ANALYZE"))  # its daemon would, in a minute
        began = time.perf_counter()
        self.do(self.placing.views.load)
        self.first_look_s = round(time.perf_counter() - began, 2)
        self.times: list[dict[str, float]] = []

    def do(self, fn: Callable[..., Any], *args: Any) -> Any:
        """One transaction, a little later than the last."""
        self.now += 1
        return self.ledger._transaction(lambda tx: fn(tx, *args))

    def start(self, request: Request) -> None:
        """A start as the API takes it, measured; another server ends afterwards."""
        body = schema.AcquireLease(
            username=f"new{self.now}",
            start_id="start-0001",
            request=schema.LeaseRequest(
                gpus=request.gpus, cores=request.cores, memory_mib=request.memory_mib,
                image="lab", policy=request.policy,
            ),
            payload=schema.BootPayload(argv=["x"], env={}),
            ready_path="/",
        )  # fmt: skip
        asked = partial(
            acquire, hub_id="hub", body=body, image_digest=IMAGE, placing=self.placing,
            rules=Rules(180_000), now_ms=self.now,
        )  # fmt: skip
        cpu, wall = time.process_time(), time.perf_counter()
        got = self.do(asked)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        if got.lease.state is LeaseState.PLACED:
            self.times.append({"cpu_ms": cpu * 1000, "wall_ms": wall * 1000})
            self.open.append(got.lease.id)
            self.do(self._end, self.open.pop(self.rng.randrange(len(self.open))))
        elif got.lease.state is LeaseState.QUEUED:  # it must not be in the way of the next
            self.do(lease_ledger.stop, got.lease.id, EndReason.RELEASED, "Stopped.", self.now)

    def _end(self, tx: Transaction, lease_id: str) -> None:
        """A server ends, and its GPUs are proved clean at once."""
        lease = lease_ledger.stop(tx, lease_id, EndReason.RELEASED, "Stopped.", self.now)
        lease_ledger.finish(tx, lease, self.now)
        assert lease.claim is not None
        of = t.gpus.c
        where = (of.host == lease.claim.host, of.address.in_(lease.claim.gpus))
        tx.execute(t.gpus.update().where(*where).values(state=GpuState.UNASSIGNED))
        gpu_ledger.touch_host(tx, lease.claim.host)


def commits(urls: Sequence[str], pools: Sequence[Pool], count: int) -> list[dict[str, Any]]:
    """CPU and wall milliseconds for each pool, in a database of its own."""
    with ExitStack() as stack:
        stores = []
        for url, pool in zip(urls, pools, strict=True):
            stores.append(Store(url, pool))
            stack.callback(stores[-1].ledger._engine.dispose)
        for _ in range(count):
            for store, pool in zip(stores, pools, strict=True):
                store.start(pool.request())
        return [
            {
                "cpu_ms": spread([one["cpu_ms"] for one in store.times]),
                "wall_ms": spread([one["wall_ms"] for one in store.times]),
                "first_look_s": store.first_look_s,
            }
            for store in stores
        ]


@contextmanager
def postgresql(url: str | None) -> Iterator[Callable[[], str]]:
    """Makes databases, on a given server or on one of our own, gone afterwards."""
    if url is None:
        with cluster(durable=True) as own:
            yield own.database
        return
    admin = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    made: list[str] = []

    def database() -> str:
        made.append(f"scale_{uuid.uuid4().hex[:12]}")
        with admin.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {made[-1]}")
        return sa.make_url(url).set(database=made[-1]).render_as_string(hide_password=False)

    try:
        yield database
    finally:
        with admin.connect() as connection:
            for name in made:
                connection.exec_driver_sql(f"DROP DATABASE {name}")
        admin.dispose()


def measure(
    sizes: Sequence[int], count: int, committed: int, url: str | None, engines: Sequence[str]
) -> dict[str, Any]:
    """All figures; ``times_of_100`` are medians against those of the pool of 100 hosts, or of the
    smallest if there is none."""
    before = machine()
    pools = [used_pool(hosts) for hosts in sizes]
    rows: list[dict[str, Any]] = [
        {
            "hosts": hosts,
            "servers": len(pool.claims),
            "kinds_of_nodes": len(pool.index._nodes),
            "kinds_of_hosts": len(pool.index._hosts),
        }
        for hosts, pool in zip(sizes, pools, strict=True)
    ]
    for row, found in zip(rows, decisions(pools, count), strict=True):
        row.update(found)
    for engine in engines:
        with ExitStack() as stack:
            if engine == "sqlite":
                folder = Path(stack.enter_context(TemporaryDirectory(dir="/var/tmp")))
                urls = [f"sqlite:///{folder}/{hosts}.sqlite" for hosts in sizes]
            else:
                database = stack.enter_context(postgresql(url))
                urls = [database() for _ in sizes]
            for row, one in zip(rows, commits(urls, pools, committed), strict=True):
                row[engine] = one
    base = next((row for row in rows if row["hosts"] == 100), rows[0])
    for row in rows:
        row["times_of_100"] = {
            "decision": _times(row, base, "decision_ms"),
            **{engine: _times(row[engine], base[engine], "wall_ms") for engine in engines},
        }
    return {
        "versions": versions("sqlalchemy", "psycopg"),
        "machine": {"before": before, "after": machine()},
        "pools": rows,
    }


def _times(row: dict[str, Any], base: dict[str, Any], figure: str) -> float | None:
    if not row[figure].get("median") or not base[figure].get("median"):
        return None
    return round(row[figure]["median"] / base[figure]["median"], 2)


def table(result: dict[str, Any]) -> Iterator[str]:
    """For people."""
    yield "  hosts  decision  asking each  refusal, again  SQLite  PostgreSQL"
    for row in result["pools"]:
        times = row["times_of_100"]
        shown = [
            f"{row['hosts']:7}",
            f"{_median(row, 'decision_ms')} x{times['decision']}",
            _median(row, "each_host_asked_ms"),
            _median(row, "refusal_ms"),
            _median(row, "refusal_again_ms"),
        ]
        for engine in ("sqlite", "postgresql"):
            if engine in row:
                shown.append(f"{_median(row[engine], 'wall_ms')} x{times[engine]}")
        yield "  ".join(shown)


def _median(row: dict[str, Any], figure: str) -> str:
    return f"{row[figure].get('median', float('nan')):.2f} ms"


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[10, 100, 1000, 10000])
    parser.add_argument("--decisions", type=int, default=200, help="for each size")
    parser.add_argument("--commits", type=int, default=60, help="for each size and database")
    parser.add_argument("--postgresql", metavar="URL", help="a server that may make databases")
    parser.add_argument("--json", action="store_true", help="all figures, for programs")
    options = parser.parse_args()
    result = measure(
        options.hosts,
        options.decisions,
        options.commits,
        options.postgresql,
        ("sqlite", "postgresql"),
    )
    print(json.dumps(result, indent=2) if options.json else "\n".join(table(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
