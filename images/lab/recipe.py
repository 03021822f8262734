"""How the JupyterLab image is made: Debian base, the environment /opt/lab, the guest's files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from images.base import BaseImage, run_tool
from images.errors import ImageError
from images.initramfs import Initramfs
from images.lab import scene
from images.progress import Progress, Stage
from images.tree import TarTree

HERE = Path(__file__).parent
GUEST = HERE / "guest"
REQUIREMENTS = HERE / "requirements.txt"
INIT = HERE / "init"

TITLE = "JupyterLab for satellite data"
PYTHON = "3.11"
PLATFORM = "x86_64-manylinux_2_36"
USER, UID = "jovyan", 1000
VIRTUAL_MIB = 6144
MIN_MEMORY_MIB = 1024

#: What is needed until the root is mounted, and the drivers whose probing is better begun early:
#: the network card, and the SATA CD-ROM with the seed, whose links take a second to come up.
MODULES = ("ahci", "virtio_pci", "virtio_blk", "ext4", "sr_mod", "isofs", "virtio_net")

#: panic=1: a guest that panics reboots, which ends its lease; without it, it would hang for ever.
#: mitigations=off: the tenant has root in this guest, there is nobody to protect from whom.
#: fsck.mode=skip: the root is a new overlay at every start; homes are looked after by seed.py.
CMDLINE = (
    "root=/dev/vda rootfstype=ext4 rw console=ttyS0 quiet loglevel=4 panic=1"
    " mitigations=off fsck.mode=skip systemd.show_status=auto audit=0 apparmor=0"
    " selinux=0 random.trust_cpu=on i8042.noaux 8250.nr_uarts=1 nokaslr"
)

STAGES = (
    Stage("unpack", "Unpacking the base", 2.0),
    Stage("python", "Installing JupyterLab", 8.0),
    Stage("compile", "Compiling Python files", 12.0),
    Stage("settings", "Writing the guest's settings", 1.0),
)

#: Nothing of these is wanted in a machine that lives for one session.
_MASKED = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "fstrim.timer",
    "systemd-tmpfiles-clean.timer",
    "e2scrub_reap.service",
    "getty@tty1.service",
    "serial-getty@ttyS0.service",
    "systemd-firstboot.service",
    "systemd-fsck-root.service",
    "systemd-modules-load.service",
    "systemd-sysusers.service",
    "modprobe@dm_mod.service",
    "modprobe@loop.service",
    "systemd-remount-fs.service",
    "systemd-pstore.service",
    "systemd-random-seed.service",
    "systemd-update-utmp.service",
    "systemd-update-utmp-runlevel.service",
    "systemd-machine-id-commit.service",
    "systemd-journal-flush.service",
    "systemd-networkd-wait-online.service",
    "systemd-binfmt.service",
    "ldconfig.service",
    "modprobe@drm.service",
    "modprobe@configfs.service",
    "modprobe@fuse.service",
    "modprobe@efi_pstore.service",
    "dev-hugepages.mount",
    "dev-mqueue.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "sys-kernel-config.mount",
    "sys-fs-fuse-connections.mount",
    "proc-sys-fs-binfmt_misc.automount",
    "console-setup.service",
    "keyboard-setup.service",
    "rsync.service",
)

_ENABLED = {
    "sysinit.target": ("gpuspawner-seed.service",),
    "multi-user.target": ("gpuspawner-lab.service", "systemd-networkd.service"),
}


def inputs() -> dict[str, object]:
    """Everything of this recipe that decides the image's content."""
    guest = {
        str(path.relative_to(GUEST)): path.read_text()
        for path in sorted(GUEST.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    return {
        "recipe": Path(__file__).read_text(),
        "requirements": REQUIREMENTS.read_text(),
        "init": INIT.read_text(),
        "scene": Path(scene.__file__).read_text(),
        "guest": guest,
    }


def initramfs(base: BaseImage, tree: TarTree) -> Initramfs:
    """Busybox, the modules and `init`; used by every image with a disk."""
    made = Initramfs()
    made.add_consoles()
    for name in ("dev", "proc", "root", "sys"):
        made.add_dir(name)
    made.add_from(tree, "/bin/busybox", "bin/busybox")
    made.add_modules(base.modules(tree), MODULES)
    made.add_file("init", INIT.read_bytes(), 0o755)
    return made


def packages() -> dict[str, str]:
    """Python package -> version, as locked."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^ \\]+)", REQUIREMENTS.read_text(), re.M)
    return dict(sorted(found))


def _uv() -> str:
    found = shutil.which("uv")
    if found is None:
        try:
            from uv import find_uv_bin

            found = str(find_uv_bin())
        except (ImportError, FileNotFoundError):
            raise ImageError("uv is not installed.", "pip install 'gpuspawner[images]'") from None
    return found


def install_python(root: Path) -> None:
    """Make /opt/lab in the tree: a virtual environment of the guest's own Python.

    Nothing of the tree is run: uv unpacks locked wheels for the guest's platform.
    """
    lab = root / "opt/lab"
    shutil.rmtree(lab, ignore_errors=True)
    (lab / "bin").mkdir(parents=True)
    command = [_uv(), "pip", "install", "--quiet", "--prefix", str(lab)]
    command += ["--python-version", PYTHON, "--python-platform", PLATFORM]
    command += ["--only-binary", ":all:", "--no-deps", "--require-hashes", "--link-mode", "copy"]
    run_tool([*command, "-r", str(REQUIREMENTS)], "uv (from PyPI)")
    _use_guest_paths(lab)


def _use_guest_paths(lab: Path) -> None:
    """Turn a --prefix made by the builder's Python into an environment of the guest's."""
    made = [path for path in (lab / "lib").iterdir() if path.name.startswith("python")]
    wanted = lab / "lib" / f"python{PYTHON}"
    if made != [wanted]:
        made[0].rename(wanted)
    (lab / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {PYTHON}\n"
    )
    for name in ("python", "python3", f"python{PYTHON}"):
        (lab / "bin" / name).symlink_to("/usr/bin/python3")
    for script in (lab / "bin").iterdir():
        if script.is_symlink():
            continue
        text = script.read_bytes()
        if text.startswith(b"#!") and b"python" in text.split(b"\n", 1)[0]:
            script.write_bytes(b"#!/opt/lab/bin/python\n" + text.split(b"\n", 1)[1])


def compile_python(root: Path) -> None:
    """Write the .pyc files with the guest's own Python, so that no session starts without them.

    Two processes by hand: compileall's own pool needs a mounted /dev/shm.
    """
    site = root / f"opt/lab/lib/python{PYTHON}/site-packages"
    names = sorted(path.name for path in site.iterdir() if path.is_dir() or path.suffix == ".py")
    halves = [names[0::2], names[1::2]]
    places = [[f"/{site.relative_to(root)}/{name}" for name in half] for half in halves]
    places[0] += ["/usr/lib/python3", f"/usr/lib/python{PYTHON}"]
    command = ["chroot", str(root), "/usr/bin/python3", "-I", "-S", "-m", "compileall", "-q"]
    running = [
        subprocess.Popen(
            [*command, *half], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for half in places
    ]
    # A package may ship templates that are no Python; what cannot be compiled is not imported.
    for process in running:
        process.communicate()
    if not list((site / "jupyterhub").glob("__pycache__/*.pyc")):
        raise ImageError(
            "The guest's Python could not be run to compile its files.",
            "The build must run as root on x86_64, where chroot is allowed.",
        )


def copy_guest_files(root: Path) -> None:
    """Lay the files below guest/ over the tree; programs get mode 0755."""
    for source in sorted(GUEST.rglob("*")):
        if source.is_dir() or "__pycache__" in source.parts:
            continue
        below = source.relative_to(GUEST)
        target = root / below
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod(0o755 if below.parts[:3] == ("opt", "lab", "bin") else 0o644)


def _link(root: Path, path: str, target: str) -> None:
    full = root / path
    full.parent.mkdir(parents=True, exist_ok=True)
    full.unlink(missing_ok=True)
    full.symlink_to(target)


def enable_units(root: Path) -> None:
    """Enable, mask and gate systemd units by their links, without running systemctl."""
    units = "etc/systemd/system"
    for name in _MASKED:
        _link(root, f"{units}/{name}", "/dev/null")
    for target, names in _ENABLED.items():
        for name in names:
            owner = "/etc" if name.startswith("gpuspawner-") else "/lib"
            _link(root, f"{units}/{target}.wants/{name}", f"{owner}/systemd/system/{name}")
    # cloud-init's generator searches for metadata before anything has started (two seconds under
    # emulation); its units are always in, and each asks for our seed by a condition instead.
    _link(root, "etc/systemd/system-generators/cloud-init-generator", "/dev/null")
    _link(
        root,
        f"{units}/multi-user.target.wants/cloud-init.target",
        "/lib/systemd/system/cloud-init.target",
    )
    # It locks the tray of the drive, and the host ejects the seed.
    _link(root, "etc/udev/rules.d/60-cdrom_id.rules", "/dev/null")
    _link(root, "etc/resolv.conf", "../run/resolv.conf")
    _link(root, "usr/local/bin/gpuspawner-gpu", "/opt/lab/bin/gpuspawner-gpu")


def add_user(root: Path) -> None:
    """The notebook user, its group, and the group `gpu`; the password is locked."""
    lines = {
        "etc/passwd": f"{USER}:x:{UID}:{UID}::/home/{USER}:/bin/bash\n",
        "etc/group": f"{USER}:x:{UID}:\ngpu:x:990:{USER}\n",
        "etc/shadow": f"{USER}:!:20000:0:99999:7:::\n",
        "etc/gshadow": f"{USER}:!::\ngpu:!::{USER}\n",
    }
    for path, text in lines.items():
        with (root / path).open("a") as handle:
            handle.write(text)
    home = root / "home" / USER
    home.mkdir(mode=0o700)
    os.chown(home, UID, UID)
    # The root disk is thrown away with the session: `pip install` in a notebook may write to it.
    for place in (root / "opt/lab", *(root / "opt/lab").rglob("*")):
        os.chown(place, UID, UID, follow_symlinks=False)


def populate(root: Path, base: BaseImage, sample: Path, progress: Progress) -> None:
    """Fill the directory `root` with the image's root file system.

    :param sample: what :func:`images.lab.scene.scene_files` gave.
    """
    with progress.stage("unpack"):
        base.extract(root)
    with progress.stage("python"):
        install_python(root)
    with progress.stage("compile"):
        copy_guest_files(root)
        compile_python(root)
    with progress.stage("settings"):
        scene.install(sample, root)
        enable_units(root)
        add_user(root)
