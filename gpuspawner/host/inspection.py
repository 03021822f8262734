"""What an admin looks at on a host: its parts as they are now, and what there is to put right.

Pure: from the probe's answers. What keeps single GPUs out of the pool is in ``problems.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuspawner.host.inventory import HostRules
from gpuspawner.host.problems import asked_window_mib, mmio_mib, size
from gpuspawner.pool.topology import Gpu, Inventory

Link = tuple[float, int]  # GT/s and lanes; (0.0, 0) if it has none
Version = tuple[int, int, int]

LIBVIRT = (8, 7, 0)  # the guest's physical address bits (maxphysaddr)
QEMU = (6, 2, 0)  # devices described in JSON
_CLOCK_S = 5.0
_ROOM_MIB = 1024  # an overlay or an image that is being copied takes this much in a minute


@dataclass(frozen=True, slots=True)
class Finding:
    """``level``: error (it does not work), warning (not as it should), info."""

    level: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One NUMA node now. ``free_mib`` is ``None`` where nobody can tell; ``hugepages`` are (page
    size in KiB, pages in all, pages free)."""

    id: int
    cores: int
    cpus: int
    memory_mib: int
    free_mib: int | None = None
    hugepages: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU now: its own link and that of the port above, each as it is and as it could be."""

    address: str
    link: Link = (0.0, 0)
    able: Link = (0.0, 0)
    port: str = ""
    port_link: Link = (0.0, 0)
    port_able: Link = (0.0, 0)
    bars_mib: tuple[int, ...] = ()
    reset_methods: tuple[str, ...] = ()
    driver: str = ""


@dataclass(frozen=True, slots=True)
class Inspection:
    """A host as it is now. ``machine`` are lines for people: (what, value)."""

    inventory: Inventory
    nodes: tuple[NodeFacts, ...]
    gpus: tuple[GpuFacts, ...]
    machine: tuple[tuple[str, str], ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class Daemon:
    """What libvirt says: its version and QEMU's, whether it has UEFI for guests (``efi``), and the
    room on the disk of the storage pool at ``place``. ``None``: it is not known."""

    libvirt: Version = (0, 0, 0)
    qemu: Version = (0, 0, 0)
    efi: bool | None = None
    place: str = ""
    free_mib: int | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What the host's parts said. ``machine`` and ``rest`` are the probe's answers ``machine`` and
    ``inventory``, the latter empty for an emulated host; ``firmware`` is what guests boot with
    unless their GPUs need another; ``off_s`` is how far the host's clock is ahead of ours."""

    machine: Mapping[str, Any]
    rules: HostRules = field(default_factory=HostRules)
    daemon: Daemon = field(default_factory=Daemon)
    kvm: bool = True
    firmware: str = "bios"
    off_s: float = 0.0
    rest: Mapping[str, Any] = field(default_factory=dict)


def inspect_declared(inventory: Inventory, seen: Seen | None = None) -> Inspection:
    """A host that is played: its parts are the declaration's. ``seen`` is the machine below."""
    nodes = tuple(
        NodeFacts(node.id, len(node.cores), sum(map(len, node.cores)), node.memory_mib)
        for node in inventory.nodes
    )
    gpus = tuple(
        GpuFacts(
            gpu.address,
            link=(gpu.link_speed_gts, gpu.link_width),
            able=(gpu.link_speed_gts, gpu.link_width),
            bars_mib=(gpu.memory_mib,),
        )
        for gpu in inventory.gpus
    )
    if seen is None:
        return Inspection(inventory, nodes, gpus)
    found = (
        *_kvm(seen, "info"),
        *_versions(seen),
        *_uefi(inventory, seen),
        *_bridge(seen, "warning"),
        *_clock(seen),
        *_room(seen),
    )
    return Inspection(inventory, nodes, gpus, _lines(seen), found)


def inspect_real(inventory: Inventory, seen: Seen) -> Inspection:
    """A real host. ``inventory`` is parsed from the same answer as ``seen.rest``."""
    by_address = {str(each["address"]): each for each in seen.rest["functions"]}
    members = {gpu.address: [by_address[each] for each in gpu.functions] for gpu in inventory.gpus}
    nodes = tuple(map(_node_facts, seen.rest["nodes"]))
    gpus = tuple(_gpu_facts(by_address[gpu.address]) for gpu in inventory.gpus)
    found = (
        *_iommu(seen),
        *_vfio(seen),
        *_kvm(seen, "error"),
        *_versions(seen),
        *_uefi(inventory, seen),
        *_bridge(seen, "error"),
        *_memory(inventory, seen),
        *_pages(inventory, nodes, seen),
        *_clock(seen),
        *_room(seen),
        *_unread(seen),
        *(each for gpu in gpus for each in _links(gpu)),
        *(each for gpu in inventory.gpus for each in _power_and_reset(gpu, members[gpu.address])),
        *_window(inventory),
    )
    return Inspection(inventory, nodes, gpus, _lines(seen), found)


