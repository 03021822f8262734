"""An emulated GPU in memory, behind the service program's ports, with faults to switch on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from service_vm.program.ports import (
    ALL_ONES,
    CONTROL_IDS,
    MEMORY_IDS,
    PAGE,
    DeviceAbsentError,
    Memory,
    Registers,
    find_gpus,
)
from service_vm.program.report import Outcome, Subject

NONCE = bytes(range(16))
RAM_BASE = 0x0123_4000
IDENTITY = {
    "magic": "gpuspawner-emulated-gpu",
    "v": 1,
    "serial": "EMU-test-0",
    "uuid": "GPU-7c2f1bb0-0000-4000-8000-000000000001",
    "model": "Emulated GPU 16M",
    "vbios": "1.0",
}


class Ram:
    """RAM of the guest, from RAM_BASE on; the blocks lie in it one after the other, apart."""

    def __init__(self, pages: int = 16) -> None:
        self.data = bytearray(pages * PAGE)

    def load(self, address: int, length: int) -> bytes:
        at = address - RAM_BASE
        return bytes(self.data[at : at + length]) if 0 <= at < len(self.data) else bytes(length)

    def store(self, address: int, data: bytes) -> None:
        at = address - RAM_BASE
        if 0 <= at <= len(self.data) - len(data):
            self.data[at : at + len(data)] = data


class Block:
    def __init__(self, ram: Ram, first: int, moving: bool) -> None:
        self._ram = ram
        self._address = RAM_BASE + first * PAGE
        self._moving = moving

    @property
    def physical(self) -> int:
        return self._address + PAGE

    def read(self) -> bytes:
        return self._ram.load(self._address, 3 * PAGE)

    def write(self, data: bytes) -> None:
        self._ram.store(self._address, data)

    def moved(self) -> bool:
        return self._moving


@dataclass
class Control:
    """Registers and DMA like QEMU's edu; the fields below are its faults."""

    ram: Ram
    all_ones: bool = False
    liveness_mask: int = ALL_ONES
    identification: int = 0x010000ED
    multiply: Callable[[int], int] = math.factorial
    never_ready: bool = False
    dma_mask: int = ALL_ONES
    dma_error: int = 0  # bytes by which a write to RAM misses
    dma_overrun: int = 0  # bytes written past the end
    dma_stuck: bool = False
    bus_master: bool = False
    dma_flip: int = 0
    _live: int = 0
    _factorial: int = 0
    _wide: dict[int, int] = field(default_factory=dict)
    _buffer: bytearray = field(default_factory=lambda: bytearray(4096))

    def read32(self, offset: int) -> int:
        if self.all_ones:
            return ALL_ONES
        return {
            0x00: self.identification,
            0x04: self._live ^ self.liveness_mask,
            0x08: self._factorial,
            0x20: int(self.never_ready),
            0x98: self._wide.get(0x98, 0) & ALL_ONES,
        }[offset]

    def write32(self, offset: int, value: int) -> None:
        if offset == 0x04:
            self._live = value
        elif offset == 0x08:
            self._factorial = self.multiply(value) & ALL_ONES

    def read64(self, offset: int) -> int:
        return self._wide.get(offset, 0)

    def write64(self, offset: int, value: int) -> None:
        self._wide[offset] = value
        if offset == 0x98 and not self.dma_stuck:
            if self.bus_master:
                self._transfer(value)
            self._wide[offset] = value & ~1

    def _transfer(self, command: int) -> None:
        source, target, count = (self._wide[offset] for offset in (0x80, 0x88, 0x90))
        device = (target if command == 1 else source) - 0x40000
        # What makes QEMU 7.2 abort: an end that touches the buffer's last byte.
        assert device >= 0
        assert device + count < 4096
        if command == 1:
            self._buffer[device : device + count] = self.ram.load(source & self.dma_mask, count)
        else:
            self._buffer[device] ^= self.dma_flip
            data = bytes(self._buffer[device : device + count]) + b"\xee" * self.dma_overrun
            self.ram.store((target & self.dma_mask) + self.dma_error, data)


