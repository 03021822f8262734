"""The hosts of the pool: connected, surveyed, supplied with images, and reconciled.

One task a host, so that a host that hangs delays no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from gpuspawner.allocator.clock import now_ms
from gpuspawner.allocator.context import Context
from gpuspawner.allocator.diagnosis import abort_leftovers
from gpuspawner.allocator.reclaim import Reclaimer
from gpuspawner.host.api import GpuHost, HostError, HostTimeout, HostUnreachable
from gpuspawner.ledger import diagnoses as diagnosis_ledger
from gpuspawner.ledger import homes as home_ledger
from gpuspawner.ledger import hosts as host_ledger
from gpuspawner.ledger import leases as lease_ledger
from gpuspawner.ledger.database import Deposed, LedgerUnwritable, Transaction
from gpuspawner.ledger.records import HostRecord, LeaseRecord
from gpuspawner.pool.states import OPEN_LEASES, EndReason, LeaseState
from gpuspawner.pool.topology import Inventory

log = logging.getLogger(__name__)

Factory = Callable[[str, dict[str, Any]], GpuHost]

_SURVEY_S = 60.0
_BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
_DAY_MS = 24 * 3600 * 1000


class HostKeeper:
    """All hosts. ``factory`` makes a driver from a host's name and settings."""

    def __init__(self, context: Context, factory: Factory) -> None:
        self.ctx = context
        self._factory = factory
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changing = asyncio.Lock()
        self.copying: dict[tuple[str, str], int] = {}  # (host, digest) -> percent

    async def open(self) -> None:
        """Take up every host of the ledger. They answer when they answer."""
        for host in await self.ctx.ledger.read(host_ledger.every):
            await self.ctx.ledger.write(host_ledger.set_state, host.name, "new")
            try:
                driver = self._make(host.name, host.settings, host)
            except Exception as error:  # one host's settings must not keep the others out
                log.exception("host_unusable host=%s", host.name)
                text = f"Its settings cannot be used: {error} Add it again with right ones."
                await self._set(host.name, "unreachable", text)
                continue
            self._keep(host.name, driver)

    async def add(self, name: str, settings: dict[str, Any]) -> bool:
        """Add a host or give it new settings; true if it is new. Settings that make no driver
        raise ``HostError`` or ``ValueError`` and change nothing."""
        async with self._changing:
            known = await self.ctx.ledger.read(host_ledger.get, name)
            driver = self._make(name, settings, known)
            new = await self.ctx.ledger.write(host_ledger.add, name, settings)
            await self._drop_task(name)
            self._keep(name, driver)
            return new

    def look_again(self, name: str) -> None:
        """Survey a host now."""
        self.ctx.signals.ring(f"host:{name}")

    async def close(self) -> None:
        """Let go of all hosts; their guests go on."""
        for name in list(self._tasks):
            await self._drop_task(name)

    def _make(self, name: str, settings: dict[str, Any], known: HostRecord | None) -> GpuHost:
        extra: dict[str, Any] = {}
        if known is not None and known.boot_id and known.accel:
            extra = {"known_accel": (known.boot_id, known.accel)}
        return self._factory(name, {**settings, **extra})

    def _keep(self, name: str, driver: GpuHost) -> None:
        self.ctx.drivers[name] = driver
        self._tasks[name] = asyncio.create_task(self._run(name, driver), name=f"host {name}")

    async def _drop_task(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.ctx.reconciled.discard(name)
        driver = self.ctx.drivers.pop(name)
        await driver.close()

    async def _run(self, name: str, driver: GpuHost) -> None:
        failures = 0
        opened = reconciled = False
        reclaim: asyncio.Task[None] | None = None
        try:
            with self.ctx.signals.listen(f"host:{name}", "images") as bell:
                while True:
                    try:
                        if not opened:
                            await driver.open(lambda uuid: self._guest_changed(name, uuid))
                            opened = True
                        await self._survey(name, driver)
                        if not reconciled:
                            await abort_leftovers(self.ctx, name, frozenset())
                            reconciled = True
                            await self._take_up_leases(name)
                        await self._end_orphans(name, driver)
                        await self._set(name, "ready")
                        await self._supply(name, driver)
                        if reclaim is None or reclaim.done():
                            reclaim = asyncio.create_task(Reclaimer(self.ctx, name).run())
                        await self._empty_trash(name, driver)
                        failures = 0
                        pause_s = _SURVEY_S
                    except (asyncio.CancelledError, Deposed):
                        raise
                    except Exception as error:
                        # A host is never dropped: whatever went wrong, look again.
                        pause_s = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
                        failures += 1
                        await self._in_trouble(name, error)
                    await bell.wait(pause_s)
        finally:
            if reclaim is not None:
                reclaim.cancel()
                await asyncio.gather(reclaim, return_exceptions=True)

    async def _in_trouble(self, name: str, error: Exception) -> None:
        """Nothing new goes to a host that does not do its part, or that we fail on."""
        if isinstance(error, HostError):
            text = str(error)
            log.warning("host_unreachable host=%s error=%s", name, error)
        else:
            text = "The allocator failed on this host; see its log."
            log.error("host_round_failed host=%s", name, exc_info=error)
        try:
            await self._set(name, "unreachable", text)
        except LedgerUnwritable as unwritable:
            log.error("host_state_unwritten host=%s error=%s", name, unwritable)

    def _guest_changed(self, name: str, uuid: str) -> None:
        self.ctx.signals.ring(f"guest:{uuid}", f"gpus:{name}")

    async def _set(self, name: str, state: str, reason: str | None = None) -> None:
        def write(tx: Transaction) -> bool:
            host = host_ledger.get(tx, name)
            if host is None or (host.state, host.reason) == (state, reason):
                return False
            host_ledger.set_state(tx, name, state, reason)
            return True

        if await self.ctx.ledger.write(write):
            log.info("host_state host=%s state=%s reason=%r", name, state, reason)
            self.ctx.signals.ring("queue", f"gpus:{name}")

    async def _survey(self, name: str, driver: GpuHost) -> None:
        inventory = await driver.survey()
        accel = getattr(driver, "accel", None)
        rebooted = await self.ctx.ledger.write(self._record, inventory, accel)
        if rebooted:
            log.warning("host_rebooted host=%s boot_id=%s", name, inventory.boot_id)
            await abort_leftovers(self.ctx, name, frozenset())
            for lease in await self.ctx.ledger.read(lease_ledger.open_leases, name):
                await self.ctx.ledger.write(
                    lease_ledger.stop,
                    lease.id,
                    EndReason.HOST_LOST,
                    f"Host {name} has rebooted under your server. Your home is kept.",
                    now_ms(),
                )
                self.ctx.signals.ring(f"lease:{lease.id}")
                self.ctx.start_runner(lease.id)
        self.ctx.signals.ring("queue")

    def _record(self, tx: Transaction, inventory: Inventory, accel: str | None) -> bool:
        if accel is not None:
            host_ledger.set_accel(tx, inventory.host, accel)
        return host_ledger.record_survey(tx, inventory, now_ms())

    async def _end_orphans(self, name: str, driver: GpuHost) -> None:
        """End each VM that no open lease or running diagnosis owns: one that a killed allocator
        left behind, or one whose creation was given up and took effect later. The host is asked
        first: who was on its list had an owner before it was made."""
        guests = await driver.guests()
        owners = await self.ctx.ledger.read(self._owners, name)
        for guest in guests:
            if guest.uuid in owners:
                continue
            log.warning(
                "orphan_guest host=%s uuid=%s kind=%s: no lease owns it, it is ended",
                name, guest.uuid, guest.kind,
            )  # fmt: skip
            await driver.destroy(guest.uuid)
            await driver.drop_disks(guest.uuid)

    async def _take_up_leases(self, name: str) -> None:
        self.ctx.reconciled.add(name)
        for lease in await self.ctx.ledger.read(lease_ledger.open_leases, name):
            self.ctx.start_runner(lease.id)
            self.ctx.signals.ring(f"lease:{lease.id}")

    def _owners(self, tx: Transaction, name: str) -> frozenset[str]:
        leases: list[LeaseRecord] = lease_ledger.open_leases(tx, name)
        with_guest = {
            lease.id
            for lease in leases
            if lease.state in OPEN_LEASES and lease.state is not LeaseState.QUEUED
        }
        return frozenset(with_guest | {run.id for run in diagnosis_ledger.running(tx, name)})

    async def _supply(self, name: str, driver: GpuHost) -> None:
        """Bring the host the images that it lacks, the service VM's first."""
        there = await driver.images()
        wanted = sorted(
            self.ctx.images.wanted(), key=lambda image: image is not self.ctx.images.service()
        )
        await self._note_images(name, there)
        for image in wanted:
            if image.digest in there:
                continue
            key = (name, image.digest)

            def progress(done: int, total: int, key: tuple[str, str] = key) -> None:
                self.copying[key] = int(100 * done / total) if total else 100

            log.info("image_copy host=%s image=%s digest=%s", name, image.name, image.digest)
            try:
                await driver.put_image(image, progress)
            finally:
                self.copying.pop(key, None)
            there |= {image.digest}
            await self._note_images(name, there)

    async def _note_images(self, name: str, digests: frozenset[str]) -> None:
        def write(tx: Transaction) -> bool:
            host = host_ledger.get(tx, name)
            if host is None or host.images == digests:
                return False
            host_ledger.set_images(tx, name, digests)
            return True

        if await self.ctx.ledger.write(write):
            self.ctx.signals.ring("queue", f"gpus:{name}")

    async def _empty_trash(self, name: str, driver: GpuHost) -> None:
        """Delete homes that were in the trash long enough. Here, in the host's own task: a host
        that is slow with it is slow for itself."""
        limit = now_ms() - int(self.ctx.limits.trash_days * _DAY_MS)
        for home in await self.ctx.ledger.read(home_ledger.trashed_before, limit):
            if home.host != name:
                continue
            try:
                await driver.drop_home(home.volume)
            except (HostTimeout, HostUnreachable):
                raise
            except HostError as error:
                log.warning("trash_kept volume=%s error=%s", home.volume, error)
                continue
            await self.ctx.ledger.write(home_ledger.forget, home.id)
            log.info("home_deleted volume=%s", home.volume)
