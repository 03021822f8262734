"""What a newcomer and two users see, from the quickstart's start to its end."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import SHOTS, URL, Quickstart
from tests.layers import wait_for

PATTERN = "5345435245542d4f462d414441"
BOOT_MS = 400_000
SHOWN = ".jp-NotebookPanel:not(.lm-mod-hidden)"
OUTPUT = SHOWN + " .jp-OutputArea-output"


@pytest.fixture(autouse=True)
def shots() -> None:
    """A folder for the screenshots."""
    SHOTS.mkdir(parents=True, exist_ok=True)


def log_in(browser: Browser, quickstart: Quickstart, user: str, password: str = "password") -> Page:
    """A browser of her own for a user who has just logged in."""
    page = browser.new_context(viewport={"width": 1280, "height": 720}).new_page()
    page.set_default_timeout(60_000)
    page.goto(URL)
    page.get_by_label("Username").fill(user)
    page.get_by_label("Password").fill(quickstart.secret(password))
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/hub/**")
    return page


def gpu(quickstart: Quickstart) -> dict[str, object]:
    """The one GPU, as an admin's script sees it."""
    request = Request(
        "http://127.0.0.1:8091/services/gpu/api/v1/gpus",
        headers={"Authorization": f"Bearer {quickstart.secret('spawner.token')}"},
    )
    with urlopen(request, timeout=10) as answer:
        found: dict[str, object] = json.load(answer)["gpus"][0]
    return found


def start_server(page: Page) -> None:
    """Choose the profile that is chosen already and start."""
    page.goto(URL + "/hub/spawn")
    page.get_by_role("button", name="Start").click()


def kernel_ready(page: Page, notebook: str) -> None:
    """JupyterLab silently leaves out a cell that is run before. Its toolbar says "idle" of a
    kernel that it does not know yet; the status bar does not."""
    bar = page.get_by_role("contentinfo", name="Bottom Panel")
    expect(bar.get_by_text(notebook, exact=True)).to_be_visible(timeout=60_000)
    expect(bar.get_by_role("button", name="Python 3 (ipykernel) | Idle")).to_be_visible(
        timeout=180_000
    )


def see_welcome(page: Page) -> None:
    """The welcome notebook is what opens first, and its kernel is ready."""
    expect(page.get_by_role("tab", name="ndvi.ipynb")).to_be_visible(timeout=180_000)
    expect(page.get_by_role("heading", name="NDVI from a Landsat 7 scene")).to_be_visible(
        timeout=120_000
    )
    kernel_ready(page, "ndvi.ipynb")


def run_welcome(page: Page) -> None:
    """All its cells, as the text tells her to, and the map comes."""
    cells = page.locator(SHOWN + " .jp-CodeCell")
    prompts = cells.locator(".jp-InputPrompt")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    try:
        expect(prompts.last).to_have_text(re.compile(r"\[\d+\]"), timeout=300_000)
    except AssertionError as error:
        page.screenshot(path=SHOTS / "welcome-failed.png")
        seen = [*prompts.all_inner_texts(), *page.locator(OUTPUT).all_inner_texts()]
        dialogs = page.locator(".jp-Dialog").all_inner_texts()
        raise AssertionError(f"the cells did not run: {seen}, {dialogs}") from error
    assert "Emulated GPU 16M" in cells.last.locator(".jp-OutputArea-output").inner_text()
    picture = page.locator(OUTPUT + " img")
    expect(picture).to_have_count(1)
    picture.scroll_into_view_if_needed()
    assert picture.evaluate("one => one.naturalWidth") > 1000


def open_notebook(page: Page) -> None:
    """A new notebook whose kernel is ready."""
    page.keyboard.press("Control+Shift+L")
    expect(page.locator(".jp-Launcher")).to_be_visible(timeout=60_000)
    page.locator('.jp-LauncherCard[data-category="Notebook"]').first.click()
    expect(page.get_by_role("tab", name="Untitled.ipynb")).to_be_visible(timeout=120_000)
    expect(page.locator(SHOWN + " .cm-content").first).to_be_visible(timeout=120_000)
    kernel_ready(page, "Untitled.ipynb")


def run_cell(page: Page, code: str) -> str:
    """Type into the notebook's last cell, run it, and return its output."""
    cell = page.locator(SHOWN + " .jp-CodeCell").last
    cell.locator(".cm-content").click()
    page.keyboard.type(code)
    page.keyboard.press("Shift+Enter")
    output = page.locator(SHOWN + " .jp-CodeCell").filter(has_text=code[:30]).last
    area = output.locator(".jp-OutputArea-output")
    expect(area.first).to_be_visible(timeout=180_000)
    expect(output.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]"), timeout=180_000)
    return "\n".join(area.all_inner_texts())


