"""An admin's say on a real host goes all the way: from the API to the driver, over restarts, and
from the survey to how its GPUs are treated."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpuspawner import schema
from gpuspawner.allocator.drivers import DriverSettings, host_rules
from gpuspawner.client import AllocatorClient, AllocatorError
from gpuspawner.hardware import GpuRule, HostHardware
from gpuspawner.host.api import HostError
from gpuspawner.host.inspection import Finding
from gpuspawner.host.inventory import HostRules
from gpuspawner.ledger import hosts as host_ledger
from gpuspawner.ledger.database import Ledger
from tests.layers import wait_for_async
from tests.service.harness import Site, acquire_body, gpu_in, lease_in
from tests.service.scripted import ScriptedHost, World, scripted_host

GPU = "0000:40:00.0"
TOLD: list[HostRules] = []
HARDWARE = HostHardware(
    gpus=[GpuRule(vendor="1234", device="11e8", model="Lab GPU", kind="emulated")],
    system_cores=2,
    reserve_mib=512,
    hugepages="off",
    gpu_nodes={GPU: 1},
)


def telling(name: str, settings: dict[str, Any], driver: DriverSettings) -> ScriptedHost:
    """A driver that notes the rules that the libvirt driver would be given."""
    TOLD.append(host_rules(settings))
    return scripted_host(name, settings, driver)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """One host with one GPU that is in the host, not made by QEMU."""
    TOLD.clear()
    site = Site(tmp_path, driver="tests.service.test_hardware.telling")
    world = site.world(gpus=1)
    passed_through(world, kind="emulated")
    yield site
    await world.close()
    assert world.overlaps == []


def passed_through(world: World, **changes: Any) -> None:
    """The world's GPU as a survey of a real host finds it."""
    (gpu,) = world.inventory.gpus
    gpu = dataclasses.replace(gpu, emulated=False, model="Lab GPU", **changes)
    world.inventory = dataclasses.replace(world.inventory, emulated=False, gpus=(gpu,))


async def add(client: AllocatorClient, hardware: HostHardware = HARDWARE) -> None:
    await client.add_host(
        schema.AddHost(
            name="h1", uri="test:///default", cidr="127.200.0.0/24", hardware=hardware
        )
    )  # fmt: skip


async def _ready(client: AllocatorClient) -> bool:
    return (await client.hosts())[0].state == "ready"


async def test_the_driver_is_told_also_after_a_restart(site: Site) -> None:
    async with site.running() as client:
        await add(client)
    (first,) = TOLD
    assert (first.system_cores, first.reserve_mib, first.hugepages) == (2, 512, "off")
    assert first.nodes_of == ((GPU, 1),)
    assert (first.gpus[0].device, first.gpus[0].kind) == ("11e8", "emulated")
    async with site.running() as client:
        assert [first, first] == TOLD
        await add(client, HostHardware(system_cores=5))
    assert TOLD[-1].system_cores == 5


async def test_a_host_from_before_has_the_default(site: Site) -> None:
    async with site.running() as client:
        await add(client)
    ledger = Ledger(f"sqlite:///{site.folder / 'ledger.sqlite'}")
    await ledger.open()
    settings = schema.AddHost(name="h1", cidr="127.200.0.0/24").model_dump(mode="json")
    del settings["hardware"]
    await ledger.write(host_ledger.add, "h1", settings)
    await ledger.close()
    async with site.running() as client:
        assert TOLD[-1] == HostRules()
        assert (await client.hosts())[0].name == "h1"


async def test_devices_that_stand_for_gpus_make_the_whole_round(site: Site) -> None:
    """They enrol by themselves, pass the emulated checks, and are always called emulated."""
    async with site.running() as client:
        await add(client)
        gpu = await gpu_in(client, GPU, "unassigned")
        assert gpu.emulated
        assert (await client.gpu_counts()).models[0].emulated
        lease = await client.acquire(acquire_body(memory_mib=1024))
        await lease_in(client, lease.id, "running")
        await client.stop(lease.id, wait_s=20)
        await gpu_in(client, GPU, "unassigned")
    assert site.worlds["h1"].resets == [GPU, GPU]


async def test_a_real_gpu_waits_for_an_admin_and_passes_nothing_yet(site: Site) -> None:
    """Its service VM may report what an emulated GPU's does: that proves nothing about it."""
    passed_through(site.worlds["h1"], kind="nvidia")
    async with site.running() as client:
        await add(client)
        gpu = await gpu_in(client, GPU, "new")
        assert not gpu.emulated
        await wait_for_async(lambda: _ready(client), 30, "the host to be ready")
        with pytest.raises(AllocatorError, match="GPU"):
            await client.acquire(acquire_body())
        assert (await client.gpu_counts()).models[0].out == 1
        await client.gpu_action("h1", GPU, "enroll", "it is mine")
        gpu = await gpu_in(client, GPU, "failed")
        assert "cannot pass" in (gpu.reason or "")


async def test_a_gpu_with_a_problem_is_not_diagnosed(site: Site) -> None:
    """It could not be given to the service VM either; once the problem is gone it goes on."""
    world = site.worlds["h1"]
    passed_through(world, kind="emulated", problems=("It is bound to nouveau.",))
    async with site.running() as client:
        await add(client)
        gpu = await gpu_in(client, GPU, "new")
        assert gpu.problems == ["It is bound to nouveau."]
        passed_through(world, problems=())
        await client.check_host("h1")
        await gpu_in(client, GPU, "unassigned")


async def test_check_shows_the_host_as_it_is(site: Site) -> None:
    """The parts, what the host itself complains of, and what its GPUs do."""
    world = site.worlds["h1"]
    passed_through(world, kind="nvidia")
    world.findings = (Finding("warning", "The host swaps.", "swapoff -a"),)
    async with site.running() as client:
        await add(client)
        await gpu_in(client, GPU, "new")
        await wait_for_async(lambda: _ready(client), 30, "the host to be ready")
        found = await client.check_host("h1")
        assert [node.id for node in found.nodes] == [0, 1]
        assert found.nodes[0].usable_mib == 65536 - 2048
        assert [(gpu.address, gpu.state) for gpu in found.gpus] == [(GPU, "new")]
        told = [(each.level, each.text, each.remedy) for each in found.findings]
        assert ("warning", "The host swaps.", "swapoff -a") in told
        assert any("gpu enroll" in each.remedy for each in found.findings)

        passed_through(world, problems=("It is bound to nouveau.",))
        world.fail["inspect"] = HostError("It is on fire.", "Water.")
        found = await client.check_host("h1")
        assert found.nodes == []
        told = [(each.level, each.text, each.remedy) for each in found.findings]
        assert ("error", "The host cannot be asked: It is on fire.", "Water.") in told
