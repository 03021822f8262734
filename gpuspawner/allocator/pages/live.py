"""Telling open pages that something has changed. What it is they fetch themselves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

from tornado.iostream import StreamClosedError

from gpuspawner.allocator.pages.base import Page

_BEAT_S = 15.0
# Many things change together; one message is enough for them.
_GATHER_S = 0.3
# Then the browser comes again by itself, and whoever has logged out meanwhile is let in no more.
_LONGEST_S = 600.0

# What rings inside the allocator -> what changes on pages.
_TOPICS: Mapping[str, tuple[str, ...]] = {
    "gpus": ("pool",),
    "host": ("pool",),
    "queue": ("pool",),
    "images": ("pool",),
    "changed": ("pool",),
    "limits": ("limits",),
    "audit": ("audit",),
    "events": ("leases", "pool"),
    "ended": ("leases", "pool"),
}


class Live(Page):
    """``pages/events``: server-sent events with the names of what changed, and nothing else."""

    _gone = False

    def on_connection_close(self) -> None:
        """The page was closed."""
        self._gone = True
        self.site.context.signals.ring("closed")

    async def get(self) -> None:
        """Until the page is closed, or for ten minutes."""
        _ = self.visitor
        with contextlib.suppress(StreamClosedError):
            await self._stream()

    async def _stream(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + _LONGEST_S
        self.set_header("Content-Type", "text/event-stream")
        self.set_header("X-Accel-Buffering", "no")
        with self.site.context.signals.listen_all() as feed:
            self.write("retry: 2000\n\n")
            self._tell("hello", {})
            await self.flush()
            while not self._gone and loop.time() < end:
                await feed.wait(_BEAT_S)
                await asyncio.sleep(_GATHER_S)
                kinds = feed.take()
                topics = sorted({topic for kind in kinds for topic in _TOPICS.get(kind, ())})
                if topics:
                    self._tell("changed", topics)
                elif not kinds:
                    self._tell("beat", {})
                await self.flush()
        await self.finish()

    def _tell(self, event: str, data: Any) -> None:
        if not self._gone:
            self.write(f"event: {event}\ndata: {json.dumps(data)}\n\n")
