"""The allocator's pages in a browser: looks, live changes, keyboard, phone, accessibility."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from tests.browser.conftest import SHOTS
from tests.browser.pool_pages import PREFIX, PoolPages
from tests.layers import wait_for
from tests.service.real_hub import PASSWORD

AXE_VARIABLE = "GPUSPAWNER_TEST_AXE"
HOST = "gpu-host-1"
WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolPages]:
    """One pool for all tests here."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    folder = tmp_path_factory.mktemp("pages")
    (folder / "hub").mkdir()
    one = PoolPages(folder)
    try:
        one.start()
        yield one
    finally:
        one.stop()


@pytest.fixture(scope="module")
def axe() -> str:
    """axe-core's source."""
    path = Path(os.environ.get(AXE_VARIABLE) or "/nowhere")
    if not path.is_file():
        pytest.exit(f"{AXE_VARIABLE} does not name axe-core's script: run 'tests/run'.", 4)
    return path.read_text()


def log_in(
    browser: Browser, pool: PoolPages, user: str, size: dict[str, int] | None = None, **kind: Any
) -> Page:
    """Somebody's browser, on the page of her servers. Errors in its console fail the test."""
    context = browser.new_context(viewport=size or WIDE, **kind)  # type: ignore[arg-type]
    contexts.append(context)
    page = context.new_page()
    page.set_default_timeout(15_000)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda line: complaints.append(line.text) if line.type == "error" else None,
    )
    page.goto(pool.url + PREFIX)
    page.get_by_label("Username").fill(user)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(pool.url + PREFIX)
    return page


complaints: list[str] = []
contexts: list[BrowserContext] = []


@pytest.fixture(autouse=True)
def quiet_console() -> Iterator[None]:
    """Nothing was blocked by the content policy and no script failed."""
    complaints.clear()
    yield
    while contexts:
        contexts.pop().close()
    assert complaints == []


def live(page: Page) -> Locator:
    """Wait until the page is live."""
    sign = page.locator("#gs-live")
    expect(sign).to_have_attribute("data-state", "live")
    return sign


def no_sideways(page: Page) -> None:
    """Nothing sticks out to the right."""
    wide, there = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide <= there


def shoot(page: Page, name: str) -> None:
    """A picture of the whole page, for people."""
    page.screenshot(path=SHOTS / f"pages-{name}.png", full_page=True)


def test_a_user_sees_and_stops_her_server(browser: Browser, pool: PoolPages) -> None:
    page = log_in(browser, pool, "ada")
    live(page)
    expect(page.locator("#mine-title + .gs-empty")).to_contain_text("You have no server now")
    lease = pool.server_of("ada")
    card = page.locator(f'[data-lease="{lease.id}"]')
    expect(card).to_contain_text("running")  # without loading the page again
    expect(card.get_by_role("link", name="Open")).to_have_attribute("href", "/user/ada/")
    shoot(page, "user")
    card.get_by_role("link", name="Stop").click()
    dialog = page.locator("#gs-dialog")
    expect(dialog).to_contain_text("What is not saved is lost")
    shoot(page, "user-stop")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(card.get_by_role("link", name="Stop")).to_be_focused()
    page.keyboard.press("Enter")
    dialog.get_by_role("button", name="Stop it").click()
    expect(page.locator("#gs-flash")).to_contain_text("Your server is being stopped")
    expect(page.locator("#gs-flash")).to_be_focused()
    expect(page.locator("#gs-last")).to_contain_text("Your last server ended")
    shoot(page, "user-ended")


