"""The real allocator, which kills itself at one named transaction.

    GPUSPAWNER_TEST_KILL="before:commit:guest" python -m tests.vm.killer

The name is that of the function that runs in the transaction, without underscores in front, and
its first text argument if it has one. ``before`` dies with the transaction not begun, ``after``
when it is committed and nobody has heard of it yet.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from gpuspawner.allocator.app import main
from gpuspawner.ledger import diagnoses
from gpuspawner.ledger.database import Ledger

WHEN, _, POINT = os.environ["GPUSPAWNER_TEST_KILL"].partition(":")
_write = Ledger.write
_begin = diagnoses.begin
_begun = False


def die() -> None:
    """As ``kill -9`` does it."""
    os.kill(os.getpid(), signal.SIGKILL)


def name_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """The point's name."""
    words = [str(arg) for arg in args[:1] if isinstance(arg, str) and len(arg) < 20]
    return ":".join([fn.__name__.lstrip("_"), *words])


async def write(self: Ledger, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``Ledger.write`` with a trap in it."""
    if POINT == "begin" or name_of(fn, args) != POINT:
        result = await _write(self, fn, *args, **kwargs)
        if _begun:
            die()
        return result
    if WHEN == "before":
        die()
    result = await _write(self, fn, *args, **kwargs)
    die()
    return result


def begin(*args: Any, **kwargs: Any) -> Any:
    """The reclaimer looks often and seldom finds something: only a diagnosis that really begins
    is the point ``begin``."""
    global _begun
    if WHEN == "before":
        die()
    _begun = True
    return _begin(*args, **kwargs)


if POINT == "begin":
    diagnoses.begin = begin
Ledger.write = Ledger.read = write  # type: ignore[method-assign,assignment]

if __name__ == "__main__":
    main()
