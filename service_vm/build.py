"""Builds the service image: a kernel, and an initramfs with Python and the program."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable
from pathlib import Path

from images.artifact import Role, SourceFile, publish
from images.base import BaseImage, base_tree
from images.initramfs import Initramfs
from images.kernel import uncompressed
from images.progress import Progress, Stage
from images.tree import TarTree
from service_vm.python_subset import INTERPRETER, Subset, add_module, imported

NAME = "service"
STAGES = (Stage("service", "Building the service image", 4.0),)

MIN_MEMORY_MIB = 192
"""Measured: 128 boots most of the time; the test of the image wipes a GPU with just this."""

#: edd: asks a BIOS for disks.  notests: self-tests of ciphers, 0.4 s.  panic: a guest that is
#: finished must not keep the GPU; -1 restarts at once, and a restart ends the domain.  mem: an
#: emulated GPU reaches the lower 4 GiB, and a guest with more takes its pages from above first.
CMDLINE = (
    "console=ttyS0 quiet loglevel=4 panic=-1 edd=off cryptomgr.notests random.trust_cpu=on mem=2G"
)

PROGRAM = "from service_vm.program.__main__ import main\n\nmain()\n"
"""What process 1 runs."""

_HERE = Path(__file__).resolve().parent
_PLACE = "/opt/service"
# -I -S -E -B: nothing from the environment, no site directories, no attempt to write .pyc files.
_INIT = f"""#!{INTERPRETER} -ISEB
import sys

sys.path.insert(0, "{_PLACE}")
"""
_MODULES = ("virtio_pci", "virtio_console")
_PACKAGES = ("linux-image-amd64", "python3.11")


def initramfs(
    tree: TarTree, base: BaseImage, program: str = PROGRAM, name: str = NAME
) -> Initramfs:
    """The initramfs of the service VM.

    :param program: source of what process 1 runs; it may import ``service_vm.program``.
    """
    archive = Initramfs()
    archive.add_consoles()
    digest = add_program(archive, tree, program)
    archive.add_modules(base.modules(tree), _MODULES)
    archive.add_file("etc/gpuspawner-image", f"{name}-{digest[:12]}\n".encode())
    return archive


def add_program(
    archive: Initramfs,
    tree: TarTree,
    program: str,
    extra: Iterable[Path] = (),
    root: Path = _HERE.parent,
) -> str:
    """Python, the service program's modules, and an ``/init`` that runs `program` with them.

    :param extra: further modules and packages below `root`, which `program` may import too.
    :returns: hex digest of all the sources.
    """
    # Without OpenSSL: hashlib then uses what is built into the interpreter.
    subset = Subset(tree, without=("_hashlib", "_ssl"))
    own = [_HERE / "__init__.py", _HERE / "program"]
    digest = hashlib.sha256()
    for path, top in [(path, _HERE.parent) for path in own] + [(path, root) for path in extra]:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            place = file.relative_to(top)
            source = file.read_bytes()
            digest.update(source)
            subset.need_all(imported(source, ".".join(place.parent.parts)))
            add_module(archive, f"{_PLACE}/{place}", source)
    subset.need_all(imported(program.encode(), ""))
    digest.update(program.encode())
    subset.add_to(archive)
    archive.add_file("init", (_INIT + program).encode(), 0o755)
    return digest.hexdigest()


def build(
    out: Path, cache: Path, progress: Progress, *, name: str = NAME, program: str = PROGRAM
) -> Path:
    """Build the image `name` below the directory `out`; returns the image's directory.

    :param cache: where the Debian base is kept.
    :param program: another program for process 1; the tests build impostors with it.
    :raises ImageError: something is missing on this machine, or the base cannot be built.
    """
    base = base_tree(cache, progress)
    with progress.stage("service"):
        tree = base.tree()
        try:
            return publish_ram_image(
                out,
                name,
                "service",
                base,
                kernel=base.kernel(tree),
                archive=initramfs(tree, base, program, name),
                cmdline=CMDLINE,
                title="Wipes and checks GPUs between users",
                min_memory_mib=MIN_MEMORY_MIB,
            )
        finally:
            tree.close()


def publish_ram_image(
    out: Path,
    name: str,
    role: Role,
    base: BaseImage,
    *,
    kernel: bytes,
    archive: Initramfs,
    cmdline: str,
    title: str,
    min_memory_mib: int,
) -> Path:
    """Publish an image without a disk: `kernel` (a bzImage, stored unpacked) and `archive`.

    Returns its directory, `out`/`name`.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".tmp-files-{name}-", dir=out) as scratch:
        files = {"kernel": Path(scratch) / "vmlinux", "initrd": Path(scratch) / "initrd"}
        files["kernel"].write_bytes(uncompressed(kernel))
        archive.write(files["initrd"])
        publish(
            name,
            role,
            {key: SourceFile(path, path.name) for key, path in files.items()},
            cmdline,
            out=out,
            title=title,
            kernel_release=base.kernel_release,
            min_memory_mib=min_memory_mib,
            packages={key: base.packages[key] for key in _PACKAGES},
        )
    return out / name
