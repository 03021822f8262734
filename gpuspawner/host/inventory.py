"""From the probe's answers to what the pool knows: pure parsing, every oddity a problem.

A GPU that cannot be given out safely stays in the inventory with its ``problems``, each with what
an admin does about it; it is never dropped or silently moved to another node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuspawner.host.problems import mmio_mib, mmio_window_mib, problems
from gpuspawner.pool.topology import Core, Gpu, Inventory, Node
from gpuspawner.pool.verdict import Witness

_BRIDGE_CLASS = "06"
_KINDS = {"10de": "nvidia", "1002": "amd", "8086": "intel"}
_NO_SHELL = "It is not given out, as its host has no shell. Give the host one."
_PAGES_KIB = {"off": 0, "2M": 2048, "1G": 1048576}


@dataclass(frozen=True, slots=True)
class GpuRule:
    """Which PCI functions are GPUs. ``vendor`` and ``device`` are four hex digits, an empty one
    matches any; ``classes`` are prefixes of the class code ("0300", "0302")."""

    vendor: str = ""
    device: str = ""
    classes: tuple[str, ...] = ("0300", "0302")
    model: str = ""
    memory_mib: int = 0
    kind: str = ""  # empty: by the vendor

    def kind_of(self, function: Mapping[str, Any]) -> str:
        """Kind of a GPU that this rule matches; empty if neither rule nor vendor tell."""
        return self.kind or _KINDS.get(str(function["id"]).split(":")[0], "")

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
    """An admin's say on one host. ``system_cores`` and ``reserve_mib`` are kept for the host on
    each node; ``nodes_of`` names the node of GPUs whose firmware does not (address to node).
    ``hugepages`` is ``off``, ``2M``, ``1G`` or ``auto`` (``page_size_kib``)."""

    gpus: tuple[GpuRule, ...] = NVIDIA
    system_cores: int = 1
    reserve_mib: int = 4096
    nodes_of: tuple[tuple[str, int], ...] = ()
    hugepages: str = "auto"


def parse_inventory(
    host: str,
    answer: Mapping[str, Any],
    rules: HostRules,
    held_mib: Mapping[int, int] | None = None,
) -> Inventory:
    """The inventory of a real host from the probe's ``inventory``. ``held_mib`` is what this
    installation's guests hold of each node's hugepages, in MiB: with what is free, it is what
    placement may give out. A GPU that does not answer on the bus is as good as pulled out,
    whatever the kernel still lists."""
    ids = [int(entry["id"]) for entry in answer["nodes"]]
    functions = answer["functions"]
    found = []
    for function in functions:
        rule = next((rule for rule in rules.gpus if rule.matches(function)), None)
        if rule is not None and function.get("answers", True):
            found.append((function, rule, _node_of(function, dict(rules.nodes_of), ids)))
    pages_kib = page_size_kib(answer["nodes"], rules, {node for _, _, node in found})
    window_mib = mmio_window_mib(answer.get("cpu", {}))
    nodes = tuple(
        _node(entry, ids, rules, pages_kib, (held_mib or {}).get(int(entry["id"]), 0))
        for entry in answer["nodes"]
    )
    system = tuple(core for node in nodes for core in node.cores[: rules.system_cores])
    gpus = [
        _gpu(function, functions, rule, node, ids, window_mib) for function, rule, node in found
    ]
    return Inventory(
        host=host,
        boot_id=str(answer["boot_id"]),
        nodes=nodes,
        gpus=tuple(_one_per_slot(gpus)),
        system_cores=system,
        hugepages_kib=pages_kib,
        mmio_window_mib=window_mib,
    )


def kept_back(inventory: Inventory) -> Inventory:
    """The inventory of a host without a shell: it is shown, and nothing of it is given out. No
    one could see whether a GPU is well, free and reset, nor which addresses of the host guests
    must not reach."""
    return replace(
        inventory,
        nodes=tuple(replace(node, reserve_mib=node.memory_mib) for node in inventory.nodes),
        gpus=tuple(replace(gpu, problems=(*gpu.problems, _NO_SHELL)) for gpu in inventory.gpus),
    )


def page_size_kib(
    nodes: Sequence[Mapping[str, Any]], rules: HostRules, on: Collection[int] = ()
) -> int:
    """The size of guests' pages in KiB, 0 for ordinary ones. ``auto``: whichever leaves guests
    the most memory on the nodes ``on`` (those with GPUs; all nodes if there are none), and the
    larger page of equals. It rests on what is allocated, not on what is free, so it stays while
    guests come and go."""
    if rules.hugepages != "auto":
        return _PAGES_KIB[rules.hugepages]
    wanted = [node for node in nodes if int(node["id"]) in on] or list(nodes)
    room = {0: sum(max(0, _ordinary_mib(node) - rules.reserve_mib) for node in wanted)}
    for size in {size for node in wanted for size in _pools(node)}:
        room[size] = sum(_pools(node).get(size, (0, 0))[0] * size // 1024 for node in wanted)
    return max(room, key=lambda size: (room[size], size))


def _pools(node: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
    """Page size in KiB -> (pages in all, pages free). Through JSON the sizes have become text."""
    return {
        int(size): (int(pool["total"]), int(pool["free"]))
        for size, pool in node["hugepages"].items()
        if int(pool["total"])
    }


def _ordinary_mib(node: Mapping[str, Any]) -> int:
    """What is not set aside as hugepages, of whatever size."""
    huge_kib = sum(size * total for size, (total, _free) in _pools(node).items())
    return max(0, int(node["memory_kib"]) - huge_kib) // 1024


def parse_witness(address: str, answer: Mapping[str, Any]) -> Witness:
    """What the probe's ``witness`` saw."""
    return Witness(
        address=address,
        present=bool(answer["present"]),
        boot_id=str(answer["boot_id"]),
        ids=tuple(answer.get("ids", ())),
        link_speed_gts=float(answer.get("link_speed_gts", 0.0)),
        link_width=int(answer.get("link_width", 0)),
        port_link_speed_gts=float(answer.get("port_link", (0.0, 0))[0]),
        port_link_width=int(answer.get("port_link", (0.0, 0))[1]),
        reset_methods=tuple(answer.get("reset_methods", ())),
        aer={str(key): int(value) for key, value in answer.get("aer", {}).items()},
        note=str(answer.get("note", "")),
    )


