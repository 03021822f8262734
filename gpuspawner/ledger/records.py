"""Rows as frozen records, and the way from and to JSON for the pool's types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Row

from gpuspawner.pool.states import EndReason, GpuState, LeaseState, Outcome
from gpuspawner.pool.topology import Claim, Inventory
from gpuspawner.pool.verdict import Identity

INVENTORY = TypeAdapter(Inventory)
CLAIM = TypeAdapter(Claim)
IDENTITY = TypeAdapter(Identity)


@dataclass(frozen=True, slots=True)
class HostRecord:
    """A host of the pool. ``settings`` are those it was added with."""

    name: str
    settings: dict[str, Any]
    inventory: Inventory | None
    boot_id: str | None
    state: str
    reason: str | None
    drained: bool
    accel: str | None
    images: frozenset[str]
    generation: int


@dataclass(frozen=True, slots=True)
class GpuRecord:
    """A GPU's place in its life."""

    host: str
    address: str
    model: str
    state: GpuState
    since_ms: int
    reason: str | None
    dirty: bool
    attempt: int
    retry_ms: int | None
    enrolled: Identity | None
    holds: tuple[str, ...]
    lease_id: str | None
    diagnosis_id: str | None


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One server's right to one VM."""

    id: str
    hub_id: str
    username: str
    server_name: str
    start_id: str
    body_hash: str
    state: LeaseState
    reason: EndReason | None
    message: str | None
    request: dict[str, Any]
    ready_path: str
    port: int
    image_digest: str
    host: str | None
    claim: Claim | None
    address: str | None
    mac: str | None
    created_ms: int
    wait_until_ms: int | None
    running_ms: int | None
    ended_ms: int | None
    groups: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        """Hub, user and server name: one server."""
        return (self.hub_id, self.username, self.server_name)


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One line of a lease's story."""

    id: int
    lease_id: str
    at_ms: int
    kind: str
    state: LeaseState
    progress: int
    message: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class DiagnosisRecord:
    """One run of the service VM."""

    id: str
    host: str
    address: str
    nonce: str
    state: str
    outcome: Outcome | None
    reasons: tuple[str, ...]
    report: dict[str, Any] | None
    witness: dict[str, Any] | None
    attempt: int
    policy_version: int
    image_digest: str
    console: str | None
    started_ms: int
    ended_ms: int | None


@dataclass(frozen=True, slots=True)
class HomeRecord:
    """One server's home volume."""

    id: str
    hub_id: str
    username: str
    server_name: str
    host: str
    volume: str
    size_mib: int
    used: bool
    created_ms: int
    trashed_ms: int | None


def host_record(row: Row[Any]) -> HostRecord:
    """From a row of ``hosts``."""
    values = dict(row._mapping)
    raw = values["inventory"]
    values["inventory"] = None if raw is None else INVENTORY.validate_python(raw)
    values["images"] = frozenset(values["images"])
    return HostRecord(**values)


def gpu_record(row: Row[Any]) -> GpuRecord:
    """From a row of ``gpus``."""
    values = dict(row._mapping)
    values["state"] = GpuState(values["state"])
    raw = values["enrolled"]
    values["enrolled"] = None if raw is None else IDENTITY.validate_python(raw)
    values["holds"] = tuple(values["holds"])
    return GpuRecord(**values)


def lease_record(row: Row[Any]) -> LeaseRecord:
    """From a row of ``leases``."""
    values = dict(row._mapping)
    values["state"] = LeaseState(values["state"])
    values["reason"] = None if values["reason"] is None else EndReason(values["reason"])
    raw = values["claim"]
    values["claim"] = None if raw is None else CLAIM.validate_python(raw)
    values["groups"] = tuple(values["groups"])
    return LeaseRecord(**values)


def event_record(row: Row[Any]) -> EventRecord:
    """From a row of ``events``."""
    values = dict(row._mapping)
    values["state"] = LeaseState(values["state"])
    return EventRecord(**values)


def diagnosis_record(row: Row[Any]) -> DiagnosisRecord:
    """From a row of ``diagnoses``."""
    values = dict(row._mapping)
    values["outcome"] = None if values["outcome"] is None else Outcome(values["outcome"])
    values["reasons"] = tuple(values["reasons"])
    return DiagnosisRecord(**values)


def home_record(row: Row[Any]) -> HomeRecord:
    """From a row of ``homes``."""
    return HomeRecord(**dict(row._mapping))
