"""The quickstart as a newcomer starts it, and a browser."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.layers import wait_for

CHECKOUT = Path(__file__).resolve().parents[2]
SHOTS = CHECKOUT / "tests" / "out" / "screenshots"
URL = "http://127.0.0.1:8000"
START_S = 1200  # a first start builds what the caches lack

# One GPU: the next user must wait for its diagnosis, and cannot be given another one.
HOST = """\
v: 1
nodes:
  - {id: 0, cores: 4, memory_mib: 4096, reserve_mib: 512}
gpus:
  - {address: "0000:41:00.0", node: 0, model: Emulated GPU 16M, memory_mib: 16}
"""

# Without these, headless Chromium talks to its maker at every start.
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass
class Quickstart:
    """A quickstart that runs, or ran."""

    state: Path
    output: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait for the login page."""
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                [
                    str(CHECKOUT / "deploy" / "quickstart"),
                    "--no-install",
                    "--state",
                    str(self.state),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        wait_for(self._answers, START_S, "the quickstart's login page", 0.5)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.output.read_text()[-4000:]
        try:
            with urlopen(URL + "/hub/login", timeout=2) as page:
                return bool(page.status == 200)
        except OSError:
            return False

    def stop(self) -> int:
        """Ctrl-C; its exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(300)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def secret(self, name: str) -> str:
        """A password as it was printed."""
        return (self.state / name).read_text().strip()


@pytest.fixture(scope="session")
def quickstart() -> Iterator[Quickstart]:
    """The quickstart, started once for this layer. Its folder lies outside pytest's own, which
    pytest closes to other accounts, QEMU's among them, at every start."""
    folder = Path(tempfile.mkdtemp(prefix="gs-quickstart-", dir="/var/tmp"))
    prepared = os.environ.get("GPUSPAWNER_TEST_QUICKSTART")
    if not prepared:
        pytest.exit("There is no prepared quickstart: run 'tests/run browser'.", returncode=4)
    state = Path(prepared)
    for path in state.iterdir():  # as after the first preparation, whatever a run has left
        if path.name not in ("venv", "images", "chp", "cache", "lock", ".gpuspawner-quickstart"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (state / "quickstart-host.yaml").write_text(HOST)
    one = Quickstart(state, folder / "output")
    try:
        one.start()
        yield one
    finally:
        if one.process is not None and one.process.poll() is None:
            one.stop()
        print(one.output.read_text()[-6000:])
        for log in sorted((state / "logs").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium."""
    program = shutil.which("chromium")
    if program is None:
        pytest.exit("Chromium is missing: run 'tests/run'.", returncode=4)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=CHROMIUM_ARGS)
        yield browser
        browser.close()
