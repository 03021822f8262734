"""Reading the service VM's report: bounded, checked line by line, and never trusted.

A report that is too large, cut short, repeated, out of order or of another run is *broken*: it
says nothing about the GPU, good or bad.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from gpuspawner.pool.verdict import CheckResult, Identity, Report
from gpuspawner.schema import (
    AnyServiceMessage,
    ServiceDevice,
    ServiceFinal,
    ServiceHello,
    ServiceIdentity,
    ServiceProgress,
    ServiceResult,
)

MAX_LINE_BYTES = 64 * 1024
MAX_REPORT_BYTES = 256 * 1024
_MESSAGE: TypeAdapter[AnyServiceMessage] = TypeAdapter(AnyServiceMessage)


class BrokenReport(Exception):
    """The report cannot be believed; the text says why."""


class ReportReader:
    """Takes the bytes of one run as they come.

    ``hello`` and ``complete`` tell how far it is; ``progress`` is the last sign of life as text.
    """

    def __init__(self, run_id: str, nonce: str) -> None:
        self._run_id = run_id
        self._nonce = nonce
        self._buffer = bytearray()
        self._total = 0
        self._next_seq = 0
        self._identities: tuple[Identity, ...] | None = None
        self._results: dict[str, CheckResult] = {}
        self.hello: ServiceHello | None = None
        self.final: ServiceFinal | None = None
        self.progress = "booting"

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes; raises ``BrokenReport``."""
        self._total += len(chunk)
        if self._total > MAX_REPORT_BYTES:
            raise BrokenReport(f"The report is longer than {MAX_REPORT_BYTES} bytes.")
        self._buffer += chunk
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._line(line)
        if len(self._buffer) > MAX_LINE_BYTES:
            raise BrokenReport(f"A line of the report is longer than {MAX_LINE_BYTES} bytes.")

    def _line(self, line: bytes) -> None:
        if len(line) > MAX_LINE_BYTES:
            raise BrokenReport(f"A line of the report is longer than {MAX_LINE_BYTES} bytes.")
        try:
            message = _MESSAGE.validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "line"
            raise BrokenReport(
                f"A line of the report is malformed: {where}: {first['type']}."
            ) from (None)
        if message.run != self._run_id:
            raise BrokenReport("The report names another run.")
        if message.nonce != self._nonce:
            raise BrokenReport("The report has a wrong nonce: it is not from this run.")
        if message.seq != self._next_seq:
            raise BrokenReport(
                f"Line {message.seq} of the report came where {self._next_seq} was due: lines are "
                "repeated or missing."
            )
        self._next_seq += 1
        if self.final is not None:
            raise BrokenReport("The report goes on after its end.")
        self._take(message)

    def _take(self, message: AnyServiceMessage) -> None:
        match message:
            case ServiceHello():
                self.hello = message
                self.progress = "started"
            case ServiceIdentity():
                if self._identities is not None:
                    raise BrokenReport("The report names its GPU twice.")
                self._identities = tuple(_identity(device) for device in message.devices)
            case ServiceProgress():
                self.progress = f"{message.check} {message.pct:.0f} %"
            case ServiceResult():
                if message.check in self._results:
                    raise BrokenReport(f"The report has check {message.check} twice.")
                self._results[message.check] = CheckResult(
                    message.check,
                    message.status,
                    message.seconds,
                    dict(message.metrics),
                    tuple(message.codes),
                )
                self.progress = f"{message.check}: {message.status}"
            case ServiceFinal():
                if message.checks != len(self._results):
                    raise BrokenReport(
                        f"The report ends with {message.checks} checks and had "
                        f"{len(self._results)}."
                    )
                self.final = message

    def report(self, broken: str | None = None) -> Report:
        """What is known now. ``broken`` is why it cannot be believed."""
        return Report(
            identities=self._identities or (),
            results=tuple(self._results.values()),
            complete=self.final is not None and self.final.ended == "complete",
            broken=broken,
        )

    def as_json(self) -> dict[str, Any]:
        """For the record: checks and identity as they were reported."""
        return {
            "hello": None if self.hello is None else self.hello.model_dump(mode="json"),
            "identities": [
                {
                    "kind": one.kind,
                    "serial": one.serial,
                    "uuid": one.uuid,
                    "model": one.model,
                    "vbios": one.vbios,
                    "memory_mib": one.memory_mib,
                    "ids": list(one.ids),
                }
                for one in self._identities or ()
            ],
            "checks": [
                {
                    "check": one.check,
                    "status": one.status,
                    "seconds": one.seconds,
                    "metrics": dict(one.metrics),
                    "codes": list(one.codes),
                }
                for one in self._results.values()
            ],
            "complete": self.final is not None,
        }


def _identity(device: ServiceDevice) -> Identity:
    return Identity(
        kind=device.kind,
        serial=device.serial,
        uuid=device.uuid,
        model=device.model,
        vbios=device.vbios,
        memory_mib=device.memory_mib,
        ids=tuple(sorted(function.pci for function in device.functions)),
    )
