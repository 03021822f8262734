"""Emulated hosts: a file declares a GPU host, and this machine plays it.

The declaration may be larger than the machine. Placement and ledger use its numbers; the guests
run on the CPUs and the one node that are really there, with the memory of their claims. Its GPUs
are QEMU devices (``edu`` and ``ivshmem-plain``) whose memory is a volume that outlives the VMs.

    v: 1
    threads_per_core: 2
    system_cores: 1              # per node, kept for the host itself
    nodes:
      - {id: 0, cores: 8, memory_mib: 65536, reserve_mib: 4096, distances: {1: 21}}
      - {id: 1, cores: 8, memory_mib: 65536, reserve_mib: 4096, distances: {0: 21}}
    gpus:
      - {address: "0000:41:00.0", node: 0, model: Emulated GPU 16M, memory_mib: 16}
      - {address: "0000:c1:00.0", node: 1, model: Emulated GPU 16M, fault: gone}

``cores`` is a count (numbered as Linux does: the siblings of all cores come after all first
threads) or the list of cores itself, each a list of CPU numbers.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpuspawner.pool.topology import PCI_ADDRESS, Core, Gpu, Inventory, Node

Fault = Literal["none", "gone", "dma_mask"]
FAULTS: tuple[str, ...] = get_args(Fault)

MODEL = "Emulated GPU 16M"
MAGIC = "gpuspawner-emulated-gpu"
IDENTITY_BYTES = 4096
IDS = ("1234:11e8", "1af4:1110")  # QEMU's edu, ivshmem-plain
_NAMESPACE = uuid.UUID("9d5f2a0e-9f0c-4d3e-8a55-6c1f6d1f2b77")


class DeclarationError(ValueError):
    """The declaration cannot be used; the text says where and why."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _NodeText(_Strict):
    id: int = Field(ge=0, le=1023)
    cores: int | list[list[int]]
    memory_mib: int = Field(gt=0)
    reserve_mib: int = Field(default=0, ge=0)
    distances: dict[int, int] = Field(default_factory=dict)


class _GpuText(_Strict):
    address: str
    node: int
    model: str = Field(default=MODEL, min_length=1, max_length=80)
    memory_mib: int = Field(default=16, ge=1, le=4096)
    fault: Fault = "none"


