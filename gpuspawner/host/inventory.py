"""From the probe's answers to what the pool knows: pure parsing, every oddity a problem.

A GPU that cannot be given out safely stays in the inventory with its ``problems``, each with what
an admin does about it; it is never dropped or silently moved to another node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuspawner.pool.topology import Core, Gpu, Inventory, Node
from gpuspawner.pool.verdict import Witness

_BRIDGE_CLASS = "06"
VFIO_DRIVERS = ("vfio-pci", "_vfio_pci")  # the stub, and variant drivers (mlx5_vfio_pci, ...)


@dataclass(frozen=True, slots=True)
class GpuRule:
    """Which PCI functions are GPUs. ``vendor`` and ``device`` are four hex digits, an empty one
    matches any; ``classes`` are prefixes of the class code ("0300", "0302")."""

    vendor: str = ""
    device: str = ""
    classes: tuple[str, ...] = ("0300", "0302")
    model: str = ""
    memory_mib: int = 0

    def matches(self, function: Mapping[str, Any]) -> bool:
        """Whether this function is a GPU by this rule."""
        vendor, device = str(function["id"]).split(":")
        return (
            self.vendor in ("", vendor)
            and self.device in ("", device)
            and str(function["class"]).startswith(self.classes)
        )


NVIDIA = (GpuRule(vendor="10de"),)


@dataclass(frozen=True, slots=True)
class HostRules:
    """An admin's say on one host. ``system_cores`` are kept for the host on each node;
    ``nodes_of`` names the node of GPUs whose firmware does not (address to node)."""

    gpus: tuple[GpuRule, ...] = NVIDIA
    system_cores: int = 1
    reserve_mib: int = 4096
    nodes_of: tuple[tuple[str, int], ...] = ()


def parse_inventory(host: str, answer: Mapping[str, Any], rules: HostRules) -> Inventory:
    """The inventory of a real host from the probe's ``inventory``. A GPU that does not answer on
    the bus is as good as pulled out, whatever the kernel still lists."""
    nodes = tuple(_node(entry, rules) for entry in answer["nodes"])
    system = tuple(core for node in nodes for core in node.cores[: rules.system_cores])
    functions = answer["functions"]
    gpus = []
    for function in functions:
        rule = next((rule for rule in rules.gpus if rule.matches(function)), None)
        if rule is not None and function.get("answers", True):
            gpus.append(_gpu(function, functions, rule, nodes, dict(rules.nodes_of)))
    return Inventory(
        host=host,
        boot_id=str(answer["boot_id"]),
        nodes=nodes,
        gpus=tuple(sorted(_one_per_group(gpus), key=lambda gpu: gpu.address)),
        system_cores=system,
    )


def parse_witness(address: str, answer: Mapping[str, Any]) -> Witness:
    """What the probe's ``witness`` saw."""
    return Witness(
        address=address,
        present=bool(answer["present"]),
        boot_id=str(answer["boot_id"]),
        ids=tuple(answer.get("ids", ())),
        link_speed_gts=float(answer.get("link_speed_gts", 0.0)),
        link_width=int(answer.get("link_width", 0)),
        aer={str(key): int(value) for key, value in answer.get("aer", {}).items()},
        note=str(answer.get("note", "")),
    )


def _node(entry: Mapping[str, Any], rules: HostRules) -> Node:
    cores: tuple[Core, ...] = tuple(tuple(core) for core in entry["cores"])
    number = int(entry["id"])
    distances = tuple(
        (other, int(distance))
        for other, distance in enumerate(entry["distances"])
        if other != number
    )
    return Node(
        id=number,
        cores=cores,
        memory_mib=int(entry["memory_kib"]) // 1024,
        reserve_mib=rules.reserve_mib,
        distances=distances,
    )


def _gpu(
    function: Mapping[str, Any],
    functions: Sequence[Mapping[str, Any]],
    rule: GpuRule,
    nodes: Sequence[Node],
    nodes_of: Mapping[str, int],
) -> Gpu:
    address = str(function["address"])
    group = int(function["group"])
    members = [each for each in functions if group >= 0 and each["group"] == group]
    # Bridges of a group stay with the host; what sits behind them is what moves.
    members = [each for each in members if not str(each["class"]).startswith(_BRIDGE_CLASS)]
    members = members or [function]
    node = nodes_of.get(address, int(function["node"]))
    return Gpu(
        address=address,
        model=rule.model or str(function["id"]),
        node=node,
        functions=tuple(str(each["address"]) for each in members),
        group=group,
        ids=tuple(str(each["id"]) for each in members),
        memory_mib=rule.memory_mib,
        link_speed_gts=float(function["link_speed_gts"]),
        link_width=int(function["link_width"]),
        problems=tuple(_problems(address, node, group, members, nodes)),
    )


def _problems(
    address: str,
    node: int,
    group: int,
    members: Sequence[Mapping[str, Any]],
    nodes: Sequence[Node],
) -> list[str]:
    problems = []
    if node not in {each.id for each in nodes}:
        problems.append(
            f"The firmware does not say on which NUMA node {address} is (it says {node}). Set its "
            "node in the host's configuration; 'lspci -tv' and the board's manual tell which."
        )
    if group < 0:
        problems.append(
            f"{address} is in no IOMMU group. Switch the IOMMU on in firmware and kernel "
            "(intel_iommu=on or amd_iommu=on), then reboot the host."
        )
    for each in members:
        driver = str(each["driver"])
        if not driver.endswith(VFIO_DRIVERS):
            problems.append(
                f"{each['address']} is bound to {driver or 'no driver'}. Bind every function of "
                "the GPU's IOMMU group to vfio-pci at boot (driver_override)."
            )
    return problems


def _one_per_group(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Two GPUs in one IOMMU group cannot go to two leases: the first stands for the group, with
    the problem named."""
    kept: dict[int | str, Gpu] = {}
    for gpu in sorted(gpus, key=lambda each: each.address):
        key: int | str = gpu.group if gpu.group >= 0 else gpu.address
        if key not in kept:
            kept[key] = gpu
            continue
        first = kept[key]
        problem = (
            f"{first.address} and {gpu.address} are in one IOMMU group ({gpu.group}) and can only "
            "be passed on together. Move one to another slot, or switch ACS on in the firmware."
        )
        kept[key] = Gpu(
            address=first.address,
            model=first.model,
            node=first.node,
            functions=first.functions,
            group=first.group,
            ids=first.ids,
            memory_mib=first.memory_mib,
            link_speed_gts=first.link_speed_gts,
            link_width=first.link_width,
            problems=(*first.problems, problem),
        )
    return list(kept.values())
