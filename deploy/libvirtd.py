"""libvirtd and virtlogd where there is no systemd to start them.

    with libvirtd(Path("/var/lib/gpuspawner/libvirtd")):
        ...

A libvirtd that answers already is used as it is. One of our own runs in the foreground under its
parent, with configuration files of its own given on the command line: nothing in /etc/libvirt is
written. QEMU's settings (qemu.conf) are the distribution's, which run guests under an account of
their own. It runs in the network namespace of its parent, and its bridges are made there; enter
one by ``ip netns exec``, which mounts a fresh /sys, as libvirt sets its ports' flags there.

Where nothing has set up /dev (no udev), /dev/kvm may be root's alone. libvirt then finds KVM as
root, finds it gone for QEMU's account, and asks QEMU for its capabilities anew at every call:
minutes for one guest. So libvirtd gets a /dev/kvm with the usual mode, in a mount namespace of
its own; the machine's stays as it is.

As a program it runs until it is told to stop: ``python -m deploy.libvirtd [STATE_DIR]``.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

KVM = Path("/dev/kvm")
RUN_DIR = Path("/run/libvirt")
LIBVIRTD_SOCKET = RUN_DIR / "libvirt-sock"
VIRTLOGD_SOCKET = RUN_DIR / "virtlogd-sock"
START_S = 60.0  # the first start asks every QEMU for its capabilities
STOP_S = 20.0

# Root alone: whoever may use the socket is root on the machine. Peer credentials are checked by
# the socket's mode; polkit is not running where systemd is not.
_LIBVIRTD_CONF = """\
unix_sock_group = "root"
unix_sock_ro_perms = "0700"
unix_sock_rw_perms = "0700"
auth_unix_ro = "none"
auth_unix_rw = "none"
log_outputs = "3:stderr"
"""
# A guest's console is kept to 2 MiB and one older piece of the same size.
_VIRTLOGD_CONF = """\
max_size = 2097152
max_backups = 1
log_outputs = "3:stderr"
"""


class LibvirtdError(Exception):
    """libvirtd could not be started; the text says why and what to do."""


def answers(path: Path) -> bool:
    """Whether a daemon listens on this socket."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as client:
        client.settimeout(5)
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


@contextlib.contextmanager
def libvirtd(state_dir: Path) -> Iterator[bool]:
    """libvirtd for as long as the block runs. Yields whether it was started here.

    ``state_dir`` takes configuration and logs. Guests should be gone at the end of the block:
    what still runs goes on, unwatched, and its console is no longer written.
    """
    if answers(LIBVIRTD_SOCKET):
        yield False
        return
    if os.geteuid() != 0:
        raise LibvirtdError("No libvirtd answers, and only root can start one.")
    with contextlib.ExitStack() as stack:
        with _alone():
            if answers(LIBVIRTD_SOCKET):
                started = False
            else:
                _start_both(stack, state_dir)
                started = True
        yield started


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One starter at a time: a second libvirtd would take the first one's socket away."""
    RUN_DIR.mkdir(parents=True, exist_ok=True)
    with (RUN_DIR / "gpuspawner-start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _start_both(stack: contextlib.ExitStack, state_dir: Path) -> None:
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not answers(VIRTLOGD_SOCKET):
        stack.enter_context(_daemon("virtlogd", _VIRTLOGD_CONF, state_dir, VIRTLOGD_SOCKET))
    prefix = _with_usable_kvm(state_dir)
    stack.enter_context(_daemon("libvirtd", _LIBVIRTD_CONF, state_dir, LIBVIRTD_SOCKET, prefix))


@contextlib.contextmanager
def _daemon(
    name: str, text: str, state_dir: Path, listens_on: Path, prefix: Sequence[str] = ()
) -> Iterator[None]:
    binary = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if binary is None:
        raise LibvirtdError(
            f"{name} is not installed. Install libvirt's daemon (Debian: libvirt-daemon-system)."
        )
    conf = state_dir / f"{name}.conf"
    conf.write_text(text)
    log = state_dir / f"{name}.log"
    with log.open("ab") as out:
        pid_file = state_dir / f"{name}.pid"
        process = _start([*prefix, binary, "--config", str(conf), "--pid-file", str(pid_file)], out)
    try:
        _wait(name, process, listens_on, log)
        yield
    finally:
        _stop(process)


def _with_usable_kvm(state_dir: Path) -> tuple[str, ...]:
    """The command that starts libvirtd with a /dev/kvm that QEMU's account may open; empty where
    there is no KVM, or it may already."""
    try:
        status = KVM.stat()
    except FileNotFoundError:
        return ()
    if status.st_mode & 0o006 == 0o006 or (status.st_mode & 0o060 and _is_kvm(status.st_gid)):
        return ()
    place = state_dir / "dev"
    place.mkdir(exist_ok=True)
    number = f"{os.major(status.st_rdev)} {os.minor(status.st_rdev)}"
    # A file system of its own, as the one below may not allow device nodes.
    make = (
        'mount -t tmpfs -o mode=0755,size=64k none "$1" '
        f'&& mknod -m 0666 "$1/kvm" c {number} && mount --bind "$1/kvm" {KVM} '
        '&& shift && exec "$@"'
    )
    unshare = ("unshare", "--mount", "--propagation", "slave")  # later shared mounts are still seen
    return (*unshare, "sh", "-c", make, "sh", str(place))


def _is_kvm(gid: int) -> bool:
    """Whether this is the group that distributions put QEMU's account in."""
    try:
        return grp.getgrgid(gid).gr_name == "kvm"
    except KeyError:
        return False


def _start(command: list[str], out: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        start_new_session=True,  # Ctrl-C is for its parent, which ends it in its turn
    )


def _wait(name: str, process: subprocess.Popen[bytes], listens_on: Path, log: Path) -> None:
    end = time.monotonic() + START_S
    while not answers(listens_on):
        if process.poll() is not None or time.monotonic() > end:
            state = "ended" if process.poll() is not None else f"is not ready after {START_S:g} s"
            tail = log.read_text(errors="replace")[-600:]
            raise LibvirtdError(f"{name} {state}. The end of its log, {log}:\n{tail}")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    # A stopped process does not see its SIGTERM.
    for number in (signal.SIGTERM, signal.SIGCONT):
        process.send_signal(number)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(arguments: list[str]) -> int:
    """Run libvirtd until SIGTERM or Ctrl-C."""
    state_dir = Path(arguments[0] if arguments else "/run/gpuspawner/libvirtd")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        with libvirtd(state_dir) as started:
            print("libvirtd runs." if started else "A libvirtd runs already.", flush=True)
            while started:
                signal.pause()
    except KeyboardInterrupt:
        pass
    except LibvirtdError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
