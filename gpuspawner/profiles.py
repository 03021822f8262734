"""From what a user chose to the lease request that follows from it.

There is one way (``choose``) for the form, for a link and for the API alike: what the form does
not offer cannot be had by other means either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from gpuspawner.errors import GPUSpawnError
from gpuspawner.profile_list import (
    UNLISTED,
    Choice,
    FreeText,
    Option,
    Profile,
    first_error,
    kind,
    parse_profiles,
)
from gpuspawner.schema import LeaseRequest

NUMBER_KEYS = ("gpus", "cores", "memory_mib", "home_mib")
MAX_VALUE_CHARS = 255

_RESERVED = "__jupyterhub"


@dataclass(frozen=True)
class Selection:
    """A choice that was found to be valid. ``options`` is its shortest full description, in the
    form of ``user_options``; ``notes`` say where it differs from what was asked for."""

    profile: Profile
    options: Mapping[str, str]
    request: LeaseRequest
    notes: tuple[str, ...] = ()


# -- what is offered -----------------------------------------------------------------------------


def offered(profiles: Iterable[Profile], groups: Iterable[str]) -> tuple[Profile, ...]:
    """The profiles, cut down to what a member of ``groups`` may choose. A profile with an option
    of which she may choose nothing is not offered."""
    mine = frozenset(groups)
    result: list[Profile] = []
    for profile in profiles:
        options = tuple(_option_for(option, mine) for option in profile.options)
        if _open(profile.groups, mine) and all(o.choices or o.free_text for o in options):
            result.append(replace(profile, options=options))
    return tuple(result)


def _option_for(option: Option, mine: frozenset[str]) -> Option:
    free_text = option.free_text
    return replace(
        option,
        choices=tuple(choice for choice in option.choices if _open(choice.groups, mine)),
        free_text=free_text if free_text and _open(free_text.groups, mine) else None,
    )


def _open(groups: frozenset[str] | None, mine: frozenset[str]) -> bool:
    return groups is None or bool(groups & mine)


def default_profile(profiles: Sequence[Profile]) -> Profile:
    """The one that is marked as default, else the first."""
    if not profiles:
        raise GPUSpawnError(
            "No profile is open to you.",
            reason="profile-not-allowed",
            remedy="Ask an administrator which group you should be in.",
        )
    return next((profile for profile in profiles if profile.default), profiles[0])


# -- from fields and options to a request --------------------------------------------------------


def from_fields(fields: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """``user_options`` from a submitted form or from a link, still to be checked.

    The form's names are KubeSpawner's: ``profile``, ``profile-option-PROFILE--OPTION`` and the
    latter with ``--unlisted-choice``. Fields of profiles that were not chosen are dropped. A link
    may use the names of ``user_options`` as well.
    """
    options: dict[str, Any] = {}
    chosen = fields.get("profile", [""])
    prefix = f"profile-option-{chosen[0] if chosen else ''}--"
    for name, values in fields.items():
        if name.startswith("profile-option-"):
            if not name.startswith(prefix):
                continue
            name = name.removeprefix(prefix)
        options[name] = values[0] if len(values) == 1 else list(values)
    for name in [name for name in options if name.endswith(f"--{UNLISTED}")]:
        # Browsers send the text field also when another choice is selected, or nothing is.
        choice = options.get(name.removesuffix(f"--{UNLISTED}"))
        if choice not in (None, UNLISTED) or not options[name]:
            del options[name]
    return options


def resolve(profile_list: object, user_options: object, groups: Iterable[str]) -> LeaseRequest:
    """The request that a choice leads to. Raises ``GPUSpawnError`` (400 or 403)."""
    return choose(parse_profiles(profile_list), user_options, groups).request


def choose(profiles: Iterable[Profile], user_options: object, groups: Iterable[str]) -> Selection:
    """Check a choice, whichever way it came. Raises ``GPUSpawnError`` with a sentence that names
    the mistake: 400 for what does not exist, 403 for what is not open to these groups."""
    everything = tuple(profiles)
    if not everything:
        raise GPUSpawnError(
            "This hub offers no profile yet.",
            reason="configuration",
            log_message="empty profile_list",
        )
    open_to_me = offered(everything, groups)
    options = _options(user_options)
    wanted = options.pop("profile", None)
    if wanted is None:
        profile = default_profile(open_to_me)
    else:
        found = next((p for p in open_to_me if p.slug == wanted), None)
        if found is None:
            raise _no_such_profile(wanted, everything, open_to_me)
        profile = found
    choices: dict[str, Choice] = {}
    texts: dict[str, tuple[FreeText, str]] = {}
    full = next(p for p in everything if p.slug == profile.slug)
    for option, all_of_it in zip(profile.options, full.options, strict=True):
        text = options.pop(f"{option.slug}--{UNLISTED}", None)
        choice = options.pop(option.slug, None)
        if choice == UNLISTED or (choice is None and text is not None):
            texts[option.slug] = _free(option, text or "")
        elif text is not None:
            raise _wrong(f"For {option.title!r} there is both a choice and a text; give only one.")
        else:
            choices[option.slug] = _pick(option, choice, all_of_it)
    if options:
        names = [option.slug for option in profile.options]
        raise _wrong(
            f"{_shown(next(iter(options)))} is not an option of the profile {profile.title!r}; "
            + (f"its options are {', '.join(names)}." if names else "it has no options.")
        )
    return Selection(profile, _described(profile, choices, texts), _settle(profile, choices, texts))


def choose_stored(
    profiles: Iterable[Profile], user_options: object, groups: Iterable[str]
) -> Selection:
    """As ``choose``, for options that were stored at an earlier start. What is no longer offered
    is replaced by the default, and a note says so."""
    everything = tuple(profiles)
    mine = frozenset(groups)
    try:
        return choose(everything, user_options, mine)
    except GPUSpawnError as error:
        if error.status_code >= 500:
            raise
        problem = error.cause
    stored = user_options if isinstance(user_options, Mapping) else {}
    keep: dict[str, Any] = {}
    if any(p.slug == stored.get("profile") for p in offered(everything, mine)):
        keep["profile"] = stored["profile"]
        for key, value in stored.items():
            try:
                choose(everything, keep | {key: value}, mine)
            except GPUSpawnError:
                continue
            keep[key] = value
    selection = choose(everything, keep, mine)
    note = f"Your last choice is no longer possible: {problem} Starting {selection.profile.title}."
    return Selection(selection.profile, selection.options, selection.request, (note,))


def _options(user_options: object) -> dict[str, str]:
    if not isinstance(user_options, Mapping):
        raise _wrong(f"The options must be an object, not {kind(user_options)}.")
    checked: dict[str, str] = {}
    for key, value in user_options.items():
        if not isinstance(key, str) or key.startswith(_RESERVED):
            raise _wrong(f"{_shown(key)} is reserved and cannot be an option.")
        if not isinstance(value, str):
            raise _wrong(f"The option {_shown(key)} must be a text, not {kind(value)}.")
        if len(value) > MAX_VALUE_CHARS:
            raise _wrong(f"The option {_shown(key)} is longer than {MAX_VALUE_CHARS} characters.")
        checked[key] = value
    return checked


def _pick(option: Option, wanted: str | None, full: Option) -> Choice:
    if wanted is None:
        if not option.choices:
            raise _wrong(f"{option.title!r} needs a text.")
        return option.choices[0]
    for choice in option.choices:
        if choice.slug == wanted:
            return choice
    if any(choice.slug == wanted for choice in full.choices):
        raise GPUSpawnError(
            f"{_shown(wanted)} of {option.title!r} is not open to you.",
            reason="profile-not-allowed",
        )
    known = ", ".join(choice.slug for choice in option.choices)
    raise _wrong(f"{_shown(wanted)} is no choice of {option.title!r}; there are {known}.")


def _free(option: Option, text: str) -> tuple[FreeText, str]:
    if option.free_text is None:
        raise _wrong(f"{option.title!r} does not take a text.")
    # fullmatch, so that a pattern without anchors does not let a tail through.
    if not option.free_text.pattern.fullmatch(text):
        raise _wrong(f"{option.title!r} cannot be {_shown(text)}. {option.free_text.hint}")
    return option.free_text, text


def _no_such_profile(
    wanted: str, everything: tuple[Profile, ...], open_to_me: tuple[Profile, ...]
) -> GPUSpawnError:
    if any(profile.slug == wanted for profile in everything):
        return GPUSpawnError(
            f"The profile {_shown(wanted)} is not open to you.", reason="profile-not-allowed"
        )
    known = ", ".join(profile.slug for profile in open_to_me)
    return _wrong(f"There is no profile {_shown(wanted)}; there are {known or 'none for you'}.")


def _described(
    profile: Profile, choices: Mapping[str, Choice], texts: Mapping[str, tuple[FreeText, str]]
) -> dict[str, str]:
    options = {"profile": profile.slug}
    options |= {name: choice.slug for name, choice in choices.items()}
    options |= {f"{name}--{UNLISTED}": text for name, (_, text) in texts.items()}
    return options


def _merged(
    profile: Profile, choices: Mapping[str, Choice], texts: Mapping[str, tuple[FreeText, str]]
) -> dict[str, Any]:
    merged = dict(profile.override)
    for option in profile.options:
        if option.slug in choices:
            merged |= choices[option.slug].override
        if option.slug in texts:
            free_text, text = texts[option.slug]
            merged |= {k: _filled(k, v, text, option) for k, v in free_text.override.items()}
    return merged


def _filled(key: str, value: Any, text: str, option: Option) -> Any:
    if not isinstance(value, str):
        return value
    filled = value.replace("{value}", text)
    if key not in NUMBER_KEYS:
        return filled
    if not re.fullmatch(r"[0-9]{1,9}", filled):
        raise _wrong(f"{option.title!r} must be a whole number, not {_shown(filled)}.")
    return int(filled)


def _settle(
    profile: Profile, choices: Mapping[str, Choice], texts: Mapping[str, tuple[FreeText, str]]
) -> LeaseRequest:
    try:
        return LeaseRequest.model_validate(_merged(profile, choices, texts))
    except ValidationError as error:
        key, text = first_error(error)
        if any(key in free_text.override for free_text, _ in texts.values()):
            raise _wrong(f"{key} cannot be that: {text}.") from error
        raise GPUSpawnError(
            f"The profile {profile.title!r} is not set up correctly.",
            reason="configuration",
            log_message=f"profile {profile.slug!r}: {key}: {text}",
        ) from error


def _wrong(text: str) -> GPUSpawnError:
    return GPUSpawnError(text, reason="profile")


def _shown(value: object) -> str:
    """A user's input in a message: short, and on one line."""
    text = str(value)
    return repr(text if len(text) <= 60 else text[:59] + "…")
