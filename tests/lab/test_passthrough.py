"""The life of GPUs that are really passed through, read from the host itself.

The tests run in the order of this file, on one lab host: each takes up what the one before has
left, since every virtual machine more takes one to two minutes here.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from deploy.labhost import network
from deploy.labhost.machine import GPUS, LabGpu
from deploy.labhost.running import Lab
from gpuspawner.host.api import GuestSpec, HostError, Image
from gpuspawner.host.inventory import parse_inventory
from gpuspawner.host.libvirt_host import LibvirtHost
from gpuspawner.host.shell import Shell
from gpuspawner.pool.topology import Cell, Claim, Gpu
from tests.lab.conftest import timed
from tests.lab.pool import START_S, LabPool, rules_of
from tests.vm.pool import Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

GPU = {gpu.name: gpu for gpu in GPUS}
NODE0, NODE1, PULLED = GPU["gpu0"], GPU["gpu2"], GPU["gpu5"]
SPARE = (GPU["gpu1"], GPU["gpu3"], GPU["gpu4"], PULLED)  # not diagnosed: that takes a minute each
PATTERN = bytes.fromhex("5ec7e7c0de")
OFFSET = 4096 * 3

SYSFS = """
import glob, json, os
def read(path):
    with open(path) as file:
        return file.read().strip()
found = {}
for base in glob.glob("/sys/bus/pci/devices/*"):
    name = os.path.basename(base)
    port = os.path.basename(os.path.dirname(os.path.realpath(base)))
    found[name] = {
        "ids": read(base + "/vendor")[2:] + ":" + read(base + "/device")[2:],
        "node": int(read(base + "/numa_node")),
        "group": sorted(os.listdir(base + "/iommu_group/devices")),
        "driver": os.path.basename(os.path.realpath(base + "/driver")),
        "port": port,
    }
print(json.dumps(found))
"""


def tenant(number: int) -> str:
    """A user's name."""
    return f"user{number}"


async def server(pool: LabPool, user: str) -> Server:
    """A tiny guest that answers, with one GPU."""
    lease = await pool.acquire(user, start=f"start-{user}")
    return Server(pool, await pool.running(lease, START_S))


async def test_inventory_is_what_sysfs_shows(lab: Lab) -> None:
    done = await asyncio.to_thread(lab.ssh, ["python3", "-c", SYSFS])
    assert done.returncode == 0, done.stderr
    sysfs: dict[str, Any] = json.loads(done.stdout)
    with timed("probe: the whole inventory over ssh"):
        answer = await Shell("lab", lab.shell).probe("inventory", deadline_s=60)
    inventory = parse_inventory("lab", answer, rules_of(lab))
    assert [gpu.address for gpu in inventory.gpus] == sorted(gpu.address for gpu in GPUS)
    assert [len(node.cores) for node in inventory.nodes] == [2, 2]
    assert [node.distances for node in inventory.nodes] == [((1, 21),), ((0, 21),)]
    for gpu in inventory.gpus:
        seen = sysfs[gpu.address]
        expected = next(each for each in GPUS if each.address == gpu.address)
        assert gpu.problems == ()
        assert list(gpu.functions) == seen["group"]
        assert gpu.node == seen["node"] == expected.node
        assert seen["port"] == expected.port_address
        assert {sysfs[each]["driver"] for each in gpu.functions} == {"vfio-pci"}
        assert [sysfs[each]["ids"] for each in gpu.functions] == list(gpu.ids)
        link = (2.5, 1) if expected.degraded else (16.0, 16)
        assert (gpu.link_speed_gts, gpu.link_width) == link


async def test_new_gpus_are_diagnosed_and_enrolled(pool: LabPool) -> None:
    for gpu in SPARE:
        await pool.hold(gpu)
    with timed("first diagnosis of two GPUs, both at a time"):
        for gpu in (NODE0, NODE1):
            found = await pool.lab_gpu_in(gpu, "unassigned", "failed", "quarantined", "lost")
            assert found.state == "unassigned", found.reason
            assert not found.dirty


@pytest.fixture(scope="module")
def servers() -> dict[int, Server]:
    """The running servers of this file by their NUMA node; tests put them in and take them out."""
    return {}


