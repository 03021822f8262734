"""The lab host's hardware: two NUMA nodes, an IOMMU, root ports, and GPUs behind them. Pure.

A lab GPU is QEMU's ``edu`` (registers, interrupts, DMA) and ``ivshmem-plain`` (its memory, a file
on this machine) as functions of one slot; the kernel inside sees one IOMMU group with two members.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MEMORY_MIB = 6144
CPUS_PER_NODE = 2
GPU_MEMORY_MIB = 16

#: intel_iommu: groups and translation; pt: the host's own devices go round it. maxcpus: emulated
#: processors sometimes go on executing code that another has just changed (QEMU 7.2), and a kernel
#: changes its code most while it boots: so it boots on one, and lab-cpus.service brings the others.
#: noreplace-smp: their coming changes no code either. The rest takes time out of an emulated boot.
CMDLINE = (
    "root=/dev/vda rootfstype=ext4 rw console=ttyS0 quiet loglevel=4 panic=1"
    " intel_iommu=on iommu=pt maxcpus=1 noreplace-smp mitigations=off nokaslr tsc=reliable"
    " no_timer_check"
    " fsck.mode=skip systemd.show_status=0 audit=0 apparmor=0 selinux=0 random.trust_cpu=on"
    " cgroup_disable=pressure i8042.noaux 8250.nr_uarts=1"
)

_EXPANDER_BUS = (0x40, 0x80)  # first bus number of each node
_FIRST_EXPANDER_SLOT = 0x8


@dataclass(frozen=True)
class LabGpu:
    """One GPU.

    :ivar name: its ID in QEMU ("gpu0"), by which it is unplugged.
    :ivar node: its NUMA node.
    :ivar port: number of its root port on that node.
    :ivar degraded: its port's link runs at 2.5 GT/s x1 of 16 GT/s x16. QEMU lets a link come
        down only to what a PCI Express device in function 0 can; a display does that.
    """

    name: str
    node: int
    port: int
    degraded: bool = False

    @property
    def address(self) -> str:
        """Where the kernel inside finds its ``edu``: buses are numbered port by port."""
        bus = _EXPANDER_BUS[self.node] + 1 + self.port
        return f"0000:{bus:02x}:00.{1 if self.degraded else 0}"

    @property
    def port_address(self) -> str:
        """Its root port, as the kernel inside names it."""
        return f"0000:{_EXPANDER_BUS[self.node]:02x}:{self.port:02x}.0"


GPUS = (
    LabGpu("gpu0", 0, 0),
    LabGpu("gpu1", 0, 1),
    LabGpu("gpu2", 1, 0),
    LabGpu("gpu3", 1, 1),
    LabGpu("gpu4", 0, 2, degraded=True),
    LabGpu("gpu5", 1, 2),
)


@dataclass(frozen=True)
class Files:
    """What the machine is started with, all on this machine."""

    kernel: Path
    initrd: Path
    root: Path  # the qcow2 overlay
    seed: Path
    console: Path
    qmp: Path
    pid: Path
    memories: Path  # folder of the GPUs' memories, NAME.mem


@dataclass(frozen=True)
class Card:
    """A network card: the tap on this machine, and the MAC inside."""

    tap: str
    mac: str


def memory_file(folder: Path, gpu: LabGpu) -> Path:
    """The file that is this GPU's memory."""
    return folder / f"{gpu.name}.mem"


