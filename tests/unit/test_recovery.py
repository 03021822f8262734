"""The ladder for a GPU that does not answer: its order, its end, and what each rung does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuspawner.host import probe
from gpuspawner.host.api import HostError, HostTimeout, HostUnreachable, Rung
from gpuspawner.host.recovery import BUDGET_S, in_words, recover
from tests.unit.sysfs_trees import Tree

GPU, AUDIO, PORT = "0000:41:00.0", "0000:41:00.1", "0000:40:01.0"
STEPS = ["wake", "reset", "bus-reset", "bus-reset", "rescan", "power-cycle"]


class Bus:
    """A probe that answers as told; the GPU is back once ``back_after`` steps were done."""

    def __init__(self, back_after: int = 99, **failures: HostError) -> None:
        self.back_after = back_after
        self.failures = failures
        self.steps: list[str] = []
        self.now = 0.0
        self.takes_s = 1.0

    async def __call__(self, verb: str, address: str, deadline_s: float = 0) -> dict[str, Any]:
        assert address == GPU
        if verb == "witness":
            return {"present": len(self.steps) >= self.back_after}
        self.now += self.takes_s
        if verb.replace("-", "_") in self.failures:
            raise self.failures[verb.replace("-", "_")]
        self.steps.append(verb)
        return {}


@pytest.mark.parametrize("steps", range(1, len(STEPS) + 1))
async def test_it_ends_with_the_step_that_helped(steps: int) -> None:
    bus = Bus(back_after=steps)
    assert [rung.step for rung in await recover(GPU, bus)] == STEPS[:steps]


async def test_what_cannot_be_done_is_noted_and_passed_over() -> None:
    tried = await recover(GPU, Bus(reset=HostError("no function can be reset")))
    assert [rung.step for rung in tried] == STEPS
    assert tried[1] == Rung("reset", "no function can be reset")
    assert in_words(tried).startswith("Tried in vain: wake, bus-reset, rescan, power-cycle.")


async def test_a_step_that_hangs_is_the_last() -> None:
    bus = Bus(bus_reset=HostTimeout("it took longer than 40 s"))
    tried = await recover(GPU, bus)
    assert [rung.step for rung in tried] == STEPS[:3]
    assert "40 s" in tried[-1].failure


async def test_a_host_that_is_lost_is_no_verdict_on_the_gpu() -> None:
    with pytest.raises(HostUnreachable):
        await recover(GPU, Bus(reset=HostUnreachable("no route")))


async def test_it_takes_five_minutes_at_most() -> None:
    bus = Bus()
    bus.takes_s = BUDGET_S / 3
    assert len(await recover(GPU, bus, lambda: bus.now)) == 3


def test_words_for_nothing_tried() -> None:
    assert in_words(()) == ""
    assert "could be tried" in in_words((Rung("wake", "no port"),))


# -- the steps themselves, on files ---------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A card of two functions behind a port that knows the bus behind it."""
    tree = Tree(tmp_path)
    control = bytes(0x3E) + b"\x03\x00"
    tree.port(PORT, secondary_bus_number="65", rescan="", remove="", config=control)
    for function in (GPU, AUDIO):
        tree.device(PORT, function, remove="", driver_override="", config=b"\xff" * 64)
    (tree.sys / "bus/pci/drivers_probe").touch()
    return tree


def ask(tree: Tree, verb: str, address: str = GPU) -> dict[str, Any]:
    """One verb, its error included."""
    done = subprocess.run(
        [sys.executable, "-I", "-", verb, address],
        input=Path(probe.__file__).read_bytes(),
        capture_output=True,
        env={**os.environ, "GPUSPAWNER_SYSFS": str(tree.sys), "GPUSPAWNER_PROC": str(tree.proc)},
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def written(tree: Tree, name: str, address: str = GPU) -> str:
    """What stands in a file of a device."""
    return (tree.sys / "bus/pci/devices" / address / name).read_text().strip()


def test_rescan_takes_out_all_functions_and_looks_again(tree: Tree) -> None:
    assert ask(tree, "rescan")["functions"] == [GPU, AUDIO]
    assert [written(tree, "remove", each) for each in (GPU, AUDIO)] == ["1", "1"]
    assert written(tree, "rescan", PORT) == "1"
    assert written(tree, "driver_override") == ""  # both are bound to vfio-pci as they were


def test_what_comes_back_under_another_driver_is_bound_again(tree: Tree) -> None:
    base = tree.sys / "bus/pci/devices" / AUDIO
    (base / "driver").unlink()
    (tree.sys / "drivers/snd").mkdir(parents=True)
    (base / "driver").symlink_to(tree.sys / "drivers/snd")
    ask(tree, "rescan")
    assert written(tree, "driver_override", AUDIO) == "vfio-pci"
    assert (tree.sys / "drivers/snd/unbind").read_text() == AUDIO
    assert (tree.sys / "bus/pci/drivers_probe").read_text() == AUDIO


def test_bus_reset_leaves_the_port_as_it_was(tree: Tree) -> None:
    assert ask(tree, "bus-reset")["functions"] == [GPU, AUDIO]
    config = (tree.sys / "bus/pci/devices" / PORT / "config").read_bytes()
    assert config[0x3E:0x40] == b"\x03\x00"
    assert written(tree, "rescan", PORT) == "1"


def test_bus_reset_ends_the_reset_of_one_that_was_killed(tree: Tree) -> None:
    config = tree.sys / "bus/pci/devices" / PORT / "config"
    config.write_bytes(bytes(0x3E) + b"\x43\x00")
    ask(tree, "bus-reset")
    assert config.read_bytes()[0x3E:0x40] == b"\x03\x00"


def test_a_variant_of_the_driver_is_kept(tree: Tree) -> None:
    driver = tree.sys / "bus/pci/devices" / GPU / "driver"
    driver.unlink()
    driver.symlink_to("/sys/bus/pci/drivers/nvgrace_gpu_vfio_pci")
    ask(tree, "rescan")
    assert written(tree, "driver_override") == ""


def test_power_cycle_finds_the_slot(tree: Tree) -> None:
    tree.write("sys", "bus/pci/slots/7/address", "0000:81:00")
    tree.write("sys", "bus/pci/slots/3/address", "0000:41:00")
    assert "cannot be switched" in ask(tree, "power-cycle")["error"]
    (tree.sys / "bus/pci/slots/3/power").touch()
    assert ask(tree, "power-cycle")["functions"] == [GPU, AUDIO]
    assert (tree.sys / "bus/pci/slots/3/power").read_text() == "1"


def test_wake(tree: Tree) -> None:
    (tree.sys / "bus/pci/devices" / PORT / "power").mkdir()
    (tree.sys / "bus/pci/devices" / PORT / "power/control").touch()
    ask(tree, "wake")
    assert written(tree, "power/control", PORT) == "on"
    assert written(tree, "d3cold_allowed") == "0"


@pytest.mark.parametrize("verb", ["bus-reset", "rescan", "power-cycle"])
def test_a_port_that_others_are_behind_is_left_alone(tree: Tree, verb: str) -> None:
    tree.device(PORT, "0000:41:01.0", remove="")
    assert "0000:41:01.0 behind it too" in ask(tree, verb)["error"]
    assert written(tree, "remove") == ""


@pytest.mark.parametrize("verb", ["wake", "bus-reset", "rescan", "power-cycle"])
def test_a_device_without_a_port(tree: Tree, verb: str) -> None:
    assert "no port has" in ask(tree, verb, "0000:99:00.0")["error"]
