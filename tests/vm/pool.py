"""A real pool: the allocator as a process of its own, libvirt, QEMU guests, emulated GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from gpuspawner import schema
from gpuspawner.client import AllocatorClient
from tests.layers import wait_for, wait_for_async

TOKEN = "k" * 40
PORT = 8091
CIDR = "10.231.0.0/24"
GATEWAY = "10.231.0.1"
GPU = "0000:41:00.0"

ONE_GPU = """\
nodes:
  - {id: 0, cores: 4, memory_mib: 8192, reserve_mib: 512}
gpus:
  - {address: "0000:41:00.0", node: 0, memory_mib: 16, fault: FAULT}
"""
TWO_GPUS = (
    ONE_GPU
    + """\
  - {address: "0000:42:00.0", node: 0, memory_mib: 16}
"""
)


def declaration(text: str = ONE_GPU, fault: str = "none") -> str:
    """An emulated host's file."""
    return text.replace("FAULT", fault)


def with_cmdline(image: Path, extra: str) -> None:
    """Give a copy of an image more kernel arguments; its digest changes with them."""
    manifest = json.loads((image / "manifest.json").read_text())
    manifest["cmdline"] += f" {extra}"
    manifest["digest"] = (
        "sha256:" + hashlib.sha256((manifest["digest"] + extra).encode()).hexdigest()
    )
    (image / "manifest.json").write_text(json.dumps(manifest))


