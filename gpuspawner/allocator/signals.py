"""Wake-up calls inside the process: the ledger has the facts, a signal says to look again."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator


class Signals:
    """Named bells. Ringing one that nobody listens to is nothing lost: listeners look first."""

    def __init__(self) -> None:
        self._bells: dict[str, set[asyncio.Event]] = defaultdict(set)
        self._feeds: set[Feed] = set()

    def ring(self, *topics: str) -> None:
        """Wake all who listen to these topics."""
        for topic in topics:
            for bell in self._bells.get(topic, ()):
                bell.set()
            for feed in self._feeds:
                feed.hear(topic)

    @contextlib.contextmanager
    def listen(self, *topics: str) -> Iterator[Bell]:
        """Listen from now on; look at the facts after entering, then wait."""
        event = asyncio.Event()
        for topic in topics:
            self._bells[topic].add(event)
        try:
            yield Bell(event)
        finally:
            for topic in topics:
                self._bells[topic].discard(event)
                if not self._bells[topic]:
                    del self._bells[topic]

    @contextlib.contextmanager
    def listen_all(self) -> Iterator[Feed]:
        """Listen to every topic from now on."""
        feed = Feed()
        self._feeds.add(feed)
        try:
            yield feed
        finally:
            self._feeds.discard(feed)


class Bell:
    """One listener's ear."""

    def __init__(self, event: asyncio.Event) -> None:
        self._event = event

    async def wait(self, timeout_s: float) -> bool:
        """True if the bell rang within the time; rings since the last wait count."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True


class Feed:
    """One listener to everything. It keeps the kinds of what rang (the part before the colon),
    not the topics: there are few kinds, so that a slow listener costs nothing."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()
        self._bell = asyncio.Event()

    def hear(self, topic: str) -> None:
        """Something rang."""
        self._kinds.add(topic.partition(":")[0])
        self._bell.set()

    async def wait(self, timeout_s: float) -> None:
        """Return when something rings or has rung since the last ``take``, or after the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._bell.wait()

    def take(self) -> frozenset[str]:
        """The kinds that rang since the last call."""
        kinds = frozenset(self._kinds)
        self._kinds.clear()
        self._bell.clear()
        return kinds
