"""Writes docs/configuration.md from the settings' own help texts.

    python docs/make_configuration.py          print the page
    python docs/make_configuration.py --write  write it

A unit test compares the page with what this prints.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from traitlets import TraitType
from traitlets.config import Configurable

from gpuspawner.allocator.app import Allocator
from gpuspawner.config import Installation
from gpuspawner.settings import GPUSpawnerSettings

PAGE = Path(__file__).resolve().parent / "configuration.md"

HEAD = """\
# Configuration

One file, `gpuspawner_config.py`, is read by the hub, by the allocator and by the command
`gpuspawner`. It is found by the environment variable `GPUSPAWNER_CONFIG`, else at
`/etc/gpuspawner/gpuspawner_config.py`. It is a traitlets file, as JupyterHub's own is:

```python
c.Installation.state_dir = "/var/lib/gpuspawner"
c.Allocator.db_url = "postgresql+psycopg:///gpuspawner"
```

The hub reads `jupyterhub_config.py` first and this file last, so what it says wins; any setting of
JupyterHub may stand in it too. The first lines of `jupyterhub_config.py` list the environment
variables and secret files that it takes. Restart the hub or the allocator after a change; users'
machines go on meanwhile.

What follows is made from the settings' own help texts by `docs/make_configuration.py`.
"""

SECTIONS: tuple[tuple[str, type[Configurable], str], ...] = (
    ("Installation", Installation, "What hub, allocator and command line share."),
    ("GPUSpawner", GPUSpawnerSettings, "The hub's side. All of `c.Spawner` may be set as well."),
    ("Allocator", Allocator, "The allocator."),
)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, owner, about in SECTIONS:
        parts.append(f"## {name}\n\n{about}\n")
        own = owner.class_own_traits(config=True)
        for trait_name, trait in own.items():
            parts.append(entry(name, trait_name, trait))
    return "\n".join(parts)


def entry(section: str, name: str, trait: TraitType) -> str:
    """One setting: its name, its default unless that depends on others, its help."""
    shown = trait.default_value
    usual = isinstance(shown, str | int | float) and shown != ""
    default = f" = {shown!r}" if usual else ""
    text = inspect.cleandoc(str(trait.help)).replace("``", "`")
    return f"### `c.{section}.{name}{default}`\n\n{fenced(text)}\n"


def fenced(text: str) -> str:
    """reStructuredText's indented literal blocks as Markdown's."""
    out: list[str] = []
    inside = False
    for line in text.split("\n"):
        if inside and line and not line.startswith(" "):
            while out and not out[-1]:
                out.pop()
            out += ["```", ""]
            inside = False
        if not inside and out and not line and out[-1].endswith("::"):
            out[-1] = out[-1].removesuffix("::") + ":"
            out += ["", "```text"]  # not "python": ruff would format it
            inside = True
            continue
        out.append(line.removeprefix("    ") if inside else line)
    return "\n".join([*out, "```"] if inside else out)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print(page(), end="")
