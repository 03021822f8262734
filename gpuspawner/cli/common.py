"""What all commands share: asking the allocator, tables, JSON, and errors as sentences."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuspawner.client import AllocatorClient, AllocatorError, AllocatorUnreachable
from gpuspawner.config import ConfigError, Installation, installation

T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Reason = Annotated[str, typer.Option("--reason", "-r", help="Why; kept and shown to others.")]

# Without a terminal nobody wants a table cut at 80 columns.
WIDTH_OF_PIPES = 250


def console() -> Console:
    """Standard output as rich sees it now (tests and pipes replace it)."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_OF_PIPES, highlight=False)


def plain(value: object) -> str:
    """Text that is safe on a terminal: what a host or a user named cannot move the cursor."""
    return "".join(c if c.isprintable() else "�" for c in str(value))


def fail(message: str) -> NoReturn:
    """One sentence on standard error, exit status 1."""
    typer.echo(f"gpuspawner: {message}", err=True)
    raise typer.Exit(1)


def settings() -> Installation:
    """The configuration; a broken file ends the command."""
    try:
        return installation()
    except ConfigError as error:
        fail(str(error))


def ask(question: Callable[[AllocatorClient], Awaitable[T]]) -> T:
    """Run ``question`` with a client for the configured allocator and return its answer.

    A refusal, an allocator that cannot be reached and a missing token end the command.
    """
    config = settings()

    async def run() -> T:
        async with AllocatorClient(config.allocator_url, config.spawner_token()) as client:
            return await question(client)

    try:
        return asyncio.run(run())
    except AllocatorUnreachable as error:
        fail(f"{error}. Is it running, and is allocator_url right? 'gpuspawner check' looks.")
    except AllocatorError as error:
        fail(plain(error.refusal.message))
    except (ConfigError, ValueError) as error:
        fail(_first_line(error))


def build(make: Callable[[], T]) -> T:
    """Make a message; what the schema refuses ends the command with the field's name."""
    try:
        return make()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        fail(f"{where}: {first['msg']}")


def _first_line(error: Exception) -> str:
    return plain((str(error) or type(error).__name__).splitlines()[0])


def show_json(value: BaseModel | Sequence[BaseModel] | Any) -> None:
    """Indented JSON on standard output."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    elif isinstance(value, list):
        value = [x.model_dump(mode="json") if isinstance(x, BaseModel) else x for x in value]
    typer.echo(json.dumps(value, indent=2))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> None:
    """A table, or the sentence ``empty`` when it would have no rows."""
    rows = list(rows)
    if not rows:
        typer.echo(empty)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name.upper(), overflow="fold")
    for row in rows:
        table.add_row(*(Text("-" if cell in (None, "") else plain(cell)) for cell in row))
    console().print(table)


def ago(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago, in the unit that says enough: ``45 s``, ``12 min``, ``3 h``, ``5 d``."""
    if moment is None:
        return "-"
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    seconds = max(0, int(((now or datetime.now(UTC)) - moment).total_seconds()))
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds // size} {unit}"
    return f"{seconds // 86400} d"
