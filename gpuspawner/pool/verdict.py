"""The verdict on a GPU: the guest measures, this judges.

A policy names the checks that must have passed. What is missing, skipped or late is never a pass;
what the host saw itself outweighs what the service VM reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpuspawner.pool.states import Outcome

POLICY_VERSION = 1

# Bus error counters that must not move during a run; corrected errors are noise on good cards.
_GRAVE_AER = frozenset({"fatal", "nonfatal"})


@dataclass(frozen=True, slots=True)
class Witness:
    """What the host itself sees of a GPU: whether it answers on the bus (its config space does not
    read all ones), who it says it is, its link (GT/s, lanes; 0 is unknown) and that of the port
    above, how it can be reset, and the bus errors counted so far."""

    address: str
    present: bool
    boot_id: str
    ids: tuple[str, ...] = ()
    link_speed_gts: float = 0.0
    link_width: int = 0
    port_link_speed_gts: float = 0.0
    port_link_width: int = 0
    reset_methods: tuple[str, ...] = ()
    aer: Mapping[str, int] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a GPU is, as the service VM read it from the card."""

    kind: str  # "emulated", "nvidia", ...
    serial: str
    uuid: str
    model: str
    vbios: str
    memory_mib: int
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check of one run. ``status``: pass, fail, degraded, skip, timeout, error."""

    check: str
    status: str
    seconds: float = 0.0
    metrics: Mapping[str, float | int | str] = field(default_factory=dict)
    codes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """What a pass takes. ``kinds`` are the device kinds this pool accepts: an emulated GPU never
    passes in a pool that is not marked emulated."""

    kinds: tuple[str, ...]
    required: tuple[str, ...]
    version: int = POLICY_VERSION


EMULATED = Policy(
    kinds=("emulated",),
    required=("identity", "liveness", "known_answer", "dma", "residue", "overwrite", "read_back"),
)


@dataclass(frozen=True, slots=True)
class Report:
    """All that is known when a run is over. ``broken`` says why the report cannot be trusted
    (wrong nonce, cut short, repeated, too large, no answer); then nothing else of it counts."""

    identities: tuple[Identity, ...] = ()
    results: tuple[CheckResult, ...] = ()
    complete: bool = False
    broken: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """``infra`` tells an inconclusive run whose fault is the platform's, not the GPU's."""

    outcome: Outcome
    reasons: tuple[str, ...]
    infra: bool = False


def judge(
    report: Report,
    *,
    enrolled: Identity | None,
    before: Witness,
    after: Witness | None,
    policy: Policy,
) -> Verdict:
    """The verdict of one run.

    ``enrolled`` is the GPU's own record, or ``None`` for its first diagnosis, which makes it.
    ``after`` is ``None`` when the host could not be asked, which is no pass.
    """
    if not before.present:
        return Verdict(Outcome.LOST, (_gone(before),))
    if after is not None and not after.present:
        return Verdict(Outcome.LOST, (_gone(after),))
    if report.broken is not None:
        return Verdict(Outcome.INCONCLUSIVE, (report.broken,), infra=True)

    failures = [*_failed_checks(report.results), *_identity_faults(report, enrolled, policy)]
    if after is not None:
        failures += _witness_faults(before, after)
    if failures:
        return Verdict(Outcome.FAIL, tuple(failures))

    doubts = _doubts(report, before, after, policy)
    if doubts:
        return Verdict(Outcome.INCONCLUSIVE, tuple(doubts))
    return Verdict(Outcome.PASS, ())


def _gone(witness: Witness) -> str:
    note = f" ({witness.note})" if witness.note else ""
    return f"The GPU at {witness.address} does not answer on the bus{note}."


def _failed_checks(results: Sequence[CheckResult]) -> list[str]:
    return [
        f"Check {result.check} failed" + _detail(result) + "."
        for result in results
        if result.status == "fail"
    ]


def _detail(result: CheckResult) -> str:
    parts = [*result.codes, *(f"{key}={value}" for key, value in sorted(result.metrics.items()))]
    return f" ({', '.join(parts)})" if parts else ""


def _identity_faults(report: Report, enrolled: Identity | None, policy: Policy) -> list[str]:
    if len(report.identities) > 1:
        return [f"The service VM saw {len(report.identities)} GPUs where one was given."]
    if not report.identities:
        return []
    seen = report.identities[0]
    if seen.kind not in policy.kinds:
        return [f"A device of kind {seen.kind!r} cannot pass in a pool of {policy.kinds}."]
    if enrolled is None:
        return []
    return [
        f"The GPU's {name} is {new!r}, enrolled as {old!r}."
        for name, old, new in (
            ("serial", enrolled.serial, seen.serial),
            ("uuid", enrolled.uuid, seen.uuid),
            ("model", enrolled.model, seen.model),
            ("vbios", enrolled.vbios, seen.vbios),
            ("memory", enrolled.memory_mib, seen.memory_mib),
            ("PCI ids", enrolled.ids, seen.ids),
        )
        if old != new
    ]


def _witness_faults(before: Witness, after: Witness) -> list[str]:
    faults: list[str] = []
    if before.ids != after.ids:
        faults.append(f"The host saw PCI ids {before.ids} before and {after.ids} after.")
    # Not the speed: an idle link slows down to save power, and a card that starts up has not yet.
    for what, old, new in (
        ("link", before.link_width, after.link_width),
        ("link of the port above", before.port_link_width, after.port_link_width),
    ):
        if new < old:
            faults.append(f"The {what} fell from x{old} to x{new}.")
    if lost := set(before.reset_methods) - set(after.reset_methods):
        faults.append(f"It can no longer be reset by {', '.join(sorted(lost))}.")
    for name, count in sorted(after.aer.items()):
        grown = count - before.aer.get(name, 0)
        if grown > 0 and name in _GRAVE_AER:
            faults.append(f"The host counted {grown} new {name} bus errors.")
    return faults


def _doubts(report: Report, before: Witness, after: Witness | None, policy: Policy) -> list[str]:
    doubts: list[str] = []
    if not report.complete:
        doubts.append("The service VM did not finish.")
    if not report.identities:
        doubts.append("The service VM did not say which GPU it has.")
    statuses = {result.check: result.status for result in report.results}
    for check in policy.required:
        status = statuses.get(check)
        if status is None:
            doubts.append(f"Check {check} is missing.")
        elif status != "pass":
            doubts.append(f"Check {check} ended as {status}.")
    if after is None:
        doubts.append("The host could not be asked after the run.")
    elif after.boot_id != before.boot_id:
        doubts.append("The host rebooted during the run.")
    return doubts
