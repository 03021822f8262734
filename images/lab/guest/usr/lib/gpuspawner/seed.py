"""Takes over the settings of this session from the seed disk, early in the boot.

Run once by gpuspawner-seed.service as root.  Reads /gpuspawner.json from the disk labelled
`cidata`, keeps it on tmpfs only, and sets address, host name, user, home and the server's
environment.  A seed without that file is left to cloud-init.

Only the standard library, few imports and few processes: under emulation each costs a second.
Nothing here may keep the server from starting, except a seed that cannot be read.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import sys
import time

TYPE_CHECKING = False  # typing.TYPE_CHECKING without importing typing, which takes its time
if TYPE_CHECKING:
    from typing import Any

RUN = "run/gpuspawner"
LABEL = "cidata"
DISK_WAIT_S = 15.0
SECTOR = 2048


class Machine:
    """Doors to the machine: its root directory and its programs; tests give other ones."""

    def __init__(self, root: str = "/") -> None:
        self.root = root

    def path(self, *parts: str) -> str:
        return os.path.join(self.root, *(part.lstrip("/") for part in parts))

    def run(self, *command: str) -> int:
        """Run a program with its output on the console; its exit code, 127 if it is missing."""
        try:
            return os.waitstatus_to_exitcode(
                os.waitpid(os.posix_spawnp(command[0], command, os.environ), 0)[1]
            )
        except FileNotFoundError:
            return 127

    def set_hostname(self, name: str) -> None:
        socket.sethostname(name)

    def chown(self, path: str, uid: int, gid: int) -> None:
        os.chown(path, uid, gid)

    def say(self, text: str) -> None:
        print("gpuspawner:", text, flush=True)


def write(
    machine: Machine, path: str, data: bytes | str, mode: int = 0o644, uid: int = 0, gid: int = 0
) -> None:
    """Write a file that has `mode` from its first byte on."""
    full = machine.path(path)
    make_dirs(machine, os.path.dirname(path))
    if os.path.lexists(full):
        os.unlink(full)
    handle = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as out:
        out.write(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
    os.chmod(full, mode)
    machine.chown(full, uid, gid)


def make_dirs(machine: Machine, path: str, mode: int = 0o755, uid: int = 0, gid: int = 0) -> None:
    """Make a directory with this owner and mode; parents are root's. One that is there stays."""
    full = machine.path(path)
    if os.path.isdir(full):
        return
    make_dirs(machine, os.path.dirname(path.rstrip("/")))
    os.mkdir(full, mode)
    os.chmod(full, mode)
    machine.chown(full, uid, gid)


def volume_label(device: str) -> str:
    """The ISO 9660 volume label of a block device, "" where there is none."""
    try:
        with open(device, "rb", buffering=0) as handle:
            handle.seek(16 * SECTOR)
            head = handle.read(SECTOR)
    except OSError:
        return ""
    if head[1:6] != b"CD001":
        return ""
    return head[40:72].decode("ascii", "replace").strip()


def find_seed_disk(machine: Machine) -> str | None:
    """The device that carries the seed, or None after DISK_WAIT_S."""
    deadline = time.monotonic() + DISK_WAIT_S
    while True:
        names = os.listdir(machine.path("sys/block"))
        for name in sorted(names, key=lambda item: (not item.startswith("sr"), item)):
            if name.startswith(("sr", "vd", "sd")):
                device = machine.path("dev", name)
                if volume_label(device).lower() == LABEL:
                    return device
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.05)


def read_seed(machine: Machine) -> bytes | None:
    """The content of gpuspawner.json, or None: no seed disk, or one for cloud-init."""
    device = find_seed_disk(machine)
    if device is None:
        machine.say("no seed disk found")
        return None
    place = machine.path(RUN, "cd")
    make_dirs(machine, RUN, 0o711)
    make_dirs(machine, RUN + "/cd", 0o700)
    options = "ro,nodev,nosuid,noexec"
    if machine.run("mount", "-t", "iso9660", "-o", options, device, place):
        machine.say(f"the seed disk {device} cannot be mounted")
        return None
    try:
        with open(os.path.join(place, "gpuspawner.json"), "rb") as handle:
            return handle.read()
    except FileNotFoundError:
        return None
    finally:
        machine.run("umount", place)
        os.rmdir(place)


