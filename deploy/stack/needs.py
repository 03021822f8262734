"""What the machine must have before anything is installed or started.

Every check is a function of facts, and all of them run before the first complaint, so that the
reader learns everything that is missing at once.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

DISK_GIB = 12
DISK_AGAIN_GIB = 2
MEMORY_GIB = 6
DEBIAN = ("12", "13")


@dataclass(frozen=True)
class Finding:
    """One thing that is missing. ``fatal`` is false for what merely slows things down."""

    text: str
    fatal: bool = True


def python(version: tuple[int, ...] = sys.version_info[:2]) -> list[Finding]:
    """Python 3.11 or later."""
    if version >= (3, 11):
        return []
    have = ".".join(map(str, version))
    return [Finding(f"This is Python {have} and 3.11 or later is needed: run it as 'python3.11'.")]


def architecture(machine: str | None = None) -> list[Finding]:
    """x86_64: the images and the emulated machines are made for it."""
    machine = machine or platform.machine()
    if machine == "x86_64":
        return []
    return [Finding(f"This machine is {machine} and the images are x86_64: use an x86_64 machine.")]


def distribution(os_release: Mapping[str, str] | None = None) -> list[Finding]:
    """Debian 12 or 13; another Debian is tried with a warning."""
    if os_release is None:
        try:
            os_release = platform.freedesktop_os_release()
        except OSError:
            os_release = {}
    family = [os_release.get("ID", ""), *os_release.get("ID_LIKE", "").split()]
    name = os_release.get("PRETTY_NAME") or os_release.get("ID") or "an unknown system"
    if "debian" not in family or not shutil.which("apt-get"):
        return [Finding(f"This is {name} and the quickstart knows Debian: use Debian 12 or 13.")]
    if os_release.get("ID") == "debian" and os_release.get("VERSION_ID") in DEBIAN:
        return []
    return [Finding(f"This is {name}; only Debian 12 and 13 are tested.", fatal=False)]


def memory(meminfo: str | None = None) -> list[Finding]:
    """6 GiB in all, of which a part must be free now."""
    text = meminfo if meminfo is not None else Path("/proc/meminfo").read_text()
    kib = {
        key: int(rest.split()[0])
        for key, _, rest in (x.partition(":") for x in text.split("\n") if x)
    }
    total, free = kib["MemTotal"] / 2**20, kib.get("MemAvailable", 0) / 2**20
    # The kernel keeps a few per cent back: a machine sold as 6 GiB shows about 5.8.
    if total < MEMORY_GIB * 0.93:
        return [Finding(f"This machine has {total:.1f} GiB of memory and needs {MEMORY_GIB} GiB.")]
    if free < 3:
        return [
            Finding(f"Only {free:.1f} GiB of memory is free: close something, 3 GiB is needed.")
        ]
    return []


def disk(path: Path, need_gib: int = DISK_GIB, free_bytes: int | None = None) -> list[Finding]:
    """Room below ``path``, which need not exist yet."""
    there = next(place for place in (path, *path.parents) if place.exists())
    free = (shutil.disk_usage(there).free if free_bytes is None else free_bytes) / 2**30
    if free >= need_gib:
        return []
    return [
        Finding(
            f"Only {free:.1f} GiB is free on the disk of {there} and {need_gib} GiB is needed: "
            "make room, or name another place with --state DIR."
        )
    ]


def ports(wanted: Mapping[str, tuple[str, int, str]]) -> list[Finding]:
    """Nobody may listen on the ports. ``wanted``: title -> (address, port, option)."""
    found = []
    for title, (address, port, option) in wanted.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                why = "is taken" if error.errno == errno.EADDRINUSE else f"fails ({error.strerror})"
                text = f"Port {port} for the {title} {why}: stop what listens there"
                found.append(Finding(f"{text}, or choose another with {option} PORT."))
    return found


def network(cidr: str, bridges: Iterable[str] = (), routes: str | None = None) -> list[Finding]:
    """The guests' range must not be somebody else's already.

    :param bridges: beginnings of the names of our own bridges, which may have it.
    """
    try:
        ours = ipaddress.ip_network(cidr)
    except ValueError as error:
        return [Finding(f"{cidr} is not a network ({error}): write it as 10.201.0.0/24.")]
    if ours.version != 4 or ours.prefixlen > 28 or not ours.is_private:
        return [Finding(f"{cidr} must be a private IPv4 range of at least 16 addresses.")]
    if routes is None:
        if not shutil.which("ip"):
            return []  # comes with iproute2 later; libvirt refuses a clash on its own
        command = ["ip", "-j", "-4", "route", "show", "table", "main"]
        routes = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    for route in json.loads(routes or "[]"):
        target, device = route.get("dst", "default"), route.get("dev", "")
        if target == "default" or any(device.startswith(name) for name in bridges):
            continue
        # A VPN that takes all traffic often routes the two halves of the world; that is as much a
        # default route.
        if ipaddress.ip_network(target, strict=False).prefixlen < 8:
            continue
        if ours.overlaps(ipaddress.ip_network(target, strict=False)):
            return [
                Finding(
                    f"The guests' network {cidr} is in use on {device or 'this machine'} "
                    f"({target}): choose another with --network CIDR."
                )
            ]
    return []


def root() -> list[Finding]:
    """Root, or a way to become root."""
    if os.geteuid() == 0 or shutil.which("sudo"):
        return []
    return [
        Finding("Networks and virtual machines need root and there is no sudo: run it as root.")
    ]
