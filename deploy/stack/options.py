"""The quickstart's command line; ``--help`` is its manual."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DEFAULT_STATE = Path("/var/lib/gpuspawner-quickstart")

DESCRIPTION = """\
JupyterHub on virtual machines with GPUs of their own, on this machine, from nothing.

A Debian 12 or 13 with git and Python 3.11 is enough, and no GPU is needed: the machine plays a
host with two NUMA nodes and four emulated GPUs. Everything that is missing is installed (Debian
packages by apt, the rest into the state directory), the JupyterLab image and the diagnostic image
are built, and then allocator, proxy and hub are started. The address and the passwords are
printed at the end. The first run takes five to ten minutes on two cores, mostly for the
images; later runs take less than a minute.

Ctrl-C stops the hub, shuts the users' virtual machines down, and takes away the networks,
storage pools and processes that were started. Homes stay for the next run.
"""

EPILOG = """\
what it needs
  Debian 12 or 13 on x86_64, root (it asks sudo by itself), 6 GiB of memory, 12 GiB of disk.
  /dev/kvm is used if a machine really boots with it; otherwise QEMU emulates, and JupyterLab
  takes one to three minutes to start.

what it changes on this machine
  Debian packages: qemu, libvirt, dnsmasq-base, iptables, ebtables, mmdebstrap, gcc,
  libvirt-dev and what they need. --no-install names the missing ones and stops instead.
  Files: only below the state directory (--state).
  While it runs: a libvirt network and bridge for the guests (--network), firewall rules that
  libvirt makes for it, a storage pool, and the virtual machines. All of their names begin with
  "gs-" and an id of this installation; other machines, networks and pools are left alone.
  A libvirtd that runs already is used as it is; without systemd one is started and stopped.

files in the state directory
  passwords.txt             user names and passwords, readable by root alone
  gpuspawner_config.py      read by the allocator, the hub and the command 'gpuspawner'
  quickstart-host.yaml      the emulated host; edit it to have other nodes and GPUs
  logs/                     one file per process
  images/ cache/ venv/      what was built and installed
  pool/                     the users' homes, among other disks

the admin's command line, while it runs
  sudo env GPUSPAWNER_CONFIG=STATE/gpuspawner_config.py STATE/venv/bin/gpuspawner gpu list

exit status
  0 stopped by Ctrl-C or SIGTERM; 1 something failed; 2 wrong option; 3 something is missing.
"""


@dataclass(frozen=True)
class Options:
    """What the command line said."""

    state: Path
    host: str
    port: int
    proxy_api_port: int
    allocator_port: int
    hub_port: int
    network: str
    check: bool
    prepare: bool
    purge: bool
    install: bool
    accel: Literal["auto", "kvm", "tcg"]


def _port(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is not a port: use 1 to 65535")
    return value


def parser() -> argparse.ArgumentParser:
    """The parser, whose help is the manual."""
    make = argparse.ArgumentParser(
        prog="deploy/quickstart",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = make.add_argument
    add(
        "--state",
        type=Path,
        default=DEFAULT_STATE,
        metavar="DIR",
        help="where everything is kept (default: %(default)s)",
    )
    add(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address that the login page listens on (default: %(default)s; without TLS, so keep "
        "it unless a proxy with a certificate stands in front)",
    )
    add("--port", type=_port, default=8000, help="port of the login page (default: %(default)s)")
    add(
        "--proxy-api-port",
        type=_port,
        default=8001,
        metavar="PORT",
        help="port of the proxy's API, on 127.0.0.1 (default: %(default)s)",
    )
    add(
        "--allocator-port",
        type=_port,
        default=8091,
        metavar="PORT",
        help="port of the allocator, on 127.0.0.1 (default: %(default)s)",
    )
    add(
        "--hub-port",
        type=_port,
        default=8081,
        metavar="PORT",
        help="port of the hub's API, on the guests' bridge (default: %(default)s)",
    )
    add(
        "--network",
        default="10.201.0.0/24",
        metavar="CIDR",
        help="private range for the guests (default: %(default)s)",
    )
    add(
        "--accel",
        choices=("auto", "kvm", "tcg"),
        default="auto",
        help="how guests run: kvm, tcg (emulated), or auto, which boots one to see "
        "(default: %(default)s)",
    )
    add(
        "--prepare",
        action="store_true",
        help="install and build everything, start nothing: the start after it needs no network",
    )
    add("--check", action="store_true", help="only say what is missing, change nothing")
    add(
        "--no-install",
        dest="install",
        action="store_false",
        help="do not install Debian packages: name those that are missing and stop",
    )
    add(
        "--purge",
        action="store_true",
        help="delete the state directory, homes and all, and stop (not while it runs)",
    )
    return make


def parse(argv: list[str]) -> Options:
    """:raises SystemExit: with status 2 for a wrong option, 0 after ``--help``."""
    given = vars(parser().parse_args(argv))
    given["state"] = given["state"].expanduser().absolute()
    return Options(**given)
