"""Prometheus metrics of the allocator. Labels are bounded: no user, no text from a guest."""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gpuspawner.ledger.records import GpuRecord
from gpuspawner.pool.states import GpuState, LeaseState

_START_BUCKETS = (5, 10, 20, 30, 60, 90, 120, 180, 300, 600, float("inf"))


class Metrics:
    """One registry per allocator, so that two in one process do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._gpus = Gauge(
            "gpuspawner_gpus", "GPUs by host, model and state", ("host", "model", "state"),
            registry=r,
        )  # fmt: skip
        self._leases = Gauge("gpuspawner_leases", "Open leases by state", ("state",), registry=r)
        self._hosts = Gauge("gpuspawner_host_up", "1 if the host answers", ("host",), registry=r)
        self.lease_ends = Counter(
            "gpuspawner_lease_ends_total", "Ended leases by reason", ("reason",), registry=r
        )
        self.lease_start = Histogram(
            "gpuspawner_lease_start_seconds",
            "From the request to JupyterLab's first answer",
            registry=r,
            buckets=_START_BUCKETS,
        )
        self.diagnoses = Counter(
            "gpuspawner_diagnoses_total", "Diagnoses by outcome", ("host", "outcome"), registry=r
        )
        self.diagnosis_time = Histogram(
            "gpuspawner_diagnosis_seconds",
            "Duration of a diagnosis",
            registry=r,
            buckets=_START_BUCKETS,
        )
        self.gpu_failures = Counter(
            "gpuspawner_gpu_failures_total", "GPUs that a diagnosis found broken or gone",
            ("host", "outcome"), registry=r,
        )  # fmt: skip

    def picture(
        self, gpus: list[GpuRecord], leases: dict[str, int], hosts: dict[str, str]
    ) -> bytes:
        """All metrics as text, with the gauges set to what the ledger says now."""
        self._gpus.clear()
        tally = Tally((gpu.host, gpu.model, gpu.state) for gpu in gpus)
        for host, model in {(gpu.host, gpu.model) for gpu in gpus}:
            for state in GpuState:
                self._gpus.labels(host, model, state).set(tally[(host, model, state)])
        for lease_state in LeaseState:
            if lease_state is not LeaseState.ENDED:
                self._leases.labels(lease_state).set(leases.get(lease_state, 0))
        self._hosts.clear()
        for host, state_name in hosts.items():
            self._hosts.labels(host).set(1 if state_name == "ready" else 0)
        return generate_latest(self.registry)
