"""The API of hosts, GPUs, diagnoses and images."""

from __future__ import annotations

import logging

from gpuspawner import __version__, checkup, schema
from gpuspawner.allocator import checking, views
from gpuspawner.allocator.clock import moment, now_ms
from gpuspawner.allocator.context import Context
from gpuspawner.allocator.errors import ApiError, not_found
from gpuspawner.allocator.hosts import HostKeeper
from gpuspawner.allocator.routes import Answer, Call, Route, number, reply_list
from gpuspawner.host.api import HostError
from gpuspawner.ledger import audit as audit_ledger
from gpuspawner.ledger import diagnoses as diagnosis_ledger
from gpuspawner.ledger import gpus as gpu_ledger
from gpuspawner.ledger import hosts as host_ledger
from gpuspawner.ledger import leases as lease_ledger
from gpuspawner.ledger.database import Transaction
from gpuspawner.ledger.records import GpuRecord
from gpuspawner.pool.states import GpuState, IllegalTransition

log = logging.getLogger(__name__)


class PoolApi:
    """Everything about the pool."""

    def __init__(self, context: Context, keeper: HostKeeper) -> None:
        self.ctx = context
        self.keeper = keeper

    def routes(self) -> list[Route]:
        """The rows of this part."""
        gpus = reply_list("gpus", schema.Gpu)
        return [
            Route("GET", "hosts", "view", self.hosts, "All hosts", None,
                  reply_list("hosts", schema.Host)),
            Route("POST", "hosts", "manage", self.add_host,
                  "Add a host, or give a known one new settings", schema.AddHost, schema.Host,
                  (200, 201)),
            Route("PATCH", "hosts/{name}", "manage", self.change_host, "Drain a host or undo it",
                  schema.ChangeHost, schema.Host),
            Route("GET", "hosts/{name}/check", "view", self.check_host, "What is wrong with a host",
                  None, checkup.HostCheck),
            Route("GET", "gpus", "view", self.gpus, "All GPUs", None, gpus),
            Route("GET", "gpus/counts", "anyone", self.counts, "What is free, by model", None,
                  schema.GpuCounts),
            Route("POST", "gpus/{host}/{address}/action", "manage", self.act,
                  "Enrol, retest, hold or retire a GPU", schema.GpuAction, schema.Gpu,
                  conflicts=True),
            Route("GET", "diagnoses", "view", self.diagnoses, "Diagnoses, newest first", None,
                  reply_list("diagnoses", schema.Diagnosis),
                  query={"host": "of this host", "gpu": "of this address", "limit": "at most"}),
            Route("GET", "diagnoses/{id}/console", "view", self.console,
                  "What the service VM wrote on its console"),
            Route("GET", "health", "public", self.health, "Whether the allocator works", None,
                  schema.Health),
            Route("GET", "images", "view", self.images, "Images and where they are", None,
                  reply_list("images", schema.ImageInfo)),
        ]  # fmt: skip

    # ------------------------------------------------------------------ hosts

    async def hosts(self, call: Call) -> Answer:
        """All hosts with what is free."""

        def read(tx: Transaction) -> list[schema.Host]:
            known = self.ctx.placing.views.load(tx).views
            return [views.host(one, known.get(one.name)) for one in host_ledger.every(tx)]

        return Answer(200, {"hosts": await self.ctx.ledger.read(read)})

    async def _host(self, name: str) -> schema.Host:
        def read(tx: Transaction) -> schema.Host | None:
            record = host_ledger.get(tx, name)
            known = self.ctx.placing.views.load(tx).views
            return None if record is None else views.host(record, known.get(name))

        host = await self.ctx.ledger.read(read)
        if host is None:
            raise not_found(f"host {name[:40]!r}")
        return host

    async def add_host(self, call: Call) -> Answer:
        """Add a host; its settings are tried before they are stored."""
        body: schema.AddHost = call.body
        if body.network == "bridge" and not body.bridge:
            raise ApiError(
                400, "bad-host", "Say which bridge guests go on ('bridge'), or use network 'nat'."
            )
        try:
            new = await self.keeper.add(
                body.name, body.model_dump(mode="json"), call.principal.name
            )
        except (HostError, ValueError) as error:
            raise ApiError(400, "bad-host", f"Host {body.name} was not added: {error}") from error
        log.info("host_added host=%s new=%s by=%r", body.name, new, call.principal.name)
        return Answer(201 if new else 200, await self._host(body.name))

    async def change_host(self, call: Call) -> Answer:
        """Drain a host, or let it take leases again."""
        body: schema.ChangeHost = call.body
        name = call.path["name"]
        verb = "drain" if body.drained else "undrain"

        def write(tx: Transaction) -> None:
            if not host_ledger.set_drained(tx, name, body.drained):
                raise not_found(f"host {name[:40]!r}")
            by = call.principal.name
            audit_ledger.add(tx, now_ms(), by, f"{verb} host {name}", body.reason)

        await self.ctx.ledger.write(write)
        log.info("host_drained host=%s drained=%s by=%r", name, body.drained, call.principal.name)
        self.ctx.signals.ring("queue", "audit")
        return Answer(200, await self._host(name))

    async def check_host(self, call: Call) -> Answer:
        """A host as it is now, and what keeps it or its GPUs out of the pool, with remedies."""
        host = await self._host(call.path["name"])
        found = await checking.check(self.ctx, host, await self._gpus())
        self.keeper.look_again(host.name)
        return Answer(200, found)

    # ------------------------------------------------------------------ GPUs

    async def _gpus(self) -> list[schema.Gpu]:
        def read(tx: Transaction) -> list[schema.Gpu]:
            hosts = {host.name: host for host in host_ledger.every(tx)}
            owners = {lease.id: lease.username for lease in lease_ledger.open_leases(tx)}
            return [
                views.gpu(one, hosts.get(one.host), owners.get(one.lease_id or ""))
                for one in gpu_ledger.every(tx)
            ]

        return await self.ctx.ledger.read(read)

    async def gpus(self, call: Call) -> Answer:
        """All GPUs."""
        return Answer(200, {"gpus": await self._gpus()})

    async def counts(self, call: Call) -> Answer:
        """What is free, by model."""

        def read(tx: Transaction) -> list[schema.GpuCount]:
            hosts = {host.name: host for host in host_ledger.every(tx)}
            return views.counts(gpu_ledger.every(tx), hosts)

        models = await self.ctx.ledger.read(read)
        return Answer(200, schema.GpuCounts(at=moment(now_ms()), models=models))

    async def act(self, call: Call) -> Answer:
        """An admin does something with a GPU. None of it leads to ``unassigned``."""
        body: schema.GpuAction = call.body
        host, address = call.path["host"], call.path["address"]

        def write(tx: Transaction) -> None:
            gpu = gpu_ledger.get(tx, host, address)
            if gpu is None:
                raise not_found(f"GPU {address[:16]} on host {host[:40]!r}")
            try:
                _act(tx, gpu, body, call.principal.name)
            except IllegalTransition:
                raise ApiError(
                    409,
                    "wrong-state",
                    f"GPU {address} is {gpu.state}; it cannot be asked to {body.action} now."
                    + (" End its lease first." if gpu.lease_id else ""),
                ) from None
            which = f": {body.hold or 'all holds'}" if body.action == "unhold" else ""
            what = f"{body.action} GPU {host} {address}{which}"
            audit_ledger.add(tx, now_ms(), call.principal.name, what, body.reason)

        await self.ctx.ledger.write(write)
        log.info(
            "gpu_action host=%s gpu=%s action=%s by=%r reason=%r",
            host, address, body.action, call.principal.name, body.reason,
        )  # fmt: skip
        self.ctx.signals.ring("queue", f"gpus:{host}", "audit")
        shown = [gpu for gpu in await self._gpus() if (gpu.host, gpu.address) == (host, address)]
        return Answer(200, shown[0])

    # ------------------------------------------------------------------ diagnoses and images

    async def diagnoses(self, call: Call) -> Answer:
        """The newest diagnoses."""
        records = await self.ctx.ledger.read(
            diagnosis_ledger.recent,
            call.query.get("host"),
            call.query.get("gpu"),
            number("limit", call.query.get("limit", "50"), 1, 500),
        )
        progress = self.ctx.diagnosis_progress
        return Answer(
            200, {"diagnoses": [views.diagnosis(one, progress.get(one.id)) for one in records]}
        )

    async def console(self, call: Call) -> Answer:
        """A diagnosis' console."""
        try:
            record = await self.ctx.ledger.read(diagnosis_ledger.need, call.path["id"])
        except LookupError:
            raise not_found("such diagnosis") from None
        return Answer(200, {"console": record.console or ""})

    async def images(self, call: Call) -> Answer:
        """Images, and the hosts that have them."""
        hosts = await self.ctx.ledger.read(host_ledger.every)
        infos = [
            schema.ImageInfo(
                name=one.name,
                role=one.role,
                title=one.title,
                digest=one.digest,
                built_at=one.built_at,
                kernel_release=one.kernel_release,
                min_memory_mib=one.min_memory_mib,
                bytes=sum(file.bytes for file in one.files.values()),
                hosts=[host.name for host in hosts if one.digest in host.images],
                copying={
                    host: percent
                    for (host, digest), percent in self.keeper.copying.items()
                    if digest == one.digest
                },
            )
            for one in self.ctx.images.manifests()
        ]
        return Answer(200, {"images": infos})

    async def health(self, call: Call) -> Answer:
        """Whether the allocator can do its work: database writable, hosts answering."""
        hosts = await self.ctx.ledger.read(host_ledger.every)
        return Answer(
            200,
            schema.Health(
                ok=True,
                version=__version__,
                epoch=self.ctx.ledger.epoch,
                hosts={host.name: host.state for host in hosts},
            ),
        )


