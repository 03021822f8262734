"""A guest's domain XML, element by element, each with its reason. Pure: nothing is asked or done.

``build_domain`` takes what the guest is (``GuestSpec``), where its claim really lies on the
machine (``Binding``), and the files and names it uses (``Parts``). Devices are in ``devices.py``.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpuspawner.host import devices
from gpuspawner.host.api import GuestSpec
from gpuspawner.host.devices import Parts, el
from gpuspawner.pool.topology import Cell, Node

METADATA_URI = "urn:gpuspawner:guest:1"
METADATA_PREFIX = "gpuspawner"

ET.register_namespace(METADATA_PREFIX, METADATA_URI)
ET.register_namespace("qemu", devices.QEMU_URI)

_NOT_IN_XML = re.compile("[^\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Binding:
    """Where the claim's CPUs and nodes are on the real machine.

    On real hosts both are themselves. On an emulated host CPU n is n modulo the real CPUs and
    every node is the one that is there. ``housekeeping`` are the (declared) CPUs of each node
    that no lease gets, for QEMU's own threads. ``nodes`` are the host's; a claim of what they
    lack is refused.
    """

    nodes: Mapping[int, Node]

    cpus: tuple[int, ...] = ()  # the real CPUs; empty: identity
    single_node: int | None = None  # every node is this one; None: identity
    housekeeping: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    distances: Mapping[tuple[int, int], int] = field(default_factory=dict)  # the host's SLIT

    def cpu(self, number: int) -> int:
        """The real CPU behind a CPU of the claim."""
        return self.cpus[number % len(self.cpus)] if self.cpus else number

    def node(self, number: int) -> int:
        """The real node behind a node of the claim."""
        return number if self.single_node is None else self.single_node

    def distance(self, node: int, other: int) -> int:
        """SLIT distance between two nodes of the claim; unknown ones are 20, as in Linux."""
        return 10 if node == other else self.distances.get((node, other), 20)

    def emulator_cpus(self, cells: Sequence[Cell]) -> tuple[int, ...]:
        """Real CPUs for QEMU's emulator and I/O threads: housekeeping CPUs of the claim's nodes,
        else the claim's own. Left unpinned they float over every CPU of the host."""
        own = [cpu for cell in cells for cpu in self.housekeeping.get(cell.node, ())]
        own = own or [cpu for cell in cells for core in cell.cores for cpu in core]
        return tuple(sorted({self.cpu(cpu) for cpu in own}))


@dataclass(frozen=True, slots=True)
class Options:
    """What a host can do. ``accel`` is ``kvm`` or ``tcg``. ``hugepages_kib`` is the page size to
    take leases' memory from, 0 for ordinary pages. ``amd`` tells the CPU's vendor. ``firmware`` is
    ``bios`` (for kernels given by the host) or ``efi``. ``mmio_window_mib`` is the room for GPUs'
    BARs in a guest, 0 if it is not known."""

    instance: str
    host: str
    accel: str = "tcg"
    hugepages_kib: int = 0
    amd: bool = False
    firmware: str = "bios"
    mmio_window_mib: int = 0


def domain_name(instance: str, kind: str, uuid: str) -> str:
    """``gs-<instance>-<kind>-<first 8 digits of the UUID>``: at most 29 characters, so that
    libvirt does not cut it where it makes paths of it."""
    return f"gs-{instance}-{kind}-{uuid[:8]}"


def build_domain(spec: GuestSpec, binding: Binding, parts: Parts, options: Options) -> str:
    """The whole domain. Raises ``ValueError`` for a claim without CPUs or memory, of CPUs, nodes
    or pages that the host lacks, or with more GPUs than fit."""
    check_claim(spec, binding, options)
    kvm = options.accel == "kvm"
    domain = ET.Element("domain", type="kvm" if kvm else "qemu")
    domain.append(el("name", text=domain_name(options.instance, spec.kind, spec.uuid)))
    domain.append(el("uuid", text=spec.uuid))
    if title := printable(spec.title, 120):
        domain.append(el("title", text=title))
    domain.append(metadata(spec, options))
    domain.append(el("memory", text=str(spec.claim.memory_mib), unit="MiB"))
    domain.append(el("currentMemory", text=str(spec.claim.memory_mib), unit="MiB"))
    domain.append(memory_backing(spec, options))
    domain.append(el("vcpu", text=str(len(spec.claim.cpus)), placement="static"))
    domain.append(cpu_tune(spec, binding))
    domain.append(numa_tune(spec, binding))
    domain.append(operating_system(spec, parts, options))
    domain.append(features(kvm))
    domain.append(cpu(spec, binding, options))
    domain.append(clock(kvm))
    # Every end is final: the lease ends with its VM, and a reboot must not bring back a guest
    # whose seed is gone.
    for event in ("on_poweroff", "on_reboot", "on_crash"):
        domain.append(el(event, text="destroy"))
    domain.append(power_management())
    domain.append(devices.build_devices(spec, parts, kvm=kvm))
    if mib := devices.large_window_mib(spec):
        domain.append(devices.firmware_window(mib))
    if devices.emulated(spec):
        for model in parts.confining_models:
            # QEMU opens the GPU's memory by a path that libvirt does not know and so does not
            # allow in the guest's AppArmor or SELinux profile. Emulated hosts hold no secrets.
            domain.append(el("seclabel", type="none", model=model))
        domain.append(devices.emulated_gpus(spec, parts))
    ET.indent(domain)
    return ET.tostring(domain, encoding="unicode") + "\n"


