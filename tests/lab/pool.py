"""A pool whose one host is the lab: reached by ssh, its guests over a bridge."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from deploy.labhost import network
from deploy.labhost.machine import LabGpu
from deploy.labhost.running import Lab
from gpuspawner import schema
from gpuspawner.allocator.drivers import host_rules
from gpuspawner.cli.hardware import read_hardware
from gpuspawner.host.inventory import HostRules
from gpuspawner.host.shell import Shell
from tests.layers import wait_for_async
from tests.vm.pool import Pool

START_S = 300.0  # a guest on an emulated host: two minutes, on a loaded machine more
DIAGNOSIS_S = 420.0


def rules_of(lab: Lab) -> HostRules:
    """What the pool is told about the lab host's hardware."""
    return host_rules({"hardware": read_hardware(lab.hardware).model_dump()})


class LabPool(Pool):
    """``Pool``, for the lab host."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        traits: dict[str, Any] = {
            "pool_dir": "/var/lib/gpuspawner",
            "hub_guest_url": f"http://{lab.networks.gateway}:8081/hub/api",
            "diagnosis_s": DIAGNOSIS_S,
            "diagnosis_silence_s": 150.0,
            "stop_s": 90.0,
        }
        super().__init__(folder, host="lab", **traits)
        self.lab = lab
        self.uris = [lab.uri]
        self.shell = Shell("lab", lab.shell)

    async def add_lab(self) -> None:
        """Add the host as ``deploy/lab start`` says, and wait until it is ready."""
        await self.client.add_host(
            schema.AddHost(
                name=self.host,
                uri=self.lab.uri,
                shell=self.lab.shell,
                cidr=self.lab.networks.guests,
                network="bridge",
                bridge=network.BRIDGE,
                accel="kvm",
                hardware=read_hardware(self.lab.hardware),
            )
        )

        async def ready() -> bool:
            return (await self.record()).state == "ready"

        await wait_for_async(ready, START_S, "the lab host to be ready", 0.5)

    async def record(self) -> schema.Host:
        """The host as the pool shows it."""
        return next(host for host in await self.client.hosts() if host.name == self.host)

    async def hold(self, gpu: LabGpu) -> None:
        """Keep a GPU out of use."""
        action = schema.GpuAction(action="hold", reason="the tests do without")
        await self.client.gpu_action(self.host, gpu.address, action)

    async def unhold(self, gpu: LabGpu) -> None:
        """Let it be used again."""
        action = schema.GpuAction(action="unhold")
        await self.client.gpu_action(self.host, gpu.address, action)

    async def lab_gpu_in(self, gpu: LabGpu, *states: str) -> schema.Gpu:
        """Wait until a GPU of the lab is in one of these states."""
        return await self.gpu_in(*states, timeout=DIAGNOSIS_S, address=gpu.address)

    async def on_host(self, *words: str) -> str:
        """What a command on the lab host prints."""
        done = await asyncio.to_thread(self.lab.ssh, words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def qemu_pid(self, lease_id: str) -> int:
        """The process of a lease's VM on the lab host."""
        return int(await self.on_host("cat", f"/run/libvirt/qemu/{self.domain(lease_id)}.pid"))

    def virsh(self, *words: str, uri: str = "") -> str:
        """What an admin would type, on the lab's libvirt."""
        return super().virsh(*words, uri=uri or self.lab.uri)
