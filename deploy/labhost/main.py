"""``deploy/lab``: the command line, and the virtual environment that the rest runs in.

Only the standard library is used before that environment is there.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.stack import needs
from deploy.stack.say import Problem, complain, line
from deploy.stack.tools import (
    CHECKOUT,
    RUN_PACKAGES,
    install_packages,
    make_venv,
    missing_packages,
    python_packages,
)

if TYPE_CHECKING:
    from deploy.labhost.running import Lab

SCRIPT = CHECKOUT / "deploy" / "lab"
DEFAULT_STATE = Path("/var/lib/gpuspawner-lab")
FAILED, MISSING = 1, 3
PACKAGES = {**RUN_PACKAGES, "openssh-client": "reaching the lab host"}
_NEEDED = ("elftools", "pydantic", "yaml")

DESCRIPTION = """\
A GPU host without a GPU: real VFIO passthrough to try and to test with.

QEMU plays a machine with an IOMMU, two NUMA nodes and six GPUs on root ports of their own: two on
each node, one more whose link is degraded, and one to pull out. Inside runs a Debian with libvirt,
which passes these devices on to its own virtual machines by VFIO, as a real GPU host does. All of
it is emulated, and slow: the host is up in about a minute, a virtual machine on it in two.

verbs
  build        build the host's disk image (once; three minutes on two cores)
  start        build if need be, start, wait until libvirt answers, and say how to add it
  status       whether it runs, and how to add it; exit status 1 if it does not
  ssh WORDS    run a command on it, or a shell
  unplug GPU   pull a GPU out of its slot while the host runs (gpu5, for example)
  stop         end it; its disk is thrown away, the GPUs' memories stay
"""

EPILOG = """\
what it needs
  Debian 12 or 13 on x86_64, root, 7 GiB of free memory, 12 GiB of disk, and no KVM.

what it changes on this machine
  Debian packages that are missing, as deploy/quickstart does; --no-install names them and stops.
  Two network interfaces while it runs, gslab-admin and gslab-guests, with the first addresses of
  --admin-network and --network. They lead to the lab and nowhere else. To keep them away from the
  machine's network altogether, run it in a network namespace (ip netns exec NAME deploy/lab start)
  with the allocator and the hub.

exit status
  0 done; 1 it failed or does not run; 2 wrong option; 3 something is missing.
"""


def main(argv: list[str] | None = None) -> int:
    """Run a verb; the exit status."""
    words = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(words)
    try:
        return _main(options, words)
    except Problem as problem:
        complain(f"\n{problem}")
        return FAILED
    except KeyboardInterrupt:
        complain("\nInterrupted.")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deploy/lab",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    state = "state directory (default: %(default)s)"
    parser.add_argument("--state", type=Path, default=DEFAULT_STATE, help=state)
    parser.add_argument("--no-install", action="store_true", help="install no Debian packages")
    parser.add_argument("--network", default="10.239.0.0/24", help="the guests' (%(default)s)")
    parser.add_argument(
        "--admin-network", default="10.238.0.0/28", help="the host's own (%(default)s)"
    )
    parser.add_argument("verb", choices=("build", "start", "status", "ssh", "unplug", "stop"))
    parser.add_argument("words", nargs=argparse.REMAINDER, help="of ssh and unplug")
    return parser


def _main(options: argparse.Namespace, words: list[str]) -> int:
    if os.geteuid() != 0:
        raise Problem("The lab's networks and disks need root.", f"Run 'sudo {SCRIPT} ...'.")
    options.state = options.state.absolute()
    if options.verb in ("build", "start") and not _ready(options):
        return MISSING
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        python = options.state / "venv" / "bin" / "python"
        if options.verb in ("build", "start"):
            _claim(options.state)
            python = make_venv(options.state / "venv", ("images", "libvirt"))
        if not python.exists():
            raise Problem(f"There is no lab at {options.state}.", "Start one: deploy/lab start.")
        os.execv(python, [str(python), str(SCRIPT), *words])
    return _do(options)


def _claim(state: Path) -> None:
    """Make the state directory before the virtual environment goes into it."""
    if not state.exists():
        state.mkdir(parents=True, mode=0o700)
        (state / ".gpuspawner-lab").touch()


def _ready(options: argparse.Namespace) -> bool:
    """Say all that is missing, and install what may be installed."""
    findings = [*needs.architecture(), *needs.distribution()]
    if options.verb == "start":
        findings += needs.memory()
        for cidr in (options.network, options.admin_network):
            findings += needs.network(cidr, bridges=("gslab-",))
    for finding in findings:
        complain(f"  {'!!' if finding.fatal else ' !'}  {finding.text}")
    if any(finding.fatal for finding in findings):
        return False
    lacking = missing_packages([*PACKAGES, *python_packages()])
    if lacking and options.no_install:
        names = " ".join(lacking)
        complain(f"Missing: {names}\nInstall: apt-get install --no-install-recommends {names}")
        return False
    install_packages(lacking)
    return True


def _do(options: argparse.Namespace) -> int:
    from deploy.labhost.network import Networks
    from deploy.labhost.running import ALIAS, Lab

    lab = Lab(options.state, Networks(options.admin_network, options.network))
    if options.verb == "ssh":
        os.execv(lab.ssh_program, [str(lab.ssh_program), ALIAS, *options.words])
    if options.verb == "status":
        return _status(lab)
    lab.prepare()
    with lab.lock():
        if options.verb == "stop":
            runs = lab.pid() is not None
            lab.stop()
            line("The lab is stopped." if runs else "No lab was running.")
        elif options.verb == "unplug":
            _unplug(lab, options.words)
        else:
            _build_and_start(lab, options.verb == "start")
    return 0


def _build_and_start(lab: Lab, start: bool) -> None:
    from deploy.labhost import image
    from deploy.stack import images

    cache = Path(os.environ.get("GPUSPAWNER_CACHE") or lab.root / "cache")
    command = [sys.executable, "-m", "deploy.labhost.image", "--progress", "json"]
    images.build(command, "lab host", lab.root, cache, lab.root / "build.log")
    if start:
        lab.start(image.built(cache))
        _tell(lab)


def _status(lab: Lab) -> int:
    pid = lab.pid()
    if pid is None:
        line("The lab does not run. Start it: deploy/lab start.")
        return FAILED
    answers = lab.ssh(["virsh", "-c", "qemu:///system", "list", "--name"])
    if answers.returncode:
        line(f"The lab runs (process {pid}) and does not answer: {answers.stderr.strip()}")
        return FAILED
    names = answers.stdout.split()
    line(f"The lab runs (process {pid}) with {len(names)} virtual machines on it.")
    _tell(lab)
    return 0


def _tell(lab: Lab) -> None:
    networks = lab.networks
    line(f"""
Its guests' network: {networks.guests}. The hub's API must listen at {networks.gateway}, where
guests find it (hub_guest_url of the allocator).

Add it to a pool:
  {shlex.join(lab.add_command())}

Look at it:
  {SCRIPT} --state {lab.root} ssh lspci -tv
  virsh -c '{lab.uri}' list
""")


def _unplug(lab: Lab, words: list[str]) -> None:
    from deploy.labhost.machine import GPUS

    names = [gpu.name for gpu in GPUS]
    if len(words) != 1 or words[0] not in names:
        raise Problem("Which GPU?", f"One of {', '.join(names)}.")
    with lab.monitor() as monitor:
        monitor.do("device_del", id=words[0])
    line(f"{words[0]}: the host was asked to let it go, and has five seconds to object.")


__all__ = ["main"]
