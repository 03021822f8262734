"""The libvirt driver with a real libvirtd and real guests under TCG."""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import libvirt
import pytest
import pytest_asyncio

from gpuspawner.host import probe, volumes
from gpuspawner.host.accel import PORT, probe_spec
from gpuspawner.host.api import HostError, HostTimeout, HostUnreachable, Image, ImageFile
from gpuspawner.host.libvirt_host import LibvirtHost
from tests.layers import wait_for_async
from tests.unit.host_specs import CASES
from tests.vm.daemon import Daemon
from tests.vm.host_fixtures import (
    GATEWAY,
    HUB_PORT,
    OTHER_PORT,
    TinyGuest,
    built_image,
    listening,
    make_host,
    next_line,
    opened,
    pools_folder,
)
from tests.vm.small_disk import small_disk

pytestmark = [
    pytest.mark.usefixtures("libvirtd"),
    pytest.mark.asyncio(loop_scope="module"),
]

GPU = "0000:41:00.0"
SECOND_GPU = "0000:c1:00.0"
LATE_ADDRESS = "198.51.100.8"
OTHER_ADDRESS = "198.51.100.7"  # of the host's, on another network than the guests'


@pytest.fixture(scope="module")
def tiny(images_dir: Path) -> Image:
    return built_image(images_dir / "tiny")


@pytest.fixture(scope="module")
def service(images_dir: Path) -> Image:
    return built_image(images_dir / "service")


@pytest.fixture(scope="module")
def pools() -> Iterator[Path]:
    with pools_folder() as folder:
        yield folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(pools: Path, tiny: Image, service: Image) -> AsyncIterator[LibvirtHost]:
    await _run("ip", "addr", "replace", f"{OTHER_ADDRESS}/32", "dev", "lo")
    async with opened(make_host("emu1", pools)) as host:
        for image in (tiny, service):
            await host.put_image(image, lambda _done, _total: None)
        yield host


@pytest.mark.parametrize("name", sorted(CASES))
async def test_libvirt_takes_every_golden_domain(name: str) -> None:
    connection = libvirt.open("qemu:///system")
    try:
        xml = CASES[name].xml()
        domain = connection.defineXMLFlags(xml, libvirt.VIR_DOMAIN_DEFINE_VALIDATE)
        domain.undefine()
    finally:
        connection.close()


async def test_survey_is_the_declaration(host: LibvirtHost) -> None:
    inventory = await host.survey()
    assert inventory.emulated
    assert inventory.boot_id == probe.boot_id()
    assert [gpu.address for gpu in inventory.gpus] == [GPU, SECOND_GPU]
    assert await host.gateway() == GATEWAY


async def test_opening_again_changes_nothing(host: LibvirtHost, tiny: Image) -> None:
    before = await host.images()
    await host.close()
    await host.open(lambda _uuid: None)
    assert await host.images() == before
    assert tiny.digest in before


