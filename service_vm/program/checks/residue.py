"""How much the last user left in the memory.  Counts, and never looks at what it is."""

from __future__ import annotations

from array import array

from ..memory import Zeros, chunks
from ..ports import MEMORY_BAR, PAGE
from ..report import Outcome, Report, Subject

_ZERO_PAGE = bytes(PAGE)
_ZERO_WORD = bytes(8)


def residue(subject: Subject, report: Report) -> Outcome:
    """Count the 64-bit words that are not zero, before the wipe.  Always passes: leftovers say
    nothing about the GPU's health, and the wipe comes next."""
    memory = subject.gpu.memory_function().memory(MEMORY_BAR)
    zeros = Zeros()
    words = 0
    for chunk in chunks(memory.size):
        report.progress("residue", chunk.offset / memory.size)
        data = memory.read(chunk.offset, chunk.length)
        if data != zeros.of(chunk):
            pages = (data[at : at + PAGE] for at in range(0, len(data), PAGE))
            words += sum(_non_zero_words(page) for page in pages)
    return Outcome("pass", {"residue_words": words, "bytes_total": memory.size - PAGE})


def _non_zero_words(page: bytes) -> int:
    if page == _ZERO_PAGE:
        return 0
    if _ZERO_WORD not in page:
        return len(page) // 8
    words = array("Q", page)
    return len(words) - words.count(0)
