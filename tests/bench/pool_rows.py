"""A used pool in the ledger, written table by table: lease by lease it would take minutes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from gpuspawner.allocator.acquire import mac_of
from gpuspawner.ledger import limits as limit_ledger
from gpuspawner.ledger import tables as t
from gpuspawner.ledger.database import Transaction
from gpuspawner.ledger.records import CLAIM, INVENTORY
from gpuspawner.pool.states import GpuState, LeaseState
from gpuspawner.pool.topology import Claim, HostView, Request
from tests.bench.used_pool import IMAGE, Pool


def fill(tx: Transaction, pool: Pool) -> list[str]:
    """Write a pool into an empty ledger, with a limit of 64 GPUs for each user; the ids of its
    leases."""
    limit_ledger.put(tx, "default", "", 64, "admin", "", 1)
    rows: dict[sa.Table, list[dict[str, Any]]] = {
        t.hosts: [_host_row(view) for view in pool.index.views.values()],
        t.gpus: [row for view in pool.index.views.values() for row in _gpu_rows(view)],
        t.leases: [], t.claimed_gpus: [], t.claimed_cpus: [], t.claimed_memory: [],
        t.claimed_addresses: [],
    }  # fmt: skip
    guests: dict[str, int] = {}
    for number, (request, claim) in enumerate(pool.claims):
        guests[claim.host] = guests.get(claim.host, 1) + 1
        lease = _lease_row(number, request, claim, f"10.0.0.{guests[claim.host]}")
        rows[t.leases].append(lease)
        mine = {"host": claim.host, "owner": lease["id"]}
        rows[t.claimed_gpus] += [{**mine, "address": gpu} for gpu in claim.gpus]
        rows[t.claimed_cpus] += [{**mine, "cpu": cpu} for cpu in claim.cpus]
        rows[t.claimed_memory] += [
            {**mine, "node": cell.node, "mib": cell.memory_mib} for cell in claim.cells
        ]
        rows[t.claimed_addresses].append({**mine, "address": lease["address"]})
    for table, some in rows.items():
        for first in range(0, len(some), 5000):
            tx.execute(table.insert(), some[first : first + 5000])
    return [lease["id"] for lease in rows[t.leases]]


def _host_row(view: HostView) -> dict[str, Any]:
    return {
        "name": view.inventory.host,
        "settings": {"uri": "x", "cidr": "10.0.0.0/24"},
        "inventory": INVENTORY.dump_python(view.inventory, mode="json"),
        "boot_id": "boot",
        "state": "ready",
        "drained": False,
        "images": [IMAGE],
        "generation": 1,
    }


def _gpu_rows(view: HostView) -> Iterator[dict[str, Any]]:
    for gpu in view.inventory.gpus:
        state = GpuState.ASSIGNED
        if gpu.address in view.free_gpus:
            state = GpuState.UNASSIGNED
        elif gpu.address in view.coming_gpus:
            state = GpuState.USED
        yield {
            "host": view.inventory.host,
            "address": gpu.address,
            "model": gpu.model,
            "state": state,
            "since_ms": 1,
            "dirty": state is not GpuState.UNASSIGNED,
            "attempt": 0,
            "holds": [],
        }


def _lease_row(number: int, request: Request, claim: Claim, address: str) -> dict[str, Any]:
    return {
        "id": str(uuid.uuid4()),
        "hub_id": "hub",
        "username": f"user{number}",
        "server_name": "",
        "start_id": "start-0001",
        "body_hash": "0" * 64,
        "state": LeaseState.RUNNING,
        "request": {
            "gpus": request.gpus, "cores": request.cores, "memory_mib": request.memory_mib,
            "gpu_model": None, "policy": request.policy,
        },
        "ready_path": "/",
        "port": 8888,
        "image_digest": IMAGE,
        "host": claim.host,
        "claim": CLAIM.dump_python(claim, mode="json"),
        "address": address,
        "mac": mac_of(address),
        "created_ms": 1000 + number,
        "groups": [],
    }  # fmt: skip
