"""Child processes that are started in order, watched, and ended in the reverse order."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deploy.stack.say import Problem

LOG_LIMIT = 10 * 2**20
START_MARK = "--- start "


# The kernel ends the child when the quickstart is killed without a chance to do so itself.
DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "TERM", "--")


class Child:
    """One process in a session of its own, so that Ctrl-C reaches the quickstart alone, which
    then stops its children in its own order. Its output goes to a log file."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        cwd: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > LOG_LIMIT:
            log.replace(log.with_suffix(log.suffix + ".1"))
        with log.open("ab") as output:
            output.write(f"{START_MARK}{time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n".encode())
            output.flush()
            self._process = subprocess.Popen(
                [*DIE_WITH_PARENT, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                umask=0o077,  # what hub and allocator keep is nobody else's business
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ended(self) -> int | None:
        """Exit status, or ``None`` while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """:raises Problem: if it has ended, with the last lines of its log."""
        status = self.ended()
        if status is None:
            return
        how = f"with status {status}" if status >= 0 else f"by signal {-status}"
        tail = "\n".join(f"    | {text}" for text in last_lines(self.log))
        raise Problem(
            f"The {self.name} ended {how}. Its last lines:\n{tail}\n", f"All of it: {self.log}"
        )

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait for ``condition`` while the process lives.

        :raises Problem: when it ends, or after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                tail = "\n".join(f"    | {text}" for text in last_lines(self.log))
                raise Problem(
                    f"The {self.name} {what} after {timeout_s:.0f} s. Its last lines:\n{tail}\n",
                    f"All of it: {self.log}",
                )
            time.sleep(0.2)

    def stop(self, timeout_s: float = 30) -> None:
        """SIGTERM, and SIGKILL to its session after ``timeout_s`` seconds."""
        if self.ended() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        # What it started stays in its session unless it left on purpose, as daemons do.
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return


def last_lines(path: Path, count: int = 12) -> list[str]:
    """The end of a log file, from the last start on; nothing if there is none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            lines = [text.rstrip("\n") for text in deque(stream, maxlen=count)]
    except OSError:
        return []
    starts = [at for at, text in enumerate(lines) if text.startswith(START_MARK)]
    return lines[starts[-1] + 1 :] if starts else lines


def answers(url: str, timeout_s: float = 3) -> bool:
    """True when ``GET url`` answers with a status below 400."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as reply:
            return int(reply.status) < 400
    except (urllib.error.URLError, OSError, ValueError):
        return False
