"""A whole run: order, isolation, what a step that dies or hangs leaves behind, fault drills."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from service_vm.program import runner as runner_module
from service_vm.program.arguments import Pause
from service_vm.program.isolation import Message, Say, run_isolated
from service_vm.program.plan import EMULATED, Step, single
from service_vm.program.ports import CONTROL_IDS, PAGE
from service_vm.program.protocol import Channel
from service_vm.program.report import Outcome, Report, Subject
from service_vm.program.runner import Runner
from tests.unit.fake_gpu import PlainMemory, subject
from tests.unit.test_service_protocol import NONCE, RUN, FakePort


def in_place(step: Callable[[Say], None], forward: Say, seconds: float) -> str | None:
    step(forward)
    return None


def run(
    plan: tuple[Step, ...],
    target: Subject | None = None,
    pause: Pause | None = None,
    isolate: runner_module.Isolate = run_isolated,
) -> list[dict[str, Any]]:
    port = FakePort()
    Runner(Channel(port, RUN, NONCE), target or subject()[0], pause, isolate).run(plan)
    messages = port.messages()
    assert [message["seq"] for message in messages] == list(range(len(messages)))
    return messages


def die(target: Subject, report: Report) -> Outcome:
    """What the kernel does to a process that touches a BAR of a device that is gone."""
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGBUS)
    return Outcome("pass")


def outcomes(messages: list[dict[str, Any]]) -> dict[str, tuple[str, list[str]]]:
    return {
        message["check"]: (message["status"], message["codes"])
        for message in messages
        if message["t"] == "result"
    }


def test_a_whole_run_in_children() -> None:
    class Shared(PlainMemory):
        """Memory that outlives the child that wrote it, as a BAR does."""

        def __init__(self) -> None:
            super().__init__()
            shared = mmap.mmap(-1, len(self.data))
            shared[:] = bytes(self.data)
            self.data = shared  # type: ignore[assignment]

    memory = Shared()
    memory.write(PAGE, b"tenant")
    messages = run(EMULATED, subject(memory=memory)[0])
    kinds = [message["t"] for message in messages if message["t"] != "progress"]
    assert kinds == ["identity", *["result"] * 7, "final"]
    assert {status for status, _ in outcomes(messages).values()} == {"pass"}
    residue = next(message for message in messages if "residue_words" in message.get("metrics", ()))
    assert residue["metrics"]["residue_words"] == 1
    assert messages[-1]["ended"] == "complete"
    assert messages[-1]["checks"] == 7
    assert not any(memory.data[PAGE:])


def test_a_check_that_raises_is_an_error_and_the_next_runs() -> None:
    def broken(target: Subject, report: Report) -> Outcome:
        raise ZeroDivisionError("of no matter")

    def fine(target: Subject, report: Report) -> Outcome:
        return Outcome("pass")

    messages = run((single("dma", broken, 10), single("residue", fine, 10)))
    assert outcomes(messages) == {"dma": ("error", ["ZeroDivisionError"]), "residue": ("pass", [])}
    assert messages[-1] == {**messages[-1], "t": "final", "ended": "complete", "checks": 2}


def test_a_step_that_hangs_is_ended_and_the_next_runs() -> None:
    def hang(target: Subject, report: Report) -> Outcome:
        time.sleep(60)
        return Outcome("pass")

    began = time.monotonic()
    messages = run((single("dma", hang, 0.3), EMULATED[1]))
    assert time.monotonic() - began < 10
    assert outcomes(messages) == {"dma": ("timeout", ["TIMEOUT"]), "liveness": ("pass", [])}
    assert messages[-1]["ended"] == "complete"


def test_a_step_that_is_killed_says_by_what() -> None:
    messages = run((single("dma", die, 10),))
    assert outcomes(messages) == {"dma": ("error", ["SIGBUS"])}


def test_a_step_that_is_killed_by_a_lost_device_says_so() -> None:
    target, _ = subject(gone=[CONTROL_IDS])
    messages = run((single("dma", die, 10),), target)
    assert outcomes(messages) == {"dma": ("fail", ["DEVICE_ABSENT"])}


def test_each_check_of_a_step_gets_a_result_once() -> None:
    def half(target: Subject, report: Report) -> None:
        report.result("overwrite", Outcome("pass"), 0.1)
        os._exit(3)

    messages = run((Step(("overwrite", "read_back"), half, 10),))
    assert outcomes(messages) == {"overwrite": ("pass", []), "read_back": ("error", ["EXIT"])}
    assert messages[-1]["checks"] == 2


def test_final_comes_even_when_the_program_breaks() -> None:
    def broken(step: Callable[[Say], None], forward: Say, seconds: float) -> str | None:
        raise OSError("no fork")

    port = FakePort()
    with pytest.raises(OSError, match="no fork"):
        Runner(Channel(port, RUN, NONCE), subject()[0], None, broken).run(EMULATED)
    (final,) = port.messages()
    assert (final["t"], final["ended"], final["checks"]) == ("final", "aborted", 0)


def test_a_fault_drill_waits_between_write_and_read() -> None:
    memory = PlainMemory()
    messages: list[Message] = []
    port = FakePort()

    class Watching(Channel):
        def progress(self, check: str, percent: int) -> None:
            messages.append({"check": check, "data": bytes(memory.data[PAGE : PAGE + 8])})
            super().progress(check, percent)

    began = time.monotonic()
    target = subject(memory=memory)[0]
    Runner(Watching(port, RUN, NONCE), target, Pause("read_back", 0.3), in_place).run(EMULATED)
    assert time.monotonic() - began > 0.3
    announced = [message["data"] for message in messages if message["check"] == "read_back"]
    assert len(announced) == 2  # when the wait begins, and when it is over
    assert announced[0] != bytes(8)


def test_heartbeats_are_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def chatty(target: Subject, report: Report) -> Outcome:
        for step in range(1000):
            report.progress("dma", step / 1000)
        return Outcome("pass")

    few = [m for m in run((single("dma", chatty, 10),)) if m["t"] == "progress"]
    assert [message["pct"] for message in few] == [0]
    monkeypatch.setattr(runner_module, "PROGRESS_EVERY_S", 0.0)
    many = [m for m in run((single("dma", chatty, 10),)) if m["t"] == "progress"]
    assert len(many) == 1001
    assert max(message["pct"] for message in many) == 99
