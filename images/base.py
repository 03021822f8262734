"""The Debian base that every image with a disk, and every initramfs, is taken from.

One tar, made by mmdebstrap as root without mounting anything, kept in the cache under a digest
of its inputs.  Images add packages of their own on top (:mod:`images.layer`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from images import apt
from images.cache import digest_of, entry, prune, require_space
from images.errors import ImageError
from images.initramfs import ModuleIndex
from images.progress import Progress, Stage, StageHandle
from images.tree import TarTree, read, realpath

SUITE = "bookworm"
ARCH = "amd64"

#: linux-image-amd64 and not -cloud-amd64: the cloud flavour has no AHCI (the seed is a SATA
#: CD-ROM) and no DRM (real GPUs).
PACKAGES = (
    "linux-image-amd64",
    "systemd-sysv",
    "systemd-resolved",
    "udev",
    "dbus",
    "kmod",
    "mount",
    "iproute2",
    "iputils-ping",
    "procps",
    "pciutils",
    "ca-certificates",
    "tzdata",
    "python3",
    "cloud-init",
    "sudo",
    "e2fsprogs",
    "less",
    "nano",
    "git",
    "curl",
    "openssh-client",
    "unzip",
    "xz-utils",
    "busybox-static",
    "rsync",
    "tmux",
    "htop",
)

_PATH_EXCLUDES = (
    "/usr/share/doc/*",
    "/usr/share/man/*",
    "/usr/share/info/*",
    "/usr/share/locale/*",
    "/usr/share/lintian/*",
    "/usr/share/bug/*",
    "/usr/share/bash-completion/*",
    # The kernel depends on initramfs-tools, but the initramfs is ours (images.initramfs):
    # neither the kernel's hook nor the package's trigger shall make one (_NO_INITRAMFS).
    "/etc/kernel/postinst.d/initramfs-tools",
    "/etc/initramfs-tools/update-initramfs.conf",
    # Hardware that a virtual machine does not have; half the modules' size.
    "/lib/modules/*/kernel/sound/*",
    "/lib/modules/*/kernel/drivers/media/*",
    "/lib/modules/*/kernel/drivers/staging/*",
    "/lib/modules/*/kernel/drivers/net/wireless/*",
    "/lib/modules/*/kernel/drivers/isdn/*",
    "/lib/modules/*/kernel/drivers/bluetooth/*",
    "/lib/modules/*/kernel/drivers/iio/*",
    "/lib/modules/*/kernel/drivers/gpu/drm/amd/*",
    "/lib/modules/*/kernel/drivers/gpu/drm/i915/*",
    "/lib/modules/*/kernel/drivers/gpu/drm/nouveau/*",
    "/lib/modules/*/kernel/drivers/gpu/drm/radeon/*",
)

#: Run before the kernel is unpacked; its file is excluded above, so that dpkg leaves ours alone.
_NO_INITRAMFS = (
    'mkdir -p "$1/etc/initramfs-tools"'
    ' && echo update_initramfs=no > "$1/etc/initramfs-tools/update-initramfs.conf"'
)

#: Raised by hand when the recipe below changes in a way that its data do not show.
_RECIPE = 1

#: Weights measured on two quiet cores.
BASE_STAGES = (Stage("base", "Installing the Debian base", 78.0),)

_SPACE_MIB = 2600


@dataclass(frozen=True)
class BaseImage:
    """A finished base (or a layer on it).

    :ivar tar: uncompressed tar of the root file system.
    :ivar digest: hex digest of the inputs it was made from.
    :ivar kernel_release: as ``uname -r`` says in the guest.
    :ivar packages: Debian package name -> version.
    """

    tar: Path
    digest: str
    kernel_release: str
    packages: Mapping[str, str]

    def tree(self) -> TarTree:
        """The root file system, for reading single files out of it."""
        return TarTree(self.tar)

    def kernel(self, tree: TarTree | None = None) -> bytes:
        """The kernel image (bzImage)."""
        return read(tree or self.tree(), f"/boot/vmlinuz-{self.kernel_release}")

    def modules(self, tree: TarTree | None = None) -> ModuleIndex:
        """The kernel's modules with their dependencies."""
        return ModuleIndex(tree or self.tree(), self.kernel_release)

    def extract(self, into: Path) -> None:
        """Unpack the root file system into the directory `into`, with owners and modes.

        :raises ImageError: not run as root, so owners could not be kept.
        """
        if os.geteuid() != 0:
            raise ImageError(
                "Unpacking a root file system needs root, to keep its owners.",
                "Run the build as root (a container is enough).",
            )
        into.mkdir(parents=True, exist_ok=True)
        run_tool(["tar", "--numeric-owner", "-xpf", str(self.tar), "-C", str(into)], "tar")


