"""The quickstart from its first line to the start of the virtual environment's Python."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType

from deploy.stack import needs
from deploy.stack.options import Options, parse
from deploy.stack.say import Problem, complain, line
from deploy.stack.state import State
from deploy.stack.tools import (
    CHECKOUT,
    RUN_PACKAGES,
    install_packages,
    make_venv,
    missing_packages,
    python_packages,
)

SCRIPT = CHECKOUT / "deploy" / "quickstart"
LOCK_VARIABLE = "GPUSPAWNER_QUICKSTART_LOCK"
# sudo forgets the environment; these are worth keeping.
KEEP = ("GPUSPAWNER_CACHE", "http_proxy", "https_proxy", "no_proxy", "PIP_INDEX_URL", "TERM")
FAILED, MISSING = 1, 3


def main() -> int:
    """Run the quickstart; the exit status."""
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        return _main(options)
    except Problem as problem:
        complain(f"\n{problem}")
        return FAILED
    except KeyboardInterrupt:
        line("\nStopped.")
        return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _main(options: Options) -> int:
    state = State(options.state)
    if LOCK_VARIABLE in os.environ:  # set up already: this is the virtual environment's Python
        from deploy.stack.run import run

        return run(options, state)
    state.check_ours()
    if not options.purge and not look(options, state):
        return MISSING
    if options.check:
        return 0
    if os.geteuid() != 0:
        become_root()
    if options.purge and not state.root.exists():
        line(f"There is nothing at {state.root}.")
        return 0
    wanted = [*RUN_PACKAGES, *python_packages()]
    lacking = [] if options.purge else missing_packages(wanted)
    if lacking and not options.install:
        complain(
            f"These Debian packages are missing: {' '.join(lacking)}\n"
            f"Install them: apt-get install --no-install-recommends {' '.join(lacking)}"
        )
        return MISSING
    install_packages(lacking)
    state.make()
    with state.lock() as descriptor:
        python = state.venv / "bin" / "python"
        if options.purge:
            if not python.exists():
                state.purge()
                line(f"Deleted {state.root}.")
                return 0
        else:
            python = make_venv(state.venv, ("images", "libvirt"))
        # The lock goes along: it belongs to the open file, not to the program.
        os.set_inheritable(descriptor, True)
        environment = {**os.environ, LOCK_VARIABLE: str(descriptor)}
        os.execve(python, [str(python), str(SCRIPT), *sys.argv[1:]], environment)


def look(options: Options, state: State) -> bool:
    """Say all that is missing. True if nothing stands in the way."""
    built = (state.images / "lab" / "manifest.json").exists()
    findings = [
        *needs.python(),
        *needs.architecture(),
        *needs.distribution(),
        *needs.memory(),
        *needs.disk(state.root, needs.DISK_AGAIN_GIB if built else needs.DISK_GIB),
        *needs.root(),
    ]
    if not options.prepare:  # which opens nothing
        findings += needs.network(options.network, bridges=("gs-", "virbr-gs", "gs"))
        findings += needs.ports(
            {
                "login page": (options.host, options.port, "--port"),
                "proxy's API": ("127.0.0.1", options.proxy_api_port, "--proxy-api-port"),
                "allocator": ("127.0.0.1", options.allocator_port, "--allocator-port"),
                # Its own address does not exist yet; this one clashes only with a listener on
                # all addresses, which is what would stand in the way.
                "hub": ("127.200.200.200", options.hub_port, "--hub-port"),
            }
        )
    for finding in findings:
        complain(f"  {'!!' if finding.fatal else ' !'}  {finding.text}")
    fatal = any(finding.fatal for finding in findings)
    if options.check:
        lacking = missing_packages([*RUN_PACKAGES, *python_packages()])
        if lacking:
            line(f"  ..  Debian packages that would be installed: {' '.join(lacking)}")
        line("Something is missing." if fatal else "Everything that must be there is there.")
    return not fatal


def become_root() -> None:
    """Start again through sudo, which asks for the password if it needs one.

    :raises Problem: when sudo is not there.
    """
    sudo = shutil.which("sudo")
    if not sudo:
        raise Problem("Networks and virtual machines need root.", "Run it as root.")
    line("Networks and virtual machines need root: going on through sudo.")
    quiet = [] if sys.stdin.isatty() else ["-n"]
    kept = [f"{name}={os.environ[name]}" for name in KEEP if name in os.environ]
    python = str(Path(sys.executable).resolve())
    os.execv(sudo, [sudo, *quiet, "env", *kept, python, str(SCRIPT), *sys.argv[1:]])
