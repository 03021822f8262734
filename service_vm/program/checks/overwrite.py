"""Fill the memory with a content."""

from __future__ import annotations

from collections.abc import Callable

from ..memory import Content, chunks
from ..ports import Memory


def overwrite(memory: Memory, content: Content, progress: Callable[[float], None]) -> int:
    """Write `content` over all of `memory` but page 0; returns the number of bytes written."""
    written = 0
    for chunk in chunks(memory.size):
        memory.write(chunk.offset, content.of(chunk))
        written += chunk.length
        progress(chunk.offset / memory.size)
    return written
