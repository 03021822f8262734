"""``host add --hardware FILE``: an admin's say on a host, read so that a mistake names its line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from gpuspawner.hardware import HostHardware

_WRITE = {
    "vendor": 'Write four hex digits in small letters, as vendor: "10de".',
    "device": 'Write four hex digits in small letters, as device: "2330".',
    "classes": 'Write beginnings of class codes, as classes: ["0300", "0302"].',
    "memory_mib": "Write the GPU's memory in MiB, as memory_mib: 81559.",
    "kind": "Write nvidia, amd, intel or emulated, or leave it out.",
    "gpus": 'Write a list of rules, as gpus: [{vendor: "10de", model: H100}].',
    "system_cores": "Write the number of cores of each NUMA node, as system_cores: 1.",
    "reserve_mib": "Write MiB of each NUMA node, as reserve_mib: 4096.",
    "hugepages": 'Write auto, "off", 2M or 1G.',
    "gpu_nodes": 'Write PCI addresses with their NUMA nodes, as gpu_nodes: {"0000:c1:00.0": 1}.',
}


class HardwareError(ValueError):
    """The file cannot be used; the text names file, line and field, and what to write there."""


def read_hardware(path: Path) -> HostHardware:
    """The file's content. Raises ``HardwareError``, and ``OSError`` if it cannot be read."""
    try:
        root = yaml.compose(path.read_text(), Loader=yaml.BaseLoader)
        # Every scalar as the text that it is: YAML would read 0302 as a number in octal, and a
        # PCI address as one in base 60.
        content = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise HardwareError(f"{path} is no YAML: {' '.join(str(error).split())}.") from None
    try:
        return HostHardware.model_validate({} if content is None else content, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = [part for part in first["loc"] if part != "[key]"]
        field = next((str(part) for part in reversed(where) if str(part) in _WRITE), "")
        told = " ".join(
            (f"{path}, line {_line(root, where)}: {_name(where)}{_said(first)}.",
             _WRITE.get(field, f"There are {', '.join(HostHardware.model_fields)}."))
        )  # fmt: skip
        raise HardwareError(told) from None


def _said(fault: object) -> str:
    assert isinstance(fault, dict)
    match fault["type"]:
        case "extra_forbidden":
            return "there is no such setting"
        case "value_error":
            return str(fault["ctx"]["error"])
        case _:
            return str(fault["msg"])


def _name(where: Sequence[str | int]) -> str:
    return f"{'.'.join(str(part) for part in where)}: " if where else ""


def _line(root: yaml.Node | None, where: Sequence[str | int]) -> int:
    """The line of what ``where`` names, or of the innermost that is there."""
    node = root
    line = 1 if root is None else root.start_mark.line + 1
    for part in where:
        if isinstance(node, yaml.MappingNode):
            pair = next((pair for pair in node.value if pair[0].value == str(part)), None)
            if pair is None:
                break
            line = pair[0].start_mark.line + 1
            node = pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return int(line)
