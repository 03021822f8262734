"""The wipe: every pattern is written and read back in turn, zeros last.

Two checks report about it, ``overwrite`` and ``read_back``, because writing without reading proves
nothing, and the host asks for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..memory import Content, Keyed, Tally, Zeros
from ..ports import MEMORY_BAR, PAGE, DeviceAbsentError, Memory
from ..report import Metric, Outcome, Report, Subject, failure, judged
from .overwrite import overwrite
from .read_back import read_back

CHECKS = ("overwrite", "read_back")


class _Clock:
    """Seconds spent inside ``running`` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began


class _Wipe:
    def __init__(self, memory: Memory, passes: int, report: Report) -> None:
        self.memory = memory
        self.tally = Tally()
        self.written = 0
        self.clocks = {check: _Clock() for check in CHECKS}
        self._passes = passes
        self._done = 0
        self._report = report

    def write(self, content: Content) -> None:
        """Write one content and make sure that it has left this processor."""
        with self.clocks["overwrite"].running():
            self.written += overwrite(self.memory, content, self._progress("overwrite"))
            self.memory.barrier()

    def read(self, content: Content) -> int:
        """Read one content back; returns the number of bytes that are right."""
        with self.clocks["read_back"].running():
            right = read_back(self.memory, content, self.tally, self._progress("read_back"))
        self._done += 1
        return right

    def _progress(self, check: str) -> Callable[[float], None]:
        def at(fraction: float) -> None:
            self._report.progress(check, (self._done + fraction) / self._passes)

        return at


def wipe(subject: Subject, report: Report) -> None:
    """Overwrite the memory with an address-dependent pattern and its inverse, `rounds` times, and
    with zeros; read each back.  Reports ``overwrite`` and ``read_back``.

    Codes of ``read_back``: MEMORY_ERROR (a pattern came back wrong), NOT_ZERO (the last read found
    something), IDENTITY_PAGE_CHANGED (writing elsewhere changed page 0).
    """
    report.begin("overwrite")
    try:
        memory = subject.gpu.memory_function().memory(MEMORY_BAR)
    except Exception as error:
        for check in CHECKS:
            report.result(check, failure(error, subject.gpu), 0.0)
        return
    run = _Wipe(memory, 2 * subject.rounds + 1, report)
    try:
        outcomes = _all_passes(subject, report, run)
    except Exception as error:
        outcomes = dict.fromkeys(CHECKS, failure(error, subject.gpu))
    for check in CHECKS:
        report.result(check, outcomes[check], run.clocks[check].seconds)


def _all_passes(subject: Subject, report: Report, run: _Wipe) -> dict[str, Outcome]:
    memory = run.memory
    total = memory.size - PAGE
    page = memory.read(0, PAGE)
    announced = False
    for number in range(subject.rounds):
        for inverted in (False, True):
            pattern = Keyed(b"%d" % number + subject.nonce, memory.size, inverted=inverted)
            run.write(pattern)
            if not announced:
                report.begin("read_back")
                announced = True
            run.read(pattern)
    errors = run.tally.words
    zeros = Zeros()
    run.write(zeros)
    verified = run.read(zeros)
    codes = []
    if errors:
        codes.append("MEMORY_ERROR")
    if verified != total:
        codes.append("NOT_ZERO")
    if memory.read(0, PAGE) != page:
        codes.append("IDENTITY_PAGE_CHANGED")
    if codes and subject.gpu.lost():
        raise DeviceAbsentError("lost during the wipe")
    return {
        "overwrite": Outcome(
            "pass", {"bytes_written": run.written, "passes": 2 * subject.rounds + 1}
        ),
        "read_back": judged(codes, _metrics(run.tally, verified, total)),
    }


def _metrics(tally: Tally, verified: int, total: int) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {
        "errors": tally.words,
        "bytes_verified": verified,
        "bytes_total": total,
    }
    if tally.words:
        metrics |= {"first_bad_offset": tally.first, "xor": tally.xor}
    return metrics
