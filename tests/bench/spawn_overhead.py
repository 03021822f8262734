"""How much later does a server answer because gpuspawner starts it, and not plain virsh?

    tests/run exec -- python -m tests.bench.spawn_overhead --json

For each pair a server is started twice, in alternating order, with nothing else going on. Once
through the allocator: the clock runs from the request for the lease to the moment its caller is
told that the server answers. Once by ``virsh create`` of that very domain: the clock runs from
there to the first answer. What the allocator makes in its time (a home, the seed, the overlay of
an image that has a root disk) is made for virsh before its clock begins, so all of it counts
against gpuspawner.

The domain is what libvirt has of the first lease, with copies of its disks, under another name
and UUID and without the metadata by which the allocator knows its own. Seed, kernel, CPUs pinned,
network, filter, address and the emulated GPU's memory are alike. Homes are new and empty on both
sides in every run, and the guest formats them. Both sides are asked for an answer by the same
function with the same pauses (``gpuspawner.allocator.readiness``). Between two runs the GPU's
diagnosis is waited for.

For the runs at once the same is done with N servers at the same moment, up to the last answer.
JupyterLab (``--lab-pairs``) is the image of the users, without a hub.

``--keep FILE`` writes each run into FILE as soon as it is measured, and takes those that are there
already as measured: a long bench can be done in several pieces. All times are in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tornado.httpclient import AsyncHTTPClient

from deploy import libvirtd as daemon
from gpuspawner import schema
from gpuspawner.allocator import readiness
from gpuspawner.host.devices import QEMU_URI
from gpuspawner.host.domain import METADATA_URI
from tests.bench import figures
from tests.layers import IMAGES_VARIABLE, missing, wait_for_async
from tests.vm.pool import Pool

ET.register_namespace("qemu", QEMU_URI)
ET.register_namespace("gpuspawner", METADATA_URI)

BOOT_S = 600.0
LAB = {
    "image": "lab",
    "memory_mib": 1536,
    "home_mib": 1024,
}


# -- one server, either way -----------------------------------------------------------------------


@dataclass
class Template:
    """A lease's domain, to be made again by virsh: ``files`` maps each of the lease's own files
    to a copy of it, ``None`` for those that begin empty or new."""

    xml: str
    url: str
    files: dict[str, Path | None]
    home: str
    home_bytes: int
    overlay: tuple[str, str] | None  # the root disk's path, and what it lies over


class Starter:
    """One kind of server, started by the allocator or by virsh."""

    def __init__(self, pool: Pool, folder: Path, **request: Any) -> None:
        self.pool = pool
        self.folder = folder
        self.request = request
        self.templates: list[Template] = []
        self._number = 0

    async def by_allocator(self, count: int) -> dict[str, Any]:
        """Start ``count`` servers of new users at once, and end them. Seconds to the last, and
        the parts of each."""
        await self._quiet()
        users = [self._name() for _ in range(count)]
        catch = not self.templates
        began, began_ms = time.monotonic(), time.time() * 1000
        done = await asyncio.gather(*(self._lease(user, catch) for user in users))
        total = max(at for _, at in done) - began
        parts = [self._parts(lease, began, began_ms, at) for lease, at in done]
        for lease, _ in done:
            await self.pool.client.stop(lease.id)
        for lease, _ in done:
            await self.pool.ended(lease.id, 300)
        return {"total_s": round(total, 3), "each": parts}

    async def _lease(self, user: str, catch: bool) -> tuple[schema.Lease, float]:
        payload = self.pool.payload(user)
        prefix = payload.env["JUPYTERHUB_SERVICE_PREFIX"]
        if self.request["image"] == "lab":
            payload = payload.model_copy(update={"argv": lab_command(prefix)})
        lease = await self.pool.client.acquire(
            schema.AcquireLease(
                username=user,
                start_id="start-0001",
                request=schema.LeaseRequest(gpus=1, cores=1, **self.request),
                payload=payload,
                ready_path=prefix + "api",
            )
        )
        catching = asyncio.create_task(self._catch(lease)) if catch else None
        at = await self._told(lease.id)
        if catching is not None:
            self.templates.append(await catching)
        return lease, at

    async def _told(self, lease_id: str) -> float:
        async with asyncio.timeout(BOOT_S):
            async for event in self.pool.client.events(lease_id):
                if event.state == "running":
                    return time.monotonic()
                if event.state in ("stopping", "ended"):
                    raise RuntimeError(f"the lease ended instead: {event.message}")
        raise RuntimeError("the lease's story ended before its server ran")

    def _parts(
        self, lease: schema.Lease, began: float, began_ms: float, told: float
    ) -> dict[str, float]:
        """Where the time went, from the steps and events that the ledger has of it."""
        ledger = f"file:{self.pool.folder}/ledger.sqlite?mode=ro"
        with contextlib.closing(sqlite3.connect(ledger, uri=True)) as db:
            steps = dict(
                db.execute("SELECT name, at_ms FROM steps WHERE owner = ?", (lease.id,)).fetchall()
            )
            told_ms = dict(
                db.execute(
                    "SELECT progress, min(at_ms) FROM events WHERE lease_id = ? GROUP BY progress",
                    (lease.id,),
                ).fetchall()
            )
        answered = told_ms[95]
        done = (steps[name] for name in ("home", "disks", "seed", "guest"))
        marks = [began_ms, told_ms[5], told_ms[10], *done, answered]
        names = ("place_s", "begin_s", "home_s", "disks_s", "seed_s", "create_s", "boot_s")
        parts = {
            name: round((late - early) / 1000, 3)
            for name, early, late in zip(names, marks[:-1], marks[1:], strict=True)
        }
        total = told - began
        parts["eject_and_tell_s"] = round(total - (answered - began_ms) / 1000, 3)
        return {"total_s": round(total, 3), **parts}

    async def by_virsh(self, count: int) -> dict[str, Any]:
        """The same domains by ``virsh create``; their files are made before the clock begins."""
        await self._quiet()
        made = [self._make(template) for template in self.templates[:count]]
        try:
            began = time.monotonic()
            each = await asyncio.gather(*(self._virsh(began, file, url) for _, file, url in made))
            return {"total_s": max(one["total_s"] for one in each), "each": each}
        finally:
            for name, file, _ in made:
                await _virsh("destroy", name, check=False)
                shutil.rmtree(file.parent)

    async def _virsh(self, began: float, file: Path, url: str) -> dict[str, float]:
        await _virsh("create", str(file))
        created = time.monotonic()
        http = AsyncHTTPClient(force_instance=True)
        try:
            async with asyncio.timeout(BOOT_S):
                while True:
                    if await readiness.answers(http, url):
                        break
                    await asyncio.sleep(readiness.pause_s(time.monotonic() - created))
        finally:
            http.close()
        total, create = time.monotonic() - began, created - began
        parts = {"total_s": total, "create_s": create, "boot_s": total - create}
        return {name: round(value, 3) for name, value in parts.items()}

    async def _quiet(self) -> None:
        """Every GPU is free: no diagnosis runs that would take CPU time from what is measured."""

        async def free() -> bool:
            return all(gpu.state == "unassigned" for gpu in await self.pool.client.gpus())

        await wait_for_async(free, 900, "all GPUs to be free", 0.5)

    def _name(self) -> str:
        self._number += 1
        return f"user-{self.request['image']}-{self._number}"

    # -- the same domain again --------------------------------------------------------------------

    async def _catch(self, lease: schema.Lease) -> Template:
        """Take a starting lease's domain and the content of its disks, while its seed is there."""
        name = self.pool.domain(lease.id)

        async def there() -> str:
            return await _virsh("dumpxml", "--inactive", "--security-info", name, check=False)

        xml = await wait_for_async(there, 60, "the lease's domain", 0.1)
        return await asyncio.to_thread(self._template, xml, lease)

    def _template(self, xml: str, lease: schema.Lease) -> Template:
        root = ET.fromstring(xml)
        files: dict[str, Path | None] = {}
        home, home_bytes, overlay = "", 0, None
        for disk in root.iterfind("./devices/disk"):
            source, serial = disk.find("source"), disk.findtext("serial")
            assert source is not None
            path = source.get("file", "")
            if disk.get("device") == "cdrom":
                files[path] = self._copy(path, lease.id, "seed")
            elif serial == "home":
                files[path], home, home_bytes = None, path, Path(path).stat().st_size
            else:
                files[path], overlay = None, (path, _backing(path))
        console = root.find("./devices/serial/source")
        assert console is not None
        files[console.get("path", "")] = None
        for address in lease.gpus:
            memory = str(self.pool.gpu_memory(address))
            files[memory] = self._copy(memory, lease.id, f"gpu-{len(files)}")
        url = f"http://{lease.address}:{lease.port}/user/{lease.username}/api"
        return Template(xml, url, files, home, home_bytes, overlay)

    def _copy(self, path: str, lease_id: str, part: str) -> Path:
        target = self.folder / f"{lease_id}-{part}"
        subprocess.run(["cp", "--sparse=always", "--preserve=all", path, str(target)], check=True)
        return target

    def _make(self, template: Template) -> tuple[str, Path, str]:
        """Fresh files for one run. The domain's name, its XML's file, and the URL to ask."""
        run = str(uuid.uuid4())
        folder = self.folder / run
        folder.mkdir(mode=0o711)
        folder.chmod(0o711)
        xml = template.xml
        for number, (path, copy) in enumerate(template.files.items()):
            file = folder / f"disk-{number}"
            if copy is not None:
                subprocess.run(["cp", "--preserve=all", str(copy), str(file)], check=True)
            elif template.overlay is not None and path == template.overlay[0]:
                base = template.overlay[1]
                make = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", base]
                subprocess.run([*make, str(file)], check=True)
            else:
                file.touch(mode=0o600)
                if path == template.home:
                    os.truncate(file, template.home_bytes)
            xml = xml.replace(path, str(file))
        file = folder / "domain.xml"
        file.write_text(renamed(xml, f"bench-{run[:8]}", run))
        return f"bench-{run[:8]}", file, template.url


