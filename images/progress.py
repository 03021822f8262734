"""Progress of a build: named stages whose weights are measured seconds.

A build announces its plan first, so that the percentage of the whole is honest: a stage that
turns out to be cached is skipped and its weight leaves the total.  Where the text goes (plain
lines, a bar, JSON lines) is the business of a sink.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Protocol


@dataclass(frozen=True)
class Stage:
    """One step of a build.

    :param name: key, unique within the plan.
    :param title: what a person reads, in the present ("Installing Debian packages").
    :param seconds: measured duration on two cores, the weight of the stage.
    """

    name: str
    title: str
    seconds: float


@dataclass(frozen=True)
class Event:
    """What a sink gets.  ``percent`` is of the whole build; it never falls."""

    stage: str
    title: str
    percent: float
    detail: str
    state: str  # "begin" | "at" | "end" | "skip" | "note"
    elapsed_s: float


class Sink(Protocol):
    """Receives every event, in order, in the thread of the build."""

    def __call__(self, event: Event) -> None: ...


class StageHandle:
    """Given by :meth:`Progress.stage`; reports how far the running stage is."""

    def __init__(self, report: Callable[[float, str], None]) -> None:
        self._report = report

    def at(self, fraction: float, detail: str = "") -> None:
        """Say that `fraction` (0..1) of this stage is done."""
        self._report(min(1.0, max(0.0, fraction)), detail)


class Progress:
    """Accumulates stages and tells the sink.

    A stage that is not in the plan is accepted with weight zero, so a part of the builder can be
    used alone with :meth:`silent`.
    """

    def __init__(self, plan: Sequence[Stage], sink: Sink) -> None:
        self._plan = {stage.name: stage for stage in plan}
        self._remaining = dict(self._plan)
        self._done_s = 0.0
        self._sink = sink
        self._floor = 0.0
        self._started = time.monotonic()

    @classmethod
    def silent(cls) -> Progress:
        """Progress that nobody watches."""
        return cls((), lambda event: None)

    def _emit(self, stage: Stage, fraction: float, detail: str, state: str) -> None:
        total = self._done_s + sum(item.seconds for item in self._remaining.values())
        inside = stage.seconds * fraction if stage.name in self._remaining else 0.0
        percent = 100.0 * (self._done_s + inside) / total if total else 100.0
        self._floor = max(self._floor, percent)
        elapsed = time.monotonic() - self._started
        self._sink(Event(stage.name, stage.title, self._floor, detail, state, elapsed))

    def _stage(self, name: str) -> Stage:
        return self._plan.get(name, Stage(name, name, 0.0))

    @contextmanager
    def stage(self, name: str) -> Iterator[StageHandle]:
        """Run one stage; leaving the block normally ends it."""
        stage = self._stage(name)
        self._emit(stage, 0.0, "", "begin")
        began = time.monotonic()
        yield StageHandle(lambda fraction, detail: self._emit(stage, fraction, detail, "at"))
        if self._remaining.pop(name, None):
            self._done_s += stage.seconds
        self._emit(stage, 1.0, f"{time.monotonic() - began:.1f} s", "end")

    def skip(self, name: str, why: str) -> None:
        """A stage of the plan that is not needed: its weight leaves the total."""
        if self._remaining.pop(name, None):
            self._emit(self._stage(name), 0.0, why, "skip")

    def note(self, text: str) -> None:
        """A line for the reader that moves nothing."""
        self._emit(Stage("", text, 0.0), 0.0, "", "note")


def plain_sink(stream: IO[str]) -> Sink:
    """One line for each begin and end; between them one every 10 s at most."""
    last = 0.0

    def show(event: Event) -> None:
        nonlocal last
        now = time.monotonic()
        if event.state == "at" and now - last < 10:
            return
        last = now
        words = {"begin": "...", "at": "...", "end": "done", "skip": "skipped", "note": ""}
        detail = f" ({event.detail})" if event.detail else ""
        head = f"[{event.percent:3.0f}%] {event.elapsed_s:6.1f} s  "
        print(f"{head}{event.title} {words[event.state]}{detail}".rstrip(), file=stream, flush=True)

    return show


def json_sink(stream: IO[str]) -> Sink:
    """One JSON object a line: stage, title, percent, detail, state, elapsed_s."""

    def show(event: Event) -> None:
        line = {
            "stage": event.stage,
            "title": event.title,
            "percent": round(event.percent, 1),
            "detail": event.detail,
            "state": event.state,
            "elapsed_s": round(event.elapsed_s, 1),
        }
        print(json.dumps(line), file=stream, flush=True)

    return show


def bar_sink(stream: IO[str]) -> Sink:
    """A line redrawn in place, for terminals; finished stages stay above it."""
    width = 28

    def show(event: Event) -> None:
        if event.state in ("skip", "note") or (event.state == "end" and event.detail):
            mark = "-" if event.state == "skip" else " "
            print(f"\r\x1b[K{mark} {event.title} {event.detail}".rstrip(), file=stream)
        if event.state == "note":
            return
        filled = int(width * event.percent / 100)
        bar = "#" * filled + "." * (width - filled)
        detail = event.detail[:40] if event.state == "at" else ""
        text = f"[{bar}] {event.percent:3.0f}% {event.title} {detail}"
        print(f"\r\x1b[K{text}"[:110], end="", file=stream, flush=True)
        if event.percent >= 100 and event.state == "end":
            print(file=stream, flush=True)

    return show


def sink_for(style: str, stream: IO[str] | None = None) -> Sink:
    """The sink called `style`: ``plain``, ``bar`` or ``json``; ``auto`` looks at the terminal."""
    stream = stream or sys.stderr
    if style == "auto":
        style = "bar" if stream.isatty() else "plain"
    makers = {"plain": plain_sink, "bar": bar_sink, "json": json_sink}
    return makers[style](stream)