def _node(
    entry: Mapping[str, Any], ids: Sequence[int], rules: HostRules, pages_kib: int, held_mib: int
) -> Node:
    cores: tuple[Core, ...] = tuple(tuple(core) for core in entry["cores"])
    number = int(entry["id"])
    # The kernel lists distances to the nodes that are there, in their order: numbers have gaps.
    distances = tuple(
        (other, int(distance))
        for other, distance in zip(ids, entry["distances"], strict=False)
        if other != number
    )
    if pages_kib:
        # The reserve is ordinary memory, so nothing of the pages is kept back. What neither is
        # free nor our own guests' is somebody else's.
        total, free = _pools(entry).get(pages_kib, (0, 0))
        memory_mib = min(total * pages_kib // 1024, free * pages_kib // 1024 + held_mib)
    else:
        memory_mib = _ordinary_mib(entry)
    return Node(
        id=number,
        cores=cores,
        memory_mib=memory_mib,
        reserve_mib=0 if pages_kib else rules.reserve_mib,
        distances=distances,
    )


def _node_of(function: Mapping[str, Any], said: Mapping[str, int], ids: Sequence[int]) -> int:
    """A GPU's node: what the admin says, else the firmware. It need not say where there is only
    one node."""
    node = int(function["node"])
    if node < 0 and len(ids) == 1:
        node = ids[0]
    return said.get(str(function["address"]), node)


def _gpu(
    function: Mapping[str, Any],
    functions: Sequence[Mapping[str, Any]],
    rule: GpuRule,
    node: int,
    nodes: Sequence[int],
    window_mib: int,
) -> Gpu:
    address = str(function["address"])
    group = int(function["group"])
    members = [each for each in functions if group >= 0 and each["group"] == group]
    # Bridges of a group stay with the host; what sits behind them is what moves.
    members = [each for each in members if not str(each["class"]).startswith(_BRIDGE_CLASS)]
    members = members or [function]
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
        problems=tuple(problems(address, node, members, nodes, window_mib)),
        kind=rule.kind_of(function),
        mmio_mib=mmio_mib(members),
    )


def _one_per_slot(gpus: Sequence[Gpu]) -> list[Gpu]:
    """A card of which the rules fit several functions is one GPU, by its first function."""
    kept: dict[str, Gpu] = {}
    for gpu in sorted(gpus, key=lambda each: each.address):
        kept.setdefault(gpu.address.rsplit(".", 1)[0], gpu)
    return list(kept.values())
