"""Two browsers and one GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import SHOTS
from tests.browser.pool_pages import LastGpu
from tests.layers import wait_for
from tests.service.real_hub import PASSWORD

USERS = ("emmy", "lise")
AHEAD_MS = 1500  # both scripts wait for the same moment


@pytest.fixture
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LastGpu]:
    """One GPU, free."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    folder = tmp_path_factory.mktemp("race")
    (folder / "hub").mkdir()
    one = LastGpu(folder)
    try:
        one.start()
        yield one
    finally:
        one.stop()


def at_the_form(browser: Browser, pool: LastGpu, user: str, size: dict[str, int]) -> Page:
    """Somebody who looks at the start form."""
    page = browser.new_context(viewport=size).new_page()  # type: ignore[arg-type]
    page.set_default_timeout(30_000)
    page.goto(pool.url + "/hub/spawn")
    page.get_by_label("Username").fill(user)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    card = page.locator('.gs-card[data-profile="emulated"]')
    expect(card.locator(".gs-badge")).to_contain_text("1 of 1")
    return page


def reads(page: Page) -> str:
    """What stands on the page."""
    return page.locator("body").inner_text()


@pytest.mark.parametrize(
    "size",
    [{"width": 1280, "height": 900}, {"width": 390, "height": 844}],
    ids=["wide", "phone"],
)
def test_two_users_ask_for_the_last_gpu(
    browser: Browser, pool: LastGpu, size: dict[str, int]
) -> None:
    """Both forms show it as free and are sent at the same moment. One gets it; the other reads
    why not and what to do, and gets it once it is free again."""
    pages = {user: at_the_form(browser, pool, user, size) for user in USERS}
    moment = int(time.time() * 1000) + AHEAD_MS
    for page in pages.values():
        page.evaluate(
            """moment => setTimeout(
                () => document.getElementById("spawn_form").requestSubmit(), moment - Date.now()
            )""",
            moment,
        )
    gpu = wait_for(
        lambda: next((g for g in pool.do(pool.client.gpus()) if g.username), None),
        30,
        "somebody to have the GPU",
    )
    winner = gpu.username
    loser = next(user for user in USERS if user != winner)
    page = pages[loser]
    expect(page.locator("#gs-error, #gs-reason, #progress-message")).to_contain_text(
        "The only GPU is in use."
    )
    expect(page.locator("body")).to_contain_text("Try again when somebody has stopped")
    assert "Internal Server Error" not in reads(page)
    expect(page.locator("#gs-ended")).to_be_hidden()  # the form does not say it again
    again = page.get_by_role("link", name="Choose again").or_(
        page.get_by_role("button", name="Start")
    )
    expect(again.first).to_be_visible()
    width = "phone" if size["width"] < 500 else "wide"
    page.screenshot(path=SHOTS / f"race-loser-{width}.png", full_page=True)
    page.goto(pool.url + "/hub/spawn")
    card = page.locator('.gs-card[data-profile="emulated"]')
    expect(card.locator("input[type=radio]")).to_be_disabled()
    page.screenshot(path=SHOTS / f"race-loser-form-{width}.png", full_page=True)

    leases = pool.do(pool.client.leases())
    assert [(one.username, one.gpus) for one in leases if one.state != "ended"] == [
        (winner, [gpu.address])
    ]
    pool.do(pool.client.end_lease(leases[0].id, "the other one's turn"))
    wait_for(lambda: pool.do(pool.client.gpus())[0].state == "unassigned", 30, "the GPU to be free")
    page.reload()
    expect(card.locator(".gs-badge")).to_contain_text("1 of 1")
    page.get_by_role("button", name="Start").click()
    wait_for(lambda: pool.do(pool.client.gpus())[0].username == loser, 30, "the other one's server")
    for one in pages.values():
        one.context.close()
