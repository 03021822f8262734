"""What stands before hub and allocator: one origin, as JupyterHub's proxy makes it, and a visitor.

The proxy forwards paths as configurable-http-proxy does, streams included.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

import aiohttp
from aiohttp import web

_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding"}
NAVIGATE = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Site": "same-origin"}
SCRIPT = {"Sec-Fetch-Mode": "cors", "Sec-Fetch-Site": "same-origin"}


class Front:
    """Forwards what is below ``pages`` to the allocator and everything else to the hub."""

    def __init__(self, hub_port: int, allocator_port: int, pages: str = "/services/gpu/") -> None:
        self.targets = (hub_port, allocator_port)
        self.pages = pages
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Front]:
        """While it listens."""
        self._session = aiohttp.ClientSession(
            auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        )
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{tail:.*}", self._forward)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()
            await self._session.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        hub, allocator = self.targets
        port = allocator if request.path.startswith(self.pages) else hub
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in _HOP]
        try:
            async with self._session.request(
                request.method,
                f"http://127.0.0.1:{port}{request.raw_path}",
                headers=headers,
                data=await request.read(),
                allow_redirects=False,
            ) as answer:
                response = web.StreamResponse(status=answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in _HOP or name.lower() == "content-encoding":
                        response.headers.add(name, value)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, ConnectionError):
            return web.Response(status=503, text="Service unavailable")


@dataclass(frozen=True)
class Seen:
    """An answer as a browser has it."""

    status: int
    url: str
    text: str
    headers: Any

    @property
    def xsrf(self) -> str:
        """The page's own token."""
        found = re.search(r'data-xsrf="([^"]+)"', self.text)
        assert found, self.text[:2000]
        return found[1]


class Visitor:
    """A browser, as far as cookies, redirects and forms go."""

    def __init__(self, origin: str, session: aiohttp.ClientSession) -> None:
        self.origin = origin
        self.session = session

    async def get(
        self, path: str, headers: dict[str, str] | None = None, follow: bool = True
    ) -> Seen:
        """A page after its redirects, or a part as the pages' script fetches it."""
        url = urljoin(self.origin, path)
        for _ in range(10):
            async with self.session.get(
                url, headers=headers or NAVIGATE, allow_redirects=False
            ) as answer:
                seen = Seen(answer.status, url, await answer.text(), answer.headers)
            if not follow or seen.status not in (302, 303):
                return seen
            url = urljoin(url, seen.headers["Location"])
        raise AssertionError(f"too many redirects, the last one to {url}")

    async def post(
        self, path: str, fields: dict[str, str], headers: dict[str, str] | None = None
    ) -> Seen:
        """Send a form; the answer itself, not where it leads."""
        url = urljoin(self.origin, path)
        async with self.session.post(
            url, data=fields, headers=headers or NAVIGATE, allow_redirects=False
        ) as answer:
            return Seen(answer.status, url, await answer.text(), answer.headers)

    async def log_in(self, user: str, password: str, path: str = "/services/gpu/") -> Seen:
        """Through the hub's form; the page behind it."""
        page = await self.get(path)
        assert "/hub/login" in page.url, page.url
        found = re.search(r'name="_xsrf"\s+value="([^"]+)"', page.text)
        assert found, page.text
        fields = {"username": user, "password": password, "_xsrf": found[1]}
        done = await self.post(page.url, fields)
        assert done.status == 302, done.text
        return await self.get(urljoin(page.url, done.headers["Location"]))

    async def events(
        self, xsrf: str, until: str, timeout_s: float = 15, path: str = "/services/gpu/"
    ) -> list[str]:
        """Lines of the pages' event stream, up to the one that contains ``until``."""
        lines: list[str] = []
        async with (
            asyncio.timeout(timeout_s),
            self.session.get(
                f"{self.origin}{path}pages/events",
                params={"_xsrf": xsrf},
                headers=SCRIPT,
            ) as answer,
        ):
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                lines.append(line.decode().strip())
                if until in lines[-1]:
                    return lines
        raise AssertionError(f"{until!r} never came: {lines}")


@contextlib.asynccontextmanager
async def visitor(origin: str) -> AsyncIterator[Visitor]:
    """Somebody with an empty cookie jar."""
    jar = aiohttp.CookieJar(unsafe=True)
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(cookie_jar=jar, timeout=timeout) as session:
        yield Visitor(origin, session)
