"""The hosts of the pool: connected, surveyed, supplied with images, and reconciled.

One task a host, so that a host that hangs delays no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from gpuspawner.allocator.clock import now_ms
from gpuspawner.allocator.context import Context
from gpuspawner.allocator.diagnosis import abort_leftovers
from gpuspawner.allocator.reclaim import Reclaimer
from gpuspawner.host.api import GpuHost, HostError, HostTimeout, HostUnreachable
from gpuspawner.ledger import audit as audit_ledger
from gpuspawner.ledger import diagnoses as diagnosis_ledger
from gpuspawner.ledger import gpus as gpu_ledger
from gpuspawner.ledger import homes as home_ledger
from gpuspawner.ledger import hosts as host_ledger
from gpuspawner.ledger import leases as lease_ledger
from gpuspawner.ledger.database import Deposed, Transaction
from gpuspawner.ledger.records import DiagnosisRecord, HostRecord, LeaseRecord
from gpuspawner.pool.states import OPEN_LEASES, EndReason, GpuState, LeaseState
from gpuspawner.pool.topology import Inventory

log = logging.getLogger(__name__)

Factory = Callable[[str, dict[str, Any]], GpuHost]

_SURVEY_S = 60.0
_DAY_MS = 24 * 3600 * 1000
_KEEP_MS = 7 * _DAY_MS  # consoles of boots that failed
_UNREACHABLE_AFTER = 3  # failures in a row
_BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)


class _Keeping:
    """What runs beside a host's task, for as long as it does."""

    def __init__(self, driver: GpuHost) -> None:
        self.driver = driver
        self.opened = False
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def have(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start this work unless it is under way."""
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = asyncio.create_task(work(), name=name)

    async def close(self) -> None:
        """Stop all of it."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


class HostKeeper:
    """All hosts. ``factory`` makes a driver from a host's name and settings."""

    def __init__(self, context: Context, factory: Factory) -> None:
        self.ctx = context
        self._factory = factory
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changing = asyncio.Lock()
        self.copying: dict[tuple[str, str], int] = {}  # (host, digest) -> percent

    async def open(self) -> None:
        """Take up every host of the ledger. They answer when they answer; one whose settings
        are not understood any more is out, and nothing else is."""
        for host in await self.ctx.ledger.read(host_ledger.every):
            await self.ctx.ledger.write(host_ledger.set_state, host.name, "new")
            try:
                self._keep(host.name, self._make(host.name, host.settings, host))
            except ValueError as error:
                log.error("host_settings host=%s error=%s", host.name, error)
                await self._set(host.name, "unreachable", f"Its settings cannot be used: {error}")

    async def add(self, name: str, settings: dict[str, Any], by: str) -> bool:
        """Add a host or give it new settings, for an admin ``by`` whom the audit names; true if it
        is new. ``ValueError`` for settings that make no driver; nothing is stored then, and a
        known host goes on as it was."""

        def write(tx: Transaction) -> bool:
            new = host_ledger.add(tx, name, settings)
            verb = "add" if new else "new settings of"
            audit_ledger.add(tx, now_ms(), by, f"{verb} host {name}")
            return new

        async with self._changing:
            known = await self.ctx.ledger.read(host_ledger.get, name)
            driver = self._make(name, settings, known)
            new = await self.ctx.ledger.write(write)
            await self._drop_task(name)
            self._keep(name, driver)
            self.ctx.signals.ring("audit")
            return new

    def look_again(self, name: str) -> None:
        """Survey a host now."""
        self.ctx.signals.ring(f"host:{name}")

    async def close(self) -> None:
        """Let go of all hosts; their guests go on."""
        for name in list(self._tasks):
            await self._drop_task(name)

    def _make(self, name: str, settings: dict[str, Any], host: HostRecord | None) -> GpuHost:
        known: dict[str, Any] = {}
        if host is not None and host.boot_id and host.accel:
            known = {"known_accel": (host.boot_id, host.accel)}
        return self._factory(name, {**settings, **known})

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
        """Until cancelled; whatever fails, the host is looked at again."""
        keeping = _Keeping(driver)
        failures = 0
        try:
            with self.ctx.signals.listen(f"host:{name}", "images") as bell:
                while True:
                    try:
                        await self._look(name, keeping)
                        failures = 0
                        await bell.wait(_SURVEY_S)
                        continue
                    except (asyncio.CancelledError, Deposed):
                        raise
                    except HostError as error:
                        reason = str(error)
                        log.warning("host_error host=%s error=%s", name, error)
                    except Exception as error:
                        reason = f"The allocator failed on this host: {type(error).__name__}."
                        log.exception("host_failed host=%s", name)
                    failures += 1
                    # One slow answer must not empty the queue of those who wait for this host.
                    if failures >= _UNREACHABLE_AFTER:
                        await self._set_quietly(name, "unreachable", reason)
                    await bell.wait(_BACKOFF_S[min(failures, len(_BACKOFF_S)) - 1])
        finally:
            await keeping.close()

    async def _look(self, name: str, keeping: _Keeping) -> None:
        """One round: connected, surveyed, agreed with the ledger, supplied."""
        driver = keeping.driver
        if not keeping.opened:
            await driver.open(lambda uuid: self._guest_changed(name, uuid))
            keeping.opened = True
        await self._survey(name, driver)
        if name not in self.ctx.reconciled:
            await abort_leftovers(self.ctx, name, frozenset())
            await self._take_up_leases(name)
        await self._end_orphans(name, driver)
        await self._sweep(name, driver)
        await self._note_images(name, await driver.images())
        await self._set(name, "ready")
        keeping.have("reclaim", lambda: Reclaimer(self.ctx, name).run())
        keeping.have("supply", lambda: self._supply(name, driver))
        await self._empty_trash(name, driver)

    def _guest_changed(self, name: str, uuid: str) -> None:
        self.ctx.signals.ring(f"guest:{uuid}", f"gpus:{name}")

    async def _set_quietly(self, name: str, state: str, reason: str) -> None:
        """As ``_set``, where a database that fails as well must not end the host's task."""
        try:
            await self._set(name, state, reason)
        except Deposed:
            raise
        except Exception:
            log.exception("host_state_not_stored host=%s state=%s", name, state)

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
        hosts = await self.ctx.ledger.read(host_ledger.every)
        others = {host.settings["cidr"] for host in hosts if host.name != name}
        await driver.block(frozenset(others | self.ctx.limits.guests_blocked))
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
        for lease_id, address in await self.ctx.ledger.write(self._tell_of_lost, inventory):
            log.error("gpu_lost_in_use host=%s gpu=%s lease=%s", name, address, lease_id)
            self.ctx.metrics.gpu_failures.labels(name, "lost").inc()
            self.ctx.signals.ring(f"events:{lease_id}", f"gpus:{name}")
        self.ctx.signals.ring("queue")

    def _tell_of_lost(self, tx: Transaction, inventory: Inventory) -> list[tuple[str, str]]:
        """Tell leases, once, whose GPU does not answer any more; (lease, GPU) of those told. The
        server goes on, as libvirt's guest does, so that its user can save her work."""
        present = {gpu.address for gpu in inventory.gpus}
        told = []
        for lease in lease_ledger.open_leases(tx, inventory.host):
            claimed = lease.claim.gpus if lease.claim is not None else ()
            last = lease_ledger.last_event(tx, lease.id)
            for address in sorted(set(claimed) - present):
                text = (
                    f"GPU {address} does not answer any more. Save your work and start the server "
                    "again: you will get another one."
                )
                if last is not None and not lease_ledger.was_told(tx, lease.id, text):
                    lease_ledger.add_event(tx, lease, now_ms(), "progress", last.progress, text)
                    told.append((lease.id, address))
        return told

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
                "orphan_guest host=%s uuid=%s kind=%s: nobody owns it, it is ended",
                name, guest.uuid, guest.kind,
            )  # fmt: skip
            try:
                await self._suspect_its_gpus(name, driver, guest.uuid)
                await driver.destroy(guest.uuid)
                await driver.drop_disks(guest.uuid)
                await driver.drop_console(guest.uuid)
            except HostError as error:  # it is tried again at the next survey
                log.error("orphan_stays host=%s uuid=%s error=%s", name, guest.uuid, error)

    async def _sweep(self, name: str, driver: GpuHost) -> None:
        """Delete what dead guests have left: a seed holds a token, and a call that was given up
        may have made it after its lease had ended. Consoles of failed boots stay for a while."""
        found = await driver.disk_owners()
        kept = await self.ctx.ledger.read(self._owners, name)
        kept |= await self.ctx.ledger.read(lease_ledger.failed_boots_since, now_ms() - _KEEP_MS)
        for uuid in sorted(found - kept):
            log.info("leftover_disks host=%s uuid=%s", name, uuid)
            await driver.drop_disks(uuid)
            await driver.drop_console(uuid)

    async def _suspect_its_gpus(self, name: str, driver: GpuHost, uuid: str) -> None:
        """What was proved about a GPU is worth nothing once a VM that nobody owns has had it."""
        reason = "A virtual machine that nobody owned had this GPU."

        def held(tx: Transaction) -> list[DiagnosisRecord]:
            return [
                run
                for run in diagnosis_ledger.running(tx, name)
                if run.address in _gpus_of(tx, uuid)
            ]

        def suspect(tx: Transaction) -> None:
            for address in _gpus_of(tx, uuid):
                gpu = gpu_ledger.get(tx, name, address)
                if gpu is not None and gpu.state is GpuState.UNASSIGNED:
                    gpu_ledger.move(tx, gpu, GpuState.USED, now_ms(), reason=reason)

        for run in await self.ctx.ledger.read(held):
            await driver.destroy(run.id)
            await self.ctx.ledger.write(diagnosis_ledger.abort, run, reason, now_ms())
        await self.ctx.ledger.write(suspect)
        self.ctx.signals.ring(f"gpus:{name}")

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
        for image in wanted:
            if image.digest in there:
                continue
            key = (name, image.digest)

            def progress(done: int, total: int, key: tuple[str, str] = key) -> None:
                self.copying[key] = int(100 * done / total) if total else 100

            log.info("image_copy host=%s image=%s digest=%s", name, image.name, image.digest)
            try:
                await driver.put_image(image, progress)
            except (HostTimeout, HostUnreachable):
                raise
            except HostError as error:
                # One image that cannot be copied must not take the host's other work along.
                log.error("image_copy_failed host=%s image=%s error=%s", name, image.name, error)
                continue
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


def _gpus_of(tx: Transaction, uuid: str) -> tuple[str, ...]:
    """The GPUs that a lease or a diagnosis of this id had."""
    lease = lease_ledger.get(tx, uuid)
    if lease is not None:
        return lease.claim.gpus if lease.claim is not None else ()
    try:
        return (diagnosis_ledger.need(tx, uuid).address,)
    except LookupError:
        return ()
