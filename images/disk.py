"""A root disk out of a directory, without mounting: mke2fs -d, then qcow2."""

from __future__ import annotations

import os
from pathlib import Path

from images.base import run_tool
from images.progress import Progress, Stage

STAGES = (
    Stage("filesystem", "Making the file system", 7.0),
    Stage("qcow2", "Writing the disk image", 7.0),
)


def make_disk(tree: Path, out: Path, virtual_mib: int, progress: Progress) -> None:
    """Write the tree as an ext4 root disk of `virtual_mib` MiB to the qcow2 file `out`.

    The file system has no journal and no checksums: sessions write to an overlay that is thrown
    away, and both cost time.  The qcow2 is not compressed: boot speed counts more than its size.

    :raises ImageError: a tool is missing or failed, for example because the tree does not fit.
    """
    raw = out.with_suffix(".raw")
    with progress.stage("filesystem"):
        with raw.open("wb") as handle:
            os.truncate(handle.fileno(), virtual_mib << 20)
        command = ["mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-L", "root"]
        command += ["-O", "^has_journal,^metadata_csum,^64bit"]
        # The file is all zeros: nothing is left for the guest's kernel to initialise.
        command += ["-E", "lazy_itable_init=0,assume_storage_prezeroed=1,nodiscard"]
        run_tool([*command, "-d", str(tree), str(raw)], "e2fsprogs")
    with progress.stage("qcow2"):
        command = ["qemu-img", "convert", "-f", "raw", "-O", "qcow2"]
        run_tool([*command, "-o", "lazy_refcounts=on", str(raw), str(out)], "qemu-utils")
        raw.unlink()
