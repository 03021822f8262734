"""Runs a plan of checks and reports over the channel.  Whatever happens, ``final`` is sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .arguments import Pause
from .isolation import Message, Say, run_isolated
from .plan import Step
from .ports import MEMORY_BAR, DeviceAbsentError
from .protocol import Channel
from .report import Outcome, Report, Subject

PROGRESS_EVERY_S = 5.0

Isolate = Callable[[Callable[[Say], None], Say, float], str | None]


class SayingReport:
    """A report that says messages: heartbeats are thinned out, and a fault drill waits here."""

    def __init__(self, say: Say, pause: Pause | None) -> None:
        self._say = say
        self._pause = pause
        self._last = time.monotonic()

    def identity(self, devices: Sequence[Mapping[str, Any]]) -> None:
        self._say({"t": "identity", "devices": list(devices)})

    def begin(self, check: str) -> None:
        self._progress(check, 0)
        if self._pause is None or self._pause.check != check:
            return
        until = time.monotonic() + self._pause.seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, PROGRESS_EVERY_S))
            self._progress(check, 0)

    def progress(self, check: str, fraction: float) -> None:
        if time.monotonic() - self._last >= PROGRESS_EVERY_S:
            self._progress(check, min(99, int(100 * fraction)))

    def _progress(self, check: str, percent: int) -> None:
        self._last = time.monotonic()
        self._say({"t": "progress", "check": check, "pct": percent})

    def result(self, check: str, outcome: Outcome, seconds: float) -> None:
        self._say(
            {
                "t": "result",
                "check": check,
                "status": outcome.status,
                "seconds": round(seconds, 3),
                "metrics": dict(outcome.metrics),
                "codes": list(outcome.codes),
            }
        )


class Runner:
    """One run over one subject.

    :param isolate: how a step is run; the tests may run it in place.
    """

    def __init__(
        self,
        channel: Channel,
        subject: Subject,
        pause: Pause | None = None,
        isolate: Isolate = run_isolated,
    ) -> None:
        self._channel = channel
        self._subject = subject
        self._pause = pause
        self._isolate = isolate
        self._results = 0

    def run(self, plan: Sequence[Step]) -> None:
        """Run every step of `plan`, then send ``final``.

        ``ended`` is "complete" when every check owed a result and gave one, "aborted" when the
        program itself broke; the results so far stand.
        """
        ended = "aborted"
        try:
            for step in plan:
                self._step(step)
            ended = "complete"
        finally:
            self._channel.send("final", {"ended": ended, "checks": self._results})

    def _step(self, step: Step) -> None:
        began = time.monotonic()
        owed = list(step.checks)

        def forward(message: Message) -> None:
            kind = message.pop("t")
            if kind == "progress":
                self._channel.progress(message["check"], message["pct"])
                return
            if kind == "result":
                owed.remove(message["check"])
                self._results += 1
            self._channel.send(kind, message)

        def run(say: Say) -> None:
            report: Report = SayingReport(say, self._pause)
            step.run(self._subject, report)

        why = self._isolate(run, forward, self._seconds(step))
        report = SayingReport(forward, None)
        for check in list(owed):
            report.result(check, self._unfinished(why), time.monotonic() - began)

    def _seconds(self, step: Step) -> float:
        seconds = step.seconds
        if step.seconds_per_mib:
            try:
                size = self._subject.gpu.memory_function().memory(MEMORY_BAR).size
            except (DeviceAbsentError, OSError):
                size = 0
            seconds += step.seconds_per_mib * self._subject.rounds * size / 2**20
        if self._pause is not None and self._pause.check in step.checks:
            seconds += self._pause.seconds
        return seconds

    def _unfinished(self, why: str | None) -> Outcome:
        """What a check is that its step left without a result."""
        if why == "TIMEOUT":
            return Outcome("timeout", {}, ("TIMEOUT",))
        if self._subject.gpu.lost():
            return Outcome("fail", {"error": f"lost during the check ({why})"}, ("DEVICE_ABSENT",))
        return Outcome("error", {}, (why or "NO_RESULT",))
