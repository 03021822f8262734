"""``gpuspawner host``: the machines of the pool."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from gpuspawner.checkup import CheckedGpu, Finding, HostCheck, Link
from gpuspawner.cli.common import Json, Reason, ask, build, fail, plain, show_json, show_table
from gpuspawner.cli.hardware import HardwareError, read_hardware
from gpuspawner.client import AllocatorClient
from gpuspawner.hardware import HostHardware
from gpuspawner.schema import AddHost, ChangeHost, Host

app = typer.Typer(help="The machines that carry GPUs.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The host's name in the pool.")]
BAD_LEVELS = frozenset({"error", "fatal"})


@app.command("list")
def list_hosts(json: Json = False) -> None:
    """Show every host, its state and what is free on each NUMA node."""
    hosts = ask(lambda client: client.hosts())
    if json:
        show_json(hosts)
        return
    show_table(
        ("host", "state", "kind", "accel", "gpus", "free cores", "free MiB", "images", "note"),
        (
            (
                host.name,
                "drained" if host.drained and host.state == "ready" else host.state,
                host.kind,
                host.accel,
                host.gpus,
                _per_node([f"{node.free_cores}/{node.cores}" for node in host.nodes]),
                _per_node([f"{node.free_mib}/{node.memory_mib}" for node in host.nodes]),
                len(host.images),
                host.reason,
            )
            for host in hosts
        ),
        "No hosts. Add one with 'gpuspawner host add NAME'.",
    )


def _per_node(values: list[str]) -> str:
    return " + ".join(values)


@app.command()
def add(
    name: Name,
    uri: Annotated[str, typer.Option(help="libvirt URI.")] = "qemu:///system",
    shell: Annotated[
        str,
        typer.Option(
            help="How to run a command there, e.g. 'ssh -o BatchMode=yes root@gpu1'. Empty: it is "
            "this machine. 'none': there is no way; the host is shown, and nothing of it given out."
        ),
    ] = "",
    cidr: Annotated[str, typer.Option(help="Addresses for its guests.")] = "10.201.0.0/24",
    network: Annotated[
        Literal["nat", "bridge"],
        typer.Option(help="nat: the hub runs on this host; bridge: the proxy routes to it."),
    ] = "nat",
    bridge: Annotated[str | None, typer.Option(help="Bridge on the host, for bridge.")] = None,
    accel: Annotated[
        Literal["auto", "kvm", "tcg"],
        typer.Option(help="auto boots a small machine to see whether KVM works."),
    ] = "auto",
    emulated: Annotated[
        Path | None,
        typer.Option(help="YAML file that declares an emulated host; no real GPU is touched."),
    ] = None,
    hardware: Annotated[
        Path | None,
        typer.Option(
            help="YAML file that says which devices are GPUs and what the host keeps for itself."
        ),
    ] = None,
    wait: Annotated[
        int, typer.Option(help="Seconds to wait until it is ready; 0 returns at once.")
    ] = 300,
) -> None:
    """Take a host into the pool and wait until it is surveyed."""
    if emulated and hardware:
        fail("An emulated host declares its own hardware: leave out --hardware or --emulated.")
    try:
        declaration = emulated.read_text() if emulated else None
        said = read_hardware(hardware) if hardware else HostHardware()
    except OSError as error:
        fail(f"{error.filename} cannot be read: {error.strerror}.")
    except HardwareError as error:
        fail(plain(error))
    body = build(
        lambda: AddHost(
            name=name,
            uri=uri,
            shell=None if shell == "none" else shlex.split(shell),
            cidr=cidr,
            network=network,
            bridge=bridge,
            accel=accel,
            emulated=declaration,
            hardware=said,
        )
    )

    async def go(client: AllocatorClient) -> Host:
        host = await client.add_host(body)
        return await wait_ready(client, host.name, wait) if wait else host

    host = ask(go)
    typer.echo(f"{host.name}: {host.state}{f', {plain(host.reason)}' if host.reason else ''}")
    if wait and host.state != "ready":
        fail(
            f"{host.name} is not ready after {wait} s. It stays in the pool and is tried again; "
            f"'gpuspawner host check {host.name}' says what is in the way."
        )


async def wait_ready(client: AllocatorClient, name: str, wait_s: float) -> Host:
    """The host once it is ready or unreachable, or as it is after ``wait_s`` seconds."""
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        host = next(host for host in await client.hosts() if host.name == name)
        if host.state != "new" or asyncio.get_running_loop().time() > deadline:
            return host
        await asyncio.sleep(0.5)


@app.command()
def drain(name: Name, reason: Reason = "") -> None:
    """Place nothing more on a host; what runs there goes on."""
    body = build(lambda: ChangeHost(drained=True, reason=reason))
    ask(lambda client: client.change_host(name, body))
    typer.echo(f"{name}: drained; its servers go on until they are stopped")


@app.command()
def undrain(name: Name, reason: Reason = "") -> None:
    """Place servers on a host again."""
    body = build(lambda: ChangeHost(drained=False, reason=reason))
    ask(lambda client: client.change_host(name, body))
    typer.echo(f"{name}: in use again")


@app.command()
def check(name: Name, json: Json = False) -> None:
    """Show a host's parts as they are now, and what to change; exit status 1 if anything stands
    in the way of using it."""
    found = ask(lambda client: client.check_host(name))
    if json:
        show_json(found)
    else:
        _show_parts(found)
        show_findings(found.findings)
    if any(finding.level in BAD_LEVELS for finding in found.findings):
        raise typer.Exit(1)


def _show_parts(found: HostCheck) -> None:
    """The machine, its nodes and its GPUs; nothing for a host that could not be asked."""
    for what, value in found.machine.items():
        typer.echo(f"{plain(what)}: {plain(value)}")
    if found.nodes:
        show_table(
            ("node", "cores", "cpus", "MiB", "free", "reserve", "for guests", "hugepages (free)"),
            (
                (
                    node.id, node.cores, node.cpus, node.memory_mib, node.free_mib,
                    node.reserve_mib, node.usable_mib,
                    ", ".join(
                        f"{pool.total} of {pool.kib // 1024} MiB ({pool.free})"
                        for pool in node.hugepages
                        if pool.total
                    ),
                )
                for node in found.nodes
            ),
            "",
        )  # fmt: skip
    if found.gpus:
        show_table(
            ("gpu", "model", "node", "group", "link", "port", "BARs", "reset", "driver", "pool"),
            (
                (
                    gpu.address,
                    f"{gpu.model} (emulated)" if gpu.emulated else gpu.model,
                    gpu.node,
                    f"{gpu.group}: {' '.join(gpu.functions)}",
                    _link(gpu.link),
                    f"{gpu.port} {_link(gpu.port_link)}".strip(),
                    " + ".join(f"{mib} MiB" for mib in gpu.bars_mib),
                    " ".join(gpu.reset_methods),
                    gpu.driver,
                    _in_pool(gpu),
                )
                for gpu in found.gpus
            ),
            "",
        )


def _link(link: Link) -> str:
    if not link.width:
        return ""
    now = f"{link.gts:g} GT/s x{link.width}"
    return f"{now} of {link.max_gts:g} x{link.max_width}" if link.max_width else now


def _in_pool(gpu: CheckedGpu) -> str:
    return "no, see below" if gpu.problems else gpu.state


def show_findings(findings: list[Finding]) -> None:
    """One line a finding, the remedy below it."""
    if not findings:
        typer.echo("nothing to complain about")
    for finding in findings:
        typer.echo(f"{finding.level:8} {plain(finding.text)}")
        if finding.remedy:
            typer.echo(f"{'':8} -> {plain(finding.remedy)}")
