"""Bringing a lease up: from a place on paper to a JupyterLab that answers.

Each step is idempotent and recorded when it is through, so that a restarted allocator goes on
where the old one was killed. A step that finds the lease stopping gives up quietly; what exists by
then is removed by the stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tornado.httpclient import AsyncHTTPClient

from gpuspawner.allocator import readiness
from gpuspawner.allocator.clock import now_ms
from gpuspawner.allocator.context import Context
from gpuspawner.host.api import GuestSpec, HostError, Nic
from gpuspawner.host.seed import SeedNetwork, SeedServer, SeedSpec, SeedUser, build_seed
from gpuspawner.ledger import homes as home_ledger
from gpuspawner.ledger import hosts as host_ledger
from gpuspawner.ledger import leases as lease_ledger
from gpuspawner.ledger.database import Transaction
from gpuspawner.ledger.records import HomeRecord, HostRecord, LeaseRecord
from gpuspawner.pool.states import LeaseState

log = logging.getLogger(__name__)

# What a booting guest says on its console, and what the user is told about it.
CONSOLE_STAGES: tuple[tuple[str, int, str], ...] = (
    ("gpuspawner: lease", 40, "The machine has its settings."),
    ("gpuspawner: home", 50, "Your home is attached."),
    ("gpuspawner: starting", 60, "JupyterLab is starting."),
)

_LOOK_S = 1.0  # how often ledger, host and console are looked at while the server starts


class GuestGone(Exception):
    """The VM ended while its server was starting."""


class BootTimeout(Exception):
    """JupyterLab did not answer in time."""


class StopAsked(Exception):
    """The lease is to end: no further step of its start makes sense."""


class LeaseStart:
    """The start of one lease."""

    def __init__(self, context: Context, lease: LeaseRecord) -> None:
        assert lease.host is not None
        assert lease.claim is not None
        assert lease.address is not None
        assert lease.mac is not None
        self.ctx = context
        self.lease = lease
        self.id = lease.id
        self.host_name = lease.host
        self.claim = lease.claim
        self.address = lease.address
        self.mac = lease.mac
        # Its own: the process' shared client asks ten at a time, and ten machines that do not
        # answer would keep everybody else's from being seen.
        self._http = AsyncHTTPClient(force_instance=True)
        patience_s = context.limits.boot_s + context.limits.wait_s
        self._deadline_ms = lease.created_ms + int(patience_s * 1000)

    async def run(self) -> None:
        """All steps; returns when the server has answered and its seed is gone."""
        try:
            await self._run()
        finally:
            self._http.close()

    async def _run(self) -> None:
        host, home = await self.ctx.ledger.read(self._facts)
        spec = self._spec(host, home)
        driver = self.ctx.driver(self.host_name)

        async def make_home() -> None:
            await driver.make_home(home.volume, home.size_mib)

        async def make_seed() -> None:
            await driver.put_seed(self.id, await self._seed(host, home))

        async def make_guest() -> None:
            await driver.create(spec)

        await self._step("home", 10, "Preparing your home.", make_home)
        await self._step(
            "disks", 12, "Preparing the machine's disk.", lambda: driver.make_disks(spec)
        )
        await self._step("seed", 15, "Writing the machine's settings.", make_seed)
        await self._step("guest", 20, "Starting the virtual machine.", make_guest)
        await self._answer()
        await self._step("eject", 95, "JupyterLab answers.", lambda: driver.eject_seed(self.id))
        self.ctx.payloads.pop(self.id, None)

    def _facts(self, tx: Transaction) -> tuple[HostRecord, HomeRecord]:
        host = host_ledger.get(tx, self.host_name)
        home = home_ledger.of_key(tx, self.lease.key)
        if host is None or host.inventory is None:
            raise HostError(f"Host {self.host_name} is not in the pool any more.")
        if home is None:
            raise HostError("Your home was deleted while the server started. Start it again.")
        return host, home

    def _spec(self, host: HostRecord, home: HomeRecord) -> GuestSpec:
        image = self.ctx.images.by_digest(self.lease.image_digest)
        if image is None:
            raise HostError(
                "The image of this server was replaced while it started.", "Start it again."
            )
        assert host.inventory is not None
        known = {gpu.address: gpu for gpu in host.inventory.gpus}
        gone = [address for address in self.claim.gpus if address not in known]
        if gone:
            raise HostError(f"GPU {', '.join(gone)} is not on host {self.host_name} any more.")
        return GuestSpec(
            uuid=self.id,
            kind="lease",
            title=f"{self.lease.username}/{self.lease.server_name}",
            claim=self.claim,
            gpus=tuple(known[address] for address in self.claim.gpus),
            image=image,
            nic=Nic(self.mac, self.address),
            home=home.volume,
            seed=True,
            labels={"hub": self.lease.hub_id, "lease": self.id},
        )

    async def _step(
        self, name: str, progress: int, told: str, action: Callable[[], Awaitable[None]]
    ) -> None:
        done = await self.ctx.ledger.read(self._check_and_tell, name, progress, told)
        if done:
            return
        self.ctx.signals.ring(f"events:{self.id}")
        await action()
        await self.ctx.ledger.write(self._commit, name)
        self.ctx.signals.ring(f"events:{self.id}")

    def _check_and_tell(self, tx: Transaction, name: str, progress: int, told: str) -> bool:
        lease = lease_ledger.need(tx, self.id)
        if lease.state is not LeaseState.STARTING:
            raise StopAsked
        if name in lease_ledger.steps_done(tx, self.id):
            return True
        if not lease_ledger.was_told(tx, self.id, told):  # a step may be done again
            lease_ledger.add_event(tx, lease, now_ms(), "progress", progress, told)
        return False

    def _commit(self, tx: Transaction, name: str) -> None:
        lease_ledger.step_done(tx, self.id, name, now_ms())
        if name == "guest":
            lease_ledger.gpus_assigned(tx, self.lease, now_ms())

    async def _seed(self, host: HostRecord, home: HomeRecord) -> bytes:
        """The seed's content; asks the spawner for the boot payload if it was lost."""
        with self.ctx.signals.listen(f"payload:{self.id}", f"lease:{self.id}") as bell:
            asked = False
            while (payload := self.ctx.payloads.get(self.id)) is None:
                if not asked:
                    await self._tell("payload-needed", 15, "Asking the hub for the settings again.")
                    asked = True
                await self._still_starting()
                if now_ms() > self._deadline_ms:
                    raise BootTimeout
                await bell.wait(5)
        prefix = host.settings["cidr"].rsplit("/", 1)[1]
        gateway = await self.ctx.driver(self.host_name).gateway()
        return build_seed(
            SeedSpec(
                lease_id=self.id,
                hostname=f"gpu-{self.id[:8]}",
                network=SeedNetwork(self.mac, f"{self.address}/{prefix}", gateway, (gateway,)),
                home_new=not home.used,
                user=SeedUser(payload.user, payload.uid, payload.sudo),
                server=SeedServer(tuple(payload.argv), payload.env, payload.files, payload.port),
            )
        )

    async def _answer(self) -> None:
        """Wait for JupyterLab, telling what the guest's console says about the way there."""
        url = f"http://{self.address}:{self.lease.port}{self.lease.ready_path}"
        time = asyncio.get_running_loop().time
        began = looked = time()
        stage, rang = 0, True
        with self.ctx.signals.listen(f"lease:{self.id}", f"guest:{self.id}") as bell:
            while not await readiness.answers(self._http, url):
                # Asking the guest costs little; asking ledger and host, which is done for every
                # server that starts, happens when something rang and else less often.
                if rang or time() - looked >= _LOOK_S:
                    stage = await self._look(stage)
                    looked = time()
                rang = await bell.wait(readiness.pause_s(time() - began))

    async def _look(self, stage: int) -> int:
        """Raise what ends the waiting; else tell the next stage of the boot."""
        await self._still_starting()
        guest = await self.ctx.driver(self.host_name).guest(self.id)
        if guest is None:
            raise GuestGone
        if guest.state == "paused":
            await let_go_on(self.ctx, self.lease)
        if now_ms() > self._deadline_ms:
            raise BootTimeout
        return await self._tell_stage(stage)

    async def _tell_stage(self, stage: int) -> int:
        if stage >= len(CONSOLE_STAGES):
            return stage
        try:
            console = await self.ctx.driver(self.host_name).console(self.id, 262144)
        except HostError as error:  # a line of progress less is no reason to end a start
            log.debug("console_unreadable lease=%s error=%s", self.id, error)
            return stage
        reached = stage
        for number, (text, _progress, _told) in enumerate(CONSOLE_STAGES[stage:], stage):
            if text in console:
                reached = number + 1
        if reached > stage:
            _text, progress, told = CONSOLE_STAGES[reached - 1]
            await self._tell("progress", progress, told)
        return reached

    async def _still_starting(self) -> None:
        lease = await self.ctx.ledger.read(lease_ledger.need, self.id)
        if lease.state is not LeaseState.STARTING:
            raise StopAsked

    async def _tell(self, kind: str, progress: int, told: str) -> None:
        def write(tx: Transaction) -> None:
            lease = lease_ledger.need(tx, self.id)
            if lease.state is LeaseState.STARTING:
                lease_ledger.add_event(tx, lease, now_ms(), kind, progress, told)

        await self.ctx.ledger.write(write)
        self.ctx.signals.ring(f"events:{self.id}")


async def let_go_on(context: Context, lease: LeaseRecord) -> None:
    """QEMU has stopped the VM because its host's disk had no room for what it wrote. Nothing is
    lost: it tries again, and stops again if there still is none. The user is told once."""
    assert lease.host is not None
    text = f"The disk of host {lease.host} is full: your machine stands still until there is room."

    def write(tx: Transaction) -> bool:
        fresh = lease_ledger.need(tx, lease.id)
        last = lease_ledger.last_event(tx, lease.id)
        if last is None or lease_ledger.was_told(tx, lease.id, text):
            return False
        lease_ledger.add_event(tx, fresh, now_ms(), "progress", last.progress, text)
        return True

    if await context.ledger.write(write):
        log.error("guest_paused lease=%s host=%s: free space on its disk", lease.id, lease.host)
        context.signals.ring(f"events:{lease.id}")
    await context.driver(lease.host).resume(lease.id)
