"""Uncompressed initramfs archives: newc cpio, kernel modules in load order, ELF closures.

Uncompressed, because under emulation unpacking costs more than reading.  The same content gives
the same bytes: times are zero, entries are sorted, inode numbers count up.
"""

from __future__ import annotations

import io
import posixpath
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.segments import InterpSegment

from images.errors import ImageError
from images.tree import Tree, exists, read, realpath, walk

_DEFAULT_LIBRARY_DIRS = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/local/lib",
    "/lib",
    "/usr/lib",
    "/lib64",
)


@dataclass(frozen=True)
class _Entry:
    mode: int
    data: bytes = b""
    major: int = 0
    minor: int = 0


def _normal(path: str) -> str:
    clean = posixpath.normpath("/" + path.lstrip("/")).lstrip("/")
    if not clean or clean == ".":
        raise ValueError(f"no name in {path!r}")
    return clean


class Initramfs:
    """An initramfs being put together.  Parents of an entry are made by themselves (0755)."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def _put(self, path: str, entry: _Entry) -> None:
        name = _normal(path)
        parent = posixpath.dirname(name)
        if parent and parent not in self._entries:
            self.add_dir(parent)
        if parent and not stat.S_ISDIR(self._entries[parent].mode):
            raise ValueError(f"{parent} is not a directory, {name} cannot be below it")
        self._entries[name] = entry

    def __contains__(self, path: str) -> bool:
        return _normal(path) in self._entries

    def paths(self) -> list[str]:
        """The names of all entries, sorted, without a leading slash."""
        return sorted(self._entries)

    def add_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """A regular file with `data`."""
        self._put(path, _Entry(stat.S_IFREG | stat.S_IMODE(mode), data))

    def add_dir(self, path: str, mode: int = 0o755) -> None:
        """A directory; one that is already there gets `mode`."""
        self._put(path, _Entry(stat.S_IFDIR | stat.S_IMODE(mode)))

    def add_symlink(self, path: str, target: str) -> None:
        """A symbolic link `path` -> `target`."""
        self._put(path, _Entry(stat.S_IFLNK | 0o777, target.encode()))

    def add_node(
        self, path: str, major: int, minor: int, *, block: bool = False, mode: int = 0o600
    ) -> None:
        """A device node (character unless `block`)."""
        kind = stat.S_IFBLK if block else stat.S_IFCHR
        self._put(path, _Entry(kind | stat.S_IMODE(mode), b"", major, minor))

    def add_consoles(self) -> None:
        """/dev/console and /dev/null, which a program needs before devtmpfs is mounted."""
        self.add_node("dev/console", 5, 1)
        self.add_node("dev/null", 1, 3, mode=0o666)

    def add_from(self, tree: Tree, path: str, to: str | None = None) -> None:
        """The file `path` of `tree`, links followed, placed at `to` (default: the same path).

        :raises FileNotFoundError: `tree` has no such file.
        """
        real = realpath(tree, path)
        if real is None:
            raise FileNotFoundError(path)
        mode = tree.lstat_mode(real)
        assert mode is not None
        self.add_file(to or path, read(tree, real), stat.S_IMODE(mode))

    def add_tree(
        self, tree: Tree, path: str, to: str | None = None, skip: Iterable[str] = ()
    ) -> None:
        """Everything below the directory `path` of `tree`, links kept as links.

        :param skip: regular expressions; an entry whose path relative to `path` matches one from
            its start is left out with all that is below it.
        """
        patterns = [re.compile(pattern) for pattern in skip]
        real = realpath(tree, path)
        if real is None:
            raise FileNotFoundError(path)
        base = to or path
        self.add_dir(base)
        left_out: list[str] = []
        for entry, mode in walk(tree, real):
            below = posixpath.relpath(entry, real)
            if any(below.startswith(f"{out}/") for out in left_out):
                continue
            if any(pattern.match(below) for pattern in patterns):
                left_out.append(below)
                continue
            place = posixpath.join(base, below)
            if stat.S_ISDIR(mode):
                self.add_dir(place, mode)
            elif stat.S_ISLNK(mode):
                self.add_symlink(place, tree.readlink(entry))
            elif stat.S_ISREG(mode):
                self.add_file(place, tree.read_file(entry), mode)

    def add_elf(self, tree: Tree, paths: Iterable[str]) -> None:
        """Programs or shared libraries with everything they are linked to, at their own paths."""
        for path in elf_closure(tree, paths):
            if path not in self:
                self.add_from(tree, path)

    def add_modules(self, index: ModuleIndex, names: Iterable[str], to: str = "modules") -> None:
        """Kernel modules, with `to`/order: one file name a line, in the order to load them.

        Modules built into the kernel are left out.  The init loads each line with insmod or
        finit_module(2).
        """
        order = []
        for path in index.resolve(names):
            leaf = posixpath.basename(path)
            self.add_file(f"{to}/{leaf}", index.content(path))
            order.append(leaf)
        self.add_file(f"{to}/order", "".join(f"{leaf}\n" for leaf in order).encode())

    def to_bytes(self) -> bytes:
        """The archive."""
        out = io.BytesIO()
        for number, name in enumerate(sorted(self._entries), start=1):
            _write(out, number, name, self._entries[name])
        _write(out, 0, "TRAILER!!!", _Entry(0))
        out.write(b"\0" * (-out.tell() % 512))
        return out.getvalue()

    def write(self, out: Path) -> None:
        """Write the archive to the file `out`."""
        out.write_bytes(self.to_bytes())


def _write(out: io.BytesIO, inode: int, name: str, entry: _Entry) -> None:
    """One record of the newc format (cpio(5), "New ASCII Format")."""
    encoded = name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    fields = (
        inode, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, entry.major, entry.minor,
        len(encoded), 0,
    )  # fmt: skip
    out.write(b"070701" + b"".join(b"%08X" % field for field in fields) + encoded)
    out.write(b"\0" * (-out.tell() % 4))
    out.write(entry.data)
    out.write(b"\0" * (-out.tell() % 4))


def _module_name(path: str) -> str:
    return re.sub(r"\.ko(\.(xz|gz|zst))?$", "", posixpath.basename(path)).replace("-", "_")


class ModuleIndex:
    """The modules of one kernel inside a tree, with their dependencies (modules.dep)."""

    def __init__(self, tree: Tree, release: str) -> None:
        self._tree = tree
        self.directory = f"/lib/modules/{release}"
        self._paths: dict[str, str] = {}
        self._needs: dict[str, list[str]] = {}
        for line in self._lines("modules.dep"):
            path, _, needs = line.partition(":")
            name = _module_name(path)
            self._paths[name] = path
            self._needs[name] = [_module_name(item) for item in needs.split()]
        self._builtin = {_module_name(line) for line in self._lines("modules.builtin")}
        self._soft = self._read_soft_dependencies()

    def _lines(self, name: str) -> list[str]:
        path = f"{self.directory}/{name}"
        if not exists(self._tree, path):
            return []
        text = read(self._tree, path).decode()
        return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]

    def _read_soft_dependencies(self) -> dict[str, list[str]]:
        """What should be loaded first ("softdep ext4 pre: crc32c"), as names of modules.

        A soft dependency may name an alias that several modules carry; then the generic one is
        taken, which runs on every processor.
        """
        aliases: dict[str, list[str]] = {}
        for line in self._lines("modules.alias"):
            words = line.split()
            if len(words) == 3 and words[0] == "alias" and "*" not in words[1]:
                aliases.setdefault(words[1].replace("-", "_"), []).append(words[2])
        found = {}
        for line in self._lines("modules.softdep"):
            match = re.match(r"softdep\s+(\S+)\s+.*?pre:\s*(.*?)(?:\s+post:.*)?$", line)
            if not match:
                continue
            needs: list[str] = []
            for word in match[2].replace("-", "_").split():
                names = [word] if word in self._paths else sorted(aliases.get(word, ()))
                generic = [name for name in names if name.endswith("_generic")]
                needs += (generic or names)[:1]
            found[match[1].replace("-", "_")] = needs
        return found

    def resolve(self, names: Iterable[str]) -> list[str]:
        """Paths (relative to :attr:`directory`) of `names` and all they need, in load order.

        ``-`` and ``_`` in names are the same.  What is built into the kernel needs no file and
        is not in the result.

        :raises ImageError: a name is neither a module nor built in.
        """
        order: list[str] = []
        for name in names:
            self._visit(name.replace("-", "_"), order, frozenset())
        return [self._paths[name] for name in order]

    def _visit(self, name: str, order: list[str], above: frozenset[str]) -> None:
        if name in order or name in self._builtin or name in above:
            return
        if name not in self._paths:
            raise ImageError(
                f"The kernel in {self.directory} has no module {name}.",
                "Check the name, or that the package set or its path excludes still carry it.",
            )
        # modules.dep lists the nearest need first; each of them has its own entry as well.
        soft = [item for item in self._soft.get(name, ()) if item in self._paths]
        for need in [*soft, *self._needs[name]]:
            self._visit(need, order, above | {name})
        order.append(name)

    def content(self, path: str) -> bytes:
        """The module file at `path`, as :meth:`resolve` gave it."""
        return read(self._tree, f"{self.directory}/{path}")


def _library_dirs(tree: Tree) -> list[str]:
    """Where the dynamic linker looks: ld.so.conf.d, then the defaults."""
    found: list[str] = []
    real = realpath(tree, "/etc/ld.so.conf.d")
    for name in tree.children(real) if real else []:
        if name.endswith(".conf"):
            text = read(tree, f"/etc/ld.so.conf.d/{name}").decode()
            found += [line.strip() for line in text.splitlines() if line.startswith("/")]
    return list(dict.fromkeys([*found, *_DEFAULT_LIBRARY_DIRS]))


def _dynamic(path: str, data: bytes) -> tuple[str | None, list[str], list[str]]:
    """(interpreter, needed libraries, run paths with $ORIGIN replaced) of an ELF file."""
    try:
        elf = ELFFile(io.BytesIO(data))
    except ELFError as error:
        raise ImageError(
            f"{path} is not an ELF file ({error}).", "Name programs and shared libraries only."
        ) from error
    interpreter = None
    for segment in elf.iter_segments():
        if isinstance(segment, InterpSegment):
            interpreter = str(segment.get_interp_name())
    needed: list[str] = []
    run_paths: list[str] = []
    origin = posixpath.dirname(path)
    section: Any
    for section in elf.iter_sections():
        if not isinstance(section, DynamicSection):
            continue
        for tag in section.iter_tags():
            if tag.entry.d_tag == "DT_NEEDED":
                needed.append(str(tag.needed))
            elif tag.entry.d_tag in ("DT_RUNPATH", "DT_RPATH"):
                text = str(tag.runpath if tag.entry.d_tag == "DT_RUNPATH" else tag.rpath)
                run_paths += text.replace("${ORIGIN}", "$ORIGIN").split(":")
    return interpreter, needed, [item.replace("$ORIGIN", origin) for item in run_paths if item]


def elf_closure(tree: Tree, paths: Iterable[str]) -> list[str]:
    """`paths` and every shared object they need, transitively, sorted.

    A library appears under the path where the dynamic linker finds it (its soname); the dynamic
    linker itself is included.  Nothing is executed, so the tree may be of another machine.

    :raises ImageError: a path is not ELF, or a library is nowhere in the tree.
    """
    dirs = _library_dirs(tree)
    found: dict[str, None] = {}
    todo = list(paths)
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found[path] = None
        real = realpath(tree, path)
        if real is None:
            raise FileNotFoundError(path)
        interpreter, needed, run_paths = _dynamic(real, read(tree, path))
        if interpreter:
            todo.append(interpreter)
        for name in needed:
            todo.append(_find_library(tree, path, name, [*run_paths, *dirs]))
    return sorted(found)


def _candidates(name: str, dirs: Iterable[str]) -> Iterator[str]:
    if name.startswith("/"):
        yield name
        return
    for directory in dirs:
        yield posixpath.join(directory, name)


def _find_library(tree: Tree, path: str, name: str, dirs: Iterable[str]) -> str:
    for candidate in _candidates(name, dirs):
        if exists(tree, candidate):
            return candidate
    raise ImageError(
        f"{path} needs {name}, which is nowhere in the tree.",
        "Add the Debian package that carries the library to the tree.",
    )
