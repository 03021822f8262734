"""From what the API shows to what a page shows. Pure: no I/O, no clock, no HTML.

Texts are given as they are, whoever wrote them; the templates escape everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import quote

from gpuspawner import schema
from gpuspawner.allocator.pages.looks import (
    CHECK_LOOKS,
    GPU_LOOKS,
    HELD,
    HOST_LOOKS,
    LEASE_LOOKS,
    OUTCOME_LOOKS,
    UNKNOWN,
    UNUSABLE,
    Look,
    gpu_actions,
    gpu_look,
)


def size(mib: int) -> str:
    """Memory for people, from MiB: ``512 MiB``, ``64 GiB``, ``1.5 GiB``."""
    if mib < 1024:
        return f"{mib} MiB"
    gib = mib / 1024
    return f"{gib:.0f} GiB" if gib >= 100 or gib == int(gib) else f"{gib:.1f} GiB"


def part(name: str) -> str:
    """A user's or a server's name as one part of a path, as JupyterHub writes it."""
    return quote(name, safe="@~")


def marked(model: str, emulated: bool) -> str:
    """A GPU's model. That a GPU is emulated is always said."""
    return f"{model} (emulated)" if emulated and "emulated" not in model.lower() else model


@dataclass(frozen=True, slots=True)
class Urls:
    """Where things are for browsers: our own pages under ``prefix``, JupyterHub's under ``hub``
    (``/hub/``, or with a host) and single-user servers under ``base``. All end in a slash."""

    prefix: str
    hub: str
    base: str

    def server(self, username: str, server_name: str) -> str:
        """A single-user server."""
        return f"{self.base}user/{part(username)}/" + (
            f"{part(server_name)}/" if server_name else ""
        )

    def pending(self, username: str, server_name: str) -> str:
        """JupyterHub's page that shows a start's progress."""
        return f"{self.hub}spawn-pending/{part(username)}" + (
            f"/{part(server_name)}" if server_name else ""
        )

    def gpu(self, host: str, address: str) -> str:
        """A GPU's page."""
        return f"{self.prefix}admin/gpus/{part(host)}/{quote(address, safe=':')}"

    def diagnosis(self, run_id: str) -> str:
        """A diagnosis' page."""
        return f"{self.prefix}admin/diagnoses/{part(run_id)}"


