"""Shared by all layers: what they need, where the images are, how long each layer took."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

from tests.layers import IMAGES_VARIABLE, LAYERS, layer_of, missing

_seconds: dict[str, float] = defaultdict(float)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before the first test: end the run with a sentence if a layer's needs are not met."""
    if session.config.option.collectonly:
        return
    lack = missing({layer_of(item.path) for item in session.items})
    if lack:
        pytest.exit(lack, returncode=4)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a test's set-up, call and tear-down to its layer."""
    _seconds[layer_of(TESTS_ROOT / report.nodeid.split("::")[0])] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line with the time of each layer that ran."""
    shown = [f"{layer} {_seconds[layer]:.1f} s" for layer in LAYERS if layer in _seconds]
    if shown:
        terminalreporter.write_line("layers: " + ", ".join(shown))


TESTS_ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def images_dir() -> Path:
    """Folder with the built images ``lab``, ``service`` and ``tiny``; ``tests/run`` builds it."""
    path = Path(os.environ.get(IMAGES_VARIABLE, ""))
    if not os.environ.get(IMAGES_VARIABLE) or not path.is_dir():
        pytest.exit(
            f"{IMAGES_VARIABLE} does not name a folder with built images: run 'tests/run'.",
            returncode=4,
        )
    return path
