"""Everything about one GPU, as its page shows it: its life, its diagnoses, what its host saw.

Pure, as ``data``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gpuspawner import schema
from gpuspawner.allocator.pages.data import Tile, Urls, size, tile
from gpuspawner.allocator.pages.looks import (
    CHECK_LOOKS,
    GPU_LOOKS,
    OUTCOME_LOOKS,
    UNKNOWN,
    Look,
    gpu_actions,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One change of a GPU's state."""

    at: datetime
    host: str
    address: str
    url: str
    old: Look
    new: Look
    reason: str
    who: str


def step(row: Mapping[str, Any], at: datetime, urls: Urls) -> Step:
    """A row of the ledger's history."""
    return Step(
        at=at,
        host=row["host"],
        address=row["address"],
        url=urls.gpu(row["host"], row["address"]),
        old=GPU_LOOKS.get(row["old"], UNKNOWN),
        new=GPU_LOOKS.get(row["new"], UNKNOWN),
        reason=row["reason"] or "",
        who=row["owner"] or "",
    )


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One check of a diagnosis."""

    name: str
    look: Look
    seconds: str
    metrics: tuple[tuple[str, str], ...]
    codes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WitnessRow:
    """One thing that the host saw of a GPU, before and after."""

    name: str
    before: str
    after: str

    @property
    def changed(self) -> bool:
        """It differs."""
        return self.before != self.after


@dataclass(frozen=True, slots=True)
class Run:
    """One diagnosis."""

    id: str
    url: str
    host: str
    address: str
    look: Look
    started_at: datetime
    ended_at: datetime | None
    seconds: str
    attempt: int
    policy: int
    progress: str | None
    reasons: tuple[str, ...]
    checks: tuple[CheckRow, ...]
    witness: tuple[WitnessRow, ...]
    recovery: tuple[str, ...]


def run(one: schema.Diagnosis, urls: Urls) -> Run:
    """One diagnosis. What a service VM reported is shown, never believed."""
    seconds = ""
    if one.ended_at is not None:
        seconds = f"{(one.ended_at - one.started_at).total_seconds():.0f} s"
    return Run(
        id=one.id,
        url=urls.diagnosis(one.id),
        host=one.host,
        address=one.gpu,
        look=OUTCOME_LOOKS.get(one.outcome or one.state, UNKNOWN),
        started_at=one.started_at,
        ended_at=one.ended_at,
        seconds=seconds,
        attempt=one.attempt,
        policy=one.policy_version,
        progress=one.progress,
        reasons=tuple(one.reasons),
        checks=tuple(_check_row(check) for check in one.checks),
        witness=witness_rows(one.witness.get("before"), one.witness.get("after")),
        recovery=tuple(_rung(rung) for rung in one.witness.get("recovery") or ()),
    )


def _rung(rung: Mapping[str, Any]) -> str:
    failure = rung.get("failure")
    return f"{rung.get('step')}: {failure}" if failure else f"{rung.get('step')}: done"


def _check_row(check: Mapping[str, Any]) -> CheckRow:
    metrics = check.get("metrics") or {}
    return CheckRow(
        name=str(check.get("check", "")).replace("_", " "),
        look=CHECK_LOOKS.get(str(check.get("status")), UNKNOWN),
        seconds=f"{float(check.get('seconds') or 0):.1f}",
        metrics=tuple((str(name), _number(value)) for name, value in metrics.items()),
        codes=tuple(str(code) for code in check.get("codes") or ()),
    )


_WITNESS_NAMES = {
    "present": "answers on the bus",
    "ids": "PCI ids",
    "link_speed_gts": "link speed, GT/s",
    "link_width": "link width",
    "port_link_speed_gts": "port's link speed, GT/s",
    "port_link_width": "port's link width",
    "reset_methods": "can be reset by",
    "aer": "bus errors",
    "boot_id": "host's boot id",
    "note": "note",
}


def witness_rows(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> tuple[WitnessRow, ...]:
    """What the host itself saw. Things that it saw neither time are left out."""
    if before is None and after is None:
        return ()
    rows = [
        WitnessRow(
            text,
            "not asked" if before is None else _seen(before.get(name)),
            "not asked" if after is None else _seen(after.get(name)),
        )
        for name, text in _WITNESS_NAMES.items()
    ]
    empty = {"none", "not asked", "0"}
    return tuple(row for row in rows if {row.before, row.after} - empty)


def _seen(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            return ", ".join(str(one) for one in value) or "none"
        case dict():
            return ", ".join(f"{k} {v}" for k, v in sorted(value.items())) or "none"
        case int() | float():
            return f"{value:g}"
        case _:
            return str(value) if value else "none"


def _number(value: Any) -> str:
    return f"{value:,}".replace(",", "\N{NO-BREAK SPACE}") if isinstance(value, int) else str(value)


@dataclass(frozen=True, slots=True)
class GpuDetails:
    """Everything on a GPU's page."""

    tile: Tile
    gpu: schema.Gpu
    facts: tuple[tuple[str, str], ...]
    identity: tuple[tuple[str, str], ...]
    actions: tuple[str, ...]
    next_step: str
    runs: tuple[Run, ...]
    steps: tuple[Step, ...] = field(default=())


def gpu_details(
    gpu: schema.Gpu,
    identity: Mapping[str, Any] | None,
    runs: Sequence[schema.Diagnosis],
    steps: Sequence[Step],
    urls: Urls,
) -> GpuDetails:
    """A GPU's page. ``identity`` is its enrolment record."""
    facts = [
        ("Host", gpu.host),
        ("PCI address", gpu.address),
        ("NUMA node", str(gpu.node) if gpu.node >= 0 else "none: an admin has to say which"),
        ("PCI functions", ", ".join(gpu.functions) or "not known"),
        ("Memory", size(gpu.memory_mib) if gpu.memory_mib else "not known"),
        ("Clean", "no" if gpu.dirty else "yes: its last wipe was verified"),
    ]
    names = (
        ("kind", "Kind"), ("model", "Model"), ("serial", "Serial"), ("uuid", "UUID"),
        ("vbios", "VBIOS"), ("memory_mib", "Memory, MiB"), ("ids", "PCI ids"),
    )  # fmt: skip
    enrolled = tuple((text, _seen(identity.get(name))) for name, text in names) if identity else ()
    return GpuDetails(
        tile=tile(gpu, urls),
        gpu=gpu,
        facts=tuple(facts),
        identity=enrolled,
        actions=gpu_actions(gpu.state, bool(gpu.holds)),
        next_step=_next_step(gpu),
        runs=tuple(run(one, urls) for one in runs),
        steps=tuple(steps),
    )


def _next_step(gpu: schema.Gpu) -> str:
    """What happens next, or what an admin should do."""
    if gpu.problems:
        return "See to the problems below; the host is looked at again every minute."
    if gpu.holds and gpu.state in ("unassigned", "used", "diagnosing"):
        return "It is held back. Take the hold away when its cause is gone."
    match gpu.state:
        case "new":
            return "Enrol it when you know which card it is."
        case "used":
            return "It is wiped and checked as soon as its turn comes."
        case "failed" | "quarantined":
            return "Read the newest diagnosis below; retest it, or retire it."
        case "lost":
            return "Look at the hardware; when the host lists it again, retest it."
        case _:
            return ""
