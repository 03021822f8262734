"""A file system of its own that can be filled up."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path


class SmallDisk:
    """A file system of its own, which can be filled up. ``enter`` begins each command."""

    def __init__(self, place: Path, mib: int, enter: Sequence[str] = ()) -> None:
        self.place = place
        self._enter = enter
        place.mkdir(mode=0o711, exist_ok=True)
        self.run("mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=0711", "none", str(place))

    def run(self, *command: str, check: bool = True) -> str:
        """A command that sees it."""
        done = subprocess.run([*self._enter, *command], capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stderr

    def fill(self) -> None:
        """Leave nothing."""
        target = f"of={self.place / 'filler'}"
        said = self.run("dd", "if=/dev/zero", target, "bs=4k", check=False)
        assert "No space left on device" in said, said

    def free(self) -> None:
        """Give all of it back."""
        self.run("rm", str(self.place / "filler"))


@contextlib.contextmanager
def small_disk(place: Path, mib: int, enter: Sequence[str] = ()) -> Iterator[SmallDisk]:
    """Mounted for as long as the block runs."""
    disk = SmallDisk(place, mib, enter)
    try:
        yield disk
    finally:
        disk.run("umount", "-l", str(place))
