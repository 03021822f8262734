"""Deciding about leases: acquire, queue, place, release. Every function is one transaction."""

from __future__ import annotations

import ipaddress
import uuid
from dataclasses import dataclass, replace
from typing import Any

from gpuspawner.allocator.errors import ApiError
from gpuspawner.ledger import gpus as gpu_ledger
from gpuspawner.ledger import homes as home_ledger
from gpuspawner.ledger import hosts as host_ledger
from gpuspawner.ledger import leases as lease_ledger
from gpuspawner.ledger import limits as limit_ledger
from gpuspawner.ledger.database import Transaction
from gpuspawner.ledger.demand import Demand
from gpuspawner.ledger.records import HomeRecord, LeaseRecord
from gpuspawner.ledger.views import Views
from gpuspawner.pool.placement import Preference, Refusal
from gpuspawner.pool.quota import Excess, excess
from gpuspawner.pool.states import COMING, HELD, EndReason, GpuState, LeaseState
from gpuspawner.pool.topology import Claim, HostView, Request
from gpuspawner.schema import AcquireLease


@dataclass(frozen=True, slots=True)
class Rules:
    """What the allocator's configuration says about waiting."""

    max_wait_ms: int


class Placing:
    """What places are chosen by: the hosts, what is asked for these days, and whether servers
    are packed or spread (``pool.placement.place``)."""

    def __init__(self, prefer: Preference = "pack") -> None:
        self.views = Views(prefer)
        self.demand = Demand()


@dataclass(frozen=True, slots=True)
class Acquired:
    """What came of asking for a lease."""

    lease: LeaseRecord
    created: bool
    refusal: ApiError | None = None


def acquire(
    tx: Transaction,
    hub_id: str,
    body: AcquireLease,
    image_digest: str,
    placing: Placing,
    rules: Rules,
    now_ms: int,
) -> Acquired:
    """The lease of this start, and whether it is new.

    A request that fits nowhere, where waiting would not help, is stored as ended and comes back
    with its ``refusal``. Raises ``ApiError`` 409 when the same start asks for something else.
    """
    key = (hub_id, body.username, body.server_name)
    fingerprint = lease_ledger.body_hash(body.model_dump(mode="json", exclude={"payload"}))
    mine = lease_ledger.of_server(tx, key, body.start_id)
    known = next((one for one in mine if one.start_id == body.start_id), None)
    if known is not None:
        if known.body_hash != fingerprint:
            raise ApiError(
                409,
                "conflict",
                "This start was already asked for with other options. Start the server again.",
            )
        return Acquired(known, False)

    values: dict[str, Any] = {
        "id": str(uuid.uuid4()),
        "hub_id": hub_id,
        "username": body.username,
        "server_name": body.server_name,
        "start_id": body.start_id,
        "body_hash": fingerprint,
        "state": LeaseState.QUEUED,
        "request": body.request.model_dump(mode="json"),
        "ready_path": body.ready_path,
        "port": body.payload.port,
        "image_digest": image_digest,
        "created_ms": now_ms,
        "wait_until_ms": now_ms + rules.max_wait_ms,
        "groups": body.groups,
    }
    if lease_ledger.was_released_early(tx, key, body.start_id):
        text = "The server was stopped before it had begun to start."
        values |= {
            "state": LeaseState.ENDED,
            "ended_ms": now_ms,
            "reason": EndReason.NEVER_STARTED,
            "message": text,
        }
        return Acquired(lease_ledger.insert(tx, values, text), True)

    text = "The server was started anew."
    before = [
        lease_ledger.stop(tx, one.id, EndReason.SUPERSEDED, text, now_ms)
        if one.state in lease_ledger.LIVE
        else one
        for one in mine
    ]
    lease = lease_ledger.insert(tx, values, "Asked for a place.")
    over = _excess(tx, key, body)
    if over is not None:
        return _refused(tx, lease, limit_error(over), now_ms)
    stopping = next((one for one in before if one.state is LeaseState.STOPPING), None)
    if stopping is not None:
        text = f"Waiting for your previous server to stop.{_silent(tx, stopping)}"
        lease_ledger.add_event(tx, lease, now_ms, "progress", 1, text)
        return Acquired(lease, True)
    placed, waiting = place_queue(tx, placing, now_ms)
    refusal = waiting.get(lease.id)
    if refusal is not None:
        if not refusal.can_wait:
            return _refused(tx, lease, capacity_error(tx, lease, refusal), now_ms)
        lease_ledger.add_event(tx, lease, now_ms, "progress", 1, waiting_text(tx, lease, refusal))
    return Acquired(placed.get(lease.id, lease), True)


def _excess(tx: Transaction, key: tuple[str, str, str], body: AcquireLease) -> Excess | None:
    """The limit that the request would break. Of what others hold no more is read than the limits
    that are set need."""
    limits = limit_ledger.load(tx)
    in_group = limits.on_groups(body.groups)
    if not in_group and not limits.on_user(body.username):
        return None
    return excess(
        limits,
        limit_ledger.holdings(tx, key, None if in_group else body.username),
        username=body.username,
        groups=body.groups,
        gpus=body.request.gpus,
    )


