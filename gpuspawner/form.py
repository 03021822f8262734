"""The start form: one card per profile, with what is free right now.

``cards`` decides what is shown (pure), ``render`` writes the HTML with autoescaping.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

import jinja2

from gpuspawner.errors import GPUSpawnError, why_ended
from gpuspawner.profile_list import UNLISTED, Option, Profile
from gpuspawner.profiles import choose
from gpuspawner.schema import GpuCounts, Lease, LeaseRequest

TEMPLATES = Path(__file__).parent / "templates"
DEFAULT_TEMPLATE = "options_form.html"

Level = Literal["free", "waiting", "busy", "unknown", "none"]
_RANK: dict[Level, int] = {"free": 4, "none": 4, "unknown": 3, "waiting": 2, "busy": 1}


@dataclass(frozen=True)
class Availability:
    """Whether a request could be met now. ``why`` is for people, empty when all is well."""

    level: Level
    badge: str
    why: str = ""

    @property
    def possible(self) -> bool:
        """False when a start would certainly be refused."""
        return self.level != "busy"


@dataclass(frozen=True)
class ChoiceView:
    """One entry of a select box."""

    value: str
    label: str
    selected: bool
    disabled: bool


@dataclass(frozen=True)
class OptionView:
    """One question of a card. ``free_text`` is the label of the text field, if there is one."""

    name: str
    label: str
    choices: tuple[ChoiceView, ...]
    free_text: str | None = None
    free_name: str = ""
    free_value: str = ""
    pattern: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Card:
    """One profile as the form shows it."""

    slug: str
    title: str
    description: str
    facts: tuple[str, ...]
    availability: Availability
    selected: bool
    options: tuple[OptionView, ...] = ()


@dataclass(frozen=True)
class Ended:
    """Why the last server of this name ended."""

    text: str
    at: datetime
    ran: bool = True


@dataclass(frozen=True)
class Form:
    """All that the template gets."""

    cards: tuple[Card, ...]
    counted_at: datetime | None = None
    unreachable: bool = False
    ended: Ended | None = None

    @property
    def startable(self) -> bool:
        """Whether any profile can be started."""
        return any(card.availability.possible for card in self.cards)


def availability(request: LeaseRequest, counts: GpuCounts | None) -> Availability:
    """Whether the pool has the GPUs that a request needs. Cores and memory are not looked at:
    the allocator does that when it places the server."""
    if request.gpus == 0:
        return Availability("none", "no GPU")
    if counts is None:
        return Availability("unknown", "not known")
    models = [c for c in counts.models if request.gpu_model in (None, c.model)]
    total, free, coming, out = (
        sum(getattr(c, name) for c in models) for name in ("total", "free", "coming", "out")
    )
    badge = f"{free} of {total} free"
    if total < request.gpus:
        what = request.gpu_model or "GPU"
        why = f"The pool has {total} of the {request.gpus} × {what} that this needs."
        return Availability("busy", badge, why)
    if free >= request.gpus:
        return Availability("free", badge)
    if free + coming >= request.gpus:
        why = (
            f"{_gpus(coming)} {_being(coming)} being cleaned and checked after the last user. "
            "You can start now; the start waits for it."
        )
        return Availability("waiting", badge, why)
    if out and total - out < request.gpus:
        return Availability("busy", badge, f"{_gpus(out)} {_being(out)} out of service.")
    in_use = sum(c.in_use for c in models)
    more = f", {_gpus(coming)} {_being(coming)} being cleaned" if coming else ""
    return Availability("busy", badge, f"{_gpus(in_use)} {_being(in_use)} in use{more}.")


def cards(
    profiles: Sequence[Profile],
    groups: Iterable[str],
    counts: GpuCounts | None,
    last: Mapping[str, str],
) -> tuple[Card, ...]:
    """A card for each profile that ``profiles`` offers to this user (see ``profiles.offered``).

    ``last`` is what she chose the last time. It is selected again only if it can be started now:
    a choice that failed must not come back by itself.
    """
    mine = frozenset(groups)
    built = [_card(profile, mine, counts, last) for profile in profiles]
    possible = [card for card in built if card.availability.possible]
    defaults = [p.slug for p in profiles if p.default]
    wanted = [last.get("profile", ""), *defaults, *(card.slug for card in possible)]
    slugs = {card.slug for card in possible}
    selected = next((slug for slug in wanted if slug in slugs), None)
    return tuple(replace(card, selected=card.slug == selected) for card in built)


def last_end(leases: Iterable[Lease]) -> Ended | None:
    """The end of the newest lease, if it needs to be explained."""
    newest = max(leases, key=lambda lease: lease.created_at, default=None)
    if newest is None or newest.state != "ended" or newest.ended_at is None:
        return None
    text = why_ended(newest)
    return Ended(text, newest.ended_at, newest.running_at is not None) if text else None


def render(form: Form, template: str = "") -> str:
    """The HTML of the form. ``template`` is the text of another template than ours."""
    environment = _environment()
    chosen = environment.from_string(template) if template else None
    return (chosen or environment.get_template(DEFAULT_TEMPLATE)).render(form=form)


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _card(
    profile: Profile, mine: frozenset[str], counts: GpuCounts | None, last: Mapping[str, str]
) -> Card:
    before = last if last.get("profile") == profile.slug else {}
    requests = dict(_variants(profile, mine))
    found = [availability(request, counts) for request in requests.values()]
    best = max(found, key=lambda a: _RANK[a.level], default=Availability("unknown", "not known"))
    options = tuple(_option(profile, o, requests, counts, before) for o in profile.options)
    first = next(iter(requests.values()), None)
    facts = _facts(first) if first else ()
    return Card(profile.slug, profile.title, profile.description, facts, best, False, options)


def _variants(
    profile: Profile, mine: frozenset[str]
) -> Iterator[tuple[tuple[str, str], LeaseRequest]]:
    """The request of the profile's defaults, and of each listed choice beside the defaults."""
    wanted = [(o.slug, c.slug) for o in profile.options for c in o.choices] or [("", "")]
    for option, choice in wanted:
        options = {"profile": profile.slug} | ({option: choice} if option else {})
        try:
            yield (option, choice), choose([profile], options, mine).request
        except GPUSpawnError:
            # An option that takes only a typed text has no default; the text decides.
            continue