def inspect_without_shell(inventory: Inventory, seen: Seen, why: Finding) -> Inspection:
    """A real host of which only libvirt tells (``nodedev.py``). ``why`` says what keeps its shell
    from being used; checks of what libvirt does not know are left out."""
    by_address = {str(each["address"]): each for each in seen.rest["functions"]}
    nodes = tuple(map(_node_facts, seen.rest["nodes"]))
    gpus = tuple(_gpu_facts(by_address[gpu.address]) for gpu in inventory.gpus)
    found = (
        why,
        *_iommu(seen),
        *_kvm(seen, "error"),
        *_versions(seen),
        *_room(seen),
        *_unread(seen),
        *(each for gpu in gpus for each in _links(gpu)),
    )
    return Inspection(inventory, nodes, gpus, _lines(seen), found)


def _node_facts(entry: Mapping[str, Any]) -> NodeFacts:
    free_kib = entry["free_kib"]
    return NodeFacts(
        id=int(entry["id"]),
        cores=len(entry["cores"]),
        cpus=sum(map(len, entry["cores"])),
        memory_mib=int(entry["memory_kib"]) // 1024,
        free_mib=None if free_kib is None else int(free_kib) // 1024,
        hugepages=tuple(
            (int(kib), int(pool["total"]), int(pool["free"]))
            for kib, pool in sorted(entry["hugepages"].items(), key=lambda pair: int(pair[0]))
        ),
    )


def _gpu_facts(function: Mapping[str, Any]) -> GpuFacts:
    def link(name: str) -> Link:
        speed, width = function[name]
        return float(speed), int(width)

    return GpuFacts(
        address=str(function["address"]),
        link=(float(function["link_speed_gts"]), int(function["link_width"])),
        able=link("link_able"),
        port=str(function["port"]),
        port_link=link("port_link"),
        port_able=link("port_able"),
        bars_mib=tuple(mmio_mib([{"bars": [bar]}]) for bar in function["bars"]),
        reset_methods=tuple(map(str, function["reset_methods"])),
        driver=str(function["driver"]),
    )


def _lines(seen: Seen) -> tuple[tuple[str, str], ...]:
    cpu = seen.machine["cpu"]
    lines = (
        ("CPU", str(cpu["model"] or cpu["vendor"])),
        ("physical address bits", str(cpu["phys_bits"] or "")),
        ("kernel", str(seen.machine["kernel"])),
        ("boot id", str(seen.machine["boot_id"])),
        ("IOMMU", _iommu_kind(seen.machine)),
        ("libvirt", _version(seen.daemon.libvirt)),
        ("QEMU", _version(seen.daemon.qemu)),
    )
    return tuple((what, value) for what, value in lines if value)


def _iommu_kind(machine: Mapping[str, Any]) -> str:
    names = [str(each) for each in machine["iommus"]]
    if any(name.startswith("dmar") for name in names):
        return f"Intel VT-d ({len(names)} units)"
    if any(name.startswith("ivhd") for name in names):
        return f"AMD-Vi ({len(names)} units)"
    return ", ".join(names) or "off"


def _version(parts: Sequence[int]) -> str:
    return ".".join(map(str, parts)) if any(parts) else ""


def _iommu(seen: Seen) -> Iterator[Finding]:
    functions = seen.rest["functions"]
    if functions and all(int(each["group"]) < 0 for each in functions):
        word = "amd_iommu=on" if "AMD" in str(seen.machine["cpu"]["vendor"]) else "intel_iommu=on"
        yield Finding(
            "error",
            "The IOMMU is off: no device can be passed to a guest.",
            f"Switch it on in the firmware (VT-d, AMD-Vi) and boot with '{word} iommu=pt'.",
        )


def _vfio(seen: Seen) -> Iterator[Finding]:
    if not seen.machine["vfio"]:
        yield Finding(
            "error",
            "The kernel module vfio-pci is not loaded: nothing can hold the GPUs for guests.",
            "echo vfio-pci > /etc/modules-load.d/vfio.conf && modprobe vfio-pci",
        )


