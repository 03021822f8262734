"""The checks of the service program against a GPU in memory, sound and faulty."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from service_vm.program.checks import control as control_registers
from service_vm.program.checks.dma import dma
from service_vm.program.checks.identity import identity
from service_vm.program.checks.known_answer import ANSWERS, known_answer
from service_vm.program.checks.liveness import liveness
from service_vm.program.checks.residue import residue
from service_vm.program.checks.wipe import wipe
from service_vm.program.memory import CHUNK
from service_vm.program.plan import EMULATED
from service_vm.program.ports import CONTROL_IDS, MEMORY_IDS, PAGE, find_gpus
from service_vm.program.report import Outcome
from tests.unit.fake_gpu import (
    IDENTITY,
    BadAddress,
    FakeFunction,
    FakeMachine,
    OnesMemory,
    PlainMemory,
    Ram,
    Recorder,
    StuckBit,
    subject,
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that never gets ready is given up at once."""
    monkeypatch.setattr(control_registers.wait_clear, "__defaults__", (0.01,))


def wiped(memory: PlainMemory, rounds: int = 1) -> dict[str, Outcome]:
    report = Recorder()
    wipe(subject(memory=memory, rounds=rounds)[0], report)
    return report.outcomes


def test_a_sound_gpu_passes_all_checks_in_order() -> None:
    memory = PlainMemory()
    target, control = subject(memory=memory)
    report = Recorder()
    for step in EMULATED:
        step.run(target, report)
    assert list(report.outcomes) == [
        "identity", "liveness", "known_answer", "dma", "residue", "overwrite", "read_back",
    ]  # fmt: skip
    assert {outcome.status for outcome in report.outcomes.values()} == {"pass"}
    assert not any(outcome.codes for outcome in report.outcomes.values())
    assert not control.bus_master
    assert not any(memory.data[PAGE:])


def test_identity_says_who_it_is() -> None:
    report = Recorder()
    outcome = identity(subject()[0], report)
    assert outcome.status == "pass"
    (device,) = report.devices
    assert device == {
        "kind": "emulated",
        "functions": [
            {"guest_address": "0000:01:00.0", "pci": CONTROL_IDS},
            {"guest_address": "0000:01:00.1", "pci": MEMORY_IDS},
        ],
        "serial": IDENTITY["serial"],
        "uuid": IDENTITY["uuid"],
        "model": IDENTITY["model"],
        "vbios": "1.0",
        "memory_mib": 1,
        "guest_bdf": "0000:01:00.0",
    }


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"\xff" * PAGE,
        b"[1, 2]",
        b"{" * PAGE,
        json.dumps({**IDENTITY, "magic": "other"}).encode(),
        json.dumps({**IDENTITY, "v": 2}).encode(),
        json.dumps({**IDENTITY, "serial": 7}).encode(),
        json.dumps({**IDENTITY, "serial": ""}).encode(),
        json.dumps({**IDENTITY, "serial": "x" * 129}).encode(),
        json.dumps({**IDENTITY, "model": "a\nb"}).encode(),
        json.dumps({key: IDENTITY[key] for key in IDENTITY if key != "uuid"}).encode(),
    ],
)
def test_identity_page_that_is_none(page: bytes) -> None:
    report = Recorder()
    outcome = identity(subject(memory=PlainMemory(identity=page))[0], report)
    assert (outcome.status, outcome.codes) == ("fail", ("IDENTITY_PAGE_INVALID",))
    assert report.devices[0]["serial"] == ""


@pytest.mark.parametrize("which", ["drop", "gone"])
@pytest.mark.parametrize("ids", [(CONTROL_IDS,), (MEMORY_IDS,), (CONTROL_IDS, MEMORY_IDS)])
def test_a_function_that_is_absent(which: str, ids: tuple[str, ...]) -> None:
    report = Recorder()
    target, _ = subject(**{which: ids})  # type: ignore[arg-type]
    for step in EMULATED:
        step.run(target, report)
    control = {"liveness", "known_answer", "dma"} if CONTROL_IDS in ids else set()
    memory = {"residue", "overwrite", "read_back"} if MEMORY_IDS in ids else set()
    failed = {name for name, outcome in report.outcomes.items() if outcome.status != "pass"}
    assert failed == {"identity"} | control | memory
    for name in failed:
        assert report.outcomes[name].status == "fail"
        assert report.outcomes[name].codes == ("DEVICE_ABSENT",)
    assert len(report.outcomes) == 7


