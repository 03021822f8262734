"""``LibvirtHost``: a GPU host, real or emulated, through libvirt and a shell."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from gpuspawner.host import accel as accel_probe
from gpuspawner.host import guests as vms
from gpuspawner.host import nodedev, recovery, surveying, volumes
from gpuspawner.host.api import Channel, Guest, GuestSpec, HostError, Image, Rung
from gpuspawner.host.channel import StreamChannel
from gpuspawner.host.connection import THREADS, Connection
from gpuspawner.host.devices import real
from gpuspawner.host.domain import Options, build_domain
from gpuspawner.host.emulated import IDENTITY_BYTES, Emulated, identity_page, is_identity_page
from gpuspawner.host.handover import check_gpus
from gpuspawner.host.inspection import Inspection, inspect_declared
from gpuspawner.host.inventory import HostRules, parse_witness
from gpuspawner.host.network import GuestNetwork
from gpuspawner.host.shell import Shell
from gpuspawner.host.volumes import Owner, Pool
from gpuspawner.host.wiring import binding_of, find_parts, image_path
from gpuspawner.pool.topology import Gpu, Inventory
from gpuspawner.pool.verdict import Witness

log = logging.getLogger(__name__)

T = TypeVar("T")

DESTROY_S = 90.0
_MIB = 1024 * 1024


class LibvirtHost:
    """One GPU host.

    ``shell`` is the command that reaches its shell (``("ssh", "root@gpu1")``), empty for this
    machine, ``None`` if there is none: such a host shows what libvirt knows of it (``nodedev.py``)
    and gives out nothing. ``cidr`` is
    the guests' range. ``network`` is ``nat`` or ``bridge``, the latter with ``bridge`` naming one.
    ``accel`` is ``kvm``, ``tcg`` or ``auto``, which boots ``service_image`` under KVM to find out;
    after ``open`` the attribute ``accel`` says which it is. ``known_accel`` is the host's boot id
    and what the boot showed under it before. ``emulated_text`` makes it an emulated host.
    ``hub_address`` is where guests reach the hub's API; ``blocked`` are further networks
    that they must not reach. ``rules`` are an admin's say on a real host.
    """

    def __init__(
        self,
        name: str,
        *,
        instance: str,
        uri: str = "qemu:///system",
        shell: Sequence[str] | None = (),
        cidr: str = "10.201.0.0/24",
        network: str = "nat",
        bridge: str | None = None,
        gateway: str | None = None,
        accel: str = "auto",
        known_accel: tuple[str, str] = ("", ""),
        emulated_text: str | None = None,
        hub_address: tuple[str, int] | None = None,
        blocked: Sequence[str] = (),
        pool_path: str | None = None,
        service_image: Image | None = None,
        rules: HostRules | None = None,
        firmware: str = "bios",
    ) -> None:
        if (network == "bridge") != (bridge is not None):
            raise ValueError("network='bridge' needs bridge=, and only that does.")
        self.name = name
        self.accel = accel
        self._known_accel = known_accel
        self.resets: Counter[str] = Counter()  # of emulated GPUs, by address
        self._instance = instance
        self._shell = None if shell is None else Shell(name, shell)
        self._service_image = service_image
        self._rules = rules or HostRules()
        self._firmware = firmware
        self._emulated = None if emulated_text is None else Emulated.parse(emulated_text)
        pool = volumes.pool_name(instance, name)
        self._pool = Pool(pool, pool_path or f"/var/lib/libvirt/images/{pool}")
        self._network = GuestNetwork(
            instance, name, cidr, bridge, gateway, hub_address, tuple(blocked)
        )
        self._blocked: frozenset[str] = frozenset()
        self._closed: tuple[str, ...] | None = None
        self._on_change: Callable[[str], None] = lambda _uuid: None
        self._connection = Connection(name, uri, lambda uuid: self._on_change(uuid))
        self._capabilities = vms.Capabilities(False, False, 0, 0, ())
        self._real_cpus: tuple[int, ...] = ()
        self._inventory: Inventory | None = None
        self._home_cache = "none"
        self._copying = asyncio.Lock()
        # VMs take minutes to start and to end; one thread of the four is always left for the rest.
        self._slow = asyncio.Semaphore(THREADS - 1)
        self._starting: dict[str, float] = {}  # how long each VM that starts may take, in seconds
        self._listing = asyncio.Lock()

    # -- coming and going -------------------------------------------------------------------------

    async def open(self, on_change: Callable[[str], None]) -> None:
        """Connect, make pool, network and emulated GPUs ready, and find out about KVM."""
        self._on_change = on_change
        await self._connection.open()
        self._capabilities, self._real_cpus = await self._call(vms.look, "reading its capabilities")
        await self._call(self._pool.ensure, "preparing its storage pool", deadline_s=60)
        await self._close_network()
        await self._end_probes()
        if self._emulated is not None:
            for gpu in self._emulated.gpus:
                await self._make_gpu(gpu)
        await self.survey()
        if self.accel == "auto":
            self.accel = await self._known_or_tried()

    async def _known_or_tried(self) -> str:
        if self._shows_only:  # no guest is booted to find out
            return "kvm" if self._capabilities.kvm else "tcg"
        boot_id, known = self._known_accel
        if boot_id == await self._boot_id():
            return known
        assert self._inventory is not None
        return await accel_probe.find(
            self, self._inventory, self._service_image, kvm=self._capabilities.kvm
        )

    async def close(self) -> None:
        """Let go of connections and threads; guests go on."""
        await self._connection.close()

    async def remove(self) -> None:
        """Take VMs, network, filter and pool (with every home in it) off the host, for good."""
        for each in await self._listed():
            await self.destroy(each.guest.uuid)
        await self._call(self._network.remove, "removing its network", deadline_s=30)
        await self._call(self._pool.remove, "removing its storage pool", deadline_s=120)

    @property
    def reachable(self) -> bool:
        """False after three failures in a row, until a reconnect in the background succeeds."""
        return self._connection.reachable

    @property
    def _shows_only(self) -> bool:
        """A real host without a shell takes no guests."""
        return self._shell is None and self._emulated is None

    async def block(self, networks: frozenset[str]) -> None:
        """Networks and addresses that guests must not reach, beside the host's own."""
        self._blocked = networks

    async def _close_network(self) -> None:
        """Put network and filter right. The host's addresses come and go (a VPN, a container
        engine), and so do other hosts: what guests must not reach is looked up anew each time.
        Where that cannot be done no guest is started, and a filter that is there stays as it is."""
        if self._shows_only:
            return
        closed = (*self._network.blocked, *sorted(self._blocked), *await self._own_addresses())
        if closed != self._closed:
            network = replace(self._network, blocked=closed)
            await self._call(network.ensure, "preparing its network", deadline_s=30)
            self._closed = closed

    # -- what it has ------------------------------------------------------------------------------

    async def survey(self) -> Inventory:
        """What the host has now."""
        await self._close_network()
        return (await self._look_at_hardware())[0]

    async def _look_at_hardware(self) -> tuple[Inventory, dict[str, Any]]:
        """The inventory and, of a real host, the probe's answer."""
        if self._emulated is not None:
            self._inventory = self._emulated.inventory(self.name, await self._boot_id())
            return self._inventory, {}
        if self._shows_only:
            self._inventory, answer = await self._look_by_libvirt()
            return self._inventory, answer
        self._inventory, answer = await surveying.survey_real(
            self.name, self._probe, self._listed, self._rules
        )
        return self._inventory, answer

    async def inspect(self) -> Inspection:
        """The host as it is now, and what there is to put right on it."""
        said = await self._call(
            lambda connection: surveying.daemon(connection, self._pool),
            "asking for its versions and the room in its pool",
        )
        if self._emulated is None:
            try:
                await self._probe("boot")
            except HostError as error:
                inventory, answer = await self._look_by_libvirt()
                return surveying.inspect_by_libvirt(
                    inventory, answer, said, error, rules=self._rules, kvm=self._capabilities.kvm
                )
        inventory, answer = await self._look_at_hardware()
        if self._shell is None:
            return inspect_declared(inventory)
        return await surveying.inspect(
            inventory,
            answer,
            self._probe,
            said,
            rules=self._rules,
            kvm=self._capabilities.kvm,
            firmware=self._firmware,
        )

    async def _look_by_libvirt(self) -> tuple[Inventory, dict[str, Any]]:
        return await surveying.survey_by_libvirt(
            self.name,
            lambda: self._call(nodedev.listen, "asking for its hardware", deadline_s=60),
            self._rules,
        )

    async def gateway(self) -> str:
        """The host's address on the guests' network, without prefix."""
        return self._network.gateway_address

    async def witness(self, address: str) -> Witness:
        """What the host itself sees of a GPU. Of an emulated one: what its declaration says."""
        if self._emulated is None:
            return parse_witness(address, await self._probe("witness", address))
        gpu = self._emulated_gpu(address)
        gone = self._emulated.fault(address) == "gone"
        return Witness(
            address=address,
            present=not gone,
            boot_id=await self._boot_id(),
            ids=() if gone else gpu.ids,
            link_speed_gts=0.0 if gone else gpu.link_speed_gts,
            link_width=0 if gone else gpu.link_width,
            note="emulated, declared as gone" if gone else "emulated",
        )

    async def reset(self, address: str) -> None:
        """Reset the GPU, all functions of it. An emulated one begins anew with each VM."""
        if self._emulated is None:
            await self._probe("reset", address, deadline_s=60)
        else:
            self._emulated_gpu(address)
            self.resets[address] += 1

    async def recover(self, address: str) -> tuple[Rung, ...]:
        """Try to bring back a GPU that does not answer, step by step."""
        if self._emulated is not None:
            return ()
        return await recovery.recover(address, self._probe)

    async def released(self, address: str) -> bool:
        """No process holds the GPU: its VFIO group opens; an emulated one's memory is not open
        in any process, and no VM names it."""
        if self._emulated is None:
            return bool((await self._probe("released", address))["released"])
        self._emulated_gpu(address)
        found = await self._listed()
        if any(address in each.gpus for each in found):
            return False
        if self._shell is None:
            return True
        path = await self._volume_path(volumes.gpu_volume(address))
        return not (await self._probe("holders", path))["holders"]

    def set_faults(self, faults: Mapping[str, str]) -> None:
        """Give an emulated host's GPUs these faults (address to ``gone`` or ``dma_mask``), and
        all others none. Attached devices change with their next VM."""
        if self._emulated is None:
            raise HostError(f"Host {self.name} is real; its faults cannot be set.", "")
        self._emulated = self._emulated.with_faults(faults)

    # -- images and disks -------------------------------------------------------------------------

    async def images(self) -> frozenset[str]:
        """Digests of the images that lie on the host, whole."""
        return volumes.marked_images(await self._call(self._pool.names, "listing its volumes"))

    async def put_image(self, image: Image, progress: Callable[[int, int], None]) -> None:
        """Copy an image onto the host; ``progress(done, total)`` on the event loop."""
        loop = asyncio.get_running_loop()

        def told(done: int, total: int) -> None:
            loop.call_soon_threadsafe(progress, done, total)

        async with self._copying:
            await self._connection.transfer(
                lambda connection, beat: volumes.put_image(
                    self._pool, connection, image, beat, told
                ),
                f"copying the image {image.name}",
            )

    async def make_home(self, volume: str, size_mib: int) -> bool:
        """Make the home volume unless it is there. True if it was made now, or if nothing was
        ever written to it: then a guest may format it, also after a crash in between."""
        name = volumes.home_volume(volume)

        def make(connection: Any) -> bool:
            made = self._pool.make(connection, name, size_mib * _MIB)
            return made or self._pool.untouched(connection, name)

        return await self._call(make, f"making the home {volume}")

    async def drop_home(self, volume: str) -> None:
        """Delete a home volume for good."""
        await self._drop(volumes.home_volume(volume))

    async def make_disks(self, spec: GuestSpec) -> None:
        """The throw-away overlay over the image's root, and an empty console log."""

        def make(connection: Any) -> None:
            self._pool.make(connection, volumes.guest_volume(spec.uuid, "console"), 0)
            root = spec.image.files.get("root")
            if root is not None:
                self._pool.make(
                    connection,
                    volumes.guest_volume(spec.uuid, "root"),
                    root.virtual_mib * _MIB,
                    backing=(image_path(self._pool, connection, spec.image, "root"), root.format),
                )

        await self._call(make, f"making the disks of {spec.uuid}")

    async def put_seed(self, uuid: str, content: bytes) -> None:
        """Write the seed disk of a guest that is not made yet; anew if there was one."""
        name = volumes.guest_volume(uuid, "seed")

        def put(connection: Any, beat: Callable[[], None]) -> None:
            self._pool.drop(connection, name)
            self._pool.make(connection, name, len(content))
            self._pool.upload(
                connection, name, iter((content,)), len(content), lambda _done: beat()
            )

        await self._connection.transfer(put, f"writing the seed of {uuid}")

    async def disk_owners(self) -> frozenset[str]:
        """UUIDs of the guests, living or dead, that have an overlay, seed or console here."""
        names = await self._call(self._pool.names, "listing its volumes")
        return frozenset(uuid for uuid in map(volumes.guest_of, names) if uuid is not None)

    async def drop_disks(self, uuid: str) -> None:
        """Delete the guest's overlay and seed. The console log stays."""
        for part in ("root", "seed"):
            await self._drop(volumes.guest_volume(uuid, part))

    # -- guests -----------------------------------------------------------------------------------

    async def create(self, spec: GuestSpec) -> None:
        """Start the VM. Success when it is there already."""
        if real(spec) and await self.guest(spec.uuid) is None:
            await check_gpus(await self.survey(), real(spec), self._probe)
        deadline_s = vms.start_deadline_s(spec, self.accel)
        try:
            await self._create(spec, deadline_s)
        except HostError as error:
            if self._home_cache != "none" or not vms.no_direct_io(error.__cause__):
                raise
            log.warning("host %s: no O_DIRECT under its pool; homes are writethrough", self.name)
            self._home_cache = "writethrough"
            await self._create(spec, deadline_s)

    async def eject_seed(self, uuid: str) -> None:
        """Take the seed disk out of the running guest and delete it."""
        await self._call(
            lambda connection: vms.eject(connection, uuid), f"ejecting the seed of {uuid}"
        )
        await self._drop(volumes.guest_volume(uuid, "seed"))

    async def guests(self) -> list[Guest]:
        """This installation's VMs on the host."""
        found = await self._listed()
        return [each.guest for each in found if each.guest.kind != vms.PROBE]

    async def guest(self, uuid: str) -> Guest | None:
        """One VM, or ``None`` if the host has none with this UUID."""
        return await self._call(
            lambda connection: vms.one(connection, uuid), f"looking for the VM {uuid}"
        )

    async def shutdown(self, uuid: str) -> None:
        """Press the ACPI power button; returns at once."""
        await self._call(lambda connection: vms.shutdown(connection, uuid), f"shutting down {uuid}")

    async def resume(self, uuid: str) -> None:
        """Let a VM go on that is paused because its disk had no room."""
        await self._call(lambda connection: vms.resume(connection, uuid), f"resuming {uuid}")

    async def destroy(self, uuid: str) -> None:
        """End the VM now, and see its process gone."""
        async with self._slow:
            await self._call(
                lambda connection: vms.destroy(connection, uuid, DESTROY_S - 10),
                f"ending the VM {uuid}",
                deadline_s=DESTROY_S,
            )

    async def console(self, uuid: str, last_bytes: int = 16384) -> str:
        """The end of the guest's serial console, control characters removed; empty if there is
        no log."""
        name = volumes.guest_volume(uuid, "console")

        def read(connection: Any, _beat: Callable[[], None]) -> bytes:
            last = self._pool.tail(connection, name, last_bytes)
            if len(last) < last_bytes:  # virtlogd begins a new file at 2 MiB
                last = self._pool.tail(connection, f"{name}.0", last_bytes - len(last)) + last
            return last

        content = await self._connection.transfer(read, f"reading the console of {uuid}")
        return vms.readable(content)

    async def drop_console(self, uuid: str) -> None:
        """Delete the guest's console log, with what virtlogd has rotated out of it."""
        name = volumes.guest_volume(uuid, "console")

        def drop(connection: Any) -> None:
            self._pool.refresh(connection)
            for each in self._pool.names(connection):
                if each == name or each.startswith(f"{name}."):
                    self._pool.drop(connection, each)

        await self._call(drop, f"deleting the console of {uuid}")

    async def open_channel(self, uuid: str, port: str) -> Channel:
        """Open a virtio-serial port of a running guest. What the guest wrote before waits."""
        channel = StreamChannel(self._connection, asyncio.get_running_loop())
        await self._call(
            lambda connection: channel.attach(connection, uuid, port),
            f"opening the port {port} of {uuid}",
        )
        return channel

    # -- beneath ----------------------------------------------------------------------------------

    async def _call(self, fn: Callable[[Any], T], what: str, deadline_s: float = 20.0) -> T:
        return await self._connection.call(fn, what, deadline_s=deadline_s)

    async def _probe(self, verb: str, *arguments: str, deadline_s: float = 20.0) -> dict[str, Any]:
        if self._shell is None:
            raise HostError(
                f"Host {self.name} has no shell, so its GPUs cannot be looked at.",
                "Add it again with '--shell' and a command that reaches one, such as "
                "'ssh -o BatchMode=yes root@HOST'; python3 must be there.",
            )
        return await self._shell.probe(verb, *arguments, deadline_s=deadline_s)

    async def _boot_id(self) -> str:
        if self._shell is not None:
            return str((await self._probe("boot"))["boot_id"])
        return surveying.own_boot_id()

    async def _own_addresses(self) -> list[str]:
        """The host's addresses on other networks than the guests': no guest may reach them."""
        if self._shell is None:
            return []
        return [str(each) for each in (await self._probe("addresses"))["addresses"]]

    async def _listed(self) -> list[vms.Found]:
        # libvirt keeps a VM to itself while it starts, and so its list from everybody. One list
        # waits for that, not one on each thread.
        async with self._listing:
            deadline_s = max([20.0, *self._starting.values()])
            return await self._call(self._list, "listing its VMs", deadline_s)

    def _list(self, connection: Any) -> list[vms.Found]:
        return vms.listing(connection, self._instance, self.name)

    async def _drop(self, name: str) -> None:
        await self._call(
            lambda connection: self._pool.drop(connection, name), f"deleting the volume {name}"
        )

    async def _volume_path(self, name: str) -> str:
        return await self._call(
            lambda connection: self._pool.path_of(connection, name), f"looking for {name}"
        )

    async def _create(self, spec: GuestSpec, deadline_s: float) -> None:
        if self._inventory is None:
            await self.survey()
        assert self._inventory is not None
        options = Options(
            instance=self._instance,
            host=self.name,
            accel="kvm" if self.accel in ("kvm", "auto") else "tcg",  # auto: it is being tried
            hugepages_kib=self._inventory.hugepages_kib,
            mmio_window_mib=self._inventory.mmio_window_mib,
            amd=self._capabilities.amd,
            firmware=self._firmware,
        )
        binding = binding_of(self._inventory, self._real_cpus if self._emulated else None)

        def start(connection: Any) -> None:
            if vms.lookup(connection, spec.uuid) is None:
                parts = replace(
                    find_parts(self._pool, connection, spec, self._fault),
                    home_cache=self._home_cache,
                    network=self._network.libvirt_network,
                    bridge=self._network.bridge,
                    nwfilter=self._network.name,
                    confining_models=self._capabilities.confining_models,
                )
                vms.create(connection, spec.uuid, build_domain(spec, binding, parts, options))

        try:
            async with self._slow:
                self._starting[spec.uuid] = deadline_s
                await self._call(start, f"starting the VM {spec.uuid}", deadline_s)
        except ValueError as error:
            raise HostError(str(error), "Change the profile that asks for this.") from error
        finally:
            self._starting.pop(spec.uuid, None)

    def _fault(self, gpu: Gpu) -> str:
        return "none" if self._emulated is None else self._emulated.fault(gpu.address)

    def _emulated_gpu(self, address: str) -> Gpu:
        assert self._emulated is not None
        for gpu in self._emulated.gpus:
            if gpu.address == address:
                return gpu
        raise HostError(
            f"Host {self.name} has no GPU at {address}.", "Add it to the host's declaration."
        )

    async def _make_gpu(self, gpu: Gpu) -> None:
        """The memory of an emulated GPU, stamped once with who it is. What a killed allocator
        made and did not stamp is all zeros, and is stamped now."""
        name = volumes.gpu_volume(gpu.address)
        owner = Owner(self._capabilities.qemu_uid, self._capabilities.qemu_gid)
        page = identity_page(self._instance, self.name, gpu)

        def make(connection: Any, beat: Callable[[], None]) -> None:
            self._pool.make(connection, name, gpu.memory_mib * _MIB, owner=owner)
            if not is_identity_page(self._pool.download(connection, name, 0, IDENTITY_BYTES)):
                self._pool.upload(connection, name, iter((page,)), len(page), lambda _: beat())

        await self._connection.transfer(make, f"making the emulated GPU {gpu.address}")

    async def _end_probes(self) -> None:
        for each in await self._listed():
            if each.guest.kind == vms.PROBE:
                await self.destroy(each.guest.uuid)
                await self.drop_disks(each.guest.uuid)
                await self.drop_console(each.guest.uuid)
