"""The allocator's API from Python. The spawner, the command line and the tests share it.

Every call has a time-out and a bound on the size of the answer. There are two ways to fail:
``AllocatorUnreachable`` says that nobody knows whether the request had an effect, and
``AllocatorError`` carries what the allocator answered (or that its answer makes no sense).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
from pydantic import BaseModel, ValidationError

from gpuspawner.checkup import HostCheck
from gpuspawner.schema import (
    AcquireLease,
    AddHost,
    AuditEntry,
    BootPayload,
    ChangeHost,
    Diagnosis,
    EndLease,
    Gpu,
    GpuAction,
    GpuCounts,
    Health,
    Host,
    ImageInfo,
    Lease,
    LeaseEvent,
    Limit,
    Refusal,
    ReleaseLease,
    Reply,
    SetLimit,
)
from gpuspawner.sse import SseError, SseParser

MAX_BODY_BYTES = 16 * 1024 * 1024
"""A pool of some thousand GPUs stays far below."""

STREAM_SILENCE_S = 45.0
"""The allocator sends a comment every 15 s; three missing ones mean a dead connection."""

_Model = TypeVar("_Model", bound=BaseModel)


class _Leases(Reply):
    leases: list[Lease]


class _MaybeLease(Reply):
    lease: Lease | None = None


class _Gpus(Reply):
    gpus: list[Gpu]


class _Hosts(Reply):
    hosts: list[Host]


class _Diagnoses(Reply):
    diagnoses: list[Diagnosis]


class _Images(Reply):
    images: list[ImageInfo]


class _Limits(Reply):
    limits: list[Limit]


class _Audit(Reply):
    audit: list[AuditEntry]


class AllocatorProblem(Exception):
    """A call to the allocator did not do what was asked."""


class AllocatorUnreachable(AllocatorProblem):
    """No answer: connection refused, broken or silent. The request may still have had an effect,
    so the caller repeats it (all verbs are idempotent) or asks for the state."""


class AllocatorError(AllocatorProblem):
    """The allocator answered, and it was not what was asked for.

    ``status`` is the HTTP status; ``refusal`` says what happened, why and what to do. Its reason
    is ``bad-answer`` when the answer itself makes no sense (often: not the allocator).
    """

    def __init__(self, status: int, refusal: Refusal) -> None:
        super().__init__(f"{refusal.message} (HTTP {status}, {refusal.reason})")
        self.status = status
        self.refusal = refusal


def _bad_answer(status: int, text: str) -> AllocatorError:
    message = (
        f"The allocator's answer makes no sense: {text}. "
        "Check allocator_url, and that hub and allocator have the same version."
    )
    return AllocatorError(status, Refusal(status=status, message=message, reason="bad-answer"))


def _excerpt(body: bytes) -> str:
    text = body[:200].decode("utf-8", "replace")
    return " ".join("".join(c if c.isprintable() else " " for c in text).split()) or "nothing"


def _error_from(status: int, content_type: str, body: bytes) -> AllocatorError:
    """What a status outside the expected ones says."""
    if "json" in content_type:
        try:
            return AllocatorError(status, Refusal.model_validate_json(body))
        except ValidationError:
            pass
    if 300 <= status < 400:
        return _bad_answer(status, "it sends the caller elsewhere, so this is not its API")
    if status == 401:
        message = (
            "The allocator does not accept the token. Make sure that hub and allocator read the "
            "same token file."
        )
        return AllocatorError(status, Refusal(status=status, message=message, reason="token"))
    return _bad_answer(status, f"HTTP {status} with {_excerpt(body)}")


def _segment(text: str) -> str:
    return quote(text, safe="")


class AllocatorClient:
    """Calls the allocator at ``url`` (``…/services/gpu/``) with a bearer ``token``.

    One connection pool is kept for the event loop that the client is used in. ``timeout_s`` bounds
    every call that does not wait by design.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = 15.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"allocator_url {url!r} is no URL; write http://HOST:PORT/services/gpu/"
            )
        self.url = url.rstrip("/") + "/"
        self._token = token
        self._timeout_s = timeout_s
        self._ssl: ssl.SSLContext | bool = ssl_context or True
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. The client may be used again."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    # -- leases -------------------------------------------------------------------------------

    async def acquire(self, body: AcquireLease) -> Lease:
        """Ask for a lease. The same key, start and body give the same lease, so it may be
        repeated after ``AllocatorUnreachable``."""
        return await self._call("POST", "leases", Lease, (200, 201), body=body)

    async def lease(self, lease_id: str) -> Lease:
        """One lease; ``AllocatorError`` with status 404 if there is none."""
        return await self._call("GET", f"leases/{_segment(lease_id)}", Lease)

    async def leases(
        self,
        username: str | None = None,
        server_name: str | None = None,
        *,
        ended: bool = False,
    ) -> list[Lease]:
        """With a key: its open leases and the newest ended one. Without: all open ones that the
        caller may see, and with ``ended`` those that have ended too, newest first."""
        params: dict[str, str] = {"all": "1"} if ended else {}
        if username is not None:
            params["username"] = username
        if server_name is not None:
            params["server_name"] = server_name
        return (await self._call("GET", "leases", _Leases, params=params)).leases

    async def put_payload(self, lease_id: str, payload: BootPayload) -> None:
        """Send the boot payload again, after the allocator lost it."""
        await self._send("PUT", f"leases/{_segment(lease_id)}/payload", (200, 204), body=payload)

    async def stop(self, lease_id: str, *, wait_s: float = 0.0) -> Lease:
        """Stop the server of a lease. With ``wait_s`` the call returns when the lease has ended,
        or after ``wait_s`` seconds at the latest (then ``AllocatorUnreachable``)."""
        params = {"wait": "1"} if wait_s > 0 else {}
        return await self._call(
            "DELETE",
            f"leases/{_segment(lease_id)}",
            Lease,
            (200, 202),
            params=params,
            timeout_s=max(wait_s, self._timeout_s),
        )

    async def release(self, body: ReleaseLease, *, timeout_s: float | None = None) -> Lease | None:
        """End a lease by key and start, also before it was acquired (then None)."""
        reply = await self._call(
            "POST", "leases/release", _MaybeLease, (200, 202), body=body, timeout_s=timeout_s
        )
        return reply.lease

    async def end_lease(self, lease_id: str, reason: str = "") -> Lease:
        """An admin ends a lease; ``reason`` is shown to its user."""
        path = f"leases/{_segment(lease_id)}/end"
        return await self._call("POST", path, Lease, (200, 202), body=EndLease(reason=reason))

    async def forget_home(self, username: str, server_name: str) -> None:
        """The server is deleted for ever: its home goes to the trash."""
        body = {"username": username, "server_name": server_name}
        await self._send("POST", "homes/forget", (200, 204), body=body)

    async def events(
        self,
        lease_id: str,
        *,
        last_id: int = 0,
        on_trouble: Callable[[str], None] | None = None,
    ) -> AsyncGenerator[LeaseEvent, None]:
        """The story of a lease from event ``last_id`` on, until it has ended.

        A broken stream is picked up where it broke, for as long as the caller iterates: bound it
        with ``asyncio.timeout``. ``on_trouble`` is told of every break. ``AllocatorError`` is
        raised for an answer that repeating cannot mend.
        """
        pause_s = 0.2
        while True:
            try:
                async with aclosing(self._stream(lease_id, last_id)) as stream:
                    async for event in stream:
                        pause_s = 0.2
                        if event.id <= last_id:
                            continue
                        last_id = event.id
                        yield event
                        if event.state == "ended":
                            return
                trouble = "the stream of events ended early"
            except AllocatorUnreachable as error:
                trouble = str(error)
            except AllocatorError as error:
                if error.status < 500 or error.refusal.reason == "bad-answer":
                    raise
                trouble = str(error)
            if on_trouble is not None:
                on_trouble(trouble)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 5.0)

    # -- the pool -----------------------------------------------------------------------------

    async def gpu_counts(self, *, timeout_s: float | None = None) -> GpuCounts:
        """Free, used and coming GPUs by model."""
        return await self._call("GET", "gpus/counts", GpuCounts, timeout_s=timeout_s)

    async def gpus(self) -> list[Gpu]:
        """Every GPU."""
        return (await self._call("GET", "gpus", _Gpus)).gpus

    async def gpu_action(
        self,
        host: str,
        address: str,
        action: GpuAction | Literal["enroll", "retest", "retire", "hold", "unhold"],
        reason: str = "",
    ) -> Gpu:
        """An admin's verb on one GPU; ``reason`` goes with a verb given by name."""
        path = f"gpus/{_segment(host)}/{_segment(address)}/action"
        body = action if isinstance(action, GpuAction) else GpuAction(action=action, reason=reason)
        return await self._call("POST", path, Gpu, (200, 202), body=body)

    async def hosts(self) -> list[Host]:
        """Every host."""
        return (await self._call("GET", "hosts", _Hosts)).hosts

    async def add_host(self, body: AddHost) -> Host:
        """A host joins the pool; its survey goes on after the answer."""
        return await self._call("POST", "hosts", Host, (200, 201, 202), body=body)

    async def change_host(self, name: str, body: ChangeHost) -> Host:
        """Drain a host, or put it back."""
        return await self._call("PATCH", f"hosts/{_segment(name)}", Host, (200, 202), body=body)

    async def check_host(self, name: str, *, timeout_s: float = 120.0) -> HostCheck:
        """A host as it is now, and what stands in the way of using it, with remedies."""
        path = f"hosts/{_segment(name)}/check"
        return await self._call("GET", path, HostCheck, timeout_s=timeout_s)

    async def diagnoses(self, **filters: str) -> list[Diagnosis]:
        """Runs of the service VM, newest first."""
        return (await self._call("GET", "diagnoses", _Diagnoses, params=filters)).diagnoses

    async def images(self) -> list[ImageInfo]:
        """Every image and where it is present."""
        return (await self._call("GET", "images", _Images)).images

    async def limits(self) -> list[Limit]:
        """All limits on GPUs at once."""
        return (await self._call("GET", "limits", _Limits)).limits

    async def set_limit(self, kind: str, name: str, gpus: int | None, why: str) -> None:
        """Set the limit of ``default``, of a ``user`` or of a ``group``; ``None`` takes it away."""
        path = "limits/default" if kind == "default" else f"limits/{kind}/{_segment(name)}"
        await self._send("PUT", path, (204,), body=SetLimit(gpus=gpus, why=why))

    async def audit(self, *, limit: int = 200, before: int | None = None) -> list[AuditEntry]:
        """What admins did, newest first: at most ``limit`` lines (1000 at a time), older than the
        line with the id ``before``."""
        params = {"limit": str(limit)} | ({} if before is None else {"before": str(before)})
        return (await self._call("GET", "audit", _Audit, params=params)).audit

    async def health(self) -> Health:
        """Whether the allocator works; also answered with HTTP 503 when it does not."""
        return await self._call("GET", "health", Health, (200, 503))

    # -- HTTP ---------------------------------------------------------------------------------

    def _connections(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            self._loop = loop
            self._session = aiohttp.ClientSession(
                headers={
                    "Authorization": f"Bearer {self._token}",
                    "Accept": "application/json",
                    # Compressed answers would make the bound on their size meaningless.
                    "Accept-Encoding": "identity",
                },
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session

    async def _call(
        self,
        method: str,
        path: str,
        model: type[_Model],
        expected: tuple[int, ...] = (200,),
        *,
        body: BaseModel | dict[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> _Model:
        status, answer = await self._exchange(method, path, expected, body, params, timeout_s)
        try:
            return model.model_validate_json(answer)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "its body"
            raise _bad_answer(status, f"{method} {path}: {where}: {first['msg']}") from error

    async def _send(
        self,
        method: str,
        path: str,
        expected: tuple[int, ...],
        *,
        body: BaseModel | dict[str, Any] | None = None,
    ) -> None:
        await self._exchange(method, path, expected, body, None, None)

    async def _exchange(
        self,
        method: str,
        path: str,
        expected: tuple[int, ...],
        body: BaseModel | dict[str, Any] | None,
        params: Mapping[str, str] | None,
        timeout_s: float | None,
    ) -> tuple[int, bytes]:
        json = body.model_dump(mode="json") if isinstance(body, BaseModel) else body
        limit_s = timeout_s or self._timeout_s
        try:
            async with (
                asyncio.timeout(limit_s),
                self._connections().request(
                    method,
                    f"{self.url}api/v1/{path}",
                    json=json,
                    params=params,
                    allow_redirects=False,
                    ssl=self._ssl,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(limit_s, 10.0)),
                ) as response,
            ):
                answer = await _bounded(response)
                status, kind = response.status, response.content_type
        except TimeoutError as error:
            raise AllocatorUnreachable(
                f"The allocator at {self.url} did not answer within {limit_s:.0f} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(self.url, error) from error
        if status not in expected:
            raise _error_from(status, kind, answer)
        return status, answer

    async def _stream(self, lease_id: str, last_id: int) -> AsyncGenerator[LeaseEvent, None]:
        headers = {"Accept": "text/event-stream"}
        if last_id:
            headers["Last-Event-ID"] = str(last_id)
        parser = SseParser()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=STREAM_SILENCE_S)
        try:
            async with self._connections().get(
                f"{self.url}api/v1/leases/{_segment(lease_id)}/events",
                headers=headers,
                allow_redirects=False,
                ssl=self._ssl,
                timeout=timeout,
            ) as response:
                if response.status != 200:
                    answer = await _bounded(response)
                    raise _error_from(response.status, response.content_type, answer)
                if response.content_type != "text/event-stream":
                    raise _bad_answer(200, f"{response.content_type} instead of a stream of events")
                async for chunk in response.content.iter_any():
                    for data in parser.feed(chunk):
                        yield LeaseEvent.model_validate_json(data)
        except (SseError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            raise _bad_answer(200, f"its stream of events: {reason}") from error
        except TimeoutError as error:
            raise AllocatorUnreachable(
                f"The allocator at {self.url} fell silent while it told what happens"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(self.url, error) from error


def _unreachable(url: str, error: Exception) -> AllocatorUnreachable:
    text = str(error) or type(error).__name__
    return AllocatorUnreachable(f"The allocator at {url} cannot be reached: {text}")


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """The body, at most ``MAX_BODY_BYTES`` of it."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            response.close()
            raise _bad_answer(response.status, f"more than {MAX_BODY_BYTES} bytes")
    return bytes(body)