# Network and names


def network_file(network: dict[str, Any]) -> str:
    """The systemd-networkd file for the one interface, matched by its MAC address."""
    lines = [
        "[Match]",
        f"MACAddress={network['mac']}",
        "[Network]",
        "LinkLocalAddressing=no",
        "IPv6AcceptRA=no",
        f"Address={network['address']}",
    ]
    if network.get("gateway"):
        lines.append(f"Gateway={network['gateway']}")
    lines += [f"DNS={server}" for server in network.get("dns", ())]
    lines += ["[Link]", "RequiredForOnline=no", ""]
    for line in lines:
        if "\n" in line:
            raise ValueError(f"a line break in the network settings: {line!r}")
    return "\n".join(lines)


def set_names(machine: Machine, seed: dict[str, Any]) -> None:
    """Host name, /etc/hosts, address and name servers."""
    hostname = seed["hostname"]
    network = seed.get("network") or {}
    address = network.get("address", "127.0.1.1").split("/")[0]
    machine.set_hostname(hostname)
    write(machine, "etc/hostname", hostname + "\n")
    write(machine, "etc/hosts", f"127.0.0.1 localhost\n::1 localhost\n{address} {hostname}\n")
    if network:
        write(machine, "run/systemd/network/10-gpuspawner.network", network_file(network))
    servers = network.get("dns", ())
    write(machine, "run/resolv.conf", "".join(f"nameserver {server}\n" for server in servers))


# The user


def set_user(machine: Machine, user: dict[str, Any]) -> tuple[str, int]:
    """Give the image's built-in user the seed's name and number, and sudo or not."""
    name, uid = user["name"], int(user["uid"])
    if uid < 1000 or not name.replace("-", "").replace("_", "").isalnum() or name[0] == "-":
        raise ValueError(f"not a user for notebooks: {name!r}, {uid}")
    for path in ("etc/passwd", "etc/group", "etc/shadow"):
        full = machine.path(path)
        with open(full, encoding="utf-8") as handle:
            text = handle.read()
        new = "".join(_renamed(path, line, name, uid) for line in text.splitlines(True))
        if new != text:
            write(machine, path, new, stat.S_IMODE(os.stat(full).st_mode))
    if user.get("sudo"):
        write(machine, "etc/sudoers.d/gpuspawner", f"{name} ALL=(ALL:ALL) NOPASSWD: ALL\n", 0o440)
    for place in (f"run/user/{uid}", f"run/user/{uid}/jupyter"):
        make_dirs(machine, place, 0o700, uid, uid)
    return name, uid


BUILTIN_USER = "jovyan"


def _renamed(path: str, line: str, name: str, uid: int) -> str:
    fields = line.rstrip("\n").split(":")
    if path == "etc/passwd" and fields[0] == BUILTIN_USER:
        fields[0], fields[2], fields[3], fields[5] = name, str(uid), str(uid), f"/home/{name}"
    elif path == "etc/shadow" and fields[0] == BUILTIN_USER:
        fields[0] = name
    elif path == "etc/group":
        if fields[0] == BUILTIN_USER:
            fields[0], fields[2] = name, str(uid)
        members = fields[3].split(",")
        fields[3] = ",".join(name if item == BUILTIN_USER else item for item in members)
    return ":".join(fields) + "\n"


# The home


EXT4_STATE_AT = 1024 + 58
EXT4_HAS_ERRORS = 2


