"""A survey in the ledger: no row is ever dropped, least of all one that somebody holds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpuspawner.ledger import gpus, hosts
from gpuspawner.ledger.database import Ledger, Transaction
from gpuspawner.ledger.records import GpuRecord
from gpuspawner.pool.states import GpuState
from gpuspawner.pool.topology import Gpu, Inventory, Node

GPU = Gpu("0000:40:00.0", "A", 0, ("0000:40:00.0",), 15, ("10de:20b0",))
INVENTORY = Inventory("h1", "b1", (Node(0, ((0,),), 4096),), (GPU,))
TO = {
    GpuState.NEW: (),
    GpuState.USED: (GpuState.USED,),
    GpuState.DIAGNOSING: (GpuState.USED, GpuState.DIAGNOSING),
    GpuState.UNASSIGNED: (GpuState.USED, GpuState.DIAGNOSING, GpuState.UNASSIGNED),
    GpuState.RESERVED: (
        GpuState.USED, GpuState.DIAGNOSING, GpuState.UNASSIGNED, GpuState.RESERVED,
    ),
    GpuState.ASSIGNED: (
        GpuState.USED, GpuState.DIAGNOSING, GpuState.UNASSIGNED, GpuState.RESERVED,
        GpuState.ASSIGNED,
    ),
}  # fmt: skip


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    """One surveyed host of one GPU."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'l.sqlite'}")
    await ledger.open()
    await ledger.write(hosts.add, "h1", {"uri": "x", "cidr": "10.0.0.0/24"})
    await ledger.write(hosts.record_survey, INVENTORY, 1)
    yield ledger
    await ledger.close()


async def bring(ledger: Ledger, state: GpuState) -> None:
    """The GPU into this state, step by step."""
    for step in TO[state]:

        def move(tx: Transaction, step: GpuState = step) -> None:
            gpu = gpus.get(tx, "h1", GPU.address)
            assert gpu is not None
            gpus.move(tx, gpu, step, 2)

        await ledger.write(move)


async def after(ledger: Ledger, inventory: Inventory) -> GpuRecord:
    """The GPU's row after this survey."""
    await ledger.write(hosts.record_survey, inventory, 3)
    (record,) = await ledger.read(gpus.of_host, "h1")
    return record


@pytest.mark.parametrize("state", TO)
async def test_a_gpu_that_is_gone_keeps_its_row(ledger: Ledger, state: GpuState) -> None:
    """Its holder keeps it too; whoever asks its host about it learns that it is gone."""
    await bring(ledger, state)
    record = await after(ledger, replace(INVENTORY, gpus=()))
    moved = {GpuState.NEW: GpuState.LOST, GpuState.UNASSIGNED: GpuState.USED}
    assert record.state is moved.get(state, state)


async def test_a_survey_without_a_boot_id_is_no_reboot(ledger: Ledger) -> None:
    """A host without a shell cannot tell. With one it comes out, however long that takes."""
    await bring(ledger, GpuState.UNASSIGNED)
    assert (await after(ledger, replace(INVENTORY, boot_id=""))).state is GpuState.UNASSIGNED
    assert (await after(ledger, INVENTORY)).state is GpuState.UNASSIGNED
    await after(ledger, replace(INVENTORY, boot_id=""))
    assert (await after(ledger, replace(INVENTORY, boot_id="other"))).state is GpuState.USED


async def test_a_gpu_that_was_gone_proves_itself_anew(ledger: Ledger) -> None:
    """Its diagnosis tries to bring it back; one that comes back before goes through it too."""
    await bring(ledger, GpuState.UNASSIGNED)
    gone = await after(ledger, replace(INVENTORY, gpus=()))
    assert (gone.state, gone.reason) == (GpuState.USED, "It does not answer on the host's bus.")
    assert (await after(ledger, INVENTORY)).state is GpuState.USED


@pytest.mark.parametrize("state", TO)
async def test_another_group_number_changes_nothing(ledger: Ledger, state: GpuState) -> None:
    """Linux numbers groups anew at each boot, and whenever a device comes or goes."""
    await bring(ledger, state)
    record = await after(ledger, replace(INVENTORY, gpus=(replace(GPU, group=99),)))
    assert record.state is state
    host = await ledger.read(hosts.get, "h1")
    assert host is not None
    assert host.inventory is not None
    assert host.inventory.gpus[0].group == 99


async def test_a_model_that_an_admin_has_renamed(ledger: Ledger) -> None:
    await bring(ledger, GpuState.ASSIGNED)
    record = await after(ledger, replace(INVENTORY, gpus=(replace(GPU, model="B"),)))
    assert (record.state, record.model) == (GpuState.ASSIGNED, "B")


@pytest.mark.parametrize("state", [GpuState.UNASSIGNED, GpuState.ASSIGNED])
async def test_another_card_in_the_slot_proves_itself_anew(ledger: Ledger, state: GpuState) -> None:
    await bring(ledger, state)
    card = replace(GPU, ids=("10de:2330",), model="B")
    record = await after(ledger, replace(INVENTORY, gpus=(card,)))
    assert record.model == "B"
    assert record.state is (GpuState.USED if state is GpuState.UNASSIGNED else state)