def test_the_whole_loop(browser: Browser, quickstart: Quickstart) -> None:
    """Log in, choose, watch, work, stop; the next user gets the GPU only after its diagnosis,
    sees meanwhile what she waits for, and finds nothing of the first one's."""
    wait_for(lambda: gpu(quickstart)["state"] == "unassigned", 180, "the first diagnosis", 0.5)
    ada = log_in(browser, quickstart, "ada")
    ada.goto(URL + "/hub/spawn")
    card = ada.locator('.gs-card[data-profile="emulated"]')
    expect(card.locator(".gs-badge")).to_contain_text("1 of 1")
    ada.screenshot(path=SHOTS / "form.png")
    ada.get_by_role("button", name="Start").click()

    log = ada.locator("#progress-log, .progress-log").first
    expect(ada.locator("body")).to_contain_text("GPU 0000:41:00.0", timeout=60_000)
    expect(log).to_contain_text("Starting the virtual machine", timeout=60_000)
    expect(log).to_contain_text("Your home is attached", timeout=BOOT_MS)
    ada.locator("#progress-details").evaluate("one => { one.open = true }")
    ada.screenshot(path=SHOTS / "progress.png")
    ada.wait_for_url("**/user/ada/lab**", timeout=BOOT_MS)
    assert gpu(quickstart)["state"] == "assigned"
    see_welcome(ada)
    ada.screenshot(path=SHOTS / "welcome.png")
    run_welcome(ada)
    ada.screenshot(path=SHOTS / "welcome-map.png")
    open_notebook(ada)
    assert "Emulated GPU 16M" in run_cell(ada, "!gpuspawner-gpu")
    run_cell(ada, f"!gpuspawner-gpu write 8388608 {PATTERN} && echo written")
    assert PATTERN in run_cell(ada, f"!gpuspawner-gpu read 8388608 {len(PATTERN) // 2}")
    ada.screenshot(path=SHOTS / "lab.png")

    bob = log_in(browser, quickstart, "bob")
    bob.goto(URL + "/hub/spawn")
    busy = bob.locator('.gs-card[data-profile="emulated"]')
    expect(busy.locator(".gs-badge")).not_to_contain_text("1 of 1")
    expect(busy.locator("input[type=radio]")).to_be_disabled()
    bob.screenshot(path=SHOTS / "form-busy.png")

    ada.goto(URL + "/hub/home")
    ada.get_by_role("link", name="Stop My Server").or_(
        ada.get_by_role("button", name="Stop My Server")
    ).click()
    wait_for(lambda: gpu(quickstart)["state"] in ("used", "diagnosing"), 200, "the stop", 0.05)
    start_server(bob)
    expect(bob.locator("body")).to_contain_text("being wiped and checked", timeout=30_000)
    assert gpu(quickstart)["state"] in ("used", "diagnosing", "reserved")
    bob.screenshot(path=SHOTS / "waiting.png")
    bob.wait_for_url("**/user/bob/lab**", timeout=BOOT_MS)
    assert gpu(quickstart)["username"] == "bob"
    see_welcome(bob)
    open_notebook(bob)
    read = run_cell(bob, f"!gpuspawner-gpu read 8388608 {len(PATTERN) // 2}")
    assert PATTERN not in read
    assert "00" * (len(PATTERN) // 2) in read


def test_ctrl_c_leaves_nothing_and_the_second_start_is_quick(
    quickstart: Quickstart, tmp_path: Path
) -> None:
    """With a server still running: Ctrl-C shuts it down; no process, domain, network, bridge or
    mount stays, homes do. The second start finds everything in place."""
    assert quickstart.stop() == 0, quickstart.output.read_text()[-3000:]
    state = str(quickstart.state)
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    left = [
        line for line in processes.stdout.splitlines() if state in line and "ps -eo" not in line
    ]
    assert left == []
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True)
    assert not [
        line for line in links.stdout.splitlines() if line.startswith(("gs", "virbr", "vnet"))
    ]
    assert state not in Path("/proc/self/mounts").read_text()
    assert list((quickstart.state / "pool").glob("*/home-*")), "homes are kept"

    quickstart.output.write_text("")
    quickstart.start()
    again = quickstart.output.read_text()
    assert "Installing" not in again, again
    assert "Unpacking the base" not in again, again
    assert quickstart.stop() == 0
