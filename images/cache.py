"""The build cache: entries keyed by a digest of their inputs, made by one builder at a time.

The cache is never required: an entry that is missing is made, an entry that a killed build left
half done was never given its name.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from images.errors import ImageError


def default_cache() -> Path:
    """``$GPUSPAWNER_CACHE``, else /var/cache/gpuspawner."""
    return Path(os.environ.get("GPUSPAWNER_CACHE") or "/var/cache/gpuspawner")


def digest_of(inputs: object) -> str:
    """SHA-256 in hex of the canonical JSON of `inputs`."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 in hex of a file's content."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def require_space(where: Path, mib: int, purpose: str) -> None:
    """Check that `where` has `mib` MiB free before a long step begins.

    :raises ImageError: it has not.
    """
    free = shutil.disk_usage(where).free >> 20
    if free < mib:
        raise ImageError(
            f"{purpose} needs {mib} MiB in {where}, and {free} MiB are free.",
            "Free some space there, or name another place with --cache or GPUSPAWNER_CACHE.",
        )


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the file lock `path` (made if need be); waits for another builder to finish.

    The kernel gives the lock back when its holder dies, so a killed build blocks nobody.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def fsync_tree(root: Path) -> None:
    """Force the regular files right below `root`, and `root` itself, to the disk."""
    for path in [*sorted(item for item in root.iterdir() if item.is_file()), root]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _sweep(root: Path) -> None:
    """Remove what killed builds left half done; a build that runs holds its lock."""
    for scratch in root.glob(".tmp-*"):
        with (root / f".lock-{scratch.name.removeprefix('.tmp-')}").open("a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def entry(root: Path, name: str) -> Iterator[tuple[Path, bool]]:
    """The cache entry `root`/`name`, locked: yields (directory, whether it is already there).

    Where it is not, the directory is a fresh temporary one beside the entry's place, renamed to
    the entry when the block ends well and removed when it does not.  What an earlier, killed run
    left under the same name is removed first.
    """
    final = root / name
    scratch = root / f".tmp-{name}"
    _sweep(root)
    with lock(root / f".lock-{name}"):
        if scratch.exists():
            shutil.rmtree(scratch)
        if final.is_dir():
            yield final, True
            return
        scratch.mkdir(parents=True)
        try:
            yield scratch, False
            fsync_tree(scratch)
            os.rename(scratch, final)
        finally:
            if scratch.exists():
                shutil.rmtree(scratch, ignore_errors=True)


def prune(root: Path, keep: int) -> None:
    """Remove all but the `keep` newest entries of `root`; entries in use keep their open files."""
    entries = [item for item in root.iterdir() if item.is_dir() and not item.name.startswith(".")]
    entries.sort(key=lambda item: item.stat().st_mtime, reverse=True)
    for item in entries[keep:]:
        shutil.rmtree(item, ignore_errors=True)
