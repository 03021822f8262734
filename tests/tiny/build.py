"""Builds the tiny guest: kernel, initramfs, no disk."""

from __future__ import annotations

from pathlib import Path

from images.base import base_tree
from images.initramfs import Initramfs
from images.progress import Progress, Stage
from service_vm.build import add_program, publish_ram_image
from service_vm.python_subset import INTERPRETER

NAME = "tiny"
STAGES = (Stage("tiny", "Building the tiny guest", 5.0),)
MIN_MEMORY_MIB = 256
CMDLINE = "console=ttyS0 quiet loglevel=4 panic=-1 edd=off cryptomgr.notests random.trust_cpu=on"

_ROOT = Path(__file__).resolve().parent.parent.parent
_MODULES = (
    "virtio_pci",
    "virtio_blk",
    "virtio_net",
    "ahci",
    "sr_mod",
    "isofs",
    "ext4",
    "button",
    "evdev",
)
_TOOLS = (
    "/bin/cat",
    "/bin/dash",
    "/bin/dd",
    "/bin/dmesg",
    "/bin/ip",
    "/bin/ls",
    "/bin/mount",
    "/bin/ping",
    "/bin/sleep",
    "/bin/umount",
    "/sbin/blkid",
    "/sbin/mke2fs",
)
_PROGRAM = "from tests.tiny.guest.boot import main\n\nmain()\n"
_SOURCES = ("tests/__init__.py", "tests/tiny/__init__.py", "tests/tiny/guest")


def build(out: Path, cache: Path, progress: Progress, *, name: str = NAME) -> Path:
    """Build the image `name` below the directory `out`; returns the image's directory."""
    base = base_tree(cache, progress)
    with progress.stage("tiny"):
        tree = base.tree()
        try:
            archive = Initramfs()
            archive.add_consoles()
            add_program(archive, tree, _PROGRAM, [_ROOT / path for path in _SOURCES], _ROOT)
            archive.add_elf(tree, _TOOLS)
            archive.add_symlink("bin/sh", "dash")
            archive.add_symlink("bin/python3", INTERPRETER)
            archive.add_dir("etc")
            archive.add_modules(base.modules(tree), _MODULES)
            return publish_ram_image(
                out,
                name,
                "lab",
                base,
                kernel=base.kernel(tree),
                archive=archive,
                cmdline=CMDLINE,
                title="Tiny guest for tests",
                min_memory_mib=MIN_MEMORY_MIB,
            )
        finally:
            tree.close()
