"""libvirtd as its tests treat it: killed, stopped in its tracks, started again; a second one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deploy import libvirtd as deploy
from tests.layers import wait_for
from tests.private_libvirt import inside, private_libvirt

CHECKOUT = Path(__file__).resolve().parents[2]


class Daemon:
    """The libvirtd that listens on a socket. ``run`` is its ``/run/libvirt`` as seen from here."""

    def __init__(self, run: Path = deploy.RUN_DIR) -> None:
        self.run = run
        self.socket = run / deploy.LIBVIRTD_SOCKET.name
        self._again: list[str] = []  # the command line of the one that was killed
        self._log = ""
        self._mounts = -1  # its mount namespace, which may end with it otherwise
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def pid(self) -> int:
        """Who listens; a stopped one too, as the kernel takes the connection."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self.socket))
            peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", peer)[0]
        return pid

    @property
    def enter(self) -> tuple[str, ...]:
        """What a command is started with to see the file systems that the daemon sees."""
        return ("nsenter", "--target", str(self.pid), "--mount")

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """``kill -9``; its guests go on."""
        pid = self.pid
        self._again = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
        self._log = os.readlink(f"/proc/{pid}/fd/2")
        self._forget_mounts()
        self._mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not deploy.answers(self.socket), 10, "libvirtd to be dead")

    def start(self) -> None:
        """Start the one that was killed again, as systemd would."""
        here = f"/proc/self/fd/{self._mounts}"
        with open(self._log, "ab") as out:
            process = subprocess.Popen(
                ["nsenter", f"--mount={here}", "--", *self._again],
                pass_fds=[self._mounts],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._started.append(process)

        def answers() -> bool:
            assert process.poll() is None, Path(self._log).read_text()[-2000:]
            return deploy.answers(self.socket)

        wait_for(answers, 60, "libvirtd to answer again")

    def close(self) -> None:
        """End what was started here."""
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                process.wait(30)
        self._forget_mounts()

    def _forget_mounts(self) -> None:
        if self._mounts >= 0:
            os.close(self._mounts)
            self._mounts = -1

    # ------------------------------------------------------------------ its guests

    def qemu(self, domain: str) -> int:
        """The process of a domain that runs."""
        return int((self.run / "qemu" / f"{domain}.pid").read_text())


@contextlib.contextmanager
def own_daemon() -> Iterator[Daemon]:
    """libvirtd for as long as the block runs; the one that answers already is used as it is."""
    state = Path(tempfile.mkdtemp(prefix="gs-libvirtd-", dir="/var/tmp"))
    try:
        with deploy.libvirtd(state), contextlib.closing(Daemon()) as daemon:
            yield daemon
    finally:
        shutil.rmtree(state, ignore_errors=True)


@contextlib.contextmanager
def second_daemon() -> Iterator[Daemon]:
    """Another libvirtd on this machine that knows nothing of the first: its folders are its own.
    It is reached by ``qemu+unix:///system?socket=...``."""
    with private_libvirt() as (prefix, folder):
        # What QEMU can do is learnt once.
        shutil.copytree(
            "/var/cache/libvirt", inside(folder, "/var/cache/libvirt"), dirs_exist_ok=True
        )
        state = folder / "state"
        command = ["unshare", "--mount", *prefix, sys.executable, "-m", "deploy.libvirtd"]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [*command, str(state)], cwd=CHECKOUT, stdout=log, stderr=log, start_new_session=True
            )
        daemon = Daemon(inside(folder, "/run/libvirt"))
        try:

            def answers() -> bool:
                assert process.poll() is None, (folder / "log").read_text()[-2000:]
                return deploy.answers(daemon.socket)

            wait_for(answers, 90, "the second libvirtd to answer")
            yield daemon
        finally:
            daemon.close()
            process.terminate()
            process.wait(60)
