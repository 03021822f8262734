"""Domains are compared whole with golden files; ``python -m tests.unit.test_host_domain`` writes
them anew, for a reader of the diff to judge."""

from __future__ import annotations

import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from gpuspawner.host.devices import EmulatedMemory
from gpuspawner.host.domain import METADATA_URI, Binding, build_domain, domain_name
from gpuspawner.pool.topology import Cell, Claim, Node
from tests.unit.host_specs import CASES, GOLDEN, UUID, emulated_gpu, lease, real_gpu

SCHEMA = Path("/usr/share/libvirt/schemas/domain.rng")


@pytest.mark.parametrize("name", sorted(CASES))
def test_domain_is_as_in_its_golden_file(name: str) -> None:
    assert CASES[name].xml() == (GOLDEN / f"{name}.xml").read_text()


@pytest.mark.parametrize("name", sorted(CASES))
def test_domain_follows_libvirts_schema(name: str) -> None:
    if not SCHEMA.exists() or shutil.which("xmllint") is None:
        pytest.fail("libvirt's schema or xmllint is missing: run 'tests/run'")
    command = ["xmllint", "--noout", "--relaxng", str(SCHEMA), str(GOLDEN / f"{name}.xml")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


HOSTILE = "</title><name>other</name> & \"'\0\x1b[2J\ud800\nsecond line ]]> <!-- 日本"


def test_hostile_text_stays_text() -> None:
    case = CASES["emulated_lease_tcg"]
    spec = replace(case.spec, title=HOSTILE, labels={HOSTILE: HOSTILE})
    root = ET.fromstring(build_domain(spec, case.binding, case.parts, case.options))
    assert root.findtext("name") == domain_name("0badcafe", "lease", UUID)
    title = root.findtext("title")
    assert title is not None
    assert "\n" not in title
    assert title.startswith("</title><name>other</name> & \"'")
    import json

    element = root.find(f"metadata/{{{METADATA_URI}}}guest")
    assert element is not None
    assert json.loads(element.text or "") == {HOSTILE: HOSTILE}


def test_gpu_that_is_gone_is_not_attached() -> None:
    case = CASES["emulated_lease_tcg"]
    memory = EmulatedMemory("/x", 16, "gone")
    parts = replace(case.parts, gpu_memories={"0000:41:00.0": memory})
    text = build_domain(case.spec, case.binding, parts, case.options)
    assert "ivshmem" not in text
    assert "edu" not in text


def test_emulated_host_runs_on_the_real_cpus_and_node() -> None:
    binding = Binding({}, cpus=(0, 1), single_node=0)
    assert [binding.cpu(number) for number in (0, 1, 2, 97)] == [0, 1, 0, 1]
    assert binding.node(3) == 0


def test_real_host_runs_where_the_claim_says() -> None:
    binding = Binding({})
    assert (binding.cpu(97), binding.node(3)) == (97, 3)


def test_uneven_claim_gets_a_flat_topology() -> None:
    cells = (Cell(0, ((0, 8), (1,)), 512),)
    case = CASES["one_gpu_kvm"]
    spec = lease((), cells)
    binding = replace(case.binding, nodes={0: Node(0, ((0, 8), (1,)), 1024)})
    root = ET.fromstring(build_domain(spec, binding, case.parts, case.options))
    topology = root.find("cpu/topology")
    assert topology is not None
    assert topology.attrib == {"sockets": "1", "dies": "1", "cores": "3", "threads": "1"}


def test_memory_that_does_not_fill_its_pages_is_refused() -> None:
    case = CASES["two_gpus_kvm"]
    spec = lease((), (Cell(0, ((4, 68),), 1536),))
    with pytest.raises(ValueError, match="1536 MiB of node 0 are no whole number"):
        build_domain(spec, case.binding, case.parts, case.options)


def test_what_a_guest_holds_of_the_pages_is_read_back() -> None:
    root = ET.fromstring(CASES["two_gpus_kvm"].xml())
    element = root.find(f"metadata/{{{METADATA_URI}}}guest")
    assert element is not None
    assert (element.get("pages"), element.get("memory")) == ("1048576", "0:98304")


def test_the_service_vm_takes_no_hugepages() -> None:
    case = CASES["service_vm_tcg"]
    options = replace(case.options, hugepages_kib=1048576)
    text = build_domain(case.spec, case.binding, case.parts, options)
    assert "hugepages" not in text


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (Cell(7, ((4, 68),), 1024), "no node 7"),
        (Cell(1, ((4, 68),), 1024), "Node 1 has no core of the CPUs 4, 68"),
        (Cell(0, ((4,),), 1024), "Node 0 has no core of the CPUs 4"),
        (Cell(0, ((4, 68),), 1 << 20), "524288 MiB in pages of 1024 MiB, and 1048576 MiB"),
    ],
)
def test_what_the_host_lacks_is_refused(cell: Cell, said: str) -> None:
    case = CASES["two_gpus_kvm"]
    with pytest.raises(ValueError, match=said):
        build_domain(lease((), (cell,)), case.binding, case.parts, case.options)


def test_more_bars_than_the_window_holds_are_refused() -> None:
    case = CASES["four_h100_two_cells_1g_pages_kvm"]
    options = replace(case.options, mmio_window_mib=131072)
    with pytest.raises(ValueError, match=r"BARs of 4 GPUs take 524480 MiB, .* of 131072 MiB"):
        build_domain(case.spec, case.binding, case.parts, options)


def test_claim_without_cpus_is_refused() -> None:
    case = CASES["one_gpu_kvm"]
    spec = replace(case.spec, claim=Claim("gpu1", (), ()))
    with pytest.raises(ValueError, match="no CPUs"):
        build_domain(spec, case.binding, case.parts, case.options)


def test_gpu_outside_its_claim_is_refused() -> None:
    case = CASES["two_cells_kvm"]
    spec = lease((real_gpu("17", 5),), case.spec.claim.cells)
    with pytest.raises(ValueError, match="node 5"):
        build_domain(spec, case.binding, case.parts, case.options)


@pytest.mark.parametrize("emulated", [True, False])
def test_more_gpus_than_slots_are_refused(emulated: bool) -> None:
    case = CASES["emulated_lease_tcg"]
    make = emulated_gpu if emulated else real_gpu
    gpus = tuple(make(f"{bus:02x}", 1) for bus in range(0x40, 0x50))
    memories = {gpu.address: EmulatedMemory("/x", 16) for gpu in gpus}
    spec = lease(gpus, case.spec.claim.cells)
    with pytest.raises(ValueError, match="14"):
        build_domain(spec, case.binding, replace(case.parts, gpu_memories=memories), case.options)


def write_golden_files() -> None:
    """Write every golden file from the code as it is."""
    for name, case in CASES.items():
        (GOLDEN / f"{name}.xml").write_text(case.xml())


if __name__ == "__main__":
    write_golden_files()