def run_tool(
    command: Sequence[str],
    package: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a program to its end and return its standard output.

    :param package: the Debian package that carries the program, named when it is missing.
    :param cwd: directory to run it in; default the builder's own.
    :raises ImageError: the program is missing or failed; its last lines are in the message.
    """
    try:
        done = subprocess.run(
            list(command),
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            env=env,
            cwd=cwd,
        )
    except FileNotFoundError:
        raise ImageError(f"{command[0]} is not installed.", f"apt-get install {package}") from None
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()[-15:]
        tail = "\n  ".join(lines)
        raise ImageError(
            f"{command[0]} ended with exit code {done.returncode}.",
            f"Its last lines were:\n  {tail}",
        )
    return done.stdout


def base_inputs() -> dict[str, object]:
    """Everything that decides what the base contains, except the mirror's state of the day."""
    return {
        "recipe": _RECIPE,
        "suite": SUITE,
        "arch": ARCH,
        "packages": sorted(PACKAGES),
        "excludes": sorted(_PATH_EXCLUDES),
    }


def _customize(suite: str) -> str:
    """The shell program that mmdebstrap runs on the finished tree ($1)."""
    return f"""\
set -eu
rm -f "$1"/etc/apt/sources.list.d/* "$1"/etc/apt/sources.list
cat > "$1"/etc/apt/sources.list.d/debian.sources <<'SOURCES'
{apt.PUBLIC_SOURCES.format(suite=suite)}SOURCES
rm -f "$1"/etc/apt/apt.conf.d/99mmdebstrap
rm -rf "$1"/var/cache/debconf/*-old "$1"/var/log/*.log "$1"/var/log/apt
: > "$1"/etc/machine-id
rm -f "$1"/etc/hostname "$1"/etc/resolv.conf
"""


def _command(out: Path, work: Path) -> list[str]:
    options = work / "apt.conf"
    options.write_text("".join(f"{line}\n" for line in apt.host_reach_options()))
    hook = work / "customize"
    hook.write_text(_customize(SUITE))
    command = [
        "mmdebstrap",
        "--mode=root",
        "--variant=apt",
        "--format=tar",
        f"--architectures={ARCH}",
        "--skip=chroot/mount",
        "--verbose",
        f"--include={','.join(PACKAGES)}",
        f"--aptopt={options}",
        '--aptopt=Apt::Install-Recommends "false"',
        f"--essential-hook={_NO_INITRAMFS}",
        f'--customize-hook=sh {hook} "$1"',
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in _PATH_EXCLUDES),
        SUITE,
        str(out),
        *(source.line() for source in apt.host_sources(SUITE)),
    ]
    return command


def _follow(line: str, counts: dict[str, int], stage: StageHandle) -> None:
    """Turn one line of mmdebstrap's and dpkg's output into progress."""
    match = re.search(r"(\d+) newly installed", line)
    if match:
        counts["all"] = counts.get("all", 0) + int(match[1])
    for word, key in (("Unpacking ", "unpacked"), ("Setting up ", "set_up")):
        if line.startswith(word):
            counts[key] = counts.get(key, 0) + 1
            total = max(counts.get("all", 0), 190)
            done = (counts.get("unpacked", 0) + counts.get("set_up", 0)) / (2 * total)
            stage.at(0.1 + 0.8 * min(1.0, done), line.split("(")[0].strip())


