"""What only the host itself can see: one script, sent over its shell, nothing installed there.

    python3 - VERB [ARGUMENT] < probe.py

Standard library only, Python 3.7 or later. One JSON object on one line: the answer, or
``{"error": text, "remedy": text}`` and exit status 1. ``GPUSPAWNER_SYSFS`` and
``GPUSPAWNER_PROC`` name other roots than ``/sys`` and ``/proc``, for tests.

    boot            the boot id
    addresses       the machine's own IPv4 addresses, loopback left out
    inventory       NUMA nodes, CPUs, memory, and every PCI function with group, node and link
    machine         what else an admin may have to put right: CPU, IOMMU, modules, swap, clock
    witness ADDR    whether the device in this slot answers on the bus, its ids, link and errors
    reset ADDR      reset every function of the device's IOMMU group that can be, or all at once
    released ADDR   whether no process holds the device's VFIO group
    holders PATH    the processes that have this file open or mapped
    binding PID     where a process may run and take memory, thread by thread

What a device that does not answer may be brought back by. All but the first only if nobody holds it
and its port has nothing else behind it; afterwards its functions are bound to vfio-pci:

    wake ADDR         out of its power state, and its port with it
    bus-reset ADDR    a reset of the bus behind its port, then found anew
    rescan ADDR       taken out of the kernel's list and found anew
    power-cycle ADDR  its slot's power off and on, where the slot can
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import os
import re
import struct
import sys
import time
from typing import Any, Callable, Dict  # noqa: UP035  (Python 3.7)

Answer = Dict[str, Any]  # noqa: UP006

SYSFS = os.environ.get("GPUSPAWNER_SYSFS", "/sys")
PROC = os.environ.get("GPUSPAWNER_PROC", "/proc")
ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")


class ProbeError(Exception):
    def __init__(self, text: str, remedy: str = "") -> None:
        super().__init__(text)
        self.remedy = remedy


def read(path: str, default: str = "") -> str:
    """A small sysfs file. Devices vanish while one reads them: then the default."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return default


def number(text: str, default: float = 0.0) -> float:
    """The number that a text starts with: '16.0 GT/s PCIe' is 16.0."""
    match = re.match(r"[-+]?(0x[0-9a-fA-F]{1,16}|[0-9]+(\.[0-9]+)?)", text)
    if not match:
        return default
    word = match.group(0)
    return float(int(word, 16)) if "0x" in word else float(word)


def whole(text: str, default: int = 0) -> int:
    """As ``number``, all 64 bits of it."""
    match = re.match(r"0x([0-9a-fA-F]{1,16})", text)
    return int(match.group(1), 16) if match else int(number(text, default))


def cpu_list(text: str) -> list[int]:
    """'0-2,8' is [0, 1, 2, 8]. What is no such list is left out."""
    cpus: list[int] = []
    for first, last in re.findall(r"(?:^|,)(\d{1,6})(?:-(\d{1,6}))?(?=,|$)", text):
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def memory_kib(text: str, name: str) -> int:
    match = re.search(name + r":\s+(\d+) kB", text)
    return int(match.group(1)) if match else 0


def boot_id() -> str:
    return read(PROC + "/sys/kernel/random/boot_id")


def boot() -> Answer:
    return {"v": 1, "boot_id": boot_id()}


def addresses() -> Answer:
    """From the kernel's routing table: an address is the line before '/32 host LOCAL'."""
    found = set()
    last = ""
    for line in read(PROC + "/net/fib_trie").splitlines():
        words = line.split()
        if words[:1] == ["|--"]:
            last = words[1]
        elif words == ["/32", "host", "LOCAL"] and not last.startswith("127."):
            found.add(last)
    return {"v": 1, "addresses": sorted(found)}


# -- inventory ------------------------------------------------------------------------------------