def _silent(tx: Transaction, lease: LeaseRecord) -> str:
    """A sentence more when the lease's host does not answer."""
    host = None if lease.host is None else host_ledger.get(tx, lease.host)
    if host is None or host.state == "ready":
        return ""
    return f" Host {host.name}, where it runs, does not answer."


def _refused(tx: Transaction, lease: LeaseRecord, error: ApiError, now_ms: int) -> Acquired:
    """Nothing comes of it; the record stays, so that the user can be told later too."""
    ended = lease_ledger.stop(tx, lease.id, EndReason.REFUSED, error.body.message, now_ms)
    return Acquired(ended, True, error)


def limit_error(over: Excess) -> ApiError:
    """403 with the limit's numbers."""
    return ApiError(403, "limit", over.sentence(), constraint=f"limit-{over.kind}")


def place_queue(
    tx: Transaction, placing: Placing, now_ms: int
) -> tuple[dict[str, LeaseRecord], dict[str, Refusal]]:
    """Give places to waiting leases, first come first served; returns those that have got one,
    and why others still wait, by their ids.

    A younger lease never passes an older one that waits for GPUs of a kind it could use itself,
    and never takes the cores and the memory that an older one will need beside its GPUs. A lease
    whose predecessor still stops waits without holding up others.
    """
    placed: dict[str, LeaseRecord] = {}
    waiting: dict[str, Refusal] = {}
    promised: list[Claim] = []  # what older leases will take once their GPUs are wiped
    # Models that older leases wait for, each with the hosts where waiting helps them.
    ahead: list[tuple[str | None, frozenset[str]]] = []
    for lease in lease_ledger.placeable(tx):
        home = home_ledger.of_key(tx, lease.key)
        request = _request(lease, home)
        hosts = placing.views.load(tx)
        mix = placing.demand.mix(tx)
        after = {claim.host: _after(hosts.views[claim.host], promised) for claim in promised}
        taken = {
            host
            for model, helping in ahead
            for host in helping
            if request.gpus and _compete(request.gpu_model, model)
        }
        behind = {host: _behind(after.get(host, hosts.views[host])) for host in taken}
        found = hosts.place(request, mix, after | behind)
        if not isinstance(found, Refusal):
            seen = placing.views.generation(found.host)
            placed[lease.id] = _take(tx, lease, home, found, seen, now_ms)
            continue
        waiting[lease.id] = found
        if request.gpus and found.can_wait:
            ahead.append((request.gpu_model, found.helping))
            hoped = {host: view.once_wiped() for host, view in after.items()}
            hope = placing.views.hoped.place(request, mix, hoped)
            if not isinstance(hope, Refusal):
                promised.append(hope)
    return placed, waiting


def _behind(view: HostView) -> HostView:
    """The host as who comes later sees it: free GPUs that somebody older waits for are coming."""
    return replace(view, free_gpus=frozenset(), coming_gpus=view.coming_gpus | view.free_gpus)


def _after(view: HostView, promised: list[Claim]) -> HostView:
    """The host without the cores and the memory that somebody older will take."""
    claims = [claim for claim in promised if claim.host == view.inventory.host]
    used_mib = dict(view.used_mib)
    for cell in (cell for claim in claims for cell in claim.cells):
        used_mib[cell.node] = used_mib.get(cell.node, 0) + cell.memory_mib
    cpus = view.used_cpus.union(*(claim.cpus for claim in claims))
    return replace(view, used_cpus=cpus, used_mib=used_mib)


def _compete(mine: str | None, older: str | None) -> bool:
    return mine is None or older is None or mine == older


def _request(lease: LeaseRecord, home: HomeRecord | None) -> Request:
    wanted = lease.request
    return Request(
        gpus=wanted["gpus"],
        cores=wanted["cores"],
        memory_mib=wanted["memory_mib"],
        gpu_model=wanted["gpu_model"],
        image=lease.image_digest,
        # A home that no server ever used has nothing in it that would bind anybody.
        home_host=home.host if home is not None and home.used else None,
        policy=wanted.get("policy", "strict"),  # leases from before there was a choice have none
    )


def _take(
    tx: Transaction,
    lease: LeaseRecord,
    home: HomeRecord | None,
    claim: Claim,
    seen: int,
    now_ms: int,
) -> LeaseRecord:
    """``seen`` is the generation of the host's view that the claim was found on."""
    address = free_address(*host_ledger.guest_addresses(tx, claim.host))
    assert address is not None  # hosts without one were left out
    mac = mac_of(address)
    if home is not None and home.host != claim.host:
        home_ledger.trash(tx, lease.key, now_ms)  # never used, and on another host
        home = None
    if home is None:
        home_id = str(uuid.uuid4())
        home_ledger.add(
            tx, lease.key, home_id, claim.host, f"home-{home_id}", lease.request["home_mib"], now_ms
        )
    nodes = ", ".join(str(cell.node) for cell in claim.cells)
    where = f"host {claim.host}, NUMA node{'s' if len(claim.cells) > 1 else ''} {nodes}"
    what = f"GPU {', '.join(claim.gpus)} on {where}" if claim.gpus else where.capitalize()
    return lease_ledger.claim(tx, lease, claim, seen, address, mac, now_ms, f"You have {what}.")