class PlainMemory:
    """A memory without faults; ``data`` is what an outsider sees."""

    def __init__(self, size: int = 3 << 19, identity: Mapping[str, Any] | bytes = IDENTITY) -> None:
        page = identity if isinstance(identity, bytes) else json.dumps(identity).encode()
        self.data = bytearray(page.ljust(size, b"\0"))
        self.barriers = 0
        self.on_barrier: Callable[[int], None] = lambda number: None

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.data[offset : offset + length])

    def write(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data

    def barrier(self) -> None:
        self.barriers += 1
        self.on_barrier(self.barriers)


class StuckBit(PlainMemory):
    """One bit that always reads as `value`."""

    def __init__(self, at: int, bit: int, value: int, **options: Any) -> None:
        super().__init__(**options)
        self._at, self._bit, self._value = at, bit, value

    def read(self, offset: int, length: int) -> bytes:
        data = bytearray(super().read(offset, length))
        if 0 <= self._at - offset < length:
            byte = data[self._at - offset] & ~(1 << self._bit)
            data[self._at - offset] = byte | self._value << self._bit
        return bytes(data)


class BadAddress(PlainMemory):
    """Words of 8 bytes go where `wire` sends their address (a byte address, multiple of 8)."""

    def __init__(self, wire: Callable[[int], int], grain: int = 8, **options: Any) -> None:
        super().__init__(**options)
        self._wire, self._grain = wire, grain

    def _pieces(self, offset: int, length: int) -> list[tuple[int, int]]:
        return [(at, self._wire(at)) for at in range(offset, offset + length, self._grain)]

    def read(self, offset: int, length: int) -> bytes:
        return b"".join(self.data[to : to + self._grain] for _, to in self._pieces(offset, length))

    def write(self, offset: int, data: bytes) -> None:
        for at, to in self._pieces(offset, len(data)):
            self.data[to : to + self._grain] = data[at - offset : at - offset + self._grain]


class OnesMemory(PlainMemory):
    def read(self, offset: int, length: int) -> bytes:
        return b"\xff" * length


@dataclass
class FakeFunction:
    address: str
    ids: str
    control: Control | None = None
    content: Memory | None = None
    there: bool = True

    def present(self) -> bool:
        return self.there

    def registers(self, bar: int) -> Registers:
        assert bar == 0
        if self.control is None:
            raise DeviceAbsentError("no such BAR")
        return self.control

    def memory(self, bar: int) -> Memory:
        assert bar == 2
        if self.content is None:
            raise DeviceAbsentError("no such BAR")
        return self.content

    def set_bus_master(self, on: bool) -> None:
        if self.control is not None:
            self.control.bus_master = on


@dataclass
class FakeMachine:
    found: Sequence[FakeFunction]
    ram: Ram
    moving: bool = False

    def functions(self) -> Sequence[FakeFunction]:
        return self.found

    def dma_blocks(self, count: int) -> Sequence[Block]:
        return [Block(self.ram, 5 * number, self.moving) for number in range(count)]


def subject(
    *,
    memory: Memory | None = None,
    rounds: int = 1,
    moving: bool = False,
    drop: Sequence[str] = (),
    gone: Sequence[str] = (),
    **faults: Any,
) -> tuple[Subject, Control]:
    """One GPU to check, and its control function.

    :param drop: ids of functions that are not on the bus; `gone` are there and answer nothing.
    :param faults: fields of :class:`Control`.
    """
    ram = Ram()
    control = Control(ram, **faults)
    functions = [
        FakeFunction("0000:01:00.0", CONTROL_IDS, control=control),
        FakeFunction("0000:01:00.1", MEMORY_IDS, content=memory or PlainMemory()),
    ]
    kept = [function for function in functions if function.ids not in drop]
    for function in kept:
        function.there = function.ids not in gone
    machine = FakeMachine(kept, ram, moving)
    return Subject(machine, find_gpus(machine.functions()), NONCE, rounds), control


@dataclass
class Recorder:
    """A report that keeps what it is told."""

    devices: list[Mapping[str, Any]] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    fractions: list[tuple[str, float]] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    on_begin: Callable[[str], None] = lambda check: None

    def identity(self, devices: Sequence[Mapping[str, Any]]) -> None:
        self.devices += devices

    def begin(self, check: str) -> None:
        self.begun.append(check)
        self.on_begin(check)

    def progress(self, check: str, fraction: float) -> None:
        self.fractions.append((check, fraction))

    def result(self, check: str, outcome: Outcome, seconds: float) -> None:
        assert seconds >= 0
        self.outcomes[check] = outcome
