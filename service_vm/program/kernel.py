"""System calls that Python has no function for: mount, module loading, power off."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_FINIT_MODULE = 313  # x86-64
_POWER_OFF = 0x4321FEDC

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(kind: str, target: str, source: str = "none", flags: int = 0) -> None:
    """mount(2); `target` is made if need be."""
    os.makedirs(target, exist_ok=True)
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None
    )
    _checked(result, f"mount {kind} on {target}")


def unmount(target: str) -> None:
    """umount(2)."""
    _checked(_libc.umount(target.encode()), f"unmount {target}")


def load_modules(directory: Path) -> None:
    """Load the modules that the file ``order`` in `directory` lists, one name a line."""
    for name in (directory / "order").read_text().split():
        with (directory / name).open("rb") as handle:
            result = _libc.syscall(_FINIT_MODULE, handle.fileno(), b"", 0)
            _checked(result, f"load {name}")


def power_off() -> None:
    """Switch the machine off, now; returns only where that is not possible."""
    os.sync()
    _checked(_libc.reboot(_POWER_OFF), "power off")
