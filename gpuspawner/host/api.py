"""What the allocator asks of a GPU host.

``GpuHost`` is the seam: the libvirt driver implements it, and so may any other. Every method is
bounded by a deadline of its own and raises ``HostError`` with a remedy; none of them blocks the
event loop. Methods that create are idempotent: what exists already is success.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gpuspawner.host.inspection import Inspection
from gpuspawner.pool.topology import Claim, Gpu, Inventory
from gpuspawner.pool.verdict import Witness


class HostError(Exception):
    """The host refused or failed. ``remedy`` says what an admin does next."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} {self.remedy}".strip()


class HostTimeout(HostError):
    """A call passed its deadline and was abandoned; whether it took effect is unknown."""


class HostUnreachable(HostError):
    """The host does not answer at all."""


class HostFull(HostError):
    """The host's disk has no room for what was to be written."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """One file of an image as it lies on the allocator's side."""

    path: Path
    sha256: str
    bytes: int
    format: str = "raw"
    virtual_mib: int = 0


@dataclass(frozen=True, slots=True)
class Image:
    """An image to boot from. ``digest`` names it for good; ``files`` has ``kernel``, ``initrd``
    and, unless the image runs from its initrd alone, ``root``."""

    name: str
    digest: str  # "sha256:<hex>"
    cmdline: str
    files: Mapping[str, ImageFile]
    min_memory_mib: int = 0


@dataclass(frozen=True, slots=True)
class Nic:
    """A guest's network card: its fixed MAC and the one address that it may use."""

    mac: str
    address: str  # without prefix


@dataclass(frozen=True, slots=True)
class GuestSpec:
    """One VM, whole. ``uuid`` is the domain's UUID and the lease's or diagnosis' id, so that
    creating twice cannot make two. ``kind`` is ``lease`` or ``service``."""

    uuid: str
    kind: str
    title: str
    claim: Claim
    gpus: tuple[Gpu, ...]
    image: Image
    extra_cmdline: str = ""
    nic: Nic | None = None
    home: str | None = None  # volume name
    seed: bool = False
    channel: str | None = None  # name of a virtio-serial port
    labels: Mapping[str, str] = field(default_factory=dict)  # into the domain's metadata


@dataclass(frozen=True, slots=True)
class Rung:
    """One step that was tried to bring a GPU back; ``failure`` says why it could not be done."""

    step: str
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Guest:
    """A VM of this installation that the host has. ``state`` is ``running``, ``paused``,
    ``shutting`` or ``gone``. A VM is paused when its disk has no room for what it writes."""

    uuid: str
    kind: str
    state: str
    labels: Mapping[str, str] = field(default_factory=dict)


class Channel(Protocol):
    """Both ways of a guest's virtio-serial port."""

    def read(self) -> AsyncIterator[bytes]:
        """Chunks as they come; ends when the port or the guest is gone."""
        ...

    async def write(self, data: bytes) -> None:
        """Send all of it."""
        ...

    async def close(self) -> None:
        """Let go of the port."""
        ...


class GpuHost(Protocol):
    """One host. ``on_change`` is called (from the event loop) when a guest starts or ends."""

    name: str

    async def open(self, on_change: Callable[[str], None]) -> None:
        """Connect, make pool and network ready, subscribe to events."""
        ...

    async def close(self) -> None:
        """Let go of connections and threads; guests go on."""
        ...

    async def block(self, networks: frozenset[str]) -> None:
        """Networks that guests must not reach, from the next survey on: other hosts' guests."""
        ...

    async def survey(self) -> Inventory:
        """What the host has now."""
        ...

    async def inspect(self) -> Inspection:
        """The host as it is now, and what there is to put right on it."""
        ...

    async def gateway(self) -> str:
        """The host's address on the guests' network, without prefix."""
        ...

    async def witness(self, address: str) -> Witness:
        """What the host itself sees of a GPU that no guest uses."""
        ...

    async def reset(self, address: str) -> None:
        """Reset the GPU in this slot, all functions of it."""
        ...

    async def recover(self, address: str) -> tuple[Rung, ...]:
        """Try to bring back a GPU that does not answer; what was tried. Whether it answers now,
        ``witness`` tells. Nothing is tried with an emulated GPU."""
        ...

    async def released(self, address: str) -> bool:
        """No process holds the GPU any more."""
        ...

    async def images(self) -> frozenset[str]:
        """Digests of the images that lie on the host, whole."""
        ...

    async def put_image(self, image: Image, progress: Callable[[int, int], None]) -> None:
        """Copy an image onto the host; ``progress(done, total)`` in bytes."""
        ...

    async def make_home(self, volume: str, size_mib: int) -> bool:
        """Make the home volume unless it is there; true if it was made now."""
        ...

    async def drop_home(self, volume: str) -> None:
        """Delete a home volume for good."""
        ...

    async def make_disks(self, spec: GuestSpec) -> None:
        """The throw-away overlay over the image's root, and an empty console log."""
        ...

    async def put_seed(self, uuid: str, content: bytes) -> None:
        """Write the seed disk of a guest that is not made yet."""
        ...

    async def create(self, spec: GuestSpec) -> None:
        """Start the VM. Success when it is there already."""
        ...

    async def eject_seed(self, uuid: str) -> None:
        """Take the seed disk out of the running guest and delete it."""
        ...

    async def guests(self) -> list[Guest]:
        """This installation's VMs on the host."""
        ...

    async def guest(self, uuid: str) -> Guest | None:
        """One VM, or ``None`` if the host has none with this UUID."""
        ...

    async def shutdown(self, uuid: str) -> None:
        """Press the ACPI power button; returns at once."""
        ...

    async def resume(self, uuid: str) -> None:
        """Let a VM go on that is paused because its disk had no room. It is paused again at once
        if there still is none."""
        ...

    async def destroy(self, uuid: str) -> None:
        """End the VM now. Success when it is gone already."""
        ...

    async def disk_owners(self) -> frozenset[str]:
        """UUIDs of the guests, living or dead, that have an overlay, seed or console here."""
        ...

    async def drop_disks(self, uuid: str) -> None:
        """Delete the guest's overlay and seed. The console log stays."""
        ...

    async def console(self, uuid: str, last_bytes: int = 16384) -> str:
        """The end of the guest's serial console, control characters removed."""
        ...

    async def drop_console(self, uuid: str) -> None:
        """Delete the guest's console log."""
        ...

    async def open_channel(self, uuid: str, port: str) -> Channel:
        """Open a virtio-serial port of a running guest. What the guest wrote before waits."""
        ...
