"""A host's hardware by libvirt's word alone: capabilities and node devices become an inventory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import libvirt
import pytest

from gpuspawner.host.api import HostError
from gpuspawner.host.inspection import Daemon, Inspection
from gpuspawner.host.inventory import HostRules, kept_back, parse_inventory
from gpuspawner.host.libvirt_host import LibvirtHost
from gpuspawner.host.nodedev import Heard, listen, parse_hardware
from gpuspawner.host.surveying import inspect_by_libvirt, survey_by_libvirt
from gpuspawner.pool.topology import Inventory

GPU = "0000:41:00.0"
NO_SHELL = HostError("Host a has no shell.", "Give it one.")


def cell(
    number: int,
    cores: Sequence[Sequence[int]],
    memory_gib: int,
    distances: dict[int, int],
    pages_1g: int = 0,
) -> str:
    """A node as libvirt 9.0 writes it."""
    cpus = "".join(
        f"<cpu id='{cpu}' socket_id='{number}' die_id='0' core_id='{index}' "
        f"siblings='{','.join(map(str, core))}'/>"
        for index, core in enumerate(cores)
        for cpu in core
    )
    memory = f"<memory unit='KiB'>{memory_gib << 20}</memory>" if memory_gib else ""
    siblings = "".join(f"<sibling id='{to}' value='{far}'/>" for to, far in distances.items())
    return f"""<cell id='{number}'>{memory}
      <pages unit='KiB' size='4'>{(memory_gib - pages_1g) << 18}</pages>
      <pages unit='KiB' size='2048'>0</pages>
      <pages unit='KiB' size='1048576'>{pages_1g}</pages>
      <distances>{siblings}</distances><cpus num='{sum(map(len, cores))}'>{cpus}</cpus></cell>"""


def capabilities(*cells: str, iommu: str = "yes") -> str:
    return f"""<capabilities><host>
      <cpu><arch>x86_64</arch><model>EPYC-Milan</model><vendor>AMD</vendor>
        <maxphysaddr mode='emulate' bits='48'/><feature name='pdpe1gb'/></cpu>
      <iommu support='{iommu}'/>
      <topology><cells num='{len(cells)}'>{"".join(cells)}</cells></topology></host>
    </capabilities>"""


def device(address: str, *, parent: str = "computer", **more: Any) -> str:
    """A PCI function as libvirt 9.0 writes it; a GPU bound to vfio-pci unless ``more`` says
    otherwise. ``None`` leaves an element out."""
    domain, bus, rest = address.split(":")
    slot, function = rest.split(".")
    said: dict[str, Any] = {
        "class": "0x030200", "product": "0x2330", "vendor": "0x10de", "group": 15, "node": 0,
        "driver": "vfio-pci", "sta": (32, 16), "cap": (32, 16), "also": "", **more,
    }  # fmt: skip
    parts = [
        f"<class>{said['class']}</class>" if said["class"] else "",
        f"<domain>{int(domain, 16)}</domain><bus>{int(bus, 16)}</bus>",
        f"<slot>{int(slot, 16)}</slot><function>{function}</function>",
        f"<product id='{said['product']}'>GH100</product>",
        f"<vendor id='{said['vendor']}'>NVIDIA Corporation</vendor>",
        said["also"],
    ]
    if said["group"] is not None:
        member = f"<address domain='0x{domain}' bus='0x{bus}' slot='0x{slot}' function='0x0'/>"
        parts.append(f"<iommuGroup number='{said['group']}'>{member}</iommuGroup>")
    if said["node"] is not None:
        parts.append(f"<numa node='{said['node']}'/>")
    links = "".join(
        f"<link validity='{which}' port='0' speed='{said[which][0]}' width='{said[which][1]}'/>"
        for which in ("cap", "sta")
        if said[which]
    )
    driver = f"<driver><name>{said['driver']}</name></driver>" if said["driver"] else ""
    return f"""<device><name>{name(address)}</name><parent>{parent}</parent>{driver}
      <capability type='pci'>{"".join(parts)}<pci-express>{links}</pci-express></capability>
      </device>"""


def name(address: str) -> str:
    return "pci_" + address.replace(":", "_").replace(".", "_")


ONE_NODE = capabilities(cell(0, ((0, 2), (1, 3)), 64, {0: 10}))


def heard(*devices: str, text: str = ONE_NODE, **more: Any) -> Heard:
    """What libvirt says of a host with these devices: 8 GiB of each node and all hugepages are
    free, and all CPUs are online."""
    names = [each.split("<name>")[1].split("</name>")[0] for each in devices]
    free: dict[str, Any] = {
        "online": range(16),
        "free_kib": dict.fromkeys(range(16), 8 << 20),
        "free_pages": {node: {2048: 0, 1048576: 30} for node in range(16)},
        **more,
    }
    return Heard(text, dict(zip(names, devices, strict=True)), **free)


def survey(said: Heard, rules: HostRules | None = None) -> Inventory:
    return parse_inventory("a", parse_hardware(said), rules or HostRules())


async def look(said: Heard) -> Inspection:
    """As the host driver does it."""

    async def ask() -> Heard:
        return said

    rules = HostRules()
    inventory, answer = await survey_by_libvirt("a", ask, rules)
    return inspect_by_libvirt(inventory, answer, Daemon(), NO_SHELL, rules=rules, kvm=True)


def test_two_sockets_with_hugepages() -> None:
    text = capabilities(
        cell(0, ((0, 4), (1, 5)), 64, {0: 10, 1: 21}, 32),
        cell(1, ((2, 6), (3, 7)), 64, {0: 21, 1: 10}, 32),
    )
    inventory = survey(heard(device(GPU, node=1), text=text))
    assert [node.cores for node in inventory.nodes] == [((0, 4), (1, 5)), ((2, 6), (3, 7))]
    assert inventory.node(1).distances == ((0, 21),)
    assert inventory.system_cores == ((0, 4), (2, 6))
    assert inventory.hugepages_kib == 1048576
    assert [node.memory_mib for node in inventory.nodes] == [30 * 1024] * 2  # what is free
    (gpu,) = inventory.gpus
    assert (gpu.address, gpu.ids, gpu.node, gpu.group) == (GPU, ("10de:2330",), 1, 15)
    assert (gpu.link_speed_gts, gpu.link_width, gpu.kind) == (32.0, 16, "nvidia")
    assert gpu.problems == ()


def test_nodes_with_gaps_without_cpus_and_without_memory() -> None:
    far = {0: {0: 10, 2: 20, 8: 30}, 2: {0: 20, 2: 10, 8: 40}, 8: {0: 30, 2: 40, 8: 10}}
    text = capabilities(
        cell(8, ((2,), (3,)), 0, far[8]),
        cell(0, ((0,), (1,)), 64, far[0]),
        cell(2, (), 128, far[2]),
    )
    inventory = survey(heard(device(GPU, node=2), text=text, online={0, 2, 3}))
    assert [(node.id, node.cores) for node in inventory.nodes] == [
        (0, ((0,),)), (2, ()), (8, ((2,), (3,))),
    ]  # fmt: skip
    assert inventory.node(2).distances == ((0, 20), (8, 40))
    assert [node.memory_mib for node in inventory.nodes] == [65536, 131072, 0]
    assert (inventory.gpus[0].node, inventory.gpus[0].problems) == (2, ())


def test_distances_that_are_not_all_there_are_not_made_up() -> None:
    text = capabilities(cell(0, ((0,),), 64, {0: 10}), cell(1, ((1,),), 64, {}))
    assert [node.distances for node in survey(heard(text=text)).nodes] == [(), ()]


@pytest.mark.parametrize("domain", ["0001", "10000"])
def test_other_pci_domains(domain: str) -> None:
    address = f"{domain}:41:00.0"
    (gpu,) = survey(heard(device(address))).gpus
    assert (gpu.address, gpu.functions, gpu.problems) == (address, (address,), ())


TWO_NODES = capabilities(cell(0, ((0,),), 64, {}), cell(1, ((1,),), 64, {}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"node": -1}, "which NUMA node"),
        ({"node": None}, "which NUMA node"),
        ({"group": None}, "no IOMMU group"),
        ({"driver": ""}, "bound to no driver"),
        ({"driver": "nouveau"}, "softdep nouveau pre: vfio-pci"),
        ({"also": "<capability type='phys_function'><address/></capability>"}, "virtual function"),
        ({"also": "<capability type='virt_functions' maxCount='16'><address/></capability>"},
         "1 virtual functions"),
        ({"also": "<capability type='virt_functions' maxCount='16'/>"}, None),
        ({"driver": "nvgrace_gpu_vfio_pci"}, None),
    ],
)  # fmt: skip
def test_oddities_are_problems(settings: dict[str, Any], said: str | None) -> None:
    (gpu,) = survey(heard(device(GPU, **settings), text=TWO_NODES)).gpus
    assert [said in problem for problem in gpu.problems if said] == [True] * bool(said)
    assert len(gpu.problems) == bool(said)


def test_a_gpu_has_all_of_its_group_and_the_port_above_it() -> None:
    port = "0000:40:01.0"
    said = heard(
        device(port, vendor="0x8086", driver="pcieport", sta=(16, 8), **{"class": "0x060400"}),
        device(GPU, parent=name(port), sta=None, cap=None),
        device("0000:41:00.1", parent=name(port), **{"class": "0x040300"}),
    )
    (gpu,) = survey(said).gpus
    assert gpu.functions == (GPU, "0000:41:00.1")
    assert (gpu.link_speed_gts, gpu.link_width) == (16.0, 8)  # its port's: it shows none itself
    assert parse_hardware(said)["functions"][1]["port"] == port


BROKEN = (
    "<device><name>pci_0000_42_00_0</name><capability",
    "<device><name>pci_0000_42_00_0</name><capability type='net'/></device>",
    device("0000:42:00.0", vendor="NVIDIA"),
    device("0000:42:00.0", group="many"),
    device("0000:42:00.0", sta=("fast", 16)),
    device("0000:42:00.0", **{"class": ""}),
)


@pytest.mark.parametrize("broken", BROKEN)
async def test_one_odd_device_hides_no_other(broken: str) -> None:
    found = await look(heard(broken, device(GPU), unread={"0000:43:00.0": "it is gone"}))
    assert [gpu.address for gpu in found.gpus] == [GPU]
    told = [each.text for each in found.findings if "could not be read" in each.text]
    assert ["0000:42:00.0" in text for text in told] == [True, False]
    assert "0000:43:00.0 could not be read and is left out: it is gone" in told[1]


async def test_what_libvirt_does_not_know_is_said_and_not_guessed() -> None:
    found = await look(heard(device(GPU)))
    first, *others = found.findings
    assert first.level == "error"
    assert first.text.startswith("Host a has no shell. Only libvirt was asked")
    for unknown in ("BARs", "reset", "swap", "transparent hugepages", "clock"):
        assert unknown in first.text
    assert first.remedy == "Give it one."
    assert others == []
    (gpu,) = found.gpus
    assert (gpu.bars_mib, gpu.reset_methods, gpu.link) == ((), (), (32.0, 16))
    assert found.inventory.mmio_window_mib == 0
    assert dict(found.machine) == {
        "CPU": "EPYC-Milan", "physical address bits": "48", "IOMMU": "on",
    }  # fmt: skip
    assert found.nodes[0].free_mib == 8192


async def test_memory_that_libvirt_cannot_count_is_not_zero() -> None:
    said = heard(free_kib={}, free_pages={}, unread_nodes={0: "no such file"})
    found = await look(said)
    assert (found.nodes[0].free_mib, found.nodes[0].hugepages) == (None, ())
    assert "free of node 0's memory could not be read: no such file" in found.findings[1].text


async def test_an_iommu_that_is_off_is_found() -> None:
    text = capabilities(cell(0, ((0,),), 64, {}), iommu="no")
    found = await look(heard(device(GPU, group=None), text=text))
    assert "amd_iommu=on" in found.findings[1].remedy
    assert ("IOMMU", "off") in found.machine


def test_nothing_of_a_host_without_a_shell_is_given_out() -> None:
    inventory = kept_back(survey(heard(device(GPU))))
    assert [node.usable_mib for node in inventory.nodes] == [0]
    assert "no shell" in inventory.gpus[0].problems[0]


async def test_capabilities_that_are_no_xml_are_an_error_with_a_remedy() -> None:
    with pytest.raises(HostError, match="capabilities are no XML") as caught:
        await look(Heard("<capabilities"))
    assert caught.value.remedy


# Debian 12's libvirt of a cloud machine: no IOMMU, no node, no driver of a host bridge.
RECORDED = """
<device>
  <name>pci_0000_00_00_0</name>
  <path>/sys/devices/pci0000:00/0000:00:00.0</path>
  <parent>computer</parent>
  <capability type='pci'>
    <class>0x060000</class>
    <domain>0</domain>
    <bus>0</bus>
    <slot>0</slot>
    <function>0</function>
    <product id='0x0d57'/>
    <vendor id='0x8086'/>
    <pci-express/>
  </capability>
