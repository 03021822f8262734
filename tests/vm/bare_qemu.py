"""Plain QEMU for tests of the service image: no libvirt, no network, an emulated GPU.

:class:`ServiceRun` is one boot: it starts QEMU, reads the report port, and ends QEMU.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

RUN = "6f1d3c1e-5a64-4f5e-9a53-9f1f7d8f2b11"
NONCE = "00112233445566778899aabbccddeeff"
PORT = "org.gpuspawner.service.0"

Message = dict[str, Any]


def make_gpu_memory(path: Path, mib: int = 16, serial: str = "EMU-test-0") -> Path:
    """The backing file of an emulated GPU, zeros but for its identity page."""
    page = {
        "magic": "gpuspawner-emulated-gpu",
        "v": 1,
        "serial": serial,
        "uuid": "GPU-7c2f1bb0-0000-4000-8000-000000000001",
        "model": f"Emulated GPU {mib}M",
        "vbios": "1.0",
    }
    with path.open("wb") as handle:
        handle.write(json.dumps(page).encode("ascii"))
        handle.truncate(mib << 20)
    return path


def gpu_devices(memory: Path, dma_mask: int = 0xFFFFFFFF) -> list[str]:
    """Arguments of one emulated GPU behind a root port, as the domain builder makes it."""
    size = memory.stat().st_size
    return [
        "-device", "pcie-root-port,id=gpu0port,bus=pcie.0,chassis=1,addr=0x4",
        "-device",
        f"edu,id=gpu0control,bus=gpu0port,addr=0.0,multifunction=on,dma_mask={dma_mask:#x}",
        "-object",
        f"memory-backend-file,id=gpu0mem,mem-path={memory},size={size},share=on",
        "-device", "ivshmem-plain,bus=gpu0port,addr=0.1,memdev=gpu0mem",
    ]  # fmt: skip


class Monitor:
    """QEMU's monitor (QMP) behind the socket `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def command(self, name: str, **arguments: Any) -> None:
        """One command; its answer is not looked at."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._path))
            stream = connection.makefile("rwb", buffering=0)
            stream.readline()
            for request in (
                {"execute": "qmp_capabilities"},
                {"execute": name, "arguments": arguments},
            ):
                stream.write(json.dumps(request).encode() + b"\n")
                stream.readline()


@dataclass
class ServiceRun:
    """One boot of a service image.

    :ivar image: the image's directory, with its manifest.
    :ivar devices: QEMU arguments of the GPU, none for a GPU that is absent.
    :ivar arguments: further words of the kernel command line.
    :ivar scratch: where the sockets and the console log go.
    """

    image: Path
    scratch: Path
    devices: Sequence[str] = ()
    arguments: str = ""
    memory_mib: int = 256
    times: dict[str, float] = field(default_factory=dict)

    def __enter__(self) -> ServiceRun:
        manifest = json.loads((self.image / "manifest.json").read_text())
        files = {name: self.image / entry["file"] for name, entry in manifest["files"].items()}
        self.console = self.scratch / "console.log"
        port = self.scratch / "port"
        port.unlink(missing_ok=True)
        words = f"gpuspawner.run={RUN} gpuspawner.nonce={NONCE} gpuspawner.tier=L1"
        command = [
            "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot",
            "-machine", "q35,accel=tcg", "-cpu", "max", "-m", str(self.memory_mib), "-smp", "1",
            "-display", "none", "-serial", f"file:{self.console}",
            "-kernel", str(files["kernel"]), "-initrd", str(files["initrd"]),
            "-append", f"{manifest['cmdline']} {words} {self.arguments}".strip(),
            "-device", "virtio-serial-pci,bus=pcie.0,addr=0x3",
            "-chardev", f"socket,id=report,path={port},server=on,wait=off",
            "-device", f"virtserialport,chardev=report,name={PORT}",
            "-qmp", f"unix:{self.scratch / 'qmp'},server=on,wait=off",
            *self.devices,
        ]  # fmt: skip
        self.monitor = Monitor(self.scratch / "qmp")
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._socket = socket.socket(socket.AF_UNIX)
        deadline = self.began + 20
        while True:
            try:
                self._socket.connect(str(port))
                break
            except OSError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    self.process.kill()
                    raise
                time.sleep(0.02)
        self._pending = b""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def line(self, timeout_s: float = 90) -> bytes | None:
        """The next line of the report port, without its end; None when none came in time or QEMU
        ended."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._socket], [], [], left)[0]:
                return None
            data = self._socket.recv(65536)
            if not data:
                return None
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def messages(
        self, on_message: Callable[[Message], None] = lambda message: None, timeout_s: float = 90
    ) -> list[Message]:
        """All messages up to ``final``; ``times`` gets the seconds since start of each kind."""
        found: list[Message] = []
        while (line := self.line(timeout_s)) is not None:
            message = json.loads(line)
            self.times.setdefault(message["t"], time.monotonic() - self.began)
            found.append(message)
            on_message(message)
            if message["t"] == "final":
                break
        return found

    def acknowledge(self) -> None:
        """Send the acknowledgement, as the host does after ``final``."""
        self._socket.sendall(json.dumps({"v": 1, "t": "ack", "run": RUN}).encode() + b"\n")

    def wait_off(self, timeout_s: float = 30) -> int:
        """QEMU's exit status, once the guest has powered off."""
        return self.process.wait(timeout_s)


def flip(memory: Path, offset: int, mask: int) -> None:
    """Change bits of the GPU's memory from outside, as a fault does."""
    handle = os.open(memory, os.O_RDWR)
    try:
        byte = os.pread(handle, 1, offset)[0]
        os.pwrite(handle, bytes([byte ^ mask]), offset)
    finally:
        os.close(handle)


def results(messages: Sequence[Message]) -> dict[str, Message]:
    """The result messages by check."""
    return {message["check"]: message for message in messages if message["t"] == "result"}
