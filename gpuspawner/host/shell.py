"""A host's shell: where ``probe.py`` runs, on this machine or over ssh."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuspawner.host.api import HostError, HostTimeout, HostUnreachable

_SCRIPT = Path(__file__).with_name("probe.py")
_MAX_ANSWER_BYTES = 16 * 1024 * 1024
_SSH_FAILED = 255  # ssh's own exit status when it could not run the command


class Shell:
    """Runs the probe. ``argv`` is what reaches the host's shell, for example
    ``("ssh", "-o", "BatchMode=yes", "root@gpu1")``; empty means this machine."""

    def __init__(self, host: str, argv: Sequence[str] = ()) -> None:
        self._host = host
        self._argv = tuple(argv)

    async def probe(self, verb: str, *arguments: str, deadline_s: float = 20.0) -> dict[str, Any]:
        """The answer to one verb. Raises ``HostError`` with the probe's own remedy, or
        ``HostTimeout`` past the deadline; the process is then killed and left behind."""
        what = shlex.join([verb, *arguments])
        process = await asyncio.create_subprocess_exec(
            *self._command(verb, arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_ANSWER_BYTES,
        )
        try:
            async with asyncio.timeout(deadline_s):
                out, err = await process.communicate(_SCRIPT.read_bytes())
        except TimeoutError:
            raise HostTimeout(
                f"Host {self._host}: the probe '{what}' took longer than {deadline_s:g} s.",
                "A write to sysfs can hang while a driver holds the device: look at dmesg there.",
            ) from None
        finally:
            if process.returncode is None:
                # Not waited for: a process in uninterruptible sleep outlives its SIGKILL.
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        return self._answer(what, process.returncode or 0, out, err)

    def _command(self, verb: str, arguments: Sequence[str]) -> tuple[str, ...]:
        if not self._argv:
            return (sys.executable, "-I", "-", verb, *arguments)
        # ssh hands one string to the remote shell, which splits it again.
        return (*self._argv, shlex.join(["python3", "-", verb, *arguments]))

    def _answer(self, what: str, status: int, out: bytes, err: bytes) -> dict[str, Any]:
        lines = out.decode(errors="replace").strip().splitlines()
        try:
            answer = json.loads(lines[-1]) if lines else None
        except json.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            said = err.decode(errors="replace").strip()[-400:] or f"exit status {status}"
            if self._argv and status == _SSH_FAILED:
                raise HostUnreachable(
                    f"Host {self._host}: its shell cannot be reached: {said}",
                    f"Try '{shlex.join(self._argv)} true' from this machine.",
                )
            raise HostError(
                f"Host {self._host}: the probe '{what}' gave no answer: {said}",
                "The host needs python3 (3.7 or later) in its PATH.",
            )
        if "error" in answer:
            raise HostError(
                f"Host {self._host}: the probe '{what}' failed: {answer['error']}.",
                str(answer.get("remedy") or ""),
            )
        return answer
