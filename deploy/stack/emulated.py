"""The emulated host's declaration, fitted to this machine."""

from __future__ import annotations

import re
from pathlib import Path

from deploy.stack.tools import CHECKOUT

TEMPLATE = CHECKOUT / "deploy" / "quickstart-host.yaml"
# For the hub, the allocator, the build of images and whatever else the machine does.
KEEP_MIB = 1536
MOST_PER_NODE_MIB = 65536
LEAST_PER_NODE_MIB = 1792


def fitted(template: str, available_mib: int) -> str:
    """The template with the memory that guests may take shared evenly among its nodes.

    Text is replaced rather than YAML written anew, so that the comments reach the reader.
    """
    nodes = max(1, len(re.findall(r"\bmemory_mib:.*\breserve_mib:", template)))
    share = (available_mib - KEEP_MIB) // nodes // 256 * 256
    memory = min(MOST_PER_NODE_MIB, max(LEAST_PER_NODE_MIB, share))
    return re.sub(r"\bmemory_mib: *\d+(?=.*\breserve_mib:)", f"memory_mib: {memory}", template)


def available_mib(meminfo: str) -> int:
    """Memory that programs can have now, in MiB, from the text of /proc/meminfo."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) // 1024 if match else 0


def write_declaration(target: Path) -> None:
    """Write the fitted declaration once; the reader may have changed it since."""
    if not target.exists():
        available = available_mib(Path("/proc/meminfo").read_text())
        target.write_text(fitted(TEMPLATE.read_text(), available))