def find_disk(machine: Machine, serial: str) -> str | None:
    """/dev/vdX of the virtio disk with this serial number, or None; needs no udev."""
    block = machine.path("sys/block")
    for name in sorted(os.listdir(block)):
        try:
            with open(os.path.join(block, name, "serial"), encoding="ascii") as handle:
                if handle.read().strip() == serial:
                    return machine.path("dev", name)
        except OSError:
            continue
    return None


def has_errors(device: str) -> bool:
    """Whether the file system says of itself that it is damaged."""
    with open(device, "rb", buffering=0) as handle:
        block = handle.read(4096)
    state = int.from_bytes(block[EXT4_STATE_AT : EXT4_STATE_AT + 2], "little")
    return bool(state & EXT4_HAS_ERRORS)


def format_home(machine: Machine, device: str, uid: int) -> None:
    """Format a disk on which blkid finds nothing at all; anything found is left alone."""
    if machine.run("blkid", "-p", device) != 2:
        machine.say("the home disk is said to be new, but something is on it: left as it is")
        return
    options = f"root_owner={uid}:{uid},nodiscard"
    code = machine.run("mkfs.ext4", "-q", "-m", "1", "-L", "home", "-E", options, device)
    if code:
        machine.say(f"mkfs.ext4 of the home ended with {code}")


def mount_home(machine: Machine, device: str, place: str) -> str:
    """Mount the home as well as it goes; "ok", "readonly" or "temporary"."""
    flags = "noatime,nosuid,nodev"
    mount = ("mount", "-t", "ext4", "-o")
    try:
        damaged = has_errors(device)
    except OSError:
        damaged = True
    if damaged or machine.run(*mount, flags, device, place):
        code = machine.run("timeout", "120", "e2fsck", "-p", device)
        machine.say(f"the home needed a repair; e2fsck ended with {code}")
        if code not in (0, 1) or machine.run(*mount, flags, device, place):
            for more in ("ro", "ro,noload"):
                if machine.run(*mount, f"{flags},{more}", device, place) == 0:
                    return "readonly"
            return "temporary"
    return "ok"


def grow_home(machine: Machine, device: str, place: str) -> None:
    """Use what the volume has gained since it was formatted."""
    name = os.path.basename(device)
    with open(machine.path("sys/block", name, "size"), encoding="ascii") as handle:
        size = int(handle.read()) * 512
    stats = os.statvfs(place)
    # Tables and journal are not in f_blocks, up to some 4 %; below that nothing has grown.
    if size > stats.f_blocks * stats.f_frsize * 1.08 and machine.run("resize2fs", device):
        machine.say("the home could not be grown to the size of its disk")


def can_write(directory: str, size: int = 1 << 20) -> bool:
    """Whether the user has room for a mebibyte (tested against the space left to users)."""
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize >= size and stats.f_favail > 16


WARNINGS = {
    "full": (
        "HOME-IS-FULL.txt",
        "Your home is full. Delete files here, then start a new session; "
        "until then settings and new notebooks may not be saved.\n",
    ),
    "temporary": (
        "HOME-NOT-AVAILABLE.txt",
        "Your home could not be opened. Its content is kept, "
        "but what you save here now is LOST when this session ends. Please tell your "
        "administrator.\n",
    ),
    "readonly": (
        "",
        "Your home is damaged and is open for reading only. Copy what you need; "
        "nothing can be saved there. Please tell your administrator.\n",
    ),
}


def prepare_directory(machine: Machine, place: str, uid: int, state: str) -> None:
    """Owner, first files and warning of the home that is now at `place`."""
    if state == "readonly":
        return
    if os.stat(place).st_uid != uid:
        machine.chown(place, uid, uid)
        os.chmod(place, 0o700)
    entries = os.listdir(place)
    if entries in ([], ["lost+found"]):
        for name in entries:
            os.rmdir(os.path.join(place, name))  # e2fsck makes it again when it needs it
        skeleton = machine.path("etc/skel")
        if os.path.isdir(skeleton):
            copy_skeleton(machine, skeleton, place, uid)
    for key, (file, text) in WARNINGS.items():
        if not file:
            continue
        full = os.path.join(place, file)
        if key == state:
            copy_to(machine, full, text.encode(), uid)
        elif os.path.lexists(full):
            os.unlink(full)