def check_claim(spec: GuestSpec, binding: Binding, options: Options) -> None:
    """Refuse what the host does not have: libvirt would find out only when QEMU runs, or bind to
    something else. Raises ``ValueError`` that says what is missing."""
    if not spec.claim.cpus or spec.claim.memory_mib <= 0:
        raise ValueError(f"The claim of {spec.uuid} has no CPUs or no memory.")
    # Only leases' memory is counted in hugepages; the service VM lives on the reserve.
    pages_kib = page_size(spec, options)
    for cell in spec.claim.cells:
        node = binding.nodes.get(cell.node)
        if node is None:
            raise ValueError(f"The host has no node {cell.node}.")
        # The service VM of a GPU on a node without CPUs runs on a housekeeping core elsewhere.
        around = (node,) if spec.kind == "lease" else binding.nodes.values()
        there = {core for each in around for core in each.cores}
        if lacking := [core for core in cell.cores if core not in there]:
            cpus = ", ".join(str(cpu) for core in lacking for cpu in core)
            raise ValueError(f"Node {cell.node} has no core of the CPUs {cpus}.")
        if pages_kib and cell.memory_mib > node.memory_mib:
            raise ValueError(
                f"Node {cell.node} has {node.memory_mib} MiB in pages of {pages_kib // 1024} MiB, "
                f"and {cell.memory_mib} MiB are claimed of it."
            )
    needed = sum(gpu.mmio_mib for gpu in devices.real(spec))
    if options.mmio_window_mib and needed > options.mmio_window_mib:
        raise ValueError(
            f"The BARs of {len(spec.gpus)} GPUs take {needed} MiB, and a guest on this host has a "
            f"window of {options.mmio_window_mib} MiB for them."
        )


def printable(text: str, length: int) -> str:
    """Text that XML 1.0 and libvirt's one-line title can carry; the rest becomes spaces."""
    return _NOT_IN_XML.sub(" ", text)[:length].strip()


def metadata(spec: GuestSpec, options: Options) -> ET.Element:
    """Who owns this VM, so that one which no lease owns is found by listing, and what it holds of
    the host's hugepages. The labels are JSON in ASCII: that carries every string, XML 1.0 does
    not."""
    outer = el("metadata")
    guest = ET.SubElement(
        outer,
        f"{{{METADATA_URI}}}guest",
        instance=options.instance,
        host=options.host,
        kind=spec.kind,
        id=spec.uuid,
        gpus=" ".join(gpu.address for gpu in spec.gpus),
    )
    if size := page_size(spec, options):
        guest.set("pages", str(size))
        guest.set("memory", " ".join(f"{cell.node}:{cell.memory_mib}" for cell in spec.claim.cells))
    guest.text = json.dumps(dict(spec.labels), sort_keys=True)
    return outer


def page_size(spec: GuestSpec, options: Options) -> int:
    """Size in KiB of the hugepages that a guest's memory is made of, 0 for ordinary pages. The
    service VM lives on the nodes' reserve, which is ordinary memory. Raises ``ValueError`` for
    memory that does not fill its last page."""
    if spec.kind != "lease" or not options.hugepages_kib:
        return 0
    for cell in spec.claim.cells:
        if cell.memory_mib * 1024 % options.hugepages_kib:
            raise ValueError(
                f"{cell.memory_mib} MiB of node {cell.node} are no whole number of the host's "
                f"pages of {options.hugepages_kib // 1024} MiB."
            )
    return options.hugepages_kib


def memory_backing(spec: GuestSpec, options: Options) -> ET.Element:
    """Pages never shared between tenants (KSM). With a real GPU all memory is pinned anyway, so
    it is allocated now, where it fails at start and not later by killing the guest. No
    ``<locked/>``: it locks QEMU too and lifts the limit altogether."""
    backing = el("memoryBacking")
    if size := page_size(spec, options):
        pages = ET.SubElement(backing, "hugepages")
        pages.append(el("page", size=str(size), unit="KiB"))
    backing.append(el("nosharepages"))
    if devices.real(spec):
        backing.append(el("allocation", mode="immediate"))
    return backing


def cpu_tune(spec: GuestSpec, binding: Binding) -> ET.Element:
    """vCPUs one to one on the claim's CPUs, siblings side by side as the guest's topology says;
    QEMU's own threads on housekeeping CPUs of the same nodes."""
    tune = el("cputune")
    for number, cpu_number in enumerate(spec.claim.cpus):
        tune.append(el("vcpupin", vcpu=str(number), cpuset=str(binding.cpu(cpu_number))))
    emulator = binding.emulator_cpus(spec.claim.cells)
    tune.append(el("emulatorpin", cpuset=",".join(map(str, emulator))))
    return tune


