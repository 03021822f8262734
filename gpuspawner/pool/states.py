"""The states of a lease and of a GPU, and every step between them.

Each table row is one transition; a pair that is not in the table is refused. One edge leads a GPU
to ``unassigned``: a diagnosis that passed.
"""

from __future__ import annotations

from enum import StrEnum


class LeaseState(StrEnum):
    """The life of a lease."""

    QUEUED = "queued"  # waits for a GPU that is being wiped
    PLACED = "placed"  # holds its GPUs, cores and memory; nothing exists on the host yet
    STARTING = "starting"  # its volumes and its VM are being made, or JupyterLab is starting
    RUNNING = "running"  # JupyterLab has answered
    STOPPING = "stopping"  # the VM is being shut down, its disks removed
    ENDED = "ended"  # nothing of it is left but its record and its home


class GpuState(StrEnum):
    """The life of a GPU."""

    NEW = "new"  # found on the host, never enrolled
    USED = "used"  # somebody had it, or its fate is unknown: needs wipe and diagnosis
    DIAGNOSING = "diagnosing"  # a service VM has it
    UNASSIGNED = "unassigned"  # proved good and clean: may be given out
    RESERVED = "reserved"  # promised to a lease whose VM does not run yet; dirty from here on
    ASSIGNED = "assigned"  # in a user's VM
    QUARANTINED = "quarantined"  # no verdict could be had; waits for an admin
    FAILED = "failed"  # a diagnosis found it broken
    LOST = "lost"  # not on the bus
    RETIRED = "retired"  # taken out for good


class EndReason(StrEnum):
    """Why a lease ended. The text for people is made where it is shown."""

    RELEASED = "released"  # the user or the hub stopped the server
    GUEST_GONE = "guest-gone"  # the VM ended by itself: powered off, rebooted, or QEMU died
    BOOT_FAILED = "boot-failed"  # the VM or JupyterLab did not come up
    SUPERSEDED = "superseded"  # a newer start of the same server
    HUB_FORGOT = "hub-forgot"  # the hub knows of no such server
    REFUSED = "refused"  # nothing fits, and waiting would not help
    WAIT_TIMEOUT = "wait-timeout"  # no GPU came back within the waiting time
    HOST_LOST = "host-lost"  # the host rebooted under it
    HOST_ERROR = "host-error"  # the host refused or failed
    ADMIN = "admin"  # ended by an admin
    NEVER_STARTED = "never-started"  # released before it was acquired


class Outcome(StrEnum):
    """The outcome of one diagnosis."""

    PASS = "pass"
    FAIL = "fail"
    LOST = "lost"
    INCONCLUSIVE = "inconclusive"


_L = LeaseState
LEASE_STEPS: frozenset[tuple[LeaseState, LeaseState]] = frozenset(
    {
        (_L.QUEUED, _L.PLACED),
        (_L.QUEUED, _L.ENDED),
        (_L.PLACED, _L.STARTING),
        (_L.PLACED, _L.STOPPING),
        (_L.STARTING, _L.RUNNING),
        (_L.STARTING, _L.STOPPING),
        (_L.RUNNING, _L.STOPPING),
        (_L.STOPPING, _L.ENDED),
    }
)

_G = GpuState
GPU_STEPS: frozenset[tuple[GpuState, GpuState, str]] = frozenset(
    {
        (_G.NEW, _G.USED, "enrolment asked for"),
        (_G.UNASSIGNED, _G.RESERVED, "claimed by a lease"),
        (_G.RESERVED, _G.ASSIGNED, "the VM runs"),
        (_G.RESERVED, _G.USED, "the lease ended before its VM ran"),
        (_G.ASSIGNED, _G.USED, "the VM is gone"),
        (_G.UNASSIGNED, _G.USED, "retest, host reboot, or a foreign user"),
        (_G.USED, _G.DIAGNOSING, "a service VM takes it"),
        (_G.DIAGNOSING, _G.UNASSIGNED, "diagnosis passed"),
        (_G.DIAGNOSING, _G.FAILED, "diagnosis failed"),
        (_G.DIAGNOSING, _G.LOST, "not on the bus"),
        (_G.DIAGNOSING, _G.USED, "inconclusive, will be tried again"),
        (_G.DIAGNOSING, _G.QUARANTINED, "inconclusive too often"),
        (_G.FAILED, _G.USED, "admin asks for a retest"),
        (_G.LOST, _G.USED, "admin asks for a retest"),
        (_G.QUARANTINED, _G.USED, "admin asks for a retest"),
        (_G.RETIRED, _G.NEW, "put back"),
        (_G.NEW, _G.LOST, "not on the bus"),
        *(
            (state, _G.RETIRED, "taken out by an admin")
            for state in (_G.NEW, _G.USED, _G.UNASSIGNED, _G.FAILED, _G.LOST, _G.QUARANTINED)
        ),
    }
)

OPEN_LEASES = frozenset(set(LeaseState) - {LeaseState.ENDED})
HELD = frozenset({GpuState.RESERVED, GpuState.ASSIGNED})
COMING = frozenset({GpuState.USED, GpuState.DIAGNOSING})


class IllegalTransition(Exception):
    """A step that the tables do not have; always a defect, never a user's mistake."""


def check_lease_step(old: LeaseState, new: LeaseState) -> None:
    """Refuse a lease transition that the table lacks; staying in a state is allowed."""
    if old != new and (old, new) not in LEASE_STEPS:
        raise IllegalTransition(f"a lease cannot go from {old} to {new}")


def check_gpu_step(old: GpuState, new: GpuState) -> None:
    """Refuse a GPU transition that the table lacks; staying in a state is allowed."""
    if old != new and not any(step[:2] == (old, new) for step in GPU_STEPS):
        raise IllegalTransition(f"a GPU cannot go from {old} to {new}")
