"""Over the whole life of a server no secret stands anywhere but where it is needed."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.layers import wait_for, wait_for_async
from tests.service.front import visitor
from tests.vm.daemon import Daemon
from tests.vm.hub import BASE, PASSWORD, TINY, HubSite
from tests.vm.picture import SEED, dump
from tests.vm.pool import TOKEN as SPAWNER_TOKEN
from tests.vm.pool import Server, declaration

# The files that hold a secret because that is what they are for.
KEPT_IN = {
    "spawner.token",
    "service.token",
    "proxy.token",
    "password",
    "admin.password",
    "jupyterhub.cookie_secret",
    "pages.cookie_secret",
}
PLANTED = "planted-where-the-search-must-find-it"
LIBVIRT = ("/run/libvirt", "/etc/libvirt", "/var/lib/libvirt", "/var/log/libvirt")


class Watch:
    """Looks at the command lines of all processes, again and again, and at QEMU's environment."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(0.1):
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    words = (folder / "cmdline").read_bytes()
                    self.seen.add(words)
                    if Path(words.split(b"\0")[0].decode()).name.startswith(("qemu", "libvirt")):
                        self.seen.add((folder / "environ").read_bytes())
                except OSError:  # it has ended
                    continue


def forms(secret: str) -> Iterator[bytes]:
    """A secret as it stands, and as it may be written."""
    raw = secret.encode()
    yield from (raw, base64.b64encode(raw), raw.hex().encode(), quote(secret).encode())


def leaks(secrets: dict[str, str], places: dict[str, bytes]) -> list[str]:
    """Which secret stands in which place."""
    return [
        f"{name} in {place}"
        for place, content in places.items()
        for name, secret in secrets.items()
        if any(form in content for form in forms(secret))
    ]


def files(*folders: Path) -> dict[str, bytes]:
    """All files below, but for images and those in ``KEPT_IN``."""
    return {
        str(path): path.read_bytes()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file()
        and path.name not in KEPT_IN
        and not path.name.startswith("file-")
        and "images" not in path.parts
    }


def planted_process(watch: Watch) -> None:
    """One that the watch must see."""
    command = [sys.executable, "-c", "input()", PLANTED]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        wait_for(lambda: any(PLANTED.encode() in seen for seen in watch.seen), 20, "the watch")
        process.communicate(b"\n")


def log_folder(libvirtd: Daemon) -> Path:
    """Where libvirtd and virtlogd write."""
    return Path(os.readlink(f"/proc/{libvirtd.pid}/fd/2")).parent


@pytest.fixture
async def site(site_folder: Path, images_dir: Path, libvirtd: Daemon):
    """Allocator, proxy and hub, with a profile of the tiny guest."""
    site = HubSite(site_folder / "site", TINY, log_name="DEBUG")
    site.use_image(images_dir / "service")
    site.use_image(images_dir / "tiny")
    try:
        await asyncio.to_thread(site.start)
        await site.add_host(declaration())
        await site.gpu_in("unassigned")
        site.start_proxy()
        await site.start_hub()
        yield site
    finally:
        await site.remove()


async def test_secrets_stand_nowhere(site: HubSite, libvirtd: Daemon) -> None:
    """The server's token is taken from the seed while that is there, and is shown to be what the
    guest was given and what the hub takes. Then everything that is left is searched."""
    places: dict[str, bytes] = {}
    with Watch() as watch:
        async with visitor(BASE) as ada:
            page = await ada.log_in("ada", PASSWORD)
            assert page.status == 200, page.text
            # The hub may answer only when the server runs; the seed is gone by then.
            asked = asyncio.create_task(site.ask_for_lab("ada"))
            token = await token_in_seed(site)
            lease = (await site.client.leases("ada", ""))[0]
            xml = ("dumpxml", "--security-info", site.domain(lease.id))
            places["XML of the starting domain"] = site.virsh(*xml).encode()
            await asked
            await site.lab_ready("ada")
            places["XML of the running domain"] = site.virsh(*xml).encode()
            assert (await ada.get("/services/gpu/")).status == 200
        server = Server(site, (await site.client.leases("ada", ""))[0])
        given = json.loads(await server.ask("env"))["JUPYTERHUB_API_TOKEN"]
        assert given == hashlib.sha256(token.encode()).hexdigest()
        status, who = await site.hub("GET", "user", token=token)
        assert (status, who["name"]) == (200, "ada")
        places |= {f"{path}, running": text for path, text in files(site.folder).items()}
        await site.stop_lab("ada")
        await site.gpu_in("unassigned")
        await asyncio.to_thread(planted_process, watch)
    assert any(f"guest={site.domain(lease.id)}".encode() in seen for seen in watch.seen)

    secrets = {
        "the server's token": token,
        "the spawner's token": SPAWNER_TOKEN,
        "the allocator's hub token": "s" * 40,
        "the proxy's token": "p" * 40,
        "the users' password": PASSWORD,
        "the hub's cookie secret": (site.folder / "jupyterhub.cookie_secret").read_text().strip(),
        "the pages' cookie secret": (site.folder / "pages.cookie_secret").read_text().strip(),
    }
    (site.folder / "planted.log").write_text(f"a line with {PLANTED}\n")
    places |= files(site.folder, log_folder(libvirtd), *map(Path, LIBVIRT))
    for name in ("ledger.sqlite", "jupyterhub.sqlite"):
        places[f"rows of {name}"] = dump(site.folder / name).encode()
    assert 'INSERT INTO "leases"' in places["rows of ledger.sqlite"].decode()
    for number, seen in enumerate(sorted(watch.seen)):
        places[f"process {number}: {seen[:60]!r}"] = seen
    found = leaks({"planted": PLANTED}, places)
    assert any("planted.log" in place for place in found)
    assert any("process" in place for place in found)
    assert leaks(secrets, places) == []
    assert [path.name for path in site.libvirt_pools.glob("*/guest-*")] == []


async def token_in_seed(site: HubSite) -> str:
    """The server's token as it is on its way to the guest."""

    def look() -> str | None:
        for path in site.libvirt_pools.glob("*/*"):
            if SEED.fullmatch(path.name):
                found = re.search(rb'"JUPYTERHUB_API_TOKEN": ?"([^"]+)"', path.read_bytes())
                return found[1].decode() if found else None
        return None

    return await wait_for_async(look, 90, "the seed", 0.05)
