"""From what the API shows to what a page shows. Pure: no I/O, no clock, no HTML.

Texts are given as they are, whoever wrote them; the templates escape everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import quote

from gpuspawner import schema
from gpuspawner.allocator.pages.looks import (
    GPU_LOOKS,
    HELD,
    HOST_LOOKS,
    LEASE_LOOKS,
    UNKNOWN,
    UNUSABLE,
    Look,
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
    """One lease. ``emulated``: its GPUs are."""
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


def _find(*words: str | None) -> str:
    """What the filter looks in."""
    return " ".join(word for word in words if word).lower()
