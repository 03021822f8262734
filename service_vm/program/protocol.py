"""Protocol v1 between the service VM and the host: bounded newline JSON, both ways.

Every line from the guest carries ``v, t, run, nonce, seq``; ``seq`` starts at 0 and grows by one,
so that a lost or repeated line shows.  Limits hold on both sides: 64 KiB a line, 256 KiB in all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

VERSION = 1
LINE_LIMIT = 64 * 1024
TOTAL_LIMIT = 256 * 1024
# What progress lines may not use up: results and ``final`` must always fit.
RESERVE = 96 * 1024
ACK_WAIT_S = 60.0


class LimitError(Exception):
    """A line would break the limits of the protocol.  Nothing of it was sent."""


class Port(Protocol):
    """A byte stream to the host."""

    def write(self, data: bytes) -> None:
        """Write all of `data`; blocks while the host does not read."""
        ...

    def read(self, timeout_s: float) -> bytes:
        """Some bytes, or ``b""`` when none came within `timeout_s`."""
        ...


class Channel:
    """Sends the messages of one run over a port."""

    def __init__(
        self, port: Port, run: str, nonce: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._port = port
        self._run = run
        self._nonce = nonce
        self._clock = clock
        self._seq = 0
        self._sent = 0

    def send(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Send one message.

        :raises LimitError: the line or the whole would grow past the limit.
        """
        line = self._line(kind, fields)
        if len(line) > LINE_LIMIT:
            raise LimitError(f"a {kind} line of {len(line)} bytes; the limit is {LINE_LIMIT}")
        if self._sent + len(line) > TOTAL_LIMIT:
            raise LimitError(f"{self._sent} bytes are sent; a {kind} line would pass the limit")
        self._write(line)

    def progress(self, check: str, percent: int) -> None:
        """A heartbeat: `check` is at `percent`.  Left out when only the reserve is left."""
        line = self._line("progress", {"check": check, "pct": percent})
        if self._sent + len(line) <= TOTAL_LIMIT - RESERVE:
            self._write(line)

    def _line(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        head = {"v": VERSION, "t": kind, "run": self._run, "nonce": self._nonce, "seq": self._seq}
        text = json.dumps({**fields, **head}, ensure_ascii=True, allow_nan=False)
        return text.encode("ascii") + b"\n"

    def _write(self, line: bytes) -> None:
        # Counted first: should the write fail half-way, the number is not used for another line.
        self._seq += 1
        self._sent += len(line)
        self._port.write(line)

    def wait_for_ack(self, seconds: float = ACK_WAIT_S) -> bool:
        """Whether the host acknowledged this run within `seconds`.

        Lines that are not that acknowledgement are ignored; a host that sends more than the
        protocol allows is no longer listened to.
        """
        deadline = self._clock() + seconds
        pending = b""
        total = 0
        while (left := deadline - self._clock()) > 0:
            data = self._port.read(min(left, 1.0))
            total += len(data)
            *lines, pending = (pending + data).split(b"\n")
            if any(self._is_ack(line) for line in lines):
                return True
            if len(pending) > LINE_LIMIT or total > TOTAL_LIMIT:
                return False
        return False

    def _is_ack(self, line: bytes) -> bool:
        if len(line) > LINE_LIMIT:
            return False
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return False
        return (
            isinstance(message, dict)
            and message.get("v") == VERSION
            and message.get("t") == "ack"
            and message.get("run") == self._run
        )
