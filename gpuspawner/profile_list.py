"""``profile_list``, read into frozen values.

The schema is KubeSpawner's, with ``spawner_override`` keys of our own (the fields of
``schema.LeaseRequest``) and ``allowed_groups`` on profiles, choices and free texts. Nothing keeps
a reference into the configuration, so what one user chose can never reach the next one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gpuspawner.schema import LeaseRequest

OVERRIDE_KEYS = tuple(LeaseRequest.model_fields)
UNLISTED = "unlisted-choice"

_SLUG = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.]|-(?!-)){0,62}")
# The smallest request that is valid, to check single overrides against.
_PROBE: dict[str, Any] = {"gpus": 0, "cores": 1, "memory_mib": 1024, "image": "probe"}


class ProfileListError(Exception):
    """``profile_list`` cannot be used; the text says which entry and what is wrong."""


@dataclass(frozen=True)
class Choice:
    """One entry of an option. ``groups`` is None when it is open to everyone."""

    slug: str
    title: str
    override: Mapping[str, Any]
    groups: frozenset[str] | None = None


@dataclass(frozen=True)
class FreeText:
    """A choice that the user types. ``{value}`` in the overrides stands for the text."""

    title: str
    pattern: re.Pattern[str]
    hint: str
    override: Mapping[str, Any]
    groups: frozenset[str] | None = None


@dataclass(frozen=True)
class Option:
    """A question that a profile asks. The first choice is the default."""

    slug: str
    title: str
    choices: tuple[Choice, ...]
    free_text: FreeText | None = None


@dataclass(frozen=True)
class Profile:
    """One card of the form."""

    slug: str
    title: str
    description: str
    override: Mapping[str, Any]
    options: tuple[Option, ...] = ()
    default: bool = False
    groups: frozenset[str] | None = None


def parse_profiles(raw: object) -> tuple[Profile, ...]:
    """Read ``profile_list``. Raises ``ProfileListError`` for the first entry that is wrong."""
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise ProfileListError(f"profile_list must be a list of profiles, not {kind(raw)}")
    profiles = tuple(_profile(entry, f"profile_list[{n}]") for n, entry in enumerate(raw))
    _unique([p.slug for p in profiles], "profile_list")
    for profile in profiles:
        _check_defaults(profile)
    return profiles


def _check_defaults(profile: Profile) -> None:
    """The default choices must make a complete request, else nobody could start the profile."""
    merged = dict(profile.override)
    for option in profile.options:
        merged |= option.choices[0].override
    try:
        LeaseRequest.model_validate(merged)
    except ValidationError as error:
        key, text = first_error(error)
        raise ProfileListError(
            f"profile {profile.slug!r}: with its default choices, {key}: {text}"
        ) from error


def _profile(raw: object, where: str) -> Profile:
    known = {
        "slug", "display_name", "description", "default", "spawner_override", "profile_options",
        "allowed_groups",
    }  # fmt: skip
    entry = _mapping(raw, where, known)
    title = _text(entry, "display_name", where)
    slug = _slug(entry.get("slug") or _slugify(title), f"{where}.slug")
    where = f"profile {slug!r}"
    raw_options = _mapping(entry.get("profile_options") or {}, f"{where}: profile_options")
    return Profile(
        slug=slug,
        title=title,
        description=str(entry.get("description") or ""),
        override=_override(entry.get("spawner_override"), where),
        options=tuple(_option(name, o, f"{where}: {name}") for name, o in raw_options.items()),
        default=bool(entry.get("default", False)),
        groups=_groups(entry, where),
    )


def _option(name: object, raw: object, where: str) -> Option:
    entry = _mapping(raw, where, {"display_name", "choices", "unlisted_choice"})
    slug = _slug(name, where)
    if slug == "profile":
        raise ProfileListError(f"{where}: an option cannot be called 'profile'; rename it")
    raw_choices = _mapping(entry.get("choices") or {}, f"{where}: choices")
    choices: list[Choice] = []
    for key, raw_choice in raw_choices.items():
        inside = f"{where}.{key}"
        known = {"display_name", "default", "spawner_override", "allowed_groups"}
        choice = _mapping(raw_choice, inside, known)
        parsed = Choice(
            slug=_slug(key, inside),
            title=_text(choice, "display_name", inside),
            override=_override(choice.get("spawner_override"), inside),
            groups=_groups(choice, inside),
        )
        choices.insert(0 if choice.get("default") else len(choices), parsed)
    if any(choice.slug == UNLISTED for choice in choices):
        raise ProfileListError(f"{where}: a choice cannot be called {UNLISTED!r}; rename it")
    free_text = _free_text(entry.get("unlisted_choice"), f"{where}: unlisted_choice")
    if not choices:
        raise ProfileListError(f"{where} has no choices; give it some or remove it")
    title = str(entry.get("display_name") or slug)
    return Option(slug=slug, title=title, choices=tuple(choices), free_text=free_text)


def _free_text(raw: object, where: str) -> FreeText | None:
    known = {
        "enabled", "display_name", "display_name_in_choices", "validation_regex",
        "validation_message", "spawner_override", "allowed_groups",
    }  # fmt: skip
    entry = _mapping(raw or {}, where, known)
    if not entry.get("enabled"):
        return None
    try:
        pattern = re.compile(_text(entry, "validation_regex", where))
    except re.error as error:
        raise ProfileListError(f"{where}: validation_regex is no pattern: {error}") from error
    raw_override = _mapping(entry.get("spawner_override") or {}, where, set(OVERRIDE_KEYS))
    return FreeText(
        title=str(entry.get("display_name") or entry.get("display_name_in_choices") or "Other"),
        pattern=pattern,
        hint=str(entry.get("validation_message") or "It does not have the expected form."),
        override=dict(raw_override),
        groups=_groups(entry, where),
    )


def _mapping(raw: object, where: str, known: set[str] | None = None) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise ProfileListError(f"{where} must be a dict, not {kind(raw)}")
    unknown = [str(key) for key in raw if known is not None and key not in known]
    if unknown:
        raise ProfileListError(
            f"{where}: {unknown[0]!r} is not known here; known are {', '.join(sorted(known or ()))}"
        )
    return raw


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ProfileListError(f"{where}: {key} must be a text")
    return value


def _slug(raw: object, where: str) -> str:
    if not isinstance(raw, str) or not _SLUG.fullmatch(raw):
        raise ProfileListError(
            f"{where}: {raw!r} is no short name; use at most 63 letters, digits, '_', '.' and "
            "single '-'"
        )
    return raw


def _slugify(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:63]


def _groups(entry: Mapping[str, Any], where: str) -> frozenset[str] | None:
    raw = entry.get("allowed_groups")
    if raw is None:
        return None
    if isinstance(raw, str) or not isinstance(raw, Iterable):
        raise ProfileListError(f"{where}: allowed_groups must be a list of group names")
    return frozenset(str(name) for name in raw)


def _override(raw: object, where: str) -> Mapping[str, Any]:
    override = dict(_mapping(raw or {}, f"{where}: spawner_override", set(OVERRIDE_KEYS)))
    try:
        LeaseRequest.model_validate(_PROBE | override)
    except ValidationError as error:
        key, text = first_error(error)
        raise ProfileListError(f"{where}: spawner_override: {key}: {text}") from error
    return override


def _unique(slugs: list[str], where: str) -> None:
    twice = sorted({slug for slug in slugs if slugs.count(slug) > 1})
    if twice:
        raise ProfileListError(f"{where}: {twice[0]!r} is there twice; give each its own slug")


def kind(value: object) -> str:
    """What a value is, in words for a message."""
    names = {
        bool: "yes/no",
        dict: "an object",
        list: "a list",
        str: "a text",
        type(None): "nothing",
    }
    return names.get(type(value), "a number" if isinstance(value, int | float) else "that")


def first_error(error: ValidationError) -> tuple[str, str]:
    """The field and the text of the first mistake."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ".".join(str(part) for part in first["loc"]), str(first["msg"])
