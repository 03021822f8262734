"""Building the images in a process of its own, with a bar on terminals and lines elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.stack.say import Problem, line
from deploy.stack.tools import CHECKOUT

Show = Callable[[float, str], None]


def builder(python: Path, name: str) -> list[str]:
    """The command that builds an image of the project: ``gpuspawner image build``."""
    gpuspawner = str(python.parent / "gpuspawner")
    return [gpuspawner, "image", "build", name, "--progress", "json"]


def build(command: Sequence[str], name: str, out: Path, cache: Path, log: Path) -> None:
    """Build the image ``name`` below ``out`` unless it is there and current.

    :param command: takes ``--out`` and ``--cache``; reports progress as lines of JSON or not
        at all.
    :raises Problem: with the last lines of what the builder said.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    whole = [*command, "--out", str(out), "--cache", str(cache)]
    said: deque[str] = deque(maxlen=15)
    with log.open("a", encoding="utf-8") as record, shown(f"Building image '{name}'") as show:
        process = subprocess.Popen(
            whole,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=CHECKOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            for text in process.stdout:
                record.write(text)
                record.flush()
                event = parse(text)
                if event is None:
                    said.append(text.rstrip())
                elif event.state != "skip":
                    show(event.percent, event.text)
            status = process.wait()
        except BaseException:
            process.terminate()  # the builder clears up after itself
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise
        if status:
            tail = "\n".join(f"    | {text}" for text in said)
            raise Problem(
                f"The image '{name}' was not built (status {status}):\n{tail}\n",
                f"All of it: {log}",
            )


@dataclass(frozen=True)
class Event:
    """One report of the builder."""

    percent: float
    text: str
    state: str


def parse(text: str) -> Event | None:
    """The report in one line of the builder's output; ``None`` if it is something else."""
    try:
        said = json.loads(text)
        return Event(
            float(said["percent"]), f"{said['title']} {said['detail']}".strip(), said["state"]
        )
    except (ValueError, KeyError, TypeError):
        return None


@contextmanager
def shown(title: str) -> Iterator[Show]:
    """A bar with the step below way on a terminal; elsewhere a line for each new step."""
    if not sys.stdout.isatty():
        last = ""

        def show_line(percent: float, text: str) -> None:
            nonlocal last
            if text != last:
                line(f"      {percent:3.0f}%  {text}")
            last = text

        line(f"  ..  {title}")
        yield show_line
        line(f"  ok  {title}")
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("  ..  {task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
    )
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(title, total=100.0, detail="")

        def show(percent: float, text: str) -> None:
            bar.update(task, completed=percent, detail=text[:60])

        yield show
    line(f"  ok  {title}")
