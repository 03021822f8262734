"""Who the GPU says it is.  The host compares it with the enrolment record; nothing does here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..ports import (
    CONTROL_BAR,
    MEMORY_BAR,
    PAGE,
    DeviceAbsentError,
    Function,
    Gpu,
    Memory,
)
from ..report import Outcome, Report, Subject, judged

MAGIC = "gpuspawner-emulated-gpu"
_TEXTS = ("serial", "uuid", "model", "vbios")
_TEXT_LIMIT = 128


def identity(subject: Subject, report: Report) -> Outcome:
    """Both functions are there and the identity page (page 0 of the memory) is valid.

    Sends the ``identity`` message whatever it finds.  Codes: DEVICE_ABSENT,
    IDENTITY_PAGE_INVALID, SEVERAL_DEVICES.
    """
    codes: set[str] = set()
    devices = [_describe(gpu, codes) for gpu in subject.gpus]
    report.identity(devices)
    if not devices:
        codes.add("DEVICE_ABSENT")
    if len(devices) > 1:
        codes.add("SEVERAL_DEVICES")
    functions = sum(len(device["functions"]) for device in devices)
    return judged(sorted(codes), {"devices": len(devices), "functions": functions})


def _describe(gpu: Gpu, codes: set[str]) -> dict[str, Any]:
    functions = [item for item in (gpu.control, gpu.memory) if item is not None]
    page: Mapping[str, str] = {}
    size = 0
    try:
        gpu.control_function().registers(CONTROL_BAR)
        memory = gpu.memory_function().memory(MEMORY_BAR)
        size = memory.size
        page = read_page(memory)
    except DeviceAbsentError:
        codes.add("DEVICE_ABSENT")
    except ValueError:
        codes.add("IDENTITY_PAGE_INVALID")
    return {
        "kind": "emulated",
        "functions": [_function(item) for item in functions],
        **{name: page.get(name, "") for name in _TEXTS},
        "memory_mib": size // 2**20,
        "guest_bdf": functions[0].address,
    }


def _function(function: Function) -> dict[str, str]:
    return {"guest_address": function.address, "pci": function.ids}


def read_page(memory: Memory) -> dict[str, str]:
    """The texts of the identity page.

    :raises ValueError: it is not one; the message says why.
    """
    raw = memory.read(0, PAGE).rstrip(b"\0")
    try:
        page = json.loads(raw.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise ValueError("page 0 is not ASCII JSON") from error
    if not isinstance(page, dict) or page.get("magic") != MAGIC or page.get("v") != 1:
        raise ValueError("page 0 has another magic or version")
    texts = {name: page.get(name) for name in _TEXTS}
    for name, text in texts.items():
        if not isinstance(text, str) or not 0 < len(text) <= _TEXT_LIMIT or not text.isprintable():
            raise ValueError(f"page 0 has no usable {name}")
    return {name: str(text) for name, text in texts.items()}
