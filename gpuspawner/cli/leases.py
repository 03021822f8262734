"""``gpuspawner lease``: who has which virtual machine."""

from __future__ import annotations

from typing import Annotated

import typer

from gpuspawner.cli.common import Json, Reason, ago, ask, fail, plain, show_json, show_table
from gpuspawner.client import AllocatorClient
from gpuspawner.schema import Lease

app = typer.Typer(help="Users' servers and what they hold.", no_args_is_help=True)


@app.command("list")
def list_leases(
    everything: Annotated[
        bool, typer.Option("--all", help="Those that have ended as well.")
    ] = False,
    user: Annotated[str | None, typer.Option(help="Only this user's.")] = None,
    json: Json = False,
) -> None:
    """Show the servers that run, start, stop or wait."""
    leases = [
        lease
        for lease in ask(lambda client: client.leases(ended=everything))
        if (everything or lease.state != "ended") and user in (None, lease.username)
    ]
    if json:
        show_json(leases)
        return
    show_table(
        ("lease", "user", "server", "state", "age", "host", "node", "gpus", "image", "note"),
        (
            (
                lease.id,
                lease.username,
                lease.server_name,
                lease.state,
                ago(lease.created_at),
                lease.host,
                lease.node,
                " ".join(lease.gpus) or lease.request.gpus,
                lease.request.image,
                lease.message or lease.reason,
            )
            for lease in leases
        ),
        "No leases.",
    )


@app.command()
def end(
    lease: Annotated[str, typer.Argument(help="Its id, or the beginning of it.")],
    reason: Reason = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Stop a user's server: it is shut down, and its GPUs are wiped and diagnosed."""
    found = ask(lambda client: find_lease(client, lease))
    if found is None:
        fail(f"No open lease begins with '{plain(lease)}': see 'gpuspawner lease list'.")
    whose = plain(f"{found.username} {found.server_name}".strip())
    if not yes:
        typer.confirm(f"Stop the server of {whose}? Unsaved work is lost.", abort=True)
    ended = ask(lambda client: client.end_lease(found.id, reason))
    typer.echo(f"{ended.id}: {ended.state}")


async def find_lease(client: AllocatorClient, beginning: str) -> Lease | None:
    """The one open lease whose id begins so.

    :raises ValueError: when there are several.
    """
    wanted = beginning.strip().lower()
    found = [
        lease
        for lease in await client.leases()
        if lease.state != "ended" and wanted and lease.id.startswith(wanted)
    ]
    if len(found) > 1:
        raise ValueError(f"{len(found)} leases begin with '{wanted}': give more of the id.")
    return found[0] if found else None
