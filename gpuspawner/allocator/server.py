"""The HTTP server: routes become handlers, refusals become bodies, events become a stream."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Awaitable
from typing import Any, ClassVar
from urllib.parse import unquote

import sqlalchemy as sa
from pydantic import BaseModel, ValidationError
from tornado import web
from tornado.iostream import StreamClosedError

from gpuspawner.allocator import views
from gpuspawner.allocator.api_leases import LeaseApi
from gpuspawner.allocator.auth import Gatekeeper, Principal
from gpuspawner.allocator.context import Context
from gpuspawner.allocator.errors import ApiError, not_found
from gpuspawner.allocator.openapi import describe
from gpuspawner.allocator.routes import Answer, Call, Route
from gpuspawner.ledger import gpus as gpu_ledger
from gpuspawner.ledger import hosts as host_ledger
from gpuspawner.ledger import leases as lease_ledger
from gpuspawner.ledger.database import Deposed, LedgerUnwritable, Transaction
from gpuspawner.pool.states import LeaseState

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 1024 * 1024
_DRAINED_BYTES = 64 * 1024 * 1024
_KEEPALIVE_S = 15.0
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Base(web.RequestHandler):
    """What every handler does alike: callers, refusals, JSON."""

    gatekeeper: ClassVar[Gatekeeper]

    def initialize(self, gatekeeper: Gatekeeper) -> None:
        self._gatekeeper = gatekeeper

    def check_xsrf_cookie(self) -> None:
        """The API takes tokens only, never a cookie, so nobody else's page can use it."""

    def set_default_headers(self) -> None:
        """No answer of the API may be kept by anybody on the way."""
        self.set_header("Cache-Control", "no-store")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Content-Security-Policy", "frame-ancestors 'none'; default-src 'none'")

    async def principal(self) -> Principal:
        """The caller; raises ``ApiError``."""
        return await self._gatekeeper.principal(self.request.headers.get("Authorization"))

    async def guarded(self, work: Awaitable[None]) -> None:
        """Run the work and turn every way of failing into an answer that says what to do."""
        try:
            await work
        except ApiError as error:
            self.refuse(error)
        except LedgerUnwritable as error:
            self.refuse(ApiError(503, "database", str(error), retry_after_s=10))
        except Deposed as error:
            self.refuse(ApiError(503, "deposed", str(error)))
        except sa.exc.SQLAlchemyError:
            log.exception("database_error path=%s", self.request.path)
            self.refuse(ApiError(503, "database", "The allocator's database failed. See its log."))

    def refuse(self, error: ApiError) -> None:
        """Send a refusal."""
        body = error.body
        self.set_status(body.status)
        if body.retry_after_s is not None:
            self.set_header("Retry-After", str(body.retry_after_s))
        if body.status == 401:
            self.set_header("WWW-Authenticate", "Bearer")
        self._send_json(body.model_dump_json(exclude_none=True))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Tornado's own errors in the same shape."""
        if status_code >= 500:
            text = "The allocator failed; its log has the reason. Try again; tell an admin."
        elif status_code in (404, 405):
            text = (
                f"Nothing at this address takes a {self.request.method}. See api/v1/openapi.json."
            )
        else:
            text = f"The request cannot be read ({self._reason}). Send it as openapi.json says."
        self.refuse(ApiError(status_code, self._reason.lower().replace(" ", "-"), text))

    def _send_json(self, text: str) -> None:
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(text)

    def send(self, answer: Answer) -> None:
        """Send an answer."""
        self.set_status(answer.status)
        if answer.body is None:
            self.finish()
        elif isinstance(answer.body, BaseModel):
            self._send_json(answer.body.model_dump_json())
        else:
            self._send_json(json.dumps(answer.body, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(type(value).__name__)


@web.stream_request_body
class Endpoint(Base):
    """All routes: finds the row, checks the caller and the body, calls.

    Bodies come in pieces so that one that is too large gets an answer: tornado itself would hang
    up. What is above the bound is read, up to a bound again, and thrown away.
    """

    def initialize(self, gatekeeper: Gatekeeper, routes: list[Route]) -> None:  # type: ignore[override]
        super().initialize(gatekeeper)
        self._routes = routes
        self._body = bytearray()
        self._too_large = False

    def prepare(self) -> None:
        """Before the body comes."""
        self.request.connection.set_max_body_size(_DRAINED_BYTES)  # type: ignore[union-attr]

    def data_received(self, chunk: bytes) -> None:
        """A piece of the body."""
        self._too_large = self._too_large or len(self._body) + len(chunk) > MAX_BODY_BYTES
        if self._too_large:
            self._body.clear()
        else:
            self._body += chunk

    async def _dispatch(self, _decoded: str) -> None:
        # Tornado gives the path decoded; only the raw one tells a slash in a name from one that
        # parts names.
        path = self.request.path.split("/api/v1/", 1)[1]
        allowed: list[str] = []
        for route in self._routes:
            match = route.pattern.match(path)
            if match is None:
                continue
            if route.method != self.request.method:
                allowed.append(route.method)
                continue
            path_words = {name: unquote(word) for name, word in match.groupdict().items()}
            if any(_CONTROL.search(word) for word in path_words.values()):
                self.refuse(not_found("thing with a control character in its name"))
                return
            await self.guarded(self._run(route, path_words))
            return
        if allowed:
            self.set_header("Allow", ", ".join(allowed))
            self.refuse(ApiError(405, "method", f"This address takes {', '.join(allowed)}."))
        else:
            self.refuse(not_found("such address in this API"))

    async def _run(self, route: Route, path: dict[str, str]) -> None:
        public = route.access == "public"
        caller = Principal("nobody") if public else await self.principal()
        _check_access(route, caller)
        if self._too_large:
            raise ApiError(
                413,
                "too-large",
                f"The request is larger than {MAX_BODY_BYTES >> 20} MiB. Send less.",
            )
        body = None if route.body is None else self._parsed(route.body)
        query = self._query(route)
        self.send(await route.call(Call(caller, path, query, body)))

    def _query(self, route: Route) -> dict[str, str]:
        """The route's parameters as they were sent: tornado would take blanks off names and
        put some where control characters were."""
        sent = self.request.query_arguments
        try:
            query = {name: sent[name][-1].decode() for name in route.query if name in sent}
        except UnicodeDecodeError:
            raise ApiError(400, "bad-request", "The query is not in UTF-8. Send it so.") from None
        for name, value in query.items():
            if _CONTROL.search(value):
                text = f"'{name}' holds a control character; no name has one. Send it without."
                raise ApiError(400, "bad-request", text)
        return query

    def _parsed(self, model: type[BaseModel]) -> BaseModel:
        kind = self.request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(
                415, "not-json", "Send the body as JSON, with 'Content-Type: application/json'."
            )
        return _parse(model, bytes(self._body))

    get = post = put = delete = patch = _dispatch


def _check_access(route: Route, caller: Principal) -> None:
    allowed = {
        "public": True,
        "anyone": True,
        "view": caller.may_view,
        "manage": caller.may_manage,
        "spawner": caller.hub_id is not None,
    }[route.access]
    if not allowed:
        raise ApiError(
            403,
            "forbidden",
            f"{caller.name} may not do this. It takes "
            + ("the hub's own token." if route.access == "spawner" else
               f"the scope custom:gpu:{route.access}; an admin can grant it."),
        )  # fmt: skip


def _parse(model: type[BaseModel], raw: bytes) -> BaseModel:
    """A checked body. The refusal names fields and rules, never the values: they hold tokens."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        shown = "; ".join(
            f"{'.'.join(_plain_name(part) for part in one['loc']) or 'body'}: {one['msg']}"
            for one in problems[:5]
        )
        raise ApiError(400, "bad-request", f"The request cannot be used: {shown}.") from None


def _plain_name(part: int | str) -> str:
    text = str(part)
    return "".join(c if c.isprintable() else "?" for c in text[:64])


class Events(Base):
    """A lease's story as server-sent events; every tab may come late and hear all of it."""

    def initialize(self, gatekeeper: Gatekeeper, context: Context, api: LeaseApi) -> None:  # type: ignore[override]
        super().initialize(gatekeeper)
        self._ctx = context
        self._api = api
        self._gone = False

    def on_connection_close(self) -> None:
        """The listener has left."""
        self._gone = True

    @staticmethod
    def row() -> Route:
        """How it is described; it is served here, because it sends while it lives."""

        async def served(_call: Call) -> Answer:
            raise not_found("such address in this API")

        return Route(
            "GET", "leases/{id}/events", "anyone", served,
            "The lease's story as server-sent events; Last-Event-ID goes on after an event",
            stream=True,
        )  # fmt: skip

    async def get(self, lease_id: str) -> None:
        """Send what there is, then what comes, until the lease has ended."""
        with contextlib.suppress(StreamClosedError):  # the listener has left
            await self.guarded(self._stream(lease_id))

    async def _stream(self, lease_id: str) -> None:
        await self._api.visible(lease_id, await self.principal())
        last = self.request.headers.get("Last-Event-ID", "0")
        after = int(last) if last.isascii() and last.isdigit() and len(last) < 19 else 0
        self.set_header("Content-Type", "text/event-stream")
        self.set_header("X-Accel-Buffering", "no")
        with self._ctx.signals.listen(f"events:{lease_id}") as bell:
            while not self._gone:
                events = await self._ctx.ledger.read(lease_ledger.events_after, lease_id, after)
                for record in events:
                    after = record.id
                    data = views.event(record).model_dump_json()
                    self.write(f"id: {record.id}\ndata: {data}\n\n")
                await self.flush()
                if events and events[-1].state is LeaseState.ENDED:
                    break
                if not events and await self._over(lease_id):
                    break
                if len(events) == lease_ledger.EVENTS_AT_ONCE:
                    continue
                # What rang while we looked rings still.
                if not await bell.wait(_KEEPALIVE_S) and not self._gone:
                    self.write(": still here\n\n")
        await self.finish()

    async def _over(self, lease_id: str) -> bool:
        lease = await self._ctx.ledger.read(lease_ledger.need, lease_id)
        return lease.state is LeaseState.ENDED


class MetricsPage(Base):
    """Prometheus' page. Holds counts only; open to whoever reaches the port."""

    def initialize(self, gatekeeper: Gatekeeper, context: Context) -> None:  # type: ignore[override]
        super().initialize(gatekeeper)
        self._ctx = context

    async def get(self) -> None:
        """All metrics."""
        await self.guarded(self._send())

    async def _send(self) -> None:
        def read(tx: Transaction) -> tuple[Any, Any, Any]:
            hosts = {host.name: host.state for host in host_ledger.every(tx)}
            return gpu_ledger.every(tx), lease_ledger.count_by_state(tx), hosts

        picture = self._ctx.metrics.picture(*await self._ctx.ledger.read(read))
        self.set_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.finish(picture)


class Health(Base):
    """Whether the allocator works; answers without a token."""

    def initialize(self, gatekeeper: Gatekeeper, call: Any) -> None:  # type: ignore[override]
        super().initialize(gatekeeper)
        self._call = call

    async def get(self) -> None:
        """200 when the database answers."""
        await self.guarded(self._send())

    async def _send(self) -> None:
        self.send(await self._call(Call(Principal("nobody"), {}, {})))


class Document(Base):
    """The OpenAPI description."""

    def initialize(self, gatekeeper: Gatekeeper, document: dict[str, Any]) -> None:  # type: ignore[override]
        super().initialize(gatekeeper)
        self._document = document

    def get(self) -> None:
        """The document."""
        self.send(Answer(200, self._document))


def application(
    prefix: str,
    gatekeeper: Gatekeeper,
    context: Context,
    lease_api: LeaseApi,
    routes: list[Route],
    health: Any,
    pages: list[Any],
    cookie_secret: bytes,
) -> web.Application:
    """The tornado application under a prefix that ends in a slash."""
    common = {"gatekeeper": gatekeeper}
    api = prefix + "api/v1/"
    document = describe([*routes, Events.row()], api)
    return web.Application(
        [
            (api + r"openapi\.json", Document, {**common, "document": document}),
            (
                api + r"leases/([0-9a-f-]{36})/events",
                Events,
                {**common, "context": context, "api": lease_api},
            ),
            (api + r"(.*)", Endpoint, {**common, "routes": routes}),
            (prefix + r"metrics", MetricsPage, {**common, "context": context}),
            (prefix + r"health", Health, {**common, "call": health}),
            *pages,
        ],
        default_handler_class=Missing,
        default_handler_args=common,
        log_function=_log_request,
        cookie_secret=cookie_secret,
        xsrf_cookies=True,
        xsrf_cookie_kwargs={"httponly": True, "samesite": "Lax"},
    )


class Missing(Base):
    """Anything else."""

    def prepare(self) -> None:
        """404 in the API's shape."""
        self.refuse(not_found("such page here"))


def _log_request(handler: web.RequestHandler) -> None:
    status = handler.get_status()
    level = logging.DEBUG if status < 400 else logging.INFO if status < 500 else logging.WARNING
    log.log(
        level,
        "request method=%s path=%s status=%d ms=%.0f",
        handler.request.method,
        handler.request.path,
        status,
        1000 * handler.request.request_time(),
    )