def cores(cpus: list[int]) -> list[tuple[int, ...]]:
    """Logical CPUs that are online, grouped by physical core."""
    online = {
        cpu for cpu in cpus if read(f"{SYSFS}/devices/system/cpu/cpu{cpu}/online", "1") != "0"
    }
    found = set()
    for cpu in online:
        topology = f"{SYSFS}/devices/system/cpu/cpu{cpu}/topology"
        siblings = online.intersection(cpu_list(read(topology + "/thread_siblings_list")))
        found.add(tuple(sorted(siblings | {cpu})))
    return sorted(found)


def hugepages(base: str) -> dict[int, dict[str, int]]:
    pools = {}
    for pool in glob.glob(base + "/hugepages/hugepages-*kB"):
        pools[whole(pool.rsplit("-", 1)[1])] = {
            "total": whole(read(pool + "/nr_hugepages")),
            "free": whole(read(pool + "/free_hugepages")),
        }
    return pools


def nodes() -> list[Answer]:
    result: list[Answer] = []
    for base in glob.glob(SYSFS + "/devices/system/node/node[0-9]*"):
        meminfo = read(base + "/meminfo")
        result.append(
            {
                "id": whole(base.rsplit("node", 1)[1]),
                "cores": cores(cpu_list(read(base + "/cpulist"))),
                "memory_kib": memory_kib(meminfo, "MemTotal"),
                "free_kib": memory_kib(meminfo, "MemFree"),
                "distances": [whole(word) for word in read(base + "/distance").split()],
                "hugepages": hugepages(base),
            }
        )
    if not result:  # a kernel without NUMA: all is node 0
        meminfo = read(PROC + "/meminfo")
        result.append(
            {
                "id": 0,
                "cores": cores(cpu_list(read(SYSFS + "/devices/system/cpu/online", "0"))),
                "memory_kib": memory_kib(meminfo, "MemTotal"),
                "free_kib": memory_kib(meminfo, "MemFree"),
                "distances": [10],
                "hugepages": hugepages(SYSFS + "/kernel/mm"),
            }
        )
    return sorted(result, key=lambda node: node["id"])


def link_name(path: str) -> str:
    """The last part of a symbolic link's target, '' if there is no link."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return ""


def port_of(base: str) -> str:
    """The folder of the port above a function, '' if it is on a root bus."""
    above = os.path.dirname(os.path.realpath(base))
    return above if ADDRESS.match(os.path.basename(above)) else ""


def link(base: str, kind: str = "current") -> tuple[float, int]:
    """Speed and width as the device itself says; where it has no PCIe capability, its port.
    ``kind`` is ``current`` or ``max``."""
    for place in filter(None, (base, port_of(base))):
        speed, width = own_link(place, kind)
        if speed and width:
            return speed, width
    return 0.0, 0


def own_link(base: str, kind: str) -> tuple[float, int]:
    """A width of 255 is the kernel's word for unknown."""
    width = whole(read(f"{base}/{kind}_link_width"))
    return number(read(f"{base}/{kind}_link_speed")), width if width < 255 else 0


def bars(base: str) -> list[Answer]:
    """The memory BARs: bytes, whether prefetchable, and whether the firmware placed them."""
    found = []
    for index, line in enumerate(read(base + "/resource").splitlines()[:6]):
        first, last, flags = [*(whole(word) for word in line.split()), 0, 0, 0][:3]
        if flags & 0x200 and last > first:
            found.append({
                "bar": index, "bytes": last - first + 1, "prefetch": bool(flags & 0x2000),
                "placed": not flags & 0x20000000,
            })  # fmt: skip
    return found


