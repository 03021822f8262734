"""A libvirt of one's own: its folders are replaced in one mount namespace.

Standard library only: ``tests/run`` uses it before anything is installed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDERS = (
    "/run/libvirt",
    "/etc/libvirt",
    "/var/lib/libvirt",
    "/var/cache/libvirt",
    "/var/log/libvirt",
)


@contextmanager
def private_libvirt() -> Iterator[tuple[list[str], Path]]:
    """What a command is started with to have a libvirt of its own, and the folder that holds it.

    libvirt's folders are replaced, in the command's mount namespace alone, by empty ones. The
    machine's own libvirt, and whatever an earlier run that was killed has left in it, is neither
    seen nor touched. Only Debian's filters and settings are carried over. The command must have a
    mount namespace already (``ip netns exec`` and ``unshare --mount`` make one).
    """
    folder = Path(tempfile.mkdtemp(prefix="gs-tests-libvirt-", dir="/var/tmp"))
    folder.chmod(0o711)  # QEMU's account must get through
    try:
        mounts = []
        for place in FOLDERS:
            own = inside(folder, place)
            own.mkdir(mode=0o755)
            Path(place).mkdir(parents=True, exist_ok=True)
            mounts.append(f"mount --bind {own} {place}")
        etc = inside(folder, "/etc/libvirt")
        for path in Path("/etc/libvirt").glob("*.conf"):
            shutil.copy(path, etc)
        (etc / "nwfilter").mkdir()
        for path in Path("/etc/libvirt/nwfilter").glob("*.xml"):
            if not path.name.startswith("gs-"):
                shutil.copy(path, etc / "nwfilter")
        qemu = inside(folder, "/var/lib/libvirt") / "qemu"
        qemu.mkdir()
        shutil.chown(qemu, "libvirt-qemu", "libvirt-qemu")
        script = " && ".join(mounts) + ' && exec "$@"'
        yield ["sh", "-c", script, "sh"], folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def inside(folder: Path, place: str) -> Path:
    """Where one of ``FOLDERS`` really lies."""
    return folder / place.strip("/").replace("/", "-")
