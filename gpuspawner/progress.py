"""What happens while a server starts, kept once and told to every browser tab that asks.

JupyterHub calls ``Spawner.progress()`` once per listener. The allocator's stream of events is
read once per start, by ``Spawner.start()``; what it said is kept here and replayed to everyone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from html import escape
from typing import TypedDict

MAX_PERCENT = 95
"""The rest belongs to JupyterHub, which still has to reach the server and tell the proxy."""

MAX_LINES = 500
"""A start has a dozen lines. What comes after so many is not worth the memory."""


class ProgressEvent(TypedDict, total=False):
    """As JupyterHub's progress events. The page appends every ``message`` to its log."""

    progress: int
    message: str
    html_message: str


class Story:
    """The lines of one start. Percentages never go back; a line is never said twice in a row."""

    def __init__(self) -> None:
        self._events: list[ProgressEvent] = []
        self._percent = 0
        self._last = ""
        self._ended = False
        self._news = asyncio.Event()

    @property
    def last_line(self) -> str:
        """What was said last; empty before the first line."""
        return self._last

    def add(self, message: str, percent: int | None = None) -> None:
        """Say ``message`` (plain text). ``percent`` is of the whole start, 0 to 100."""
        message = " ".join(message.split())
        before = self._percent
        if percent is not None:
            self._percent = max(before, min(percent, MAX_PERCENT))
        event: ProgressEvent = {"progress": self._percent}
        if message and message != self._last:
            self._last = message
            event |= {"message": message, "html_message": escape(message)}
        elif self._percent == before:
            return
        if self._ended or len(self._events) >= MAX_LINES:
            return
        self._events.append(event)
        self._wake()

    def end(self) -> None:
        """Nothing follows; listeners are let go."""
        self._ended = True
        self._wake()

    async def replay(self) -> AsyncGenerator[ProgressEvent, None]:
        """Everything said so far, then what is said from now on, until the end."""
        told = 0
        while True:
            news = self._news
            while told < len(self._events):
                told += 1
                yield self._events[told - 1].copy()
            if self._ended:
                return
            await news.wait()

    def _wake(self) -> None:
        # Each listener waits on the event it saw; a new one is set up before they run.
        news, self._news = self._news, asyncio.Event()
        news.set()