def copy_skeleton(machine: Machine, source: str, place: str, uid: int) -> None:
    """Give a new home what stands in /etc/skel, folders too."""
    for name in os.listdir(source):
        full, target = os.path.join(source, name), os.path.join(place, name)
        if os.path.isdir(full):
            os.mkdir(target)
            machine.chown(target, uid, uid)
            copy_skeleton(machine, full, target, uid)
            continue
        with open(full, "rb") as handle:
            copy_to(machine, target, handle.read(), uid)


def copy_to(machine: Machine, full: str, data: bytes, uid: int) -> None:
    """A small file of the user's; never follows a link that the user left under its name."""
    try:
        if os.path.lexists(full):
            os.unlink(full)
        handle = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        machine.chown(full, uid, uid)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EROFS, errno.EDQUOT):
            raise


def set_home(machine: Machine, home: dict[str, Any] | None, name: str, uid: int) -> str:
    """Mount the home at /home/NAME; says in home.json how that went.  Never raises."""
    place = machine.path("home", name)
    make_dirs(machine, f"home/{name}", 0o700, uid, uid)
    state = "temporary"
    try:
        device = find_disk(machine, home["serial"]) if home else None
        if home is None or device is None:
            machine.say("there is no home disk")
        else:
            if home.get("new"):
                format_home(machine, device, uid)
            state = mount_home(machine, device, place)
            if state == "ok":
                grow_home(machine, device, place)
                state = "ok" if can_write(place) else "full"
        prepare_directory(machine, place, uid, state)
    except Exception as error:
        machine.say(f"home: {type(error).__name__}: {error}")
    message = WARNINGS[state][1] if state in WARNINGS else ""
    write(machine, RUN + "/home.json", json.dumps({"state": state, "message": message}) + "\n")
    machine.say(f"home {place} is {state}")
    return state


# The server


def set_server(
    machine: Machine, server: dict[str, Any], name: str, uid: int, home_state: str
) -> None:
    """Keep the server's command and environment for serve.py, and write its files."""
    for path, text in (server.get("files") or {}).items():
        clean = os.path.normpath(path)
        if not clean.startswith(f"/{RUN}/") or clean.count("/") < 4:
            raise ValueError(f"a file of the server must be below /{RUN}/<directory>/: {path!r}")
        make_dirs(machine, os.path.dirname(clean), 0o700, uid, uid)
        write(machine, clean, text, 0o600, uid, uid)
    content = {
        "argv": server["argv"],
        "env": server["env"],
        "port": server.get("port", 8888),
        "user": name,
        "uid": uid,
        "home_state": home_state,
    }
    write(machine, RUN + "/server.json", json.dumps(content), 0o600)


def apply(machine: Machine, raw: bytes) -> None:
    """Apply the seed `raw`; the parts a session can do without only complain."""
    write(machine, RUN + "/seed.json", raw, 0o600)
    seed = json.loads(raw)
    if seed.get("v") != 1:
        raise ValueError(f"a seed of version {seed.get('v')!r}; this image reads version 1")
    set_names(machine, seed)
    name, uid = set_user(machine, seed["user"])
    state = set_home(machine, seed.get("home"), name, uid)
    if seed.get("server"):
        set_server(machine, seed["server"], name, uid, state)
    machine.say(f"lease {seed.get('lease_id', '?')}")


def main() -> int:
    machine = Machine()
    os.umask(0o022)
    raw = read_seed(machine)
    if raw is None:
        machine.say("no gpuspawner.json: cloud-init takes over")
        return 0
    apply(machine, raw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
