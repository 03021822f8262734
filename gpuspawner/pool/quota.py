"""Limits: how many GPUs somebody may hold at once.

A user has her own limit, else the default. A group's limit is on all of its members together. What
counts is every GPU of an open lease, also of one that is still waiting or still stopping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """All limits that are set. ``default`` of ``None`` is no limit."""

    default: int | None
    users: Mapping[str, int]
    groups: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Holding:
    """The GPUs of one open lease, and whose they are."""

    username: str
    server_name: str
    groups: tuple[str, ...]
    gpus: int


@dataclass(frozen=True, slots=True)
class Excess:
    """A limit that a request would break. ``kind`` is ``user`` or ``group``; ``held`` are the GPUs
    held already, of ``limit``."""

    kind: str
    name: str
    limit: int
    held: int
    asked: int
    servers: tuple[str, ...] = ()

    def sentence(self) -> str:
        """For the user: numbers, and what she can do."""
        if self.asked > self.limit:
            whose = "You" if self.kind == "user" else f"Your group {self.name}"
            return (
                f"{whose} may use {self.limit} GPUs at once; {self.asked} were asked for. Choose a "
                "profile with fewer GPUs."
            )
        if self.kind == "user":
            named = ", ".join(name or "your default server" for name in self.servers)
            return (
                f"You already use {self.held} of the {self.limit} GPUs that you may use at once "
                f"({named}). Stop one of those servers first."
            )
        return (
            f"Your group {self.name} already uses {self.held} of the {self.limit} GPUs that its "
            "members may use at once. Try again when one of them has stopped."
        )


def excess(
    limits: Limits,
    holdings: Sequence[Holding],
    *,
    username: str,
    groups: Sequence[str],
    gpus: int,
) -> Excess | None:
    """The first limit that ``gpus`` more for this user would break, the user's own first.

    ``holdings`` must not hold the lease that is asked for, nor its predecessor of the same server.
    A request without GPUs breaks no limit.
    """
    if gpus == 0:
        return None
    own = limits.users.get(username, limits.default)
    mine = [holding for holding in holdings if holding.username == username and holding.gpus]
    held = sum(holding.gpus for holding in mine)
    if own is not None and held + gpus > own:
        servers = tuple(sorted(holding.server_name for holding in mine))
        return Excess("user", username, own, held, gpus, servers)
    for group in sorted(set(groups)):
        limit = limits.groups.get(group)
        if limit is None:
            continue
        held = sum(holding.gpus for holding in holdings if group in holding.groups)
        if held + gpus > limit:
            return Excess("group", group, limit, held, gpus)
    return None
