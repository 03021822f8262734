"""A real allocator in this process: real HTTP, real database, scripted hosts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from traitlets.config import Config

from gpuspawner import schema
from gpuspawner.allocator.app import Allocator
from gpuspawner.client import AllocatorClient
from gpuspawner.config import Installation
from gpuspawner.host.api import GpuHost  # noqa: F401 - what the worlds stand behind
from tests.layers import wait_for_async
from tests.service.scripted import WORLDS, World, inventory

TOKEN = "t" * 40
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_image(folder: Path, name: str, role: str) -> str:
    """An image folder whose files are a few bytes; returns its digest."""
    folder = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for kind in ("kernel", "initrd"):
        content = f"{name} {kind}".encode()
        (folder / kind).write_bytes(content)
        files[kind] = {
            "file": kind, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content),
        }  # fmt: skip
    digest = "sha256:" + hashlib.sha256(json.dumps(files).encode()).hexdigest()
    manifest = {
        "v": 1, "name": name, "role": role, "title": name, "digest": digest,
        "cmdline": "quiet", "files": files, "min_memory_mib": 256,
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return digest


class Site:
    """One state folder, its worlds, and the allocators that run on it one after another."""

    def __init__(self, folder: Path, db_url: str | None = None, **traits: Any) -> None:
        self.folder = folder
        self.db_url = db_url
        self.traits = traits
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/services/gpu/"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spawner.token").write_text(TOKEN)
        write_image(folder / "images", "lab", "lab")
        write_image(folder / "images", "service", "service")
        self.worlds: dict[str, World] = {}

    def world(self, name: str = "h1", **kwargs: Any) -> World:
        """A host that can be added to the pool."""
        world = World(name, inventory(name, **kwargs))
        self.worlds[name] = WORLDS[name] = world
        return world

    def app(self) -> Allocator:
        """An allocator on this site's state; not started."""
        config = Config()
        config.Installation.state_dir = str(self.folder)
        config.Installation.allocator_url = self.url
        config.Allocator.driver = "tests.service.scripted.scripted_host"
        config.Allocator.diagnosis_backoff_s = [0.05]
        config.Allocator.stop_s = 2.0
        if self.db_url:
            config.Allocator.db_url = self.db_url
        for name, value in self.traits.items():
            setattr(config.Allocator, name, value)
        app = Allocator(config=config)
        app.shared = Installation(parent=app)
        return app

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[AllocatorClient]:
        """An allocator that listens, and a client of it."""
        async with contextlib.AsyncExitStack() as stack:
            await self.app().serve(stack)
            client = AllocatorClient(self.url, TOKEN)
            stack.push_async_callback(client.close)
            yield client

    async def metrics(self) -> str:
        """The metrics page."""
        async with aiohttp.ClientSession() as session, session.get(self.url + "metrics") as page:
            return await page.text()

    async def add_host(self, client: AllocatorClient, number: int, name: str = "h1") -> None:
        """Add a world to the pool and wait until all its GPUs have passed."""
        await client.add_host(
            schema.AddHost(
                name=name, uri="test:///default", cidr=f"127.20{number}.0.0/24",
                emulated="scripted",
            )
        )  # fmt: skip
        await wait_for_async(
            lambda: self._all_free(client, name), 60, f"the GPUs of {name} to be free"
        )

    async def _all_free(self, client: AllocatorClient, name: str) -> bool:
        gpus = [gpu for gpu in await client.gpus() if gpu.host == name]
        return bool(gpus) and all(gpu.state == "unassigned" for gpu in gpus)


def acquire_body(
    user: str = "ada", start: str = "start-0001", server: str = "", **request: Any
) -> schema.AcquireLease:
    """A request for one GPU."""
    return schema.AcquireLease(
        username=user,
        server_name=server,
        start_id=start,
        request=schema.LeaseRequest(
            **{"gpus": 1, "cores": 1, "memory_mib": 1024, "image": "lab", **request}
        ),
        payload=schema.BootPayload(
            argv=["jupyterhub-singleuser"], env={"JUPYTERHUB_API_TOKEN": "secret-of-" + user}
        ),
        ready_path=f"/user/{quote(user)}/api",
    )


async def lease_in(client: AllocatorClient, lease_id: str, *states: str) -> schema.Lease:
    """Wait until the lease is in one of these states."""

    async def look() -> schema.Lease | None:
        lease = await client.lease(lease_id)
        return lease if lease.state in states else None

    return await wait_for_async(look, 60, f"lease {lease_id} to be {' or '.join(states)}")


async def gpu_in(client: AllocatorClient, address: str, *states: str) -> schema.Gpu:
    """Wait until the GPU is in one of these states."""

    async def look() -> schema.Gpu | None:
        for gpu in await client.gpus():
            if gpu.address == address and gpu.state in states:
                return gpu
        return None

    return await wait_for_async(look, 60, f"GPU {address} to be {' or '.join(states)}")
