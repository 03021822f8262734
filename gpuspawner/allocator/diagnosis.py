"""One diagnosis: a service VM wipes and checks one GPU, the host watches, the pool judges."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, replace
from typing import Any

from gpuspawner.allocator.clock import now_ms
from gpuspawner.allocator.context import Context
from gpuspawner.allocator.report import BrokenReport, ReportReader
from gpuspawner.host.api import (
    Channel,
    GpuHost,
    GuestSpec,
    HostError,
    HostTimeout,
    HostUnreachable,
    Image,
    Rung,
)
from gpuspawner.host.recovery import in_words
from gpuspawner.ledger import diagnoses as diagnosis_ledger
from gpuspawner.ledger import gpus as gpu_ledger
from gpuspawner.ledger.database import Transaction
from gpuspawner.ledger.records import DiagnosisRecord, GpuRecord
from gpuspawner.pool.states import GpuState, Outcome
from gpuspawner.pool.topology import Cell, Claim, Inventory
from gpuspawner.pool.verdict import EMULATED, Policy, Report, Verdict, Witness, judge

log = logging.getLogger(__name__)

PORT = "org.gpuspawner.service.0"
_KEPT_CONSOLE = 32768


class Diagnosis:
    """One run, from the witness before to the verdict in the ledger."""

    def __init__(
        self,
        context: Context,
        run: DiagnosisRecord,
        gpu: GpuRecord,
        inventory: Inventory,
        image: Image,
    ) -> None:
        self.ctx = context
        self.run_id = run.id
        self.run = run
        self.gpu = gpu
        self.inventory = inventory
        self.image = image
        self.driver: GpuHost = context.driver(run.host)
        self.reader = ReportReader(run.id, run.nonce)

    async def go(self) -> Verdict:
        """Do it all. Errors of the host make the run inconclusive; they never release a GPU."""
        started = asyncio.get_running_loop().time()
        before: Witness | None = None
        after: Witness | None = None
        tried: tuple[Rung, ...] = ()
        console = ""
        try:
            before = await self.driver.witness(self.gpu.address)
            if not before.present:
                tried = await self.driver.recover(self.gpu.address)
                if tried:
                    before = await self.driver.witness(self.gpu.address)
            if before.present:
                await self._look_anew(tried)
                report = await self._in_the_service_vm()
                console = await self._console()
                after = await self._witness_after()
            else:
                report = Report()
            verdict = judge(
                report,
                enrolled=self.gpu.enrolled,
                before=before,
                after=after,
                policy=self._policy(),
            )
            if verdict.outcome is Outcome.LOST and tried:
                verdict = replace(verdict, reasons=(*verdict.reasons, in_words(tried)))
        except HostError as error:
            report = self.reader.report(broken=f"The host failed: {error}")
            verdict = Verdict(Outcome.INCONCLUSIVE, (str(report.broken),), infra=True)
        finally:
            self.ctx.diagnosis_progress.pop(self.run_id, None)
        witness = {
            "before": _witness_json(before),
            "after": _witness_json(after),
            "recovery": [asdict(rung) for rung in tried],
        }
        await self._clean_up()
        await self.ctx.ledger.write(self._commit, verdict, report, witness, console, now_ms())
        seconds = asyncio.get_running_loop().time() - started
        self._tell(verdict, seconds)
        return verdict

    async def _look_anew(self, tried: tuple[Rung, ...]) -> None:
        """The host's hardware once more, if the last survey did not find this GPU."""
        if tried:
            log.warning(
                "gpu_recovered host=%s gpu=%s by=%s",
                self.run.host, self.gpu.address, tried[-1].step,
            )  # fmt: skip
        if tried or not self._listed():
            self.inventory = await self.driver.survey()
        if not self._listed():
            raise HostError(
                f"The GPU at {self.gpu.address} answers, and the host does not list it as a GPU."
            )

    def _listed(self) -> bool:
        return any(gpu.address == self.gpu.address for gpu in self.inventory.gpus)

    def _policy(self) -> Policy:
        # Real GPUs have a policy of their own once their checks exist; until then nothing that is
        # not emulated can pass, because no required check of it is known.
        if self._listed() and self.inventory.gpu(self.gpu.address).imitation:
            return EMULATED
        return Policy(kinds=(), required=("hardware",))

    def _spec(self) -> GuestSpec:
        gpu = self.inventory.gpu(self.gpu.address)
        node = self.inventory.node(gpu.node) if gpu.node >= 0 else self.inventory.nodes[0]
        # The service VM lives on what the node keeps back: housekeeping cores and the reserve.
        system = self.inventory.system_cores
        near = tuple(core for core in system if core in node.cores)
        cores = near[:1] or node.cores[:1] or system[:1]
        return GuestSpec(
            uuid=self.run_id,
            kind="service",
            title=f"diagnosis of {gpu.address}",
            claim=Claim(
                host=self.run.host,
                gpus=(gpu.address,),
                cells=(Cell(node.id, cores, max(256, self.image.min_memory_mib)),),
            ),
            gpus=(gpu,),
            image=self.image,
            extra_cmdline=(
                f"gpuspawner.run={self.run_id} gpuspawner.nonce={self.run.nonce} gpuspawner.tier=L1"
            ),
            channel=PORT,
            labels={"diagnosis": self.run_id, "gpu": gpu.address},
        )

    async def _in_the_service_vm(self) -> Report:
        spec = self._spec()
        await self.driver.reset(self.gpu.address)
        await self.driver.make_disks(spec)
        await self.driver.create(spec)
        channel = await self.driver.open_channel(self.run_id, PORT)
        try:
            async with asyncio.timeout(self.ctx.limits.diagnosis_s):
                await self._listen(channel)
        except BrokenReport as error:
            return self.reader.report(broken=str(error))
        except TimeoutError:
            return self.reader.report(
                broken=f"The service VM was not done after {self.ctx.limits.diagnosis_s:.0f} s "
                f"(last sign: {self.reader.progress})."
            )
        finally:
            await channel.close()
        return self.reader.report()

    async def _listen(self, channel: Channel) -> None:
        """Read until the report's end; raises ``BrokenReport``."""
        chunks = channel.read()
        while self.reader.final is None:
            patience_s = self.ctx.limits.diagnosis_silence_s
            if self.reader.hello is None:
                patience_s = max(patience_s, self.ctx.limits.diagnosis_s / 3)
            try:
                chunk = await asyncio.wait_for(anext(chunks), patience_s)
            except StopAsyncIteration:
                raise BrokenReport(
                    "The service VM ended before its report was complete "
                    f"(last sign: {self.reader.progress})."
                ) from None
            except TimeoutError:
                raise BrokenReport(
                    f"The service VM was silent for {patience_s:.0f} s "
                    f"(last sign: {self.reader.progress})."
                ) from None
            self.reader.feed(chunk)
            self.ctx.diagnosis_progress[self.run_id] = self.reader.progress
            self.ctx.signals.ring("changed:pool")  # news for pages; nothing to do for the host
        ack = f'{{"v":1,"t":"ack","run":"{self.run_id}"}}\n'
        await channel.write(ack.encode())

    async def _console(self) -> str:
        try:
            return await self.driver.console(self.run_id, _KEPT_CONSOLE)
        except HostError as error:
            return f"(the console could not be read: {error})"

    async def _witness_after(self) -> Witness | None:
        """End the service VM, see that the GPU is let go, and look at it again."""
        await self.driver.destroy(self.run_id)
        if not await self.driver.released(self.gpu.address):
            log.error("gpu_held host=%s gpu=%s", self.run.host, self.gpu.address)
            return None
        return await self.driver.witness(self.gpu.address)

    async def _clean_up(self) -> None:
        """No trace of the run stays on the host. The GPU is not judged before its VM is gone;
        a host that cannot do it now is asked until it can."""
        delay = 1.0
        while True:
            try:
                await self.driver.destroy(self.run_id)
                await self.driver.drop_disks(self.run_id)
                await self.driver.drop_console(self.run_id)
                return
            except HostError as error:
                log.warning("diagnosis_cleanup run=%s error=%s", self.run_id, error)
                await asyncio.sleep(delay)
                delay = min(delay * 2, 60)

    def _commit(
        self,
        tx: Transaction,
        verdict: Verdict,
        report: Report,
        witness: dict[str, Any],
        console: str,
        now: int,
    ) -> None:
        backoff = self.ctx.limits.diagnosis_backoff_s
        wait_s = backoff[min(self.run.attempt - 1, len(backoff) - 1)] if backoff else 0
        diagnosis_ledger.finish(
            tx,
            self.run,
            verdict,
            identity=report.identities[0] if report.identities else None,
            report=self.reader.as_json(),
            witness=witness,
            console=console,
            now_ms=now,
            max_attempts=self.ctx.limits.diagnosis_attempts,
            backoff_ms=int(wait_s * 1000),
        )

    def _tell(self, verdict: Verdict, seconds: float) -> None:
        outcome = verdict.outcome
        self.ctx.metrics.diagnoses.labels(self.run.host, outcome).inc()
        self.ctx.metrics.diagnosis_time.observe(seconds)
        if outcome in (Outcome.FAIL, Outcome.LOST):
            self.ctx.metrics.gpu_failures.labels(self.run.host, outcome).inc()
        level = logging.INFO if outcome is Outcome.PASS else logging.ERROR
        serial = self.gpu.enrolled.serial if self.gpu.enrolled else None
        log.log(
            level,
            "gpu_diagnosis host=%s gpu=%s serial=%r outcome=%s attempt=%d seconds=%.1f reasons=%r",
            self.run.host,
            self.gpu.address,
            serial,
            outcome.value,
            self.run.attempt,
            seconds,
            list(verdict.reasons),
        )
        self.ctx.signals.ring("queue", f"gpus:{self.run.host}")


