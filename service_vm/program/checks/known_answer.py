"""The device computes right: answers known in advance, so that a fault that repeats shows too."""

from __future__ import annotations

from ..report import Outcome, Report, Subject, judged
from .control import FACTORIAL, STATUS, STATUS_COMPUTING, open_control, require_answer, wait_clear

# n! modulo 2**32: exact up to 12!, beyond it the carry out of the register is tested as well.
ANSWERS = {
    0: 1,
    1: 1,
    5: 120,
    10: 3628800,
    12: 479001600,
    13: 1932053504,
    20: 2192834560,
    31: 738197504,
}


def known_answer(subject: Subject, report: Report) -> Outcome:
    """Factorials against a table.  Codes: WRONG_ANSWER, NO_ANSWER (still computing after 10 s)."""
    registers = open_control(subject)
    wrong = 0
    for number, (operand, answer) in enumerate(ANSWERS.items()):
        report.progress("known_answer", number / len(ANSWERS))
        registers.write32(FACTORIAL, operand)
        if not wait_clear(registers, STATUS, STATUS_COMPUTING):
            require_answer(registers)
            return judged(["NO_ANSWER"], {"answers": number, "wrong": wrong, "operand": operand})
        wrong += registers.read32(FACTORIAL) != answer
    if wrong:
        require_answer(registers)
    return judged(["WRONG_ANSWER"] if wrong else [], {"answers": len(ANSWERS), "wrong": wrong})
