"""What users may choose: the form, links, the API, stored choices."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.layers import wait_for_async
from tests.service.fake_allocator import FakeAllocator, count
from tests.service.real_hub import RealHub


def card(text: str, slug: str) -> str:
    """The HTML of one card."""
    found = re.search(
        rf'<div class="gs-card" data-profile="{slug}".*?(?=<div class="gs-card"|</fieldset>)',
        text,
        re.S,
    )
    assert found, text
    return found[0]


def radio(text: str, slug: str) -> str:
    """The radio button of one card."""
    found = re.search(r"<input type=\"radio\"[^>]*>", card(text, slug))
    assert found
    return " ".join(found[0].split())


async def test_the_form_shows_what_is_free(hub: RealHub, allocator: FakeAllocator) -> None:
    await hub.add_user("ada3")
    allocator.counts = [count("A", total=4, free=2, in_use=2), count("B", total=2, in_use=2)]
    async with hub.browser("ada3") as browser:
        page = await browser.get("spawn")
        assert page.status == 200
        assert "2 of 6 free" in card(page.text, "emulated")
        assert "checked" in radio(page.text, "emulated")
        assert "disabled" in radio(page.text, "huge")
        assert "The pool has 6 of the 8 × GPU that this needs." in card(page.text, "huge")
        assert "As of" in page.text
        assert "Lab &lt;b&gt;&amp;" in page.text
        assert "Lab <b>" not in page.text

        allocator.counts = [count("A", total=4, in_use=3, coming=1)]
        page = await browser.get("spawn")
        assert 'data-level="waiting"' in card(page.text, "emulated")
        assert "disabled" not in radio(page.text, "emulated")
        assert not re.search(r'<button type="submit"[^>]* disabled>Start', page.text)

        allocator.counts = [count("A", total=4, in_use=4)]
        page = await browser.get("spawn")
        assert "disabled" in radio(page.text, "emulated")
        assert "4 GPUs are in use." in card(page.text, "emulated")
        assert "Nothing can be started right now" in page.text
        assert re.search(r'<button type="submit"[^>]* disabled>Start', page.text)


async def test_the_form_does_without_the_allocator(hub: RealHub, allocator: FakeAllocator) -> None:
    await hub.add_user("bob3")
    async with hub.browser("bob3") as browser:
        allocator.answer("GET gpus/counts", 200, b"<html>")
        assert 'id="gs-unreachable"' in (await browser.get("spawn")).text
        await allocator.down()
        page = await browser.get("spawn")
        assert page.status == 200
        assert 'id="gs-unreachable"' in page.text
        assert "disabled" not in radio(page.text, "huge"), "what is not known forbids nothing"


async def test_the_form_starts_what_was_chosen(hub: RealHub, allocator: FakeAllocator) -> None:
    await hub.add_user("cyd3")
    async with hub.browser("cyd3") as browser:
        form = await browser.get("spawn")
        fields = {
            "profile": "choice",
            "profile-option-choice--image": "geo",
            "profile-option-choice--image--unlisted-choice": "",
        }
        page = await browser.submit(form, fields)
        assert "user/cyd3" in page.url or "spawn-pending/cyd3" in page.url
        await wait_for_async(lambda: allocator.leases, 10, "the lease")
        assert allocator.only().body["request"]["image"] == "geo"
        server = await hub.server("cyd3")
        assert server is not None
        assert server["user_options"] == {"profile": "choice", "image": "geo"}
        await hub.api("DELETE", "users/cyd3/server")
        # The last choice is selected again ...
        page = await browser.get("spawn")
        assert "checked" in radio(page.text, "choice")
        assert re.search(r'<option value="geo" selected', card(page.text, "choice"))
        # ... unless it cannot be had.
        allocator.counts = [count("A", total=4, in_use=4)]
        assert "checked" not in radio((await browser.get("spawn")).text, "choice")


async def test_a_link_starts_what_it_names(hub: RealHub, allocator: FakeAllocator) -> None:
    await hub.add_user("dan3")
    async with hub.browser("dan3") as browser:
        await browser.get("spawn?opt-profile=choice&opt-image=geo")
        await wait_for_async(lambda: allocator.leases, 10, "the lease")
        assert allocator.only().body["request"]["image"] == "geo"
        await hub.api("DELETE", "users/dan3/server")
        page = await browser.get("spawn?opt-profile=nope")
        assert page.status == 400
        assert "There is no profile &#39;nope&#39;" in page.text.replace("&#x27;", "&#39;")


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        ({"profile": "nope"}, 400, "There is no profile 'nope'; there are emulated, choice, huge."),
        ({"profile": "choice", "image": "nope"}, 400, "'nope' is no choice of 'Environment'"),
        ({"profile": "emulated", "gpus": "8"}, 400, "'gpus' is not an option"),
        ({"profile": "secret"}, 403, "The profile 'secret' is not open to you."),
        ({"profile": "choice", "image--unlisted-choice": "NO"}, 400, "cannot be 'NO'"),
    ],
)
async def test_form_and_api_refuse_alike(
    hub: RealHub, allocator: FakeAllocator, options: dict[str, str], status: int, text: str
) -> None:
    user = f"eve3-{abs(hash(tuple(options.items()))) % 10**8}"
    await hub.add_user(user)
    code, answer = await hub.api("POST", f"users/{user}/server", {"user_options": options})
    assert code == status
    assert text in answer["message"]
    async with hub.browser(user) as browser:
        form = await browser.get("spawn")
        profile = options["profile"]
        fields = {
            key if key == "profile" else f"profile-option-{profile}--{key}": value
            for key, value in options.items()
        }
        if "image--unlisted-choice" in options:
            fields[f"profile-option-{profile}--image"] = "unlisted-choice"
        page = await browser.submit(form, fields)
    assert page.status == status
    error = page.text.split('id="gs-error"')[1].split("</div>")[0]
    plain = re.sub(r"<[^>]*>", "", error).replace("&#39;", "'").replace("&#x27;", "'")
    assert answer["message"] in " ".join(plain.split())
    assert not allocator.called("POST leases")
    assert await hub.server(user) is None


@pytest.mark.parametrize(
    "options",
    [
        {"profile": True},
        {"profile": ["emulated"]},
        {"profile": "emulated", "memory_mib": -1},
        {"profile": "emulated", "cores": 1.5},
        {"x" * 300: "y" * 300},
        {"profile": {"$ne": None}},
        {"profile": None},
    ],
)
async def test_the_api_takes_no_odd_values(
    hub: RealHub, allocator: FakeAllocator, options: dict[str, Any]
) -> None:
    await hub.add_user("fay3")
    status, answer = await hub.api("POST", "users/fay3/server", {"user_options": options})
    assert status == 400
    assert answer["message"].endswith("Choose again on the start page.")
    assert not allocator.called("POST leases")


async def test_groups_open_profiles(hub: RealHub, allocator: FakeAllocator) -> None:
    await hub.add_user("gil3", "few")
    async with hub.browser("gil3") as browser:
        assert 'data-profile="secret"' in (await browser.get("spawn")).text
    await hub.api("POST", "users/gil3/server", {"user_options": {"profile": "secret"}})
    assert allocator.only().body["request"]["gpus"] == 0
    await hub.api("DELETE", "users/gil3/server")
    # The stored choice goes with the membership, and the next plain start says so.
    await hub.api("DELETE", "groups/few/users", {"users": ["gil3"]})
    async with hub.browser("gil3") as browser:
        assert 'data-profile="secret"' not in (await browser.get("spawn")).text
    more = allocator.hold("running")
    await hub.api("POST", "users/gil3/server")
    assert allocator.only().body["request"]["gpus"] == 1
    progress = await hub.listen("gil3")
    more.set()
    messages = [event.get("message", "") for event in await progress]
    assert (
        "Your last choice is no longer possible: The profile 'secret' is not open to you. "
        "Starting Emulated GPU."
    ) in messages
    await hub.api("DELETE", "users/gil3/server")


async def test_one_start_leaves_no_trace_in_the_next(
    hub: RealHub, allocator: FakeAllocator
) -> None:
    await hub.add_user("hal3")
    geo = {"user_options": {"profile": "choice", "image": "geo"}}
    allocator.refusal = {"status": 503, "reason": "capacity", "message": "Full."}
    await hub.api("POST", "users/hal3/server", geo)
    allocator.refusal = None
    await hub.api("POST", "users/hal3/server", {"user_options": {"profile": "emulated"}})
    assert allocator.only().body["request"]["image"] == "lab"
    await hub.api("DELETE", "users/hal3/server")
