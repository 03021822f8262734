"""``gpuspawner limit``: how many GPUs users and groups may hold at once."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from gpuspawner.cli.audit import audit
from gpuspawner.cli.common import Json, ask, fail, show_json, show_table

app = typer.Typer(help="How many GPUs users and groups may hold at once.", no_args_is_help=True)
app.command("audit")(audit)

Why = Annotated[str, typer.Option("--reason", "-r", help="Why; it stands in the audit for good.")]
Name = Annotated[str, typer.Argument(help="The user or group; nothing for the default.")]


class Kind(StrEnum):
    """Whom a limit is for."""

    DEFAULT = "default"
    USER = "user"
    GROUP = "group"


@app.command("list")
def list_limits(json: Json = False) -> None:
    """Show all limits. A user has her own, else the default; a group's is on all its members."""
    limits = ask(lambda client: client.limits())
    if json:
        show_json(limits)
        return
    show_table(
        ("for", "name", "gpus"),
        ((limit.kind, limit.name, limit.gpus) for limit in limits),
        "No limits: everybody may hold as many GPUs as there are.",
    )


@app.command("set")
def set_limit(kind: Kind, gpus: int, name: Name = "", reason: Why = "") -> None:
    """Set a limit, as in: gpuspawner limit set user 2 ada --reason "trains a model"."""
    _check(kind, name, reason)
    if gpus < 0:
        fail("A limit is 0 or more; take one away with 'gpuspawner limit clear'.")
    ask(lambda client: client.set_limit(kind, name, gpus, reason))
    typer.echo(f"limit {kind} {name}".rstrip() + f": {gpus}")


@app.command()
def clear(kind: Kind, name: Name = "", reason: Why = "") -> None:
    """Take a limit away. Servers that run go on either way."""
    _check(kind, name, reason)
    ask(lambda client: client.set_limit(kind, name, None, reason))
    typer.echo(f"limit {kind} {name}".rstrip() + ": none")


def _check(kind: Kind, name: str, reason: str) -> None:
    if (kind is Kind.DEFAULT) == bool(name):
        fail("Name the user or group after the number, and nobody for the default.")
    if not reason:
        fail("Say why with --reason: it stands in the audit.")
