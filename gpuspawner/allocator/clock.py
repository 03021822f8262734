"""The allocator's clock, in one place so that everything else can be told the time."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now_ms() -> int:
    """UTC, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def moment(ms: int) -> datetime:
    """A point in time as the API shows it."""
    return datetime.fromtimestamp(ms / 1000, UTC)
