"""Parts of the service image's builder, on trees made here."""

from __future__ import annotations

import importlib.util
import lzma
import marshal
import struct
import sys
from pathlib import Path

import pytest

from images.errors import ImageError
from images.initramfs import Initramfs
from images.kernel import has_pvh_entry, uncompressed
from images.tree import DirTree
from service_vm.python_subset import STDLIB, Subset, add_module, imported, unchecked


def test_imports_at_module_level_are_found() -> None:
    source = b"""
import a, b.c
from d import e
from . import f
from ..g import h as i
try:
    import j
except ImportError:
    import k
class L:
    import m
def n():
    import not_this
"""
    assert set(imported(source, "top.pkg")) == {
        "a", "b.c", "d", "d.e", "top.pkg", "top.pkg.f", "top.g", "top.g.h", "j", "k", "m",
    }  # fmt: skip


def stdlib(root: Path, modules: dict[str, str]) -> DirTree:
    for name, source in modules.items():
        path = root / STDLIB.lstrip("/") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return DirTree(root)


def test_the_subset_follows_imports(tmp_path: Path) -> None:
    tree = stdlib(
        tmp_path,
        {
            "one.py": "import two.three\nimport sys",
            "two/__init__.py": "from . import four",
            "two/three.py": "",
            "two/four.py": "import heavy",
            "two/five.py": "",
            "heavy.py": "import more",
            "more.py": "",
        },
    )
    subset = Subset(tree)
    subset.need("one")
    assert subset.modules() == ["heavy", "more", "one", "two", "two.four", "two.three"]
    light = Subset(tree, without=("heavy",))
    light.need("one")
    assert light.modules() == ["one", "two", "two.four", "two.three"]


def test_compiled_modules_are_never_compared_with_a_source() -> None:
    old = importlib.util.MAGIC_NUMBER + b"\0" * 4 + b"timesize" + b"code"
    new = unchecked(old)
    assert new[:4] == importlib.util.MAGIC_NUMBER
    assert struct.unpack("<I", new[4:8]) == (1,)
    assert new[16:] == b"code"


def test_own_modules_go_in_compiled_where_the_builder_is_a_3_11() -> None:
    archive = Initramfs()
    add_module(archive, "/opt/x/y.py", b"value = 6 * 7")
    if sys.version_info[:2] != (3, 11):
        assert archive.paths() == ["opt", "opt/x", "opt/x/y.py"]
        return
    assert archive.paths() == ["opt", "opt/x", "opt/x/y.pyc"]
    data = archive._entries["opt/x/y.pyc"].data
    names: dict[str, int] = {}
    exec(marshal.loads(data[16:]), names)
    assert names["value"] == 42


def elf(notes: bytes, kind: int = 4) -> bytes:
    head = bytearray(64)
    head[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", head, 32, 64)
    struct.pack_into("<HH", head, 54, 56, 1)
    entry = struct.pack("<IIQQQQQQ", kind, 0, 120, 0, 0, len(notes), 0, 0)
    return bytes(head) + entry + notes


def note(kind: int, name: bytes = b"Xen\0", content: bytes = b"12345678") -> bytes:
    padded = name + b"\0" * (-len(name) % 4)
    return struct.pack("<III", len(name), len(content), kind) + padded + content


PVH = elf(note(1) + note(3, b"Linux\0") + note(18))


def bzimage(payload: bytes) -> bytes:
    image = bytearray(0x400)
    image[0x1F1] = 1
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", image, 0x248, 32, len(payload))
    return bytes(image) + bytes(32) + payload + b"tail"


def test_pvh_entry() -> None:
    assert has_pvh_entry(PVH)
    assert not has_pvh_entry(elf(note(1)))
    assert not has_pvh_entry(elf(note(18, b"GNU\0")))
    assert not has_pvh_entry(elf(note(18), kind=1))
    assert not has_pvh_entry(b"MZ" * 100)


def test_the_kernel_is_unpacked() -> None:
    packed = lzma.compress(PVH, lzma.FORMAT_XZ, check=lzma.CHECK_CRC32)
    assert uncompressed(bzimage(packed + struct.pack("<I", len(PVH)))) == PVH


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (b"\0" * 2000, "bzImage"),
        (bzimage(b"\x1f\x8b\x08rest"), "unknown"),
        (bzimage(lzma.compress(elf(note(1)))), "PVH"),
    ],
)
def test_kernels_that_cannot_be_used(image: bytes, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        uncompressed(image)
