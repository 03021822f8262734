"""What the documentation says is there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import typer

from gpuspawner.cli import app

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
SCREENSHOTS = ROOT / "docs" / "images"


def test_the_configuration_page_is_current() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))["page"]()
    assert (ROOT / "docs" / "configuration.md").read_text() == made, (
        "run: python docs/make_configuration.py --write"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            path = page.parent / target
            # The browser tests take the screenshots.
            assert path.exists() or path.parent == SCREENSHOTS, target


def commands() -> dict[str, set[str]]:
    """Every command of ``gpuspawner`` with its verbs."""
    group = typer.main.get_command(app)
    return {
        name: set(getattr(command, "commands", {}))
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_documentation_exist(page: Path) -> None:
    known = commands()
    used = re.findall(r"(?m)(?:^|`)gpuspawner ([a-z]+)(?: ([a-z]+))?", page.read_text())
    for name, verb in used:
        assert name in known, f"gpuspawner {name}"
        assert not known[name] or verb in known[name], f"gpuspawner {name} {verb}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_in_the_documentation_exist(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
        assert re.search(rf"def {name}\(", (ROOT / file).read_text()), f"{file}::{name}"


def test_the_units_start_what_is_installed() -> None:
    units = "\n".join(path.read_text() for path in (ROOT / "deploy/systemd").glob("*.service"))
    started = set(re.findall(r"ExecStart=/opt/gpuspawner/bin/([\w-]+)", units))
    assert started == {"gpuspawner-allocator", "configurable-http-proxy", "jupyterhub"}
