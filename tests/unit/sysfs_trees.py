"""Trees that look like /sys and /proc of servers, for the probe to read.

``Tree`` writes files; the functions below it build whole servers. What a real kernel shows as a
path (``devices/pci0000:40/0000:40:01.0/0000:41:00.0``) is a path here too, since the port above a
device is found by it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuspawner.host import probe

GIB = 1 << 30
MIB = 1 << 20
ASSIGNED = 0x140204 | 0x2000  # memory, 64 bits, prefetchable
SMALL = 0x40200  # memory, 32 bits
UNPLACED = 0x20000000
H100_BARS = ((16 * MIB, SMALL), (128 * GIB, ASSIGNED), (32 * MIB, ASSIGNED))
A100_BARS = ((16 * MIB, SMALL), (64 * GIB, ASSIGNED), (32 * MIB, ASSIGNED))


class Tree:
    """One machine's files."""

    def __init__(self, root: Path) -> None:
        self.sys = root / "sys"
        self.proc = root / "proc"
        self.write("proc", "sys/kernel/random/boot_id", "boot-1")
        self.write("proc", "swaps", "Filename\tType\tSize\tUsed\tPriority")
        self.write("proc", "sys/net/bridge/bridge-nf-call-iptables", "1")
        self.write("sys", "kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
        (self.sys / "bus/pci/drivers/vfio-pci").mkdir(parents=True)
        (self.sys / "class/misc/kvm").mkdir(parents=True)
        (self.sys / "class/iommu/dmar0").mkdir(parents=True)
        self.cpu()

    def write(self, root: str, path: str, text: str | bytes) -> Path:
        target = (self.sys if root == "sys" else self.proc) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text if isinstance(text, bytes) else text.encode() + b"\n")
        return target

    def cpu(self, vendor: str = "GenuineIntel", bits: int = 46, flags: str = "pdpe1gb") -> None:
        """What /proc/cpuinfo says of every CPU."""
        one = (
            f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: A server's CPU\n"
            f"flags\t\t: fpu {flags}\naddress sizes\t: {bits} bits physical, 48 bits virtual\n"
        )
        self.write("proc", "cpuinfo", one + "\n" + one.replace(": 0", ": 1", 1))

    def node(
        self,
        number: int,
        cpus: str,
        memory_gib: int,
        distances: Sequence[int] = (10,),
        *,
        pages: dict[int, tuple[int, int]] | None = None,
    ) -> None:
        """A NUMA node. ``pages``: size in KiB to (in all, free)."""
        base = f"devices/system/node/node{number}"
        self.write("sys", f"{base}/cpulist", cpus)
        self.write("sys", f"{base}/distance", " ".join(map(str, distances)))
        self.write(
            "sys",
            f"{base}/meminfo",
            f"Node {number} MemTotal:  {memory_gib << 20} kB\n"
            f"Node {number} MemFree:   {memory_gib << 19} kB",
        )
        for size, (total, free) in (pages or {}).items():
            self.write("sys", f"{base}/hugepages/hugepages-{size}kB/nr_hugepages", str(total))
            self.write("sys", f"{base}/hugepages/hugepages-{size}kB/free_hugepages", str(free))

    def cores(self, siblings: Sequence[Sequence[int]]) -> None:
        """Logical CPUs that share a core."""
        for core in siblings:
            for cpu in core:
                base = f"devices/system/cpu/cpu{cpu}"
                self.write("sys", f"{base}/topology/thread_siblings_list", ",".join(map(str, core)))
                self.write("sys", f"{base}/online", "1")

    def offline(self, *cpus: int) -> None:
        for cpu in cpus:
            self.write("sys", f"devices/system/cpu/cpu{cpu}/online", "0")

    def device(self, *path: str, bars: Sequence[tuple[int, int]] = (), **more: Any) -> Path:
        """A PCI function below its ports; a GPU on vfio-pci unless ``more`` says otherwise.
        ``group`` and ``driver`` are links, all else are files; ``None`` leaves one out."""
        address = path[-1]
        settings: dict[str, Any] = {
            "vendor": "0x10de", "device": "0x2330", "class": "0x030200", "numa_node": "0",
            "driver": "vfio-pci", "group": None, "reset_method": "flr bus", "reset": "",
            "d3cold_allowed": "0", **_link("current", 32, 16), **_link("max", 32, 16),
            "resource": _resource(bars), **more,
        }  # fmt: skip
        base = self.sys / "devices" / f"pci{path[0][:-5]}" / "/".join(path)
        base.mkdir(parents=True, exist_ok=True)
        for name, value in settings.items():
            if value is not None and name not in ("group", "driver"):
                self.write("sys", str((base / name).relative_to(self.sys)), value)
        if settings["driver"]:
            (base / "driver").symlink_to(f"/sys/bus/pci/drivers/{settings['driver']}")
        if settings["group"] is not None:
            (base / "iommu_group").symlink_to(f"/sys/kernel/iommu_groups/{settings['group']}")
        link = self.sys / "bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(base)
        return base

    def port(self, *path: str, node: int = 0, **more: Any) -> Path:
        """A root port or a switch's port."""
        return self.device(
            *path, **{
                "vendor": "0x8086", "device": "0x352a", "class": "0x060400",
                "numa_node": str(node), "driver": "pcieport", "reset": None,
                "reset_method": None, **more,
            },
        )  # fmt: skip

    def probe(self, *arguments: str) -> dict[str, Any]:
        """As over a shell: the script on standard input, its answer through JSON."""
        result = subprocess.run(
            [sys.executable, "-I", "-", *arguments],
            input=Path(probe.__file__).read_bytes(),
            capture_output=True,
            env={
                **os.environ,
                "GPUSPAWNER_SYSFS": str(self.sys),
                "GPUSPAWNER_PROC": str(self.proc),
            },
        )
        assert result.returncode == 0, result.stdout.decode() + result.stderr.decode()
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer


