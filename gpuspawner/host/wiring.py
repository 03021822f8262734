"""Where a guest's claim and files really are on its host: what the domain builder is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpuspawner.host import volumes
from gpuspawner.host.api import GuestSpec, HostError, Image
from gpuspawner.host.devices import EmulatedMemory, Parts
from gpuspawner.host.domain import Binding
from gpuspawner.host.volumes import Pool
from gpuspawner.pool.topology import Gpu, Inventory


def binding_of(inventory: Inventory, real_cpus: tuple[int, ...] | None) -> Binding:
    """A host's binding. ``real_cpus`` are those that play an emulated host's; ``None``: the
    inventory's CPUs are the real ones."""
    system = {cpu for core in inventory.system_cores for cpu in core}
    return Binding(
        nodes={node.id: node for node in inventory.nodes},
        cpus=real_cpus or (),
        single_node=None if real_cpus is None else 0,
        housekeeping={
            node.id: tuple(cpu for core in node.cores for cpu in core if cpu in system)
            for node in inventory.nodes
        },
        distances={
            (node.id, other): distance
            for node in inventory.nodes
            for other, distance in node.distances
        },
    )


def find_parts(pool: Pool, connection: Any, spec: GuestSpec, fault: Callable[[Gpu], str]) -> Parts:
    """The files of a guest, each of which must be there. ``fault`` tells what is wrong with an
    emulated GPU. Network and cache mode are left for the caller."""

    def path(name: str) -> str:
        return pool.path_of(connection, name)

    files = spec.image.files
    kernel, initrd = (
        image_path(pool, connection, spec.image, role) if role in files else None
        for role in ("kernel", "initrd")
    )
    return Parts(
        console=path(volumes.guest_volume(spec.uuid, "console")),
        kernel=kernel,
        initrd=initrd,
        root=path(volumes.guest_volume(spec.uuid, "root")) if "root" in files else None,
        home=path(volumes.home_volume(spec.home)) if spec.home is not None else None,
        seed=path(volumes.guest_volume(spec.uuid, "seed")) if spec.seed else None,
        gpu_memories={
            gpu.address: EmulatedMemory(
                path(volumes.gpu_volume(gpu.address)), gpu.memory_mib, fault(gpu)
            )
            for gpu in spec.gpus
            if gpu.emulated
        },
    )


def image_path(pool: Pool, connection: Any, image: Image, role: str) -> str:
    """Where a file of an image lies. An image that lost one loses its mark too, so that it counts
    as absent and is copied again."""
    try:
        return pool.path_of(connection, volumes.file_volume(image.files[role]))
    except HostError:
        pool.drop(connection, volumes.image_mark(image.digest))
        raise
