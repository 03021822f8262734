"""Whether guests can run under KVM: decided by booting one, never by ``/dev/kvm`` being there.

A host may have the device and yet hang every guest, or abort QEMU (nested virtualization that is
not all there). So a service VM without a GPU is booted under KVM and given 20 s to say
hello, or longer on a host on which QEMU's start alone takes long (one that is itself emulated).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import uuid
from collections.abc import Callable
from typing import Protocol

from gpuspawner.host.api import Channel, GuestSpec, HostError, Image
from gpuspawner.host.guests import PROBE
from gpuspawner.pool.topology import Cell, Claim, Inventory

log = logging.getLogger(__name__)

PORT = "org.gpuspawner.service.0"
BOOT_S = 20.0
_STARTS = 4.0  # or as long as so many starts of QEMU
_MIN_MEMORY_MIB = 512


class Prober(Protocol):
    """What the probe needs of a host."""

    name: str

    async def put_image(self, image: Image, progress: Callable[[int, int], None]) -> None: ...
    async def make_disks(self, spec: GuestSpec) -> None: ...
    async def create(self, spec: GuestSpec) -> None: ...
    async def open_channel(self, uuid: str, port: str) -> Channel: ...
    async def destroy(self, uuid: str) -> None: ...
    async def drop_disks(self, uuid: str) -> None: ...
    async def drop_console(self, uuid: str) -> None: ...


async def find(host: Prober, inventory: Inventory, image: Image | None, *, kvm: bool) -> str:
    """How guests run on the host: ``kvm`` or ``tcg``. ``image`` is the service VM's, and ``kvm``
    whether libvirt offers it."""
    if not kvm or image is None:
        why = "libvirt offers none" if not kvm else "nothing to boot"
        log.info("host %s: no KVM (%s), guests run under TCG", host.name, why)
        return "tcg"
    await host.put_image(image, lambda _done, _total: None)
    why = await says_hello(host, probe_spec(image, inventory))
    if why:
        log.warning("host %s: KVM does not work (%s), guests run under TCG", host.name, why)
    return "tcg" if why else "kvm"


def probe_spec(image: Image, inventory: Inventory) -> GuestSpec:
    """The smallest guest that says hello: one core, no GPU, no network. Nodes without CPUs or
    memory cannot carry it."""
    node = next(
        (node for node in inventory.nodes if node.cores and node.memory_mib), inventory.nodes[0]
    )
    cores = [*inventory.system_cores, *node.cores]
    own = next(core for core in cores if core in node.cores)
    memory_mib = max(image.min_memory_mib, _MIN_MEMORY_MIB)
    return GuestSpec(
        uuid=str(uuid.uuid4()),
        kind=PROBE,
        title="gpuspawner: does KVM work?",
        claim=Claim(inventory.host, (), (Cell(node.id, (own,), memory_mib),)),
        gpus=(),
        image=image,
        extra_cmdline=(
            f"gpuspawner.run={uuid.uuid4()} gpuspawner.nonce={secrets.token_hex(16)} "
            "gpuspawner.tier=L1"
        ),
        channel=PORT,
    )


async def says_hello(host: Prober, spec: GuestSpec) -> str:
    """Boot ``spec`` and wait for its first words. Empty if they came, else why not."""
    patience_s = BOOT_S
    try:
        await host.make_disks(spec)
        began = time.monotonic()
        await host.create(spec)
        patience_s = max(BOOT_S, _STARTS * (time.monotonic() - began))
        async with asyncio.timeout(patience_s):
            channel = await host.open_channel(spec.uuid, PORT)
            try:
                async for _chunk in channel.read():
                    return ""
                return "the VM ended before it said anything"
            finally:
                await asyncio.shield(channel.close())
    except TimeoutError:
        return f"it said nothing within {patience_s:.0f} s"
    except HostError as error:
        return str(error)
    finally:
        await asyncio.shield(_clean_up(host, spec.uuid))


async def _clean_up(host: Prober, guest: str) -> None:
    for step in (host.destroy, host.drop_disks, host.drop_console):
        with contextlib.suppress(HostError):
            await step(guest)
