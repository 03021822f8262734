"""From a host's settings to its driver."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from gpuspawner.allocator.images import ImageStore
from gpuspawner.host.api import GpuHost


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """What every host's driver is told: ``hub_address`` is all that guests may reach of the
    host, ``instance`` stands in every name on it."""

    instance: str
    hub_address: tuple[str, int]
    pool_dir: str
    state_dir: str
    images: ImageStore


def libvirt_host(name: str, host: dict[str, Any], settings: DriverSettings) -> GpuHost:
    """The libvirt driver. libvirt is imported here, so that other drivers do without it."""
    from gpuspawner.host.libvirt_host import LibvirtHost

    return LibvirtHost(
        name,
        instance=settings.instance,
        uri=host["uri"],
        shell=tuple(host["shell"]),
        cidr=host["cidr"],
        network=host["network"],
        bridge=host["bridge"],
        accel=host["accel"],
        known_accel=host.get("known_accel") or ("", ""),
        emulated_text=host["emulated"],
        hub_address=settings.hub_address,
        pool_path=str(PurePosixPath(settings.pool_dir) / f"gs-{settings.instance}-{name}"),
        service_image=settings.images.service(),
    )
