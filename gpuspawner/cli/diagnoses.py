"""``gpuspawner diagnosis``: what the service VM found."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

from gpuspawner.cli.common import Json, ago, ask, fail, plain, show_json, show_table
from gpuspawner.cli.gpus import full_address

app = typer.Typer(help="Runs of the service VM on a GPU.", no_args_is_help=True)


@app.command("list")
def list_diagnoses(
    host: Annotated[str | None, typer.Option(help="Only on this host.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Only of this PCI address.")] = None,
    json: Json = False,
) -> None:
    """Show the newest diagnoses."""
    filters = {
        key: value
        for key, value in (("host", host), ("gpu", full_address(gpu) if gpu else None))
        if value
    }
    diagnoses = ask(lambda client: client.diagnoses(**filters))
    if json:
        show_json(diagnoses)
        return
    show_table(
        ("diagnosis", "host", "gpu", "outcome", "age", "attempt", "reasons"),
        (
            (
                run.id,
                run.host,
                run.gpu,
                run.outcome or f"{run.state} {run.progress or ''}".strip(),
                ago(run.started_at),
                run.attempt,
                "; ".join(run.reasons),
            )
            for run in diagnoses
        ),
        "No diagnoses.",
    )


@app.command()
def show(
    diagnosis: Annotated[str, typer.Argument(help="Its id, or the beginning of it.")],
    json: Json = False,
) -> None:
    """Show one diagnosis whole: each check, its measurements, and what the host saw."""
    wanted = diagnosis.strip().lower()
    found = [
        run
        for run in ask(lambda client: client.diagnoses())
        if wanted and run.id.startswith(wanted)
    ]
    if len(found) != 1:
        what = "No diagnosis begins" if not found else f"{len(found)} diagnoses begin"
        fail(f"{what} with '{plain(diagnosis)}': see 'gpuspawner diagnosis list'.")
    run = found[0]
    if json:
        show_json(run)
        return
    typer.echo(f"{run.id}  {run.host} {run.gpu}  attempt {run.attempt}")
    typer.echo(f"outcome: {run.outcome or run.state}, under policy {run.policy_version}")
    for reason in run.reasons:
        typer.echo(f"reason:  {plain(reason)}")
    typer.echo("")
    show_table(
        ("check", "status", "seconds", "codes", "measured"),
        (
            (
                check.get("check"),
                check.get("status"),
                check.get("seconds"),
                " ".join(map(str, check.get("codes") or [])),
                _pairs(check.get("metrics")),
            )
            for check in run.checks
        ),
        "No check was reported.",
    )
    if run.witness:
        typer.echo(f"\nwitness: {_pairs(run.witness)}")


def _pairs(values: object) -> str:
    if not isinstance(values, dict):
        return ""
    return plain(
        ", ".join(
            f"{key}={value if isinstance(value, (str, int, float)) else json_module.dumps(value)}"
            for key, value in values.items()
        )
    )
