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

    def ring(self, *topics: str) -> None:
        """Wake all who listen to these topics."""
        for topic in topics:
            for bell in self._bells.get(topic, ()):
                bell.set()

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