def function(base: str) -> Answer:
    group = link_name(base + "/iommu_group")
    speed, width = link(base)
    vendor, device = (whole(read(f"{base}/{name}")) for name in ("vendor", "device"))
    port = port_of(base)
    return {
        "address": os.path.basename(base).lower(),
        "id": f"{vendor & 0xFFFF:04x}:{device & 0xFFFF:04x}",
        "class": f"{whole(read(base + '/class')) & 0xFFFFFF:06x}",
        "node": whole(read(base + "/numa_node"), -1),
        "group": int(group) if group.isdigit() else -1,
        "driver": link_name(base + "/driver"),
        "link_speed_gts": speed,
        "link_width": width,
        "link_able": own_link(base, "max"),
        "port": os.path.basename(port),
        "port_link": own_link(port, "current") if port else (0.0, 0),
        "port_able": own_link(port, "max") if port else (0.0, 0),
        "bars": bars(base),
        "boot_vga": read(base + "/boot_vga") == "1",
        "d3cold": read(base + "/d3cold_allowed") == "1",
        "virtual": os.path.lexists(base + "/physfn"),
        "vfs": whole(read(base + "/sriov_numvfs")),
        "resettable": os.path.exists(base + "/reset"),
        "reset_methods": read(base + "/reset_method").split(),
        "answers": answers(config(base)),
    }


def inventory() -> Answer:
    functions, unread = [], {}
    for base in glob.glob(SYSFS + "/bus/pci/devices/*"):
        try:
            functions.append(function(base))
        except (OSError, ValueError, TypeError, OverflowError) as error:
            # One odd device must not hide the others.
            unread[os.path.basename(base)] = f"{type(error).__name__}: {error}"
    return {
        "v": 1,
        "boot_id": boot_id(),
        "kernel": os.uname().release,
        "cpu": cpu(),
        "nodes": nodes(),
        "functions": sorted(functions, key=lambda each: each["address"]),
        "unread": unread,
    }


def cpu() -> Answer:
    """Of the first CPU. ``huge_1g``: it maps pages of 1 GiB."""
    text = read(PROC + "/cpuinfo").split("\n\n")[0]

    def value(name: str) -> str:
        match = re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)
        return match.group(1) if match else ""

    flags = value("flags").split()
    return {
        "vendor": value("vendor_id"),
        "model": value("model name"),
        "phys_bits": whole(value("address sizes")),
        "huge_1g": "pdpe1gb" in flags,
        "guest": "hypervisor" in flags,
    }


def machine() -> Answer:
    """``bridge_filter`` is '' where the kernel module is not loaded."""
    return {
        "v": 1,
        "boot_id": boot_id(),
        "time": time.time(),
        "kernel": os.uname().release,
        "cpu": cpu(),
        "iommus": sorted(os.path.basename(each) for each in glob.glob(SYSFS + "/class/iommu/*")),
        "vfio": os.path.isdir(SYSFS + "/bus/pci/drivers/vfio-pci"),
        "kvm": os.path.exists(SYSFS + "/class/misc/kvm"),
        "swaps": [line.split()[0] for line in read(PROC + "/swaps").splitlines()[1:] if line],
        "thp": read(SYSFS + "/kernel/mm/transparent_hugepage/enabled"),
        "bridge_filter": read(PROC + "/sys/net/bridge/bridge-nf-call-iptables"),
    }


# -- one device -----------------------------------------------------------------------------------


def device(address: str) -> str:
    if not ADDRESS.match(address):
        raise ProbeError(f"{address!r} is no PCI address", "Write it as 0000:41:00.0.")
    return f"{SYSFS}/bus/pci/devices/{address}"


def group_members(base: str) -> list[str]:
    """Addresses of all functions of the device's IOMMU group; itself where there is none."""
    try:
        return sorted(os.listdir(base + "/iommu_group/devices"))
    except OSError:
        return [os.path.basename(base)]


def config(base: str) -> bytes:
    try:
        with open(base + "/config", "rb") as file:
            return file.read(64)
    except OSError:
        return b""


def answers(head: bytes) -> bool:
    """A device that has fallen off the bus reads all ones; the kernel keeps its name, ids and
    driver as they were, and libvirt its guest as running."""
    return head[:4] != b"\xff\xff\xff\xff"


