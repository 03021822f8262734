"""The API of leases and homes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from pydantic import BaseModel, ConfigDict

from gpuspawner import schema
from gpuspawner.allocator import acquire as deciding
from gpuspawner.allocator import views
from gpuspawner.allocator.auth import Principal
from gpuspawner.allocator.clock import now_ms
from gpuspawner.allocator.context import Context
from gpuspawner.allocator.errors import ApiError, not_found
from gpuspawner.allocator.lease_runner import LeaseRunners
from gpuspawner.allocator.routes import Answer, Call, Route, number, reply_list
from gpuspawner.ledger import audit as audit_ledger
from gpuspawner.ledger import homes as home_ledger
from gpuspawner.ledger import hosts as host_ledger
from gpuspawner.ledger import leases as lease_ledger
from gpuspawner.ledger.database import Transaction
from gpuspawner.ledger.records import HostRecord, LeaseRecord
from gpuspawner.pool.states import OPEN_LEASES, EndReason, LeaseState

log = logging.getLogger(__name__)


class MaybeLease(BaseModel):
    """A lease, or null when the release came before its acquire."""

    model_config = ConfigDict(frozen=True)

    lease: schema.Lease | None = None


class ForgetHome(schema.Strict):
    """``POST /homes/forget``: the server is deleted for ever, its home goes to the trash."""

    username: schema.UserName
    server_name: schema.ServerName = ""


def stop_title(lease: LeaseRecord) -> str:
    """What the audit calls the end of a lease by an admin."""
    server = f", {lease.server_name}" if lease.server_name else ""
    return f"stop server {lease.id} of {lease.username}{server}"


class LeaseApi:
    """Everything about leases."""

    def __init__(self, context: Context, runners: LeaseRunners, hub_id: str) -> None:
        self.ctx = context
        self.runners = runners
        self.hub_id = hub_id  # the hub whose users ask with their own tokens

    def routes(self) -> list[Route]:
        """The rows of this part."""
        leases = reply_list("leases", schema.Lease)
        lease = schema.Lease
        return [
            Route("POST", "leases", "spawner", self.acquire, "Ask for a lease",
                  schema.AcquireLease, lease, (200, 201), conflicts=True),
            Route("GET", "leases", "anyone", self.list, "Leases, newest first", None, leases,
                  query={"username": "of this user", "server_name": "of this server",
                         "all": "1: ended ones too", "limit": "at most so many"}),
            Route("POST", "leases/release", "spawner", self.release,
                  "End a lease by its key and start", schema.ReleaseLease, MaybeLease),
            Route("GET", "leases/{id}", "anyone", self.get, "One lease", None, lease),
            Route("DELETE", "leases/{id}", "spawner", self.delete, "End a lease", None, lease,
                  (200, 202), query={"wait": "1: answer when its VM is gone"}),
            Route("PUT", "leases/{id}/payload", "spawner", self.payload,
                  "Send the boot payload again", schema.BootPayload, None, (204,), conflicts=True),
            Route("POST", "leases/{id}/end", "manage", self.end, "An admin ends a lease",
                  schema.EndLease, lease, (202,)),
            Route("POST", "homes/forget", "spawner", self.forget_home,
                  "Put a server's home into the trash", ForgetHome, None, (204,),
                  conflicts=True),
        ]  # fmt: skip

    # ------------------------------------------------------------------ reading

    async def show(self, record: LeaseRecord) -> schema.Lease:
        """A lease as the API shows it."""
        host: HostRecord | None = None
        if record.host is not None:
            host = await self.ctx.ledger.read(host_ledger.get, record.host)
        needed = record.state in views.STARTING and record.id not in self.ctx.payloads
        if needed:
            needed = "seed" not in await self.ctx.ledger.read(lease_ledger.steps_done, record.id)
        return views.lease(record, host, needed)

    async def visible(self, lease_id: str, principal: Principal) -> LeaseRecord:
        """A lease that the caller may see; 404 otherwise, so that ids tell nothing."""
        record = await self.ctx.ledger.read(lease_ledger.get, lease_id)
        if record is None or not (principal.may_view or record.username == principal.name):
            raise not_found(f"lease {lease_id[:36]}")
        return record

    async def get(self, call: Call) -> Answer:
        """One lease."""
        return Answer(200, await self.show(await self.visible(call.path["id"], call.principal)))

    async def list(self, call: Call) -> Answer:
        """Open leases; of one key also the newest that ended."""
        username = call.query.get("username")
        if not call.principal.may_view:
            username = call.principal.name
        limit = number("limit", call.query.get("limit", "200"), 1, 1000)
        if username is not None and "server_name" in call.query:
            hub_id = call.principal.hub_id or self.hub_id
            key = (hub_id, username, call.query["server_name"])
            records = await self.ctx.ledger.read(lease_ledger.of_key, key)
        else:
            records = await self.ctx.ledger.read(lease_ledger.recent, limit, username)
            if call.query.get("all") != "1":
                records = [one for one in records if one.state is not LeaseState.ENDED]
        return Answer(200, {"leases": [await self.show(one) for one in records]})

    # ------------------------------------------------------------------ the spawner's

    async def acquire(self, call: Call) -> Answer:
        """A lease for one start of one server."""
        body: schema.AcquireLease = call.body
        assert call.principal.hub_id is not None
        image = self.ctx.images.named(body.request.image)
        if image is None:
            names = ", ".join(m.name for m in self.ctx.images.manifests() if m.role == "lab")
            raise ApiError(
                400,
                "unknown-image",
                f"There is no image {body.request.image!r}; there are: {names or 'none'}. Choose "
                "another, or build it with 'gpuspawner image build'.",
                constraint="image",
            )
        if body.request.memory_mib < image.min_memory_mib:
            raise ApiError(
                400,
                "too-little-memory",
                f"The image {image.name} needs at least {image.min_memory_mib} MiB; "
                f"{body.request.memory_mib} MiB were asked for.",
                constraint="memory",
            )
        acquired = await self.ctx.ledger.write(
            deciding.acquire,
            call.principal.hub_id,
            body,
            image.digest,
            self.ctx.placing,
            deciding.Rules(int(self.ctx.limits.wait_s * 1000)),
            now_ms(),
        )
        lease = acquired.lease
        await self._wake(lease)
        if acquired.refusal is not None:
            log.info(
                "lease_refused user=%r server=%r constraint=%s message=%r",
                body.username, body.server_name, acquired.refusal.body.constraint,
                acquired.refusal.body.message,
            )  # fmt: skip
            self.ctx.metrics.lease_ends.labels(EndReason.REFUSED).inc()
            raise acquired.refusal
        if lease.state is not LeaseState.ENDED:
            self.ctx.payloads.setdefault(lease.id, body.payload)
            self.ctx.signals.ring(f"payload:{lease.id}")
            if (await self.ctx.ledger.read(lease_ledger.need, lease.id)).state is LeaseState.ENDED:
                self.ctx.payloads.pop(lease.id, None)  # it ended before its payload was kept
        if acquired.created:
            log.info(
                "lease_acquired lease=%s user=%r server=%r state=%s host=%s",
                lease.id, lease.username, lease.server_name, lease.state, lease.host,
            )  # fmt: skip
        return Answer(201 if acquired.created else 200, await self.show(lease))

    async def _wake(self, lease: LeaseRecord) -> None:
        """A new start may have ended an old one of its server, and older leases of others may
        have got their places with it: all of these look again."""
        for record in await self.ctx.ledger.read(lease_ledger.stirred_by, lease.key):
            self.ctx.signals.ring(f"lease:{record.id}", f"events:{record.id}")
            self.runners.start(record.id)

    async def release(self, call: Call) -> Answer:
        """End a lease by key and start, also before it was acquired."""
        body: schema.ReleaseLease = call.body
        assert call.principal.hub_id is not None
        key = (call.principal.hub_id, body.username, body.server_name)
        lease = await self.ctx.ledger.write(deciding.release, key, body.start_id, now_ms())
        if lease is None:
            return Answer(200, MaybeLease(lease=None))
        self._stirred(lease)
        return Answer(200, MaybeLease(lease=await self.show(lease)))

    async def delete(self, call: Call) -> Answer:
        """End a lease; with ``wait=1`` answer when its VM is gone."""
        record = await self.visible(call.path["id"], call.principal)
        lease = await self.ctx.ledger.write(
            lease_ledger.stop, record.id, EndReason.RELEASED, "Stopped.", now_ms()
        )
        self._stirred(lease)
        if call.query.get("wait") == "1":
            lease = await self._wait_ended(lease.id)
        status = 200 if lease.state is LeaseState.ENDED else 202
        return Answer(status, await self.show(lease))

    async def _wait_ended(self, lease_id: str) -> LeaseRecord:
        deadline = asyncio.get_running_loop().time() + 2 * self.ctx.limits.stop_s + 60
        with self.ctx.signals.listen(f"ended:{lease_id}") as bell:
            while True:
                lease = await self.ctx.ledger.read(lease_ledger.need, lease_id)
                left = deadline - asyncio.get_running_loop().time()
                if lease.state is LeaseState.ENDED or left <= 0:
                    return lease
                await bell.wait(min(left, 5))

    async def payload(self, call: Call) -> Answer:
        """The boot payload again, after the allocator lost it in a restart."""
        record = await self.visible(call.path["id"], call.principal)
        if record.state in (LeaseState.STOPPING, LeaseState.ENDED):
            raise ApiError(409, "ended", "This lease has ended; it needs no settings any more.")
        self.ctx.payloads[record.id] = call.body
        self.ctx.signals.ring(f"payload:{record.id}")
        return Answer(204)

    async def end(self, call: Call) -> Answer:
        """An admin ends somebody's lease."""
        record = await self.visible(call.path["id"], call.principal)
        body: schema.EndLease = call.body
        why = f": {body.reason}" if body.reason else "."
        by = call.principal.name

        def write(tx: Transaction) -> LeaseRecord:
            if lease_ledger.need(tx, record.id).state in OPEN_LEASES - {LeaseState.STOPPING}:
                audit_ledger.add(tx, now_ms(), by, stop_title(record), body.reason)
            return lease_ledger.stop(
                tx, record.id, EndReason.ADMIN, f"Ended by an admin{why}", now_ms()
            )

        lease = await self.ctx.ledger.write(write)
        self.ctx.signals.ring("audit")
        log.info("lease_ended_by_admin lease=%s by=%r", lease.id, by)
        self._stirred(lease)
        return Answer(202, await self.show(lease))

    async def forget_home(self, call: Call) -> Answer:
        """The server is deleted: its home goes to the trash, from where an admin can save it."""
        body: ForgetHome = call.body
        assert call.principal.hub_id is not None
        key = (call.principal.hub_id, body.username, body.server_name)

        def write(tx: Transaction) -> Any:
            if lease_ledger.live_of_key(tx, key) or lease_ledger.stopping_of_key(tx, key):
                raise ApiError(
                    409, "in-use", "The server still runs; stop it before it is deleted."
                )
            return home_ledger.trash(tx, key, now_ms())

        home = await self.ctx.ledger.write(write)
        if home is not None:
            log.info("home_trashed volume=%s user=%r", home.volume, body.username)
        return Answer(204)

    def _stirred(self, lease: LeaseRecord) -> None:
        self.ctx.signals.ring(f"lease:{lease.id}", f"events:{lease.id}")
        self.runners.start(lease.id)
