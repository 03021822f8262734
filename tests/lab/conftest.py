"""One lab host and one pool for the whole run, and how long each step took."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from deploy.labhost import image
from deploy.labhost.running import Lab
from deploy.stack.say import Problem
from tests.lab.pool import LabPool

_steps: list[tuple[str, float]] = []
_faults: list[tuple[str, str, str, str, str]] = []


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Note how long a step took; all of them are shown at the end."""
    began = time.monotonic()
    try:
        yield
    finally:
        _steps.append((step, time.monotonic() - began))


def note(fault: str, host: str, state: str, reason: str, user: str) -> None:
    """A row of the fault table: what was done, what the host showed, what became of the GPU, the
    reason on record, what the user was told."""
    _faults.append((fault, host, state, reason, user))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The steps' times and the faults' table, whatever became of the tests."""
    for step, seconds in _steps:
        terminalreporter.write_line(f"lab: {seconds:6.1f} s  {step}")
    for row in _faults:
        cells = " | ".join(" ".join(cell.split()) for cell in row)
        terminalreporter.write_line(f"| {cells} |")


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A lab host that runs, its libvirt answering."""
    folder = Path(tempfile.mkdtemp(prefix="gs-lab-", dir="/var/tmp"))
    here = Lab(folder / "state")
    try:
        here.prepare()
        with timed("lab host: from its start to libvirt's answer over ssh"):
            here.start(image.built(Path(os.environ["GPUSPAWNER_CACHE"])))
        yield here
    except Problem as problem:
        pytest.exit(f"The lab host did not start: {problem}", returncode=4)
    finally:
        here.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pool(lab: Lab, images_dir: Path) -> AsyncIterator[LabPool]:
    """An allocator with the lab host in it."""
    folder = Path(tempfile.mkdtemp(prefix="gs-lab-pool-", dir="/var/tmp"))
    made = LabPool(folder, lab)
    made.use_image(images_dir / "service", "service")
    made.use_image(images_dir / "tiny")
    try:
        await asyncio.to_thread(made.start)
        with timed("host add: connection, network, pool and survey"):
            await made.add_lab()
        yield made
    finally:
        await made.remove()
        print(made.log.read_text()[-12000:])  # shown by pytest when a test fails
        shutil.rmtree(folder, ignore_errors=True)
