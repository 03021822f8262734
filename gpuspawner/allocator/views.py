"""From the ledger's records to what the API shows."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from gpuspawner import schema
from gpuspawner.allocator.clock import moment
from gpuspawner.ledger.records import (
    DiagnosisRecord,
    EventRecord,
    GpuRecord,
    HostRecord,
    LeaseRecord,
)
from gpuspawner.pool.states import COMING, HELD, GpuState, LeaseState
from gpuspawner.pool.topology import HostView


def lease(record: LeaseRecord, host: HostRecord | None, payload_needed: bool) -> schema.Lease:
    """One lease. ``payload_needed`` only means something while it is starting."""
    claim = record.claim
    models: list[str] = []
    if claim is not None and host is not None and host.inventory is not None:
        known = {gpu.address: gpu.model for gpu in host.inventory.gpus}
        models = [known.get(address, "?") for address in claim.gpus]
    return schema.Lease(
        id=record.id,
        hub_id=record.hub_id,
        username=record.username,
        server_name=record.server_name,
        start_id=record.start_id,
        state=record.state.value,
        reason=None if record.reason is None else record.reason.value,
        message=record.message,
        request=schema.LeaseRequest.model_validate(record.request),
        host=record.host,
        node=claim.cells[0].node if claim is not None and len(claim.cells) == 1 else None,
        gpus=list(claim.gpus) if claim is not None else [],
        gpu_models=models,
        cpus=list(claim.cpus) if claim is not None else [],
        image_digest=record.image_digest,
        address=record.address,
        port=record.port,
        created_at=moment(record.created_ms),
        running_at=None if record.running_ms is None else moment(record.running_ms),
        ended_at=None if record.ended_ms is None else moment(record.ended_ms),
        payload_needed=payload_needed,
    )


def event(record: EventRecord) -> schema.LeaseEvent:
    """One line of a lease's story."""
    return schema.LeaseEvent(
        id=record.id,
        lease_id=record.lease_id,
        at=moment(record.at_ms),
        kind=record.kind,  # type: ignore[arg-type]
        state=record.state.value,
        progress=record.progress,
        message=record.message,
        reason=record.reason,
    )


def gpu(record: GpuRecord, host: HostRecord | None, username: str | None) -> schema.Gpu:
    """One GPU; what the host no longer lists is shown with what was known."""
    found = None
    if host is not None and host.inventory is not None:
        found = next((one for one in host.inventory.gpus if one.address == record.address), None)
    return schema.Gpu(
        host=record.host,
        address=record.address,
        model=record.model,
        node=found.node if found else -1,
        emulated=found.imitation if found else False,
        memory_mib=found.memory_mib if found else 0,
        functions=list(found.functions) if found else [],
        state=record.state.value,
        since=moment(record.since_ms),
        reason=record.reason,
        serial=record.enrolled.serial if record.enrolled else None,
        dirty=record.dirty,
        holds=list(record.holds),
        attempt=record.attempt,
        retry_at=None if record.retry_ms is None else moment(record.retry_ms),
        lease_id=record.lease_id,
        username=username,
        diagnosis_id=record.diagnosis_id,
        problems=list(found.problems) if found else [],
    )


def host(record: HostRecord, view: HostView | None) -> schema.Host:
    """One host with what is free on each node."""
    nodes: list[schema.Node] = []
    if record.inventory is not None and view is not None:
        nodes = [
            schema.Node(
                id=node.id,
                cores=len(node.cores),
                free_cores=len(view.free_cores(node.id)),
                memory_mib=node.memory_mib,
                reserve_mib=node.reserve_mib,
                free_mib=max(0, view.free_mib(node.id)),
            )
            for node in record.inventory.nodes
        ]
    return schema.Host(
        name=record.name,
        uri=record.settings["uri"],
        kind="emulated" if record.settings.get("emulated") else "libvirt",
        state=record.state,  # type: ignore[arg-type]
        reason=record.reason,
        drained=record.drained,
        accel=record.accel,
        boot_id=record.boot_id,
        cidr=record.settings["cidr"],
        nodes=nodes,
        gpus=len(record.inventory.gpus) if record.inventory else 0,
        images=sorted(record.images),
    )


def diagnosis(record: DiagnosisRecord, progress: str | None) -> schema.Diagnosis:
    """One run of the service VM."""
    return schema.Diagnosis(
        id=record.id,
        host=record.host,
        gpu=record.address,
        state=record.state,  # type: ignore[arg-type]
        outcome=None if record.outcome is None else record.outcome.value,
        reasons=list(record.reasons),
        attempt=record.attempt,
        started_at=moment(record.started_ms),
        ended_at=None if record.ended_ms is None else moment(record.ended_ms),
        policy_version=record.policy_version,
        image_digest=record.image_digest,
        checks=(record.report or {}).get("checks", []),
        witness=record.witness or {},
        progress=progress,
    )


def counts(gpus: list[GpuRecord], hosts: dict[str, HostRecord]) -> list[schema.GpuCount]:
    """What is free of each model, as a form shows it."""
    groups: dict[tuple[str, bool, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for record in gpus:
        if record.state is GpuState.RETIRED:
            continue
        home = hosts.get(record.host)
        shown = gpu(record, home, None)
        tally: dict[str, Any] = groups[(record.model, shown.emulated, shown.memory_mib)]
        tally["total"] += 1
        usable = home is not None and home.state == "ready" and not home.drained
        if record.state in HELD:
            tally["in_use"] += 1
        elif not usable or record.holds or shown.problems:
            tally["out"] += 1
        elif record.state is GpuState.UNASSIGNED:
            tally["free"] += 1
        elif record.state in COMING or (record.state is GpuState.NEW and shown.emulated):
            tally["coming"] += 1
        else:
            tally["out"] += 1
    return [
        schema.GpuCount(
            model=model,
            emulated=emulated,
            memory_mib=memory_mib,
            total=tally["total"],
            free=tally["free"],
            in_use=tally["in_use"],
            coming=tally["coming"],
            out=tally["out"],
        )
        for (model, emulated, memory_mib), tally in sorted(groups.items())
    ]


STARTING = frozenset({LeaseState.PLACED, LeaseState.STARTING})