def command(
    files: Files,
    cards: Sequence[Card],
    memory_mib: int = MEMORY_MIB,
    program: Sequence[str] = ("qemu-system-x86_64",),
) -> list[str]:
    """QEMU's command line; it goes to the background once the machine exists. ``program`` is the
    emulator with what it needs to find its files."""
    nodes = range(len(_EXPANDER_BUS))
    cpus = CPUS_PER_NODE * len(nodes)
    return [
        *program,
        *("-name", "gpuspawner-lab", "-daemonize", "-pidfile", str(files.pid)),
        # Plain emulation: where nested virtualization works the lab would only be faster. With
        # thread=single nothing hangs (see running.py), and guests inside take many times as long.
        *("-accel", "tcg,thread=multi,tb-size=1024", "-cpu", "max"),
        *("-machine", "q35,kernel-irqchip=off", "-m", str(memory_mib), "-nodefaults"),
        *("-smp", f"{cpus},sockets={len(nodes)},cores={CPUS_PER_NODE},threads=1"),
        *_numa(memory_mib, len(nodes)),
        *("-device", "intel-iommu,intremap=on,caching-mode=on"),
        *("-display", "none", "-serial", f"file:{files.console}"),
        *("-qmp", f"unix:{files.qmp},server=on,wait=off"),
        *("-kernel", str(files.kernel), "-initrd", str(files.initrd), "-append", CMDLINE),
        *_disk("root", files.root, "qcow2", 0x10),
        *_disk("seed", files.seed, "raw", 0x11),
        *_cards(cards),
        # Behind an expander's port the root bus must be named, or QEMU picks the wrong one.
        *("-device", "virtio-rng-pci,bus=pcie.0,addr=0x14"),
        *_expanders(),
        *(word for gpu in GPUS for word in _gpu(gpu, memory_file(files.memories, gpu))),
    ]


def _numa(memory_mib: int, nodes: int) -> Iterator[str]:
    share = memory_mib // nodes
    for node in range(nodes):
        first = node * CPUS_PER_NODE
        yield from ("-object", f"memory-backend-ram,id=ram{node},size={share}M")
        yield from (
            "-numa",
            f"node,nodeid={node},cpus={first}-{first + CPUS_PER_NODE - 1},memdev=ram{node}",
        )
    for node in range(nodes):
        for other in range(node + 1, nodes):
            yield from ("-numa", f"dist,src={node},dst={other},val=21")


def _disk(name: str, path: Path, kind: str, slot: int) -> Iterator[str]:
    read_only = ",readonly=on" if kind == "raw" else ""
    yield from ("-drive", f"if=none,id={name},file={path},format={kind},cache=unsafe{read_only}")
    yield from ("-device", f"virtio-blk-pci,bus=pcie.0,drive={name},addr=0x{slot:x}")


def _cards(cards: Sequence[Card]) -> Iterator[str]:
    for number, card in enumerate(cards):
        backend = f"tap,id=net{number},ifname={card.tap},script=no,downscript=no,vhost=off"
        device = f"virtio-net-pci,bus=pcie.0,netdev=net{number},mac={card.mac},romfile="
        yield from ("-netdev", backend, "-device", f"{device},addr=0x{0x12 + number:x}")


def _expanders() -> Iterator[str]:
    for node, bus in enumerate(_EXPANDER_BUS):
        slot = _FIRST_EXPANDER_SLOT + node
        expander = f"pxb-pcie,id=node{node},bus=pcie.0,addr=0x{slot:x}"
        yield from ("-device", f"{expander},bus_nr=0x{bus:x},numa_node={node}")


def _gpu(gpu: LabGpu, memory: Path) -> Iterator[str]:
    number = GPUS.index(gpu)
    port = f"port-{gpu.name}"
    yield from (
        "-device",
        f"pcie-root-port,id={port},bus=node{gpu.node},addr=0x{gpu.port:x}.0,"
        f"chassis={number + 1},slot={number + 1},x-speed=16,x-width=16",
    )
    yield from (
        "-object",
        f"memory-backend-file,id=ram-{gpu.name},mem-path={memory},size={GPU_MEMORY_MIB}M,share=on",
    )
    first = 1 if gpu.degraded else 0
    if gpu.degraded:
        yield from (
            "-device",
            f"bochs-display,id={gpu.name}-display,bus={port},addr=0.0,multifunction=on",
        )
    # edu's own DMA mask, 28 bits, misses the memory of larger guests.
    yield from (
        "-device",
        f"edu,id={gpu.name},bus={port},addr=0.{first},multifunction=on,dma_mask=0xffffffff",
    )
    yield from (
        "-device",
        # The kernel makes one group of the functions when they are found anew only if each says
        # that it has neighbours, as real cards' do.
        f"ivshmem-plain,id={gpu.name}-memory,bus={port},addr=0.{first + 1},multifunction=on,"
        f"memdev=ram-{gpu.name}",
    )
