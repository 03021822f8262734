"""How long does it take to claim k of a host's 8 GPUs, written to the database? Ours and
OpenStack Placement's.

    python -m tests.bench.claims_vs_placement --json [--claims 9] [--theirs-to 6]

Ours is the whole decision of ``POST /leases``: limits, the waiting, the place, the claims of GPUs,
cores, memory and address, the first events, in one committed transaction on SQLite with
``synchronous=FULL``. Theirs is ``GET /allocation_candidates`` and ``PUT /allocations`` (Placement
16.0.0 in process, SQLite, in a virtual environment of its own, made at the first run), with a
nested provider for each GPU and a request group for each GPU asked for. Claim follows claim, each
given back before the next, so each finds an empty host and only the first finds caches cold. Theirs
takes about a minute at k = 6 and was not waited for beyond (``--theirs-to``).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from gpuspawner import schema
from gpuspawner.allocator.acquire import Placing, Rules, acquire
from gpuspawner.ledger import gpus, hosts, leases, tables
from gpuspawner.ledger.database import Ledger, Transaction
from gpuspawner.pool.states import EndReason, GpuState, LeaseState
from gpuspawner.pool.topology import Gpu, Inventory, Node
from tests.bench.figures import machine, versions
from tests.bench.rivals import ask, environment

PLACEMENT = "openstack-placement==16.0.0"
IMAGE = "sha256:" + "a" * 64


def one_host(tx: Transaction) -> None:
    """Two NUMA nodes with 64 cores, 512 GiB and four GPUs each, all free."""
    nodes = tuple(
        Node(n, tuple((cpu,) for cpu in range(64 * n, 64 * n + 64)), 1 << 19) for n in range(2)
    )
    cards = tuple(Gpu(f"0000:{0x40 + n:02x}:00.0", "A", n // 4) for n in range(8))
    hosts.add(tx, "h1", {"uri": "x", "cidr": "10.0.0.0/24"})
    hosts.record_survey(tx, Inventory("h1", "boot", nodes, cards), 1)
    hosts.set_images(tx, "h1", [IMAGE])
    hosts.set_state(tx, "h1", "ready")
    tx.execute(tables.gpus.update().values(state=GpuState.UNASSIGNED))
    gpus.touch_host(tx, "h1")


def claims(count: int, times: int) -> list[dict[str, float]]:
    """So many claims of so many GPUs, each given back before the next: CPU and wall seconds."""
    taken = []
    with TemporaryDirectory() as folder:
        ledger = Ledger(f"sqlite:///{folder}/ledger.sqlite")
        ledger.open_sync()
        ledger._transaction(one_host)
        placing = Placing()
        for number in range(times):
            body = schema.AcquireLease(
                username="ada",
                start_id=f"start-{number:04}",
                request=schema.LeaseRequest(
                    gpus=count, cores=8, memory_mib=65536, image="lab", policy="split"
                ),
                payload=schema.BootPayload(argv=["x"], env={}),
                ready_path="/",
            )
            cpu, wall = time.process_time(), time.perf_counter()
            got = ledger._transaction(
                partial(acquire, hub_id="hub", body=body, image_digest=IMAGE, placing=placing,
                        rules=Rules(180_000), now_ms=1000 + number)
            )  # fmt: skip
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            assert got.lease.state is LeaseState.PLACED
            taken.append({"cpu_s": cpu, "wall_s": wall})
            ledger._transaction(partial(give_back, lease_id=got.lease.id))
        ledger._engine.dispose()
    return taken


def give_back(tx: Transaction, lease_id: str) -> None:
    """The lease has ended and its GPUs are free again."""
    leases.finish(tx, leases.stop(tx, lease_id, EndReason.RELEASED, "Stopped.", 1), 1)
    tx.execute(tables.gpus.update().values(state=GpuState.UNASSIGNED))
    gpus.touch_host(tx, "h1")


def medians(taken: list[dict[str, float]]) -> dict[str, float]:
    """Milliseconds."""
    return {
        name.replace("_s", "_ms"): round(median(one[name] for one in taken) * 1000, 2)
        for name in ("cpu_s", "wall_s")
    }


def times(wanted: int, k: int) -> int:
    """How often theirs is asked for k GPUs: once where it takes seconds."""
    return wanted if k < 5 else 1


def main() -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--claims", type=int, default=9, help="claims for each k; theirs one from k = 5"
    )
    parser.add_argument("--theirs-to", type=int, default=6, help="the last k to ask theirs for")
    parser.add_argument("--json", action="store_true", help="the only form there is")
    options = parser.parse_args()
    python = environment("Placement", PLACEMENT, "wsgi-intercept==1.13.1")
    before = machine()
    theirs = [
        next(ask(python, "placement_side.py", [{"gpus": k, "claims": times(options.claims, k)}]))
        for k in range(1, options.theirs_to + 1)
    ]
    rows = []
    for k in range(1, 9):
        row: dict[str, Any] = {
            "gpus": k,
            "ours": medians(claims(k, options.claims)),
        }
        if k <= len(theirs):
            row["placement"] = medians(theirs[k - 1])
            row["times_faster"] = round(row["placement"]["cpu_ms"] / row["ours"]["cpu_ms"], 1)
        rows.append(row)
    result = {
        "versions": {**versions("sqlalchemy"), "placement": PLACEMENT},
        "machine": {"before": before, "after": machine()},
        "claims": rows,
    }
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