def test_the_pool(browser: Browser, pool: PoolPages) -> None:
    page = log_in(browser, pool, "root")
    page.get_by_role("link", name="GPU pool").click()
    live(page)
    failed = page.locator(f'[data-key="{HOST}-{pool.failed}"]')
    expect(failed).to_contain_text("failed")
    expect(page.locator("#host-gpu-host-2")).to_contain_text("drained")
    expect(page.locator("#host-gpu-host-3")).to_contain_text("was lost")
    shoot(page, "admin")
    no_sideways(page)

    page.get_by_role("searchbox").fill("katherine")
    expect(page.locator("[data-tile]:visible")).to_have_count(2)
    expect(page.locator("#gs-found")).to_have_text("2 of 10 GPUs")
    assert "q=katherine" in page.url
    page.get_by_role("searchbox").fill("")
    page.get_by_role("button", name=re.compile("failed")).click()
    expect(page.locator("[data-tile]:visible")).to_have_count(1)

    # A change comes in while somebody types: the filter, the focus and the text stay.
    page.get_by_role("searchbox").focus()
    pool.do(pool.client.gpu_action(HOST, pool.held, "hold", "second hold"))
    pool.do(pool.client.gpu_action(HOST, pool.failed, "hold", "look at it"))
    expect(failed).to_contain_text("look at it")
    expect(page.get_by_role("searchbox")).to_be_focused()
    expect(page.locator("[data-tile]:visible")).to_have_count(1)
    shoot(page, "admin-filtered")
    pool.do(pool.client.gpu_action(HOST, pool.failed, "unhold", ""))


def test_a_gpu(browser: Browser, pool: PoolPages) -> None:
    page = log_in(browser, pool, "root")
    page.goto(f"{pool.url}{PREFIX}admin/gpus/{HOST}/{pool.failed}")
    live(page)
    main = page.locator("main")
    for text in ("BIT_FLIP", "8 388 608", "Check read_back failed", "answers on the bus"):
        expect(main).to_contain_text(text)
    page.get_by_text("The service VM's console").click()
    expect(page.locator(".gs-console")).to_be_visible()
    shoot(page, "gpu")
    no_sideways(page)

    # Open details outlive a change.
    page.get_by_role("link", name="Hold", exact=True).click()
    page.get_by_role("button", name="Hold").click()  # without a reason nothing is sent
    expect(page.locator("#gs-dialog")).to_be_visible()
    page.get_by_label("Reason").fill("<b>for later</b>")
    shoot(page, "gpu-hold")
    page.keyboard.press("Escape")
    pool.do(pool.client.gpu_action(HOST, pool.failed, "hold", "<b>for later</b>"))
    expect(main).to_contain_text("Held: <b>for later</b>")
    expect(page.locator(".gs-console")).to_be_visible()

    page.get_by_role("link", name="Take hold away").click()
    page.get_by_role("button", name="Take hold away").click()
    expect(page.locator("#gs-flash")).to_contain_text("The hold is taken away")
    page.goto(f"{pool.url}{PREFIX}admin/gpus/{HOST}/{pool.diagnosing}")
    expect(main).to_contain_text("overwrite 40 %")
    shoot(page, "gpu-diagnosing")