def witness(address: str) -> Answer:
    base = device(address)
    if not os.path.isdir(base):
        return {"v": 1, "boot_id": boot_id(), "present": False, "note": "no device in this slot"}
    head = config(base)
    present = len(head) >= 4 and answers(head)
    speed, width = link(base)
    aer = {}
    for kind in ("correctable", "nonfatal", "fatal"):
        total = re.search(r"TOTAL_ERR_\w+\s+(\d+)", read(f"{base}/aer_dev_{kind}"))
        if total:
            aer[kind] = int(total.group(1))
    members = group_members(base)
    return {
        "v": 1,
        "boot_id": boot_id(),
        "present": present,
        "ids": [function(f"{SYSFS}/bus/pci/devices/{member}")["id"] for member in members],
        "link_speed_gts": speed,
        "link_width": width,
        "port_link": own_link(port_of(base), "current") if port_of(base) else (0.0, 0),
        "reset_methods": read(base + "/reset_method").split(),
        "aer": aer,
        "note": "" if present else "its config space reads all ones",
    }


def reset(address: str) -> Answer:
    base = device(address)
    done = []
    for member in group_members(base):
        path = f"{SYSFS}/bus/pci/devices/{member}/reset"
        if not os.path.exists(path):
            continue
        try:
            with open(path, "w", encoding="ascii") as file:
                file.write("1")
        except OSError as error:
            # A function that was found before its neighbours offers a reset of the bus that the
            # kernel refuses now that it has neighbours.
            if error.errno == errno.ENOTTY:
                continue
            raise ProbeError(
                f"the reset of {member} failed: {error.strerror}",
                "Check that no process holds it, and its reset_method in sysfs; a power cycle "
                "of the host always resets it.",
            ) from error
        done.append(member)
    return {"v": 1, "reset": done or hot_reset(address)}


# ioctls of VFIO, _IO(';', 100 + n) in <linux/vfio.h>
VFIO_SET_IOMMU, VFIO_TYPE1 = 0x3B66, 1
VFIO_GROUP_SET_CONTAINER = 0x3B68
VFIO_GROUP_GET_DEVICE_FD = 0x3B6A
VFIO_DEVICE_PCI_HOT_RESET = 0x3B71


def hot_reset(address: str) -> list[str]:
    """Reset all functions of a slot at once, as VFIO lets the owner of all of them: sysfs offers
    no reset of a function that can only be reset together with its neighbours."""
    base = device(address)
    group_path = "/dev/vfio/" + link_name(base + "/iommu_group")
    if group_path.endswith("/") or not os.path.exists(group_path):
        raise ProbeError(
            f"no function of {address} can be reset",
            "Bind all of them to vfio-pci, which can reset them together; or set a reset_method "
            "in sysfs, or keep the device out of the pool.",
        )
    opened: list[int] = []
    try:
        for path in ("/dev/vfio/vfio", group_path):
            opened.append(os.open(path, os.O_RDWR))
        container, group = opened
        fcntl.ioctl(group, VFIO_GROUP_SET_CONTAINER, struct.pack("i", container))
        fcntl.ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1)
        name = bytearray(address.encode() + b"\0")  # a bytearray: then the status is returned
        opened.append(fcntl.ioctl(group, VFIO_GROUP_GET_DEVICE_FD, name))
        words = struct.pack("IIIi", 16, 0, 1, group)
        fcntl.ioctl(opened[-1], VFIO_DEVICE_PCI_HOT_RESET, words)
    except OSError as error:
        raise ProbeError(
            f"VFIO's reset of {address} failed: {error.strerror}",
            "Check that no process holds it, and that every function in its slot is bound to "
            "vfio-pci; a power cycle of the host always resets it.",
        ) from error
    finally:
        for each in reversed(opened):
            os.close(each)
    return group_members(base)


def released(address: str) -> Answer:
    """A VFIO group opens for one process at a time, so opening it is the test."""
    group = link_name(device(address) + "/iommu_group")
    path = f"/dev/vfio/{group}"
    if not group or not os.path.exists(path):
        raise ProbeError(
            f"{address} has no VFIO group",
            "Bind it to vfio-pci at boot (driver_override) and switch the IOMMU on.",
        )
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        if error.errno == errno.EBUSY:
            return {"v": 1, "released": False, "holders": holders(path)["holders"]}
        raise
    return {"v": 1, "released": True, "holders": []}


# -- a device that does not answer ----------------------------------------------------------------


