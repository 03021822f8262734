"""How the quickstart talks: one line a step, and no error without what to do next."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Problem(Exception):
    """The quickstart cannot go on.

    :param what: what happened, one sentence.
    :param remedy: what the reader does about it, one sentence.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what} {remedy}".strip())
        self.what = what
        self.remedy = remedy


def line(text: str = "") -> None:
    """One line on standard output, at once."""
    print(text, flush=True)


def complain(text: str) -> None:
    """One line on standard error, at once."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def step(title: str) -> Iterator[None]:
    """A step that may take a while: said when it begins, and how long it took at its end."""
    on_terminal = sys.stdout.isatty()
    began = time.monotonic()
    print(f"  ..  {title}", end="" if on_terminal else "\n", flush=True)
    try:
        yield
    except BaseException:
        print(f"\r\x1b[K  !!  {title}" if on_terminal else f"  !!  {title}", flush=True)
        raise
    took = f"{time.monotonic() - began:.1f} s"
    print(
        f"\r\x1b[K  ok  {title} ({took})" if on_terminal else f"  ok  {title} ({took})", flush=True
    )