def test_by_keyboard(browser: Browser, pool: PoolPages) -> None:
    """Drain a host without a mouse: everything that has the focus can be seen to have it."""
    page = log_in(browser, pool, "root")
    page.goto(pool.url + PREFIX + "admin")
    live(page)
    page.keyboard.press("Tab")
    expect(page.locator(".gs-skip")).to_be_focused()
    page.keyboard.press("Enter")
    drain = page.get_by_role("link", name=f"Drain: {HOST}")
    walked = []
    for _ in range(60):
        page.keyboard.press("Tab")
        here = page.locator(":focus")
        walked.append(here.evaluate("n => n.outerHTML.slice(0, 80)"))
        assert here.evaluate("n => getComputedStyle(n).outlineStyle") != "none", walked[-1]
        if drain.evaluate("n => n === document.activeElement"):
            break
    else:
        raise AssertionError(f"the focus never came to the host's button: {walked}")
    page.keyboard.press("Enter")
    dialog = page.locator("#gs-dialog")
    expect(dialog).to_be_visible()
    expect(dialog.get_by_label("Reason")).to_be_focused()
    page.keyboard.type("fans are swapped")
    page.keyboard.press("Tab")
    expect(dialog.get_by_role("button", name="Drain")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#gs-flash")).to_contain_text(f"Host {HOST} takes no new servers")
    expect(page.locator(f"#host-{HOST}")).to_contain_text("drained")
    page.get_by_role("link", name=f"Undrain: {HOST}").press("Enter")
    dialog.get_by_role("button", name="Undrain").press("Enter")
    expect(page.locator("#gs-flash")).to_contain_text("takes servers again")


def test_limits(browser: Browser, pool: PoolPages) -> None:
    """Seen, set, changed and removed by keyboard; a second admin's page follows."""
    pool.user("root2", "gpu-admins")
    other = log_in(browser, pool, "root2")
    other.goto(pool.url + PREFIX + "admin/limits")
    live(other)
    page = log_in(browser, pool, "root")
    page.get_by_role("link", name="Limits").press("Enter")
    live(page)
    group = page.locator('[data-key="group-sar-lab"]')
    expect(group).to_contain_text("3 (full)")
    expect(group).to_contain_text("what the group has paid for")
    shoot(page, "limits")
    no_sideways(page)

    page.get_by_role("link", name="Limit a user").press("Enter")
    dialog = page.locator("#gs-dialog")
    expect(dialog.get_by_label("Name of the user")).to_be_focused()
    page.keyboard.type("ada")
    page.keyboard.press("Tab")
    page.keyboard.type("1")
    page.keyboard.press("Tab")
    page.keyboard.type("a first try <b>")
    shoot(page, "limit-user")
    page.keyboard.press("Enter")
    expect(page.locator("#gs-flash")).to_contain_text("User ada: at most 1 GPU at once.")
    expect(page.locator("#gs-flash")).to_be_focused()
    row = page.locator('[data-key="user-ada"]')
    expect(row).to_contain_text("root: a first try <b>")
    expect(other.locator('[data-key="user-ada"]')).to_contain_text("a first try")

    row.get_by_role("link", name="Change").press("Enter")
    expect(dialog.get_by_label("GPUs at once")).to_have_value("1")
    dialog.get_by_label("GPUs at once").fill("2")
    dialog.get_by_role("button", name="Set").press("Enter")  # without a reason nothing is sent
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(row.get_by_role("link", name="Change")).to_be_focused()

    row.get_by_role("link", name="Remove").press("Enter")
    expect(dialog).to_contain_text("The default then holds for her: 2 GPUs at once.")
    page.keyboard.type("it went well")
    shoot(page, "limit-remove")
    page.keyboard.press("Enter")
    expect(page.locator("#gs-flash")).to_contain_text("User ada: the limit is removed.")
    expect(row).to_have_count(0)
    expect(other.locator('[data-key="user-ada"]')).to_have_count(0)


def test_the_audit(browser: Browser, pool: PoolPages) -> None:
    """Newest first and live; older lines are a key away."""
    page = log_in(browser, pool, "root")
    page.get_by_role("link", name="Audit").press("Enter")
    live(page)
    for number in range(60):
        pool.do(pool.client.set_limit("group", "course", number, f"seat {number}"))
    expect(page.locator("tbody tr").first).to_contain_text("58 → 59")
    expect(page.locator("tbody tr").first).to_contain_text("seat 59")
    shoot(page, "audit")
    no_sideways(page)
    page.get_by_role("link", name="Older").press("Enter")
    expect(page.locator("main")).to_contain_text("add host gpu-host-1")
    expect(page.locator("main")).not_to_contain_text("seat 59")
    expect(page.locator("main")).to_contain_text("fan is being swapped")
    shoot(page, "audit-older")
    page.get_by_role("link", name="Newest").press("Enter")
    expect(page.locator("main")).to_contain_text("seat 59")
    pool.do(pool.client.set_limit("group", "course", None, "the course is over"))


def test_a_user_at_her_limit(browser: Browser, pool: PoolPages) -> None:
    """What she holds of it follows what she does, and she reads what to do."""
    pool.user("maria", "sar-lab")
    page = log_in(browser, pool, "maria", PHONE)
    live(page)
    limit = page.locator('[data-part="limit"]')
    expect(limit).to_contain_text("You hold 0 of the 2 GPUs that you may hold at once.")
    expect(limit).to_contain_text("your group sar-lab hold 3 of the 3 GPUs")
    expect(limit).to_contain_text("To start one more, one of them has to stop.")
    shoot(page, "user-limit-phone")
    no_sideways(page)
    pool.do(pool.client.set_limit("group", "sar-lab", 9, "a test"))
    expect(limit).to_contain_text("your group sar-lab hold 3 of the 9 GPUs")
    pool.do(pool.client.set_limit("group", "sar-lab", 3, "a test"))


def test_it_says_when_it_is_not_live(browser: Browser, pool: PoolPages) -> None:
    page = log_in(browser, pool, "root")
    page.goto(pool.url + PREFIX + "admin")
    sign = live(page)
    page.route("**/pages/events*", lambda route: route.abort())
    page.reload()
    expect(sign).to_have_attribute("data-state", "slow")
    expect(sign).to_contain_text("Not live")
    pool.do(pool.client.gpu_action(HOST, pool.held, "hold", "seen by polling"))
    expect(page.locator(f'[data-key="{HOST}-{pool.held}"]')).to_be_visible()
    page.route("**/admin?fragment=*", lambda route: route.abort())
    expect(sign).to_have_attribute("data-state", "out", timeout=25_000)
    expect(sign).to_contain_text("does not answer. As of")
    page.unroute("**/admin?fragment=*")
    page.unroute("**/pages/events*")
    expect(sign).to_have_attribute("data-state", "live", timeout=25_000)
    complaints.clear()  # the browser's own words about the requests cut off above


def test_logged_out_while_looking(browser: Browser, pool: PoolPages) -> None:
    page = log_in(browser, pool, "root")
    page.goto(pool.url + PREFIX + "admin")
    sign = live(page)
    page.context.clear_cookies()
    pool.do(pool.client.gpu_action(HOST, pool.held, "hold", "after the logout"))
    expect(sign).to_contain_text("you are logged out")
    expect(sign.get_by_role("link", name="load the page again")).to_be_visible()
    complaints.clear()


PLACES = {
    "user": "",
    "admin": "admin",
    "gpu": "admin/gpus/gpu-host-1/{failed}",
    "question": "admin/gpus/gpu-host-1/{failed}/retire",
    "missing": "nothing-here",
    "limits": "admin/limits",
    "limit-user": "admin/limits/user/set",
    "limit-remove": "admin/limits/user/clear?name=katherine",
    "audit": "admin/audit",
    "audit-older": "admin/audit?before=4",
}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_nobody_is_shut_out(
    browser: Browser, pool: PoolPages, axe: str, theme: Any, size: dict[str, int]
) -> None:
    """axe-core finds nothing serious, and nothing sticks out."""
    page = log_in(browser, pool, "root", size, color_scheme=theme)
    found: list[str] = []
    for name, path in PLACES.items():
        page.goto(pool.url + PREFIX + path.format(failed=pool.failed))
        if page.locator("#gs-live").count():
            live(page)
        for details in page.locator("main details").all():
            details.evaluate("n => { n.open = true }")
        shoot(page, f"{name}-{'phone' if size is PHONE else 'wide'}-{theme}")
        no_sideways(page)
        page.evaluate(axe)
        for finding in page.evaluate("axe.run()")["violations"]:
            if finding["impact"] in ("serious", "critical"):
                where = [node["html"][:160] for node in finding["nodes"][:4]]
                found.append(f"{name}: {finding['id']}: {finding['help']}: {where}")
    assert found == []
    page.close()
    # axe tries inline styles, which the policy blocks; the other tests see to our own.
    complaints[:] = [line for line in complaints if not re.search("404|inline style", line)]


def test_the_filter_is_quick_to_reach(browser: Browser, pool: PoolPages) -> None:
    """A link with a filter in it opens filtered."""
    page = log_in(browser, pool, "root")
    page.goto(pool.url + PREFIX + "admin?q=katherine")
    wait_for(lambda: page.locator("[data-tile]:visible").count() == 2, 10, "the filter")
