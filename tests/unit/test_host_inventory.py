"""The probe reads a made-up /sys and /proc, and the inventory is made of its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.host import probe
from gpuspawner.host.inventory import (
    GpuRule,
    HostRules,
    page_size_kib,
    parse_inventory,
    parse_witness,
)


class Machine:
    """A tree that looks like /sys and /proc of a host with two nodes."""

    def __init__(self, root: Path) -> None:
        self.sys = root / "sys"
        self.proc = root / "proc"
        self.write("proc", "sys/kernel/random/boot_id", "boot-1")
        for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7")):
            base = f"devices/system/node/node{node}"
            self.write("sys", f"{base}/cpulist", cpus)
            self.write("sys", f"{base}/distance", "10 21" if node == 0 else "21 10")
            self.write(
                "sys",
                f"{base}/meminfo",
                f"Node {node} MemTotal:       67108864 kB\nNode {node} MemFree:  1024 kB",
            )
            self.write("sys", f"{base}/hugepages/hugepages-1048576kB/nr_hugepages", "32")
            self.write("sys", f"{base}/hugepages/hugepages-1048576kB/free_hugepages", "30")
        for cpu in range(8):
            base = f"devices/system/cpu/cpu{cpu}"
            siblings = f"{cpu % 4},{cpu % 4 + 4}"
            self.write("sys", f"{base}/topology/thread_siblings_list", siblings)

    def write(self, root: str, path: str, text: str | bytes) -> None:
        target = (self.sys if root == "sys" else self.proc) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text if isinstance(text, bytes) else text.encode() + b"\n")

    def device(self, address: str, **more: Any) -> Path:
        """A PCI function; a GPU bound to vfio-pci unless ``more`` says otherwise."""
        settings: dict[str, Any] = {
            "vendor": "0x10de", "device": "0x2330", "class": "0x030200", "numa_node": "0",
            "group": 15, "driver": "vfio-pci", "current_link_speed": "16.0 GT/s PCIe",
            "current_link_width": "16", "config": bytes.fromhex("de103023") + bytes(60), **more,
        }  # fmt: skip
        base = self.sys / "bus/pci/devices" / address
        for name, value in settings.items():
            if name not in ("group", "driver"):
                self.write("sys", f"bus/pci/devices/{address}/{name}", value)
        if settings["driver"]:
            (base / "driver").symlink_to(f"../../drivers/{settings['driver']}")
        if settings["group"] is not None:
            group = self.sys / "kernel/iommu_groups" / str(settings["group"])
            (group / "devices").mkdir(parents=True, exist_ok=True)
            (group / "devices" / address).symlink_to(base)
            (base / "iommu_group").symlink_to(group)
        return base

    def probe(self, *arguments: str) -> dict[str, Any]:
        """As over a shell: the script on standard input."""
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
        lines = result.stdout.decode().splitlines()
        assert len(lines) == 1, result.stderr.decode()
        answer: dict[str, Any] = json.loads(lines[0])
        assert result.returncode == (1 if "error" in answer else 0)
        return answer


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_nodes_cores_and_memory(machine: Machine) -> None:
    rules = HostRules(system_cores=1, hugepages="off")
    inventory = parse_inventory("a", machine.probe("inventory"), rules)
    assert inventory.boot_id == "boot-1"
    assert [node.cores for node in inventory.nodes] == [((0, 4), (1, 5)), ((2, 6), (3, 7))]
    assert inventory.system_cores == ((0, 4), (2, 6))
    # Half of it is set aside as hugepages.
    assert [node.usable_mib for node in inventory.nodes] == [32768 - 4096, 32768 - 4096]
    assert inventory.hugepages_kib == 0
    assert inventory.node(1).distances == ((0, 21),)


def test_memory_in_hugepages_is_what_is_free_and_what_is_ours(machine: Machine) -> None:
    answer = machine.probe("inventory")
    inventory = parse_inventory("a", answer, HostRules(hugepages="1G"), {1: 1024})
    assert inventory.hugepages_kib == 1048576
    assert [node.usable_mib for node in inventory.nodes] == [30 * 1024, 31 * 1024]
    # A guest that was not there yet when the pages were counted makes no page out of nothing.
    full = parse_inventory("a", answer, HostRules(hugepages="1G"), {1: 64 * 1024})
    assert full.node(1).usable_mib == 32 * 1024


def test_pages_that_are_not_allocated_hold_nothing(machine: Machine) -> None:
    inventory = parse_inventory("a", machine.probe("inventory"), HostRules(hugepages="2M"))
    assert [node.usable_mib for node in inventory.nodes] == [0, 0]


@pytest.mark.parametrize(
    ("pages", "reserve_mib", "size"),
    [
        ({}, 4096, 0),
        ({1048576: 32}, 4096, 1048576),  # 32 GiB of pages against 28 GiB
        ({1048576: 32}, 0, 1048576),  # as much of either: the larger page
        ({1048576: 8}, 4096, 0),
        ({1048576: 24, 2048: 14336}, 4096, 2048),  # 28 GiB against 24 and 12
        ({1048576: 24, 2048: 12288}, 4096, 1048576),
    ],
)
def test_auto_takes_what_leaves_guests_the_most(
    pages: dict[int, int], reserve_mib: int, size: int
) -> None:
    pools = {str(kib): {"total": total, "free": total} for kib, total in pages.items()}
    with_gpu = {"id": 1, "memory_kib": 64 << 20, "hugepages": pools}
    other = {"id": 0, "memory_kib": 256 << 20, "hugepages": {}}
    rules = HostRules(reserve_mib=reserve_mib)
    assert page_size_kib([other, with_gpu], rules, {1}) == size


def test_distances_skip_nodes_that_are_not_there(machine: Machine) -> None:
    (machine.sys / "devices/system/node/node1").rename(machine.sys / "devices/system/node/node4")
    inventory = parse_inventory("a", machine.probe("inventory"), HostRules())
    assert inventory.node(0).distances == ((4, 21),)
    assert inventory.node(4).distances == ((0, 21),)


def test_offline_cpus_are_left_out(machine: Machine) -> None:
    for cpu in (1, 5):
        machine.write("sys", f"devices/system/cpu/cpu{cpu}/online", "0")
    inventory = parse_inventory("a", machine.probe("inventory"), HostRules())
    assert inventory.node(0).cores == ((0, 4),)


def test_gpu_with_all_functions_of_its_group(machine: Machine) -> None:
    machine.device("0000:41:00.0", numa_node="1")
    machine.device("0000:41:00.1", **{"class": "0x040300", "device": "0x22ba"})
    machine.device("0000:40:00.0", vendor="0x8086", **{"class": "0x060400", "driver": "pcieport"})
    rules = HostRules(gpus=(GpuRule(vendor="10de", model="H100", memory_mib=81559),))
    inventory = parse_inventory("a", machine.probe("inventory"), rules)
    (gpu,) = inventory.gpus
    assert gpu.functions == ("0000:41:00.0", "0000:41:00.1")
    assert gpu.ids == ("10de:2330", "10de:22ba")
    assert (gpu.node, gpu.group, gpu.model, gpu.memory_mib) == (1, 15, "H100", 81559)
    assert (gpu.link_speed_gts, gpu.link_width) == (16.0, 16)
    assert gpu.problems == ()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"numa_node": "-1"}, "which NUMA node"),
        ({"numa_node": "7"}, "which NUMA node"),
        ({"group": None}, "no IOMMU group"),
        ({"driver": "nvidia"}, "bound to nvidia"),
        ({"driver": ""}, "bound to no driver"),
    ],
)
def test_oddities_are_problems(machine: Machine, settings: dict[str, Any], said: str) -> None:
    machine.device("0000:41:00.0", **settings)
    (gpu,) = parse_inventory("a", machine.probe("inventory"), HostRules()).gpus
    assert len(gpu.problems) == 1
    assert said in gpu.problems[0]


def test_variant_driver_is_fine(machine: Machine) -> None:
    machine.device("0000:41:00.0", driver="nvgrace_gpu_vfio_pci")
    (gpu,) = parse_inventory("a", machine.probe("inventory"), HostRules()).gpus
    assert gpu.problems == ()


def test_admin_may_name_the_node(machine: Machine) -> None:
    machine.device("0000:41:00.0", numa_node="-1")
    rules = HostRules(nodes_of=(("0000:41:00.0", 1),))
    (gpu,) = parse_inventory("a", machine.probe("inventory"), rules).gpus
    assert (gpu.node, gpu.problems) == (1, ())


def test_two_gpus_in_one_group_are_no_use_to_anyone(machine: Machine) -> None:
    machine.device("0000:41:00.0")
    machine.device("0000:42:00.0")
    one, other = parse_inventory("a", machine.probe("inventory"), HostRules()).gpus
    assert "0000:42:00.0 (10de:2330, class 030200) is in the IOMMU group of" in one.problems[0]
    assert "0000:41:00.0 (10de:2330, class 030200) is in the IOMMU group of" in other.problems[0]


def test_a_card_with_two_displays_is_one_gpu(machine: Machine) -> None:
    machine.device("0000:41:00.0")
    machine.device("0000:41:00.1")
    (gpu,) = parse_inventory("a", machine.probe("inventory"), HostRules()).gpus
    assert (gpu.address, gpu.problems) == ("0000:41:00.0", ())
    assert gpu.functions == ("0000:41:00.0", "0000:41:00.1")


def test_witness_of_a_healthy_gpu(machine: Machine) -> None:
    fatal = "Undefined 0\nTOTAL_ERR_FATAL 3"
    machine.device("0000:41:00.0", aer_dev_fatal=fatal)
    witness = parse_witness("0000:41:00.0", machine.probe("witness", "0000:41:00.0"))
    assert witness.present
    assert witness.boot_id == "boot-1"
    assert witness.ids == ("10de:2330",)
    assert (witness.link_speed_gts, witness.link_width) == (16.0, 16)
    assert witness.aer == {"fatal": 3}


def test_witness_of_a_gpu_that_fell_off_the_bus(machine: Machine) -> None:
    machine.device("0000:41:00.0", config=b"\xff" * 64)
    witness = parse_witness("0000:41:00.0", machine.probe("witness", "0000:41:00.0"))
    assert not witness.present
    assert "all ones" in witness.note


def test_a_gpu_that_fell_off_the_bus_is_not_in_the_inventory(machine: Machine) -> None:
    """The kernel goes on listing it, with its ids and its driver."""
    machine.device("0000:41:00.0", config=b"\xff" * 64)
    machine.device("0000:42:00.0", group=16)
    (gpu,) = parse_inventory("a", machine.probe("inventory"), HostRules()).gpus
    assert gpu.address == "0000:42:00.0"


def test_witness_of_an_empty_slot(machine: Machine) -> None:
    witness = parse_witness("0000:99:00.0", machine.probe("witness", "0000:99:00.0"))
    assert not witness.present


def test_reset_reaches_every_function_that_can_be(machine: Machine) -> None:
    first = machine.device("0000:41:00.0", reset="")
    machine.device("0000:41:00.1")
    assert machine.probe("reset", "0000:41:00.0")["reset"] == ["0000:41:00.0"]
    assert (first / "reset").read_text() == "1"


def test_reset_of_what_cannot_be_reset_says_what_to_do(machine: Machine) -> None:
    machine.device("0000:41:00.0")
    answer = machine.probe("reset", "0000:41:00.0")
    assert "can be reset" in answer["error"]
    assert answer["remedy"]


@pytest.mark.parametrize(
    "arguments",
    [(), ("explode",), ("witness",), ("witness", "../../etc"), ("binding", "x"), ("reset", "41:0")],
)
def test_nonsense_is_answered_with_an_error(machine: Machine, arguments: tuple[str, ...]) -> None:
    assert machine.probe(*arguments)["error"]


def test_own_addresses(machine: Machine) -> None:
    trie = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 10.1.0.0/16 2 0 2
        |-- 10.1.0.9
           /32 host LOCAL
        |-- 10.1.255.255
           /32 link BROADCAST
     |-- 127.0.0.1
        /32 host LOCAL
"""
    machine.write("proc", "net/fib_trie", trie)
    assert machine.probe("addresses")["addresses"] == ["10.1.0.9"]


def test_binding_of_a_process() -> None:
    answer = probe.binding(str(os.getpid()))
    assert answer["nodes"]
    assert answer["threads"]


def test_holders_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "held"
    path.write_text("x")
    assert probe.holders(str(path))["holders"] == []
    with path.open():
        assert os.getpid() in [each["pid"] for each in probe.holders(str(path))["holders"]]
    assert probe.holders(str(tmp_path / "none"))["holders"] == []
