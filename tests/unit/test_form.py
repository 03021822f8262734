"""Cards of the start form, the story of a start, and the check of the hub's URL."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from gpuspawner.form import Form, availability, cards, render
from gpuspawner.hub_url import hub_url_problem
from gpuspawner.profile_list import parse_profiles
from gpuspawner.profiles import offered
from gpuspawner.progress import ProgressEvent, Story
from gpuspawner.schema import GpuCount, GpuCounts, LeaseRequest


def counts(**models: tuple[int, int, int, int]) -> GpuCounts:
    """Counts from (total, free, in use, coming) by model."""
    return GpuCounts(
        at=datetime.now(UTC),
        models=[
            GpuCount(
                model=model,
                emulated=False,
                memory_mib=1,
                total=t,
                free=f,
                in_use=u,
                coming=c,
                out=t - f - u - c,
            )
            for model, (t, f, u, c) in models.items()
        ],
    )


@pytest.mark.parametrize(
    ("gpus", "model", "pool", "level", "badge", "why"),
    [
        (0, None, {}, "none", "no GPU", ""),
        (1, None, {"A": (4, 1, 3, 0), "B": (2, 0, 2, 0)}, "free", "1 of 6 free", ""),
        (
            1,
            "B",
            {"A": (4, 1, 3, 0), "B": (2, 0, 2, 0)},
            "busy",
            "0 of 2 free",
            "2 GPUs are in use",
        ),
        (2, "A", {"A": (4, 1, 2, 1)}, "waiting", "1 of 4 free", "1 GPU is being cleaned"),
        (1, "C", {"A": (4, 4, 0, 0)}, "busy", "0 of 0 free", "has 0 of the 1 × C"),
        (8, None, {"A": (4, 4, 0, 0)}, "busy", "4 of 4 free", "has 4 of the 8 × GPU"),
        (1, None, {"A": (2, 0, 0, 0)}, "busy", "0 of 2 free", "2 GPUs are out of service"),
        (1, None, {}, "busy", "0 of 0 free", "has 0 of the 1 × GPU"),
    ],
)
def test_availability(
    gpus: int,
    model: str | None,
    pool: dict[str, tuple[int, int, int, int]],
    level: str,
    badge: str,
    why: str,
) -> None:
    request = LeaseRequest(gpus=gpus, gpu_model=model, cores=1, memory_mib=1024, image="lab")
    found = availability(request, counts(**pool))
    assert (found.level, found.badge) == (level, badge)
    assert why in found.why
    assert bool(found.why) is (level in ("busy", "waiting"))


def test_unknown_numbers_forbid_nothing() -> None:
    request = LeaseRequest(gpus=9, cores=1, memory_mib=1024, image="lab")
    assert availability(request, None).possible


BASE = {"gpus": 1, "cores": 2, "memory_mib": 4096, "image": "lab"}
PROFILES: list[dict[str, Any]] = [
    {"slug": "cpu", "display_name": "CPU", "spawner_override": BASE | {"gpus": 0}},
    {
        "slug": "gpu",
        "display_name": "GPU <script>",
        "description": 'a "good" & fast one',
        "default": True,
        "spawner_override": BASE,
        "profile_options": {
            "model": {
                "display_name": "Model",
                "choices": {
                    "a": {"display_name": "A", "spawner_override": {"gpu_model": "A"}},
                    "b": {"display_name": "B", "spawner_override": {"gpu_model": "B"}},
                },
            }
        },
    },
]


def built(pool: GpuCounts | None, last: dict[str, str] | None = None) -> dict[str, Any]:
    profiles = offered(parse_profiles(PROFILES), [])
    return {card.slug: card for card in cards(profiles, [], pool, last or {})}


def test_a_card_stands_for_its_best_choice() -> None:
    shown = built(counts(A=(2, 0, 2, 0), B=(2, 1, 1, 0)))["gpu"]
    assert shown.selected
    assert shown.availability.level == "free"
    (option,) = shown.options
    assert [(c.label, c.selected, c.disabled) for c in option.choices] == [
        ("A — 0 of 2 free", False, True),
        ("B — 1 of 2 free", True, False),
    ]
    assert shown.facts == ("1 × A", "2 cores", "4 GiB memory")


def test_the_last_choice_comes_back_only_if_it_can_be_had() -> None:
    last = {"profile": "gpu", "model": "b"}
    option = built(counts(A=(2, 2, 0, 0), B=(2, 2, 0, 0)), last)["gpu"].options[0]
    assert [c.selected for c in option.choices] == [False, True]
    full = built(counts(A=(2, 0, 2, 0), B=(2, 0, 2, 0)), last)
    assert not full["gpu"].selected
    assert full["cpu"].selected, "one that can be started is selected instead"
    assert built(counts(A=(1, 1, 0, 0)), {"profile": "gone"})["gpu"].selected


def test_nothing_in_the_form_becomes_html() -> None:
    shown = tuple(built(None).values())
    html = render(Form(cards=shown, unreachable=True))
    assert "GPU &lt;script&gt;" in html
    assert "a &#34;good&#34; &amp; fast one" in html
    own = render(
        Form(cards=shown), "{% for card in form.cards %}<i>{{ card.title }}</i>{% endfor %}"
    )
    assert own == "<i>CPU</i><i>GPU &lt;script&gt;</i>"


async def collect(story: Story) -> list[ProgressEvent]:
    return [event async for event in story.replay()]


async def test_a_story_is_the_same_for_early_and_late_listeners() -> None:
    story = Story()
    early = asyncio.create_task(collect(story))
    await asyncio.sleep(0)
    story.add("One\n  line", 10)
    story.add("One line", 10)
    story.add("One line", 20)
    await asyncio.sleep(0)
    late = asyncio.create_task(collect(story))
    await asyncio.sleep(0)
    story.add("Two & <b>", 5)
    story.add("Three", 400)
    story.end()
    story.add("After the end", 50)
    assert (
        await early
        == await late
        == await collect(story)
        == [
            {"progress": 10, "message": "One line", "html_message": "One line"},
            {"progress": 20},
            {"progress": 20, "message": "Two & <b>", "html_message": "Two &amp; &lt;b&gt;"},
            {"progress": 95, "message": "Three", "html_message": "Three"},
        ]
    )


async def test_a_listener_that_leaves_disturbs_nobody() -> None:
    story = Story()
    leaving, staying = asyncio.create_task(collect(story)), asyncio.create_task(collect(story))
    story.add("One")
    await asyncio.sleep(0)
    leaving.cancel()
    story.add("Two")
    story.end()
    assert [event["message"] for event in await staying] == ["One", "Two"]


async def test_a_story_has_an_end() -> None:
    story = Story()
    for number in range(2000):
        story.add(f"Line {number}")
    story.end()
    assert len(await collect(story)) == 500


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8081/hub/api", "http://127.9.9.9:8081", "http://localhost:8081",
        "http://[::1]:8081", "http://0.0.0.0:8081", "http://[::]:8081", "http://:8081",
        "10.201.0.1:8081", "", "ftp://10.201.0.1",
    ],
)  # fmt: skip
def test_urls_that_a_guest_cannot_use(url: str) -> None:
    assert hub_url_problem(url)


@pytest.mark.parametrize("url", ["http://10.201.0.1:8081/hub/api", "https://hub.example.org"])
def test_urls_that_a_guest_can_use(url: str) -> None:
    assert hub_url_problem(url) is None
