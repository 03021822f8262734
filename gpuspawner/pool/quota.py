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

    def on_user(self, username: str) -> bool:
        """This user has a limit of her own, or the default."""
        return self.default is not None or username in self.users

    def on_groups(self, groups: Sequence[str]) -> bool:
        """One of these groups has a limit."""
        return not self.groups.keys().isdisjoint(groups)


@dataclass(frozen=True, slots=True)
class Holding:
    """The GPUs of one open lease, and whose they are."""

    username: str
    server_name: str
    groups: tuple[str, ...]
    gpus: int


@dataclass(frozen=True, slots=True)
class Standing:
    """Where somebody stands: GPUs held of a limit. ``limit`` of ``None`` is no limit; ``name`` is
    the user or the group."""

    kind: str
    name: str
    limit: int | None
    held: int


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


def held(holdings: Sequence[Holding], kind: str, name: str) -> int:
    """The GPUs that a ``user``, or all members of a ``group``, hold."""
    return sum(
        holding.gpus
        for holding in holdings
        if (name == holding.username if kind == "user" else name in holding.groups)
    )


def standing(
    limits: Limits, holdings: Sequence[Holding], username: str, groups: Sequence[str]
) -> tuple[Standing, ...]:
    """A user's own limit first, then those of her groups that have one, by name."""
    own = limits.users.get(username, limits.default)
    return (
        Standing("user", username, own, held(holdings, "user", username)),
        *(
            Standing("group", group, limits.groups[group], held(holdings, "group", group))
            for group in sorted(set(groups))
            if group in limits.groups
        ),
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
    for one in standing(limits, holdings, username, groups):
        if one.limit is None or one.held + gpus <= one.limit:
            continue
        servers = sorted(
            holding.server_name
            for holding in holdings
            if one.kind == "user" and holding.username == username and holding.gpus
        )
        return Excess(one.kind, one.name, one.limit, one.held, gpus, tuple(servers))
    return None
