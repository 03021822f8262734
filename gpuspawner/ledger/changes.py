"""Which hosts this process has changed something about, so that a snapshot need not look at all.

Only a hint of where to look: what a host is like is read from the ledger. It is complete because
one allocator writes, in one thread, and because every change of what is free on a host is noted by
``gpus.touch_host``.
"""

from __future__ import annotations

from itertools import takewhile

from sqlalchemy import Connection

OPTION = "gpuspawner_changes"  # of the engine: every transaction of a ledger has its changes


class Stale(Exception):
    """A decision was made on a snapshot that is out of date. The transaction is run again, with a
    snapshot made anew."""


class Changes:
    """Hosts in the order of their last change. ``now`` counts the changes."""

    def __init__(self) -> None:
        self.now = 0
        self._last: dict[str, int] = {}

    @staticmethod
    def of(tx: Connection) -> Changes:
        """Those of the ledger that a transaction belongs to."""
        changes: Changes = tx.get_execution_options()[OPTION]
        return changes

    def note(self, host: str) -> None:
        """Something about what is free on this host has changed, or is about to."""
        self.now += 1
        self._last.pop(host, None)
        self._last[host] = self.now

    def since(self, moment: int) -> list[str]:
        """Hosts that have changed after ``now`` was ``moment``."""
        newest_first = reversed(self._last.items())
        return [host for host, at in takewhile(lambda item: item[1] > moment, newest_first)]

    def undone(self, moment: int) -> None:
        """The changes after ``moment`` were rolled back, which is a change too: somebody may have
        seen the hosts as they never came to be."""
        for host in self.since(moment):
            self.note(host)
