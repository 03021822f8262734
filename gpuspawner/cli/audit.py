"""``gpuspawner audit``: what admins did to the pool, its limits and users' servers."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuspawner.cli.common import Json, ago, ask, show_json, show_table


def audit(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many lines.")] = 200,
    before: Annotated[
        int | None, typer.Option(min=0, help="Only lines older than the one with this id.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what admins did, who, when and why, newest first."""
    entries = ask(lambda client: client.audit(limit=limit, before=before))
    if json:
        show_json(entries)
        return
    show_table(
        ("id", "age", "who", "what", "old", "new", "why"),
        ((one.id, ago(one.at), one.who, one.what, one.old, one.new, one.why) for one in entries),
        "Nothing older." if before is not None else "No admin has done anything yet.",
    )
    if len(entries) == limit:
        typer.echo(f"Older ones: gpuspawner audit --before {entries[-1].id}", err=True)