def free_address(cidr: str, used: frozenset[str]) -> str | None:
    """The first guest address of a range that no lease holds, if there is one; the first host
    address of the range is the gateway."""
    network = ipaddress.ip_network(cidr, strict=False)
    hosts = iter(network.hosts())
    next(hosts, None)
    for candidate in hosts:
        if str(candidate) not in used:
            return str(candidate)
    return None


def mac_of(address: str) -> str:
    """A MAC for a guest address: unique in its network because the address is."""
    packed = ipaddress.ip_address(address).packed
    return "52:54:00:" + ":".join(f"{byte:02x}" for byte in packed[-3:])


def serve_queue(tx: Transaction, placing: Placing, now_ms: int) -> dict[str, Refusal]:
    """Place who can be placed, and end the waiting of those whose time is up or whose hope is
    gone. Returns why the others still wait."""
    _placed, waiting = place_queue(tx, placing, now_ms)
    for lease in lease_ledger.queued(tx):
        refusal = waiting.get(lease.id)
        if refusal is not None and not refusal.can_wait:
            text = capacity_error(tx, lease, refusal).body.message
        elif lease.wait_until_ms is None or lease.wait_until_ms > now_ms:
            continue
        elif (stopping := lease_ledger.stopping_of_key(tx, lease.key)) is not None:
            text = (
                f"Your previous server did not stop within the waiting time."
                f"{_silent(tx, stopping)} Try again later; an admin sees why it does not stop."
            )
        else:
            text = (
                "No GPU became free within the waiting time. Try again later, or choose another "
                "profile."
            )
        waiting.pop(lease.id, None)
        lease_ledger.stop(tx, lease.id, EndReason.WAIT_TIMEOUT, text, now_ms)
    return waiting


def waiting_text(tx: Transaction, lease: LeaseRecord, refusal: Refusal) -> str:
    """What a waiting user is told."""
    if refusal.constraint == "reachable":
        return "Waiting: the GPU host is being looked at."
    if refusal.constraint == "image":
        return "Waiting: the image is being copied to the host."
    states = gpu_ledger.count(tx)
    coming = sum(states[state] for state in COMING)
    ahead = [one.id for one in lease_ledger.queued(tx)].index(lease.id)
    place_text = f" {ahead} ahead of you." if ahead else ""
    return f"Waiting for a GPU: {coming} being wiped and checked after use.{place_text}"


def capacity_error(tx: Transaction, lease: LeaseRecord, refusal: Refusal) -> ApiError:
    """503 with the constraint that failed, its numbers, and what to do."""
    model = lease.request["gpu_model"]
    states = gpu_ledger.count(tx, model)
    matching = states.total()
    in_use = sum(states[state] for state in HELD)
    if not refusal.shortfalls:
        text = "The pool has no GPU host yet. An admin adds one with 'gpuspawner host add'."
    elif lease.request["gpus"] and not matching:
        text = f"The pool has no {model or 'GPU'}. Choose another profile."
    elif refusal.constraint == "gpu" and in_use == matching:
        what = "GPUs" if model is None else f"× {model}"
        which = f"All {in_use} {what} are" if in_use > 1 else f"The only {model or 'GPU'} is"
        text = f"{which} in use. Try again when somebody has stopped, or choose another profile."
    elif refusal.constraint == "gpu":
        serving = (*HELD, *COMING, GpuState.NEW, GpuState.UNASSIGNED)
        out = matching - sum(states[state] for state in serving)
        text = (
            f"No {model or 'GPU'} can be had: {matching} in the pool, {in_use} in use, "
            f"{out} out of service. {refusal.sentence()}"
        )
    elif refusal.constraint in ("reachable", "drained"):
        text = f"{refusal.sentence()} Try again later, or choose another profile."
    else:
        text = refusal.sentence()
    return ApiError(
        503,
        "capacity",
        text,
        constraint=refusal.constraint,
        details=[
            {
                "host": one.host,
                "constraint": one.constraint,
                "text": one.text,
                "alike": list(one.alike),
            }
            for one in refusal.shortfalls
        ],
        retry_after_s=60,
    )


def release(
    tx: Transaction, key: tuple[str, str, str], start_id: str, now_ms: int
) -> LeaseRecord | None:
    """End the lease of a start; a release that comes first makes the acquire return ``ended``."""
    lease = lease_ledger.of_start(tx, key, start_id)
    if lease is None:
        lease_ledger.early_release(tx, key, start_id, now_ms)
        return None
    return lease_ledger.stop(tx, lease.id, EndReason.RELEASED, "Stopped.", now_ms)
