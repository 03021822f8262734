"""``gpuspawner gpu``: the GPUs, and what an admin does with one."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from gpuspawner.cli.common import Json, Reason, ago, ask, build, fail, plain, show_json, show_table
from gpuspawner.schema import Gpu, GpuAction

app = typer.Typer(help="The GPUs of the pool.", no_args_is_help=True)

HostArgument = Annotated[str, typer.Argument(help="Name of its host.")]
AddressArgument = Annotated[
    str, typer.Argument(help="PCI address; 41:00.0 is short for 0000:41:00.0.")
]


@app.command("list")
def list_gpus(
    host: Annotated[str | None, typer.Option(help="Only those of this host.")] = None,
    state: Annotated[str | None, typer.Option(help="Only those in this state.")] = None,
    json: Json = False,
) -> None:
    """Show every GPU, its state and who has it."""
    gpus = [
        gpu
        for gpu in ask(lambda client: client.gpus())
        if host in (None, gpu.host) and state in (None, gpu.state)
    ]
    if json:
        show_json(gpus)
        return
    show_table(
        ("host", "address", "model", "node", "state", "for", "user", "note"),
        (
            (
                gpu.host,
                gpu.address,
                _model(gpu),
                gpu.node,
                gpu.state,
                ago(gpu.since),
                gpu.username,
                _note(gpu),
            )
            for gpu in gpus
        ),
        "No GPUs.",
    )


def _model(gpu: Gpu) -> str:
    already = "emulated" in gpu.model.lower()
    return f"{gpu.model} (emulated)" if gpu.emulated and not already else gpu.model


def _note(gpu: Gpu) -> str:
    parts = [gpu.reason] if gpu.reason else []
    parts += ["maintenance"] if gpu.maintenance else []
    parts += [f"held: {hold}" for hold in gpu.holds]
    parts += [f"attempt {gpu.attempt}"] if gpu.attempt else []
    return "; ".join([*parts, *gpu.problems])


def full_address(text: str) -> str:
    """The canonical PCI address: with its domain, in lower case."""
    text = text.strip().lower()
    return f"0000:{text}" if text.count(":") == 1 else text


def _act(
    action: Literal["enroll", "retest", "retire", "hold", "unhold"],
    host: str,
    address: str,
    reason: str,
    done: str,
    which: str | None = None,
) -> None:
    where = full_address(address)
    body = build(lambda: GpuAction(action=action, reason=reason, hold=which))
    gpu = ask(lambda client: client.gpu_action(host, where, body))
    typer.echo(f"{gpu.host} {gpu.address}: {done}; state {gpu.state} {plain(_note(gpu))}".rstrip())


@app.command()
def retest(host: HostArgument, address: AddressArgument, reason: Reason = "") -> None:
    """Wipe and diagnose a GPU again."""
    _act("retest", host, address, reason, "will be diagnosed")


@app.command()
def enroll(host: HostArgument, address: AddressArgument, reason: Reason = "") -> None:
    """Let a new GPU's next passed diagnosis be the record it is compared with from then on."""
    _act("enroll", host, address, reason, "will be enrolled")


@app.command()
def hold(host: HostArgument, address: AddressArgument, reason: Reason = "") -> None:
    """Give a GPU to nobody until it is unheld."""
    if not reason.strip():
        fail("Holding a GPU needs a reason that others can read: --reason 'fan is being swapped'.")
    _act("hold", host, address, reason, "held")


@app.command()
def unhold(
    host: HostArgument,
    address: AddressArgument,
    which: Annotated[
        str | None, typer.Option("--hold", help="Only this one, as 'gpu list' shows it.")
    ] = None,
    reason: Reason = "",
) -> None:
    """Take all holds away, or one of them."""
    _act("unhold", host, address, reason, "hold taken away", which)


@app.command()
def retire(
    host: HostArgument,
    address: AddressArgument,
    reason: Reason = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Take a GPU out of the pool for good."""
    if not yes:
        typer.confirm(f"Take {host} {full_address(address)} out of the pool for good?", abort=True)
    _act("retire", host, address, reason, "retired")