def test_two_gpus_where_one_was_given() -> None:
    target, _ = subject()
    twice = [
        *target.machine.functions(),
        FakeFunction("0000:02:00.0", MEMORY_IDS, content=PlainMemory()),
    ]
    machine = FakeMachine(twice, Ram())  # type: ignore[arg-type]
    report = Recorder()
    several = type(target)(machine, find_gpus(machine.functions()), target.nonce)
    outcome = identity(several, report)
    assert outcome.status == "fail"
    assert "SEVERAL_DEVICES" in outcome.codes
    assert len(report.devices) == 2


def test_registers_that_read_all_ones_are_an_absent_device() -> None:
    target, _ = subject(all_ones=True)
    report = Recorder()
    for step in EMULATED:
        step.run(target, report)
    for name in ("liveness", "known_answer", "dma"):
        assert report.outcomes[name].status == "fail"
        assert report.outcomes[name].codes == ("DEVICE_ABSENT",)
    assert report.outcomes["read_back"].status == "pass"


def test_memory_that_reads_all_ones_fails() -> None:
    outcomes = wiped(OnesMemory())
    assert outcomes["read_back"].status == "fail"
    assert "NOT_ZERO" in outcomes["read_back"].codes
    assert outcomes["read_back"].metrics["bytes_verified"] == 0


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        ({"identification": 0x010000EE}, "ID_MISMATCH"),
        ({"liveness_mask": 0xFFFFFFFE}, "LIVENESS_MISMATCH"),
        ({"liveness_mask": 0}, "LIVENESS_MISMATCH"),
    ],
)
def test_liveness_faults(faults: dict[str, Any], code: str) -> None:
    outcome = liveness(subject(**faults)[0], Recorder())
    assert (outcome.status, outcome.codes) == ("fail", (code,))


def test_known_answers_are_right() -> None:
    assert {n: math.factorial(n) % 2**32 for n in ANSWERS} == ANSWERS


def test_wrong_answers_and_no_answer() -> None:
    wrong = known_answer(subject(multiply=lambda n: n)[0], Recorder())
    assert (wrong.status, wrong.codes) == ("fail", ("WRONG_ANSWER",))
    assert wrong.metrics["wrong"] == len(ANSWERS) - 1  # 1! is 1 all the same
    none = known_answer(subject(never_ready=True)[0], Recorder())
    assert (none.status, none.codes) == ("fail", ("NO_ANSWER",))


@pytest.mark.parametrize(
    ("faults", "codes"),
    [
        ({"dma_mask": 0xFFFF}, ("DMA_MISMATCH",)),
        ({"dma_flip": 0x10}, ("DMA_MISMATCH",)),
        ({"dma_error": 64}, ("DMA_MISMATCH", "DMA_STRAY_WRITE")),
        ({"dma_error": -PAGE}, ("DMA_MISMATCH", "DMA_STRAY_WRITE")),
        ({"dma_error": PAGE}, ("DMA_MISMATCH", "DMA_STRAY_WRITE")),
        ({"dma_stuck": True}, ("DMA_TIMEOUT",)),
    ],
)
def test_dma_faults(faults: dict[str, Any], codes: tuple[str, ...]) -> None:
    target, control = subject(**faults)
    outcome = dma(target, Recorder())
    assert (outcome.status, outcome.codes) == ("fail", codes)
    assert not control.bus_master


def test_dma_that_only_overruns_is_a_stray_write() -> None:
    target, control = subject(dma_overrun=8)
    outcome = dma(target, Recorder())
    assert (outcome.status, outcome.codes) == ("fail", ("DMA_STRAY_WRITE",))
    assert outcome.metrics["stray_bytes"] == 16
    assert not control.bus_master


def test_pages_that_move_are_the_tools_fault() -> None:
    target, _ = subject(moving=True)
    report = Recorder()
    next(step for step in EMULATED if step.checks == ("dma",)).run(target, report)
    assert report.outcomes["dma"].status == "error"
    assert report.outcomes["dma"].codes == ("RuntimeError",)


def test_residue_counts_and_never_fails() -> None:
    memory = PlainMemory()
    clean = residue(subject(memory=memory)[0], Recorder())
    assert (clean.status, clean.metrics["residue_words"]) == ("pass", 0)
    for at in range(PAGE, memory.size, PAGE):
        memory.write(at + 16, b"secret")
    memory.write(memory.size - 8, b"\0" * 7 + b"\1")
    dirty = residue(subject(memory=memory)[0], Recorder())
    assert (dirty.status, dirty.codes) == ("pass", ())
    assert dirty.metrics["residue_words"] == memory.size // PAGE - 1 + 1
    memory.write(PAGE, b"\1" + b"\0" * 14 + b"\1" + b"\2" * (PAGE - 16))  # 8 zeros, no zero word
    full = residue(subject(memory=memory)[0], Recorder())
    assert full.metrics["residue_words"] == memory.size // PAGE - 1 + 512


