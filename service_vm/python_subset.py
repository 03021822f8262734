"""The part of CPython that a program needs, for an initramfs.

Imports at module level are followed through the sources in a tree; nothing is executed.  Modules
go in compiled, marked as never to be compared with a source: under emulation compiling is what
takes the time.
"""

from __future__ import annotations

import ast
import importlib.util
import marshal
import posixpath
import sys
from collections.abc import Iterable, Iterator

from images.initramfs import Initramfs
from images.tree import Tree, exists, read

INTERPRETER = "/usr/bin/python3.11"
STDLIB = "/usr/lib/python3.11"
_EXTENSIONS = f"{STDLIB}/lib-dynload"
_EXTENSION_SUFFIX = ".cpython-311-x86_64-linux-gnu.so"

# What the interpreter itself imports before any program; ``os`` is also how it finds its library.
_STARTUP = ("os", "encodings.utf_8", "encodings.ascii", "encodings.latin_1", "runpy", "pkgutil")
_UNCHECKED = 0b01  # PEP 552: by hash, never checked
_HEADER = 16


def imported(source: bytes, package: str) -> Iterator[str]:
    """Full names of what a module in `package` imports when it is itself imported.

    Names after ``from x import`` appear as ``x.name``, since they may be modules.
    """
    for node in _module_level(ast.parse(source).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(relative, package) if node.level else relative
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _module_level(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from _module_level(ast.iter_child_nodes(node))


class Subset:
    """Collects standard library modules; :meth:`add_to` puts them into an initramfs.

    :param without: modules to leave out with all that only they need; importing them must be
        optional to those who do.
    """

    def __init__(self, tree: Tree, without: Iterable[str] = ()) -> None:
        self._tree = tree
        self._without = frozenset(without)
        self._sources: dict[str, str] = {}  # module -> path of its source
        self._extensions: set[str] = set()
        self._seen: set[str] = set()
        for name in _STARTUP:
            self.need(name)

    def need(self, name: str) -> None:
        """Add the module `name` and what it imports.  Unknown names are built in, or no modules:
        both need no file."""
        todo = [name]
        while todo:
            todo += self._one(todo.pop())

    def need_all(self, names: Iterable[str]) -> None:
        """:meth:`need` for each of `names`."""
        for name in names:
            self.need(name)

    def _one(self, name: str) -> list[str]:
        if name in self._seen or name in self._without:
            return []
        self._seen.add(name)
        wanted = [name.rpartition(".")[0]] if "." in name else []
        stem = posixpath.join(STDLIB, *name.split("."))
        extension = f"{_EXTENSIONS}/{name}{_EXTENSION_SUFFIX}"
        if exists(self._tree, extension):
            self._extensions.add(extension)
        elif exists(self._tree, f"{stem}/__init__.py"):
            self._sources[name] = f"{stem}/__init__.py"
            wanted += imported(read(self._tree, f"{stem}/__init__.py"), name)
        elif exists(self._tree, f"{stem}.py"):
            self._sources[name] = f"{stem}.py"
            wanted += imported(read(self._tree, f"{stem}.py"), name.rpartition(".")[0])
        return wanted

    def modules(self) -> list[str]:
        """Names of the modules with a source, sorted."""
        return sorted(self._sources)

    def add_to(self, archive: Initramfs) -> None:
        """The interpreter, the modules and the shared libraries of both."""
        archive.add_elf(self._tree, [INTERPRETER, *sorted(self._extensions)])
        for path in self._sources.values():
            directory, leaf = posixpath.split(path)
            stem = leaf.removesuffix(".py")
            cached = f"{directory}/__pycache__/{stem}.cpython-311.pyc"
            if exists(self._tree, cached):
                archive.add_file(f"{directory}/{stem}.pyc", unchecked(read(self._tree, cached)))
            else:
                add_module(archive, path, read(self._tree, path))


def unchecked(compiled: bytes) -> bytes:
    """A .pyc file with its header changed so that no source is looked for."""
    return compiled[:4] + _UNCHECKED.to_bytes(4, "little") + bytes(8) + compiled[_HEADER:]


def add_module(archive: Initramfs, path: str, source: bytes) -> None:
    """The module at `path` (…/name.py): compiled where the building Python is a 3.11 too."""
    if sys.version_info[:2] != (3, 11):
        archive.add_file(path, source)
        return
    code = compile(source, path, "exec", dont_inherit=True)
    data = importlib.util.MAGIC_NUMBER + bytes(_HEADER - 4) + marshal.dumps(code)
    archive.add_file(f"{path.removesuffix('.py')}.pyc", unchecked(data))
