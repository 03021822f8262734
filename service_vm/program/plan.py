"""Which checks an emulated GPU gets, in which order, and how long each may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .checks.dma import dma
from .checks.identity import identity
from .checks.known_answer import known_answer
from .checks.liveness import liveness
from .checks.residue import residue
from .checks.wipe import CHECKS as WIPE_CHECKS
from .checks.wipe import wipe
from .report import Check, Report, Subject, failure


@dataclass(frozen=True)
class Step:
    """What runs in one go.

    :ivar checks: names of the results that it owes.
    :ivar seconds: bound of the whole step; `seconds_per_mib` of GPU memory come on top.  They are
        generous (an emulated processor is 20 times slower): they end a hang, they judge no speed.
    """

    checks: tuple[str, ...]
    run: Callable[[Subject, Report], None]
    seconds: float
    seconds_per_mib: float = 0.0


def single(name: str, check: Check, seconds: float, seconds_per_mib: float = 0.0) -> Step:
    """The step of one check: timed, and an exception becomes its outcome."""

    def run(subject: Subject, report: Report) -> None:
        report.begin(name)
        began = time.monotonic()
        try:
            outcome = check(subject, report)
        except Exception as error:
            outcome = failure(error, subject.gpu)
        report.result(name, outcome, time.monotonic() - began)

    return Step((name,), run, seconds, seconds_per_mib)


EMULATED: tuple[Step, ...] = (
    single("identity", identity, 60),
    single("liveness", liveness, 60),
    single("known_answer", known_answer, 180),
    single("dma", dma, 120),
    single("residue", residue, 60, 2),
    Step(WIPE_CHECKS, wipe, 60, 4),
)
