"""An emulated host on a real libvirt, and guests on it, for the tests of ``gpuspawner.host``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp

from gpuspawner.host.api import GuestSpec, Image, ImageFile, Nic
from gpuspawner.host.libvirt_host import LibvirtHost
from gpuspawner.host.seed import SeedNetwork, SeedServer, SeedSpec, build_seed
from gpuspawner.pool.topology import Cell, Claim, Inventory
from tests.layers import wait_for_async

INSTANCE = "7e570001"
CIDR = "10.232.0.0/24"
GATEWAY = "10.232.0.1"
HUB_PORT, OTHER_PORT = 8081, 8082
BOOT_S = 150.0  # a loaded machine; a quiet one takes 15

DECLARATION = """\
v: 1
threads_per_core: 2
system_cores: 1
nodes:
  - {id: 0, cores: 4, memory_mib: 8192, reserve_mib: 512, distances: {1: 21}}
  - {id: 1, cores: 4, memory_mib: 8192, reserve_mib: 512, distances: {0: 21}}
gpus:
  - {address: "0000:41:00.0", node: 0}
  - {address: "0000:c1:00.0", node: 1}
"""


def built_image(folder: Path) -> Image:
    """An image from its manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {
        role: ImageFile(
            folder / entry["file"],
            entry["sha256"],
            entry["bytes"],
            entry.get("format", "raw"),
            entry.get("virtual_mib", 0),
        )
        for role, entry in manifest["files"].items()
    }
    return Image(
        manifest["name"],
        manifest["digest"],
        manifest["cmdline"],
        files,
        manifest["min_memory_mib"],
    )


def make_host(name: str, pools: Path, **more: Any) -> LibvirtHost:
    """An emulated host under TCG; its pool below ``pools``, where QEMU's account can reach it."""
    settings: dict[str, Any] = {
        "instance": INSTANCE,
        "cidr": CIDR,
        "accel": "tcg",
        "emulated_text": DECLARATION,
        "hub_address": (GATEWAY, HUB_PORT),
        "pool_path": str(pools / name),
        **more,
    }
    return LibvirtHost(name, **settings)


@contextlib.contextmanager
def pools_folder(below: str = "/var/tmp") -> Iterator[Path]:
    """A folder for storage pools that QEMU's own account may pass through. Not one of pytest's:
    it makes the folder above them private again whenever another run begins."""
    with tempfile.TemporaryDirectory(prefix="gs-pools-", dir=below) as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@contextlib.asynccontextmanager
async def opened(host: LibvirtHost) -> AsyncIterator[LibvirtHost]:
    """A host that is taken off libvirt again at the end, with all that is on it."""
    await host.open(lambda _uuid: None)
    try:
        yield host
    finally:
        await host.remove()
        await host.close()


class TinyGuest:
    """A lease-like VM with the tiny image."""

    def __init__(self, host: LibvirtHost, image: Image, inventory: Inventory, number: int) -> None:
        self.host = host
        self.number = number
        self.address = f"10.232.0.{number}"
        self.mac = f"52:54:00:00:00:{number:02x}"
        cores = inventory.nodes[0].cores
        claim = Claim(host.name, (), (Cell(0, (cores[1],), max(image.min_memory_mib, 256)),))
        self.spec = GuestSpec(
            uuid=str(uuid.uuid4()),
            kind="lease",
            title=f"guest {number}",
            claim=claim,
            gpus=(),
            image=image,
            nic=Nic(self.mac, self.address),
            seed=True,
            labels={"number": str(number)},
        )

    def with_gpu(self, inventory: Inventory, address: str) -> TinyGuest:
        """The same with a GPU."""
        claim = replace(self.spec.claim, gpus=(address,))
        self.spec = replace(self.spec, claim=claim, gpus=(inventory.gpu(address),))
        return self

    def with_home(self, volume: str) -> TinyGuest:
        """The same with a home."""
        self.spec = replace(self.spec, home=volume)
        return self

    @property
    def uuid(self) -> str:
        return self.spec.uuid

    async def start(self, *, home_new: bool | None = None) -> None:
        """Disks, seed, VM."""
        network = SeedNetwork(self.mac, f"{self.address}/24", GATEWAY, (GATEWAY,))
        server = SeedServer(("server",), {"JUPYTERHUB_SERVICE_PREFIX": "/user/ada/"})
        seed = SeedSpec(self.uuid, "gs-ada", network, home_new, server=server)
        await self.host.make_disks(self.spec)
        await self.host.put_seed(self.uuid, build_seed(seed))
        await self.host.create(self.spec)

    async def ready(self) -> None:
        """Wait until its server answers, as the allocator does."""

        async def answers() -> bool:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                await self.ask("api")
                return True
            return False

        await wait_for_async(answers, BOOT_S, f"guest {self.number} to answer", every=0.3)

    async def ask(self, verb: str, body: bytes | None = None, **query: object) -> Any:
        """One of the tiny guest's verbs; bytes where it is no JSON."""
        url = f"http://{self.address}:8888/user/ada/{verb}?{urlencode(query)}"
        timeout = aiohttp.ClientTimeout(total=20, sock_connect=2)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request("GET" if body is None else "POST", url, data=body) as response,
        ):
            content = await response.read()
            if response.status != 200:
                raise aiohttp.ClientPayloadError(f"{response.status} {content[:200]!r}")
        try:
            return json.loads(content)
        except ValueError:
            return content

    async def gone(self, limit_s: float = 60) -> None:
        """Wait until the host has it no longer."""

        async def is_gone() -> bool:
            return await self.host.guest(self.uuid) is None

        await wait_for_async(is_gone, limit_s, f"guest {self.number} to be gone", every=0.2)

    async def drop(self) -> None:
        """End it and leave nothing of it."""
        await self.host.destroy(self.uuid)
        await self.host.drop_disks(self.uuid)
        await self.host.drop_console(self.uuid)


@contextlib.contextmanager
def listening(*ports: int) -> Iterator[None]:
    """Servers on every address of this side, which stand for the hub and what is beside it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_arguments: Any) -> None:
            pass

    servers = [ThreadingHTTPServer(("0.0.0.0", port), Handler) for port in ports]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


async def next_line(chunks: AsyncIterator[bytes], limit_s: float = BOOT_S) -> bytes:
    """The next line of a port."""
    line = b""
    async with asyncio.timeout(limit_s):
        async for chunk in chunks:
            line += chunk
            if b"\n" in line:
                break
    return line
