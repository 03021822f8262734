"""The JupyterLab image under the real hub: kills, files, and the GPU from a notebook."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.layers import wait_for_async
from tests.vm.daemon import Daemon
from tests.vm.hub import HubSite, Lab
from tests.vm.pool import declaration


async def test_kernels_outlive_hub_allocator_and_libvirtd_and_files_outlive_qemu(
    site_folder: Path, images_dir: Path, libvirtd: Daemon
) -> None:
    """With a notebook running: the hub is killed and started again, then libvirtd, then the
    allocator; the kernel goes on with its variables. QEMU is killed; what was fsynced is there at
    the next start, and the hub has noticed by itself. After a normal stop everything is."""
    site = HubSite(site_folder / "site")
    site.use_image(images_dir / "service")
    site.use_image(images_dir / "lab")
    try:
        await asyncio.to_thread(site.start)
        await site.add_host(declaration())
        await site.gpu_in("unassigned")
        site.start_proxy()
        await site.start_hub()

        lab = Lab("ada", await site.start_lab("ada"))
        await lab.start_kernel()
        assert "Emulated GPU 16M" in await lab.run("!gpuspawner-gpu")
        told = await lab.run("!gpuspawner-gpu test; echo rc=$?")
        assert "rc=0" in told, told
        await lab.run("x = 41")

        site.kill_child("hub")
        assert (await lab_still_there(lab)) is not None
        await site.start_hub()
        await site.lab_ready("ada")
        assert await lab.run("print(x + 1)") == "42\n"

        libvirtd.kill()
        assert await lab.run("print(x + 2)") == "43\n"
        await asyncio.to_thread(libvirtd.start)
        leases = await site.client.leases(username="ada", server_name="")
        assert [lease.state for lease in leases] == ["running"]
        assert await lab.run("print(x + 3)") == "44\n"

        site.kill()
        assert await lab.run("print(x + 4)") == "45\n"
        await asyncio.to_thread(site.start)
        leases = await site.client.leases(username="ada", server_name="")
        assert [lease.state for lease in leases] == ["running"]
        assert await lab.run("print(x + 5)") == "46\n"

        await lab.run(
            "import os\n"
            "f = open(os.path.expanduser('~/kept.txt'), 'w'); f.write('fsynced')\n"
            "f.flush(); os.fsync(f.fileno())"
        )
        site.kill_qemu(leases[0].id)
        assert (await site.ended(leases[0].id)).reason == "guest-gone"

        async def noticed() -> bool:
            _status, model = await site.hub("GET", "users/ada")
            return not model["servers"]

        await wait_for_async(noticed, 90, "the hub to notice that the server is gone", 1.0)
        await site.gpu_in("unassigned")

        lab = Lab("ada", await site.start_lab("ada"))
        await lab.start_kernel()
        assert "fsynced" in await lab.run("print(open('/home/jovyan/kept.txt').read())")
        await lab.run("open('/home/jovyan/plain.txt', 'w').write('not synced')")
        await site.stop_lab("ada")
        await site.gpu_in("unassigned")

        lab = Lab("ada", await site.start_lab("ada"))
        assert (await lab.call("GET", "contents/plain.txt"))["content"] == "not synced"
        assert b"JUPYTERHUB_API_TOKEN" not in (site.folder / "allocator.log").read_bytes()
    finally:
        await site.remove()


async def lab_still_there(lab: Lab) -> object:
    """JupyterLab answers through the proxy although there is no hub."""
    return await lab.call("GET", "status")
