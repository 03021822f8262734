"""The initramfs writer, the module resolver and the ELF closure, on fake trees."""

from __future__ import annotations

import io
import stat
import tarfile
from pathlib import Path

import pytest

from images.errors import ImageError
from images.initramfs import Initramfs, ModuleIndex, elf_closure
from images.tree import DirTree, TarTree, read, realpath, walk


def parse_newc(data: bytes) -> dict[str, tuple[int, bytes, tuple[int, int], int]]:
    """name -> (mode, content, (major, minor), mtime) of a newc archive, by the format's page."""
    found: dict[str, tuple[int, bytes, tuple[int, int], int]] = {}
    at = 0
    while True:
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name_at = at + 110
        name = data[name_at : name_at + fields[11] - 1].decode()
        body_at = (name_at + fields[11] + 3) & ~3
        body = data[body_at : body_at + fields[6]]
        at = (body_at + fields[6] + 3) & ~3
        if name == "TRAILER!!!":
            assert not data[at:].strip(b"\0")
            return found
        assert name not in found
        parent = name.rpartition("/")[0]
        assert not parent or stat.S_ISDIR(found[parent][0])
        found[name] = (fields[1], body, (fields[9], fields[10]), fields[5])


def test_archive_reads_back() -> None:
    made = Initramfs()
    made.add_consoles()
    made.add_file("/usr/bin/tool", b"#!/bin/sh\n", 0o755)
    made.add_symlink("bin", "usr/bin")
    made.add_dir("tmp", 0o1777)
    entries = parse_newc(made.to_bytes())
    assert list(entries) == sorted(entries)
    assert entries["usr/bin/tool"][:2] == (stat.S_IFREG | 0o755, b"#!/bin/sh\n")
    assert entries["bin"][:2] == (stat.S_IFLNK | 0o777, b"usr/bin")
    assert entries["dev/console"][0] == stat.S_IFCHR | 0o600
    assert entries["dev/console"][2] == (5, 1)
    assert entries["tmp"][0] == stat.S_IFDIR | 0o1777
    assert all(entry[3] == 0 for entry in entries.values())


def test_archive_does_not_depend_on_the_order_of_adding() -> None:
    first, second = Initramfs(), Initramfs()
    first.add_file("b/x", b"1")
    first.add_file("a", b"2")
    second.add_file("a", b"2")
    second.add_file("b/x", b"1")
    assert first.to_bytes() == second.to_bytes()


def test_a_file_has_no_children() -> None:
    made = Initramfs()
    made.add_file("etc", b"")
    with pytest.raises(ValueError, match="not a directory"):
        made.add_file("etc/passwd", b"")


def module_tree(root: Path) -> DirTree:
    modules = root / "usr/lib/modules/6.1.0-test"
    (modules / "kernel").mkdir(parents=True)
    (root / "lib").symlink_to("usr/lib")
    for name in ("virtio", "virtio_ring", "virtio-pci", "ext4", "mbcache", "crc32c_generic"):
        (modules / f"kernel/{name}.ko").write_bytes(name.encode())
    (modules / "modules.dep").write_text(
        "kernel/virtio.ko:\n"
        "kernel/virtio_ring.ko: kernel/virtio.ko\n"
        "kernel/virtio-pci.ko: kernel/virtio_ring.ko kernel/virtio.ko\n"
        "kernel/ext4.ko: kernel/mbcache.ko\n"
        "kernel/mbcache.ko:\n"
        "kernel/crc32c_generic.ko:\n"
    )
    (modules / "modules.builtin").write_text("kernel/block/loop.ko\n")
    (modules / "modules.softdep").write_text("# text\nsoftdep ext4 pre: crc32c post: nothing\n")
    (modules / "modules.alias").write_text(
        "alias crc32c crc32c_intel\nalias crc32c crc32c_generic\nalias pci:v0001* virtio_pci\n"
    )
    return DirTree(root)


def test_modules_come_in_load_order(tmp_path: Path) -> None:
    index = ModuleIndex(module_tree(tmp_path), "6.1.0-test")
    assert index.resolve(["virtio_pci", "loop", "ext4"]) == [
        "kernel/virtio.ko",
        "kernel/virtio_ring.ko",
        "kernel/virtio-pci.ko",
        "kernel/crc32c_generic.ko",
        "kernel/mbcache.ko",
        "kernel/ext4.ko",
    ]
    made = Initramfs()
    made.add_modules(index, ["virtio-pci"])
    entries = parse_newc(made.to_bytes())
    assert entries["modules/order"][1] == b"virtio.ko\nvirtio_ring.ko\nvirtio-pci.ko\n"
    assert entries["modules/virtio.ko"][1] == b"virtio"


def test_an_unknown_module_is_an_error(tmp_path: Path) -> None:
    index = ModuleIndex(module_tree(tmp_path), "6.1.0-test")
    with pytest.raises(ImageError, match="no module nvme"):
        index.resolve(["nvme"])


def make_tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in (("./usr/lib/libx.so.1.2", b"lib"), ("./etc/name", b"n\n")):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o640
            tar.addfile(info, io.BytesIO(content))
        for name, target in (
            ("./lib", "usr/lib"),
            ("./usr/lib/libx.so.1", "libx.so.1.2"),
            ("./loop", "loop"),
            ("./out", "../../etc/name"),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)


def test_links_are_followed_inside_the_tree(tmp_path: Path) -> None:
    make_tar(tmp_path / "root.tar")
    tree = TarTree(tmp_path / "root.tar")
    assert realpath(tree, "/lib/libx.so.1") == "/usr/lib/libx.so.1.2"
    assert read(tree, "/lib/libx.so.1") == b"lib"
    assert read(tree, "/out") == b"n\n"
    assert realpath(tree, "/loop") is None
    with pytest.raises(FileNotFoundError):
        read(tree, "/nothing")
    assert ("/usr/lib/libx.so.1.2", stat.S_IFREG | 0o640) in list(walk(tree, "/usr"))
    made = Initramfs()
    made.add_tree(tree, "/usr", skip=[r"lib/libx\.so\.1$"])
    assert made.paths() == ["usr", "usr/lib", "usr/lib/libx.so.1.2"]
    tree.close()


def test_elf_closure_of_this_machines_shell() -> None:
    tree = DirTree(Path("/"))
    found = elf_closure(tree, ["/bin/sh"])
    assert "/bin/sh" in found
    assert any(path.rpartition("/")[2].startswith("ld-linux") for path in found)
    assert any(path.rpartition("/")[2].startswith("libc.so") for path in found)


def test_elf_closure_refuses_what_is_not_elf(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!/bin/sh\n")
    with pytest.raises(ImageError, match="not an ELF file"):
        elf_closure(DirTree(tmp_path), ["/script"])