def _kvm(seen: Seen, level: str) -> Iterator[Finding]:
    if seen.kvm and seen.machine.get("kvm", True):
        return
    remedy = "Switch virtualization on in the firmware (VT-x, SVM) and load kvm_intel or kvm_amd."
    if seen.machine["cpu"]["guest"]:
        remedy = (
            "This host is a virtual machine itself: let its own host pass virtualization on "
            "(nested=1 of kvm_intel or kvm_amd there, and the CPU as it is)."
        )
    yield Finding(level, "There is no KVM: guests are emulated in software, and slow.", remedy)


def _versions(seen: Seen) -> Iterator[Finding]:
    daemon = seen.daemon
    for name, have, need in (("libvirt", daemon.libvirt, LIBVIRT), ("QEMU", daemon.qemu, QEMU)):
        if any(have) and have < need:
            yield Finding(
                "error",
                f"{name} {_version(have)} is too old: {_version(need)} or later is needed.",
                "Take a newer release of the distribution; Debian 12 has what is needed.",
            )


def _uefi(inventory: Inventory, seen: Seen) -> Iterator[Finding]:
    if seen.daemon.efi is not False:
        return
    sizes = [gpu.mmio_mib for gpu in inventory.gpus]
    if seen.firmware == "efi" or any(map(asked_window_mib, sizes)):
        level, who = "error", "guests boot with it here, and none starts"
        if seen.firmware != "efi":
            who = "GPUs with BARs as large as here need it, and no server with one starts"
    elif asked_window_mib(sum(sizes)):
        level, who = "warning", "a server with all of the host's GPUs needs it and does not start"
    else:
        return
    yield Finding(
        level,
        f"UEFI for guests (OVMF) is not installed: {who}.",
        "apt install ovmf (edk2-ovmf elsewhere); libvirt finds it in /usr/share/qemu/firmware.",
    )


def _bridge(seen: Seen, level: str) -> Iterator[Finding]:
    if seen.machine["bridge_filter"] != "1":
        yield Finding(
            level,
            "The kernel does not filter bridged traffic: the guests' filters do nothing, and "
            "guests reach what they must not.",
            "modprobe br_netfilter && sysctl net.bridge.bridge-nf-call-iptables=1, and keep both "
            "in /etc/modules-load.d and /etc/sysctl.d.",
        )


def _memory(inventory: Inventory, seen: Seen) -> Iterator[Finding]:
    if seen.machine["swaps"]:
        yield Finding(
            "warning",
            f"The host swaps to {', '.join(map(str, seen.machine['swaps']))}: what a guest had in "
            "memory lands on its disk, and guests stall.",
            "swapoff -a, and take it out of /etc/fstab.",
        )
    if not inventory.hugepages_kib and "[never]" in seen.machine["thp"]:
        yield Finding(
            "warning",
            "Guests' memory is made of 4 KiB pages: transparent hugepages are off.",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, or allocate hugepages.",
        )
    for node in inventory.nodes:
        if node.cores and not node.usable_mib and not inventory.hugepages_kib:
            yield Finding(
                "warning",
                f"Nothing of node {node.id}'s {size(node.memory_mib)} is left for guests: "
                f"{size(node.reserve_mib)} are kept back.",
                "Lower reserve_mib in the host's hardware file.",
            )


