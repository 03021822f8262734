"""Debian packages taken from the mirrors without being installed; apt checks their signatures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from images import apt
from images.base import ARCH, run_tool


class PrivateApt:
    """apt on an empty machine in `work`, a directory that is made: these mirrors, this machine's
    keys and proxies, nothing installed. The machine's own lists stay untouched.

    :raises ImageError: a mirror cannot be reached, or its signature is not good.
    """

    def __init__(self, work: Path, sources: Sequence[apt.Source]) -> None:
        work.mkdir()
        self._work = work.resolve()
        self._env = self._make(sources)
        self._run("apt-get", "update", "-q")

    def versions(self, package: str) -> list[str]:
        """Versions of a package that the mirrors have."""
        offered = self._run("apt-cache", "madison", package)
        return sorted({line.split("|")[1].strip() for line in offered.splitlines()})

    def download(self, *packages: str) -> list[Path]:
        """The packages' files, without what they depend on; ``name`` or ``name=version``."""
        self._run("apt-get", "download", "-q", *packages)
        return sorted(self._work.glob("*.deb"))

    def _run(self, *command: str) -> str:
        return run_tool(command, "apt", self._env, self._work)

    def _make(self, sources: Sequence[apt.Source]) -> dict[str, str]:
        work = self._work
        for name in ("etc/apt/trusted.gpg.d", "var/lib/apt/lists/partial", "var/lib/dpkg", "tree"):
            (work / name).mkdir(parents=True)
        (work / "var/cache/apt/archives/partial").mkdir(parents=True)
        (work / "var/lib/dpkg/status").touch()
        lines = "".join(f"{source.line()}\n" for source in sources)
        (work / "etc/apt/sources.list").write_text(lines)
        for place, keys in (
            ("/etc/apt/trusted.gpg.d", "*"),
            ("/usr/share/keyrings", "debian-archive-keyring.*"),
        ):
            for key in Path(place).glob(keys):
                (work / "etc/apt/trusted.gpg.d" / key.name).symlink_to(key)
        options = [
            *apt.host_reach_options(),
            f'Dir "{work}";',
            f'APT::Architecture "{ARCH}";',
            'APT::Sandbox::User "root";',
            'APT::Update::Error-Mode "any";',
            'Acquire::Languages "none";',
        ]
        (work / "apt.conf").write_text("".join(f"{line}\n" for line in options))
        # Read before every other configuration, and by it there is no other (`Dir`).
        return {**os.environ, "APT_CONFIG": str(work / "apt.conf"), "LC_ALL": "C.UTF-8"}
