"""The HTTP server of the tiny guest.

``<prefix>api`` answers like JupyterLab; every other path below the prefix is a small page.  Verbs
below ``<prefix>test/`` (arguments in the query, answers JSON unless said otherwise):

``gpu/list``                                    functions of each GPU, memory size
``gpu/write?offset=&pattern=&bytes=&gpu=0``     fill `bytes` with the hex `pattern`, repeated
``gpu/read?offset=&bytes=&gpu=0``               hex text
``home/state``  ``home/write?name=`` (body)  ``home/read?name=`` (bytes)
``env``         names of the server's environment with the SHA-256 of each value
``seed``        the seed without the values of the environment and without files
``state``       problems of the boot, uptime
``connect?host=&port=&timeout=3``               whether a TCP connection can be made
``exec?timeout=60`` (body: shell command)       {"rc", "output"}
``poweroff``  ``reboot``  ``panic``             answer first, then do it
"""

from __future__ import annotations

import ctypes
import encodings.idna  # noqa: F401 -- socket asks for it by name
import hashlib
import json
import os
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from service_vm.program.ports import MEMORY_BAR, Function, Memory, find_gpus
from service_vm.program.sysfs import SysfsMachine

from .boot import HOME, Guest, log, switch_off

_RESTART = 0x01234567
_READ_LIMIT = 1 << 20
Query = dict[str, str]


class Verbs:
    """What can be asked for.  A method's name is its path with ``/`` as ``_``."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._memories: dict[int, Memory] = {}

    def _memory(self, query: Query) -> Memory:
        number = int(query.get("gpu", "0"))
        if number not in self._memories:
            gpu = find_gpus(SysfsMachine().functions())[number]
            self._memories[number] = gpu.memory_function().memory(MEMORY_BAR)
        return self._memories[number]

    def gpu_list(self, query: Query, body: bytes) -> Any:
        def shown(function: Function | None) -> dict[str, str] | None:
            if function is None:
                return None
            return {"address": function.address, "ids": function.ids}

        return [
            {
                "control": shown(gpu.control),
                "memory": shown(gpu.memory),
                "bytes": gpu.memory_function().memory(MEMORY_BAR).size if gpu.memory else 0,
            }
            for gpu in find_gpus(SysfsMachine().functions())
        ]

    def gpu_write(self, query: Query, body: bytes) -> Any:
        pattern = bytes.fromhex(query["pattern"])
        length = int(query.get("bytes", len(pattern)))
        data = (pattern * (length // len(pattern) + 1))[:length]
        memory = self._memory(query)
        memory.write(int(query.get("offset", "4096")), data)
        memory.barrier()
        return {"bytes": length}

    def gpu_read(self, query: Query, body: bytes) -> Any:
        length = min(int(query.get("bytes", "64")), _READ_LIMIT)
        return self._memory(query).read(int(query.get("offset", "4096")), length).hex().encode()

    def home_state(self, query: Query, body: bytes) -> Any:
        return asdict(self._guest.home)

    def home_write(self, query: Query, body: bytes) -> Any:
        path = _home_path(query)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as handle:
            handle.write(body)
            handle.flush()
            os.fsync(handle.fileno())
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}

    def home_read(self, query: Query, body: bytes) -> Any:
        return _home_path(query).read_bytes()

    def env(self, query: Query, body: bytes) -> Any:
        return {
            name: hashlib.sha256(value.encode()).hexdigest()
            for name, value in sorted(self._guest.env.items())
        }

    def seed(self, query: Query, body: bytes) -> Any:
        server = self._guest.seed.get("server", {})
        kept = {key: value for key, value in server.items() if key not in ("env", "files")}
        return {**self._guest.seed, "server": {**kept, "files": sorted(server.get("files", ()))}}

    def state(self, query: Query, body: bytes) -> Any:
        uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
        return {"problems": self._guest.problems, "uptime_s": round(uptime, 2)}

    def connect(self, query: Query, body: bytes) -> Any:
        target = (query["host"], int(query["port"]))
        try:
            with socket.create_connection(target, timeout=float(query.get("timeout", "3"))):
                return {"connected": True, "error": ""}
        except OSError as error:
            return {"connected": False, "error": f"{type(error).__name__}: {error}"}

    def exec(self, query: Query, body: bytes) -> Any:
        done = subprocess.run(
            ["/bin/sh", "-c", body.decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=float(query.get("timeout", "60")),
        )
        return {"rc": done.returncode, "output": done.stdout.decode(errors="replace")}

    def poweroff(self, query: Query, body: bytes) -> Any:
        return _later(switch_off)

    def reboot(self, query: Query, body: bytes) -> Any:
        def restart() -> None:
            os.sync()
            ctypes.CDLL(None).reboot(_RESTART)

        return _later(restart)

    def panic(self, query: Query, body: bytes) -> Any:
        return _later(lambda: Path("/proc/sysrq-trigger").write_text("c"))


def _later(action: Callable[[], Any]) -> dict[str, bool]:
    """Do it once the answer is on its way."""
    threading.Timer(0.3, action).start()
    return {"ok": True}


def _home_path(query: Query) -> Path:
    path = Path(HOME, query["name"]).resolve()
    if not path.is_relative_to(HOME):
        raise ValueError("not below the home")
    return path


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    guest: Guest
    verbs: Verbs

    def do_GET(self) -> None:
        path = urlsplit(self.path)
        prefix = self.guest.prefix
        below = path.path.removeprefix(prefix) if path.path.startswith(prefix) else None
        if below is None:
            self._answer(404, {"message": f"not below {prefix}"})
        elif below.rstrip("/") == "api":
            self._answer(200, {"version": "tiny"})
        elif below.startswith("test/"):
            self._verb(below.removeprefix("test/").strip("/"), path.query)
        else:
            page = f"<!doctype html><title>tiny</title><h1>Tiny guest</h1><p>{self.guest.prefix}"
            self._answer(200, page.encode(), "text/html; charset=utf-8")

    do_POST = do_PUT = do_GET

    def _verb(self, name: str, arguments: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        verb = getattr(self.verbs, name.replace("/", "_"), None)
        if verb is None or name.startswith("_"):
            self._answer(404, {"message": f"no verb {name}"})
            return
        query = {key: values[-1] for key, values in parse_qs(arguments).items()}
        try:
            answer = verb(query, body)
        except FileNotFoundError as error:
            self._answer(404, {"message": str(error)})
        except Exception as error:
            self._answer(500, {"message": f"{type(error).__name__}: {error}"})
        else:
            self._answer(200, answer)

    def _answer(self, status: int, content: Any, kind: str = "") -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        if not kind:
            kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_HEAD = do_GET

    def address_string(self) -> str:
        return str(self.client_address[0])

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the console is slow under emulation."""


class Server(ThreadingHTTPServer):
    """Does not ask the DNS for its own name, as the standard one does."""

    daemon_threads = True

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)


def serve(guest: Guest) -> None:
    """Serve until the machine is switched off."""
    handler = type("GuestHandler", (Handler,), {"guest": guest, "verbs": Verbs(guest)})
    server = Server(("0.0.0.0", guest.port), handler)
    log(f"serving {guest.prefix} on port {guest.port}")
    server.serve_forever()
