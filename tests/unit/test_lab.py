"""The lab host's description: what QEMU is told, and what the host is told at its start."""

from __future__ import annotations

import io
import shlex
import tarfile
from pathlib import Path

import pytest

from deploy.labhost import machine
from deploy.labhost.image import PLAN, digest
from deploy.labhost.machine import GPUS, Card, Files, LabGpu
from deploy.labhost.main import main
from deploy.labhost.network import Networks
from deploy.labhost.running import HARDWARE, Lab
from deploy.labhost.seed import Keys, seed
from deploy.stack.say import Problem
from gpuspawner.cli.hardware import read_hardware

CARDS = (Card("tap0", "52:54:00:00:00:01"), Card("tap1", "52:54:00:00:00:02"))


def words() -> list[str]:
    """QEMU's command line with files in /lab."""
    names = ("kernel", "initrd", "root", "seed", "console", "qmp", "pid", "memories")
    return machine.command(Files(**{name: Path("/lab", name) for name in names}), CARDS)


def devices(driver: str) -> list[str]:
    """The ``-device`` words of one kind."""
    return [word for word in words() if word.split(",")[0] == driver]


def test_each_node_has_memory_cpus_and_an_expander() -> None:
    line = " ".join(words())
    for node, cpus in ((0, "0-1"), (1, "2-3")):
        assert f"node,nodeid={node},cpus={cpus},memdev=ram{node}" in line
        assert f"size={machine.MEMORY_MIB // 2}M" in line
    assert [word for word in devices("pxb-pcie") if "numa_node=1" in word]


def test_a_gpu_is_two_functions_of_one_slot() -> None:
    for edu, memory in zip(devices("edu"), devices("ivshmem-plain"), strict=True):
        port, place = (word for word in edu.split(",")[2:4])
        other, next_place = (word for word in memory.split(",")[2:4])
        assert port == other
        assert int(next_place[-1]) == int(place[-1]) + 1
        assert "dma_mask=0xffffffff" in edu


def test_gpus_have_ports_of_their_own_and_addresses_that_follow() -> None:
    assert len({(gpu.node, gpu.port) for gpu in GPUS}) == len(GPUS)
    assert LabGpu("x", 1, 2).address == "0000:83:00.0"
    assert LabGpu("x", 1, 2).port_address == "0000:80:02.0"
    assert LabGpu("x", 0, 2, degraded=True).address == "0000:43:00.1"


def test_nothing_is_on_a_bus_by_chance() -> None:
    """Behind an expander QEMU takes the first bus that fits, which is then the wrong one."""
    for word in (word for word in words() if word.startswith(("virtio-", "pxb-"))):
        assert "bus=pcie.0" in word


def test_the_seed_is_a_disk_with_private_keys_that_stay_private() -> None:
    content = seed(Networks(), Keys("ssh-ed25519 AAAA lab", "PRIVATE"))
    assert len(content) % 512 == 0
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        modes = {entry.name: entry.mode for entry in tar}
        card = tar.extractfile("etc/systemd/network/10-admin.network")
        assert card is not None
        assert b"Address=10.238.0.2/28" in card.read()
    assert modes["etc/ssh/ssh_host_ed25519_key"] == 0o600
    assert modes["root/.ssh"] == 0o700


def test_the_hardware_file_is_one_that_host_add_takes(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(HARDWARE)
    (rule,) = read_hardware(file).gpus
    assert (rule.vendor, rule.device, rule.kind) == ("1234", "11e8", "emulated")


def test_the_add_command_survives_a_shell(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "a lab")
    command = lab.add_command()
    assert shlex.split(shlex.join(command)) == command
    shell = command[command.index("--shell") + 1]
    assert shlex.split(shell) == lab.shell
    assert "a%20lab" in lab.uri


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(Problem, match="no lab has made it"):
        Lab(tmp_path).prepare()


def test_one_at_a_time(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "lab")
    lab.prepare()
    with lab.lock(), pytest.raises(Problem, match="Another"), lab.lock():
        pass


def test_without_a_lab_verbs_say_how_to_start_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ["--state", str(tmp_path / "none")]
    assert main([*state, "status"]) == 1
    assert "deploy/lab start" in capsys.readouterr().out


def test_the_image_is_named_by_its_inputs() -> None:
    assert digest() == digest()
    assert len({stage.name for stage in PLAN}) == len(PLAN)