async def test_a_lease_on_each_node_is_bound_to_it(
    pool: LabPool, servers: dict[int, Server]
) -> None:
    with timed("two leases, one on each node, until both answer"):
        for each in await asyncio.gather(*(server(pool, tenant(number)) for number in (0, 1))):
            assert each.lease.node is not None
            servers[each.lease.node] = each
    assert sorted(servers) == [0, 1]
    inventory = await pool.shell.probe("inventory", deadline_s=60)
    node_cpus = {
        node["id"]: {cpu for core in node["cores"] for cpu in core} for node in inventory["nodes"]
    }
    for node, each in servers.items():
        pid = await pool.qemu_pid(each.lease.id)
        status = (await pool.on_host("cat", f"/proc/{pid}/status")).splitlines()
        fields = dict(line.split(":\t", 1) for line in status if ":\t" in line)
        assert fields["Mems_allowed_list"] == str(node)
        assert int(fields["VmLck"].split()[0]) >= each.lease.request.memory_mib * 1024
        threads = (await pool.shell.probe("binding", str(pid)))["threads"]
        vcpus = [thread for thread in threads if thread["name"].startswith("CPU ")]
        assert [thread["cpus"] for thread in vcpus] == [str(each.lease.cpus[0])]
        assert set(each.lease.cpus) <= node_cpus[node]
        (rest,) = {thread["cpus"] for thread in threads if thread not in vcpus}
        assert int(rest) in node_cpus[node] - set(each.lease.cpus)
        # Where the memory really is, page by page, and not only where it may be.
        pages = await pool.on_host("sh", "-c", f"grep -ho 'N[0-9]*=[0-9]*' /proc/{pid}/numa_maps")
        counts = {0: 0, 1: 0}
        for word in pages.split():
            where, count = word[1:].split("=")
            counts[int(where)] += int(count)
        # Shared libraries lie where they were first read.
        assert counts[node] * 4 // 1024 >= each.lease.request.memory_mib
        assert counts[1 - node] < counts[node] / 2


def gpu_of(each: Server) -> LabGpu:
    """The lab's GPU that a server has."""
    return next(gpu for gpu in GPUS if gpu.address == each.lease.gpus[0])


async def test_what_a_guest_writes_is_in_the_card_and_wiped_before_the_next(
    pool: LabPool, lab: Lab, servers: dict[int, Server]
) -> None:
    first = servers.pop(0)
    gpu = gpu_of(first)
    await first.ask("gpu/write", pattern=PATTERN.hex(), offset=OFFSET, bytes=1 << 16)

    def in_the_card() -> bool:
        return PATTERN * 100 in lab.memory(gpu).read_bytes()

    assert in_the_card()
    pid = await pool.qemu_pid(first.lease.id)
    with timed("stop of a server, until its lease has ended"):
        await first.stop()
    done = await asyncio.to_thread(lab.ssh, ["test", "-e", f"/proc/{pid}"])
    assert done.returncode == 1
    with timed("diagnosis and wipe after a lease"):
        found = await pool.lab_gpu_in(gpu, "unassigned", "failed", "quarantined", "lost")
    assert found.state == "unassigned", found.reason
    assert not in_the_card()
    assert (await pool.shell.probe("released", gpu.address))["released"]
    with timed("lease on the wiped GPU, until it answers"):
        second = await server(pool, tenant(2))
    assert gpu_of(second) == gpu
    assert await second.gpu(OFFSET, 1 << 16) == bytes(1 << 16)
    await second.stop()


FOREIGN = """
<domain type='kvm'>
  <name>foreign</name>
  <memory unit='MiB'>128</memory>
  <vcpu>1</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <devices>{hostdevs}<memballoon model='none'/><controller type='usb' model='none'/></devices>
</domain>
"""
HOSTDEV = """
<hostdev mode='subsystem' type='pci' managed='no'>
  <source><address domain='0x0000' bus='0x{bus}' slot='0x00' function='0x{function}'/></source>
</hostdev>
"""


@pytest_asyncio.fixture(loop_scope="session")
async def driver(pool: LabPool) -> AsyncIterator[LibvirtHost]:
    """The host's driver alone, of another installation."""
    host = LibvirtHost(
        "lab",
        instance="7e570002",
        uri=pool.lab.uri,
        shell=pool.lab.shell,
        cidr=pool.lab.networks.guests,
        network="bridge",
        bridge=network.BRIDGE,
        accel="kvm",
        pool_path="/var/lib/gpuspawner/other",
        rules=rules_of(pool.lab),
    )
    await host.open(lambda _uuid: None)
    try:
        yield host
    finally:
        await host.remove()
        await host.close()


def spec_with(gpu: Gpu) -> GuestSpec:
    """A VM with this GPU. It has no disks: that it is refused comes first."""
    claim = Claim("lab", (gpu.address,), (Cell(gpu.node, ((0,),), 256),))
    image = Image("none", "sha256:00", "", {})
    return GuestSpec(str(uuid.uuid4()), "lease", "refused", claim, (gpu,), image)


async def test_half_of_a_group_is_refused(pool: LabPool, driver: LibvirtHost) -> None:
    """VFIO itself would let it pass: nothing is bound to the other half."""
    spare = GPU["gpu1"]
    whole = (await driver.survey()).gpu(spare.address)
    half = replace(whole, functions=whole.functions[:1])
    with pytest.raises(HostError, match="IOMMU group holds"):
        await driver.create(spec_with(half))
    other = whole.functions[1]
    await pool.on_host("sh", "-c", f"echo {other} > /sys/bus/pci/drivers/vfio-pci/unbind")
    try:
        (problem,) = (await driver.survey()).gpu(spare.address).problems
        assert f"{other} is bound to no driver" in problem
        with pytest.raises(HostError, match="bound to no driver"):
            await driver.create(spec_with(whole))
    finally:
        await pool.on_host("sh", "-c", f"echo {other} > /sys/bus/pci/drivers/vfio-pci/bind")
    assert "refused" not in await asyncio.to_thread(pool.virsh, "list", "--all", "--title")