def numa_tune(spec: GuestSpec, binding: Binding) -> ET.Element:
    """Memory from the claim's nodes and nowhere else: QEMU as a whole, and with several cells
    each guest cell from its own node."""
    cells = spec.claim.cells
    real = sorted({binding.node(cell.node) for cell in cells})
    tune = el("numatune", el("memory", mode="strict", nodeset=",".join(map(str, real))))
    if len(cells) > 1:
        for number, cell in enumerate(cells):
            node = str(binding.node(cell.node))
            tune.append(el("memnode", cellid=str(number), mode="strict", nodeset=node))
    return tune


def operating_system(spec: GuestSpec, parts: Parts, options: Options) -> ET.Element:
    """Kernel and initrd from the host where the image has them: no boot loader to wait for, and
    the command line is ours. Else the disk boots itself."""
    system = el("os")
    if options.firmware == "efi" or parts.kernel is None or devices.large_window_mib(spec):
        system.set("firmware", "efi")  # SeaBIOS places the 64-bit BARs of large GPUs badly
    system.append(el("type", text="hvm", arch="x86_64", machine="q35"))
    if parts.kernel is None:
        system.append(el("boot", dev="hd"))
        return system
    system.append(el("kernel", text=parts.kernel))
    if parts.initrd is not None:
        system.append(el("initrd", text=parts.initrd))
    cmdline = " ".join(filter(None, (spec.image.cmdline.strip(), spec.extra_cmdline.strip())))
    system.append(el("cmdline", text=printable(cmdline, 2000)))
    return system


def features(kvm: bool) -> ET.Element:
    """ACPI for the power button. Under KVM: vCPUs have CPUs of their own, so the guest need not
    yield (hint-dedicated), and the performance counters stay with the host."""
    group = el("features", el("acpi"), el("apic"))
    if kvm:
        group.append(el("kvm", el("hint-dedicated", state="on")))
        group.append(el("pmu", state="off"))
        group.append(el("ioapic", driver="kvm"))
    return group


def cpu(spec: GuestSpec, binding: Binding, options: Options) -> ET.Element:
    """The host's CPU as it is, with its physical address width, which decides how much room
    there is for GPU BARs. TCG has no host CPU to pass on: ``maximum``."""
    kvm = options.accel == "kvm"
    sockets, cores, threads = topology(spec.claim.cells)
    if kvm:
        group = el("cpu", mode="host-passthrough", check="none", migratable="off")
        group.append(el("maxphysaddr", mode="passthrough"))
    else:
        group = el("cpu", mode="maximum", check="none")
        cores, threads = cores * threads, 1  # TCG's CPU has no siblings
    group.append(
        el("topology", sockets=str(sockets), dies="1", cores=str(cores), threads=str(threads))
    )
    if kvm:
        group.append(el("cache", mode="passthrough"))
        if options.amd and threads > 1:
            group.append(el("feature", policy="require", name="topoext"))  # or AMD shows no SMT
    if len(spec.claim.cells) > 1:
        group.append(guest_numa(spec, binding))
    return group


def topology(cells: Sequence[Cell]) -> tuple[int, int, int]:
    """Sockets, cores and threads for the guest: a socket per cell and the host's siblings, where
    the claim is even; else one flat socket, which is always true."""
    widths = {len(core) for cell in cells for core in cell.cores}
    counts = {len(cell.cores) for cell in cells}
    if len(widths) == 1 and len(counts) == 1:
        return len(cells), counts.pop(), widths.pop()
    return 1, sum(len(core) for cell in cells for core in cell.cores), 1


def guest_numa(spec: GuestSpec, binding: Binding) -> ET.Element:
    """Guest cells that mirror the host's nodes, so that the guest's kernel keeps threads, memory
    and GPU together too."""
    numa = el("numa")
    first = 0
    for number, cell in enumerate(spec.claim.cells):
        count = sum(len(core) for core in cell.cores)
        entry = ET.SubElement(
            numa,
            "cell",
            id=str(number),
            cpus=f"{first}-{first + count - 1}" if count > 1 else str(first),
            memory=str(cell.memory_mib),
            unit="MiB",
        )
        first += count
        siblings = ET.SubElement(entry, "distances")
        for other, neighbour in enumerate(spec.claim.cells):
            value = str(binding.distance(cell.node, neighbour.node))
            siblings.append(el("sibling", id=str(other), value=value))
    return numa


def clock(kvm: bool) -> ET.Element:
    """UTC. Under KVM without the HPET, which costs exits; TCG guests calibrate by it."""
    group = el("clock", offset="utc")
    if kvm:
        group.append(el("timer", name="rtc", tickpolicy="catchup"))
        group.append(el("timer", name="pit", tickpolicy="delay"))
        group.append(el("timer", name="hpet", present="no"))
    return group


def power_management() -> ET.Element:
    """No suspend: GPUs do not survive it."""
    return el("pm", el("suspend-to-mem", enabled="no"), el("suspend-to-disk", enabled="no"))