# ------------------------------------------------------------------ leases


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One server."""

    id: str
    username: str
    server: str  # empty for the default server
    title: str
    look: Look
    state: str
    gpus: str
    place: str
    hardware: str
    image: str
    since: datetime
    open_url: str | None
    message: str | None
    hub_id: str
    tiles: tuple[tuple[str, str], ...]  # (address, URL) of each GPU
    find: str

    @property
    def stoppable(self) -> bool:
        """It has not begun to end."""
        return self.state not in ("stopping", "ended")


def server_title(server_name: str) -> str:
    """What a server is called where it stands alone."""
    return server_name or "Default server"


def lease_row(lease: schema.Lease, urls: Urls, emulated: bool) -> LeaseRow:
    """One lease. ``emulated``: its host's GPUs are."""
    models = [marked(model, emulated) for model in lease.gpu_models]
    wanted = lease.request.gpus
    if models:
        counted = Counter(models)
        gpus = ", ".join(f"{n} × {model}" for model, n in sorted(counted.items()))
    elif wanted:
        gpus = f"{wanted} × {lease.request.gpu_model or 'any GPU'}"
    else:
        gpus = "no GPU"
    place = lease.host or "no place yet"
    if lease.node is not None:
        place += f", NUMA node {lease.node}"
    open_url = None
    if lease.state == "running":
        open_url = urls.server(lease.username, lease.server_name)
    elif lease.state in ("queued", "placed", "starting"):
        open_url = urls.pending(lease.username, lease.server_name)
    cores = lease.request.cores
    look = LEASE_LOOKS.get(lease.state, UNKNOWN)
    return LeaseRow(
        id=lease.id,
        username=lease.username,
        server=lease.server_name,
        title=server_title(lease.server_name),
        look=look,
        state=lease.state,
        gpus=gpus,
        place=place,
        hardware=f"{cores} core{'s' if cores != 1 else ''}, {size(lease.request.memory_mib)}",
        image=lease.request.image,
        since=lease.running_at or lease.created_at,
        open_url=open_url,
        message=lease.message,
        hub_id=lease.hub_id,
        tiles=tuple((one, urls.gpu(lease.host, one)) for one in lease.gpus if lease.host),
        find=_find(
            lease.username, server_title(lease.server_name), lease.state, look.label, place, gpus,
            *lease.gpus,
        ),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LastEnd:
    """Why a user's newest server ended, and the last lines of its story."""

    title: str
    ran: bool
    text: str
    at: datetime
    story: tuple[tuple[datetime, str], ...]


def last_end(lease: schema.Lease, events: Sequence[schema.LeaseEvent]) -> LastEnd:
    """The note about an ended lease."""
    return LastEnd(
        title=server_title(lease.server_name),
        ran=lease.running_at is not None,
        text=lease.message or "It ended.",
        at=lease.ended_at or lease.created_at,
        story=tuple((event.at, event.message) for event in events[-8:]),
    )


# ------------------------------------------------------------------ what is free


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar, in percent of it."""

    tone: str
    begin: float
    width: float


@dataclass(frozen=True, slots=True)
class CountRow:
    """How many GPUs there are of one model."""

    model: str
    memory: str
    total: int
    free: int
    in_use: int
    coming: int
    out: int
    bar: tuple[Segment, ...]


def count_row(count: schema.GpuCount) -> CountRow:
    """One model's numbers and their bar."""
    parts = (
        ("ok", count.free),
        ("wait", count.coming),
        ("busy", count.in_use),
        ("off", count.out),
    )
    return CountRow(
        model=marked(count.model, count.emulated),
        memory=size(count.memory_mib) if count.memory_mib else "",
        total=count.total,
        free=count.free,
        in_use=count.in_use,
        coming=count.coming,
        out=count.out,
        bar=segments(parts, count.total),
    )


def segments(parts: Iterable[tuple[str, int]], total: int) -> tuple[Segment, ...]:
    """Numbers as parts of a bar."""
    found: list[Segment] = []
    begin = 0.0
    for tone, number in parts:
        width = round(100 * number / total, 2) if total > 0 else 0.0
        if width > 0:
            found.append(Segment(tone, round(begin, 2), width))
        begin += width
    return tuple(found)


# ------------------------------------------------------------------ hosts and GPUs


@dataclass(frozen=True, slots=True)
class Tile:
    """One GPU in the grid."""

    host: str
    address: str
    url: str
    model: str
    emulated: bool
    state: str
    look: Look
    note: str
    find: str


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One NUMA node with its GPUs. ``id`` of ``None``: GPUs that are on no known node."""

    id: int | None
    cores: int
    free_cores: int
    memory: str
    free: str
    reserve: str
    core_bar: tuple[Segment, ...]
    memory_bar: tuple[Segment, ...]
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class HostCard:
    """One host."""

    name: str
    look: Look
    reason: str | None
    emulated: bool
    drained: bool
    accel: str
    uri: str
    nodes: tuple[NodeRow, ...]
    gpus: int
    find: str


_ACCEL = {"kvm": "KVM", "tcg": "without KVM: guests are slow"}


def tile(gpu: schema.Gpu, urls: Urls) -> Tile:
    """One GPU in the grid, with the one thing about it that matters most."""
    shown, look = gpu_look(gpu.state, bool(gpu.holds), bool(gpu.problems))
    notes: list[str] = []
    if gpu.problems:
        notes.append(gpu.problems[0])
    if gpu.holds:
        notes.append(f"held: {gpu.holds[0]}")
    if gpu.username:
        notes.append(gpu.username)
    elif gpu.attempt and gpu.state in ("used", "diagnosing"):
        notes.append(f"attempt {gpu.attempt + 1}")
    elif gpu.state in ("failed", "lost", "quarantined") and gpu.reason:
        notes.append(gpu.reason)
    return Tile(
        host=gpu.host,
        address=gpu.address,
        url=urls.gpu(gpu.host, gpu.address),
        model=marked(gpu.model, gpu.emulated),
        emulated=gpu.emulated,
        state=shown,
        look=look,
        note="; ".join(notes),
        find=_find(
            gpu.host, gpu.address, gpu.model, gpu.state, look.label, gpu.username, gpu.serial,
            "held" if gpu.holds else None, *gpu.holds, "emulated" if gpu.emulated else None,
            "problem" if gpu.problems else None,
        ),
    )  # fmt: skip


def host_card(host: schema.Host, gpus: Sequence[schema.Gpu], urls: Urls) -> HostCard:
    """One host with its nodes, and on each node its GPUs."""
    known = {node.id for node in host.nodes}
    by_node: dict[int | None, list[Tile]] = {}
    for gpu in gpus:
        by_node.setdefault(gpu.node if gpu.node in known else None, []).append(tile(gpu, urls))
    rows = [_node_row(node, tuple(by_node.get(node.id, ()))) for node in host.nodes]
    if None in by_node:
        rows.append(NodeRow(None, 0, 0, "", "", "", (), (), tuple(by_node[None])))
    return HostCard(
        name=host.name,
        look=HOST_LOOKS.get(host.state, UNKNOWN),
        reason=host.reason,
        emulated=host.kind == "emulated",
        drained=host.drained,
        accel=_ACCEL.get(host.accel or "", host.accel or ""),
        uri=host.uri,
        nodes=tuple(rows),
        gpus=len(gpus),
        find=_find(host.name, host.state, "drained" if host.drained else None, host.accel),
    )


def _node_row(node: schema.Node, tiles: tuple[Tile, ...]) -> NodeRow:
    taken = max(0, node.memory_mib - node.reserve_mib - node.free_mib)
    return NodeRow(
        id=node.id,
        cores=node.cores,
        free_cores=node.free_cores,
        memory=size(node.memory_mib),
        free=size(node.free_mib),
        reserve=size(node.reserve_mib),
        core_bar=segments((("busy", node.cores - node.free_cores),), node.cores),
        memory_bar=segments((("busy", taken), ("off", node.reserve_mib)), node.memory_mib),
        tiles=tiles,
    )


@dataclass(frozen=True, slots=True)
class StateCount:
    """How many GPUs are in one state, for the filter's buttons."""

    state: str
    look: Look
    count: int


def state_counts(gpus: Iterable[schema.Gpu]) -> tuple[StateCount, ...]:
    """How many GPUs look like what, in the order of a GPU's life."""
    tally = Counter(gpu_look(gpu.state, bool(gpu.holds), bool(gpu.problems)) for gpu in gpus)
    order = [*GPU_LOOKS.values(), HELD, UNUSABLE]
    ranked = sorted(tally.items(), key=lambda one: order.index(one[0][1]))
    return tuple(StateCount(state, look, count) for (state, look), count in ranked)


# ------------------------------------------------------------------ one GPU


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
    )


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


def _find(*words: str | None) -> str:
    """What the filter looks in."""
    return " ".join(word for word in words if word).lower()