async def test_lease_from_its_disks_to_its_end(host: LibvirtHost, tiny: Image) -> None:
    inventory = await host.survey()
    assert await host.make_home("home-ada", 64)
    assert await host.make_home("home-ada", 64)  # a crash before the guest wrote: still new
    guest = TinyGuest(host, tiny, inventory, 10).with_gpu(inventory, GPU).with_home("home-ada")
    await guest.start(home_new=True)
    await host.create(guest.spec)  # twice is once
    assert [each.uuid for each in await host.guests()] == [guest.uuid]
    assert not await host.released(GPU)
    with listening(HUB_PORT, OTHER_PORT):
        await guest.ready()
        assert (await guest.ask("test/state"))["problems"] == []

        # Of its host it reaches the hub's API and no more.
        hub = await guest.ask("test/connect", host=GATEWAY, port=HUB_PORT)
        assert hub == {"connected": True, "error": ""}
        other = await guest.ask("test/connect", host=GATEWAY, port=OTHER_PORT)
        assert not other["connected"]
        elsewhere = await guest.ask("test/connect", host=OTHER_ADDRESS, port=HUB_PORT)
        assert not elsewhere["connected"]

    # The seed is taken away while the guest runs, and its disk deleted.
    seed = volumes.guest_volume(guest.uuid, "seed")
    assert seed in await _volumes(host)
    await host.eject_seed(guest.uuid)
    await host.eject_seed(guest.uuid)
    assert seed not in await _volumes(host)
    ejected = await guest.ask("test/exec", b"cat /dev/sr0")
    assert "No medium found" in ejected["output"]

    await guest.ask("test/home/write", b"kept", name="note")
    await guest.ask("test/gpu/write", b"", offset=8192, pattern="c0ffee00")
    await host.shutdown(guest.uuid)
    await guest.gone()
    assert await host.released(GPU)
    console = await host.console(guest.uuid)
    assert "10.232.0.10" in console
    assert "\x1b" not in console
    await guest.drop()
    assert not [name for name in await _volumes(host) if guest.uuid in name]

    # The next guest finds home and, nobody having wiped it, the GPU's memory as they were left.
    assert not await host.make_home("home-ada", 64)
    second = TinyGuest(host, tiny, inventory, 11).with_gpu(inventory, GPU).with_home("home-ada")
    await second.start(home_new=False)
    await second.ready()
    assert await second.ask("test/home/read", name="note") == b"kept"
    assert await second.ask("test/gpu/read", offset=8192, bytes=4) in (b"c0ffee00", "c0ffee00")
    identity = bytes.fromhex((await second.ask("test/gpu/read", offset=0, bytes=4096)).decode())
    assert json.loads(identity.rstrip(b"\0"))["serial"] == "EMU-emu1-0"
    await second.drop()
    await host.destroy(second.uuid)  # again is fine
    assert await host.guest(second.uuid) is None
    await host.drop_home("home-ada")
    await host.drop_home("home-ada")


async def test_guests_do_not_reach_each_other_nor_lie_about_their_address(
    host: LibvirtHost, tiny: Image
) -> None:
    inventory = await host.survey()
    guests = [TinyGuest(host, tiny, inventory, number) for number in (20, 21)]
    for guest in guests:
        await guest.start()
    for guest in guests:
        await guest.ready()
    to_other = await guests[0].ask("test/connect", host=guests[1].address, port=8888)
    assert not to_other["connected"]
    # Both are root and agree on the way round the isolated ports: by way of the gateway.
    for one, other in zip(guests, reversed(guests), strict=True):
        detour = f"ip route replace {other.address}/32 via {GATEWAY} dev eth0".encode()
        assert (await one.ask("test/exec", detour))["rc"] == 0
    to_other = await guests[0].ask("test/connect", host=guests[1].address, port=8888)
    assert not to_other["connected"]
    # The host gets an address later, as by a VPN: closed from the next survey on.
    await _run("ip", "addr", "replace", f"{LATE_ADDRESS}/32", "dev", "lo")
    await host.survey()
    with listening(OTHER_PORT):
        to_host = await guests[0].ask("test/connect", host=LATE_ADDRESS, port=OTHER_PORT)
    assert not to_host["connected"]
    spoof = b"ip addr add 10.232.0.99/24 dev eth0"
    assert (await guests[0].ask("test/exec", spoof))["rc"] == 0
    with pytest.raises(OSError):  # noqa: PT011  (refused, unreachable or too late: not answered)
        async with asyncio.timeout(4):
            await asyncio.open_connection("10.232.0.99", 8888)
    for guest in guests:
        await guest.drop()


