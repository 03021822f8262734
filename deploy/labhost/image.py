"""The lab host's disk: the Debian base of the JupyterLab image, libvirt, QEMU and sshd.

Nothing secret is in it: keys and addresses come with the seed (:mod:`deploy.labhost.seed`).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from deploy.labhost import emulator
from deploy.labhost.emulator import Emulator
from images import disk, initramfs, kernel
from images.base import BASE_STAGES, BaseImage, base_inputs, base_tree
from images.cache import default_cache, digest_of, entry, prune, require_space
from images.errors import ImageError
from images.kernel import uncompressed
from images.lab import recipe
from images.layer import layer_tree
from images.progress import Progress, Sink, Stage, sink_for

NAME = "labhost"
GUEST = Path(__file__).parent / "guest"
VIRTUAL_MIB = 8192
_SPACE_MIB = 9000

#: Beside the base. No desktop firmware (guests start from a kernel), and no dnsmasq: addresses
#: are static.
PACKAGES = (
    "libvirt-daemon-system",
    "libvirt-daemon-driver-qemu",
    "libvirt-clients",
    "qemu-system-x86",
    "qemu-utils",
    "openssh-server",
    "netcat-openbsd",
    "iptables",
    "ebtables",
    "nftables",
)

PLAN = (
    *BASE_STAGES,
    Stage("layer", "Installing libvirt and QEMU", 60.0),
    Stage("settings", "Unpacking, and writing the host's settings", 10.0),
    *disk.STAGES,
    emulator.STAGE,
)

_MASKED = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "fstrim.timer",
    "logrotate.timer",
    "systemd-tmpfiles-clean.timer",
    "e2scrub_reap.service",
    "getty@tty1.service",
    "libvirt-guests.service",
    "nftables.service",
    "rsync.service",
    "serial-getty@ttyS0.service",
    "systemd-firstboot.service",
    "systemd-fsck-root.service",
    "systemd-journal-flush.service",
    "systemd-machine-id-commit.service",
    "systemd-networkd-wait-online.service",
    "systemd-pstore.service",
    "systemd-random-seed.service",
    "systemd-remount-fs.service",
    "systemd-resolved.service",
    "systemd-timesyncd.service",
    "systemd-update-utmp.service",
    "systemd-update-utmp-runlevel.service",
    "ldconfig.service",
    "modprobe@configfs.service",
    "modprobe@dm_mod.service",
    "modprobe@drm.service",
    "modprobe@efi_pstore.service",
    "modprobe@fuse.service",
    "modprobe@loop.service",
    "proc-sys-fs-binfmt_misc.automount",
    "proc-sys-fs-binfmt_misc.mount",
    "systemd-binfmt.service",
    "sys-fs-fuse-connections.mount",
    "sys-kernel-config.mount",
    "dev-hugepages.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "console-setup.service",
    "keyboard-setup.service",
)


@dataclass(frozen=True)
class HostImage:
    """A finished image, and the QEMU that it is started with. Files are read only; guests write
    overlays."""

    kernel: Path
    initrd: Path
    root: Path
    emulator: Emulator


def digest() -> str:
    """Digest of everything that decides the image."""
    texts = {
        str(path.relative_to(GUEST)): path.read_text()
        for path in sorted(GUEST.rglob("*"))
        if path.is_file()
    }
    own = (Path(__file__), recipe.INIT)
    code = [Path(str(module.__file__)).read_text() for module in (disk, initramfs, kernel)]
    return digest_of(
        {
            "base": base_inputs(),
            "packages": sorted(PACKAGES),
            "guest": texts,
            "modules": recipe.MODULES,
            "code": [*(path.read_text() for path in own), *code],
        }
    )


def place(cache: Path) -> Path:
    """Where the image of this version is, once it is built."""
    return cache / NAME / digest()[:24]


def built(cache: Path) -> HostImage:
    """The image in ``cache``.

    :raises ImageError: it was not built.
    """
    directory = place(cache)
    if not directory.is_dir():
        raise ImageError("The lab host's image is not built.", "Run 'deploy/lab build'.")
    return HostImage(
        kernel=directory / "vmlinux",
        initrd=directory / "initrd",
        root=directory / "root.qcow2",
        emulator=emulator.fetched(cache),
    )


def build(cache: Path, sink: Sink) -> HostImage:
    """Build the image, or take it from ``cache``; needs root, mounts nothing.

    :raises ImageError: a tool or space is missing, or a step failed.
    """
    progress = Progress(PLAN, sink)
    root = cache / NAME
    root.mkdir(parents=True, exist_ok=True)
    with entry(root, place(cache).name) as (directory, ready):
        if ready:
            for stage in PLAN[:-1]:
                progress.skip(stage.name, "from the cache")
        else:
            require_space(root, _SPACE_MIB, "Building the lab host's image")
            _build(directory, cache, progress)
    prune(root, keep=2)
    emulator.fetch(cache, progress)
    return built(cache)


def _build(directory: Path, cache: Path, progress: Progress) -> None:
    base = base_tree(cache, progress)
    layer = layer_tree(base, PACKAGES, cache, progress)
    tree = base.tree()
    (directory / "vmlinux").write_bytes(uncompressed(base.kernel(tree)))
    recipe.initramfs(base, tree).write(directory / "initrd")
    tree.close()
    work = directory / "root"
    with progress.stage("settings"):
        populate(work, layer)
    disk.make_disk(work, directory / "root.qcow2", VIRTUAL_MIB, progress)
    shutil.rmtree(work)


def populate(root: Path, layer: BaseImage) -> None:
    """Fill the directory ``root`` with the host's root file system."""
    layer.extract(root)
    for source in sorted(GUEST.rglob("*")):
        if source.is_file():
            target = root / source.relative_to(GUEST)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(0o644)
    # The package has made keys that every lab would share.
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    units = "etc/systemd/system"
    for name in _MASKED:
        _link(root, f"{units}/{name}", "/dev/null")
    _link(root, "etc/systemd/system-generators/cloud-init-generator", "/dev/null")
    for name in ("lab-cpus.service", "lab-seed.service"):
        _link(root, f"{units}/sysinit.target.wants/{name}", f"/{units}/{name}")
    # libvirtd asks every emulator that it finds for its abilities, which takes seconds each.
    (root / "usr/bin/qemu-system-i386").unlink(missing_ok=True)
    for name in ("systemd-networkd.service", "ssh.service", "libvirtd.service"):
        _link(root, f"{units}/multi-user.target.wants/{name}", f"/lib/systemd/system/{name}")


def _link(root: Path, path: str, target: str) -> None:
    full = root / path
    full.parent.mkdir(parents=True, exist_ok=True)
    full.unlink(missing_ok=True)
    full.symlink_to(target)


def main(argv: list[str] | None = None) -> int:
    """``python -m deploy.labhost.image``: build; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.labhost.image", description=__doc__)
    parser.add_argument("--cache", type=Path, default=default_cache(), help="build cache")
    parser.add_argument("--out", type=Path, help="not used: the image stays in the cache")
    parser.add_argument("--progress", choices=("auto", "plain", "bar", "json"), default="auto")
    options = parser.parse_args(argv)
    try:
        print(build(options.cache, sink_for(options.progress)).root.parent)
    except ImageError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
