"""The device answers with what it computes itself, not with what a bus floats to."""

from __future__ import annotations

from ..ports import ALL_ONES
from ..report import Outcome, Report, Subject, judged
from .control import IDENTIFICATION, IDENTIFICATION_VALUE, LIVENESS, open_control, require_answer

# Every bit both ways, neighbours equal and unequal, and bytes that tell their order.
_PROBES = (0x00000000, 0xFFFFFFFF, 0x55555555, 0xAAAAAAAA, 0x12345678)


def liveness(subject: Subject, report: Report) -> Outcome:
    """The identification register holds its constant; the liveness register inverts.

    Codes: ID_MISMATCH, LIVENESS_MISMATCH.
    """
    registers = open_control(subject)
    codes = []
    found = registers.read32(IDENTIFICATION)
    if found != IDENTIFICATION_VALUE:
        codes.append("ID_MISMATCH")
    wrong = 0
    for probe in _PROBES:
        registers.write32(LIVENESS, probe)
        wrong += registers.read32(LIVENESS) != probe ^ ALL_ONES
    if wrong:
        require_answer(registers)
        codes.append("LIVENESS_MISMATCH")
    return judged(codes, {"id": found, "probes": len(_PROBES), "wrong": wrong})