async def test_root_disk_is_thrown_away_with_its_guest(
    host: LibvirtHost, tiny: Image, tmp_path: Path
) -> None:
    raw, root = tmp_path / "root.raw", tmp_path / "root.qcow2"
    raw.write_bytes(b"AAAA\n".ljust(1 << 20, b"\0"))
    await _run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(raw), str(root))
    content = root.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    file = ImageFile(root, digest, len(content), "qcow2", 16)
    image = replace(tiny, digest=f"sha256:{digest}", files={**tiny.files, "root": file})
    await host.put_image(image, lambda _done, _total: None)
    inventory = await host.survey()
    for number in (25, 26):
        guest = TinyGuest(host, image, inventory, number)
        await guest.start()
        await guest.ready()
        found = await guest.ask("test/exec", b"read -r x < /dev/vda; echo $x; echo B > /dev/vda")
        assert found["output"].startswith("AAAA")
        size = await guest.ask("test/exec", b"cat /sys/block/vda/size /sys/block/vda/serial")
        assert size["output"].split() == [str(16 * 2048), "root"]
        await guest.drop()


async def test_reboot_ends_the_guest(host: LibvirtHost, tiny: Image) -> None:
    guest = TinyGuest(host, tiny, await host.survey(), 30)
    await guest.start()
    await guest.ready()
    await guest.ask("test/reboot")
    await guest.gone()
    await guest.drop()


async def test_service_vm_speaks_through_its_port(host: LibvirtHost, service: Image) -> None:
    inventory = await host.survey()
    spec = replace(
        probe_spec(service, inventory), kind="service", gpus=(inventory.gpu(SECOND_GPU),)
    )
    await host.make_disks(spec)
    await host.create(spec)
    await asyncio.sleep(1)  # what it says before the port is opened waits there
    channel = await host.open_channel(spec.uuid, PORT)
    chunks = channel.read()
    hello = json.loads((await next_line(chunks)).splitlines()[0])
    assert hello["t"] == "hello"
    await channel.write(b'{"v":1}\n')
    again = await host.open_channel(spec.uuid, PORT)  # as an allocator does after a crash
    assert await next_line(again.read())
    await host.destroy(spec.uuid)
    async with asyncio.timeout(10):
        async for _chunk in again.read():  # it ends with the guest
            pass
    await channel.close()
    await again.close()
    await host.drop_disks(spec.uuid)
    await host.drop_console(spec.uuid)


async def test_faults_show_in_witness_and_guest(host: LibvirtHost, tiny: Image) -> None:
    healthy = await host.witness(GPU)
    assert healthy.present
    assert healthy.ids == ("1234:11e8", "1af4:1110")
    host.set_faults({GPU: "gone"})
    try:
        assert not (await host.witness(GPU)).present
        inventory = await host.survey()
        guest = TinyGuest(host, tiny, inventory, 40).with_gpu(inventory, GPU)
        await guest.start()
        await guest.ready()
        assert await guest.ask("test/gpu/list") == []
        await guest.drop()
    finally:
        host.set_faults({})


async def test_image_that_was_cut_off_is_not_there(
    host: LibvirtHost, tiny: Image, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"x" * 100)
    role = next(iter(tiny.files))
    file = replace(tiny.files[role], path=short, sha256="f" * 64, bytes=200)
    image = replace(tiny, digest="sha256:" + "e" * 64, files={role: file})
    with pytest.raises(HostError, match="shorter than its manifest says"):
        await host.put_image(image, lambda _done, _total: None)
    assert image.digest not in await host.images()
    good = replace(file, bytes=100)
    with pytest.raises(HostError, match="not what its manifest says"):
        await host.put_image(replace(image, files={role: good}), lambda _done, _total: None)
    assert image.digest not in await host.images()
    big = replace(file, bytes=1 << 60)
    with pytest.raises(HostError, match=r"no room for short .* MiB are free"):
        await host.put_image(replace(image, files={role: big}), lambda _done, _total: None)


