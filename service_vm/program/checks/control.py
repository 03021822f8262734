"""Registers of the emulated GPU's control function (QEMU: docs/specs/edu.rst)."""

from __future__ import annotations

import time

from ..ports import ALL_ONES, CONTROL_BAR, DeviceAbsentError, Registers
from ..report import Subject

IDENTIFICATION = 0x00
IDENTIFICATION_VALUE = 0x010000ED
LIVENESS = 0x04
FACTORIAL = 0x08
STATUS = 0x20
STATUS_COMPUTING = 0x01
DMA_SOURCE = 0x80
DMA_DESTINATION = 0x88
DMA_COUNT = 0x90
DMA_COMMAND = 0x98
DMA_START = 0x01
DMA_FROM_DEVICE = 0x02
DMA_BUFFER = 0x40000
DMA_BUFFER_BYTES = 4096

WAIT_S = 10.0


def open_control(subject: Subject) -> Registers:
    """The registers of the GPU under test.

    :raises DeviceAbsentError: it is missing, or reads as all ones.
    """
    registers = subject.gpu.control_function().registers(CONTROL_BAR)
    require_answer(registers)
    return registers


def require_answer(registers: Registers) -> None:
    """:raises DeviceAbsentError: the registers read as all ones."""
    if registers.read32(IDENTIFICATION) == ALL_ONES:
        raise DeviceAbsentError("the control function's registers read as all ones")


def wait_clear(registers: Registers, offset: int, bit: int, seconds: float = WAIT_S) -> bool:
    """Whether `bit` of the register at `offset` became 0 within `seconds`."""
    deadline = time.monotonic() + seconds
    while registers.read32(offset) & bit:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
