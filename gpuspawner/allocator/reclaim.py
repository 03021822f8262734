"""The way back of a GPU: used, diagnosed, free again or out of the circle."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import uuid

from gpuspawner.allocator.clock import now_ms
from gpuspawner.allocator.context import Context
from gpuspawner.allocator.diagnosis import Diagnosis, abort_leftovers, due
from gpuspawner.host.api import Image
from gpuspawner.ledger import diagnoses as diagnosis_ledger
from gpuspawner.ledger import gpus as gpu_ledger
from gpuspawner.ledger import hosts as host_ledger
from gpuspawner.ledger.database import Deposed, Transaction
from gpuspawner.ledger.records import DiagnosisRecord, GpuRecord, HostRecord
from gpuspawner.pool.states import GpuState

log = logging.getLogger(__name__)

_TICK_S = 5.0


class Reclaimer:
    """Keeps the used GPUs of one host moving; runs while the host is ready."""

    def __init__(self, context: Context, host: str) -> None:
        self.ctx = context
        self.host = host
        self._runs: dict[str, asyncio.Task[object]] = {}

    async def run(self) -> None:
        """Until cancelled. Runs in progress are left to the next start's reconcile."""
        try:
            with self.ctx.signals.listen(f"gpus:{self.host}", "images") as bell:
                while True:
                    pause = _TICK_S
                    try:
                        await self._look()
                        pause = await self.ctx.ledger.read(self._pause)
                    except Deposed:
                        raise
                    except Exception:
                        log.exception("reclaim_error host=%s", self.host)
                    await bell.wait(pause)
        finally:
            for task in self._runs.values():
                task.cancel()
            await asyncio.gather(*self._runs.values(), return_exceptions=True)

    async def _look(self) -> None:
        await abort_leftovers(self.ctx, self.host, frozenset(self._runs))
        image = self.ctx.images.service()
        if image is None:
            return
        room = self.ctx.limits.diagnoses_per_host - len(self._runs)
        if room <= 0:
            return
        for run, gpu, host in await self.ctx.ledger.write(self._begin, image, room):
            assert host.inventory is not None
            diagnosis = Diagnosis(self.ctx, run, gpu, host.inventory, image)
            task: asyncio.Task[object] = asyncio.create_task(
                diagnosis.go(), name=f"diagnosis {run.id}"
            )
            self._runs[run.id] = task
            task.add_done_callback(functools.partial(self._done, run.id))
            self.ctx.signals.ring("changed:pool")

    def _pause(self, tx: Transaction) -> float:
        """Seconds until the next retry is due, or the tick."""
        now = now_ms()
        waits = [
            (gpu.retry_ms - now) / 1000
            for gpu in gpu_ledger.of_host(tx, self.host, GpuState.USED)
            if gpu.retry_ms is not None and gpu.retry_ms > now
        ]
        return min([_TICK_S, *waits])

    def _done(self, run_id: str, task: asyncio.Task[object]) -> None:
        del self._runs[run_id]
        if not task.cancelled() and task.exception() is not None:
            log.error("diagnosis_crashed", exc_info=task.exception())
        self.ctx.signals.ring(f"gpus:{self.host}")

    def _begin(
        self, tx: Transaction, image: Image, room: int
    ) -> list[tuple[DiagnosisRecord, GpuRecord, HostRecord]]:
        host = host_ledger.get(tx, self.host)
        if host is None or host.inventory is None or host.state != "ready":
            return []
        if image.digest not in host.images:
            return []
        now = now_ms()
        # What has a problem cannot be given to the service VM either: it waits for its remedy.
        sound = {gpu.address: gpu for gpu in host.inventory.gpus if not gpu.problems}
        for gpu in gpu_ledger.of_host(tx, self.host, GpuState.NEW):
            if gpu.address in sound and sound[gpu.address].imitation:
                gpu_ledger.move(
                    tx, gpu, GpuState.USED, now, reason="Never diagnosed: first enrolment."
                )
        begun: list[tuple[DiagnosisRecord, GpuRecord, HostRecord]] = []
        # One that the host does not see at all is taken on too: it may be brought back.
        troubled = {gpu.address for gpu in host.inventory.gpus if gpu.problems}
        ready = [gpu for gpu in due(tx, self.host, now) if gpu.address not in troubled]
        for gpu in ready[:room]:
            run = diagnosis_ledger.begin(
                tx, gpu, str(uuid.uuid4()), secrets.token_hex(16), image.digest, now
            )
            begun.append((run, gpu, host))
        return begun
