"""The client against servers that are slow, silent, broken or something else altogether."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import pytest
from aiohttp import web

from gpuspawner import client as client_module
from gpuspawner.client import AllocatorClient, AllocatorError, AllocatorUnreachable
from gpuspawner.schema import LeaseEvent, ReleaseLease
from gpuspawner.sse import MAX_LINE_BYTES, SseError, SseParser

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
LEASE_ID = "00000000-0000-0000-0000-000000000001"


@asynccontextmanager
async def serving(handler: Handler, timeout_s: float = 2.0) -> AsyncIterator[AllocatorClient]:
    """A client of a server that handles every request with ``handler``."""
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with AllocatorClient(
        f"http://127.0.0.1:{port}/services/gpu/", "t", timeout_s=timeout_s
    ) as c:
        try:
            yield c
        finally:
            await c.close()
            await runner.cleanup()


def event(number: int, state: str = "starting", message: str = "m") -> bytes:
    body = {
        "id": number, "lease_id": LEASE_ID, "at": "2026-11-30T20:00:00Z", "kind": "progress",
        "state": state, "progress": min(number, 100), "message": message,
    }  # fmt: skip
    return f"id: {number}\ndata: {json.dumps(body)}\n\n".encode()


async def told(client: AllocatorClient) -> list[int]:
    async with asyncio.timeout(10), aclosing(client.events(LEASE_ID)) as events:
        return [e.id async for e in events]


async def test_calls_carry_token_path_and_body() -> None:
    seen: list[tuple[str, str, str | None, str]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(
            (
                request.method,
                request.path_qs,
                request.headers.get("Authorization"),
                await request.text(),
            )
        )
        return web.json_response({"lease": None})

    async with serving(handler) as client:
        body = ReleaseLease(username="a/b", server_name="", start_id="start-123")
        assert await client.release(body) is None
    assert seen == [
        (
            "POST",
            "/services/gpu/api/v1/leases/release",
            "Bearer t",
            '{"username": "a/b", "server_name": "", "start_id": "start-123"}',
        )
    ]


async def test_names_cannot_leave_their_path() -> None:
    paths: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        paths.append(request.raw_path)
        return web.json_response({"host": "h1", "findings": []})

    async with serving(handler) as client:
        await client.check_host("../leases?x#y")
    assert paths == ["/services/gpu/api/v1/hosts/..%2Fleases%3Fx%23y/check"]


async def test_a_refusal_arrives_as_it_was_said() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        body = {"status": 503, "message": "No GPU is free.", "reason": "capacity",
                "constraint": "gpu", "new_field": 1}  # fmt: skip
        return web.json_response(body, status=503)

    async with serving(handler) as client:
        with pytest.raises(AllocatorError, match="No GPU is free") as caught:
            await client.lease(LEASE_ID)
    assert (caught.value.status, caught.value.refusal.constraint) == (503, "gpu")


@pytest.mark.parametrize(
    ("status", "kind", "body", "reason", "text"),
    [
        (200, "text/html", b"<html>Hello", "bad-answer", "makes no sense"),
        (200, "application/json", b"{", "bad-answer", "GET leases/"),
        (200, "application/json", b'{"id": 1}', "bad-answer", "makes no sense"),
        (200, "application/json", b"", "bad-answer", "makes no sense"),
        (500, "text/plain", b"\x00\xff oops\x1b[31m", "bad-answer", "HTTP 500"),
        (502, "application/json", b'{"status": "x"}', "bad-answer", "HTTP 502"),
        (302, "text/html", b"", "bad-answer", "sends the caller elsewhere"),
        (401, "text/html", b"login", "token", "token"),
    ],
)
async def test_garbage_becomes_a_sentence(
    status: int, kind: str, body: bytes, reason: str, text: str
) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": kind, "Location": "/elsewhere"}
        return web.Response(status=status, body=body, headers=headers)

    async with serving(handler) as client:
        with pytest.raises(AllocatorError) as caught:
            await client.lease(LEASE_ID)
    assert caught.value.refusal.reason == reason
    assert text in str(caught.value)
    assert str(caught.value).isprintable()


async def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_BODY_BYTES", 100_000)

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while True:
            await response.write(b" " * 10_000)

    async with serving(handler) as client:
        with pytest.raises(AllocatorError, match="more than 100000 bytes"):
            await client.lease(LEASE_ID)


async def test_silence_is_not_an_answer() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    async with serving(handler, timeout_s=0.2) as client:
        with pytest.raises(AllocatorUnreachable, match="did not answer"):
            await client.lease(LEASE_ID)


async def test_a_body_that_never_ends_in_time() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"{")
        await asyncio.sleep(30)
        return response

    async with serving(handler, timeout_s=0.2) as client:
        with pytest.raises(AllocatorUnreachable):
            await client.lease(LEASE_ID)


async def test_a_connection_cut_in_the_middle() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"{")
        assert request.transport is not None
        request.transport.abort()
        return response

    async with serving(handler) as client:
        with pytest.raises(AllocatorUnreachable, match="cannot be reached"):
            await client.lease(LEASE_ID)


async def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        async with AllocatorClient(f"http://127.0.0.1:{port}/", "t") as client:
            with pytest.raises(AllocatorUnreachable, match="cannot be reached"):
                await client.health()


def test_an_url_that_is_none() -> None:
    with pytest.raises(ValueError, match="is no URL"):
        AllocatorClient("localhost:8091", "t")


async def test_a_stream_is_picked_up_where_it_broke() -> None:
    asked: list[str | None] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers.get("Last-Event-ID"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": hello\n\n")
        if len(asked) == 1:
            await response.write(event(1) + event(2)[:20])
            assert request.transport is not None
            request.transport.abort()
        elif len(asked) == 2:
            await response.write(event(1) + event(2))  # repeats one that was told already
        elif len(asked) == 3:
            return web.Response(status=503, text="restarting")
        else:
            await response.write(event(3) + event(4, "ended"))
        return response

    troubles: list[str] = []
    async with serving(handler) as client:
        got: list[LeaseEvent] = []
        async with (
            asyncio.timeout(10),
            aclosing(client.events(LEASE_ID, on_trouble=troubles.append)) as events,
        ):
            async for each in events:
                got.append(each)
    assert [e.id for e in got] == [1, 2, 3, 4]
    assert asked[:2] == [None, "1"]
    assert asked[-1] == "2"
    assert troubles


async def test_a_stream_that_falls_silent_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "STREAM_SILENCE_S", 0.2)
    asked = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if asked == 1:
            await response.write(event(1))
            await asyncio.sleep(30)
        await response.write(event(2, "ended"))
        return response

    async with serving(handler) as client:
        assert await told(client) == [1, 2]


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        ("text/html", b"<html>", "instead of a stream"),
        ("text/event-stream", b"data: {not json}\n\n", "stream of events"),
        ("text/event-stream", b'data: {"id": "one"}\n\n', "stream of events"),
        ("text/event-stream", b"data: " + b"x" * (2 * MAX_LINE_BYTES), "a line is longer"),
    ],
)
async def test_a_garbled_stream_is_not_asked_for_again(kind: str, body: bytes, text: str) -> None:
    asked = 0

    async def handler(_: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return web.Response(body=body, headers={"Content-Type": kind})

    async with serving(handler) as client:
        with pytest.raises(AllocatorError, match=text):
            await told(client)
    assert asked == 1


async def test_the_stream_of_no_lease() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        body = {"status": 404, "message": "No such lease.", "reason": "not-found"}
        return web.json_response(body, status=404)

    async with serving(handler) as client:
        with pytest.raises(AllocatorError) as caught:
            await told(client)
    assert caught.value.status == 404


def test_events_are_cut_from_any_chunks() -> None:
    stream = b": comment\r\n\r\nid: 1\ndata: a\ndata:b\n\nretry: 5\n\n\ndata\n\ndata: c\n\n"
    for size in range(1, len(stream)):
        parser = SseParser()
        got = [
            data
            for start in range(0, len(stream), size)
            for data in parser.feed(stream[start : start + size])
        ]
        assert got == [b"a\nb", b"", b"c"], size


def test_an_event_of_too_many_lines() -> None:
    parser = SseParser()
    line = b"data: " + b"x" * (MAX_LINE_BYTES - 10) + b"\n"
    with pytest.raises(SseError, match="an event is longer"):
        list(parser.feed(line * 10))
