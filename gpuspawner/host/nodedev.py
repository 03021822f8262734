"""A host's hardware as its libvirt alone knows it, for hosts whose shell cannot be used.

``listen`` asks, ``parse_hardware`` is pure. The answer has the shape of the probe's ``inventory``.
What libvirt does not know is empty in it and named by ``UNKNOWN``: it is never guessed.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import libvirt

from gpuspawner.host.connection import is_connection_error
from gpuspawner.host.probe import cpu_list

UNKNOWN = (
    "whether GPUs answer on the bus and are held by nobody, the sizes of their BARs and the room "
    "that guests have for them, how GPUs can be reset, whether they may be switched off while "
    "idle, which one the host's screen is, swap, transparent hugepages, the filtering of bridged "
    "traffic, the kernel and the clock"
)

_HUGE_KIB = 1024  # pages from this size on are hugepages
_NAME = re.compile(r"^pci_([0-9a-f]{4,8})_([0-9a-f]{2})_([0-9a-f]{2})_([0-7])$")

Link = tuple[float, int]


@dataclass(frozen=True, slots=True)
class Heard:
    """What libvirt said. ``devices`` are the XML of each PCI function by libvirt's name for it;
    ``online`` are the CPUs that are, ``free_kib`` and ``free_pages`` each node's free memory and
    free hugepages by size in KiB. ``unread`` and ``unread_nodes`` say of what it would not tell,
    why."""

    capabilities: str
    devices: Mapping[str, str] = field(default_factory=dict)
    online: Collection[int] = ()
    free_kib: Mapping[int, int] = field(default_factory=dict)
    free_pages: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    unread_nodes: Mapping[int, str] = field(default_factory=dict)


def listen(connection: Any) -> Heard:
    """Ask an open ``virConnect``; blocks, for a round trip a device. Raises ``ValueError`` as
    ``parse_hardware``."""
    capabilities = connection.getCapabilities()
    devices, unread = {}, {}
    for device in connection.listAllDevices(libvirt.VIR_CONNECT_LIST_NODE_DEVICES_CAP_PCI_DEV):
        try:
            devices[device.name()] = device.XMLDesc(0)
        except libvirt.libvirtError as error:
            _or_raise(error)
            unread[_address_of(device.name())] = str(error)
    free_kib, free_pages, unread_nodes = {}, {}, {}
    for node, cell in _cells(_root(capabilities)).items():
        sizes = sorted(_pools(cell))
        try:
            free_kib[node] = int(connection.getMemoryStats(node)["free"])
            # One node at a time: their numbers may have gaps, over which libvirt stumbles.
            free_pages[node] = connection.getFreePages(sizes, node, 1)[node] if sizes else {}
        except (libvirt.libvirtError, KeyError) as error:
            _or_raise(error)
            unread_nodes[node] = str(error)
    present = connection.getCPUMap(0)[1]
    return Heard(
        capabilities=capabilities,
        devices=devices,
        online=[number for number, online in enumerate(present) if online],
        free_kib=free_kib,
        free_pages=free_pages,
        unread=unread,
        unread_nodes=unread_nodes,
    )


def _or_raise(error: Exception) -> None:
    """A lost connection is no oddity of one device."""
    if isinstance(error, libvirt.libvirtError) and is_connection_error(error):
        raise error


def parse_hardware(heard: Heard) -> dict[str, Any]:
    """What ``inventory.parse_inventory`` and the inspection take. A device that is not understood
    is in ``unread`` with the reason, and hides no other. Raises ``ValueError`` if it is not even
    clear which nodes there are."""
    root = _root(heard.capabilities)
    cells = _cells(root)
    unread = dict(heard.unread)
    found: dict[str, dict[str, Any]] = {}
    parents: dict[str, str] = {}
    for name, text in heard.devices.items():
        try:
            device = ET.fromstring(text)
            found[name] = _function(device)
            parents[name] = device.findtext("parent", "")
        except (ET.ParseError, ValueError) as error:
            # One odd device must not hide the others.
            unread[_address_of(name)] = str(error)
    functions = [_below(found[name], found.get(parents[name])) for name in found]
    return {
        "v": 1,
        "boot_id": "",  # libvirt does not know when its host has booted
        "nodes": [_node(number, cells, heard) for number in cells],
        "functions": sorted(functions, key=lambda each: str(each["address"])),
        "unread": unread,
        "unread_nodes": dict(heard.unread_nodes),
        "machine": _machine(root),
    }


def _root(capabilities: str) -> ET.Element:
    try:
        return ET.fromstring(capabilities)
    except ET.ParseError as error:
        raise ValueError(f"libvirt's capabilities are no XML: {error}") from error


# -- nodes ----------------------------------------------------------------------------------------


def _cells(root: ET.Element) -> dict[int, ET.Element]:
    """By number, in order."""
    cells = {int(cell.get("id", "")): cell for cell in root.iterfind("./host/topology/cells/cell")}
    return dict(sorted(cells.items()))


def _pools(cell: ET.Element) -> dict[int, int]:
    """Hugepages of a node: size in KiB -> pages in all."""
    pages = {int(each.get("size", "")): int(each.text or "0") for each in cell.iterfind("pages")}
    return {size: total for size, total in pages.items() if size >= _HUGE_KIB}


def _node(number: int, cells: Mapping[int, ET.Element], heard: Heard) -> dict[str, Any]:
    cell = cells[number]
    free = heard.free_pages.get(number, {})
    said = {
        int(each.get("id", "")): int(each.get("value", ""))
        for each in cell.iterfind("distances/sibling")
    }
    return {
        "id": number,
        "cores": _cores(cell, heard.online),
        # Absent where a node has none.
        "memory_kib": int(cell.findtext("memory", "0")),
        "free_kib": heard.free_kib.get(number),
        # As the kernel lists them: to the nodes that are there, in their order.
        "distances": [said[other] for other in cells] if said.keys() >= cells.keys() else [],
        "hugepages": {
            size: {"total": total, "free": free[size]}
            for size, total in _pools(cell).items()
            if size in free
        },
    }


def _cores(cell: ET.Element, online: Collection[int]) -> list[tuple[int, ...]]:
    """Logical CPUs that are online, grouped by physical core."""
    cpus = {int(cpu.get("id", "")): cpu.get("siblings", "") for cpu in cell.iterfind("cpus/cpu")}
    there = cpus.keys() & set(online)
    return sorted({tuple(sorted(there & {cpu, *cpu_list(cpus[cpu])})) for cpu in there})


# -- PCI functions --------------------------------------------------------------------------------


def _address_of(name: str) -> str:
    """``pci_0000_41_00_0`` is 0000:41:00.0; another name stays itself."""
    match = _NAME.match(name)
    return "{}:{}:{}.{}".format(*match.groups()) if match else name


def _function(device: ET.Element) -> dict[str, Any]:
    """What a function's own XML says. Raises ``ValueError`` for what lacks its identity."""
    pci = device.find("capability[@type='pci']")
    if pci is None:
        raise ValueError("libvirt shows no PCI capability of it")
    domain, bus, slot, function = (
        _number(pci.findtext(part), part) for part in ("domain", "bus", "slot", "function")
    )
    vendor, product = (_number(_attribute(pci, part, "id"), part) for part in ("vendor", "product"))
    return {
        "address": f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}",
        "id": f"{vendor:04x}:{product:04x}",
        "class": f"{_number(pci.findtext('class'), 'class'):06x}",
        "node": _number(_attribute(pci, "numa", "node", "-1"), "NUMA node"),
        "group": _number(_attribute(pci, "iommuGroup", "number", "-1"), "IOMMU group"),
        "driver": device.findtext("driver/name", ""),
        "link": _link(pci, "sta"),
        "link_able": _link(pci, "cap"),
        "virtual": pci.find("capability[@type='phys_function']") is not None,
        "vfs": len(pci.findall("capability[@type='virt_functions']/address")),
        "bars": [],
        "reset_methods": [],
    }


