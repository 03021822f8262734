"""Limits and the audit as pages show them. Pure, as ``data`` is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from gpuspawner.allocator.clock import moment
from gpuspawner.allocator.pages.data import Urls
from gpuspawner.ledger.limits import title
from gpuspawner.pool.quota import Holding, Limits, Standing, held


def gpus(number: int) -> str:
    """``1 GPU``, ``2 GPUs``."""
    return f"{number} GPU{'' if number == 1 else 's'}"


def whose(kind: str, name: str) -> str:
    """Whom a limit is for."""
    return "Every user (the default)" if kind == "default" else f"{kind.capitalize()} {name}"


@dataclass(frozen=True, slots=True)
class LimitRow:
    """One limit. ``gpus`` of ``None``: not set; ``held`` of ``None``: it counts nothing itself."""

    kind: str
    name: str
    title: str
    gpus: int | None
    held: int | None
    changed_at: datetime | None
    changed_by: str
    why: str
    set_url: str
    clear_url: str

    @property
    def full(self) -> bool:
        """Nothing more can be had of it."""
        return self.gpus is not None and self.held is not None and self.held >= self.gpus > 0


@dataclass(frozen=True, slots=True)
class LimitGroup:
    """The limits of one kind, and how to add one. ``add_url`` is empty where none is added."""

    kind: str
    title: str
    column: str
    rows: tuple[LimitRow, ...]
    empty: str = ""
    add_url: str = ""
    add_text: str = ""


def limit_groups(
    limits: Limits,
    holdings: Sequence[Holding],
    changes: Mapping[str, Mapping[str, Any]],
    urls: Urls,
) -> tuple[LimitGroup, ...]:
    """All limits by kind: the default, which is always there, groups, users. ``changes`` are the
    newest lines of audit by what they are about."""

    def row(kind: str, name: str, number: int | None) -> LimitRow:
        change = changes.get(title(kind, name))
        query = f"?{urlencode({'name': name})}" if name else ""
        return LimitRow(
            kind=kind,
            name=name,
            title=name or "Every user without one of her own",
            gpus=number,
            held=None if kind == "default" else held(holdings, kind, name),
            changed_at=None if change is None else moment(change["at_ms"]),
            changed_by="" if change is None else change["who"],
            why="" if change is None else change["why"],
            set_url=f"{urls.prefix}admin/limits/{kind}/set{query}",
            clear_url=f"{urls.prefix}admin/limits/{kind}/clear{query}",
        )

    return (
        LimitGroup("default", "Default", "For", (row("default", "", limits.default),)),
        LimitGroup(
            "group",
            "Groups",
            "Group",
            tuple(row("group", name, n) for name, n in sorted(limits.groups.items())),
            "No group has a limit.",
            f"{urls.prefix}admin/limits/group/set",
            "Limit a group",
        ),
        LimitGroup(
            "user",
            "Users",
            "User",
            tuple(row("user", name, n) for name, n in sorted(limits.users.items())),
            "No user has a limit of her own.",
            f"{urls.prefix}admin/limits/user/set",
            "Limit a user",
        ),
    )


@dataclass(frozen=True, slots=True)
class StandingLine:
    """What a user reads about one limit. ``full``: nothing more can be had of it."""

    text: str
    full: bool


def standing_line(one: Standing) -> StandingLine:
    """Numbers, and what to do when there are no more."""
    full = one.limit is not None and one.held >= one.limit
    if one.kind == "group":
        text = (
            f"The members of your group {one.name} hold {one.held} of the {gpus(one.limit or 0)} "
            "that they may hold together."
        )
        rest = " To start one more, one of them has to stop."
    elif one.limit is None:
        return StandingLine(
            f"You hold {gpus(one.held)}. There is no limit on how many you may hold.", False
        )
    else:
        text = f"You hold {one.held} of the {gpus(one.limit)} that you may hold at once."
        rest = " Stop a server to start another one with a GPU."
    if one.limit == 0:
        return StandingLine(f"{text} An administrator can change that.", True)
    return StandingLine(text + (rest if full else ""), full)


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One line of the audit. ``change`` is a limit's old and new value, else empty."""

    id: int
    at: datetime
    who: str
    what: str
    change: str
    why: str


def audit_row(row: Mapping[str, Any]) -> AuditRow:
    """From a row of the ledger."""
    change = ""
    if row["what"].startswith("limit "):
        old, new = ("no limit" if row[name] is None else str(row[name]) for name in ("old", "new"))
        change = f"{old} → {new}"
    return AuditRow(
        id=row["id"],
        at=moment(row["at_ms"]),
        who=row["who"],
        what=row["what"],
        change=change,
        why=row["why"],
    )
