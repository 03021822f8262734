"""Fixtures of the tests in which a real hub meets a scripted allocator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from tests.service.fake_allocator import FakeAllocator
from tests.service.real_hub import RealHub


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealHub]:
    """One hub for all tests, because starting one takes seconds; each test has users of its
    own."""
    folder: Path = tmp_path_factory.mktemp("hub")
    real = RealHub(folder)
    real.start()
    yield real
    real.stop()


@pytest_asyncio.fixture
async def guest_port() -> AsyncIterator[int]:
    """A server that answers like JupyterLab's ``/api``, for any user."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"version": "2"}, headers={"X-JupyterHub-Version": "6.1.1"})

    app = web.Application()
    app.router.add_get("/user/{tail:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@pytest_asyncio.fixture
async def allocator(hub: RealHub, guest_port: int) -> AsyncIterator[FakeAllocator]:
    """A fresh allocator where the hub expects it."""
    fake = FakeAllocator(hub.allocator_port, guest_port)
    await fake.up()
    yield fake
    await fake.close()
