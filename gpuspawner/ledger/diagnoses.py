"""Diagnoses in the ledger. ``finish`` has the one edge that leads a GPU to ``unassigned``."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from gpuspawner.ledger import gpus as gpu_ledger
from gpuspawner.ledger import tables as t
from gpuspawner.ledger.records import DiagnosisRecord, GpuRecord, diagnosis_record
from gpuspawner.pool.states import GpuState, Outcome
from gpuspawner.pool.verdict import POLICY_VERSION, Identity, Verdict


def begin(
    tx: Connection, gpu: GpuRecord, run_id: str, nonce: str, image_digest: str, now_ms: int
) -> DiagnosisRecord:
    """A service VM takes the GPU. Written before anything is made on the host."""
    gpu_ledger.move(tx, gpu, GpuState.DIAGNOSING, now_ms, diagnosis_id=run_id, retry_ms=None)
    tx.execute(t.claimed_gpus.insert().values(host=gpu.host, address=gpu.address, owner=run_id))
    tx.execute(
        t.diagnoses.insert().values(
            id=run_id,
            host=gpu.host,
            address=gpu.address,
            nonce=nonce,
            state="running",
            reasons=[],
            attempt=gpu.attempt + 1,
            policy_version=POLICY_VERSION,
            image_digest=image_digest,
            started_ms=now_ms,
        )
    )
    return need(tx, run_id)


def need(tx: Connection, run_id: str) -> DiagnosisRecord:
    """One diagnosis that must exist; ``LookupError`` otherwise."""
    row = tx.execute(sa.select(t.diagnoses).where(t.diagnoses.c.id == run_id)).one_or_none()
    if row is None:
        raise LookupError(run_id)
    return diagnosis_record(row)


def running(tx: Connection, host: str | None = None) -> list[DiagnosisRecord]:
    """Runs that have no verdict yet."""
    query = sa.select(t.diagnoses).where(t.diagnoses.c.state == "running")
    if host is not None:
        query = query.where(t.diagnoses.c.host == host)
    return [diagnosis_record(row) for row in tx.execute(query.order_by(t.diagnoses.c.started_ms))]


def recent(
    tx: Connection, host: str | None = None, address: str | None = None, limit: int = 50
) -> list[DiagnosisRecord]:
    """The newest runs."""
    query = sa.select(t.diagnoses)
    if host is not None:
        query = query.where(t.diagnoses.c.host == host)
    if address is not None:
        query = query.where(t.diagnoses.c.address == address)
    rows = tx.execute(query.order_by(t.diagnoses.c.started_ms.desc()).limit(limit))
    return [diagnosis_record(row) for row in rows]


def finish(
    tx: Connection,
    run: DiagnosisRecord,
    verdict: Verdict,
    *,
    identity: Identity | None,
    report: dict[str, Any],
    witness: dict[str, Any],
    console: str,
    now_ms: int,
    max_attempts: int,
    backoff_ms: int,
) -> GpuState:
    """Store a verdict and move the GPU by it; returns the GPU's new state.

    Only a pass clears ``dirty``. Inconclusive runs are tried again after ``backoff_ms`` until
    ``max_attempts`` of them were in vain. The verdict of a run that was cut off meanwhile counts
    for nothing: somebody else has the GPU by now.
    """
    gpu = gpu_ledger.get(tx, run.host, run.address)
    assert gpu is not None
    if need(tx, run.id).state != "running" or gpu.diagnosis_id != run.id:
        return gpu.state
    reason = " ".join(verdict.reasons) or None
    changes: dict[str, Any] = {"diagnosis_id": None, "retry_ms": None}
    if verdict.outcome is Outcome.PASS:
        assert identity is not None
        if gpu.enrolled is None:
            gpu_ledger.enrol(tx, run.host, run.address, identity)
        state = GpuState.UNASSIGNED
        changes |= {"dirty": False, "attempt": 0}
    elif verdict.outcome is Outcome.FAIL:
        state = GpuState.FAILED
    elif verdict.outcome is Outcome.LOST:
        state = GpuState.LOST
    elif run.attempt >= max_attempts:
        state = GpuState.QUARANTINED
        changes |= {"attempt": run.attempt}
        reason = f"No verdict after {run.attempt} attempts. {reason or ''}".strip()
    else:
        state = GpuState.USED
        changes |= {"attempt": run.attempt, "retry_ms": now_ms + backoff_ms}
    _close(
        tx, run, now_ms,
        outcome=verdict.outcome, reasons=list(verdict.reasons), report=report, witness=witness,
        console=console,
    )  # fmt: skip
    gpu_ledger.move(tx, gpu, state, now_ms, reason=reason, **changes)
    return state


def abort(tx: Connection, run: DiagnosisRecord, reason: str, now_ms: int) -> None:
    """The run was cut off by us (restart, drain): the GPU waits again, no attempt is charged."""
    gpu = gpu_ledger.get(tx, run.host, run.address)
    assert gpu is not None
    _close(tx, run, now_ms, outcome=Outcome.INCONCLUSIVE, reasons=[reason])
    if gpu.state is GpuState.DIAGNOSING and gpu.diagnosis_id == run.id:
        gpu_ledger.move(tx, gpu, GpuState.USED, now_ms, reason=reason, diagnosis_id=None)


def _close(tx: Connection, run: DiagnosisRecord, now_ms: int, **values: Any) -> None:
    tx.execute(t.claimed_gpus.delete().where(t.claimed_gpus.c.owner == run.id))
    tx.execute(
        t.diagnoses.update()
        .where(t.diagnoses.c.id == run.id, t.diagnoses.c.state == "running")
        .values(state="done", ended_ms=now_ms, **values)
    )
