"""An allocator that follows a script: the API as the spawner knows it, without any machine.

Every lease walks through ``stages``. A test can hold it at a state, end it there, lose its boot
payload, cut its event streams, refuse it, answer nonsense, or take the whole server away.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

TOKEN = "t" * 40
API = "/services/gpu/api/v1/"

Stage = tuple[str, int, str]
STAGES: tuple[Stage, ...] = (
    ("placed", 10, "A GPU is reserved for you"),
    ("starting", 30, "Starting your virtual machine"),
    ("starting", 30, "Starting your virtual machine"),  # says the same twice
    ("starting", 60, "JupyterLab is starting"),
    ("starting", 50, "Still starting"),  # goes back
    ("running", 100, "JupyterLab has answered"),
)


def now() -> str:
    return datetime.now(UTC).isoformat()


@dataclass(eq=False)
class FakeLease:
    """One lease and its story."""

    body: dict[str, Any]
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    state: str = "queued"
    reason: str | None = None
    message: str | None = None
    payload: dict[str, Any] | None = None
    created_at: str = field(default_factory=now)
    ended_at: str | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    runner: asyncio.Task[None] | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.body["username"], self.body["server_name"]


class FakeAllocator:
    """The service, and the knobs by which a test makes it misbehave."""

    def __init__(self, port: int, guest_port: int) -> None:
        self.port = port
        self.guest_port = guest_port
        self.leases: dict[str, FakeLease] = {}
        self.calls: list[tuple[str, str, Any]] = []
        self.streams: list[str] = []  # lease ids, one for each connection
        self.last_event_ids: list[str | None] = []
        self.released_early: set[tuple[str, str, str]] = set()
        # Knobs.
        self.stages = STAGES
        self.refusal: dict[str, Any] | None = None
        self.end_at: dict[str, tuple[str, str | None]] = {}
        self.lose_payload = False
        self.cut_streams_after: int | None = None
        self.counts: list[dict[str, Any]] = [count(total=4, free=2, in_use=2)]
        self.canned: dict[str, list[Callable[[], Awaitable[web.StreamResponse]]]] = defaultdict(
            list
        )
        self._gates: dict[str, asyncio.Event] = {}
        self._runner: web.AppRunner | None = None

    # -- knobs --------------------------------------------------------------------------------

    def hold(self, place: str) -> asyncio.Event:
        """Wait at a state ("starting", "stopping", ...) or call ("acquire") until the returned
        event is set."""
        return self._gates.setdefault(place, asyncio.Event())

    def answer(self, call: str, status: int, body: bytes, kind: str = "text/html") -> None:
        """Answer the next ``call`` ("POST leases", "DELETE leases/ID", ...) with this."""

        async def canned() -> web.StreamResponse:
            return web.Response(status=status, body=body, headers={"Content-Type": kind})

        self.canned[call].append(canned)

    def only(self) -> FakeLease:
        """The newest lease."""
        return list(self.leases.values())[-1]

    def of(self, username: str, server_name: str = "") -> list[FakeLease]:
        """The leases of a server, oldest first."""
        return [one for one in self.leases.values() if one.key == (username, server_name)]

    def called(self, call: str) -> list[Any]:
        """The bodies of all calls of one kind, in which ids read ``ID``."""
        return [body for method, path, body in self.calls if f"{method} {path}" == call]

    async def vanish(self, lease: FakeLease, reason: str = "guest-gone") -> None:
        """The virtual machine ends by itself."""
        await self._end(lease, reason, None)

    # -- the server ---------------------------------------------------------------------------

    async def up(self) -> None:
        """Start listening; leases live on over ``down``."""
        app = web.Application(middlewares=[self._misbehave])
        app.add_routes(
            [
                web.post(API + "leases", self._acquire),
                web.get(API + "leases", self._list),
                web.post(API + "leases/release", self._release),
                web.get(API + "leases/{id}", self._get),
                web.delete(API + "leases/{id}", self._delete),
                web.put(API + "leases/{id}/payload", self._payload),
                web.get(API + "leases/{id}/events", self._events),
                web.get(API + "gpus/counts", self._counts),
                web.post(API + "homes/forget", self._forget),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()

    async def down(self) -> None:
        """Stop listening and break every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def close(self) -> None:
        await self.down()
        for lease in self.leases.values():
            if lease.runner is not None:
                lease.runner.cancel()

    @web.middleware
    async def _misbehave(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return refuse(401, "unauthorized", "This token is not valid.")
        path = request.path.removeprefix(API)
        for lease_id in self.leases:
            path = path.replace(lease_id, "ID")
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.method, path, body))
        canned = self.canned[f"{request.method} {path}"]
        return await (canned.pop(0)() if canned else handler(request))

    # -- the API ------------------------------------------------------------------------------

    async def _acquire(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        payload = body.pop("payload")
        await self._gate("acquire")
        for lease in self.leases.values():
            if lease.body["start_id"] == body["start_id"] and lease.key == key_of(body):
                if lease.body != body:
                    return refuse(409, "conflict", "Another body.")
                return web.json_response(self._show(lease))
        if self.refusal is not None:
            return web.json_response(self.refusal, status=self.refusal["status"])
        lease = FakeLease(body, payload=None if self.lose_payload else payload)
        self.leases[lease.id] = lease
        if (*lease.key, body["start_id"]) in self.released_early:
            await self._end(lease, "never-started", "It was stopped before it had begun.")
        else:
            lease.runner = asyncio.create_task(self._run(lease))
        return web.json_response(self._show(lease), status=201)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        key = (request.query.get("username"), request.query.get("server_name"))
        found = [self._show(one) for one in self.leases.values() if one.key == key]
        return web.json_response({"leases": list(reversed(found))})

    async def _get(self, request: web.Request) -> web.StreamResponse:
        lease = self.leases.get(request.match_info["id"])
        if lease is None:
            return refuse(404, "not-found", "There is no such lease.")
        return web.json_response(self._show(lease))

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        lease = self.leases.get(request.match_info["id"])
        if lease is None:
            return refuse(404, "not-found", "There is no such lease.")
        stopping = asyncio.create_task(self._stop(lease))
        if request.query.get("wait") == "1":
            await asyncio.shield(stopping)
        return web.json_response(self._show(lease), status=202)

    async def _release(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        for lease in self.leases.values():
            if lease.key == key_of(body) and lease.body["start_id"] == body["start_id"]:
                stopping = asyncio.create_task(self._stop(lease))
                await asyncio.sleep(0)
                del stopping
                return web.json_response({"lease": self._show(lease)})
        self.released_early.add((*key_of(body), body["start_id"]))
        return web.json_response({"lease": None})

    async def _payload(self, request: web.Request) -> web.StreamResponse:
        lease = self.leases[request.match_info["id"]]
        async with lease.news:
            lease.payload = await request.json()
            lease.news.notify_all()
        return web.Response(status=204)

    async def _counts(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"at": now(), "models": self.counts})

    async def _forget(self, _: web.Request) -> web.StreamResponse:
        return web.Response(status=204)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        lease = self.leases[request.match_info["id"]]
        self.streams.append(lease.id)
        last = request.headers.get("Last-Event-ID")
        self.last_event_ids.append(last)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": keep-alive\n\n")
        with suppress(ConnectionResetError):
            await self._retell(request, response, lease, int(last or 0))
        return response

    async def _retell(
        self, request: web.Request, response: web.StreamResponse, lease: FakeLease, told: int
    ) -> None:
        sent = 0
        while True:
            async with lease.news:
                while len(lease.events) <= told:
                    await lease.news.wait()
                event = lease.events[told]
            told += 1
            await response.write(f"id: {event['id']}\ndata: {json.dumps(event)}\n\n".encode())
            sent += 1
            if event["state"] == "ended":
                return
            if self.cut_streams_after is not None and sent >= self.cut_streams_after:
                assert request.transport is not None
                request.transport.abort()

    # -- the life of a lease ------------------------------------------------------------------

    async def _run(self, lease: FakeLease) -> None:
        for state, progress, message in self.stages:
            await self._gate(state)
            if state in self.end_at:
                await self._end(lease, *self.end_at[state])
                return
            if state == "starting" and lease.payload is None:
                await self._tell(lease, state, 20, "Asking the hub again", "payload-needed")
                async with lease.news:
                    await lease.news.wait_for(lambda: lease.payload is not None)
            if lease.state in ("stopping", "ended"):
                return
            lease.state = state
            await self._tell(lease, state, progress, message)

    async def _stop(self, lease: FakeLease) -> None:
        if lease.state == "ended":
            return
        if lease.state != "stopping":
            lease.state = "stopping"
            lease.reason = lease.reason or "released"
            lease.message = "Stopped."
            if lease.runner is not None:
                lease.runner.cancel()
            await self._tell(lease, "stopping", 100, "Shutting down")
        await self._gate("stopping")
        await self._end(lease, lease.reason or "released", lease.message)

    async def _end(self, lease: FakeLease, reason: str, message: str | None) -> None:
        if lease.state == "ended":
            return
        lease.state, lease.reason, lease.message, lease.ended_at = "ended", reason, message, now()
        await self._tell(lease, "ended", 100, message or "Ended")

    async def _tell(
        self, lease: FakeLease, state: str, progress: int, message: str, kind: str = "progress"
    ) -> None:
        async with lease.news:
            lease.events.append(
                {
                    "id": len(lease.events) + 1,
                    "lease_id": lease.id,
                    "at": now(),
                    "kind": kind,
                    "state": state,
                    "progress": progress,
                    "message": message,
                }
            )
            lease.news.notify_all()

    async def _gate(self, place: str) -> None:
        if place in self._gates:
            await self._gates[place].wait()

    def _show(self, lease: FakeLease) -> dict[str, Any]:
        running = lease.state == "running"
        return {
            "id": lease.id, "hub_id": "hub", "username": lease.key[0],
            "server_name": lease.key[1], "start_id": lease.body["start_id"],
            "state": lease.state, "reason": lease.reason, "message": lease.message,
            "request": lease.body["request"], "created_at": lease.created_at,
            "ended_at": lease.ended_at, "address": "127.0.0.1" if running else None,
            "port": self.guest_port if running else None,
            "payload_needed": lease.payload is None and not running,
        }  # fmt: skip


def key_of(body: dict[str, Any]) -> tuple[str, str]:
    return body["username"], body["server_name"]


def refuse(status: int, reason: str, message: str) -> web.StreamResponse:
    body = {"status": status, "reason": reason, "message": message}
    return web.json_response(body, status=status)


def count(
    model: str = "Emulated GPU 16M", total: int = 0, free: int = 0, in_use: int = 0, coming: int = 0
) -> dict[str, Any]:
    """One row of ``GET gpus/counts``."""
    return {
        "model": model, "emulated": True, "memory_mib": 16, "total": total, "free": free,
        "in_use": in_use, "coming": coming, "out": total - free - in_use - coming,
    }  # fmt: skip