</device>
"""


def test_a_recorded_device() -> None:
    (function,) = parse_hardware(heard(RECORDED))["functions"]
    assert (function["address"], function["id"], function["class"]) == (
        "0000:00:00.0", "8086:0d57", "060000",
    )  # fmt: skip
    assert (function["node"], function["group"], function["driver"]) == (-1, -1, "")


# -- libvirt's own words, from its test driver ----------------------------------------------------


@pytest.fixture
def quiet() -> None:
    """libvirt prints its errors unless it has somebody to tell."""
    libvirt.registerErrorHandler(lambda _context, _error: None, None)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """Of a libvirt that reads these devices and writes them anew."""
    port = "0000:40:01.0"
    node = tmp_path / "node.xml"
    bridge = device(port, vendor="0x8086", **{"class": "0x060400"})
    node.write_text(f"<node>{bridge}{device('0001:41:00.0', parent=name(port), group=None)}</node>")
    return f"test://{node}"


@pytest.fixture
def connection(uri: str, quiet: None) -> Iterator[Any]:
    connection = libvirt.open(uri)
    yield connection
    connection.close()


def test_devices_as_libvirt_writes_them(connection: Any) -> None:
    port, gpu = parse_hardware(listen(connection))["functions"]
    assert (port["address"], port["group"]) == ("0000:40:01.0", 15)
    assert (gpu["address"], gpu["id"], gpu["group"]) == ("0001:41:00.0", "10de:2330", -1)
    assert (gpu["node"], gpu["port"], gpu["link_able"]) == (0, "0000:40:01.0", (32.0, 16))


def test_a_device_that_vanishes_while_one_looks_is_told(connection: Any) -> None:
    class Vanishing:
        def __init__(self, device: Any) -> None:
            self.device = device

        def name(self) -> str:
            return str(self.device.name())

        def XMLDesc(self, _flags: int) -> str:
            if "41" in self.name():
                raise libvirt.libvirtError("it was unplugged")
            return str(self.device.XMLDesc())

    class Asked:
        def listAllDevices(self, flags: int) -> list[Vanishing]:
            return [Vanishing(each) for each in connection.listAllDevices(flags)]

        def __getattr__(self, method: str) -> Any:
            return getattr(connection, method)

    answer = parse_hardware(listen(Asked()))
    assert [each["address"] for each in answer["functions"]] == ["0000:40:01.0"]
    assert answer["unread"] == {"0001:41:00.0": "it was unplugged"}


def test_nodes_as_libvirt_writes_them(quiet: None) -> None:
    """libvirt's test driver has two nodes, some CPUs that are offline, and cannot say what of its
    memory is free."""
    connection = libvirt.open("test:///default")
    answer = parse_hardware(listen(connection))
    connection.close()
    first, second = answer["nodes"]
    assert (first["cores"], first["memory_kib"]) == ([(0,), (2,), (4,)], 2097152)
    assert (second["cores"], second["memory_kib"]) == ([], 4194304)
    assert first["free_kib"] is None
    assert sorted(answer["unread_nodes"]) == [0, 1]


@pytest.mark.parametrize(
    ("shell", "said"), [(None, "has no shell"), (("false",), "the probe 'boot' gave no answer")]
)
async def test_a_host_is_shown_without_its_shell(
    uri: str, shell: tuple[str, ...] | None, said: str
) -> None:
    """One whose shell fails does not open, and is shown all the same."""
    host = LibvirtHost("a", instance="0badcafe", uri=uri, shell=shell)
    with contextlib.nullcontext() if shell is None else pytest.raises(HostError):
        await host.open(lambda _uuid: None)
    found = await host.inspect()
    await host.close()
    (gpu,) = found.inventory.gpus
    assert gpu.address == "0001:41:00.0"
    assert "no shell" in gpu.problems[-1]
    assert said in found.findings[0].text
    assert found.findings[0].remedy
