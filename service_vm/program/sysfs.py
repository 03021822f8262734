"""The ports on a running Linux kernel: sysfs, mmap and /proc/self/pagemap.  Needs root."""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import select
import time
from collections.abc import Sequence
from pathlib import Path

from .ports import PAGE, DeviceAbsentError

_DEVICES = Path("/sys/bus/pci/devices")
_COMMAND = 4  # offset of the command register in config space
_COMMAND_MEMORY = 1 << 1
_COMMAND_BUS_MASTER = 1 << 2
_DMA_PAGES = (1 << 32) // PAGE  # what an emulated GPU can address
_MAP_LOCKED = 0x2000  # x86; the mmap module of 3.11 has no name for it


class MappedRegisters:
    """Registers through an mmap of a BAR.

    Items of a cast memoryview are read and written by one load or store of their size; slices of
    an mmap give no such promise, and ``edu`` ignores other widths below 0x80.
    """

    def __init__(self, path: Path) -> None:
        with _open(path) as handle:
            view = memoryview(mmap.mmap(handle.fileno(), PAGE))
        self._narrow = view.cast("I")
        self._wide = view.cast("Q")

    def read32(self, offset: int) -> int:
        return self._narrow[offset // 4]

    def write32(self, offset: int, value: int) -> None:
        self._narrow[offset // 4] = value

    def read64(self, offset: int) -> int:
        return self._wide[offset // 8]

    def write64(self, offset: int, value: int) -> None:
        self._wide[offset // 8] = value


class MappedMemory:
    """Memory through an mmap of a BAR, write-combining where the kernel offers it."""

    def __init__(self, directory: Path, bar: int) -> None:
        combining = directory / f"resource{bar}_wc"
        self._path = combining if combining.exists() else directory / f"resource{bar}"
        self._config = directory / "config"
        with _open(self._path) as handle:
            self._size = os.fstat(handle.fileno()).st_size
        if self._size == 0:
            raise DeviceAbsentError(f"BAR {bar} of {directory.name} has no memory")
        self._map = self._mapped()

    def _mapped(self) -> mmap.mmap:
        with _open(self._path) as handle:
            return mmap.mmap(handle.fileno(), self._size)

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        return self._map[offset : offset + length]

    def write(self, offset: int, data: bytes) -> None:
        self._map[offset : offset + len(data)] = data

    def barrier(self) -> None:
        # Unmapping invalidates the TLB, which serialises the processor and drains its write
        # buffers; a read from the device then pushes posted writes ahead of itself (PCI ordering
        # rules).  The new mapping shares nothing with the old one.
        self._map.close()
        self._config.read_bytes()
        self._map = self._mapped()


def _open(path: Path) -> io.FileIO:
    try:
        return path.open("r+b", buffering=0)
    except FileNotFoundError as error:
        raise DeviceAbsentError(f"{path.parent.name} has no {path.name}") from error


class SysfsFunction:
    """A PCI function below /sys/bus/pci/devices."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._address = directory.name
        vendor, device = ((directory / name).read_text() for name in ("vendor", "device"))
        self._ids = f"{int(vendor, 16):04x}:{int(device, 16):04x}"

    @property
    def address(self) -> str:
        return self._address

    @property
    def ids(self) -> str:
        return self._ids

    def present(self) -> bool:
        # From config space itself: the files ``vendor`` and ``device`` are the kernel's memory.
        try:
            with (self._directory / "config").open("rb", buffering=0) as handle:
                return handle.read(4) not in (b"", b"\xff" * 4)
        except OSError:
            return False

    def registers(self, bar: int) -> MappedRegisters:
        self._enable()
        return MappedRegisters(self._directory / f"resource{bar}")

    def memory(self, bar: int) -> MappedMemory:
        self._enable()
        return MappedMemory(self._directory, bar)

    def set_bus_master(self, on: bool) -> None:
        self._set_command(_COMMAND_BUS_MASTER, on)

    def _enable(self) -> None:
        """No driver claims the function, so its BARs are off until someone asks."""
        try:
            (self._directory / "enable").write_text("1")
        except FileNotFoundError as error:
            raise DeviceAbsentError(f"{self._address} is gone") from error
        self._set_command(_COMMAND_MEMORY, True)

    def _set_command(self, bit: int, on: bool) -> None:
        with _open(self._directory / "config") as handle:
            command = int.from_bytes(os.pread(handle.fileno(), 2, _COMMAND), "little")
            wanted = command | bit if on else command & ~bit
            os.pwrite(handle.fileno(), wanted.to_bytes(2, "little"), _COMMAND)


class _Arena:
    """Locked anonymous memory whose physical addresses are known."""

    def __init__(self, pages: int) -> None:
        self.map = mmap.mmap(-1, pages * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_LOCKED)
        self._virtual = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self._pages = pages

    def physical_pages(self, first: int, count: int) -> list[int]:
        """Physical page numbers of `count` pages from page `first` on; 0 is "not present"."""
        with open("/proc/self/pagemap", "rb", buffering=0) as handle:
            entries = os.pread(handle.fileno(), 8 * count, 8 * (self._virtual // PAGE + first))
        # Bits 0-54 are the page number, bit 63 "present" (Documentation/admin-guide/mm/pagemap).
        return [
            entry & ((1 << 55) - 1) if entry >> 63 else 0 for entry in memoryview(entries).cast("Q")
        ]

    def runs(self, length: int) -> list[int]:
        """First pages of separate runs of `length` pages that are neighbours physically too, and
        lie where the device can reach them."""
        numbers = self.physical_pages(0, self._pages)
        found = []
        at = 0
        while at + length <= self._pages:
            run = numbers[at : at + length]
            reachable = 0 < run[0] < _DMA_PAGES - length
            if reachable and run == list(range(run[0], run[0] + length)):
                found.append(at)
                at += length
            else:
                at += 1
        return found


class PinnedBlock:
    """Three pages of an arena."""

    def __init__(self, arena: _Arena, first: int) -> None:
        self._arena = arena
        self._first = first
        self._numbers = arena.physical_pages(first, 3)

    @property
    def physical(self) -> int:
        return self._numbers[1] * PAGE

    def read(self) -> bytes:
        return self._arena.map[self._first * PAGE : (self._first + 3) * PAGE]

    def write(self, data: bytes) -> None:
        self._arena.map[self._first * PAGE : (self._first + 3) * PAGE] = data

    def moved(self) -> bool:
        return self._arena.physical_pages(self._first, 3) != self._numbers


class SysfsMachine:
    """This machine."""

    def functions(self) -> Sequence[SysfsFunction]:
        return [SysfsFunction(path) for path in sorted(_DEVICES.iterdir())]

    def dma_blocks(self, count: int) -> Sequence[PinnedBlock]:
        for pages in (256, 4096):
            arena = _Arena(pages)
            runs = arena.runs(3)
            if len(runs) >= count:
                return [PinnedBlock(arena, first) for first in runs[:count]]
        raise OSError("no neighbouring pages of memory for the DMA buffers")


class VirtioPort:
    """A virtio-serial port, by its name.

    :raises TimeoutError: no such port within `wait_s`.
    """

    def __init__(self, name: str, wait_s: float = 30.0) -> None:
        deadline = time.monotonic() + wait_s
        while (device := self._find(name)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no virtio port {name}")
            time.sleep(0.02)
        self._fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    @staticmethod
    def _find(name: str) -> Path | None:
        # The links in /dev/virtio-ports are udev's work, and there is no udev here.
        for entry in Path("/sys/class/virtio-ports").glob("vport*"):
            device = Path("/dev") / entry.name
            if (entry / "name").read_text().strip() == name and device.exists():
                return device
        return None

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]

    def read(self, timeout_s: float) -> bytes:
        events = self._poll.poll(timeout_s * 1000)
        data = os.read(self._fd, 65536) if events and events[0][1] & select.POLLIN else b""
        if events and not data:
            time.sleep(min(0.1, timeout_s))  # nobody at the other end: poll returns at once
        return data
