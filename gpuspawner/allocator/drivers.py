"""From a host's settings to its driver."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from gpuspawner.allocator.images import ImageStore
from gpuspawner.hardware import HostHardware
from gpuspawner.host.api import GpuHost
from gpuspawner.host.inventory import GpuRule, HostRules


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """What every host's driver is told: ``hub_address`` is all that guests may reach of the
    host, ``instance`` stands in every name on it."""

    instance: str
    hub_address: tuple[str, int]
    pool_dir: str
    state_dir: str
    images: ImageStore


def host_rules(host: dict[str, Any]) -> HostRules:
    """An admin's say from a host's settings; those stored before there was one have the default.
    Raises ``ValueError`` for what is not understood."""
    hardware = HostHardware.model_validate(host.get("hardware") or {})
    return HostRules(
        gpus=tuple(
            GpuRule(
                vendor=rule.vendor,
                device=rule.device,
                classes=rule.class_prefixes(),
                model=rule.model,
                memory_mib=rule.memory_mib,
                kind=rule.kind,
            )
            for rule in hardware.gpus
        ),
        system_cores=hardware.system_cores,
        reserve_mib=hardware.reserve_mib,
        nodes_of=tuple(sorted(hardware.gpu_nodes.items())),
        hugepages=hardware.hugepages,
    )


def libvirt_host(name: str, host: dict[str, Any], settings: DriverSettings) -> GpuHost:
    """The libvirt driver. libvirt is imported here, so that other drivers do without it."""
    from gpuspawner.host.libvirt_host import LibvirtHost

    return LibvirtHost(
        name,
        instance=settings.instance,
        uri=host["uri"],
        shell=host["shell"],
        cidr=host["cidr"],
        network=host["network"],
        bridge=host["bridge"],
        accel=host["accel"],
        known_accel=host.get("known_accel") or ("", ""),
        emulated_text=host["emulated"],
        rules=host_rules(host),
        hub_address=settings.hub_address,
        pool_path=str(PurePosixPath(settings.pool_dir) / f"gs-{settings.instance}-{name}"),
        service_image=settings.images.service(),
    )
