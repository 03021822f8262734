"""The lab host's QEMU: the one of Debian's backports, kept apart from the machine's own.

The lab stands and falls with QEMU's emulation of several processors and of AMD's virtualization.
The QEMU 7.2 of Debian 12 emulates them with races: of five hosts two hung at boot, and one panicked
while two guests started on it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from images import apt
from images.base import SUITE, run_tool
from images.cache import digest_of, entry, prune
from images.errors import ImageError
from images.packages import PrivateApt
from images.progress import Progress, Stage

STAGE = Stage("emulator", "Fetching QEMU from Debian's backports", 10.0)

_PACKAGES = ("qemu-system-x86", "qemu-system-data", "seabios")


@dataclass(frozen=True)
class Emulator:
    """An unpacked QEMU in `root`."""

    root: Path

    def command(self) -> list[str]:
        """The program, and where its firmware is: it would look in the machine's own folders."""
        share = self.root / "usr/share"
        folders = (share / "qemu", share / "seabios")
        return [
            str(self.root / "usr/bin/qemu-system-x86_64"),
            *(word for folder in folders for word in ("-L", str(folder))),
        ]


def place(cache: Path) -> Path:
    """Where it is once it was fetched."""
    return cache / "labhost-qemu" / digest_of([SUITE, *_PACKAGES])[:24]


def fetched(cache: Path) -> Emulator:
    """The one in ``cache``.

    :raises ImageError: it was not fetched.
    """
    found = Emulator(place(cache))
    if not Path(found.command()[0]).is_file():
        raise ImageError("The lab's QEMU was not fetched.", "Run 'deploy/lab build'.")
    return found


def fetch(cache: Path, progress: Progress) -> None:
    """Fetch it, unless it is in ``cache``.

    :raises ImageError: the mirror cannot be reached, or what it gave does not run here.
    """
    target = place(cache)
    target.parent.mkdir(parents=True, exist_ok=True)
    with entry(target.parent, target.name) as (directory, ready):
        if ready:
            progress.skip(STAGE.name, "from the cache")
            return
        with progress.stage(STAGE.name):
            mirrors = PrivateApt(directory / "work", _sources())
            for package in mirrors.download(*_PACKAGES):
                run_tool(["dpkg-deb", "--extract", str(package), str(directory)], "dpkg")
            shutil.rmtree(directory / "work")
            # It was built for this release, and needs the libraries that the machine's own brought.
            run_tool([Emulator(directory).command()[0], "--version"], "qemu-system-x86")
    prune(target.parent, keep=2)


def _sources() -> list[apt.Source]:
    return [
        apt.Source(source.uri, f"{SUITE}-backports", source.options)
        for source in apt.host_sources(SUITE)
        if source.suite == SUITE
    ]
