"""A scripted GPU host: the allocator's driver seam played in memory.

The lowest layer that a test without libvirt can have. The ``World`` is what a real host would be:
it outlives the allocator, so that a test can stop one allocator and start another against it. A
lease's guest answers HTTP on an address of the loopback range; a service guest writes the report
that the test's script says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from gpuspawner.host.api import Channel, Guest, GuestSpec, HostError, HostTimeout, Image, Rung
from gpuspawner.host.inspection import Finding, Inspection, inspect_declared
from gpuspawner.pool.topology import Gpu, Inventory, Node
from gpuspawner.pool.verdict import Witness
from tests.layers import wait_for_async

IDS = ("1234:11e8", "1af4:1110")
CHECKS = ("identity", "liveness", "known_answer", "dma", "residue", "overwrite", "read_back")


def inventory(host: str, gpus: int = 2, cores: int = 4, boot_id: str = "boot-1") -> Inventory:
    """Two NUMA nodes; GPU n is on node n % 2."""
    nodes = tuple(
        Node(n, tuple((n * cores + c,) for c in range(cores)), 65536, 2048) for n in range(2)
    )
    return Inventory(
        host=host,
        boot_id=boot_id,
        nodes=nodes,
        gpus=tuple(
            Gpu(
                address=f"0000:{0x40 + n:02x}:00.0",
                model="Emulated GPU 16M",
                node=n % 2,
                functions=(f"0000:{0x40 + n:02x}:00.0", f"0000:{0x40 + n:02x}:00.1"),
                group=n,
                ids=IDS,
                memory_mib=16,
                emulated=True,
            )
            for n in range(gpus)
        ),
        emulated=True,
    )


def report(run: str, nonce: str, gpu: str, **changes: Any) -> list[dict[str, Any]]:
    """The lines of a run that passes. ``changes`` replace the status of a check by name, or
    ``serial``."""
    device = {
        "kind": "emulated",
        "serial": changes.pop("serial", f"EMU-{gpu}"),
        "uuid": f"GPU-{gpu}",
        "model": "Emulated GPU 16M",
        "vbios": "1.0",
        "memory_mib": 16,
        "functions": [{"guest_address": "0000:01:00.0", "pci": pci} for pci in IDS],
    }
    lines: list[dict[str, Any]] = [
        {"t": "hello", "image": "sha256:1", "agent": "1", "boot_s": 1.0},
        {"t": "identity", "devices": [device]},
    ]
    checks = [check for check in CHECKS if changes.get(check) != "missing"]
    lines += [
        {"t": "result", "check": check, "status": changes.get(check, "pass"), "seconds": 0.1}
        for check in checks
    ]
    lines.append({"t": "final", "ended": "complete", "checks": len(checks)})
    return [
        {"v": 1, "run": run, "nonce": nonce, "seq": seq, **line} for seq, line in enumerate(lines)
    ]


Script = Callable[[str, str, str], list[bytes]]


def encode(lines: list[dict[str, Any]]) -> list[bytes]:
    """Lines as they come over the port."""
    return [json.dumps(line).encode() + b"\n" for line in lines]


@dataclass
class World:
    """One host as it really is, whatever the allocator believes."""

    name: str
    inventory: Inventory
    specs: dict[str, GuestSpec] = field(default_factory=dict)
    seeds: dict[str, bytes] = field(default_factory=dict)
    ejected: set[str] = field(default_factory=set)
    homes: dict[str, int] = field(default_factory=dict)
    disks: set[str] = field(default_factory=set)
    images: set[str] = field(default_factory=set)
    servers: dict[str, asyncio.Server] = field(default_factory=dict)
    resets: list[str] = field(default_factory=list)
    history: list[tuple[str, str]] = field(default_factory=list)  # (what, uuid), in order
    script: Script = lambda run, nonce, gpu: encode(report(run, nonce, gpu))
    findings: tuple[Finding, ...] = ()
    gone: set[str] = field(default_factory=set)
    on_recover: Callable[[str], tuple[Rung, ...]] = lambda address: ()
    blocked: frozenset[str] = frozenset()
    held: set[str] = field(default_factory=set)
    silent: bool = False  # guests do not answer HTTP
    mute: bool = False  # guests take HTTP connections and say nothing
    deaf: bool = False  # guests ignore the power button
    fail: dict[str, HostError] = field(default_factory=dict)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    frozen: asyncio.Event | None = None  # every call waits for it, ``patience_s`` at most
    patience_s: float = 0.3
    changed: Callable[[str], None] = lambda uuid: None
    overlaps: list[str] = field(default_factory=list)

    async def enter(self, what: str, uuid: str = "") -> None:
        """A call arrives: it may be held back, and it may fail."""
        self.history.append((what, uuid))
        if what in self.gates:
            await self.gates[what].wait()
        await self.breathe()
        if what in self.fail:
            raise self.fail[what]

    def freeze(self, patience_s: float = 0.3) -> None:
        """No call is answered from now on; each is given up after ``patience_s``."""
        self.frozen = asyncio.Event()
        self.patience_s = patience_s

    def thaw(self) -> None:
        """The host goes on; calls that still wait take effect."""
        assert self.frozen is not None
        self.frozen.set()
        self.frozen = None

    async def breathe(self) -> None:
        """Held up while the host is frozen, as every call of a real one is."""
        if self.frozen is None:
            return
        try:
            async with asyncio.timeout(self.patience_s):
                await self.frozen.wait()
        except TimeoutError:
            raise HostTimeout(f"Host {self.name} did not answer in time.") from None

    async def boot(self, spec: GuestSpec) -> None:
        """The guest starts. Two guests with one GPU would be the worst defect there is."""
        for other in self.specs.values():
            shared = {gpu.address for gpu in other.gpus} & {gpu.address for gpu in spec.gpus}
            if shared:
                self.overlaps.append(f"{shared} in {other.uuid} and {spec.uuid}")
        self.specs[spec.uuid] = spec
        if not self.silent:
            await self.serve(spec)

    async def serve(self, spec: GuestSpec) -> None:
        """The guest's server begins to listen."""
        if spec.nic is not None:
            self.servers[spec.uuid] = await asyncio.start_server(
                _hold if self.mute else _answer, spec.nic.address, 8888, reuse_address=True
            )

    async def end(self, uuid: str) -> None:
        """The guest is gone, for whatever reason."""
        self.specs.pop(uuid, None)
        server = self.servers.pop(uuid, None)
        if server is not None:
            server.close()
            await server.wait_closed()
        self.changed(uuid)

    async def close(self) -> None:
        """The machine room burns down."""
        for uuid in list(self.specs):
            await self.end(uuid)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await writer.drain()
    writer.close()


