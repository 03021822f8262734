"""Server-sent events, as far as the allocator uses them. Pure: bytes in, events out.

The format is the one of the WHATWG HTML standard, section 9.2. Only the field ``data`` is
returned; ids stand in the data too.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_LINE_BYTES = 64 * 1024
MAX_EVENT_BYTES = 256 * 1024


class SseError(Exception):
    """The stream breaks a bound; it cannot be read on."""


class SseParser:
    """Cuts a stream of bytes into events, holding back at most one event."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take the next bytes; yields the data of each event that they complete.

        Raises ``SseError`` for a line longer than 64 KiB or an event longer than 256 KiB.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise SseError(f"a line is longer than {MAX_LINE_BYTES} bytes")
        for raw in lines:
            if len(raw) > MAX_LINE_BYTES:
                raise SseError(f"a line is longer than {MAX_LINE_BYTES} bytes")
            line = raw.removesuffix(b"\r")
            if line:
                self._field(line)
            elif self._data:
                data = b"\n".join(self._data)
                self._data, self._size = [], 0
                yield data

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name != b"data":
            return
        value = value.removeprefix(b" ")
        self._size += len(value)
        if self._size > MAX_EVENT_BYTES:
            raise SseError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        self._data.append(value)
