"""A real hub, a real allocator on a scripted host, and the front before both."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from gpuspawner import schema
from gpuspawner.client import AllocatorClient
from tests.service.front import Front, Seen, Visitor, visitor
from tests.service.harness import Site, acquire_body, lease_in
from tests.service.real_hub import PASSWORD, RealHub
from tests.service.scripted import WORLDS, World

PAGE = "/services/gpu/"


class Pages:
    """One allocator behind one front, with a host in its pool."""

    def __init__(self, site: Site, hub: RealHub, front: Front, client: AllocatorClient) -> None:
        self.site = site
        self.hub = hub
        self.front = front
        self.client = client

    @property
    def world(self) -> World:
        """The host."""
        return self.site.worlds["h1"]

    @contextlib.asynccontextmanager
    async def user(self, name: str, *groups: str) -> AsyncIterator[Visitor]:
        """Somebody who is logged in."""
        await self.hub.add_user(name, *groups)
        async with visitor(self.front.url) as one:
            page = await one.log_in(name, PASSWORD)
            assert page.status == 200, page.text
            assert page.url == self.front.url + PAGE
            yield one

    async def lease(self, user: str, server: str = "", start: str = "start-0001") -> schema.Lease:
        """A running lease that the hub knows nothing of."""
        lease = await self.client.acquire(acquire_body(user, start, server))
        return await lease_in(self.client, lease.id, "running")


@pytest_asyncio.fixture
async def pages(hub: RealHub, tmp_path: Path) -> AsyncIterator[Pages]:
    """The allocator where the hub expects it, with one host whose two GPUs are free."""
    site = Site(tmp_path, hub_api_url=hub.url + "api")
    (tmp_path / "service.token").write_text("s" * 40)
    site.port = hub.allocator_port
    site.url = f"http://127.0.0.1:{site.port}{PAGE}"
    site.world("h1")
    async with (
        site.running() as client,
        Front(hub.port, hub.allocator_port).running() as front,
    ):
        await site.add_host(client, 1)
        yield Pages(site, hub, front, client)
    await WORLDS["h1"].close()


async def confirm(who: Visitor, url: str, **fields: str) -> Seen:
    """Open a question and answer it; the page that follows."""
    question = await who.get(url)
    assert question.status == 200, question.text
    done = await who.post(url, {"_xsrf": question.xsrf, **fields})
    assert done.status == 303, done.text
    return await who.get(done.headers["Location"])
