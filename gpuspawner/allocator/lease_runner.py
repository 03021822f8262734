"""One task per open lease moves it on until it has ended.

The ledger says what a lease is; this looks, does the next thing, and looks again. Killed anywhere,
it begins anew with the look.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from gpuspawner.allocator.clock import now_ms
from gpuspawner.allocator.context import Context
from gpuspawner.allocator.lease_start import (
    BootTimeout,
    GuestGone,
    LeaseStart,
    StopAsked,
    let_go_on,
)
from gpuspawner.host.api import HostError, HostFull, HostTimeout, HostUnreachable
from gpuspawner.ledger import homes as home_ledger
from gpuspawner.ledger import hosts as host_ledger
from gpuspawner.ledger import leases as lease_ledger
from gpuspawner.ledger.database import Deposed, LedgerUnwritable, Transaction
from gpuspawner.ledger.records import LeaseRecord
from gpuspawner.pool.states import EndReason, LeaseState

log = logging.getLogger(__name__)

_WATCH_S = 15.0  # how often a running guest is looked at beside the host's events
_RETRY_S = (1.0, 2.0, 5.0, 10.0, 30.0)


class LeaseRunners:
    """All runners. ``start`` is idempotent."""

    def __init__(self, context: Context) -> None:
        self.ctx = context
        self._tasks: dict[str, asyncio.Task[None]] = {}
        context.start_runner = self.start

    async def resume(self) -> None:
        """Take up the leases that wait for a place; those on a host are taken up once it agrees
        with the ledger."""
        for lease in await self.ctx.ledger.read(lease_ledger.queued):
            self.start(lease.id)

    def start(self, lease_id: str) -> None:
        """Have a task for this lease."""
        if lease_id not in self._tasks:
            task = asyncio.create_task(self._run(lease_id), name=f"lease {lease_id}")
            self._tasks[lease_id] = task
            task.add_done_callback(lambda _task: self._tasks.pop(lease_id, None))

    async def close(self) -> None:
        """Stop moving leases; their VMs go on."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, lease_id: str) -> None:
        failures = 0
        seen_open = False
        while True:
            try:
                lease = await self.ctx.ledger.read(lease_ledger.need, lease_id)
                if lease.state is LeaseState.ENDED:
                    self._ended(lease, seen_open)
                    return
                seen_open = True
                await self._move(lease)
                failures = 0
            except (asyncio.CancelledError, Deposed):
                raise
            except Exception as error:
                # A lease is never dropped: whatever went wrong, look again.
                delay = _RETRY_S[min(failures, len(_RETRY_S) - 1)]
                failures += 1
                if isinstance(error, (HostTimeout, HostUnreachable)):
                    await self._host_is_silent(lease_id)
                level = logging.WARNING if isinstance(error, HostError) else logging.ERROR
                log.log(
                    level,
                    "lease_retry lease=%s in_s=%s error=%s",
                    lease_id,
                    delay,
                    error,
                    exc_info=not isinstance(error, HostError),
                )
                with self.ctx.signals.listen(f"lease:{lease_id}") as bell:
                    await bell.wait(delay)

    async def _host_is_silent(self, lease_id: str) -> None:
        """Tell the lease's user, once, which host keeps her waiting, and have the host looked at
        now: until its state is known others are sent there."""

        def write(tx: Transaction) -> str | None:
            lease = lease_ledger.need(tx, lease_id)
            host = None if lease.host is None else host_ledger.get(tx, lease.host)
            if host is None:
                return None
            text = f"Host {host.name} does not answer; waiting for it."
            last = lease_ledger.last_event(tx, lease_id)
            if last is not None and not lease_ledger.was_told(tx, lease_id, text):
                lease_ledger.add_event(tx, lease, now_ms(), "progress", last.progress, text)
            return host.name if host.state == "ready" else None

        try:
            suspect = await self.ctx.ledger.write(write)
        except LedgerUnwritable as error:
            log.error("lease_event_unwritten lease=%s error=%s", lease_id, error)
            return
        self.ctx.signals.ring(f"events:{lease_id}")
        if suspect is not None:
            self.ctx.signals.ring(f"host:{suspect}")

    async def _move(self, lease: LeaseRecord) -> None:
        if lease.host is not None and lease.host not in self.ctx.reconciled:
            with self.ctx.signals.listen(f"lease:{lease.id}") as bell:
                await bell.wait(5)
            return
        match lease.state:
            case LeaseState.QUEUED:
                with self.ctx.signals.listen(f"lease:{lease.id}") as bell:
                    fresh = await self.ctx.ledger.read(lease_ledger.need, lease.id)
                    if fresh.state is LeaseState.QUEUED:
                        await bell.wait(30)
            case LeaseState.PLACED:
                await self._to(lease, LeaseState.STARTING, 8, "Starting.")
            case LeaseState.STARTING:
                await self._start(lease)
            case LeaseState.RUNNING:
                await self._watch(lease)
            case LeaseState.STOPPING:
                await self._stop(lease)
            case LeaseState.ENDED:
                pass

    # ------------------------------------------------------------------ starting

    async def _start(self, lease: LeaseRecord) -> None:
        try:
            await LeaseStart(self.ctx, lease).run()
        except StopAsked:
            return
        except GuestGone:
            await self._boot_failed(lease, "The virtual machine ended while it was starting.")
        except BootTimeout:
            await self._boot_failed(
                lease, f"JupyterLab did not answer within {self.ctx.limits.boot_s:.0f} s."
            )
        except (HostTimeout, HostUnreachable):
            # It may come back in a moment, and every step may be done twice; the boot time-out
            # bounds how long we hope.
            if now_ms() < lease.created_ms + int(self.ctx.limits.boot_s * 1000):
                raise
            await self.end(
                lease.id, EndReason.HOST_ERROR, f"Host {lease.host} does not answer any more."
            )
        except HostError as error:
            log.error("lease_host_error lease=%s error=%s", lease.id, error)
            await self.end(lease.id, EndReason.HOST_ERROR, _why(lease.host, error))
        else:
            if await self.ctx.ledger.write(self._running, lease.id):
                seconds = (now_ms() - lease.created_ms) / 1000
                self.ctx.metrics.lease_start.observe(seconds)
            self._ring(lease.id)

    def _running(self, tx: Transaction, lease_id: str) -> bool:
        lease = lease_ledger.need(tx, lease_id)
        if lease.state is not LeaseState.STARTING:
            return False
        now = now_ms()
        home = home_ledger.of_key(tx, lease.key)
        if home is not None:
            home_ledger.mark_used(tx, home.id)
        lease_ledger.move(
            tx, lease, LeaseState.RUNNING, now, 100, "JupyterLab is ready.", running_ms=now
        )
        return True

    async def _boot_failed(self, lease: LeaseRecord, text: str) -> None:
        """End a lease whose guest did not come up, with the end of its console for the admin."""
        tail = ""
        try:
            assert lease.host is not None
            tail = await self.ctx.driver(lease.host).console(lease.id, 4096)
        except HostError as error:
            log.warning("console_unreadable lease=%s error=%s", lease.id, error)
        log.error(
            "boot_failed lease=%s host=%s text=%s console=%r", lease.id, lease.host, text, tail
        )
        last = [line.strip() for line in tail.splitlines() if line.strip()][-3:]
        shown = f" Its console ends with: {' / '.join(last)[:400]}" if last else ""
        await self.end(lease.id, EndReason.BOOT_FAILED, text + shown)

    # ------------------------------------------------------------------ running

    async def _watch(self, lease: LeaseRecord) -> None:
        """Until the guest is gone or the lease is to end. A host that does not answer changes
        nothing: its guests may be well."""
        assert lease.host is not None
        with self.ctx.signals.listen(f"lease:{lease.id}", f"guest:{lease.id}") as bell:
            while True:
                fresh = await self.ctx.ledger.read(lease_ledger.need, lease.id)
                if fresh.state is not LeaseState.RUNNING:
                    return
                guest = await self.ctx.driver(lease.host).guest(lease.id)
                if guest is None:
                    await self.end(
                        lease.id,
                        EndReason.GUEST_GONE,
                        "The virtual machine has ended by itself (it was powered off or rebooted "
                        "from inside, or it crashed). Your home is kept.",
                    )
                    return
                if guest.state == "paused":
                    await let_go_on(self.ctx, fresh)
                await bell.wait(_WATCH_S)

    # ------------------------------------------------------------------ stopping

    async def end(self, lease_id: str, reason: EndReason, text: str) -> LeaseRecord:
        """Begin to end a lease; idempotent."""
        lease = await self.ctx.ledger.write(lease_ledger.stop, lease_id, reason, text, now_ms())
        self._ring(lease_id)
        self.start(lease_id)
        return lease

    async def _stop(self, lease: LeaseRecord) -> None:
        assert lease.host is not None
        assert lease.claim is not None
        driver = self.ctx.driver(lease.host)
        guest = await driver.guest(lease.id)
        if guest is not None:
            gentle = lease.reason not in (EndReason.BOOT_FAILED, EndReason.HOST_ERROR)
            if gentle and lease.running_ms is not None:
                await self._shut_down(lease)
            await driver.destroy(lease.id)
        for address in lease.claim.gpus:
            await self._released(lease, address)
        await driver.drop_disks(lease.id)
        if lease.reason is not EndReason.BOOT_FAILED:
            await driver.drop_console(lease.id)
        await self.ctx.ledger.write(self._finish, lease.id)
        self._ring(lease.id)
        self.ctx.signals.ring("queue", f"gpus:{lease.host}")

    async def _shut_down(self, lease: LeaseRecord) -> None:
        """Press the power button and wait, within a bound, so that everything is written."""
        assert lease.host is not None
        driver = self.ctx.driver(lease.host)
        host_is_slow = getattr(driver, "accel", None) == "tcg"
        patience_s = self.ctx.limits.stop_s * (2 if host_is_slow else 1)
        begin = asyncio.get_running_loop().time()
        pressed_at = -10.0
        with self.ctx.signals.listen(f"guest:{lease.id}") as bell:
            while True:
                passed = asyncio.get_running_loop().time() - begin
                if passed > patience_s:
                    log.warning("shutdown_timeout lease=%s after_s=%.0f", lease.id, passed)
                    return
                # A guest that is still booting ignores the button: press again.
                if passed - pressed_at >= 10:
                    if not await self._press(lease):
                        return
                    pressed_at = passed
                if await driver.guest(lease.id) is None:
                    return
                await bell.wait(1.0)

    async def _press(self, lease: LeaseRecord) -> bool:
        """Press the button; false when the VM cannot even be asked, and has to be destroyed."""
        assert lease.host is not None
        try:
            await self.ctx.driver(lease.host).shutdown(lease.id)
        except HostUnreachable:
            raise
        except HostError as error:
            log.warning("shutdown_failed lease=%s error=%s", lease.id, error)
            return False
        return True

    async def _released(self, lease: LeaseRecord, address: str) -> None:
        assert lease.host is not None
        driver = self.ctx.driver(lease.host)
        inventory = await driver.survey()
        if address not in {gpu.address for gpu in inventory.gpus}:
            return  # it left the bus: nobody can hold it, and its diagnosis will say so
        if not await driver.released(address):
            raise HostError(
                f"GPU {address} on {lease.host} is still held by a process.",
                "It stays with its lease until that process is gone.",
            )

    def _finish(self, tx: Transaction, lease_id: str) -> None:
        lease = lease_ledger.need(tx, lease_id)
        if lease.state is LeaseState.STOPPING:
            lease_ledger.finish(tx, lease, now_ms())

    def _ended(self, lease: LeaseRecord, seen_open: bool) -> None:
        self.ctx.payloads.pop(lease.id, None)
        self.ctx.signals.ring(f"events:{lease.id}", f"ended:{lease.id}", "queue")
        if not seen_open:
            return  # it was over before; its end is counted and told already
        self.ctx.metrics.lease_ends.labels(lease.reason or "unknown").inc()
        log.info(
            "lease_ended lease=%s user=%r server=%r reason=%s",
            lease.id, lease.username, lease.server_name, lease.reason,
        )  # fmt: skip

    async def _to(self, lease: LeaseRecord, state: LeaseState, progress: int, told: str) -> None:
        def write(tx: Transaction, **changes: Any) -> None:
            fresh = lease_ledger.need(tx, lease.id)
            if fresh.state is lease.state:
                lease_ledger.move(tx, fresh, state, now_ms(), progress, told, **changes)

        await self.ctx.ledger.write(write)
        self.ctx.signals.ring(f"events:{lease.id}")

    def _ring(self, lease_id: str) -> None:
        self.ctx.signals.ring(f"lease:{lease_id}", f"events:{lease_id}")


def _why(host: str | None, error: HostError) -> str:
    """What a user reads of a host that refused. What an admin does about it is not for her."""
    if isinstance(error, HostFull):
        return (
            f"The disk of host {host} is full, so your server could not start. Its administrators "
            "have it in their log."
        )
    return f"Host {host} could not start the virtual machine: {error.args[0]}"
