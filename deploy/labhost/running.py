"""A lab host that runs: started with new keys on a new disk, reached by ssh, stopped."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from deploy.labhost import machine, network
from deploy.labhost.image import HostImage
from deploy.labhost.machine import GPUS, Files, LabGpu
from deploy.labhost.network import Networks
from deploy.labhost.qmp import Monitor
from deploy.labhost.seed import Keys, seed
from deploy.stack.process import last_lines
from deploy.stack.say import Problem, line, step
from deploy.stack.state import write_private
from deploy.stack.tools import run_quietly
from gpuspawner.host.emulated import IDS, identity_page, is_identity_page
from gpuspawner.pool.topology import Gpu

MARK = ".gpuspawner-lab"
ALIAS = "gpu-lab"  # the name that ssh knows it by
# Emulated processors sometimes go on executing code that another has just changed (QEMU 7.2); a
# kernel then hangs at boot, the more often the busier this machine is. So it is tried again.
BOOT_S = 240.0
_TRIES = 3
_GRACE_S = 10.0

#: What the pool is told about this host's hardware.
HARDWARE = """\
# The lab host's hardware, for 'gpuspawner host add --hardware'.
system_cores: 1
reserve_mib: 1024
gpus:
  - {vendor: "1234", device: "11e8", kind: emulated, model: Lab GPU 16M, memory_mib: 16}
