"""The waiting leases, and what is done now and then."""

from __future__ import annotations

import asyncio
import logging

from gpuspawner.allocator import acquire as deciding
from gpuspawner.allocator.clock import now_ms
from gpuspawner.allocator.context import Context
from gpuspawner.allocator.lease_runner import LeaseRunners
from gpuspawner.ledger import leases as lease_ledger
from gpuspawner.ledger.database import Deposed, Transaction
from gpuspawner.pool.states import LeaseState

log = logging.getLogger(__name__)

_DAY_MS = 24 * 3600 * 1000


class QueueKeeper:
    """Places waiting leases whenever something may have become free."""

    def __init__(self, context: Context, runners: LeaseRunners) -> None:
        self.ctx = context
        self.runners = runners
        self._told: dict[str, str] = {}

    async def run(self) -> None:
        """Until cancelled."""
        with self.ctx.signals.listen("queue") as bell:
            while True:
                try:
                    await self._look()
                except (asyncio.CancelledError, Deposed):
                    raise
                except Exception:
                    log.exception("queue_error")
                await bell.wait(2.0)

    async def _look(self) -> None:
        before = await self.ctx.ledger.read(lease_ledger.queued)
        if not before:
            self._told.clear()
            return
        self._told |= await self.ctx.ledger.write(self._place)
        for lease in before:
            now = await self.ctx.ledger.read(lease_ledger.need, lease.id)
            if now.state is not LeaseState.QUEUED:
                self._told.pop(lease.id, None)
                self.ctx.signals.ring(f"lease:{lease.id}")
                self.runners.start(lease.id)
            self.ctx.signals.ring(f"events:{lease.id}")

    def _place(self, tx: Transaction) -> dict[str, str]:
        told: dict[str, str] = {}
        refusals = deciding.serve_queue(tx, self.ctx.placing, now_ms())
        for lease in lease_ledger.queued(tx):
            refusal = refusals.get(lease.id)
            if refusal is not None:
                text = deciding.waiting_text(tx, lease, refusal)
                if self._told.get(lease.id) != text:
                    lease_ledger.add_event(tx, lease, now_ms(), "progress", 2, text)
                    told[lease.id] = text
        return told

    async def housekeeping(self) -> None:
        """New images are noticed, early releases that no acquire followed are forgotten. Nothing
        here asks a host."""
        while True:
            try:
                if self.ctx.images.refresh():
                    self.ctx.signals.ring("images")
                await self.ctx.ledger.write(lease_ledger.forget_old, now_ms() - _DAY_MS)
            except (asyncio.CancelledError, Deposed):
                raise
            except Exception:
                log.exception("housekeeping_error")
            await asyncio.sleep(10)
