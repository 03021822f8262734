"""Reading a root file system without mounting it: from a tar or from a directory.

Paths are absolute inside the tree ("/usr/bin/python3").  Symbolic links are followed inside the
tree, never out of it.
"""

from __future__ import annotations

import os
import posixpath
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol


class Tree(Protocol):
    """A read-only root file system."""

    def lstat_mode(self, path: str) -> int | None:
        """``st_mode`` of exactly `path` (last link not followed), or None where nothing is."""
        ...

    def readlink(self, path: str) -> str: ...

    def read_file(self, path: str) -> bytes:
        """Content of a regular file; `path` is already real."""
        ...

    def children(self, path: str) -> list[str]:
        """Sorted names in the directory `path`, which is already real."""
        ...


def realpath(tree: Tree, path: str) -> str | None:
    """`path` with every link followed inside `tree`; None where it leads nowhere."""
    parts = [part for part in path.split("/") if part and part != "."]
    done = "/"
    links = 0
    while parts:
        part = parts.pop(0)
        if part == "..":
            done = posixpath.dirname(done)
            continue
        here = posixpath.join(done, part)
        mode = tree.lstat_mode(here)
        if mode is None:
            return None
        if stat.S_ISLNK(mode):
            links += 1
            if links > 40:
                return None
            target = tree.readlink(here)
            if target.startswith("/"):
                done = "/"
            parts = [item for item in target.split("/") if item and item != "."] + parts
            continue
        done = here
    return done


def read(tree: Tree, path: str) -> bytes:
    """Content of the regular file `path` after following links.

    :raises FileNotFoundError: nothing there, or not a regular file.
    """
    real = realpath(tree, path)
    mode = tree.lstat_mode(real) if real else None
    if real is None or mode is None or not stat.S_ISREG(mode):
        raise FileNotFoundError(path)
    return tree.read_file(real)


def exists(tree: Tree, path: str) -> bool:
    """Whether `path` leads to something inside `tree`."""
    return realpath(tree, path) is not None


def walk(tree: Tree, path: str) -> Iterator[tuple[str, int]]:
    """Every entry below the directory `path` (not itself), as (path, mode), parents first."""
    real = realpath(tree, path)
    if real is None:
        return
    for name in tree.children(real):
        entry = posixpath.join(real, name)
        mode = tree.lstat_mode(entry)
        if mode is None:
            continue
        yield entry, mode
        if stat.S_ISDIR(mode):
            yield from walk(tree, entry)


class DirTree:
    """A tree that lies extracted in a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def lstat_mode(self, path: str) -> int | None:
        try:
            return os.lstat(self._at(path)).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def read_file(self, path: str) -> bytes:
        return self._at(path).read_bytes()

    def children(self, path: str) -> list[str]:
        return sorted(os.listdir(self._at(path)))


class TarTree:
    """A tree that lies in an uncompressed tar; opened once, read at random."""

    def __init__(self, path: Path) -> None:
        self._tar = tarfile.open(path, "r:")  # noqa: SIM115 -- lives as long as the tree
        self._members: dict[str, tarfile.TarInfo] = {}
        self._children: dict[str, set[str]] = {"/": set()}
        for member in self._tar:
            name = posixpath.normpath("/" + member.name)
            self._members[name] = member
            while name != "/":
                parent, leaf = posixpath.split(name)
                self._children.setdefault(parent, set()).add(leaf)
                name = parent

    def lstat_mode(self, path: str) -> int | None:
        if path == "/":
            return stat.S_IFDIR | 0o755
        member = self._members.get(path)
        if member is None:
            return stat.S_IFDIR | 0o755 if path in self._children else None
        if member.islnk():
            return self.lstat_mode(posixpath.normpath("/" + member.linkname))
        kinds = (
            (member.issym(), stat.S_IFLNK),
            (member.isdir(), stat.S_IFDIR),
            (member.ischr(), stat.S_IFCHR),
            (member.isblk(), stat.S_IFBLK),
            (member.isfifo(), stat.S_IFIFO),
        )
        return next((kind for found, kind in kinds if found), stat.S_IFREG) | member.mode

    def readlink(self, path: str) -> str:
        return self._members[path].linkname

    def read_file(self, path: str) -> bytes:
        handle = self._tar.extractfile(self._members[path])
        if handle is None:
            raise FileNotFoundError(path)
        with handle:
            return handle.read()

    def children(self, path: str) -> list[str]:
        return sorted(self._children.get(path, ()))

    def close(self) -> None:
        """Close the tar; the tree is not usable afterwards."""
        self._tar.close()