def _bootstrap(out: Path, work: Path, stage: StageHandle) -> None:
    log = work / "log"
    env = {**os.environ, "TMPDIR": str(work), "DEBIAN_FRONTEND": "noninteractive"}
    counts: dict[str, int] = {}
    with log.open("w") as record:
        process = subprocess.Popen(
            _command(out, work),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=env,
        )
        assert process.stdout is not None
        for line in process.stdout:
            record.write(line)
            _follow(line, counts, stage)
        code = process.wait()
    if code:
        tail = "\n  ".join(log.read_text(errors="replace").splitlines()[-15:])
        raise ImageError(
            f"mmdebstrap ended with exit code {code}.",
            "Check that `apt-get update` works here (mirror, proxy), then build again.\n"
            f"  Its last lines were:\n  {tail}",
        )


def installed_packages(tree: TarTree) -> dict[str, str]:
    """Debian package -> version out of the tree's dpkg status."""
    found = {}
    for block in read(tree, "/var/lib/dpkg/status").decode().split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in block.splitlines() if re.match(r"^[A-Z]\S*: ", line)
        )
        if fields.get("Status") == "install ok installed":
            found[fields["Package"]] = fields["Version"]
    return dict(sorted(found.items()))


def load_base(directory: Path, digest: str) -> BaseImage:
    """The base or layer whose root.tar lies in `directory`."""
    tar = directory / "root.tar"
    tree = TarTree(tar)
    try:
        modules = realpath(tree, "/lib/modules")
        releases = tree.children(modules) if modules else []
        if len(releases) != 1:
            raise ImageError(
                f"{tar} carries {len(releases)} kernels instead of one.",
                f"Remove {directory} and build again.",
            )
        return BaseImage(tar, digest, releases[0], installed_packages(tree))
    finally:
        tree.close()


def base_cached(cache: Path) -> bool:
    """Whether :func:`base_tree` would find its result in `cache`."""
    return (cache / "base" / digest_of(base_inputs())[:24]).is_dir()


def base_tree(cache: Path, progress: Progress, *, refresh: bool = False) -> BaseImage:
    """The Debian base, from the cache or built now (about two minutes).

    :param refresh: build it again although the cache has it, to take in security updates.
    :raises ImageError: a tool is missing, no space, or mmdebstrap failed.
    """
    digest = digest_of(base_inputs())
    name = digest[:24]
    root = cache / "base"
    root.mkdir(parents=True, exist_ok=True)
    if refresh and (root / name).is_dir():
        stale = root / f".tmp-old-{name}"
        shutil.rmtree(stale, ignore_errors=True)
        os.rename(root / name, stale)
        shutil.rmtree(stale)
    with entry(root, name) as (directory, ready):
        if ready:
            progress.skip("base", "from the cache")
            return load_base(directory, digest)
        _check_builder(root)
        with progress.stage("base") as stage:
            work = directory / "work"
            work.mkdir()
            # mmdebstrap drops to the user _apt for downloads, who must get in here.
            for part in (root, directory, work):
                part.chmod(0o755)
            _bootstrap(directory / "root.tar", work, stage)
            shutil.rmtree(work)
            load_base(directory, digest)
    prune(root, keep=2)
    return load_base(root / name, digest)


def _check_builder(root: Path) -> None:
    """Find out before the long step, not after it, that a tool or space is missing."""
    if os.geteuid() != 0:
        raise ImageError(
            "Building a Debian base needs root.", "Run it as root (a container is enough)."
        )
    for program, package in (("mmdebstrap", "mmdebstrap"), ("apt-config", "apt"), ("tar", "tar")):
        if shutil.which(program) is None:
            raise ImageError(f"{program} is not installed.", f"apt-get install {package}")
    require_space(root, _SPACE_MIB, "Building the Debian base")
