"""The devices of a guest's domain, each with its reason. Pure, as ``domain.py``."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpuspawner.host.api import GuestSpec, Nic
from gpuspawner.host.problems import asked_window_mib
from gpuspawner.pool.topology import Gpu

QEMU_URI = "http://libvirt.org/schemas/domain/qemu/1.0"

# libvirt numbers its own root ports from index 1 and slot 1 of the root bus; the GPUs' keep clear.
# It fills every index below with a port, so this leaves it what a guest's other devices need (six)
# and no more.
_FIRST_PORT_INDEX = 8
_FIRST_PORT_SLOT = 0x10
_LAST_PORT_SLOT = 0x1D  # 0x1f is the chipset's
_PORTS_PER_EXPANDER = 16
_EDU_DMA_MASK = 0xFFFFFFFF  # edu's own default, 28 bits, misses the memory of larger guests
_FAULTY_DMA_MASK = 0xFFFF  # a stray write then hits low memory that nothing uses


@dataclass(frozen=True, slots=True)
class EmulatedMemory:
    """The volume that plays an emulated GPU's memory, and what is wrong with the GPU."""

    path: str
    memory_mib: int
    fault: str = "none"


@dataclass(frozen=True, slots=True)
class Parts:
    """Files and names that a guest uses, all as the host knows them.

    ``home_cache`` is ``none`` (O_DIRECT) or ``writethrough`` where the file system has none.
    ``confining_models`` are the host's security drivers that confine QEMU by path.
    """

    console: str
    kernel: str | None = None
    initrd: str | None = None
    root: str | None = None
    home: str | None = None
    home_cache: str = "none"
    seed: str | None = None
    network: str | None = None
    bridge: str | None = None
    nwfilter: str | None = None
    gpu_memories: Mapping[str, EmulatedMemory] = field(default_factory=dict)
    confining_models: tuple[str, ...] = ()


def el(tag: str, *children: ET.Element, text: str | None = None, **attributes: str) -> ET.Element:
    """One XML element."""
    element = ET.Element(tag, attributes)
    element.text = text
    element.extend(children)
    return element


def real(spec: GuestSpec) -> tuple[Gpu, ...]:
    """GPUs that are passed through."""
    return tuple(gpu for gpu in spec.gpus if not gpu.emulated)


def emulated(spec: GuestSpec) -> tuple[Gpu, ...]:
    """GPUs that QEMU plays."""
    return tuple(gpu for gpu in spec.gpus if gpu.emulated)


def build_devices(spec: GuestSpec, parts: Parts, *, kvm: bool) -> ET.Element:
    """All of ``<devices>``."""
    devices = el("devices")
    devices.extend(list(disks(parts)))
    devices.extend(list(gpu_ports_and_devices(spec)))
    # A USB controller is polled, and nothing here is USB.
    devices.append(el("controller", type="usb", model="none"))
    if spec.nic is not None:
        devices.append(interface(spec.nic, parts, kvm))
    devices.append(serial(parts))
    if spec.channel is not None:
        devices.append(channel(spec.channel))
    # The guest needs randomness for keys before it has gathered any.
    devices.append(el("rng", el("backend", text="/dev/urandom", model="random"), model="virtio"))
    devices.append(el("memballoon", model="none"))  # memory is claimed, and pinned with a GPU
    devices.append(el("video", el("model", type="none")))
    devices.append(el("panic", model="isa"))  # a guest that panics ends at once (on_crash)
    return devices


def disks(parts: Parts) -> Iterator[ET.Element]:
    """Root, home and seed; names in the guest are fixed by serial number and order."""
    if parts.root is not None:
        # Thrown away with the VM: nothing of it need survive a crash of the host.
        yield _disk(parts.root, "qcow2", "vda", "root", cache="unsafe")
    if parts.home is not None:
        # What the guest flushed is on the disk when this is 'none', whatever happens to the host.
        yield _disk(parts.home, "raw", "vdb", "home", cache=parts.home_cache)
    if parts.seed is not None:
        yield el(
            "disk",
            el("driver", name="qemu", type="raw"),
            el("source", file=parts.seed),
            el("target", dev="sda", bus="sata"),
            el("readonly"),
            type="file",
            device="cdrom",
        )


def _disk(path: str, kind: str, target: str, serial_number: str, *, cache: str) -> ET.Element:
    driver = el("driver", name="qemu", type=kind, cache=cache, discard="unmap")
    if cache == "none":
        driver.set("io", "native")
    return el(
        "disk",
        driver,
        el("source", file=path),
        el("target", dev=target, bus="virtio"),
        el("serial", text=serial_number),
        type="file",
        device="disk",
    )


