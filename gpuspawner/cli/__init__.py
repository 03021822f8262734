"""``gpuspawner``: the admin's command line.

It talks to the allocator through the same client as the hub does, with the token that stands in
the state directory, so it is run on the allocator's machine by the user who may read that token.

Exit status: 0 done, 1 refused or failed (one sentence on standard error says why and what to do),
2 wrong usage.
"""

from __future__ import annotations

import typer

from gpuspawner.cli import (
    audit,
    backups,
    check,
    diagnoses,
    gpus,
    hosts,
    images,
    leases,
    limits,
    tokens,
)

app = typer.Typer(
    name="gpuspawner",
    help="Look after the pool of GPU hosts behind JupyterHub. The configuration is found by "
    "GPUSPAWNER_CONFIG, else at /etc/gpuspawner/gpuspawner_config.py.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("check")(check.check)
app.command("token")(tokens.token)
app.command("audit")(audit.audit)
app.command("backup")(backups.backup)
app.command("restore")(backups.restore)
app.add_typer(hosts.app, name="host")
app.add_typer(gpus.app, name="gpu")
app.add_typer(leases.app, name="lease")
app.add_typer(limits.app, name="limit")
app.add_typer(diagnoses.app, name="diagnosis")
app.add_typer(images.app, name="image")


def main() -> None:
    """Entry point of the command ``gpuspawner``."""
    app()
