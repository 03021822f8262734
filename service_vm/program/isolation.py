"""Run a step in a child process, so that no GPU can take the program down or hang it.

A device that falls off the bus under a mapping kills the process that touches it (SIGBUS), and an
access that never ends cannot be interrupted from inside.  The child speaks through a pipe; the
parent passes on what it says, bounds its time and sees how it ended.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

Message = dict[str, Any]
Say = Callable[[Message], None]
_REAP_S = 5.0


def run_isolated(step: Callable[[Say], None], forward: Say, seconds: float) -> str | None:
    """Run `step(say)` in a child; every message that it says goes to `forward` here.

    Returns None when the child came to its end, else why it did not: ``TIMEOUT`` after `seconds`,
    the name of the signal that killed it, or ``EXIT``.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run_child(step, writer)
    os.close(writer)
    in_time = False
    try:
        in_time = _pass_on(reader, forward, time.monotonic() + seconds)
    finally:
        os.close(reader)
        if not in_time:
            os.kill(child, signal.SIGKILL)
        status = _reap(child)
    if not in_time:
        return "TIMEOUT"
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return "EXIT" if status else None


def _run_child(step: Callable[[Say], None], writer: int) -> NoReturn:
    code = 1
    try:

        def say(message: Message) -> None:
            data = json.dumps(message).encode() + b"\n"
            while data:
                data = data[os.write(writer, data) :]

        step(say)
        code = 0
    finally:
        # Not sys.exit: what belongs to the parent is not this process's to flush or close.
        os._exit(code)


def _pass_on(reader: int, forward: Say, deadline: float) -> bool:
    """Forward messages until the child closes its end (True) or the deadline passes (False)."""
    pending = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([reader], [], [], left)[0]:
            continue
        data = os.read(reader, 65536)
        if not data:
            return True
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            forward(json.loads(line))
    return False


def _reap(child: int) -> int:
    """Wait for the child; one that is stuck inside the kernel is left behind after a while."""
    deadline = time.monotonic() + _REAP_S
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        if time.monotonic() > deadline:
            return signal.SIGKILL
        time.sleep(0.001)