def write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        short = path[len(SYSFS) :]
        raise ProbeError(f"writing {text} to /sys{short} failed: {error.strerror}") from error


def functions(address: str) -> list[str]:
    """The folders of all functions in a device's slot that the kernel lists."""
    return sorted(glob.glob(device(address)[:-1] + "[0-7]"))


def port_above(address: str) -> str:
    """The port by the bus behind it: the kernel may not list the device any more."""
    domain, bus, _slot = address.split(":")
    for base in glob.glob(f"{SYSFS}/bus/pci/devices/{domain}:*"):
        if read(base + "/secondary_bus_number") == str(int(bus, 16)):
            return base
    raise ProbeError(
        f"no port has {address} behind it",
        "A device on a root bus can only be reset by a power cycle of the host.",
    )


def own_port(address: str) -> str:
    """The port above, if nothing but this device is behind it and nobody holds that.

    A reset of the port reaches all that is behind it, and who holds it would go on with a device
    that has forgotten everything.
    """
    port = port_above(address)
    ours = [os.path.basename(base) for base in functions(address)]
    behind = [
        name
        for _folder, names, _files in os.walk(os.path.realpath(port))
        for name in names
        if ADDRESS.match(name)
    ]
    strangers = sorted(set(behind) - set(ours))
    if strangers:
        raise ProbeError(f"its port has {', '.join(strangers)} behind it too")
    for name in ours:
        path = "/dev/vfio/" + link_name(device(name) + "/iommu_group")
        held = holders(path)["holders"] if os.path.basename(path) and os.path.exists(path) else []
        if held:
            names = ", ".join(f"{each['name']} ({each['pid']})" for each in held)
            raise ProbeError(f"{name} is held by {names}")
    return port


def found_anew(address: str, patience_s: float = 0.0) -> Answer:
    """After a rescan: the device's functions, all of them bound to vfio-pci."""
    end = time.monotonic() + patience_s
    while not functions(address) and time.monotonic() < end:
        time.sleep(0.1)
    found = functions(address)
    for base in found:
        name = os.path.basename(base)
        # The stub, or a variant driver of the card's maker (mlx5_vfio_pci).
        if not link_name(base + "/driver").replace("_", "-").endswith("vfio-pci"):
            write(base + "/driver_override", "vfio-pci")
            if link_name(base + "/driver"):
                write(base + "/driver/unbind", name)
            write(SYSFS + "/bus/pci/drivers_probe", name)
    return {"v": 1, "functions": [os.path.basename(base) for base in found]}


def take_out(address: str) -> None:
    for base in reversed(functions(address)):
        write(base + "/remove", "1")


def wake(address: str) -> Answer:
    for base in (port_above(address), *functions(address)):
        for name, text in (("d3cold_allowed", "0"), ("power/control", "on")):
            if os.path.exists(f"{base}/{name}"):
                write(f"{base}/{name}", text)
    time.sleep(0.5)
    return {"v": 1, "states": [read(base + "/power_state") for base in functions(address)]}


BRIDGE_CONTROL, SECONDARY_BUS_RESET = 0x3E, 0x40  # PCI-to-PCI Bridge Architecture, 3.2.5.18


def bus_reset(address: str) -> Answer:
    """The kernel's own reset of a bus keeps and restores what the device had in its registers,
    which of one that does not answer is all ones: so by the port's register, and found anew."""
    port = own_port(address)
    with open(port + "/config", "r+b", buffering=0) as file:
        (bits,) = struct.unpack("<H", os.pread(file.fileno(), 2, BRIDGE_CONTROL))
        # Whoever was killed between the two writes has left the bus in reset: it ends here.
        for now in (bits | SECONDARY_BUS_RESET, bits & ~SECONDARY_BUS_RESET):
            os.pwrite(file.fileno(), struct.pack("<H", now), BRIDGE_CONTROL)
            time.sleep(0.01)  # PCI asks for 1 ms at least
    time.sleep(1.0)  # what a device may take until it answers again
    take_out(address)
    write(port + "/rescan", "1")
    return found_anew(address)


