"""The device moves data to and from RAM, and to nowhere else."""

from __future__ import annotations

import hashlib

from ..ports import PAGE, DmaBlock, Registers
from ..report import Outcome, Report, Subject, judged
from .control import (
    DMA_BUFFER,
    DMA_COMMAND,
    DMA_COUNT,
    DMA_DESTINATION,
    DMA_FROM_DEVICE,
    DMA_SOURCE,
    DMA_START,
    open_control,
    require_answer,
    wait_clear,
)

# Half a buffer at a time, in the middle of a page, so that the page's own edges are guards too.
_LENGTH = 2048
_INTO_PAGE = 1024
# Where in the device's buffer each round goes.  QEMU up to 8.2 aborts when a transfer touches the
# buffer's last byte, so the second half begins, and ends, eight bytes early.
_DEVICE_OFFSETS = (0, 2040)


def dma(subject: Subject, report: Report) -> Outcome:
    """RAM -> device -> RAM, compared; everything around both buffers is unchanged.

    Codes: DMA_MISMATCH (the data differ or never arrived), DMA_STRAY_WRITE (RAM beside the
    buffers, or the source, changed), DMA_TIMEOUT.
    """
    registers = open_control(subject)
    source, target = subject.machine.dma_blocks(2)
    function = subject.gpu.control_function()
    function.set_bus_master(True)
    try:
        return _rounds(registers, source, target, subject.nonce, report)
    finally:
        # A device that the last tenant drove is not left with a way into this machine's memory.
        function.set_bus_master(False)


def _rounds(
    registers: Registers, source: DmaBlock, target: DmaBlock, nonce: bytes, report: Report
) -> Outcome:
    codes: set[str] = set()
    wrong = stray = 0
    for number, offset in enumerate(_DEVICE_OFFSETS):
        report.progress("dma", number / len(_DEVICE_OFFSETS))
        # Other data each round: what the device's buffer still holds must not be the answer.
        payload = hashlib.shake_128(b"dma %d" % number + nonce).digest(_LENGTH)
        sent = _surrounded(payload, b"\xc3")
        source.write(sent)
        target.write(_surrounded(bytes(_LENGTH), b"\x3c"))
        inward = (source.physical + _INTO_PAGE, DMA_BUFFER + offset, DMA_START)
        outward = (DMA_BUFFER + offset, target.physical + _INTO_PAGE, DMA_START | DMA_FROM_DEVICE)
        for step in (inward, outward):
            if not _transfer(registers, *step):
                require_answer(registers)
                return judged(["DMA_TIMEOUT"], {"rounds": number, "wrong_bytes": wrong})
        if source.moved() or target.moved():
            raise RuntimeError("the kernel moved the buffers during the transfer")
        got = target.read()
        begin = PAGE + _INTO_PAGE
        wrong += _differing(got[begin : begin + _LENGTH], payload)
        around = _surrounded(got[begin : begin + _LENGTH], b"\x3c")
        stray += _differing(got, around) + _differing(source.read(), sent)
    if wrong:
        codes.add("DMA_MISMATCH")
    if stray:
        codes.add("DMA_STRAY_WRITE")
    if codes:
        require_answer(registers)
    rounds = len(_DEVICE_OFFSETS)
    metrics = {
        "rounds": rounds,
        "bytes": 2 * _LENGTH * rounds,
        "wrong_bytes": wrong,
        "stray_bytes": stray,
    }
    return judged(sorted(codes), metrics)


def _surrounded(payload: bytes, guard: bytes) -> bytes:
    before = PAGE + _INTO_PAGE
    return guard * before + payload + guard * (3 * PAGE - before - len(payload))


def _transfer(registers: Registers, source: int, destination: int, command: int) -> bool:
    registers.write64(DMA_SOURCE, source)
    registers.write64(DMA_DESTINATION, destination)
    registers.write64(DMA_COUNT, _LENGTH)
    registers.write64(DMA_COMMAND, command)
    return wait_clear(registers, DMA_COMMAND, DMA_START)


def _differing(left: bytes, right: bytes) -> int:
    if left == right:
        return 0
    return sum(a != b for a, b in zip(left, right, strict=True))
