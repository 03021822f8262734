"""What a user chooses becomes a lease request, or a sentence that names the mistake."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gpuspawner.errors import GPUSpawnError
from gpuspawner.profile_list import ProfileListError, parse_profiles
from gpuspawner.profiles import choose, choose_stored, from_fields, offered, resolve

SMALL = {"gpus": 1, "cores": 2, "memory_mib": 4096, "image": "lab"}
PROFILES: list[dict[str, Any]] = [
    {"display_name": "CPU only", "spawner_override": SMALL | {"gpus": 0}},
    {
        "slug": "gpu",
        "display_name": "One GPU",
        "default": True,
        "spawner_override": SMALL,
        "profile_options": {
            "image": {
                "display_name": "Environment",
                "choices": {
                    "geo": {"display_name": "Geo", "spawner_override": {"image": "geo"}},
                    "lab": {"display_name": "Lab", "default": True},
                    "beta": {
                        "display_name": "Beta",
                        "allowed_groups": ["testers"],
                        "spawner_override": {"image": "beta"},
                    },
                },
                "unlisted_choice": {
                    "enabled": True,
                    "display_name": "Other image",
                    "validation_regex": "[a-z0-9-]+",
                    "validation_message": "Small letters only.",
                    "spawner_override": {"image": "{value}"},
                },
            },
            "size": {
                "display_name": "Memory",
                "choices": {
                    "s": {"display_name": "4 GiB"},
                    "l": {"display_name": "8 GiB", "spawner_override": {"memory_mib": 8192}},
                },
                "unlisted_choice": {
                    "enabled": True,
                    "allowed_groups": ["testers"],
                    "validation_regex": ".*",
                    "spawner_override": {"memory_mib": "{value}"},
                },
            },
        },
    },
    {
        "slug": "big",
        "display_name": "Four GPUs",
        "allowed_groups": ["sar-lab", "testers"],
        "spawner_override": SMALL | {"gpus": 4, "gpu_model": "A100"},
    },
]


def request(options: object, *groups: str) -> dict[str, Any]:
    return resolve(PROFILES, options, groups).model_dump()


@pytest.mark.parametrize(
    ("options", "groups", "expected"),
    [
        ({}, (), {"gpus": 1, "image": "lab", "memory_mib": 4096}),
        ({"profile": "cpu-only"}, (), {"gpus": 0}),
        ({"profile": "gpu", "image": "geo"}, (), {"image": "geo"}),
        ({"profile": "gpu", "image": "geo", "size": "l"}, (), {"image": "geo", "memory_mib": 8192}),
        ({"profile": "gpu", "image": "beta"}, ("testers",), {"image": "beta"}),
        ({"profile": "gpu", "image--unlisted-choice": "mine-2"}, (), {"image": "mine-2"}),
        ({"image": "unlisted-choice", "image--unlisted-choice": "x"}, (), {"image": "x"}),
        ({"size--unlisted-choice": "12288"}, ("testers",), {"memory_mib": 12288}),
        ({"profile": "big"}, ("sar-lab",), {"gpus": 4, "gpu_model": "A100"}),
    ],
)
def test_valid_choices(
    options: dict[str, str], groups: tuple[str, ...], expected: dict[str, Any]
) -> None:
    got = request(options, *groups)
    assert {key: got[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("options", "groups", "status", "text"),
    [
        ({"profile": "huge"}, (), 400, "no profile 'huge'"),
        ({"profile": ""}, (), 400, "no profile ''"),
        ({"profile": True}, (), 400, "must be a text, not yes/no"),
        ({"profile": None}, (), 400, "must be a text, not nothing"),
        ({"profile": ["gpu"]}, (), 400, "must be a text, not a list"),
        ({"profile": "gpu", "gpus": -1}, (), 400, "must be a text, not a number"),
        ({"profile": "gpu", "gpus": 1.5}, (), 400, "must be a text, not a number"),
        ({"profile": "gpu", "gpus": "8"}, (), 400, "'gpus' is not an option"),
        ({"profile": "gpu", "gpu_model": "A100"}, (), 400, "'gpu_model' is not an option"),
        ({"profile": "gpu", "image": "nope"}, (), 400, "'nope' is no choice of 'Environment'"),
        ({"profile": "cpu-only", "image": "lab"}, (), 400, "it has no options"),
        ({"__jupyterhub_bytes": "x"}, (), 400, "reserved"),
        ({"image--unlisted-choice": "a" * 256}, (), 400, "longer than 255"),
        ({"image--unlisted-choice": "Mine!"}, (), 400, "Small letters only."),
        # A pattern without anchors must not let a tail through.
        ({"image--unlisted-choice": "ok\n; rm"}, (), 400, "Small letters only."),
        ({"image": "unlisted-choice"}, (), 400, "cannot be ''"),
        ({"image": "geo", "image--unlisted-choice": "x"}, (), 400, "both a choice and a text"),
        ({"size--unlisted-choice": "1"}, (), 400, "does not take a text"),
        ({"size--unlisted-choice": "-1"}, ("testers",), 400, "whole number"),
        ({"size--unlisted-choice": "1e9"}, ("testers",), 400, "whole number"),
        ({"size--unlisted-choice": "9" * 30}, ("testers",), 400, "whole number"),
        ({"size--unlisted-choice": "999999999"}, ("testers",), 400, "memory_mib cannot be that"),
        ({"size--unlisted-choice": "٣"}, ("testers",), 400, "whole number"),
        ({"profile": "big"}, (), 403, "not open to you"),
        ({"profile": "gpu", "image": "beta"}, ("sar-lab",), 403, "not open to you"),
        ([], (), 400, "must be an object, not a list"),
        (None, (), 400, "must be an object, not nothing"),
        ("gpu", (), 400, "must be an object, not a text"),
    ],
)
def test_mistakes_are_named(
    options: object, groups: tuple[str, ...], status: int, text: str
) -> None:
    with pytest.raises(GPUSpawnError) as caught:
        request(options, *groups)
    assert caught.value.status_code == status
    assert text in caught.value.jupyterhub_message


def test_choosing_changes_no_configuration() -> None:
    before = copy.deepcopy(PROFILES)
    profiles = parse_profiles(PROFILES)
    choose(profiles, {"profile": "gpu", "image": "geo", "size": "l"}, [])
    with pytest.raises(GPUSpawnError):
        choose(profiles, {"profile": "big"}, [])
    assert before == PROFILES
    assert choose(profiles, {}, []).request.image == "lab"


def test_form_link_and_api_lead_to_the_same() -> None:
    form = {
        "profile": ["gpu"],
        "profile-option-gpu--image": ["geo"],
        "profile-option-gpu--image--unlisted-choice": [""],
        "profile-option-gpu--size": ["l"],
        "profile-option-other--size": ["x"],
    }
    link = {"profile": ["gpu"], "image": ["geo"], "size": ["l"]}
    api = {"profile": "gpu", "image": "geo", "size": "l"}
    assert from_fields(form) == from_fields(link) == api
    typed = {
        "profile": ["gpu"],
        "profile-option-gpu--image": ["unlisted-choice"],
        "profile-option-gpu--image--unlisted-choice": ["mine"],
    }
    assert request(from_fields(typed))["image"] == "mine"
    left_over = typed | {"profile-option-gpu--image": ["geo"]}
    assert request(from_fields(left_over))["image"] == "geo"


@pytest.mark.parametrize(
    "form",
    [
        {"profile": ["gpu", "big"]},
        {"profile": ["gpu"], "profile-option-gpu--image": ["geo", "lab"]},
        {"profile": ["gpu"], "surprise": ["1"]},
        {"profile": ["gpu"], "image_file": [{"filename": "x", "body": b""}]},
        {"profile": []},
    ],
)
def test_odd_forms_are_refused(form: dict[str, list[Any]]) -> None:
    with pytest.raises(GPUSpawnError) as caught:
        request(from_fields(form))
    assert caught.value.status_code == 400


def test_the_selection_describes_itself() -> None:
    profiles = parse_profiles(PROFILES)
    selection = choose(profiles, {"image--unlisted-choice": "mine"}, [])
    assert selection.options == {"profile": "gpu", "image--unlisted-choice": "mine", "size": "s"}
    assert choose(profiles, dict(selection.options), []).request == selection.request


@pytest.mark.parametrize(
    ("stored", "profile", "image", "noted"),
    [
        ({"profile": "gpu", "image": "geo"}, "gpu", "geo", False),
        ({"profile": "gpu", "image": "old", "size": "l"}, "gpu", "lab", True),
        ({"profile": "removed"}, "gpu", "lab", True),
        ({"profile": "big"}, "gpu", "lab", True),
        ({"profile": 7, "x": {}}, "gpu", "lab", True),
        ([], "gpu", "lab", True),
    ],
)
def test_stale_stored_options_fall_back(
    stored: object, profile: str, image: str, noted: bool
) -> None:
    selection = choose_stored(parse_profiles(PROFILES), stored, [])
    assert (selection.profile.slug, selection.request.image) == (profile, image)
    assert bool(selection.notes) is noted
    if noted:
        assert "no longer possible" in selection.notes[0]
    if isinstance(stored, dict) and stored.get("size") == "l":
        assert selection.request.memory_mib == 8192, "what is still valid is kept"


def test_only_what_is_open_is_offered() -> None:
    profiles = parse_profiles(PROFILES)
    assert [p.slug for p in offered(profiles, [])] == ["cpu-only", "gpu"]
    assert [p.slug for p in offered(profiles, ["sar-lab"])] == ["cpu-only", "gpu", "big"]
    image, size = offered(profiles, [])[1].options
    assert [c.slug for c in image.choices] == ["lab", "geo"], "the default comes first"
    assert image.free_text is not None
    assert size.free_text is None


def test_nothing_offered() -> None:
    with pytest.raises(GPUSpawnError) as caught:
        resolve([], {}, [])
    assert "no profile yet" in caught.value.jupyterhub_message
    assert caught.value.status_code == 500
    with pytest.raises(GPUSpawnError, match="No profile is open") as caught:
        resolve(PROFILES[2:], {}, [])
    assert caught.value.status_code == 403


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"display_name": ""}, "display_name must be a text"),
        ({"slug": "a--b"}, "no short name"),
        ({"slug": "a b"}, "no short name"),
        ({"spawner_override": SMALL | {"gpus": -1}}, "gpus"),
        ({"spawner_override": SMALL | {"gpus": True}}, "gpus"),
        ({"spawner_override": SMALL | {"memory_mib": 1.5}}, "memory_mib"),
        ({"spawner_override": SMALL | {"mem": "4G"}}, "'mem' is not known here"),
        ({"spawner_override": {"gpus": 1}}, "with its default choices, cores"),
        ({"kubespawner_override": {}}, "'kubespawner_override' is not known here"),
        ({"allowed_groups": "sar-lab"}, "list of group names"),
        ({"profile_options": {"image": {"display_name": "x"}}}, "has no choices"),
        ({"profile_options": {"profile": {"choices": {"a": {"display_name": "A"}}}}}, "rename it"),
        (
            {
                "profile_options": {
                    "image": {
                        "choices": {"a": {"display_name": "A"}},
                        "unlisted_choice": {"enabled": True, "validation_regex": "["},
                    }
                }
            },
            "no pattern",
        ),
    ],
)
def test_mistakes_in_the_configuration(change: dict[str, Any], text: str) -> None:
    entry = {"slug": "p", "display_name": "P", "spawner_override": SMALL} | change
    with pytest.raises(ProfileListError, match=text):
        parse_profiles([entry])


def test_the_list_itself() -> None:
    entry = {"slug": "p", "display_name": "P", "spawner_override": SMALL}
    with pytest.raises(ProfileListError, match="there twice"):
        parse_profiles([entry, entry])
    with pytest.raises(ProfileListError, match="must be a list"):
        parse_profiles({"p": entry})
