"""What checks say while they run, and how an outcome looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .ports import DeviceAbsentError, Gpu, Machine

Metric = int | float | str
TEXT_LIMIT = 200


@dataclass(frozen=True)
class Outcome:
    """What one check found.

    `status` is pass, fail, degraded, skip, timeout or error; fail is a statement about the GPU,
    timeout and error say that the tool broke.
    """

    status: str
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    codes: Sequence[str] = ()


def judged(codes: Sequence[str], metrics: Mapping[str, Metric]) -> Outcome:
    """Pass when there are no codes, else fail."""
    return Outcome("fail" if codes else "pass", metrics, tuple(codes))


def failure(error: BaseException, gpu: Gpu) -> Outcome:
    """The outcome of a check of `gpu` that raised `error`.

    Whatever the error is: where the GPU has gone meanwhile, that is what is wrong.
    """
    text = f"{type(error).__name__}: {error}"[:TEXT_LIMIT]
    if isinstance(error, DeviceAbsentError) or gpu.lost():
        return Outcome("fail", {"error": text}, ("DEVICE_ABSENT",))
    return Outcome("error", {"error": text}, (type(error).__name__,))


class Report(Protocol):
    """Where checks send what they have to say, in order."""

    def identity(self, devices: Sequence[Mapping[str, Any]]) -> None:
        """The devices found; once per run."""
        ...

    def begin(self, check: str) -> None:
        """`check` begins; a fault drill may wait here."""
        ...

    def progress(self, check: str, fraction: float) -> None:
        """`check` is at `fraction` (0..1); call it often, few are sent."""
        ...

    def result(self, check: str, outcome: Outcome, seconds: float) -> None:
        """`check` ended after `seconds`."""
        ...


@dataclass(frozen=True)
class Subject:
    """What the checks of a run look at.

    :ivar gpus: all GPUs found; the run is about the first, more than one fails ``identity``.
    :ivar nonce: the run's nonce, which keys every pattern: neither a tenant nor the device can
        have prepared the answers.
    :ivar rounds: how often the patterns go over the memory.
    """

    machine: Machine
    gpus: Sequence[Gpu]
    nonce: bytes
    rounds: int = 1

    @property
    def gpu(self) -> Gpu:
        return self.gpus[0] if self.gpus else Gpu(None, None)


Check = Callable[[Subject, Report], Outcome]