def rescan(address: str) -> Answer:
    """The port itself stays: without its windows the kernel would take those of its neighbours,
    whose devices then have no memory (seen in the lab)."""
    port = own_port(address)
    take_out(address)
    write(port + "/rescan", "1")
    return found_anew(address)


def power_cycle(address: str) -> Answer:
    own_port(address)
    for slot in glob.glob(SYSFS + "/bus/pci/slots/*"):
        if read(slot + "/address") == address[:-2] and os.path.exists(slot + "/power"):
            break
    else:
        raise ProbeError("its slot's power cannot be switched")
    with contextlib.suppress(ProbeError):  # it may believe itself off: what counts is the next
        write(slot + "/power", "0")
    time.sleep(1.0)
    write(slot + "/power", "1")
    return found_anew(address, patience_s=5.0)


# -- processes ------------------------------------------------------------------------------------


def holders(path: str) -> Answer:
    try:
        wanted = os.stat(path)
    except FileNotFoundError:
        return {"v": 1, "holders": []}
    key = (wanted.st_dev, wanted.st_ino)
    found = []
    for entry in os.listdir(PROC):
        if entry.isdigit() and (holds_open(entry, wanted, key) or holds_mapped(entry, wanted)):
            found.append({"pid": int(entry), "name": read(f"{PROC}/{entry}/comm")})
    return {"v": 1, "holders": found}


def holds_open(pid: str, wanted: os.stat_result, key: tuple[int, int]) -> bool:
    try:
        numbers = os.listdir(f"{PROC}/{pid}/fd")
    except OSError:  # the process has ended
        return False
    for fd in numbers:
        try:
            status = os.stat(f"{PROC}/{pid}/fd/{fd}")
        except OSError:
            continue
        # A device node is the same device under any name (QEMU has a /dev of its own).
        if (status.st_dev, status.st_ino) == key:
            return True
        if wanted.st_rdev and status.st_rdev == wanted.st_rdev:
            return True
    return False


def holds_mapped(pid: str, wanted: os.stat_result) -> bool:
    field = f"{os.major(wanted.st_dev):02x}:{os.minor(wanted.st_dev):02x} {wanted.st_ino} "
    return field in read(f"{PROC}/{pid}/maps")


def binding(pid: str) -> Answer:
    base = f"{PROC}/{int(pid)}"
    status = read(base + "/status")
    if not status:
        raise ProbeError(f"there is no process {pid}", "")

    def value(text: str, name: str) -> str:
        match = re.search(rf"^{name}:\s*(.*)$", text, re.MULTILINE)
        return match.group(1) if match else ""

    threads = []
    for task in sorted(glob.glob(base + "/task/*"), key=lambda each: int(each.rsplit("/", 1)[1])):
        text = read(task + "/status")
        threads.append({"name": read(task + "/comm"), "cpus": value(text, "Cpus_allowed_list")})
    return {
        "v": 1,
        "nodes": value(status, "Mems_allowed_list"),
        "locked_kib": int(number(value(status, "VmLck"))),
        "threads": threads,
    }


VERBS: dict[str, Callable[..., Answer]] = {
    "boot": boot,
    "addresses": addresses,
    "inventory": inventory,
    "machine": machine,
    "witness": witness,
    "reset": reset,
    "released": released,
    "wake": wake,
    "bus-reset": bus_reset,
    "rescan": rescan,
    "power-cycle": power_cycle,
    "holders": holders,
    "binding": binding,
}


def main(arguments: list[str]) -> int:
    try:
        if not arguments or arguments[0] not in VERBS:
            raise ProbeError(f"the verb must be one of {', '.join(VERBS)}")
        answer = VERBS[arguments[0]](*arguments[1:])
    except ProbeError as error:
        answer = {"error": str(error), "remedy": error.remedy}
    except (OSError, ValueError, TypeError) as error:
        answer = {"error": f"{type(error).__name__}: {error}", "remedy": ""}
    print(json.dumps(answer), flush=True)
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