def _pages(inventory: Inventory, nodes: Sequence[NodeFacts], seen: Seen) -> Iterator[Finding]:
    kib = inventory.hugepages_kib
    if not kib:
        if seen.rules.hugepages == "auto":
            yield Finding(
                "info",
                "Guests' memory is made of ordinary pages: none, or too few, are hugepages.",
                "Boot with 'default_hugepagesz=1G hugepagesz=1G hugepages=N' for faster memory, "
                'or set hugepages: "off".',
            )
        return
    with_gpus = {gpu.node for gpu in inventory.gpus}
    for node in nodes:
        pools = {each: (total, free) for each, total, free in node.hugepages}
        total, free = pools.get(kib, (0, 0))
        page = size(kib // 1024)
        if not total and node.id in with_gpus:
            yield Finding(
                "error",
                f"Node {node.id} has GPUs and no hugepages of {page}: no guest fits there.",
                f"echo N > /sys/devices/system/node/node{node.id}/hugepages/hugepages-{kib}kB/"
                "nr_hugepages early at boot, or set hugepages: auto.",
            )
        known = inventory.node(node.id).memory_mib * 1024 // kib
        if known < total:
            yield Finding(
                "warning",
                f"{total - known} of node {node.id}'s {total} pages of {page} are in other hands "
                f"than this installation's guests ({free} are free).",
                "Let only gpuspawner use hugepages on this host.",
            )
        ordinary = node.memory_mib - sum(each * count // 1024 for each, count, _ in node.hugepages)
        if node.memory_mib and ordinary < seen.rules.reserve_mib:
            yield Finding(
                "warning",
                f"Hugepages leave node {node.id} {size(ordinary)} of ordinary memory; "
                f"{size(seen.rules.reserve_mib)} are to be kept for the host.",
                "Allocate fewer hugepages there, or lower reserve_mib.",
            )


def _clock(seen: Seen) -> Iterator[Finding]:
    if abs(seen.off_s) > _CLOCK_S:
        yield Finding(
            "warning",
            f"The host's clock is {abs(seen.off_s):.0f} s {'ahead' if seen.off_s > 0 else 'slow'}.",
            "Install chrony or switch systemd-timesyncd on.",
        )


def _room(seen: Seen) -> Iterator[Finding]:
    free_mib = seen.daemon.free_mib
    if free_mib is not None and free_mib < _ROOM_MIB:
        yield Finding(
            "error",
            f"The disk of the storage pool {seen.daemon.place} is full ({size(free_mib)} are "
            "free): servers do not start, and those that write stand still.",
            "Free some space on that disk, or delete homes and images that nobody needs.",
        )


def _unread(seen: Seen) -> Iterator[Finding]:
    for address, why in sorted(seen.rest.get("unread", {}).items()):
        yield Finding(
            "warning",
            f"The PCI device {address} could not be read and is left out: {why}.",
            "dmesg on the host may tell what is wrong with it.",
        )
    for node, why in sorted(seen.rest.get("unread_nodes", {}).items()):
        yield Finding(
            "warning",
            f"What is free of node {node}'s memory could not be read: {why}.",
            "Look at libvirt's log on the host.",
        )


def _links(gpu: GpuFacts) -> Iterator[Finding]:
    for who, now, able in (
        (f"GPU {gpu.address}", gpu.link, gpu.able),
        (f"The port {gpu.port} above GPU {gpu.address}", gpu.port_link, gpu.port_able),
    ):
        other = gpu.port_able if now is gpu.link else gpu.able
        # Neither end of a link can do more than the other.
        most = min(able[1], other[1] or able[1]), min(able[0], other[0] or able[0])
        if now[1] and now[1] < most[0]:
            yield Finding(
                "warning",
                f"{who} has {now[1]} of {most[0]} PCIe lanes.",
                "Seat the card anew, and look at riser, slot and the firmware's bifurcation.",
            )
        elif now[0] and now[0] < most[1]:
            yield Finding(
                "info",
                f"{who} runs at {now[0]:g} of {most[1]:g} GT/s.",
                "Idle GPUs slow their link down; if it stays so under load, see to the slot.",
            )


def _power_and_reset(gpu: Gpu, members: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    cold = [str(each["address"]) for each in members if each["d3cold"]]
    if cold and not gpu.imitation:
        yield Finding(
            "warning",
            f"{', '.join(cold)} may be switched off while idle (D3cold), from which some GPUs do "
            "not come back.",
            'udev: ACTION=="add", SUBSYSTEM=="pci", DRIVER=="vfio-pci", ATTR{d3cold_allowed}="0"',
        )
    if not any(each["resettable"] for each in members):
        yield Finding(
            "error",
            f"GPU {gpu.address} cannot be reset, so nothing proves that it forgets its last user.",
            "Look at 'reset_method' in its folder in sysfs; a port of its own allows a bus reset.",
        )


def _window(inventory: Inventory) -> Iterator[Finding]:
    """All of the host's GPUs in one guest."""
    gpus = [gpu for gpu in inventory.gpus if not gpu.problems]
    total = sum(gpu.mmio_mib for gpu in gpus)
    window = inventory.mmio_window_mib
    if window and total > window:
        yield Finding(
            "warning",
            f"The BARs of all {len(gpus)} GPUs take {size(total)}, and one guest has a window of "
            f"{size(window)}: a lease of that many GPUs is refused.",
            "Offer profiles with fewer GPUs.",
        )
