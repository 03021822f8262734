"""The way back of a GPU: one edge leads to ``unassigned``, and nothing else does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuspawner import schema
from gpuspawner.client import AllocatorClient, AllocatorError
from gpuspawner.host.api import HostError, Rung
from tests.layers import wait_for_async
from tests.service.harness import Site, acquire_body, gpu_in, lease_in
from tests.service.scripted import CHECKS, World, encode, report

GPU = "0000:40:00.0"


@pytest.fixture
async def site(tmp_path: Path):
    """One host with one GPU."""
    site = Site(tmp_path)
    world = site.world(gpus=1)
    yield site
    await world.close()
    assert world.overlaps == []


async def used_once(site: Site, client: AllocatorClient, prepare: Any = None) -> schema.Lease:
    """A lease came and went; ``prepare(world)`` is called while it runs."""
    await site.add_host(client, 0)
    lease = await client.acquire(acquire_body())
    await lease_in(client, lease.id, "running")
    if prepare is not None:
        prepare(site.worlds["h1"])
    await client.stop(lease.id, wait_s=20)
    return lease


def _replace(**changes: Any) -> Any:
    def prepare(world: World) -> None:
        world.script = lambda run, nonce, gpu: encode(report(run, nonce, gpu, **changes))

    return prepare


@pytest.mark.parametrize("check", ["identity", "dma", "read_back"])
async def test_a_failed_check_condemns(site: Site, check: str) -> None:
    """A GPU that fails is never given out, says why, and raises its metric."""
    async with site.running() as client:
        await used_once(site, client, _replace(**{check: "fail"}))
        gpu = await gpu_in(client, GPU, "failed")
        assert gpu.dirty
        assert f"Check {check} failed" in (gpu.reason or "")
        with pytest.raises(AllocatorError, match="out of service"):
            await client.acquire(acquire_body(start="start-0002"))
        assert 'gpuspawner_gpu_failures_total{host="h1",outcome="fail"} 1.0' in (
            await site.metrics()
        )


@pytest.mark.parametrize("check", ["overwrite", "read_back"])
@pytest.mark.parametrize("how", ["missing", "skip", "error", "timeout"])
async def test_what_is_not_passed_releases_nothing(site: Site, check: str, how: str) -> None:
    """Missing, skipped, broken and late checks neither release nor condemn; then quarantine."""
    async with site.running() as client:
        await used_once(site, client, _replace(**{check: how}))
        gpu = await gpu_in(client, GPU, "quarantined")
        assert gpu.dirty
        assert gpu.attempt == 3
        assert check in (gpu.reason or "")


async def test_another_card_in_the_slot(site: Site) -> None:
    """The enrolled identity is part of every pass."""
    async with site.running() as client:
        await used_once(site, client, _replace(serial="EMU-another"))
        gpu = await gpu_in(client, GPU, "failed")
        assert "serial" in (gpu.reason or "")


async def test_gone_from_the_bus(site: Site) -> None:
    """The host's own eyes are enough: no service VM is even made."""
    async with site.running() as client:
        await used_once(site, client, lambda world: world.gone.add(GPU))
        gpu = await gpu_in(client, GPU, "lost")
        assert "does not answer on the bus" in (gpu.reason or "")


@pytest.mark.parametrize("listed", [True, False])
async def test_a_gpu_that_is_brought_back(site: Site, listed: bool) -> None:
    """Whether the kernel still lists it or not: it is diagnosed as any other, and what brought it
    back stands in the record."""
    tried = (Rung("wake"), Rung("reset", "it did not take it"), Rung("bus-reset"))

    def lose(world: World) -> None:
        whole = world.inventory
        world.gone.add(GPU)
        if not listed:
            world.inventory = replace(whole, gpus=())

        def recover(address: str) -> tuple[Rung, ...]:
            world.gone.discard(address)
            world.inventory = whole
            return tried

        world.on_recover = recover

    async with site.running() as client:
        await used_once(site, client, lose)
        await gpu_in(client, GPU, "unassigned")
        (run, _first) = await client.diagnoses(host="h1", gpu=GPU)
        assert run.outcome == "pass"
        assert [step["step"] for step in run.witness["recovery"]] == ["wake", "reset", "bus-reset"]