def _act(tx: Transaction, gpu: GpuRecord, body: schema.GpuAction, by: str) -> None:
    reason = body.reason or f"{body.action} by {by}"
    now = now_ms()
    match body.action:
        case "enroll":
            if gpu.state is not GpuState.NEW:
                raise IllegalTransition
            gpu_ledger.move(tx, gpu, GpuState.USED, now, reason=reason, owner=by, retry_ms=None)
        case "retest":
            if gpu.state is GpuState.USED:
                gpu_ledger.move(tx, gpu, GpuState.USED, now, reason=reason, owner=by, retry_ms=None)
                return
            if gpu.state in (
                GpuState.NEW,
                GpuState.RESERVED,
                GpuState.ASSIGNED,
                GpuState.DIAGNOSING,
            ):
                raise IllegalTransition
            gpu_ledger.move(
                tx, gpu, GpuState.USED, now, reason=reason, owner=by, attempt=0, retry_ms=None
            )
        case "retire":
            gpu_ledger.move(tx, gpu, GpuState.RETIRED, now, reason=reason, owner=by)
        case "hold":
            if reason not in gpu.holds:
                gpu_ledger.set_holds(tx, gpu, (*gpu.holds, reason))
        case "unhold":
            if body.hold is not None and body.hold not in gpu.holds:
                held = ", ".join(repr(one) for one in gpu.holds) or "none"
                raise ApiError(
                    409,
                    "no-such-hold",
                    f"GPU {gpu.address} has no hold {body.hold!r}; its holds: {held}. Name one of "
                    "them, or none to take all away.",
                )
            kept = tuple(one for one in gpu.holds if body.hold is not None and one != body.hold)
            gpu_ledger.set_holds(tx, gpu, kept)
