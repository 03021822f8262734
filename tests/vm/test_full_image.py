"""The JupyterLab image under the real hub: kills, files, the welcome notebook, and the GPU."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import math
from pathlib import Path

import pytest
import tifffile

from images.lab import scene
from tests.layers import wait_for_async
from tests.vm.daemon import Daemon
from tests.vm.hub import HubSite, Lab
from tests.vm.pool import declaration


async def test_kernels_outlive_hub_allocator_and_libvirtd_and_files_outlive_qemu(
    site_folder: Path, images_dir: Path, libvirtd: Daemon
) -> None:
    """With a notebook running: the hub is killed and started again, then libvirtd, then the
    allocator; the kernel goes on with its variables. QEMU is killed; what was fsynced is there at
    the next start, and the hub has noticed by itself. After a normal stop everything is.
    JupyterLab opens with the welcome notebook, which runs in the guest, until it has been used."""
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
        assert await lab.first_page() == "/lab/tree/welcome/ndvi.ipynb"
        await lab.start_kernel()
        await the_welcome_notebook_is_right(lab)
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
        assert await lab.first_page() == "/lab/tree/welcome/ndvi.ipynb"
        await lab.use()
        await site.stop_lab("ada")
        await site.gpu_in("unassigned")

        lab = Lab("ada", await site.start_lab("ada"))
        assert (await lab.call("GET", "contents/plain.txt"))["content"] == "not synced"
        assert await lab.first_page() == "/lab"
        assert b"JUPYTERHUB_API_TOKEN" not in (site.folder / "allocator.log").read_bytes()
    finally:
        await site.remove()


async def lab_still_there(lab: Lab) -> object:
    """JupyterLab answers through the proxy although there is no hub."""
    return await lab.call("GET", "status")


async def the_welcome_notebook_is_right(lab: Lab) -> None:
    """Every cell of the user's copy runs in the guest; a map and the GPU are shown, and the means
    are those that tifffile and the file's own tags give for the pinned scene out here."""
    book = (await lab.call("GET", "contents/welcome/ndvi.ipynb"))["content"]
    printed, shown = "", []
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            text, displayed = await lab.execute(cell["source"])
            printed, shown = printed + text, shown + displayed
    assert "EPSG:31985" in printed
    assert "Emulated GPU 16M" in printed
    (picture,) = (base64.b64decode(data["image/png"]) for data in shown if "image/png" in data)
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 100_000

    await lab.run(f"!cp /{scene.DIRECTORY}/{scene.LANDSAT.file} ~/scene.tif")
    model = await lab.call("GET", "contents/scene.tif?type=file&format=base64")
    tif = base64.b64decode(model["content"])
    assert hashlib.sha256(tif).hexdigest() == scene.LANDSAT.sha256
    told = await lab.run(
        "import json; print(json.dumps({n: [*WINDOWS[n], means[n]] for n in means}))"
    )
    means = json.loads(told)
    assert set(means) == {"forest", "town", "sea"}
    for *edges, mean in means.values():
        assert mean == pytest.approx(mean_ndvi(tif, *edges), abs=1e-9)
    assert means["sea"][-1] < -0.5 < means["town"][-1] < 0.1 < means["forest"][-1]


def mean_ndvi(tif: bytes, left: float, bottom: float, right: float, top: float) -> float:
    """Of the pixels whose centres lie between these edges in metres; red is the third sample of a
    pixel and near infrared the fourth."""
    with tifffile.TiffFile(io.BytesIO(tif)) as file:
        (page, *_) = file.pages
        counts = page.asarray().astype(int)
        across, down, _ = page.tags["ModelPixelScaleTag"].value
        *_, west, north, _ = page.tags["ModelTiepointTag"].value
    columns = [math.ceil((edge - west) / across - 0.5) for edge in (left, right)]
    rows = [math.ceil((north - edge) / down - 0.5) for edge in (top, bottom)]
    pixels = counts[slice(*rows), slice(*columns)].reshape(-1, counts.shape[2]).tolist()
    return math.fsum((nir - red) / (nir + red) for _, _, red, nir, *_ in pixels) / len(pixels)