def renamed(xml: str, name: str, new_uuid: str) -> str:
    """A domain under another name and UUID, and nobody's: the allocator ends what carries its
    mark and belongs to no lease."""
    root = ET.fromstring(xml)
    for tag, text in (("name", name), ("uuid", new_uuid)):
        element = root.find(tag)
        assert element is not None
        element.text = text
    for mark in root.findall("metadata"):
        root.remove(mark)
    return ET.tostring(root, encoding="unicode")


def lab_command(prefix: str) -> list[str]:
    """JupyterLab as a server of its own, in place of the one that would look for a hub."""
    settings = ("ip=0.0.0.0", "port=8888", "port_retries=0", f"base_url={prefix}")
    return ["jupyter-lab", "--no-browser", *(f"--ServerApp.{one}" for one in settings)]


def _backing(path: str) -> str:
    command = ["qemu-img", "info", "--force-share", "--output=json", path]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return str(json.loads(found)["backing-filename"])


async def _virsh(*words: str, check: bool = True) -> str:
    """What virsh says; without ``check`` nothing when it fails."""
    process = await asyncio.create_subprocess_exec(
        "virsh", "-q", "-c", "qemu:///system", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    if process.returncode and check:
        raise RuntimeError(f"virsh {words[0]} failed: {err.decode().strip()}")
    return "" if process.returncode else out.decode()


# -- the whole ------------------------------------------------------------------------------------


class Kept:
    """Runs that were measured, and the file that outlives an interruption."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.runs: dict[str, list[dict[str, Any]]] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                record = json.loads(line)
                self.runs.setdefault(record["part"], []).append(record["run"])

    def add(self, part: str, run: dict[str, Any]) -> None:
        self.runs.setdefault(part, []).append(run)
        print(f"{part} {len(self.runs[part])}: {brief(run)}", file=sys.stderr, flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps({"part": part, "run": run}) + "\n")


def brief(run: dict[str, Any]) -> str:
    """One run in a line."""
    allocator, virsh = run["allocator"]["total_s"], run["virsh"]["total_s"]
    return f"allocator {allocator:.2f} s, virsh {virsh:.2f} s"


async def measure(starter: Starter, part: str, runs: int, count: int, kept: Kept) -> None:
    """What is missing of a part. The first run of a process begins with the allocator, whose
    domain virsh then makes again; after it they take turns."""
    first = len(kept.runs.get(part, ()))
    for number in range(first, runs):
        run: dict[str, Any] = {"load_1_min": figures.machine()["load_1_min"]}
        order = ["allocator", "virsh"]
        if number % 2 and number > first:
            order.reverse()
        for who in order:
            start = starter.by_allocator if who == "allocator" else starter.by_virsh
            run[who] = await start(count)
        kept.add(part, {"first": order[0], **run})


def compared(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one part, from all its runs."""
    if not runs:
        return {"runs": []}
    totals = {who: [run[who]["total_s"] for run in runs] for who in ("allocator", "virsh")}
    both = list(zip(totals["allocator"], totals["virsh"], strict=True))
    parts = {
        who: {
            name: round(median(each[name] for run in runs for each in run[who]["each"]), 3)
            for name in runs[0][who]["each"][0]
        }
        for who in ("allocator", "virsh")
    }
    return {
        "allocator_s": figures.spread(totals["allocator"]),
        "virsh_s": figures.spread(totals["virsh"]),
        "difference_s": figures.spread([late - early for late, early in both]),
        "ratio": figures.spread([late / early for late, early in both]),
        "medians_of_parts": parts,
        "runs": list(runs),
    }


def declaration(gpus: int) -> str:
    """An emulated host with room for so many servers."""
    lines = ["nodes:", f"  - {{id: 0, cores: {gpus + 2}, memory_mib: 65536, reserve_mib: 512}}"]
    lines.append("gpus:")
    lines += [
        f'  - {{address: "0000:{0x41 + number:02x}:00.0", node: 0, memory_mib: 16}}'
        for number in range(gpus)
    ]
    return "\n".join(lines) + "\n"


@contextlib.asynccontextmanager
async def a_pool(folder: Path, images: Sequence[str], gpus: int) -> AsyncIterator[Pool]:
    """An allocator with one host, all of whose GPUs will be free in a while."""
    pool = Pool(folder / "pool")
    for name in ("service", *images):
        pool.use_image(Path(os.environ[IMAGES_VARIABLE]) / name)
    try:
        await asyncio.to_thread(pool.start)
        await pool.add_host(declaration(gpus))
        await wait_for_async(lambda: _ready(pool, images), 600, "the images to be on the host", 0.5)
        yield pool
    except BaseException:
        print(pool.log.read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        await pool.remove()


async def _ready(pool: Pool, images: Sequence[str]) -> bool:
    there = {image.name for image in await pool.client.images() if image.hosts}
    return there.issuperset(images) and len(await pool.client.gpus()) > 0


async def bench(options: argparse.Namespace, kept: Kept, folder: Path) -> dict[str, Any]:
    """All parts, each in a pool of its own."""
    before = figures.machine()
    tiny = {"image": "tiny", "memory_mib": 512, "home_mib": 64}
    parts = (
        ("pairs", options.pairs, 1, tiny),
        ("at_once", options.rounds, options.at_once, tiny),
        ("jupyterlab", options.lab_pairs, 1, LAB),
    )
    for part, runs, count, request in parts:
        if len(kept.runs.get(part, ())) < runs:
            place = folder / part
            place.mkdir(mode=0o711)
            async with a_pool(place, (str(request["image"]),), count) as pool:
                await measure(Starter(pool, place, **request), part, runs, count, kept)
    return {
        "versions": {**figures.versions("gpuspawner"), **figures.hypervisor()},
        "machine": {"before": before, "after": figures.machine(), "guests": "TCG"},
        "pairs": compared(kept.runs.get("pairs", ())),
        "at_once": {"servers": options.at_once, **compared(kept.runs.get("at_once", ()))},
        "jupyterlab": compared(kept.runs.get("jupyterlab", ())),
    }


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    lines = []
    for part in ("pairs", "at_once", "jupyterlab"):
        found = result[part]
        if found["runs"]:
            lines.append(
                f"{part}: {len(found['runs'])} runs, allocator {found['allocator_s']['median']} s, "
                f"virsh {found['virsh_s']['median']} s, difference "
                f"{found['difference_s']['median']} s, ratio {found['ratio']['median']} (medians)"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=15, help="pairs with the tiny guest")
    parser.add_argument("--at-once", type=int, default=8, help="servers started at once")
    parser.add_argument("--rounds", type=int, default=3, help="runs of the servers at once")
    parser.add_argument("--lab-pairs", type=int, default=3, help="pairs with JupyterLab")
    parser.add_argument("--keep", type=Path, help="a file for the runs, to go on from later")
    parser.add_argument("--json", action="store_true", help="everything, every run included")
    options = parser.parse_args()
    lack = missing({"vm"})
    if lack:
        sys.exit(f"{lack} This one: tests/run exec -- python -m tests.bench.spawn_overhead")
    folder = Path(tempfile.mkdtemp(prefix="gs-bench-", dir="/var/tmp"))
    folder.chmod(0o711)  # QEMU's account must get through
    try:
        with daemon.libvirtd(folder / "libvirtd"):
            result = asyncio.run(bench(options, Kept(options.keep), folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