async def test_kvm_that_hangs_or_aborts_is_not_taken(
    host: LibvirtHost, pools: Path, service: Image
) -> None:
    """Whatever this machine's KVM does, guests start with what the probe decided."""
    other = make_host("emu2", pools, accel="auto", service_image=service, cidr="10.233.0.0/24")
    async with opened(other):
        assert other.accel in ("kvm", "tcg")
        assert await other.guests() == []
        left = [name for name in await _volumes(other) if name.startswith("guest-")]
        assert left == []
        spec = replace(probe_spec(service, await other.survey()), kind="service")
        await other.make_disks(spec)
        await other.create(spec)
        channel = await other.open_channel(spec.uuid, PORT)
        assert b"hello" in await next_line(channel.read())
        await channel.close()


async def test_daemon_that_hangs_makes_the_host_unreachable_until_it_runs_again(
    host: LibvirtHost, tiny: Image, libvirtd: Daemon
) -> None:
    guest = TinyGuest(host, tiny, await host.survey(), 50)
    await guest.start()
    libvirtd.freeze()
    try:
        for _ in range(3):
            with pytest.raises(HostTimeout, match="abandoned"):
                await host._connection.call(lambda c: c.listAllDomains(), "listing", deadline_s=1)
        assert not host.reachable
        with pytest.raises(HostUnreachable):
            await host.guests()
        await asyncio.sleep(2)
    finally:
        libvirtd.thaw()
    await wait_for_async(lambda: host.reachable, 60, "the host to be reachable again")
    assert [each.uuid for each in await host.guests()] == [guest.uuid]  # it has gone on
    await guest.ready()
    await guest.drop()


async def test_home_on_memory_perhaps_without_direct_io(tiny: Image) -> None:
    """Whether or not this kernel's tmpfs has O_DIRECT, a home on it works."""
    with pools_folder("/dev/shm") as place:
        async with opened(make_host("emu3", place, cidr="10.235.0.0/24")) as other:
            await other.put_image(tiny, lambda _done, _total: None)
            await other.make_home("home-ada", 16)
            guest = TinyGuest(other, tiny, await other.survey(), 60).with_home("home-ada")
            await guest.start(home_new=True)
            assert await other.guest(guest.uuid) is not None


async def test_full_disk_is_named(pools: Path, libvirtd: Daemon) -> None:
    """Also for a seed that is so small that libvirt itself says nothing."""
    place = pools / "small"
    refused = r"no room .* pool gs-.*-emu5 at .* MiB are free"
    # libvirtd may have a mount namespace of its own.
    with small_disk(place, 40, libvirtd.enter) as disk:
        async with opened(make_host("emu5", place, cidr="10.236.0.0/24")) as other:
            disk.fill()
            for size in (100, 400 << 10):
                with pytest.raises(HostError, match=refused):
                    await other.put_seed(str(uuid.uuid4()), b"x" * size)
            disk.free()
            await other.put_seed(str(uuid.uuid4()), b"x" * (400 << 10))
            with pytest.raises(HostError, match=refused):
                await other.put_seed(str(uuid.uuid4()), b"x" * (48 << 20))


async def test_removing_a_host_leaves_nothing(pools: Path) -> None:
    async with opened(make_host("emu4", pools, cidr="10.234.0.0/24")):
        pass
    connection = libvirt.open("qemu:///system")
    try:
        for things in (
            connection.listAllStoragePools(),
            connection.listAllNetworks(),
            connection.listAllNWFilters(),
        ):
            assert not [each.name() for each in things if each.name().endswith("-emu4")]
    finally:
        connection.close()
    assert not (pools / "emu4").exists()


async def test_unknown_guests_are_nobody(host: LibvirtHost) -> None:
    nobody = str(uuid.uuid4())
    assert await host.guest(nobody) is None
    assert await host.console(nobody) == ""
    for step in (host.shutdown, host.destroy, host.eject_seed, host.drop_disks, host.drop_console):
        await step(nobody)
    with pytest.raises(HostError, match="is gone"):
        await host.open_channel(nobody, PORT)


async def _volumes(host: LibvirtHost) -> list[str]:
    return await host._connection.call(host._pool.names, "listing volumes")


async def _run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(*command)
    assert await process.wait() == 0