"""


class _Silent(Problem):
    """The lab host runs, and does not answer."""


@dataclass(frozen=True)
class Lab:
    """The lab in a state directory."""

    root: Path
    networks: Networks = field(default_factory=Networks)

    @property
    def key(self) -> Path:
        """The private key that its root accepts."""
        return self.root / "id_ed25519"

    @property
    def ssh_program(self) -> Path:
        """An ``ssh`` that knows the lab host: its address, keys, and one shared connection."""
        return self.root / "ssh"

    @property
    def hardware(self) -> Path:
        """The file for ``gpuspawner host add --hardware``."""
        return self.root / "lab.yaml"

    @property
    def memories(self) -> Path:
        """Folder of the GPUs' memories."""
        return self.root / "gpus"

    @property
    def console(self) -> Path:
        """The lab host's serial console."""
        return self.root / "console.log"

    @property
    def pid_file(self) -> Path:
        """QEMU's process id."""
        return self.root / "qemu.pid"

    @property
    def uri(self) -> str:
        """Its libvirt."""
        program = quote(str(self.ssh_program), safe="/")
        return f"qemu+ssh://root@{ALIAS}/system?command={program}&proxy=native&no_tty=1"

    @property
    def shell(self) -> list[str]:
        """What reaches its shell."""
        return [str(self.ssh_program), "-o", "BatchMode=yes", ALIAS]

    def add_command(self, name: str = "lab") -> list[str]:
        """The ``gpuspawner`` command that takes it into a pool."""
        return [
            *("gpuspawner", "host", "add", name, "--uri", self.uri),
            *("--shell", shlex.join(self.shell), "--network", "bridge"),
            *("--bridge", network.BRIDGE, "--cidr", self.networks.guests),
            # Said, not tried out: a boot may take longer here than the trial waits.
            *("--hardware", str(self.hardware), "--accel", "kvm"),
        ]

    def memory(self, gpu: LabGpu) -> Path:
        """The file that is this GPU's memory."""
        return machine.memory_file(self.memories, gpu)

    # -- state ------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the state directory.

        :raises Problem: it is there, and no lab has made it.
        """
        if self.root.exists() and any(self.root.iterdir()) and not (self.root / MARK).exists():
            raise Problem(
                f"{self.root} is not empty and no lab has made it.",
                "Name a directory of its own with --state DIR.",
            )
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.root / MARK).touch()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One start or stop at a time.

        :raises Problem: another one is under way.
        """
        with (self.root / "lock").open("a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Problem("Another 'deploy/lab' is at work on this lab.", "Wait.") from None
            os.set_inheritable(handle.fileno(), False)
            yield

    def pid(self) -> int | None:
        """QEMU's process id; ``None`` when the lab does not run."""
        try:
            pid = int(self.pid_file.read_text())
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return pid if str(self.pid_file).encode() in words else None

    def monitor(self) -> Monitor:
        """QEMU's monitor, for faults: ``monitor().do("device_del", id="gpu5")``."""
        return Monitor(self.root / "qmp.sock")

    # -- starting ---------------------------------------------------------------------------------

    def start(self, image: HostImage, memory_mib: int = machine.MEMORY_MIB) -> None:
        """Start it and wait until its libvirt answers over ssh. The disk is new each time; the
        GPUs' memories are those of last time, as a card's would not be, but a reset's may.

        :raises Problem: it runs already, or does not come up.
        """
        if self.pid() is not None:
            raise Problem("The lab runs already.", "Stop it: deploy/lab stop.")
        for tries_left in reversed(range(_TRIES)):
            try:
                self._start_once(image, memory_mib)
                return
            except _Silent:
                self.stop()
                if not tries_left:
                    raise
                line("  ..  The lab host does not come up; it is started anew")
            except BaseException:
                self.stop()
                raise

    def _start_once(self, image: HostImage, memory_mib: int) -> None:
        with step("Making keys, seed and GPU memories"):
            self._write(image)
        network.connect(self.networks)
        with step("Starting the lab host"):
            cards = (network.ADMIN, network.GUESTS)
            program = image.emulator.command()
            command = machine.command(self._files(image), cards, memory_mib, program)
            run_quietly(command, "The lab's QEMU")
        with step("Waiting for its shell and its libvirt"):
            self._wait()

    def _files(self, image: HostImage) -> Files:
        return Files(
            kernel=image.kernel,
            initrd=image.initrd,
            root=self.root / "root.qcow2",
            seed=self.root / "seed.tar",
            console=self.console,
            qmp=self.root / "qmp.sock",
            pid=self.pid_file,
            memories=self.memories,
        )

    def _write(self, image: HostImage) -> None:
        files = self._files(image)
        for path in (files.root, files.console, files.qmp, files.pid):
            path.unlink(missing_ok=True)
        backing = ["-b", str(image.root), "-F", "qcow2"]
        create = ["qemu-img", "create", "-q", "-f", "qcow2", *backing, str(files.root)]
        run_quietly(create, "Making the lab host's disk")
        mine, theirs = self.key, self.root / "host_ed25519"
        for key in (mine, theirs):
            for path in (key, key.with_name(key.name + ".pub")):
                path.unlink(missing_ok=True)
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "gpuspawner-lab"]
            run_quietly([*make, "-f", str(key)], "Making a key")
        public = mine.with_name(mine.name + ".pub").read_text()
        content = seed(self.networks, Keys(public, theirs.read_text()))
        files.seed.unlink(missing_ok=True)
        files.seed.touch(mode=0o600)
        files.seed.write_bytes(content)
        host_key = theirs.with_name(theirs.name + ".pub").read_text()
        (self.root / "known_hosts").write_text(f"{ALIAS} {host_key}")
        write_private(self.root / "ssh_config", self._ssh_config())
        self.ssh_program.write_text(
            f'#!/bin/sh\nexec ssh -F {shlex.quote(str(self.root / "ssh_config"))} "$@"\n'
        )
        self.ssh_program.chmod(0o755)
        self.hardware.write_text(HARDWARE)
        self.memories.mkdir(exist_ok=True)
        for gpu in GPUS:
            self._make_memory(gpu)

    def _ssh_config(self) -> str:
        root = self.root
        # Keys are exchanged once: that takes seconds on an emulated machine.
        return (
            f"Host {ALIAS}\n"
            f"    HostName {self.networks.host}\n"
            f"    HostKeyAlias {ALIAS}\n"
            "    User root\n"
            f'    IdentityFile "{self.key}"\n'
            "    IdentitiesOnly yes\n"
            f'    UserKnownHostsFile "{root / "known_hosts"}"\n'
            "    StrictHostKeyChecking yes\n"
            "    LogLevel ERROR\n"
            "    ConnectTimeout 20\n"
            "    ServerAliveInterval 10\n"
            "    ServerAliveCountMax 6\n"
            "    ControlMaster auto\n"
            f'    ControlPath "{root / "ssh.sock"}"\n'
            "    ControlPersist 300\n"
        )

    def _make_memory(self, gpu: LabGpu) -> None:
        path = self.memory(gpu)
        size = machine.GPU_MEMORY_MIB << 20
        if path.exists() and path.stat().st_size == size:
            with path.open("rb") as handle:
                if is_identity_page(handle.read(4096)):
                    return
        card = Gpu(
            address=gpu.address,
            model="Lab GPU 16M",
            node=gpu.node,
            functions=(),
            group=GPUS.index(gpu),
            ids=IDS,
            memory_mib=machine.GPU_MEMORY_MIB,
            emulated=True,
        )
        with path.open("wb") as handle:
            handle.write(identity_page("lab", "lab", card))
            handle.truncate(size)

    def _wait(self) -> None:
        end = time.monotonic() + BOOT_S
        cpus = "systemctl is-active --quiet lab-cpus.service"
        ready = ["sh", "-c", f"{cpus} && virsh -c qemu:///system version --daemon"]
        while self.ssh(ready, timeout_s=60).returncode:
            if self.pid() is None:
                tail = "\n".join(f"    | {text}" for text in last_lines(self.console))
                raise Problem(
                    f"The lab host has ended. Its console's last lines:\n{tail}\n",
                    f"All of it: {self.console}",
                )
            if time.monotonic() > end:
                raise _Silent(
                    f"The lab host does not answer after {BOOT_S:g} s, {_TRIES} times in a row.",
                    f"This machine may be too busy. The host's console: {self.console}",
                )
            time.sleep(1)

    # -- using and stopping -----------------------------------------------------------------------

    def ssh(self, words: Sequence[str], timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command there. Past the time-out, or without a connection, its status is 255."""
        command = [*self.shell, shlex.join(words)]
        try:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 255, "", f"not done after {timeout_s:g} s")

    def stop(self) -> None:
        """End it and take its network away. Its disk is thrown away, so it is not shut down."""
        pid = self.pid()
        if pid is not None:
            if not _in_our_network(pid):
                raise Problem(
                    f"The lab (process {pid}) runs in another network namespace.",
                    f"Stop it there: nsenter -t {pid} -n deploy/lab stop",
                )
            os.kill(pid, signal.SIGTERM)
            end = time.monotonic() + _GRACE_S
            while self.pid() is not None:
                if time.monotonic() > end:
                    os.kill(pid, signal.SIGKILL)
                    end = time.monotonic() + _GRACE_S
                time.sleep(0.1)
        # The shared connection's keeper outlives the one who made it.
        if (self.root / "ssh.sock").exists():
            command = [str(self.ssh_program), "-O", "exit", ALIAS]
            subprocess.run(command, capture_output=True, check=False, timeout=20)
        network.disconnect()
        for name in ("root.qcow2", "qemu.pid", "qmp.sock", "seed.tar"):
            (self.root / name).unlink(missing_ok=True)


def _in_our_network(pid: int) -> bool:
    return os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), os.stat("/proc/self/ns/net"))
