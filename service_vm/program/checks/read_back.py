"""Compare the memory with the content that it should hold."""

from __future__ import annotations

from collections.abc import Callable

from ..memory import Content, Tally, chunks
from ..ports import Memory


def read_back(
    memory: Memory, content: Content, tally: Tally, progress: Callable[[float], None]
) -> int:
    """Read all of `memory` but page 0; differences go to `tally`.

    Returns the number of bytes that are right.
    """
    right = 0
    for chunk in chunks(memory.size):
        found = memory.read(chunk.offset, chunk.length)
        wrong = tally.compare(chunk.offset, content.of(chunk), found)
        right += chunk.length - 8 * wrong
        progress(chunk.offset / memory.size)
    return right