def empty_cdrom() -> str:
    """The seed's drive without its disk, for ``updateDeviceFlags``."""
    drive = el(
        "disk",
        el("driver", name="qemu", type="raw"),
        el("target", dev="sda", bus="sata"),
        el("readonly"),
        type="file",
        device="cdrom",
    )
    return ET.tostring(drive, encoding="unicode")


def interface(nic: Nic, parts: Parts, kvm: bool) -> ET.Element:
    """The one card: fixed MAC and address, checked by the filter against root in the guest, and
    an isolated port, so that guests cannot reach each other."""
    if parts.bridge is not None:
        card = el("interface", el("source", bridge=parts.bridge), type="bridge")
    else:
        card = el("interface", el("source", network=parts.network or ""), type="network")
    card.insert(0, el("mac", address=nic.mac))
    card.append(el("model", type="virtio"))
    if not kvm:
        # TCG's guests are slow anyway, and vhost-net may be missing where there is no KVM.
        card.append(el("driver", name="qemu"))
    if parts.nwfilter is not None:
        address = el("parameter", name="IP", value=nic.address)
        card.append(el("filterref", address, filter=parts.nwfilter))
    card.append(el("port", isolated="yes"))
    card.append(el("rom", enabled="no"))  # nobody boots from the network
    return card


def serial(parts: Parts) -> ET.Element:
    """The console goes to a file: a pty that nobody reads would stop the guest when it is full,
    and the end of the log must be readable after the VM is gone."""
    return el(
        "serial",
        el("source", path=parts.console, append="on"),
        el("target", type="isa-serial", port="0"),
        type="file",
    )


def channel(name: str) -> ET.Element:
    """A virtio-serial port; libvirt makes the socket, and ``virDomainOpenChannel`` reads it."""
    return el("channel", el("target", type="virtio", name=name), type="unix")


# -- passed-through GPUs --------------------------------------------------------------------------


def gpu_ports_and_devices(spec: GuestSpec) -> Iterator[ET.Element]:
    """Real GPUs, each slot of an IOMMU group behind a root port of its own: an endpoint on the
    root bus has no link, and an emulated switch shows the guest a wrong one. With several guest
    cells the ports hang on an expander bus per cell, which tells the guest's kernel the node."""
    gpus = real(spec)
    if not gpus:
        return
    root = el("controller", type="pci", index="0", model="pcie-root")
    if mib := large_window_mib(spec):
        root.append(el("pcihole64", text=str(mib * 1024), unit="KiB"))
    yield root
    cells = [cell.node for cell in spec.claim.cells]
    ports: list[ET.Element] = []
    hostdevs: list[ET.Element] = []
    index = _FIRST_PORT_INDEX
    groups = [(None, gpus)] if len(cells) == 1 else _by_cell(gpus, cells)
    for cell, members in groups:
        expander = None
        if cell is not None:
            expander = index
            ports.append(_expander(index, cell))
            index += 1
        for slot, (number, functions) in enumerate(_slots(spec, members)):
            if slot >= _PORTS_PER_EXPANDER or index > 0xFF:
                raise ValueError(f"{len(gpus)} GPUs are more than one VM can have.")
            ports.append(_root_port(index, expander, slot))
            hostdevs.extend(_hostdevs(number, functions, index))
            index += 1
    yield from ports
    yield from hostdevs


def large_window_mib(spec: GuestSpec) -> int:
    """The window for 64-bit BARs that this guest's GPUs need, as ``asked_window_mib``."""
    return asked_window_mib(sum(gpu.mmio_mib for gpu in real(spec)))


def firmware_window(mib: int) -> ET.Element:
    """The same window for OVMF, which does not read QEMU's; older builds make one of 32 GiB
    whatever the CPU can. libvirt keeps this name from ``<sysinfo>``, so QEMU is told directly."""
    line = ET.Element(f"{{{QEMU_URI}}}commandline")
    for text in ("-fw_cfg", f"name=opt/ovmf/X-PciMmio64Mb,string={mib}"):
        ET.SubElement(line, f"{{{QEMU_URI}}}arg", value=text)
    return line


def _by_cell(gpus: Sequence[Gpu], cells: Sequence[int]) -> list[tuple[int | None, list[Gpu]]]:
    for gpu in gpus:
        if gpu.node not in cells:
            raise ValueError(f"GPU {gpu.address} is on node {gpu.node}, outside its claim.")
    found: list[tuple[int | None, list[Gpu]]] = [
        (number, [gpu for gpu in gpus if gpu.node == node]) for number, node in enumerate(cells)
    ]
    return [(number, members) for number, members in found if members]