async def test_a_gpu_that_a_foreign_vm_has_is_refused(
    pool: LabPool, driver: LibvirtHost, tmp_path: Path
) -> None:
    spare = (await driver.survey()).gpu(GPU["gpu1"].address)
    bus = spare.address.split(":")[1]
    devices = "".join(HOSTDEV.format(bus=bus, function=number) for number in (0, 1))
    file = tmp_path / "foreign.xml"
    file.write_text(FOREIGN.format(hostdevs=devices))
    await asyncio.to_thread(pool.virsh, "create", str(file))
    try:
        with pytest.raises(HostError, match=r"held by qemu-system-x86 \(\d+\)"):
            await driver.create(spec_with(spare))
        with pytest.raises(HostError, match="Check that no process holds it"):
            await driver.reset(spare.address)
    finally:
        await asyncio.to_thread(pool.virsh, "destroy", "foreign")
    assert await driver.released(spare.address)


async def told_of_the_loss(pool: LabPool, lease_id: str, address: str) -> None:
    """Wait until the lease's story says that its GPU is gone."""

    async def read() -> None:
        async for event in pool.client.events(lease_id):
            if f"GPU {address} does not answer any more" in event.message:
                return

    await asyncio.wait_for(read(), 180)


# Without the power cycle: QEMU takes a card out when its slot is switched off. How a slot that is
# off is switched on, test_power_off_of_a_slot_in_use shows.
# Of the port's Slot Control register: power controller off (bit 10), power indicator on (01 in bits
# 8 and 9). With both off QEMU takes the card out, at once and whoever uses it.
POWER_OFF, PULL_OUT = "0500:0700", "0700:0700"


async def slot_control(pool: LabPool, gpu: LabGpu, value: str) -> None:
    """Set power and indicator of a GPU's slot behind the back of the kernel's hotplug driver."""
    await pool.on_host("setpci", "-s", gpu.port_address, f"CAP_EXP+18.w={value}")


RECOVERY = ("wake", "bus-reset", "rescan")


async def test_each_step_of_the_recovery(lab: Lab, pool: LabPool) -> None:
    """On a card that nobody uses: after each it answers, with both functions on vfio-pci, and is
    fit for the pool."""
    spare = GPU["gpu1"]
    for step in RECOVERY:
        with timed(f"recovery, {step}"):
            await pool.shell.probe(step, spare.address, deadline_s=60)
        witness = await pool.shell.probe("witness", spare.address)
        assert witness["present"], step
        answer = await pool.shell.probe("inventory", deadline_s=60)
        (gpu,) = (
            gpu
            for gpu in parse_inventory("lab", answer, rules_of(lab)).gpus
            if gpu.address == spare.address
        )
        assert (gpu.problems, len(gpu.functions)) == ((), 2), step


async def test_power_off_of_a_slot_in_use(pool: LabPool, servers: dict[int, Server]) -> None:
    """libvirt says nothing and runs on; the bus tells, then the pool tells its user. Once she has
    stopped, the pool switches the slot on again and has the card wiped and checked."""
    here = servers.pop(1)
    gpu = gpu_of(here)
    await slot_control(pool, gpu, POWER_OFF)
    witness = await pool.shell.probe("witness", gpu.address)
    assert not witness["present"]
    assert "all ones" in witness["note"]
    name = pool.domain(here.lease.id)
    assert (await asyncio.to_thread(pool.virsh, "domstate", name)).strip() == "running"
    with timed("loss of a GPU in use, until its lease is told"):
        await told_of_the_loss(pool, here.lease.id, gpu.address)
    assert (await pool.client.lease(here.lease.id)).state == "running"
    await here.ask("state")
    await here.stop()
    with timed("GPU without power: brought back, wiped and checked"):
        found = await pool.lab_gpu_in(gpu, "unassigned", "failed", "lost", "quarantined")
    assert found.state == "unassigned", found.reason
    (run, *_) = await pool.client.diagnoses(host=pool.host, gpu=gpu.address)
    assert run.witness["recovery"][-1] == {"step": "power-cycle", "failure": ""}


async def test_a_gpu_pulled_out_while_in_use(pool: LabPool) -> None:
    """Without a word before: the kernel goes on listing it until its guest lets it go."""
    for gpu in (NODE0, NODE1):
        await pool.hold(gpu)
    await pool.unhold(PULLED)
    assert (await pool.lab_gpu_in(PULLED, "unassigned", "quarantined")).state == "unassigned"
    with timed("lease on the GPU that is pulled out, until it answers"):
        here = await server(pool, tenant(3))
    assert gpu_of(here) == PULLED
    await slot_control(pool, PULLED, PULL_OUT)
    with timed("GPU pulled out in use, until its lease is told"):
        await told_of_the_loss(pool, here.lease.id, PULLED.address)
    assert not (await pool.shell.probe("witness", PULLED.address))["present"]
    await here.ask("state")
    await here.stop()
    assert "Tried in vain" in ((await pool.lab_gpu_in(PULLED, "lost")).reason or "")
