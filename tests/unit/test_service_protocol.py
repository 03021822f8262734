"""Lines, limits, sequence, acknowledgement; and the words of the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from service_vm.program.arguments import PAUSE_LIMIT_S, Pause, parse
from service_vm.program.protocol import (
    LINE_LIMIT,
    RESERVE,
    TOTAL_LIMIT,
    Channel,
    LimitError,
)

RUN = "6f1d3c1e-5a64-4f5e-9a53-9f1f7d8f2b11"
NONCE = "00112233445566778899aabbccddeeff"


class FakePort:
    """Keeps what is written; reading gives the prepared pieces, each after a second."""

    def __init__(self, answers: Sequence[bytes] = ()) -> None:
        self.sent = b""
        self.answers = list(answers)
        self.now = 0.0

    def write(self, data: bytes) -> None:
        self.sent += data

    def read(self, timeout_s: float) -> bytes:
        self.now += timeout_s
        return self.answers.pop(0) if self.answers else b""

    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.sent.splitlines()]


def channel(port: FakePort) -> Channel:
    return Channel(port, RUN, NONCE, clock=lambda: port.now)


def ack(run: str = RUN, **more: Any) -> bytes:
    return json.dumps({"v": 1, "t": "ack", "run": run, **more}).encode() + b"\n"


def test_every_line_carries_run_nonce_and_the_next_number() -> None:
    port = FakePort()
    out = channel(port)
    out.send("hello", {"image": "i", "agent": "1", "boot_s": 1.5})
    out.progress("dma", 40)
    out.send("final", {"ended": "complete", "checks": 0})
    first, second, third = port.messages()
    assert first == {
        "v": 1, "t": "hello", "run": RUN, "nonce": NONCE, "seq": 0,
        "image": "i", "agent": "1", "boot_s": 1.5,
    }  # fmt: skip
    assert (second["t"], second["seq"], second["check"], second["pct"]) == (
        "progress",
        1,
        "dma",
        40,
    )
    assert (third["t"], third["seq"]) == ("final", 2)


def test_fields_cannot_forge_the_head() -> None:
    port = FakePort()
    channel(port).send("result", {"seq": 99, "nonce": "x", "run": "y", "t": "final", "v": 7})
    assert port.messages() == [{"v": 1, "t": "result", "run": RUN, "nonce": NONCE, "seq": 0}]


def test_text_cannot_break_a_line() -> None:
    port = FakePort()
    channel(port).send("result", {"metrics": {"error": "a\nb\u2028\u00e4\x00"}})
    assert port.sent.count(b"\n") == 1
    assert port.sent.isascii()


def test_a_line_past_the_limit_is_not_sent_and_takes_no_number() -> None:
    port = FakePort()
    out = channel(port)
    with pytest.raises(LimitError):
        out.send("result", {"metrics": {"x": "y" * LINE_LIMIT}})
    assert port.sent == b""
    out.send("final", {})
    assert port.messages()[0]["seq"] == 0


def test_progress_stops_before_it_eats_the_reserve() -> None:
    port = FakePort()
    out = channel(port)
    for _ in range(3000):
        out.progress("residue", 1)
    assert len(port.sent) <= TOTAL_LIMIT - RESERVE
    for _ in range(7):
        out.send("result", {"metrics": {"x": "y" * 4000}})
    out.send("final", {})
    numbers = [message["seq"] for message in port.messages()]
    assert numbers == list(range(len(numbers)))


def test_the_total_is_bounded() -> None:
    port = FakePort()
    out = channel(port)
    for _ in range(4):
        out.send("result", {"metrics": {"x": "y" * 60_000}})
    with pytest.raises(LimitError):
        out.send("result", {"metrics": {"x": "y" * 60_000}})
    assert len(port.sent) <= TOTAL_LIMIT


def test_numbers_that_json_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        channel(FakePort()).send("result", {"metrics": {"x": float("nan")}})


@pytest.mark.parametrize(
    "answers",
    [
        [ack()],
        [ack()[:10], ack()[10:]],
        [b"", b"", ack()],
        [b"rubbish\n", b"[]\n\xff\xfe\n" + ack(run="other") + ack()],
        [ack(more=1)],
    ],
)
def test_acknowledged(answers: list[bytes]) -> None:
    assert channel(FakePort(answers)).wait_for_ack(30)


@pytest.mark.parametrize(
    "answers",
    [
        [],
        [ack()[:-1]],
        [ack(run="other")],
        [ack().replace(b'"v": 1', b'"v": 2')],
        [ack().replace(b"ack", b"nak")],
        [b"[" * 60_000 + b"\n"],
        [b"x" * (LINE_LIMIT + 1), b"\n" + ack()],
        [b"x\n" * 40_000] * 4 + [ack()],
    ],
)
def test_not_acknowledged(answers: list[bytes]) -> None:
    assert not channel(FakePort(answers)).wait_for_ack(30)


def test_the_wait_for_the_acknowledgement_ends() -> None:
    port = FakePort([b"noise\n"] * 1000)
    assert not channel(port).wait_for_ack(60)
    assert port.now == pytest.approx(60)


def test_arguments() -> None:
    words = f"console=ttyS0 quiet gpuspawner.run={RUN} gpuspawner.nonce={NONCE}"
    got = parse(words)
    assert (got.run, got.nonce, got.rounds, got.pause) == (RUN, NONCE, 1, None)
    assert parse(f"{words} gpuspawner.tier=L2").rounds == 2
    assert parse(f"{words} gpuspawner.pause=read_back:5").pause == Pause("read_back", 5)
    assert parse(f"{words} gpuspawner.pause=dma:999").pause == Pause("dma", PAUSE_LIMIT_S)
    assert parse(f"{words} gpuspawner.later=1").run == RUN


@pytest.mark.parametrize(
    "words",
    [
        "",
        f"gpuspawner.run={RUN}",
        f"gpuspawner.nonce={NONCE}",
        f"gpuspawner.run={RUN} gpuspawner.nonce={NONCE[1:]}",
        f"gpuspawner.run={RUN} gpuspawner.nonce={NONCE.upper()}",
        f"gpuspawner.run=a/b gpuspawner.nonce={NONCE}",
        f"gpuspawner.run={RUN} gpuspawner.nonce={NONCE} gpuspawner.tier=L9",
        f"gpuspawner.run={RUN} gpuspawner.nonce={NONCE} gpuspawner.pause=5",
        f"gpuspawner.run={RUN} gpuspawner.nonce={NONCE} gpuspawner.pause=dma:-1",
    ],
)
def test_arguments_that_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"gpuspawner\."):
        parse(words)