def _slots(spec: GuestSpec, gpus: Sequence[Gpu]) -> Iterator[tuple[int, list[str]]]:
    """(number of the GPU in the guest, functions of one host slot), slot by slot."""
    for gpu in gpus:
        slots: dict[str, list[str]] = {}
        for address in gpu.functions or (gpu.address,):
            slots.setdefault(address.rsplit(".", 1)[0], []).append(address)
        for functions in slots.values():
            yield spec.gpus.index(gpu), sorted(functions)


def _expander(index: int, cell: int) -> ET.Element:
    # Bus numbers from busNr up to the next expander's belong to it: 32 each are plenty.
    if cell > 5:
        raise ValueError("More than 6 NUMA nodes with GPUs do not fit in one VM.")
    target = el("target", el("node", text=str(cell)), busNr=str(0x40 + 0x20 * cell))
    return el(
        "controller",
        el("model", name="pxb-pcie"),
        target,
        type="pci",
        index=str(index),
        model="pcie-expander-bus",
    )


def _root_port(index: int, expander: int | None, slot: int) -> ET.Element:
    bus, place = (expander, slot) if expander is not None else (0, _FIRST_PORT_SLOT + slot)
    if expander is None and place > _LAST_PORT_SLOT:
        raise ValueError("More than 14 GPU slots do not fit on the root bus.")
    return el(
        "controller",
        # hotplug off: the guest must not eject a GPU behind the allocator's back.
        el("target", chassis=str(index), port=str(slot), hotplug="off"),
        el("address", type="pci", domain="0x0000", bus=f"0x{bus:02x}", slot=f"0x{place:02x}",
           function="0x0"),
        type="pci",
        index=str(index),
        model="pcie-root-port",
    )  # fmt: skip


def _hostdevs(number: int, functions: Sequence[str], port: int) -> Iterator[ET.Element]:
    for place, address in enumerate(functions):
        domain, bus, rest = address.split(":")
        slot, function = rest.split(".")
        guest = el("address", type="pci", domain="0x0000", bus=f"0x{port:02x}", slot="0x00",
                   function=f"0x{place}")  # fmt: skip
        if place == 0 and len(functions) > 1:
            guest.set("multifunction", "on")
        yield el(
            "hostdev",
            el("driver", name="vfio"),
            el("source", el("address", domain=f"0x{domain}", bus=f"0x{bus}", slot=f"0x{slot}",
                            function=f"0x{function}")),
            # A ROM that a tenant has flashed must not run in the next guest's firmware.
            el("alias", name=f"ua-gpu{number}-{port}-{place}"),
            el("rom", enabled="no"),
            guest,
            mode="subsystem",
            type="pci",
            # The host's driver must never see a GPU that nobody verified: bound at boot, for good.
            managed="no",
        )  # fmt: skip


# -- emulated GPUs --------------------------------------------------------------------------------


def emulated_gpus(spec: GuestSpec, parts: Parts) -> ET.Element:
    """Emulated GPUs: ``edu`` and ``ivshmem-plain`` as functions of one root port. libvirt knows
    neither device as such, so QEMU is told directly; in its JSON syntax, where a comma in a path
    means nothing."""
    line = ET.Element(f"{{{QEMU_URI}}}commandline")
    for number, gpu in enumerate(emulated(spec)):
        memory = parts.gpu_memories[gpu.address]
        if memory.fault == "gone":
            continue
        slot = _FIRST_PORT_SLOT + number
        if slot > _LAST_PORT_SLOT:
            raise ValueError("More than 14 emulated GPUs do not fit on the root bus.")
        _argument(line, "-object", {
            "qom-type": "memory-backend-file", "id": f"gsmem{number}", "mem-path": memory.path,
            "size": memory.memory_mib * 1024 * 1024, "share": True,
        })  # fmt: skip
        _argument(line, "-device", {
            "driver": "pcie-root-port", "id": f"gsport{number}", "bus": "pcie.0",
            "addr": f"0x{slot:x}", "chassis": 128 + number, "hotplug": False,
        })  # fmt: skip
        _argument(line, "-device", {
            "driver": "edu", "id": f"gsedu{number}", "bus": f"gsport{number}", "addr": "0.0",
            "multifunction": True,
            "dma_mask": _FAULTY_DMA_MASK if memory.fault == "dma_mask" else _EDU_DMA_MASK,
        })  # fmt: skip
        _argument(line, "-device", {
            "driver": "ivshmem-plain", "id": f"gsvram{number}", "bus": f"gsport{number}",
            "addr": "0.1", "memdev": f"gsmem{number}",
        })  # fmt: skip
    return line


def _argument(line: ET.Element, option: str, value: Mapping[str, object]) -> None:
    for text in (option, json.dumps(value)):
        ET.SubElement(line, f"{{{QEMU_URI}}}arg", value=text)
