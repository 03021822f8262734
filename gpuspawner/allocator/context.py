"""What the parts of the allocator share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gpuspawner.allocator.acquire import Placing
from gpuspawner.allocator.images import ImageStore
from gpuspawner.allocator.metrics import Metrics
from gpuspawner.allocator.signals import Signals
from gpuspawner.host.api import GpuHost, HostUnreachable
from gpuspawner.ledger.database import Ledger
from gpuspawner.schema import BootPayload


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, in seconds; from the configuration."""

    wait_s: float = 180
    boot_s: float = 600
    stop_s: float = 60
    diagnosis_s: float = 900
    diagnosis_silence_s: float = 90
    diagnosis_attempts: int = 3
    diagnosis_backoff_s: tuple[float, ...] = (60, 300, 1800)
    diagnoses_per_host: int = 2
    trash_days: float = 30
    guests_blocked: frozenset[str] = frozenset()


@dataclass
class Context:
    """One per allocator. ``payloads`` are in memory only: they hold tokens."""

    ledger: Ledger
    signals: Signals
    images: ImageStore
    metrics: Metrics
    limits: Limits
    placing: Placing = field(default_factory=Placing)
    drivers: dict[str, GpuHost] = field(default_factory=dict)
    payloads: dict[str, BootPayload] = field(default_factory=dict)
    # Hosts that agree with the ledger since this start; leases move on there only.
    reconciled: set[str] = field(default_factory=set)
    diagnosis_progress: dict[str, str] = field(default_factory=dict)
    start_runner: Callable[[str], None] = lambda lease_id: None

    def driver(self, host: str) -> GpuHost:
        """The host's driver; ``HostUnreachable`` if the pool has lost it."""
        try:
            return self.drivers[host]
        except KeyError:
            raise HostUnreachable(
                f"Host {host} is not connected.", "See 'gpuspawner host check'."
            ) from None