def _witness_json(witness: Witness | None) -> dict[str, Any] | None:
    return None if witness is None else asdict(witness)


async def abort_leftovers(context: Context, host: str, alive: frozenset[str]) -> None:
    """Runs that nobody follows any more (the allocator was killed, or failed in them): their VMs
    end, their GPUs wait again. ``alive`` are the runs that somebody does follow.

    No pass is ever inferred from what such a VM may have reported.
    """
    driver = context.driver(host)
    for run in await context.ledger.read(diagnosis_ledger.running, host):
        if run.id in alive:
            continue
        try:
            await driver.destroy(run.id)
            await driver.drop_disks(run.id)
            await driver.drop_console(run.id)
        except (HostTimeout, HostUnreachable):
            raise
        except HostError as error:
            # One VM that will not die keeps its GPU, and holds up no other.
            log.error("diagnosis_stays run=%s host=%s error=%s", run.id, host, error)
            continue
        await context.ledger.write(
            diagnosis_ledger.abort, run, "The allocator stopped during the run.", now_ms()
        )
        context.signals.ring(f"gpus:{host}")


def due(tx: Transaction, host: str, now: int) -> list[GpuRecord]:
    """Used GPUs whose turn has come, longest waiting first."""
    return sorted(
        (
            gpu
            for gpu in gpu_ledger.of_host(tx, host, GpuState.USED)
            if not gpu.holds and (gpu.retry_ms or 0) <= now
        ),
        key=lambda gpu: (gpu.since_ms, gpu.address),
    )