class Pool:
    """One installation in a folder. The allocator may be killed and started again. ``state`` is
    the allocator's own folder, where it is another one."""

    def __init__(
        self, folder: Path, host: str = "emu1", *, state: Path | None = None, **traits: Any
    ) -> None:
        self.folder = folder
        self.state = state or folder
        self.host = host
        self.images = folder / "images"
        self.images.mkdir(parents=True)
        self.url = f"http://127.0.0.1:{PORT}/services/gpu/"
        self.log = folder / "allocator.log"
        self.libvirt_pools = folder / "pools"
        self.libvirt_pools.mkdir()
        self.deaths = 0  # counted by tests that kill
        self.uris = ["qemu:///system"]  # of its hosts
        self.process: subprocess.Popen[bytes] | None = None
        self.client = AllocatorClient(self.url, TOKEN)
        (self.state / "spawner.token").write_text(TOKEN)
        settings = {
            "Installation.state_dir": str(self.state),
            "Installation.images_dir": str(self.images),
            "Installation.allocator_url": self.url,
            "Allocator.pool_dir": str(self.libvirt_pools),
            "Allocator.hub_guest_url": f"http://{GATEWAY}:8081/hub/api",
            "Allocator.diagnosis_backoff_s": [1.0],
            "Allocator.diagnosis_silence_s": 40.0,
            "Allocator.diagnosis_s": 180.0,
            **{f"Allocator.{name}": value for name, value in traits.items()},
        }
        lines = ["c = get_config()", *(f"c.{name} = {value!r}" for name, value in settings.items())]
        (folder / "gpuspawner_config.py").write_text("\n".join(lines) + "\n")

    # ------------------------------------------------------------------ images

    def use_image(self, source: Path, name: str | None = None) -> Path:
        """Give the pool a built image, perhaps in another's place."""
        target = self.images / (name or source.name)
        if target.exists():
            shutil.rmtree(target)
        target.mkdir()
        for path in source.iterdir():
            if path.name == "manifest.json":
                shutil.copy(path, target)
            else:
                os.link(path, target / path.name)
        return target

    # ------------------------------------------------------------------ the allocator

    def start(self, command: Sequence[str] = ()) -> None:
        """Start the allocator and wait until it answers."""
        environment = {
            **os.environ,
            "GPUSPAWNER_CONFIG": str(self.folder / "gpuspawner_config.py"),
        }
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                list(command) or [sys.executable, "-m", "gpuspawner.allocator"],
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        wait_for(self._answers, 60, "the allocator to answer")

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        return asyncio.run(self._healthy())

    async def _healthy(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with (
                aiohttp.ClientSession() as session,
                session.get(self.url + "health") as answer,
            ):
                return answer.status == 200
        return False

    def kill(self) -> None:
        """``kill -9``."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM; guests go on."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    @property
    def ledger(self) -> Path:
        """The allocator's database."""
        return self.state / "ledger.sqlite"

    @property
    def instance(self) -> str:
        """The installation's id, as it stands in every libvirt name."""
        with contextlib.closing(sqlite3.connect(self.ledger)) as ledger:
            return str(ledger.execute("SELECT instance FROM installation").fetchone()[0])

    # ------------------------------------------------------------------ verbs

    async def add_host(
        self, text: str, name: str | None = None, uri: str = "qemu:///system", cidr: str = CIDR
    ) -> None:
        """Add the emulated host, or give it another declaration; or add another one."""
        if uri not in self.uris:
            self.uris.append(uri)
        await self.client.add_host(
            schema.AddHost(name=name or self.host, uri=uri, cidr=cidr, accel="tcg", emulated=text)
        )

    async def acquire(
        self, user: str, start: str = "start-0001", image: str = "tiny", **request: Any
    ) -> schema.Lease:
        """Ask for a server with one GPU."""
        prefix = f"/user/{user}/"
        return await self.client.acquire(
            schema.AcquireLease(
                username=user,
                start_id=start,
                request=schema.LeaseRequest(
                    **{
                        "gpus": 1,
                        "cores": 1,
                        "memory_mib": 512,
                        "image": image,
                        "home_mib": 64,
                        **request,
                    }
                ),
                payload=self.payload(user),
                ready_path=prefix + "api",
            )
        )

    @staticmethod
    def payload(user: str) -> schema.BootPayload:
        """What the spawner would send; its token must be found nowhere but in the guest."""
        env = {
            "JUPYTERHUB_SERVICE_PREFIX": f"/user/{user}/",
            "JUPYTERHUB_API_TOKEN": f"secret-of-{user}",
        }
        return schema.BootPayload(argv=["jupyterhub-singleuser"], env=env)

    async def send_payload(self, lease_id: str, user: str) -> None:
        """As the spawner does when the allocator has lost it."""
        await self.client.put_payload(lease_id, self.payload(user))

    async def release(self, user: str, start: str) -> None:
        """As the spawner does when a start is cancelled."""
        await self.client.release(schema.ReleaseLease(username=user, start_id=start))

    async def running(self, lease: schema.Lease, timeout: float = 180) -> schema.Lease:
        """Wait until its server answers; a lease that ends instead fails the test with why."""

        async def look() -> schema.Lease | None:
            now = await self.client.lease(lease.id)
            assert now.state not in ("stopping", "ended"), f"{now.reason}: {now.message}"
            return now if now.state == "running" else None

        return await wait_for_async(look, timeout, "the server to answer", 0.5)

    async def start_server(self, user: str, start: str = "start-0001", **kwargs: Any) -> Server:
        """A running tiny guest."""
        return Server(self, await self.running(await self.acquire(user, start, **kwargs)))

    async def ended(self, lease_id: str, timeout: float = 120) -> schema.Lease:
        """Wait until a lease has ended."""

        async def look() -> schema.Lease | None:
            now = await self.client.lease(lease_id)
            return now if now.state == "ended" else None

        return await wait_for_async(look, timeout, "the lease to end", 0.5)

    async def gpu_in(self, *states: str, timeout: float = 150, address: str = GPU) -> schema.Gpu:
        """Wait until a GPU is in one of these states."""

        async def look() -> schema.Gpu | None:
            for gpu in await self.client.gpus():
                if gpu.address == address and gpu.state in states:
                    return gpu
            return None

        return await wait_for_async(look, timeout, f"{address} to be {' or '.join(states)}", 0.5)

    async def retest(self, *states: str) -> schema.Gpu:
        """Send the GPU through a diagnosis and wait for what comes of it."""
        await self.client.gpu_action(self.host, GPU, schema.GpuAction(action="retest"))
        return await self.gpu_in(*states)

    def gpu_memory(self, address: str = GPU) -> Path:
        """The file that plays the GPU's memory."""
        found = list(
            self.libvirt_pools.glob(f"*/gpu-{address.replace(':', '-').replace('.', '-')}")
        )
        assert len(found) == 1, found
        return found[0]

    def virsh(self, *words: str, uri: str = "qemu:///system") -> str:
        """What an admin would type."""
        return subprocess.run(
            ["virsh", "-c", uri, *words], check=True, capture_output=True, text=True
        ).stdout

    def domains(self) -> list[str]:
        """Names of all domains that run on the pool's hosts, whoever they belong to."""
        return [name for uri in self.uris for name in self.virsh("list", "--name", uri=uri).split()]

    def domain(self, lease_id: str) -> str:
        """The name of a lease's domain."""
        return f"gs-{self.instance}-lease-{lease_id[:8]}"

    def service_domain(self, run_id: str) -> str:
        """The name of a diagnosis' domain."""
        return f"gs-{self.instance}-service-{run_id[:8]}"

    def kill_qemu(self, lease_id: str) -> None:
        """``kill -9`` of a lease's QEMU."""
        pid = Path(f"/run/libvirt/qemu/{self.domain(lease_id)}.pid").read_text()
        os.kill(int(pid), signal.SIGKILL)

    async def remove(self) -> None:
        """End everything that this installation has on the machine."""
        with contextlib.suppress(Exception):
            await self.client.close()
        self.stop()
        for uri in self.uris:
            self._remove_from(uri)

    def _remove_from(self, uri: str) -> None:
        prefix = f"gs-{self.instance}"
        for name in self.virsh("list", "--all", "--name", uri=uri).split():
            if name.startswith(prefix):
                with contextlib.suppress(subprocess.CalledProcessError):  # it has ended by itself
                    self.virsh("destroy", name, uri=uri)
        for kind in ("pool", "net"):
            for name in self.virsh(f"{kind}-list", "--all", "--name", uri=uri).split():
                if name.startswith(prefix):
                    for verb in ("destroy", "undefine"):
                        with contextlib.suppress(subprocess.CalledProcessError):
                            self.virsh(f"{kind}-{verb}", name, uri=uri)


class Server:
    """A running tiny guest, reached through the network as the proxy would."""

    def __init__(self, pool: Pool, lease: schema.Lease) -> None:
        self.pool = pool
        self.lease = lease
        self.base = f"http://{lease.address}:{lease.port}/user/{lease.username}/test/"

    async def ask(self, verb: str, body: bytes | None = None, **query: Any) -> bytes:
        """One verb of the tiny guest's server."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
            session.request(
                "POST" if body is not None else "GET",
                self.base + verb,
                params={name: str(value) for name, value in query.items()},
                data=body,
            ) as answer,
        ):
            content = await answer.read()
            assert answer.status == 200, content
            return content

    async def gpu(self, offset: int, count: int) -> bytes:
        """GPU memory as this tenant sees it."""
        return bytes.fromhex((await self.ask("gpu/read", offset=offset, bytes=count)).decode())

    async def stop(self) -> schema.Lease:
        """As the hub does it."""
        await self.pool.client.stop(self.lease.id)
        return await self.pool.ended(self.lease.id)


@contextlib.asynccontextmanager
async def pool_of(
    folder: Path, images: Path, service: Path | None = None, cmdline: str = "", **traits: Any
) -> AsyncIterator[Pool]:
    """A started pool with the tiny guest and a service image, the real one or another, perhaps
    with more kernel arguments; no host yet."""
    pool = Pool(folder, **traits)
    image = pool.use_image(service or images / "service", "service")
    if cmdline:
        with_cmdline(image, cmdline)
    pool.use_image(images / "tiny")
    try:
        await asyncio.to_thread(pool.start)
        yield pool
    finally:
        await pool.remove()
        print(pool.log.read_text()[-8000:])  # shown by pytest when the test fails
