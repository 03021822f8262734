"""An admin's say on a host's hardware: read from a file, sent, stored, and told to the driver."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from gpuspawner.allocator.drivers import host_rules
from gpuspawner.cli import app, hosts
from gpuspawner.cli.hardware import HardwareError, read_hardware
from gpuspawner.hardware import DISPLAY, GpuRule, HostHardware
from gpuspawner.host import inventory
from gpuspawner.schema import AddHost, Host

FILE = """
gpus:
  - {vendor: 10de, device: 2330, model: H100, memory_mib: 81559}
  - vendor: 1234
    device: 11e8
    classes: [00ff]
    kind: emulated
  - {vendor: 10de, classes: [0302]}
system_cores: 2
reserve_mib: 8192
hugepages: 1G
gpu_nodes:
  0000:c1:00.0: 1
  10000:01:00.0: 0
"""


def test_a_file_is_read_without_quotes(tmp_path: Path) -> None:
    path = tmp_path / "gpu1.yaml"
    path.write_text(FILE)
    hardware = read_hardware(path)
    assert hardware == HostHardware(
        gpus=[
            GpuRule(vendor="10de", device="2330", model="H100", memory_mib=81559),
            GpuRule(vendor="1234", device="11e8", classes=["00ff"], kind="emulated"),
            GpuRule(vendor="10de", classes=["0302"]),
        ],
        system_cores=2,
        reserve_mib=8192,
        hugepages="1G",
        gpu_nodes={"0000:c1:00.0": 1, "10000:01:00.0": 0},
    )
    body = AddHost(name="gpu1", hardware=hardware)
    assert AddHost.model_validate_json(body.model_dump_json()) == body


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "gpu1.yaml"
    path.write_text("# nothing yet\n")
    assert read_hardware(path) == HostHardware()


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("gpus:\n- {vendor: 10de}\n- {vendor: 10DE}\n", 3, 'vendor: "10de"'),
        ("gpus:\n- vendor: 10de\n  device: 23300\n", 3, 'device: "2330"'),
        ("gpus:\n- {vendor: 10de, classes: [3]}\n", 2, 'classes: ["0300", "0302"]'),
        ("gpus:\n- {vendor: 10de}\n- {model: any}\n", 3, "fits every device"),
        ("gpus:\n- vendor: 10de\n  kind: fpga\n", 3, "or emulated"),
        ("gpus: all\n", 1, "list of rules"),
        ("system_cores: 1\nreserve_mib: 8 GiB\n", 2, "reserve_mib: 4096"),
        ("reserve_mib: -1\n", 1, "MiB of each NUMA node"),
        ("hugepages: 4K\n", 1, "2M or 1G"),
        ("gpu_nodes:\n  c1:00.0: 1\n", 2, "0000:c1:00.0"),
        ("gpu_nodes:\n  0000:c1:00.0: one\n", 2, "NUMA nodes"),
        ("\nsystem_core: 1\n", 2, "no such setting. There are gpus, system_cores"),
        ("- 1\n", 1, "There are gpus"),
    ],
)
def test_a_mistake_names_its_line_and_what_to_write(
    tmp_path: Path, text: str, line: int, said: str
) -> None:
    path = tmp_path / "gpu1.yaml"
    path.write_text(text)
    with pytest.raises(HardwareError) as caught:
        read_hardware(path)
    assert f"gpu1.yaml, line {line}: " in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("content", [b"gpus: [", b"\xff\xfe", b"a: &a [*a"])
def test_no_yaml_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "gpu1.yaml"
    path.write_bytes(content)
    with pytest.raises(HardwareError, match="no YAML"):
        read_hardware(path)


def test_host_add_sends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu1.yaml"
    path.write_text("system_cores: 3\n")
    sent: list[AddHost] = []

    class Client:
        async def add_host(self, body: AddHost) -> Host:
            sent.append(body)
            return Host(name="gpu1", uri="", kind="libvirt", state="new", drained=False, cidr="")

    monkeypatch.setattr(hosts, "ask", lambda question: asyncio.run(question(Client())))
    words = ["host", "add", "gpu1", "--wait", "0", "--hardware", str(path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert sent[0].hardware == HostHardware(system_cores=3)

    path.write_text("system_cores: many\n")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "line 1: system_cores: " in result.stderr
    for more in (["--emulated", str(path)], ["--hardware", str(tmp_path / "none.yaml")]):
        assert CliRunner().invoke(app, [*words, *more]).exit_code == 1
    assert len(sent) == 1


def test_the_driver_is_told_all_of_it() -> None:
    hardware = HostHardware(
        gpus=[
            GpuRule(vendor="1234", device="11e8", model="Lab GPU", memory_mib=16, kind="emulated"),
            GpuRule(vendor="10de"),
        ],
        system_cores=3,
        reserve_mib=1024,
        hugepages="off",
        gpu_nodes={"0000:81:00.0": 1},
    )
    settings = AddHost(name="gpu1", hardware=hardware).model_dump(mode="json")
    assert host_rules(settings) == inventory.HostRules(
        gpus=(
            inventory.GpuRule("1234", "11e8", ("",), "Lab GPU", 16, "emulated"),
            inventory.GpuRule("10de", "", DISPLAY),
        ),
        system_cores=3,
        reserve_mib=1024,
        nodes_of=(("0000:81:00.0", 1),),
        hugepages="off",
    )


def test_settings_from_before_have_the_default() -> None:
    settings = AddHost(name="gpu1").model_dump(mode="json")
    del settings["hardware"]
    assert host_rules(settings) == inventory.HostRules()


def test_settings_that_are_not_understood_are_no_default() -> None:
    with pytest.raises(ValueError, match="hugepages"):
        host_rules({"hardware": {"hugepages": "4K"}})


def test_an_emulated_host_declares_its_own() -> None:
    with pytest.raises(ValidationError, match="declares its own hardware"):
        AddHost(name="a", emulated="nodes: []", hardware=HostHardware(system_cores=2))
    assert AddHost(name="a", emulated="nodes: []").hardware == HostHardware()