class _HostText(_Strict):
    v: Literal[1] = 1
    threads_per_core: int = Field(default=1, ge=1, le=8)
    system_cores: int = Field(default=0, ge=0)
    nodes: list[_NodeText] = Field(min_length=1)
    gpus: list[_GpuText] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Emulated:
    """A declared host. ``faults`` maps a GPU's address to what is wrong with it."""

    nodes: tuple[Node, ...]
    gpus: tuple[Gpu, ...]
    system_cores: tuple[Core, ...] = ()
    faults: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Emulated:
        """Read a declaration. Raises ``DeclarationError`` that names every fault in it."""
        try:
            declared = _HostText.model_validate(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise DeclarationError(f"The declaration is no YAML: {error}") from error
        except ValidationError as error:
            raise DeclarationError(_sentences(error)) from error
        nodes = _nodes(declared)
        _check(nodes, declared)
        return cls(
            nodes=nodes,
            gpus=tuple(
                sorted(
                    (_gpu(number, gpu) for number, gpu in enumerate(declared.gpus)),
                    key=lambda gpu: gpu.address,
                )
            ),
            system_cores=tuple(
                core for node in nodes for core in node.cores[: declared.system_cores]
            ),
            faults={gpu.address.lower(): gpu.fault for gpu in declared.gpus if gpu.fault != "none"},
        )

    def with_faults(self, faults: Mapping[str, str]) -> Emulated:
        """The same host with other faults; addresses that are not named have none."""
        for address, fault in faults.items():
            if address not in {gpu.address for gpu in self.gpus}:
                raise DeclarationError(f"There is no GPU {address} to give a fault to.")
            if fault not in FAULTS:
                raise DeclarationError(f"{fault!r} is no fault; there are {', '.join(FAULTS)}.")
        return Emulated(self.nodes, self.gpus, self.system_cores, dict(faults))

    def fault(self, address: str) -> str:
        """What is wrong with this GPU: ``none``, ``gone`` or ``dma_mask``."""
        return self.faults.get(address, "none")

    def inventory(self, host: str, boot_id: str) -> Inventory:
        """What placement sees."""
        return Inventory(host, boot_id, self.nodes, self.gpus, True, self.system_cores)


def identity_page(instance: str, host: str, gpu: Gpu) -> bytes:
    """Page 0 of an emulated GPU's memory: who it is, as the service VM will read it."""
    unique = uuid.uuid5(_NAMESPACE, f"{instance}/{host}/{gpu.address}")
    content = json.dumps(
        {
            "magic": MAGIC,
            "v": 1,
            "serial": f"EMU-{host}-{gpu.group}",
            "uuid": f"GPU-{unique}",
            "model": gpu.model,
            "vbios": "1.0",
        }
    )
    return content.encode("ascii").ljust(IDENTITY_BYTES, b"\0")


def is_identity_page(page: bytes) -> bool:
    """Whether this page was stamped."""
    try:
        content = json.loads(page.rstrip(b"\0"))
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("magic") == MAGIC


def _sentences(error: ValidationError) -> str:
    faults = [
        f"{'.'.join(str(part) for part in fault['loc']) or 'the document'}: {fault['msg']}"
        for fault in error.errors()
    ]
    return "The declaration cannot be used: " + "; ".join(faults) + "."


def _nodes(declared: _HostText) -> tuple[Node, ...]:
    counts = [node.cores for node in declared.nodes if isinstance(node.cores, int)]
    if counts and len(counts) != len(declared.nodes):
        raise DeclarationError(
            "nodes.cores: give every node a count or every node a list, not some of each."
        )
    total = sum(counts)
    nodes = []
    first = 0
    for node in declared.nodes:
        if isinstance(node.cores, int):
            cores = tuple(
                tuple(index + thread * total for thread in range(declared.threads_per_core))
                for index in range(first, first + node.cores)
            )
            first += node.cores
        else:
            cores = tuple(tuple(core) for core in node.cores)
        nodes.append(
            Node(
                id=node.id,
                cores=cores,
                memory_mib=node.memory_mib,
                reserve_mib=node.reserve_mib,
                distances=tuple(sorted(node.distances.items())),
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.id))


def _gpu(number: int, declared: _GpuText) -> Gpu:
    address = declared.address.lower()
    return Gpu(
        address=address,
        model=declared.model,
        node=declared.node,
        functions=(address, address[:-1] + "1"),
        group=number,
        ids=IDS,
        memory_mib=declared.memory_mib,
        link_speed_gts=16.0,
        link_width=16,
        emulated=True,
        kind="emulated",
    )


def _check(nodes: Sequence[Node], declared: _HostText) -> None:
    faults = []
    ids = [node.id for node in nodes]
    cpus = [cpu for node in nodes for core in node.cores for cpu in core]
    addresses = [gpu.address.lower() for gpu in declared.gpus]
    for what, values in (("node", ids), ("CPU", cpus), ("GPU", addresses)):
        for value in _repeated(values):
            faults.append(f"{what} {value} is declared twice")
    for node in nodes:
        if not node.cores or not all(node.cores):
            faults.append(f"node {node.id} has no cores, or an empty one")
        if node.reserve_mib >= node.memory_mib:
            faults.append(f"node {node.id} reserves all its memory")
        for other, _distance in node.distances:
            if other not in ids:
                faults.append(
                    f"node {node.id} names a distance to node {other}, which is not there"
                )
    for gpu in declared.gpus:
        if not PCI_ADDRESS.match(gpu.address.lower()) or not gpu.address.endswith(".0"):
            faults.append(f"{gpu.address!r} is no address of function 0, as 0000:41:00.0")
        if gpu.node not in ids:
            faults.append(f"GPU {gpu.address} is on node {gpu.node}, which is not declared")
        if gpu.memory_mib & (gpu.memory_mib - 1):
            faults.append(f"GPU {gpu.address}: memory_mib must be a power of two (it is a PCI BAR)")
    if faults:
        raise DeclarationError("The declaration cannot be used: " + "; ".join(faults) + ".")


def _repeated(values: Sequence[Any]) -> list[Any]:
    return sorted({value for value in values if values.count(value) > 1})
