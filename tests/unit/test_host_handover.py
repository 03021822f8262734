"""What is looked at before a GPU is handed to a VM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuspawner.host.api import HostError
from gpuspawner.host.handover import check_gpus
from gpuspawner.pool.topology import Gpu, Inventory

WHOLE = Gpu("0000:41:00.0", "GPU", 0, ("0000:41:00.0", "0000:41:00.1"), 15)


def inventory(*gpus: Gpu) -> Inventory:
    """A host with these GPUs."""
    return Inventory("gpu1", "boot-1", (), gpus)


async def free(verb: str, address: str) -> dict[str, Any]:
    """A probe that finds nobody at the GPU."""
    assert (verb, address) == ("released", WHOLE.address)
    return {"released": True, "holders": []}


async def taken(verb: str, address: str) -> dict[str, Any]:
    """A probe that finds a VM at the GPU."""
    return {"released": False, "holders": [{"pid": 77, "name": "qemu-system-x86"}]}


async def test_a_whole_and_free_gpu_may_go() -> None:
    await check_gpus(inventory(WHOLE), [WHOLE], free)


@pytest.mark.parametrize(
    ("now", "wanted", "probe", "why"),
    [
        ((), WHOLE, free, "does not answer on the bus of host gpu1"),
        ((WHOLE,), replace(WHOLE, functions=WHOLE.functions[:1]), free, "IOMMU group holds"),
        ((replace(WHOLE, problems=("Bound to nouveau.",)),), WHOLE, free, "Bound to nouveau."),
        ((WHOLE,), WHOLE, taken, r"held by qemu-system-x86 \(77\)"),
    ],
    ids=["gone", "half of a group", "not bound", "taken"],
)
async def test_what_may_not_go_says_why(
    now: tuple[Gpu, ...], wanted: Gpu, probe: Any, why: str
) -> None:
    with pytest.raises(HostError, match=why) as caught:
        await check_gpus(inventory(*now), [wanted], probe)
    assert caught.value.remedy
