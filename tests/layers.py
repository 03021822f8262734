"""Which layer a test belongs to, what that layer needs, and how tests wait.

A layer is the first folder under ``tests/``. What it needs is checked once, before the first
test runs, and a lack ends the run with a sentence: a skipped test looks too much like a passed
one.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

TESTS = Path(__file__).resolve().parent
LAYERS = ("unit", "service", "vm", "browser", "lab", "bench")
NEEDS_NAMESPACE = frozenset({"vm", "browser", "lab"})
NETNS_VARIABLE = "GPUSPAWNER_TEST_NETNS"
IMAGES_VARIABLE = "GPUSPAWNER_TEST_IMAGES"

T = TypeVar("T")


def layer_of(path: Path) -> str:
    """The layer of a test file, or ``""`` for a file outside all of them."""
    try:
        first = path.resolve().relative_to(TESTS).parts[0]
    except (ValueError, IndexError):
        return ""
    return first if first in LAYERS else ""


def missing(layers: Iterable[str], netns_dir: Path = Path("/run/netns")) -> str | None:
    """What these layers need and the process lacks, as a sentence; ``None`` if nothing."""
    need = sorted(NEEDS_NAMESPACE.intersection(layers))
    if not need:
        return None
    which = " and ".join(f"tests/{layer}" for layer in need)
    if os.geteuid() != 0:
        return f"{which} start virtual machines and need root: run them with 'sudo tests/run'."
    name = os.environ.get(NETNS_VARIABLE)
    if not name:
        return (
            f"{which} open bridges and networks and run only inside a network namespace of "
            f"their own: run them with 'tests/run {' '.join(need)}'."
        )
    try:
        inside = os.path.samestat(os.stat("/proc/self/ns/net"), os.stat(netns_dir / name))
    except OSError:
        inside = False
    if not inside:
        return (
            f"{NETNS_VARIABLE} names the network namespace '{name}', but this process is not "
            "in it: run the tests with 'tests/run'."
        )
    return None


def wait_for(condition: Callable[[], T], timeout: float, what: str, every: float = 0.05) -> T:
    """Call ``condition`` until what it returns is true, and return that.

    :param timeout: seconds after which an ``AssertionError`` says what was waited for.
    :param what: completes the sentence "waited N s for ...".
    :param every: seconds between two calls.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s for {what}; last seen: {value!r}")
        time.sleep(every)
    return value


async def wait_for_async(
    condition: Callable[[], T | Awaitable[T]], timeout: float, what: str, every: float = 0.05
) -> T:
    """:func:`wait_for` on the event loop; ``condition`` may be a coroutine function."""
    deadline = time.monotonic() + timeout
    while True:
        result = condition()
        value: T = await result if inspect.isawaitable(result) else result
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s for {what}; last seen: {value!r}")
        await asyncio.sleep(every)