def _link(kind: str, gts: float, width: int) -> dict[str, str]:
    return {f"{kind}_link_speed": f"{gts:.1f} GT/s PCIe", f"{kind}_link_width": str(width)}


def link(now: tuple[float, int], able: tuple[float, int]) -> dict[str, str]:
    """Files of a link as it is and as it could be."""
    return {**_link("current", *now), **_link("max", *able)}


def _resource(bars: Sequence[tuple[int, int]]) -> str:
    """The file ``resource``: a line a BAR, and an empty one for a 64-bit BAR's upper half."""
    lines = []
    for size, flags in bars:
        start = 0 if flags & UNPLACED else size * 4
        lines.append(f"0x{start:016x} 0x{start + size - 1:016x} 0x{flags:016x}")
        if flags & 0x100000:
            lines.append(f"0x{0:016x} 0x{0:016x} 0x{0:016x}")
    lines += [f"0x{0:016x} 0x{0:016x} 0x{0:016x}"] * (7 - len(lines))
    return "\n".join(lines)


def hgx(root: Path) -> Tree:
    """Two sockets of 8 cores with SMT, 8 GPUs behind PCIe switches (two each), NVSwitches; GPUs
    and switches' ports in groups of their own; 1 TiB a node, of it 896 GiB in pages of 1 GiB."""
    tree = Tree(root)
    pages = {1048576: (896, 896), 2048: (0, 0)}
    tree.node(0, "0-7,16-23", 1024, (10, 21), pages=pages)
    tree.node(1, "8-15,24-31", 1024, (21, 10), pages=pages)
    tree.cores([(core, core + 16) for core in range(16)])
    group = 20
    for number in range(4):
        node, bus = number // 2, (0x10, 0x40, 0x80, 0xB0)[number]
        top = f"0000:{bus:02x}:01.0"
        up = f"0000:{bus + 1:02x}:00.0"
        tree.port(top, node=node, group=group)
        tree.port(top, up, node=node, group=group + 1, vendor="0x1000", device="0xc030")
        for slot in range(2):
            down = f"0000:{bus + 2:02x}:{slot:02x}.0"
            gpu = f"0000:{bus + 3 + slot:02x}:00.0"
            tree.port(top, up, down, node=node, group=group + 2 + 2 * slot)
            tree.device(
                top, up, down, gpu, bars=H100_BARS, numa_node=str(node),
                group=group + 3 + 2 * slot,
            )  # fmt: skip
        group += 10
    tree.device("0000:c0:01.0", "0000:c1:00.0", device="0x22a3", numa_node="1", group=70,
                **{"class": "0x068000"})  # fmt: skip
    tree.device("0000:00:14.0", vendor="0x1a03", device="0x2000", group=2, driver="ast",
                boot_vga="1", **{"class": "0x030000"})  # fmt: skip
    return tree


def workstation(root: Path) -> Tree:
    """One node, a hybrid CPU (four P cores with SMT, four E cores without), a GPU with sound, USB
    and USB-C that the host booted with and drives."""
    tree = Tree(root)
    tree.node(0, "0-11", 64)
    tree.cores([(0, 1), (2, 3), (4, 5), (6, 7), (8,), (9,), (10,), (11,)])
    port = "0000:00:01.0"
    tree.port(port, group=14)
    for function, (kind, device, driver) in enumerate(
        (("0x030000", "0x1e84", "nouveau"), ("0x040300", "0x10f8", "snd_hda_intel"),
         ("0x0c0330", "0x1ad8", "xhci_hcd"), ("0x0c8000", "0x1ad9", ""))
    ):  # fmt: skip
        tree.device(
            port, f"0000:01:00.{function}", device=device, driver=driver, group=15,
            numa_node="-1", boot_vga="1" if function == 0 else None, bars=((8 * GIB, ASSIGNED),),
            **{"class": kind},
        )  # fmt: skip
    return tree