async def test_a_gpu_that_is_not_brought_back(site: Site) -> None:
    """The reason says what was tried; each retest tries it again."""

    def lose(world: World) -> None:
        world.gone.add(GPU)
        world.inventory = replace(world.inventory, gpus=())
        world.on_recover = lambda address: (Rung("wake"), Rung("power-cycle", "no switch"))

    async with site.running() as client:
        await used_once(site, client, lose)
        gpu = await gpu_in(client, GPU, "lost")
        assert "Tried in vain: wake. Powering the host off" in (gpu.reason or "")
        world = site.worlds["h1"]
        assert world.history.count(("recover", GPU)) == 1
        await client.gpu_action("h1", GPU, schema.GpuAction(action="retest"))
        await wait_for_async(
            lambda: world.history.count(("recover", GPU)) == 2, 20, "another recovery"
        )
        await gpu_in(client, GPU, "lost")


async def test_gone_from_the_bus_while_a_server_has_it(site: Site) -> None:
    """Its user is told, once, and goes on; the GPU is lost as soon as she has stopped."""
    async with site.running() as client:
        await site.add_host(client, 0)
        lease = await client.acquire(acquire_body())
        await lease_in(client, lease.id, "running")
        world = site.worlds["h1"]
        world.gone.add(GPU)
        world.inventory = replace(world.inventory, gpus=())

        surveys = world.history.count(("survey", ""))
        for more in (1, 2):
            await client.check_host("h1")  # which surveys the host as well
            await wait_for_async(
                lambda more=more: world.history.count(("survey", "")) >= surveys + more,
                10,
                "another survey",
            )
        assert (await client.lease(lease.id)).state == "running"
        await client.stop(lease.id, wait_s=20)
        told = [event.message async for event in client.events(lease.id)]
        assert len([text for text in told if f"{GPU} does not answer any more" in text]) == 1
        gpu = await gpu_in(client, GPU, "lost")
        assert "does not answer" in (gpu.reason or "")


def _bad_nonce(run: str, nonce: str, gpu: str) -> list[bytes]:
    return encode(report(run, "0" * 32, gpu))


def _another_run(run: str, nonce: str, gpu: str) -> list[bytes]:
    return encode(report("0" * 8 + run[8:], nonce, gpu))


def _cut_short(run: str, nonce: str, gpu: str) -> list[bytes]:
    return [*encode(report(run, nonce, gpu))[:-1], b'{"v":1,"t":"fin']


def _repeated(run: str, nonce: str, gpu: str) -> list[bytes]:
    lines = encode(report(run, nonce, gpu))
    return [*lines[:3], lines[2], *lines[3:]]


def _too_large(run: str, nonce: str, gpu: str) -> list[bytes]:
    return [b'{"v":1,"pad":"' + b"x" * 70_000 + b'"}\n']


def _endless(run: str, nonce: str, gpu: str) -> list[bytes]:
    line = report(run, nonce, gpu)[0] | {"image": "y" * 200}
    return encode([line | {"seq": n} for n in range(2000)])


def _garbage(run: str, nonce: str, gpu: str) -> list[bytes]:
    return [b"\xff\xfe\x00 hello\n"]


def _deep(run: str, nonce: str, gpu: str) -> list[bytes]:
    return [b"[" * 50_000 + b"\n"]


def _result_twice(run: str, nonce: str, gpu: str) -> list[bytes]:
    lines = report(run, nonce, gpu)
    lines.insert(4, dict(lines[3]))
    return encode([line | {"seq": n} for n, line in enumerate(lines)])


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (_bad_nonce, "nonce"),
        (_another_run, "another run"),
        (_cut_short, "silent"),
        (_repeated, "repeated"),
        (_too_large, "longer than"),
        (_endless, ""),
        (_garbage, "malformed"),
        (_deep, "malformed"),
        (_result_twice, "twice"),
    ],
)
async def test_reports_that_cannot_be_believed(tmp_path: Path, script: Any, why: str) -> None:
    """They end inconclusive, whatever they claim, and never lead to ``unassigned``."""
    site = Site(tmp_path, diagnosis_silence_s=0.5, diagnosis_s=3.0)
    world = site.world(gpus=1)
    async with site.running() as client:

        def prepare(world: World) -> None:
            world.script = script

        await used_once(site, client, prepare)
        gpu = await gpu_in(client, GPU, "quarantined")
        assert why in (gpu.reason or "")
        runs = [d for d in await client.diagnoses(gpu=GPU) if d.outcome == "inconclusive"]
        assert len(runs) == 3
    await world.close()


