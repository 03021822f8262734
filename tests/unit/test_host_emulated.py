"""Declared hosts: numbering, faults, and errors that name what is wrong."""

from __future__ import annotations

import json

import pytest

from gpuspawner.host.emulated import (
    IDENTITY_BYTES,
    DeclarationError,
    Emulated,
    identity_page,
    is_identity_page,
)

TWO_NODES = """
v: 1
threads_per_core: 2
system_cores: 1
nodes:
  - {id: 0, cores: 2, memory_mib: 4096, reserve_mib: 512, distances: {1: 21}}
  - {id: 1, cores: 2, memory_mib: 4096, reserve_mib: 512, distances: {0: 21}}
gpus:
  - {address: "0000:C1:00.0", node: 1, fault: gone}
  - {address: "0000:41:00.0", node: 0, model: Emulated GPU 32M, memory_mib: 32}
"""


def test_cores_are_numbered_as_linux_does() -> None:
    host = Emulated.parse(TWO_NODES)
    assert [node.cores for node in host.nodes] == [((0, 4), (1, 5)), ((2, 6), (3, 7))]
    assert host.system_cores == ((0, 4), (2, 6))
    assert host.nodes[1].usable_mib == 3584
    assert host.nodes[0].distances == ((1, 21),)


def test_gpus_are_sorted_and_have_two_functions() -> None:
    host = Emulated.parse(TWO_NODES)
    assert [gpu.address for gpu in host.gpus] == ["0000:41:00.0", "0000:c1:00.0"]
    gpu = host.gpus[0]
    assert gpu.functions == ("0000:41:00.0", "0000:41:00.1")
    assert gpu.ids == ("1234:11e8", "1af4:1110")
    assert gpu.emulated
    assert host.fault("0000:c1:00.0") == "gone"
    assert host.fault("0000:41:00.0") == "none"


def test_cores_may_be_listed() -> None:
    text = "nodes: [{id: 3, cores: [[0, 128], [7]], memory_mib: 100}]"
    assert Emulated.parse(text).nodes[0].cores == ((0, 128), (7,))


def test_faults_are_replaced_as_a_whole() -> None:
    host = Emulated.parse(TWO_NODES).with_faults({"0000:41:00.0": "dma_mask"})
    assert host.faults == {"0000:41:00.0": "dma_mask"}


@pytest.mark.parametrize(
    ("faults", "said"),
    [({"0000:99:00.0": "gone"}, "no GPU 0000:99:00.0"), ({"0000:41:00.0": "fire"}, "no fault")],
)
def test_unknown_faults_are_refused(faults: dict[str, str], said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        Emulated.parse(TWO_NODES).with_faults(faults)


NODE = "{id: 0, cores: 2, memory_mib: 100}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: [", "no YAML"),
        ("", "the document"),
        ("[1, 2]", "the document"),
        ("nodes: []", "nodes"),
        ("v: 2\nnodes: [{id: 0, cores: 1, memory_mib: 1}]", "v: "),
        ("nodes: [{id: 0, cores: 2}]", r"nodes\.0\.memory_mib"),
        ("nodes: [{id: 0, cores: 2, memory_mib: 100, colour: red}]", r"nodes\.0\.colour"),
        ("nodes: [{id: 0, cores: 0, memory_mib: 100}]", "node 0 has no cores"),
        ("nodes: [{id: 0, cores: 1, memory_mib: 100, reserve_mib: 100}]", "reserves all"),
        (f"nodes: [{NODE}, {NODE}]", "node 0 is declared twice"),
        (f"nodes: [{NODE}, {{id: 1, cores: [[0]], memory_mib: 1}}]", "a count or every node"),
        ("nodes: [{id: 0, cores: [[0], [0]], memory_mib: 9}]", "CPU 0 is declared twice"),
        ("nodes: [{id: 0, cores: 1, memory_mib: 9, distances: {5: 20}}]", "distance to node 5"),
        (f'nodes: [{NODE}]\ngpus: [{{address: "41:00.0", node: 0}}]', "no address of function 0"),
        (f'nodes: [{NODE}]\ngpus: [{{address: "0000:41:00.1", node: 0}}]', "function 0"),
        (f'nodes: [{NODE}]\ngpus: [{{address: "0000:41:00.0", node: 7}}]', "node 7"),
        (
            f'nodes: [{NODE}]\ngpus: [{{address: "0000:41:00.0", node: 0, memory_mib: 3}}]',
            "power of two",
        ),
        (
            f'nodes: [{NODE}]\ngpus: [{{address: "0000:41:00.0", node: 0, fault: fire}}]',
            r"gpus\.0\.fault",
        ),
    ],
)
def test_faulty_declarations_say_where(text: str, said: str) -> None:
    with pytest.raises(DeclarationError, match=said):
        Emulated.parse(text)


def test_identity_page_is_the_contract() -> None:
    gpu = Emulated.parse(TWO_NODES).gpus[0]
    page = identity_page("0badcafe", "emu1", gpu)
    assert len(page) == IDENTITY_BYTES
    assert is_identity_page(page)
    assert not is_identity_page(bytes(IDENTITY_BYTES))
    content = json.loads(page.rstrip(b"\0"))
    assert content["magic"] == "gpuspawner-emulated-gpu"
    assert content["serial"] == "EMU-emu1-1"
    assert content["model"] == "Emulated GPU 32M"
    assert content["uuid"].startswith("GPU-")
    assert page == identity_page("0badcafe", "emu1", gpu)
    assert page != identity_page("0badcafe", "emu2", gpu)
