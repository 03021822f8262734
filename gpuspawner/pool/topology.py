"""What a GPU host is made of, and what a lease takes of it.

All memory is in MiB. CPU numbers are the host's logical CPUs; a *core* is the tuple of logical
CPUs (SMT siblings) that share one physical core, and is the smallest unit that a lease gets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

PCI_ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
HOST_NAME = re.compile(r"^[a-z0-9][a-z0-9-]{0,39}$")

Core = tuple[int, ...]
Policy = Literal["strict", "split", "any"]


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node of a host.

    ``reserve_mib`` is kept back for the host itself, the service VM and QEMU's own overhead: a
    node that runs dry gets its guests killed although the host has memory elsewhere.
    """

    id: int
    cores: tuple[Core, ...]
    memory_mib: int
    reserve_mib: int = 0
    distances: tuple[tuple[int, int], ...] = ()  # (other node, distance as in the SLIT)

    @property
    def usable_mib(self) -> int:
        """Memory that guests may hold on this node, in MiB."""
        return max(0, self.memory_mib - self.reserve_mib)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU in its slot. ``functions`` are all PCI functions of its IOMMU group; they move
    together. ``problems`` keep it out of the pool, each with its remedy.

    ``mmio_mib`` is the room that its BARs take of a guest's addresses.
    ``kind`` is what its checks are for: ``nvidia``, ``emulated``, ...; empty if unknown.
    ``emulated`` says who makes it: true if QEMU does, with the guest; false if it is in the host.
    """

    address: str
    model: str
    node: int
    functions: tuple[str, ...] = ()
    group: int = -1
    ids: tuple[str, ...] = ()  # vendor:device of each function
    memory_mib: int = 0
    link_speed_gts: float = 0.0
    link_width: int = 0
    emulated: bool = False
    problems: tuple[str, ...] = ()
    kind: str = ""
    mmio_mib: int = 0

    @property
    def imitation(self) -> bool:
        """No GPU in earnest: QEMU makes it, or the host has devices that stand for one (real to
        the host, its IOMMU and VFIO)."""
        return self.emulated or self.kind == "emulated"


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a host has, as one survey of it found. ``boot_id`` changes with each boot, and with
    it everything that was learnt about devices in use. ``hugepages_kib`` is the size of the pages
    that guests' memory is made of, 0 for ordinary ones; the nodes' memory is counted in them.
    ``mmio_window_mib`` is the room for GPUs' BARs in one guest, 0 if it is not known."""

    host: str
    boot_id: str
    nodes: tuple[Node, ...]
    gpus: tuple[Gpu, ...]
    emulated: bool = False
    system_cores: tuple[Core, ...] = ()  # housekeeping: emulator threads, the service VM
    hugepages_kib: int = 0
    mmio_window_mib: int = 0

    def node(self, node_id: int) -> Node:
        """The node with this number; ``KeyError`` if the host has none."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)

    def gpu(self, address: str) -> Gpu:
        """The GPU in this slot; ``KeyError`` if there is none."""
        for gpu in self.gpus:
            if gpu.address == address:
                return gpu
        raise KeyError(address)


@dataclass(frozen=True, slots=True)
class Request:
    """What one server asks for. ``gpu_model`` of ``None`` takes any model; ``home_host`` names
    the host whose local pool holds the user's home, which binds the server to it.

    ``policy`` says how near to one another its parts must be: ``strict`` puts all of it on one
    NUMA node; ``split`` may use several, each GPU with its share of cores and memory on its own
    node; ``any`` takes GPUs, cores and memory from anywhere on one host (``pool/fitting.py``).
    """

    gpus: int
    cores: int
    memory_mib: int
    gpu_model: str | None = None
    image: str = ""
    home_host: str | None = None
    policy: Policy = "strict"


@dataclass(frozen=True, slots=True)
class Cell:
    """A lease's part of one NUMA node: whole cores, and memory in MiB."""

    node: int
    cores: tuple[Core, ...]
    memory_mib: int


@dataclass(frozen=True, slots=True)
class Claim:
    """All that a lease holds on its host."""

    host: str
    gpus: tuple[str, ...]
    cells: tuple[Cell, ...]

    @property
    def cpus(self) -> tuple[int, ...]:
        """Every logical CPU of the claim, core by core."""
        return tuple(cpu for cell in self.cells for core in cell.cores for cpu in core)

    @property
    def memory_mib(self) -> int:
        """Memory over all nodes, in MiB."""
        return sum(cell.memory_mib for cell in self.cells)


@dataclass(frozen=True, slots=True)
class HostView:
    """One host as placement sees it: its inventory, and what is free of it right now.

    ``free_gpus`` are the addresses in state ``unassigned`` without a hold; ``coming_gpus`` are on
    their way back (used or diagnosing). ``free_cores`` and ``free_mib`` are per node.
    """

    inventory: Inventory
    free_gpus: frozenset[str]
    coming_gpus: frozenset[str] = frozenset()
    used_cpus: frozenset[int] = frozenset()
    used_mib: dict[int, int] = field(default_factory=dict)
    drained: bool = False
    reachable: bool = True
    free_addresses: int = 1  # of the guests' range
    connecting: bool = False  # the allocator has just started: nothing is known yet
    images: frozenset[str] = frozenset()

    def free_cores(self, node_id: int) -> tuple[Core, ...]:
        """Cores of a node that no lease holds and that are not housekeeping cores."""
        cores = self.inventory.node(node_id).cores
        taken = self.used_cpus.union(*self.inventory.system_cores)
        return tuple(core for core in cores if taken.isdisjoint(core)) if taken else cores

    def free_mib(self, node_id: int) -> int:
        """Memory of a node that guests may still take, in MiB."""
        return self.inventory.node(node_id).usable_mib - self.used_mib.get(node_id, 0)

    def once_wiped(self) -> HostView:
        """The host as it will be when the GPUs that are on their way back are free."""
        return replace(self, free_gpus=self.free_gpus | self.coming_gpus)
