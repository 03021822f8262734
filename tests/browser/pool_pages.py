"""A hub, an allocator and a pool that has a bit of everything, for a browser to look at."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from gpuspawner import schema
from gpuspawner.client import AllocatorClient
from gpuspawner.host.api import HostError
from tests.layers import wait_for_async
from tests.service.front import Front
from tests.service.harness import Site, acquire_body, gpu_in, lease_in
from tests.service.real_hub import RealHub
from tests.service.scripted import CHECKS, WORLDS, Script, encode, report

T = TypeVar("T")
PREFIX = "/services/gpu/"


class Loop:
    """An event loop in a thread of its own: Playwright's synchronous side has the main one."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = 60) -> T:
        """Run it there and wait."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self) -> None:
        """End the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


def measured(**changes: str) -> Script:
    """A service VM's report with numbers in it."""

    def script(run: str, nonce: str, gpu: str) -> list[bytes]:
        lines = report(run, nonce, gpu, **changes)
        for line in lines:
            if line.get("check") in ("overwrite", "read_back"):
                line["metrics"] = {"bytes_verified": 16773120, "bytes_total": 16773120, "errors": 0}
            if line.get("check") == "residue":
                line["metrics"] = {"residue_words": 4128}
            if line.get("status") == "fail":
                line["metrics"] = {"errors": 3, "first_bad_offset": 8388608, "xor": "0x00000400"}
                line["codes"] = ["BIT_FLIP"]
        return encode(lines)

    return script


def hanging(until: str) -> Script:
    """A service VM that is in the middle of its work."""

    def script(run: str, nonce: str, gpu: str) -> list[bytes]:
        lines = report(run, nonce, gpu)
        at = 2 + CHECKS.index(until)
        head = {"v": 1, "run": run, "nonce": nonce, "seq": at}
        return encode([*lines[:at], {**head, "t": "progress", "check": until, "pct": 40}])

    return script


class PoolPages:
    """Everything behind one origin. ``start`` fills the pool."""

    def __init__(self, folder: Path) -> None:
        self.loop = Loop()
        self.hub = RealHub(folder / "hub")
        self.folder = folder
        self._stack = contextlib.AsyncExitStack()
        self.site: Site
        self.client: AllocatorClient
        self.url = ""

    def start(self) -> None:
        """Hub, allocator, front, three hosts, servers."""
        self.hub.start()
        self.loop.call(self._start(), 120)

    async def _start(self) -> None:
        # The hub never started these servers, and would have their leases ended after a minute.
        site = Site(
            self.folder / "allocator", hub_api_url=self.hub.url + "api", hub_forgot_s=3600.0
        )
        (site.folder / "service.token").write_text("s" * 40)
        site.port = self.hub.allocator_port
        site.url = f"http://127.0.0.1:{site.port}{PREFIX}"
        self.site = site
        self.client = await self._stack.enter_async_context(site.running())
        front = await self._stack.enter_async_context(
            Front(self.hub.port, self.hub.allocator_port).running()
        )
        self.url = front.url
        await self._hosts()
        for name, groups in {"ada": (), "root": ("gpu-admins",)}.items():
            await self.hub.add_user(name, *groups)

    async def _hosts(self) -> None:
        site, client = self.site, self.client
        one = site.world("gpu-host-1", gpus=6, cores=8)
        one.script = measured()
        await site.add_host(client, 1, "gpu-host-1")
        two = site.world("gpu-host-2", gpus=4, cores=16)
        two.script = measured()
        models = [
            replace(gpu, model="NVIDIA A100-PCIE-40GB", memory_mib=40960)
            for gpu in two.inventory.gpus
        ]
        two.inventory = replace(two.inventory, gpus=tuple(models))
        await site.add_host(client, 2, "gpu-host-2")
        three = site.world("gpu-host-3", gpus=2)
        three.fail["survey"] = HostError("The connection to qemu+ssh://gpu-host-3/system was lost.")
        await client.add_host(
            schema.AddHost(
                name="gpu-host-3", uri="qemu+ssh://gpu-host-3/system", cidr="127.203.0.0/24",
                emulated="scripted",
            )
        )  # fmt: skip
        for user, server, gpus in (("grace", "", 1), ("katherine", "training run", 2)):
            body = acquire_body(user, f"start-{user}", server, gpus=gpus, cores=2, memory_mib=8192)
            lease = await client.acquire(body.model_copy(update={"groups": ["sar-lab"]}))
            await lease_in(client, lease.id, "running")
        free = [
            g.address for g in await client.gpus() if g.state == "unassigned" and g.host == one.name
        ]
        one.script = measured(read_back="fail")
        await self._act(one.name, free[0], "retest", "Xid 79 in a user's log")
        await gpu_in(client, free[0], "failed")
        one.script = hanging("overwrite")
        await self._act(one.name, free[1], "retest", "firmware was updated")
        await self._act(one.name, free[2], "hold", "fan is being swapped (root)")
        await client.change_host("gpu-host-2", schema.ChangeHost(drained=True))
        self.failed, self.diagnosing, self.held = free[0], free[1], free[2]
        await client.set_limit("default", "", 2, "a small pool until the new hosts are there")
        await client.set_limit("group", "sar-lab", 3, "what the group has paid for")
        await client.set_limit("user", "katherine", 4, "trains the ice model, until March")

    async def _act(self, host: str, address: str, action: Any, reason: str) -> None:
        await self.client.gpu_action(host, address, action, reason)

    def server_of(self, user: str) -> schema.Lease:
        """Start a user's server through the hub, and wait until it runs."""
        return self.loop.call(self._server_of(user))

    async def _server_of(self, user: str) -> schema.Lease:
        status, answer = await self.hub.api("POST", f"users/{user}/server", {"profile": "emulated"})
        assert status in (201, 202), answer

        async def running() -> Any:
            leases = await self.client.leases(username=user)
            server = await self.hub.server(user)
            ready = leases and leases[0].state == "running" and server and server["ready"]
            return leases[0] if ready else None

        return await wait_for_async(running, 30, f"the server of {user}")

    def do(self, work: Awaitable[T]) -> T:
        """A call of the allocator's client."""

        async def run() -> T:
            return await work

        return self.loop.call(run())

    def user(self, name: str, *groups: str) -> None:
        """One more account."""
        self.loop.call(self.hub.add_user(name, *groups))

    def stop(self) -> None:
        """All of it."""
        self.loop.call(self._close())
        self.hub.stop()
        self.loop.close()

    async def _close(self) -> None:
        await self._stack.aclose()
        for world in self.site.worlds.values():
            await world.close()
            WORLDS.pop(world.name, None)


class LastGpu(PoolPages):
    """A pool that has one GPU, and two users."""

    async def _hosts(self) -> None:
        self.site.world("gpu-host-4", gpus=1)
        await self.site.add_host(self.client, 4, "gpu-host-4")
        for name in ("emmy", "lise"):
            await self.hub.add_user(name)
