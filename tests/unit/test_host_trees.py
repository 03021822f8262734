"""Trees of whole servers: what of them gets into the pool, and what an admin is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.host.guests import offers_efi
from gpuspawner.host.inspection import Daemon, Finding, Seen, inspect_real
from gpuspawner.host.inventory import GpuRule, HostRules, parse_inventory
from gpuspawner.pool.topology import Inventory
from tests.unit.sysfs_trees import ASSIGNED, GIB, H100_BARS, UNPLACED, Tree, hgx, link, workstation

GPU = "0000:41:00.0"
OFF = HostRules(hugepages="off")


def survey(tree: Tree, rules: HostRules | None = None) -> Inventory:
    return parse_inventory("a", tree.probe("inventory"), rules or HostRules())


def findings(tree: Tree, rules: HostRules | None = None, **seen: Any) -> list[Finding]:
    rules = rules or HostRules()
    answer = tree.probe("inventory")
    inventory = parse_inventory("a", answer, rules)
    given = Seen(tree.probe("machine"), rules=rules, rest=answer, **seen)
    return list(inspect_real(inventory, given).findings)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """One node, nothing in it yet."""
    tree = Tree(tmp_path)
    tree.node(0, "0-3", 64)
    tree.cores([(0, 2), (1, 3)])
    return tree


def test_two_sockets_with_eight_gpus(tmp_path: Path) -> None:
    inventory = survey(hgx(tmp_path), HostRules(gpus=(GpuRule("10de", model="H100"),)))
    assert [gpu.node for gpu in inventory.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [gpu.address for gpu in inventory.gpus][:3] == [
        "0000:13:00.0", "0000:14:00.0", "0000:43:00.0",
    ]  # fmt: skip
    assert all(gpu.problems == () for gpu in inventory.gpus)
    assert len({gpu.group for gpu in inventory.gpus}) == 8
    assert inventory.gpus[0].mmio_mib == (128 * GIB >> 20) + 16 + 32
    assert inventory.mmio_window_mib == 8 << 20
    assert inventory.hugepages_kib == 1048576
    assert [node.usable_mib for node in inventory.nodes] == [896 * 1024] * 2
    assert inventory.nodes[1].cores[0] == (8, 24)
    assert inventory.system_cores == ((0, 16), (8, 24))


def test_a_whole_server_has_nothing_to_put_right(tmp_path: Path) -> None:
    assert findings(hgx(tmp_path)) == []


def test_link_and_bars_as_the_admin_sees_them(tmp_path: Path) -> None:
    tree = hgx(tmp_path)
    answer = tree.probe("inventory")
    seen = Seen(tree.probe("machine"), rest=answer)
    inspection = inspect_real(parse_inventory("a", answer, HostRules()), seen)
    gpu = inspection.gpus[0]
    assert (gpu.link, gpu.able, gpu.port_link) == ((32.0, 16), (32.0, 16), (32.0, 16))
    assert gpu.port == "0000:12:00.0"
    assert gpu.bars_mib == (16, 131072, 32)
    assert gpu.reset_methods == ("flr", "bus")
    assert inspection.nodes[0].hugepages == ((2048, 0, 0), (1048576, 896, 896))
    assert dict(inspection.machine)["IOMMU"] == "Intel VT-d (1 units)"


def test_a_workstation_that_uses_its_gpu_itself(tmp_path: Path) -> None:
    tree = workstation(tmp_path)
    inventory = survey(tree)
    (gpu,) = inventory.gpus
    assert gpu.functions == tuple(f"0000:01:00.{number}" for number in range(4))
    assert gpu.node == 0  # there is no other
    assert inventory.nodes[0].cores == (
        (0, 1), (2, 3), (4, 5), (6, 7), (8,), (9,), (10,), (11,),
    )  # fmt: skip
    told = "\n".join(gpu.problems)
    assert "the screen that the host booted with" in told
    assert "softdep nouveau pre: vfio-pci" in told
    assert "0000:01:00.3 is bound to no driver" in told
    assert len(gpu.problems) == 5


def test_nodes_with_gaps_without_cpus_and_without_memory(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.node(0, "0-1", 64, (10, 20, 30))
    tree.node(2, "", 128, (20, 10, 40))
    tree.node(8, "2-3", 0, (30, 40, 10))
    tree.cores([(0,), (1,), (2,), (3,)])
    tree.offline(1)
    tree.device("0000:40:01.0", GPU, numa_node="2", group=5)
    inventory = survey(tree)
    assert [(node.id, node.cores) for node in inventory.nodes] == [
        (0, ((0,),)), (2, ()), (8, ((2,), (3,))),
    ]  # fmt: skip
    assert inventory.node(2).distances == ((0, 20), (8, 40))
    assert [node.memory_mib for node in inventory.nodes] == [65536, 131072, 0]
    assert inventory.gpus[0].node == 2
    assert inventory.gpus[0].problems == ()


def test_a_thread_that_is_offline_leaves_its_core(tree: Tree) -> None:
    tree.offline(2)
    assert survey(tree).nodes[0].cores == ((0,), (1, 3))


@pytest.mark.parametrize("domain", ["0001", "10000"])
def test_other_pci_domains(tree: Tree, domain: str) -> None:
    address = f"{domain}:41:00.0"
    tree.device(f"{domain}:40:01.0", address, group=5)
    (gpu,) = survey(tree).gpus
    assert (gpu.address, gpu.functions, gpu.problems) == (address, (address,), ())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"class": "0x010802", "vendor": "0x144d", "driver": "nvme"}, "switch ACS on"),
        ({"class": "0x010802", "vendor": "0x144d"}, "switch ACS on"),
        ({"class": "0x030200"}, "switch ACS on"),
        ({"class": "0x040300"}, None),  # the board's own sound behind the board's own bridge
        ({"class": "0x060400", "driver": "pcieport"}, None),
    ],
)
def test_foreign_members_of_a_group(tree: Tree, more: dict[str, Any], said: str | None) -> None:
    tree.device("0000:40:01.0", GPU, group=5)
    tree.device("0000:40:02.0", "0000:42:00.0", group=5, **more)
    gpu = next(gpu for gpu in survey(tree).gpus if gpu.address == GPU)
    assert (said is None) == (gpu.problems == ())
    if said is not None:
        assert said in gpu.problems[0]


@pytest.mark.parametrize(
    ("bits", "flags", "bars", "said"),
    [
        (39, "pdpe1gb", H100_BARS, "a window of 64 GiB"),
        (46, "", H100_BARS, "a window of 128 GiB"),
        (46, "pdpe1gb", H100_BARS, None),
        (46, "pdpe1gb", ((64 * GIB, ASSIGNED | UNPLACED),), "Above 4G decoding"),
    ],
)
def test_windows_for_bars(
    tree: Tree, bits: int, flags: str, bars: tuple[tuple[int, int], ...], said: str | None
) -> None:
    tree.cpu(bits=bits, flags=flags)
    tree.device("0000:40:01.0", GPU, group=5, bars=bars)
    (gpu,) = survey(tree).gpus
    assert [said in problem for problem in gpu.problems if said] == [True] * bool(said)


def test_shares_of_a_gpu_are_refused(tree: Tree) -> None:
    base = tree.device("0000:40:01.0", GPU, group=5)
    (base / "physfn").symlink_to("../0000:42:00.0")
    tree.device("0000:40:02.0", "0000:42:00.0", group=6, sriov_numvfs="4")
    first, second = survey(tree).gpus
    assert "virtual function" in first.problems[0]
    assert "4 virtual functions" in second.problems[0]


def test_one_odd_device_hides_no_other(tree: Tree) -> None:
    garbage: dict[str, Any] = {
        "vendor": "?", "device": b"\xff\xfe\x00", "class": "0x", "numa_node": "many",
        "resource": "zero\n0x1 0x2\n\x00", "current_link_width": "-",
        "current_link_speed": "9.9.9.9 furlongs", "max_link_width": "255",
    }  # fmt: skip
    tree.device("0000:40:01.0", GPU, group=5)
    tree.device("0000:40:02.0", "0000:42:00.0", group="none", **garbage)
    (tree.sys / "bus/pci/devices/0000:43:00.0").symlink_to("nowhere")
    (gpu,) = survey(tree).gpus
    assert (gpu.address, gpu.problems) == (GPU, ())


@pytest.mark.parametrize(
    ("device", "port", "level", "said"),
    [
        (link((32, 16), (32, 16)), link((32, 16), (32, 16)), "", ""),
        (link((32, 8), (32, 16)), link((32, 8), (32, 16)), "warning", "8 of 16 PCIe lanes"),
        (link((16, 16), (32, 16)), link((16, 16), (16, 16)), "", ""),  # the slot is of its time
        (link((2.5, 16), (32, 16)), link((2.5, 16), (32, 16)), "info", "2.5 of 32 GT/s"),
        # Only the port has a link: as with devices of QEMU.
        (link((0, 0), (0, 0)), link((16, 16), (16, 16)), "", ""),
    ],
)
def test_links(tree: Tree, device: Any, port: Any, level: str, said: str) -> None:
    tree.port("0000:40:01.0", group=4, **port)
    tree.device("0000:40:01.0", GPU, group=5, **device)
    told = [each for each in findings(tree) if "PCIe lanes" in each.text or "GT/s" in each.text]
    assert {each.level for each in told} == ({level} if level else set())
    assert all(said in each.text for each in told)


def _swap(tree: Tree) -> None:
    tree.write("proc", "swaps", "Filename\n/dev/sda2 partition 1 0 -2")


def _no_vfio(tree: Tree) -> None:
    (tree.sys / "bus/pci/drivers/vfio-pci").rmdir()


def _no_kvm(tree: Tree) -> None:
    (tree.sys / "class/misc/kvm").rmdir()


@pytest.mark.parametrize(
    ("change", "level", "said", "remedy"),
    [
        (_swap, "warning", "/dev/sda2", "swapoff"),
        (_no_vfio, "error", "vfio-pci is not loaded", "modprobe vfio-pci"),
        (_no_kvm, "error", "no KVM", "VT-x"),
        (lambda tree: tree.write("proc", "sys/net/bridge/bridge-nf-call-iptables", "0"),
         "error", "bridged traffic", "br_netfilter"),
        (lambda tree: tree.write("sys", "kernel/mm/transparent_hugepage/enabled",
                                 "always madvise [never]"), "warning", "4 KiB", "madvise"),
    ],
)  # fmt: skip
def test_what_the_machine_lacks(
    tree: Tree, change: Any, level: str, said: str, remedy: str
) -> None:
    tree.device("0000:40:01.0", GPU, group=5)
    off = HostRules(hugepages="off")
    assert findings(tree, off) == []
    change(tree)
    (found,) = findings(tree, off)
    assert (found.level, said in found.text, remedy in found.remedy) == (level, True, True)


@pytest.mark.parametrize(
    ("rules", "seen", "said"),
    [
        (HostRules(hugepages="1G"), {}, "no hugepages of 1 GiB"),
        (HostRules(), {}, "ordinary pages"),
        (OFF, {"daemon": Daemon(libvirt=(8, 0, 0))}, "libvirt 8.0.0 is too old"),
        (OFF, {"daemon": Daemon(qemu=(5, 2, 0))}, "QEMU 5.2.0 is too old"),
        (OFF, {"daemon": Daemon(place="p at /srv/p", free_mib=3)}, "pool p at /srv/p is full (3 M"),
        (OFF, {"daemon": Daemon(place="p at /srv/p", free_mib=1024)}, None),
        (HostRules(hugepages="off"), {"off_s": -90.0}, "90 s slow"),
        (HostRules(hugepages="off", reserve_mib=1 << 20), {}, "is left for guests"),
    ],
)
def test_what_else_is_found(
    tree: Tree, rules: HostRules, seen: dict[str, Any], said: str | None
) -> None:
    tree.device("0000:40:01.0", GPU, group=5)
    told = [each.text for each in findings(tree, rules, **seen)]
    assert [said in text for text in told if said] == [True] * bool(said)
    assert len(told) == bool(said)


def test_iommu_d3cold_and_reset(tree: Tree) -> None:
    tree.device("0000:40:01.0", GPU, d3cold_allowed="1", reset=None, reset_method=None)
    told = {each.text.split(":")[0]: each for each in findings(tree, HostRules(hugepages="off"))}
    text = "\n".join(each.text for each in told.values())
    assert "The IOMMU is off" in text
    assert "D3cold" in text
    assert "cannot be reset" in text
    assert len(told) == 3
    assert all(each.remedy for each in told.values())


def test_pages_in_other_hands_and_more_gpus_than_a_window_holds(tmp_path: Path) -> None:
    tree = hgx(tmp_path)
    tree.node(0, "0-7,16-23", 1024, (10, 21), pages={1048576: (896, 700)})
    tree.cpu(bits=42)
    first, second = findings(tree)
    assert "196 of node 0's 896 pages of 1 GiB are in other hands" in first.text
    assert "all 8 GPUs take 1048960 MiB, and one guest has a window of 512 GiB" in second.text


@pytest.mark.parametrize(
    ("gpus", "bar_gib", "firmware", "efi", "level"),
    [
        (1, 64, "bios", False, "error"),
        (1, 64, "bios", True, None),
        (1, 64, "bios", None, None),
        (1, 8, "bios", False, None),
        (3, 8, "bios", False, "warning"),  # one alone fits into QEMU's own window
        (1, 8, "efi", False, "error"),
    ],
)
def test_uefi_is_missed_where_it_is_needed(
    tree: Tree, gpus: int, bar_gib: int, firmware: str, efi: bool | None, level: str | None
) -> None:
    for number in range(1, gpus + 1):
        tree.device(
            f"0000:40:0{number}.0", f"0000:4{number}:00.0", group=number,
            bars=((bar_gib * GIB, ASSIGNED),),
        )  # fmt: skip
    told = findings(tree, OFF, daemon=Daemon(efi=efi), firmware=firmware)
    assert [each.level for each in told] == [level] * bool(level)
    assert all("OVMF" in each.text and "apt install ovmf" in each.remedy for each in told)


@pytest.mark.parametrize(
    ("values", "offers"),
    [
        ("<enum name='firmware'/>", False),  # Debian 12 without the package ovmf
        ("<enum name='firmware'><value>bios</value></enum>", False),
        ("<enum name='firmware'><value>bios</value><value>efi</value></enum>", True),
        ("<loader supported='yes'/>", None),
    ],
)
def test_libvirt_says_whether_it_has_uefi(values: str, offers: bool | None) -> None:
    text = f"<domainCapabilities><os supported='yes'>{values}</os></domainCapabilities>"
    assert offers_efi(text) is offers


def test_every_finding_says_what_to_do(tmp_path: Path) -> None:
    tree = workstation(tmp_path)
    _swap(tree)
    _no_kvm(tree)
    found = findings(tree)
    assert found
    assert all(dataclasses.astuple(each)[2] for each in found)