def test_the_wipe_leaves_zeros_and_the_identity_page() -> None:
    memory = PlainMemory()
    page = memory.read(0, PAGE)
    memory.write(PAGE, b"\xa5" * (memory.size - PAGE))
    outcomes = wiped(memory)
    assert memory.read(0, PAGE) == page
    assert not any(memory.data[PAGE:])
    total = memory.size - PAGE
    assert outcomes["overwrite"].metrics == {"bytes_written": 3 * total, "passes": 3}
    assert outcomes["read_back"].metrics == {
        "errors": 0,
        "bytes_verified": total,
        "bytes_total": total,
    }


def test_every_write_is_followed_by_a_barrier() -> None:
    memory = PlainMemory()
    wiped(memory, rounds=2)
    assert memory.barriers == 5


def test_a_bit_flipped_while_it_lies_there_is_found() -> None:
    memory = PlainMemory()
    report = Recorder()

    def flip(check: str) -> None:
        if check == "read_back":
            memory.data[777_777] ^= 0x10

    report.on_begin = flip
    wipe(subject(memory=memory)[0], report)
    outcome = report.outcomes["read_back"]
    assert (outcome.status, outcome.codes) == ("fail", ("MEMORY_ERROR",))
    assert outcome.metrics["errors"] == 1
    assert outcome.metrics["first_bad_offset"] == 777_777
    assert outcome.metrics["xor"] == 0x10
    assert not any(memory.data[PAGE:])


def test_a_bit_that_flips_after_the_zeros_is_found() -> None:
    memory = PlainMemory()

    def flip(number: int) -> None:
        if number == 3:
            memory.data[-1] ^= 0x80

    memory.on_barrier = flip
    outcome = wiped(memory)["read_back"]
    assert (outcome.status, outcome.codes) == ("fail", ("NOT_ZERO",))
    assert outcome.metrics["bytes_verified"] == memory.size - PAGE - 8


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("at", [PAGE, CHUNK - 1, CHUNK, 3 * CHUNK // 2 - 1])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_stuck_bit_is_found_whatever_it_is_stuck_at(at: int, bit: int, value: int) -> None:
    outcome = wiped(StuckBit(at, bit, value))["read_back"]
    assert outcome.status == "fail"
    assert "MEMORY_ERROR" in outcome.codes
    assert outcome.metrics["first_bad_offset"] == at
    assert outcome.metrics["xor"] == 1 << bit


@pytest.mark.parametrize("line", range(3, 16))
@pytest.mark.parametrize("kind", ["low", "high"])
def test_a_stuck_address_line_is_found(line: int, kind: str) -> None:
    bit = 1 << line
    size = 1 << 16

    def wire(at: int) -> int:
        return at & ~bit if kind == "low" else at | bit

    outcome = wiped(BadAddress(wire, size=size))["read_back"]
    assert outcome.status == "fail"


@pytest.mark.parametrize("line", range(12, 24))
def test_a_stuck_address_line_of_a_large_memory_is_found(line: int) -> None:
    bit = 1 << line
    memory = BadAddress(lambda at: at & ~bit, grain=PAGE, size=16 << 20)
    outcome = wiped(memory)["read_back"]
    assert outcome.status == "fail"


def test_writing_that_reaches_page_0_is_found() -> None:
    # The first page of the memory and the identity page share a cell.
    memory = BadAddress(lambda at: 0 if at == PAGE else at, grain=PAGE, size=1 << 16)
    outcome = wiped(memory)["read_back"]
    assert outcome.codes == ("IDENTITY_PAGE_CHANGED",)


def test_a_memory_that_does_not_take_writes_fails() -> None:
    class ReadOnly(PlainMemory):
        def write(self, offset: int, data: bytes) -> None:
            pass

    memory = ReadOnly()
    memory.data[PAGE:] = b"\x5a" * (memory.size - PAGE)
    outcome = wiped(memory)["read_back"]
    assert outcome.codes == ("MEMORY_ERROR", "NOT_ZERO")
    assert outcome.metrics["bytes_verified"] == 0


def test_an_exception_in_the_wipe_is_no_verdict() -> None:
    class Broken(PlainMemory):
        def write(self, offset: int, data: bytes) -> None:
            raise OSError("no such thing\n" * 100)

    outcomes = wiped(Broken())
    for outcome in outcomes.values():
        assert (outcome.status, outcome.codes) == ("error", ("OSError",))
        assert len(str(outcome.metrics["error"])) <= 200
    assert list(outcomes) == ["overwrite", "read_back"]
