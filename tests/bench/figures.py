"""What the benches share: the spread of a sample, and what they ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least ``part`` (0 to 1) of the sample do not exceed: always one
    that was measured. ``ValueError`` for an empty sample."""
    if not values:
        raise ValueError("there is nothing to take a quantile of")
    ordered = sorted(values)
    rank = -(-len(ordered) * round(part * 1000) // 1000)  # rounded up
    return ordered[max(rank, 1) - 1]


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Size, median and the rest of a sample; of an empty one the size alone."""
    if not values:
        return {"n": 0}
    shown = {
        "median": median(values),
        "mean": fmean(values),
        "p99": quantile(values, 0.99),
        "least": min(values),
        "most": max(values),
    }
    return {"n": len(values), **{name: round(value, 3) for name, value in shown.items()}}


def machine() -> dict[str, Any]:
    """CPUs, memory and load of this machine now. A load above the CPUs: others ran here too."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": pages // 1024**2,
        "load_1_min": round(os.getloadavg()[0], 2),
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, the kernel and these installed packages."""
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def hypervisor() -> dict[str, str]:
    """Versions of libvirt and QEMU, as a running libvirtd says them."""
    text = subprocess.run(
        ["virsh", "-c", "qemu:///system", "version"], check=True, capture_output=True, text=True
    ).stdout
    found = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    return {"libvirt": found.get("Using library", ""), "qemu": found.get("Running hypervisor", "")}