def _attribute(parent: ET.Element, part: str, name: str, absent: str = "") -> str:
    """Of a child; ``absent`` where there is no such child."""
    child = parent.find(part)
    return absent if child is None else child.get(name, "")


def _below(function: dict[str, Any], port: Mapping[str, Any] | None) -> dict[str, Any]:
    """A function with the port above it, whose link stands for its own where it has none."""
    own: Link = function["link"]
    above: Link = (0.0, 0) if port is None else port["link"]
    speed, width = own if all(own) else above
    return {
        **function,
        "link_speed_gts": speed,
        "link_width": width,
        "port": "" if port is None else port["address"],
        "port_link": above,
        "port_able": (0.0, 0) if port is None else port["link_able"],
    }


def _link(pci: ET.Element, validity: str) -> Link:
    link = pci.find(f"pci-express/link[@validity='{validity}']")
    if link is None:
        return 0.0, 0
    return float(link.get("speed", "0")), int(link.get("width", "0"))


def _number(text: str | None, what: str) -> int:
    """Decimal, or hexadecimal with 0x."""
    try:
        return int(text or "", 0)
    except ValueError:
        raise ValueError(f"libvirt shows no {what} of it") from None


# -- the machine ----------------------------------------------------------------------------------


def _machine(root: ET.Element) -> dict[str, Any]:
    """What of the probe's ``machine`` libvirt knows."""
    support = _attribute(root, "./host/iommu", "support")
    return {
        "boot_id": "",
        "kernel": "",
        "cpu": {
            "vendor": root.findtext("./host/cpu/vendor", ""),
            "model": root.findtext("./host/cpu/model", ""),
            "phys_bits": _attribute(root, "./host/cpu/maxphysaddr", "bits"),
            "guest": root.find("./host/cpu/feature[@name='hypervisor']") is not None,
        },
        "iommus": {"yes": ["on"], "no": []}.get(support, ["not known"]),
    }
