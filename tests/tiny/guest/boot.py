"""Process 1 of the tiny guest: does with the seed what the real image's units do."""

from __future__ import annotations

import glob
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service_vm.program.kernel import load_modules, mount, power_off, unmount

READ_ONLY = 1
KEY_EVENT, KEY_POWER = 1, 116
EVENT = struct.Struct("qqHHi")  # struct input_event
SEED_FILE = "gpuspawner.json"
HOME = "/home"
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Home:
    """What became of the home disk; shown by ``test/home/state``."""

    mounted: bool = False
    read_only: bool = False
    formatted: bool = False
    problem: str = ""


@dataclass
class Guest:
    """All that the server wants to know of the boot."""

    seed: dict[str, Any] = field(default_factory=dict)
    home: Home = field(default_factory=Home)
    problems: list[str] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        return dict(self.seed.get("server", {}).get("env", {}))

    @property
    def prefix(self) -> str:
        return self.env.get("JUPYTERHUB_SERVICE_PREFIX", "/")

    @property
    def port(self) -> int:
        return int(self.seed.get("server", {}).get("port", 8888))


def log(text: str) -> None:
    """A line on the console, with the seconds since the kernel started."""
    print(f"tiny {time.clock_gettime(time.CLOCK_BOOTTIME):.2f}: {text}", flush=True)


def run(*command: str) -> None:
    """:raises subprocess.CalledProcessError: the command failed; its output is on the console."""
    subprocess.run(command, check=True, env={"PATH": PATH})


def boot() -> Guest:
    """Everything before the server; what fails is noted and the guest goes on."""
    for kind, target in (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")):
        mount(kind, target)
    for target in ("/run", "/tmp"):
        mount("tmpfs", target)
    os.environ["PATH"] = PATH
    load_modules(Path("/modules"))
    log("modules loaded")
    guest = Guest()
    threading.Thread(target=watch_power_button, daemon=True).start()
    for step in (read_seed, write_files, set_hostname, set_network, mount_home):
        try:
            step(guest)
        except Exception as error:
            guest.problems.append(f"{step.__name__}: {type(error).__name__}: {error}")
            log(guest.problems[-1])
    return guest


def read_seed(guest: Guest) -> None:
    """Copy the seed's JSON and let go of the disk, which the host takes away later."""
    deadline = time.monotonic() + 10
    while not os.path.exists("/dev/sr0"):
        if time.monotonic() > deadline:
            raise TimeoutError("no CD-ROM drive")
        time.sleep(0.02)
    mount("iso9660", "/seed", "/dev/sr0", READ_ONLY)
    try:
        guest.seed = json.loads(Path("/seed", SEED_FILE).read_text())
    finally:
        unmount("/seed")
    log("seed read")


def write_files(guest: Guest) -> None:
    """The server's files, for root alone."""
    for name, content in guest.seed.get("server", {}).get("files", {}).items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(content)


def set_hostname(guest: Guest) -> None:
    """The name that the seed gives."""
    socket.sethostname(guest.seed.get("hostname", "tiny"))


def set_network(guest: Guest) -> None:
    """The static address, on the interface with the seed's MAC."""
    run("ip", "link", "set", "lo", "up")
    network = guest.seed.get("network")
    if not network:
        return
    for path in glob.glob("/sys/class/net/*/address"):
        if Path(path).read_text().strip().lower() == network["mac"].lower():
            name = path.split("/")[4]
            break
    else:
        raise LookupError(f"no interface has the MAC {network['mac']}")
    run("ip", "addr", "add", network["address"], "dev", name)
    run("ip", "link", "set", name, "up")
    if network.get("gateway"):
        run("ip", "route", "add", "default", "via", network["gateway"])
    servers = "".join(f"nameserver {server}\n" for server in network.get("dns", ()))
    Path("/etc/resolv.conf").write_text(servers)
    log(f"{name} has {network['address']}")


def mount_home(guest: Guest) -> None:
    """Make a file system only on a new and empty disk; damaged: read-only; else go on without."""
    wanted = guest.seed.get("home", {}).get("serial", "home")
    disks = [
        path.split("/")[3]
        for path in glob.glob("/sys/block/vd*/serial")
        if Path(path).read_text().strip() == wanted
    ]
    if not disks:
        guest.home.problem = "no disk"
        return
    device = f"/dev/{disks[0]}"
    if guest.seed.get("home", {}).get("new") and not has_file_system(device):
        run("mke2fs", "-q", "-t", "ext4", "-E", "nodiscard", device)
        guest.home.formatted = True
    for flags in (0, READ_ONLY):
        try:
            mount("ext4", HOME, device, flags)
        except OSError as error:
            guest.home.problem = str(error)
            continue
        guest.home.mounted, guest.home.read_only = True, bool(flags)
        log(f"home is {device}")
        return


def has_file_system(device: str) -> bool:
    """Whether blkid knows anything on the device."""
    found = subprocess.run(["blkid", "-p", device], stdout=subprocess.DEVNULL, env={"PATH": PATH})
    return found.returncode == 0


def watch_power_button() -> None:
    """Switch off cleanly when the host presses the ACPI power button."""
    deadline = time.monotonic() + 10
    while not (paths := glob.glob("/dev/input/event*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    handles = [open(path, "rb", buffering=0) for path in paths]  # noqa: SIM115 -- for ever
    while handles:
        for handle in select.select(handles, [], [])[0]:
            _, _, kind, code, value = EVENT.unpack(handle.read(EVENT.size))
            if (kind, code, value) == (KEY_EVENT, KEY_POWER, 1):
                switch_off()


def switch_off() -> None:
    """Sync and unmount the home, then power off."""
    log("power off")
    os.sync()
    try:
        unmount(HOME)
    except OSError as error:  # none there, or a file is open: it is synced all the same
        log(f"home: {error}")
    power_off()


def main() -> None:
    """Never returns."""
    try:
        guest = boot()
        from tests.tiny.guest.server import serve

        serve(guest)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    power_off()
