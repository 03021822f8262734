"""Patterns over a large memory, at the speed of memcpy and memcmp.

A loop over words in Python would take minutes; here all work is slices of bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from .ports import PAGE

CHUNK = 1 << 20
"""Bytes handled at a time."""

_STRIDE = 257 * 8
_INVERT = bytes(255 - value for value in range(256))


@dataclass(frozen=True)
class Chunk:
    """Bytes `offset` up to `offset + length`, number `index` from the start."""

    index: int
    offset: int
    length: int


def chunks(size: int) -> Iterator[Chunk]:
    """The memory of a GPU in chunks; page 0, the identity page, belongs to none."""
    for index, start in enumerate(range(0, size, CHUNK)):
        offset = max(start, PAGE)
        end = min(start + CHUNK, size)
        if offset < end:
            yield Chunk(index, offset, end - offset)


class Content(Protocol):
    """What a memory should hold."""

    def of(self, chunk: Chunk) -> bytes: ...


class Keyed:
    """Content that depends on the address and on a key.

    Chunk number n holds a window of one table of random words, begun 257 * n words further in.
    Two addresses that differ in one address line, or have two lines exchanged, are 2**i words
    apart inside a chunk or 2**j chunks apart, and 2**i = 257 * 2**j has no solution: they never
    share a word of the table.  So a line that is stuck or shorted shows, wherever it is.
    """

    def __init__(self, key: bytes, size: int, *, inverted: bool = False) -> None:
        spare = _STRIDE * (-(-size // CHUNK))
        table = hashlib.shake_128(b"memory" + key).digest(CHUNK + spare)
        self._table = table.translate(_INVERT) if inverted else table

    def of(self, chunk: Chunk) -> bytes:
        start = chunk.index * _STRIDE + chunk.offset % CHUNK
        return self._table[start : start + chunk.length]


class Zeros:
    """Nothing but zeros."""

    def __init__(self) -> None:
        self._zeros = bytes(CHUNK)

    def of(self, chunk: Chunk) -> bytes:
        return self._zeros if chunk.length == CHUNK else self._zeros[: chunk.length]


@dataclass
class Tally:
    """Differences found so far.

    :ivar words: 64-bit words that differ.
    :ivar first: offset in the memory of the first wrong byte, -1 while there is none.
    :ivar xor: wanted xor found of that byte.
    """

    words: int = 0
    first: int = -1
    xor: int = 0

    def compare(self, offset: int, wanted: bytes, found: bytes) -> int:
        """Count what differs between two strings of equal length that lie at `offset`; returns
        the number of differing words."""
        if wanted == found:
            return 0
        before = self.words
        for at in range(0, len(wanted), PAGE):
            self._compare_page(offset + at, wanted[at : at + PAGE], found[at : at + PAGE])
        return self.words - before

    def _compare_page(self, offset: int, wanted: bytes, found: bytes) -> None:
        if wanted == found:
            return
        mixed = int.from_bytes(wanted, "little") ^ int.from_bytes(found, "little")
        words = array("Q", mixed.to_bytes(len(wanted), "little"))
        self.words += len(words) - words.count(0)
        if self.first < 0:
            byte = ((mixed & -mixed).bit_length() - 1) // 8
            self.first = offset + byte
            self.xor = wanted[byte] ^ found[byte]