async def test_a_service_vm_that_dies(site: Site) -> None:
    """QEMU killed in mid-run is no verdict."""
    async with site.running() as client:
        world = site.worlds["h1"]

        def prepare(world: World) -> None:
            world.script = lambda run, nonce, gpu: encode(report(run, nonce, gpu))[:3]

        lease = await used_once(site, client, prepare)
        for attempt in range(1, 4):
            await wait_for_async(
                lambda: next((s for s in world.specs.values() if s.kind == "service"), None),
                60,
                f"service VM {attempt}",
            )
            spec = next(s for s in world.specs.values() if s.kind == "service")
            await world.end(spec.uuid)
            await wait_for_async(lambda u=spec.uuid: u not in world.disks, 60, "its disks to go")
        gpu = await gpu_in(client, lease.gpus[0], "quarantined")
        assert "ended before its report was complete" in (gpu.reason or "")


async def test_the_host_cannot_start_the_service_vm(site: Site) -> None:
    """An error of the host condemns no GPU."""
    async with site.running() as client:

        def prepare(world: World) -> None:
            world.fail["create"] = HostError("QEMU says no.")

        await used_once(site, client, prepare)
        gpu = await gpu_in(client, GPU, "quarantined")
        assert "QEMU says no." in (gpu.reason or "")
        del site.worlds["h1"].fail["create"]
        await client.gpu_action("h1", GPU, schema.GpuAction(action="retest", reason="repaired"))
        gpu = await gpu_in(client, GPU, "unassigned")
        assert gpu.attempt == 0


async def test_admin_actions_never_release(site: Site) -> None:
    """Hold, retest and retire; none of them reaches ``unassigned`` without a diagnosis."""
    async with site.running() as client:
        await site.add_host(client, 0)
        held = await client.gpu_action(
            "h1", GPU, schema.GpuAction(action="hold", reason="looks odd")
        )
        assert held.holds == ["looks odd"]
        with pytest.raises(AllocatorError):
            await client.acquire(acquire_body())
        await client.gpu_action("h1", GPU, schema.GpuAction(action="unhold"))
        lease = await client.acquire(acquire_body(start="start-0002"))
        await lease_in(client, lease.id, "running")
        with pytest.raises(AllocatorError) as caught:
            await client.gpu_action("h1", GPU, schema.GpuAction(action="retest"))
        assert caught.value.status == 409
        assert "End its lease first" in caught.value.refusal.message


async def test_the_failure_is_one_structured_log_line(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """An admin's log collector finds it by its first word."""
    caplog.set_level("INFO")
    async with site.running() as client:
        await used_once(site, client, _replace(dma="fail"))
        await gpu_in(client, GPU, "failed")
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("gpu_diagnosis")]
    failed = [line for line in lines if "outcome=fail" in line]
    assert len(failed) == 1
    assert f"host=h1 gpu={GPU}" in failed[0]
    assert "dma" in failed[0]


async def test_the_diagnosis_is_on_record(site: Site) -> None:
    """Checks, witness and console of a run can be read afterwards."""
    async with site.running() as client:
        await used_once(site, client)
        await gpu_in(client, GPU, "unassigned")
        newest = (await client.diagnoses(gpu=GPU))[0]
        assert newest.outcome == "pass"
        assert [check["check"] for check in newest.checks] == list(CHECKS)
        assert newest.witness["before"]["present"]
        assert "secret" not in json.dumps(newest.model_dump(mode="json"))
