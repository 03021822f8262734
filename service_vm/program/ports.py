"""The seam between checks and hardware.

Checks know only these classes.  ``sysfs`` implements them on a running kernel; the unit tests
implement them in memory, with faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

ALL_ONES = 0xFFFFFFFF
PAGE = 4096


class DeviceAbsentError(Exception):
    """The function is not there, or answers with all ones: it fell off the bus."""


class Registers(Protocol):
    """A mapped register BAR.  Each call is exactly one access of the named width."""

    def read32(self, offset: int) -> int: ...

    def write32(self, offset: int, value: int) -> None: ...

    def read64(self, offset: int) -> int: ...

    def write64(self, offset: int, value: int) -> None: ...


class Memory(Protocol):
    """A mapped memory BAR of `size` bytes."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes: ...

    def write(self, offset: int, data: bytes) -> None: ...

    def barrier(self) -> None:
        """Drain writes to the device and forget the mapping: later reads come from the device."""
        ...


class Function(Protocol):
    """One PCI function."""

    @property
    def address(self) -> str:
        """Address in this guest, ``0000:01:00.0``; the host's differs."""
        ...

    @property
    def ids(self) -> str:
        """``vendor:device``, four hex digits each."""
        ...

    def present(self) -> bool:
        """Whether config space answers right now."""
        ...

    def registers(self, bar: int) -> Registers: ...

    def memory(self, bar: int) -> Memory: ...

    def set_bus_master(self, on: bool) -> None:
        """Let the function start DMA, or forbid it."""
        ...


class DmaBlock(Protocol):
    """Three pages of RAM, neighbours in physical memory too, locked.

    The middle one is for the device; a write that misses it by less than a page shows in the
    others.
    """

    @property
    def physical(self) -> int:
        """Physical address of the middle page."""
        ...

    def read(self) -> bytes:
        """All three pages."""
        ...

    def write(self, data: bytes) -> None:
        """Set all three pages."""
        ...

    def moved(self) -> bool:
        """Whether the kernel has moved the pages since."""
        ...


class Machine(Protocol):
    """The guest that the program runs in."""

    def functions(self) -> Sequence[Function]:
        """All PCI functions, by address."""
        ...

    def dma_blocks(self, count: int) -> Sequence[DmaBlock]:
        """`count` blocks that do not overlap.

        :raises OSError: no neighbouring pages were found.
        """
        ...


@dataclass(frozen=True)
class Gpu:
    """One emulated GPU: the functions of one slot.  None stands for a function that is missing."""

    control: Function | None
    memory: Function | None

    def control_function(self) -> Function:
        """:raises DeviceAbsentError: it is missing or does not answer."""
        return _answering(self.control, "control function")

    def memory_function(self) -> Function:
        """:raises DeviceAbsentError: it is missing or does not answer."""
        return _answering(self.memory, "memory function")

    def lost(self) -> bool:
        """Whether a function that was found no longer answers."""
        found = (self.control, self.memory)
        return any(function is not None and not function.present() for function in found)


def _answering(function: Function | None, name: str) -> Function:
    if function is None:
        raise DeviceAbsentError(f"no {name} on the bus")
    if not function.present():
        raise DeviceAbsentError(f"{name} {function.address} does not answer")
    return function


CONTROL_IDS = "1234:11e8"
"""QEMU's ``edu``: registers and DMA."""
MEMORY_IDS = "1af4:1110"
"""QEMU's ``ivshmem-plain``: BAR 2 is memory that outlives the VM."""
CONTROL_BAR = 0
MEMORY_BAR = 2


def find_gpus(functions: Sequence[Function]) -> list[Gpu]:
    """The emulated GPUs among `functions`, by address; functions of one slot are one GPU."""
    slots: dict[str, dict[str, Function]] = {}
    for function in functions:
        if function.ids in (CONTROL_IDS, MEMORY_IDS):
            slot = function.address.rpartition(".")[0]
            slots.setdefault(slot, {}).setdefault(function.ids, function)
    return [
        Gpu(found.get(CONTROL_IDS), found.get(MEMORY_IDS)) for _, found in sorted(slots.items())
    ]