async def _hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(1024):
            pass
    writer.close()


class ScriptedChannel(Channel):
    """The service guest's end of the port."""

    def __init__(self, world: World, spec: GuestSpec) -> None:
        self.world = world
        self.spec = spec

    async def read(self) -> AsyncIterator[bytes]:
        """The script's lines, then silence while the guest lives."""
        words = dict(word.split("=", 1) for word in self.spec.extra_cmdline.split() if "=" in word)
        for line in self.world.script(
            words["gpuspawner.run"], words["gpuspawner.nonce"], self.spec.gpus[0].address
        ):
            yield line
        await wait_for_async(lambda: self.spec.uuid not in self.world.specs, 3600, "the end")

    async def write(self, data: bytes) -> None:
        """The acknowledgement: the guest powers off."""
        self.world.history.append(("ack", self.spec.uuid))

    async def close(self) -> None:
        """Nothing to let go of."""


class ScriptedHost:
    """``GpuHost`` over a ``World``."""

    accel = "kvm"

    def __init__(self, world: World) -> None:
        self.world = world
        self.name = world.name

    async def open(self, on_change: Callable[[str], None]) -> None:
        await self.world.enter("open")
        self.world.changed = on_change

    async def close(self) -> None:
        self.world.changed = lambda uuid: None

    async def block(self, networks: frozenset[str]) -> None:
        self.world.blocked = networks

    async def survey(self) -> Inventory:
        await self.world.enter("survey")
        return self.world.inventory

    async def inspect(self) -> Inspection:
        await self.world.enter("inspect")
        return replace(inspect_declared(self.world.inventory), findings=self.world.findings)

    async def gateway(self) -> str:
        await self.world.breathe()
        return "127.200.0.1"

    async def witness(self, address: str) -> Witness:
        await self.world.enter("witness", address)
        present = address not in self.world.gone
        return Witness(address, present, self.world.inventory.boot_id, IDS if present else ())

    async def reset(self, address: str) -> None:
        await self.world.enter("reset", address)
        self.world.resets.append(address)

    async def recover(self, address: str) -> tuple[Rung, ...]:
        await self.world.enter("recover", address)
        return self.world.on_recover(address)

    async def released(self, address: str) -> bool:
        await self.world.enter("released", address)
        return address not in self.world.held

    async def images(self) -> frozenset[str]:
        await self.world.breathe()
        return frozenset(self.world.images)

    async def put_image(self, image: Image, progress: Callable[[int, int], None]) -> None:
        await self.world.enter("put_image", image.name)
        progress(1, 1)
        self.world.images.add(image.digest)

    async def make_home(self, volume: str, size_mib: int) -> bool:
        await self.world.enter("make_home", volume)
        new = volume not in self.world.homes
        self.world.homes.setdefault(volume, size_mib)
        return new

    async def drop_home(self, volume: str) -> None:
        await self.world.breathe()
        self.world.homes.pop(volume, None)

    async def make_disks(self, spec: GuestSpec) -> None:
        await self.world.enter("make_disks", spec.uuid)
        self.world.disks.add(spec.uuid)

    async def put_seed(self, uuid: str, content: bytes) -> None:
        await self.world.enter("put_seed", uuid)
        self.world.seeds[uuid] = content

    async def create(self, spec: GuestSpec) -> None:
        await self.world.enter("create", spec.uuid)
        if spec.uuid not in self.world.specs:
            await self.world.boot(spec)
            self.world.changed(spec.uuid)

    async def eject_seed(self, uuid: str) -> None:
        await self.world.enter("eject_seed", uuid)
        self.world.seeds.pop(uuid, None)
        self.world.ejected.add(uuid)

    async def guests(self) -> list[Guest]:
        await self.world.breathe()
        return [Guest(s.uuid, s.kind, "running", s.labels) for s in self.world.specs.values()]

    async def guest(self, uuid: str) -> Guest | None:
        await self.world.enter("guest", uuid)
        spec = self.world.specs.get(uuid)
        return None if spec is None else Guest(uuid, spec.kind, "running", spec.labels)

    async def shutdown(self, uuid: str) -> None:
        await self.world.enter("shutdown", uuid)
        if not self.world.deaf:
            await self.world.end(uuid)

    async def resume(self, uuid: str) -> None:
        await self.world.enter("resume", uuid)

    async def destroy(self, uuid: str) -> None:
        await self.world.enter("destroy", uuid)
        if uuid in self.world.specs:
            await self.world.end(uuid)

    async def disk_owners(self) -> frozenset[str]:
        return frozenset(self.world.disks | set(self.world.seeds))

    async def drop_disks(self, uuid: str) -> None:
        await self.world.enter("drop_disks", uuid)
        self.world.disks.discard(uuid)
        self.world.seeds.pop(uuid, None)

    async def console(self, uuid: str, last_bytes: int = 16384) -> str:
        await self.world.breathe()
        return "Linux version 6.1\ngpuspawner: starting\nthe last line of the console"

    async def drop_console(self, uuid: str) -> None:
        await self.world.breathe()
        return None

    async def open_channel(self, uuid: str, port: str) -> Channel:
        await self.world.enter("open_channel", uuid)
        if uuid not in self.world.specs:
            raise HostError("There is no such guest.")
        return ScriptedChannel(self.world, self.world.specs[uuid])


WORLDS: dict[str, World] = {}


def scripted_host(name: str, settings: dict[str, Any], _driver: Any) -> ScriptedHost:
    """``Allocator.driver`` of these tests."""
    if name not in WORLDS:
        raise HostError(f"There is no machine behind {name}.", "Add one that there is.")
    return ScriptedHost(WORLDS[name])


Wait = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
