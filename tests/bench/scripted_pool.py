"""A real allocator as a process of its own, over one scripted host.

    python -m tests.bench.scripted_pool FOLDER URL HUB_API_URL GPUS BOOT_S

Its guests live in this process too: each is a socket that answers ``BOOT_S`` seconds after the
guest was made. At the end (SIGTERM) one line of JSON says what is left on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpuspawner.host.api import GuestSpec
from gpuspawner.pool.topology import Inventory, Node
from tests.service.harness import Site
from tests.service.scripted import WORLDS, World, inventory

HOST = "h1"


def large_inventory(host: str, gpus: int) -> Inventory:
    """Two NUMA nodes, and for every GPU a core and 2 GiB beside it."""
    small = inventory(host, gpus=1)
    half = (gpus + 1) // 2 + 1
    return replace(
        small,
        nodes=tuple(
            Node(n, tuple((n * half + core,) for core in range(half)), half * 2048 + 2048, 2048)
            for n in range(2)
        ),
        gpus=tuple(
            replace(
                small.gpus[0],
                address=f"0000:{0x10 + n // 32:02x}:{n % 32:02x}.0",
                node=n % 2,
                functions=tuple(f"0000:{0x10 + n // 32:02x}:{n % 32:02x}.{f}" for f in range(2)),
                group=n,
            )
            for n in range(gpus)
        ),
    )


@dataclass
class SlowWorld(World):
    """Guests need a while until they answer."""

    boot_s: float = 0.0
    booting: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, spec: GuestSpec) -> None:
        """The guest's server listens later."""
        task = asyncio.create_task(self._boot(spec))
        self.booting.add(task)  # the event loop keeps weak references alone
        task.add_done_callback(self.booting.discard)

    async def _boot(self, spec: GuestSpec) -> None:
        await asyncio.sleep(self.boot_s)
        if spec.uuid in self.specs:
            await super().serve(spec)


async def run(site: Site, world: World) -> None:
    """Until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        await site.app().serve(stack)
        await stop.wait()
    left = {
        "guests": len(world.specs),
        "seeds": len(world.seeds),
        "disks": len(world.disks),
        "gpus_given_twice": len(world.overlaps),
    }
    await world.close()
    print(json.dumps(left), flush=True)


def main(folder: str, url: str, hub_api_url: str, gpus: str, boot_s: str) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    site = Site(Path(folder), hub_api_url=hub_api_url)
    site.url = url
    world = SlowWorld(HOST, large_inventory(HOST, int(gpus)), boot_s=float(boot_s))
    WORLDS[HOST] = world
    asyncio.run(run(site, world))


if __name__ == "__main__":
    main(*sys.argv[1:])
