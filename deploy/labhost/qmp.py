"""QEMU's monitor protocol, as much as the lab needs: one command at a time."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import TracebackType
from typing import Any

from deploy.stack.say import Problem


class Monitor:
    """A connection to a QEMU; a context manager. QEMU serves one at a time."""

    def __init__(self, path: Path, timeout_s: float = 20) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(path))
            self._stream = self._socket.makefile("rwb")
            self._next()  # the greeting
            self.do("qmp_capabilities")
        except OSError as error:
            self._socket.close()
            raise Problem(
                f"The lab's QEMU does not answer at {path} ({error}).",
                "If the lab does not run, start it: deploy/lab start.",
            ) from error

    def do(self, command: str, **arguments: Any) -> Any:
        """Run a command and return what it returns.

        :raises Problem: QEMU refuses, or has ended.
        """
        text = json.dumps({"execute": command, "arguments": arguments})
        try:
            self._stream.write(text.encode() + b"\n")
            self._stream.flush()
            while "event" in (answer := self._next()):
                continue
        except OSError as error:
            raise Problem(f"The lab's QEMU was lost at '{command}' ({error}).") from error
        if "error" in answer:
            raise Problem(f"The lab's QEMU refused '{command}': {answer['error']['desc']}")
        return answer["return"]

    def _next(self) -> dict[str, Any]:
        line = self._stream.readline()
        if not line:
            raise ConnectionError("it has closed the connection")
        found: dict[str, Any] = json.loads(line)
        return found

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