def _option(
    profile: Profile,
    option: Option,
    requests: Mapping[tuple[str, str], LeaseRequest],
    counts: GpuCounts | None,
    before: Mapping[str, str],
) -> OptionView:
    name = f"profile-option-{profile.slug}--{option.slug}"
    typed = before.get(f"{option.slug}--{UNLISTED}", "") if option.free_text else ""
    found = {
        choice.slug: availability(requests[option.slug, choice.slug], counts)
        for choice in option.choices
        if (option.slug, choice.slug) in requests
    }
    differ = len({a.badge for a in found.values()}) > 1
    possible = [slug for slug, a in found.items() if a.possible]
    wanted = [before.get(option.slug, ""), *possible, *(c.slug for c in option.choices)]
    selected = UNLISTED if typed else next((s for s in wanted if s in possible), wanted[-1])
    views = [
        ChoiceView(
            choice.slug,
            choice.title
            + (f" — {found[choice.slug].badge}" if differ and choice.slug in found else ""),
            choice.slug == selected,
            choice.slug in found and not found[choice.slug].possible,
        )
        for choice in option.choices
    ]
    free = option.free_text
    if free is None:
        return OptionView(name, option.title, tuple(views))
    views.append(ChoiceView(UNLISTED, free.title + " …", selected == UNLISTED, False))
    return OptionView(
        name,
        option.title,
        tuple(views),
        free_text=free.title,
        free_name=f"{name}--{UNLISTED}",
        free_value=typed,
        pattern=free.pattern.pattern,
        hint=free.hint,
    )


def _facts(request: LeaseRequest) -> tuple[str, ...]:
    facts = []
    if request.gpus:
        model = f" {request.gpu_model}" if request.gpu_model else ""
        facts.append(f"{request.gpus} ×{model}" if model else _gpus(request.gpus))
    facts.append(f"{request.cores} core{'' if request.cores == 1 else 's'}")
    facts.append(f"{_gib(request.memory_mib)} memory")
    return tuple(facts)


def _gib(mib: int) -> str:
    return f"{mib} MiB" if mib < 1024 else f"{mib / 1024:.1f}".removesuffix(".0") + " GiB"


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _being(count: int) -> str:
    return "is" if count == 1 else "are"
