"""Whether GPUs can go to a VM now. VFIO and libvirt let half of an IOMMU group pass where nothing
holds the other half, and refuse a GPU that a process holds late, with words for developers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from gpuspawner.host.api import HostError
from gpuspawner.pool.topology import Gpu, Inventory

Probe = Callable[[str, str], Awaitable[dict[str, Any]]]


async def check_gpus(inventory: Inventory, gpus: Sequence[Gpu], probe: Probe) -> None:
    """Raise ``HostError`` unless each of the GPUs is as it was surveyed, whole and unused.

    ``inventory`` is what the host has now, ``gpus`` what the VM is to get, and ``probe`` asks the
    host's probe for a verb and an address.
    """
    now = {gpu.address: gpu for gpu in inventory.gpus}
    for gpu in gpus:
        found = now.get(gpu.address)
        if found is None:
            raise HostError(
                f"GPU {gpu.address} does not answer on the bus of host {inventory.host}.",
                "See to the card; the pool takes it back once it answers and is retested.",
            )
        if found.problems:
            raise HostError(f"GPU {gpu.address} cannot be used.", " ".join(found.problems))
        if found.functions != gpu.functions:
            raise HostError(
                f"GPU {gpu.address} was to be passed on as {', '.join(gpu.functions)}; its IOMMU "
                f"group holds {', '.join(found.functions)}.",
                "All functions of a group go to one VM. Let the host be surveyed again.",
            )
        answer = await probe("released", gpu.address)
        if not answer["released"]:
            holders = ", ".join(f"{each['name']} ({each['pid']})" for each in answer["holders"])
            raise HostError(
                f"GPU {gpu.address} of host {inventory.host} is held by {holders or 'a process'}.",
                "A VM that is not of this pool may have it: end it on the host.",
            )
