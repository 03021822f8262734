"""``gpuspawner check``: before a start, what would keep the installation from working."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from traitlets.config.loader import Config, PyFileConfigLoader

from gpuspawner.checkup import Finding
from gpuspawner.cli.common import Json, show_json
from gpuspawner.cli.hosts import show_findings
from gpuspawner.cli.images import read_manifests
from gpuspawner.cli.tokens import PROXY_TOKEN, SERVICE_TOKEN
from gpuspawner.client import AllocatorClient, AllocatorProblem
from gpuspawner.config import ConfigError, Installation, config_path, installation
from gpuspawner.hub_url import hub_url_problem

NEEDED_IMAGES = ("lab", "service")
LIBVIRT_DEADLINE_S = 15.0
HUB_CONFIGS = ("jupyterhub_config.py", "/etc/jupyterhub/jupyterhub_config.py")


def check(
    hub_config: Annotated[
        Path | None,
        typer.Option(
            help="The hub's configuration file (default: jupyterhub_config.py beside "
            "gpuspawner_config.py, else in /etc/jupyterhub)."
        ),
    ] = None,
    uri: Annotated[str, typer.Option(help="libvirt URI to try; empty for none.")] = (
        "qemu:///system"
    ),
    allocator: Annotated[
        bool, typer.Option(help="Ask the allocator; --no-allocator before it was started.")
    ] = True,
    json: Json = False,
) -> None:
    """Look over configuration, tokens, images, libvirt and allocator.

    Every finding has its remedy. Exit status 1 if one of them is an error.
    """
    findings = list(find(hub_config, uri, allocator))
    if json:
        show_json(findings)
    else:
        show_findings(findings)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


def find(hub_config: Path | None, uri: str, allocator: bool) -> Iterator[Finding]:
    """All findings, those that went well too (level ``ok``)."""
    try:
        config = installation()
    except ConfigError as error:
        yield Finding(level="error", text=str(error))
        return
    yield configuration()
    yield from tokens(config)
    yield hub_address(hub_config or find_hub_config())
    yield from images(config)
    if uri:
        yield libvirt(uri)
    if allocator:
        yield health(config)


def ok(text: str) -> Finding:
    """Something that is as it should be."""
    return Finding(level="ok", text=text)


def configuration() -> Finding:
    """The configuration file exists (a broken one was reported before)."""
    path = config_path()
    if path.exists():
        return ok(f"{path} is readable")
    return Finding(
        level="warning",
        text=f"{path} does not exist: every setting has its default.",
        remedy="Write it, or name another file with GPUSPAWNER_CONFIG.",
    )


def tokens(config: Installation) -> Iterator[Finding]:
    """The token files exist and are readable by their owner alone."""
    folder = Path(config.state_dir)
    for path in (config.token_path(), folder / SERVICE_TOKEN, folder / PROXY_TOKEN):
        try:
            mode = path.stat().st_mode
            length = len(path.read_text().strip())
        except OSError as error:
            yield Finding(
                level="error",
                text=f"{path} cannot be read: {error.strerror}.",
                remedy="Make the tokens with 'gpuspawner token', and run this as their owner.",
            )
            continue
        if mode & 0o077:
            yield Finding(
                level="error",
                text=f"{path} has mode {mode & 0o777:04o}: others than its owner can read it.",
                remedy=f"chmod 600 {path}; if others may have read it: gpuspawner token --replace",
            )
        elif length < 32:
            yield Finding(
                level="error",
                text=f"The token in {path} is too short.",
                remedy="gpuspawner token --replace",
            )
        else:
            yield ok(f"{path} has mode {mode & 0o777:04o}")


def find_hub_config() -> Path | None:
    """The hub's configuration file where it usually lies."""
    for name in HUB_CONFIGS:
        path = config_path().parent / name  # an absolute name stays what it is
        if path.exists():
            return path
    return None


def hub_address(path: Path | None) -> Finding:
    """Guests can reach the hub at the address that its configuration gives them."""
    if path is None:
        return Finding(
            level="warning",
            text="The hub's configuration was not found, so its address was not looked at.",
            remedy="Name it with --hub-config FILE.",
        )
    try:
        config = PyFileConfigLoader(path.name, path=str(path.parent)).load_config()
    except Exception as error:
        # The file is the admin's Python: whatever it raises is the finding.
        return Finding(
            level="error",
            text=f"{path} cannot be read: {type(error).__name__}: {error}.",
            remedy="Correct the file; 'jupyterhub --show-config -f FILE' shows the same error.",
        )
    url = hub_connect_url(config)
    problem = hub_url_problem(url)
    if problem:
        return Finding(
            level="error",
            text=problem,
            remedy="Set c.JupyterHub.hub_bind_url and c.JupyterHub.hub_connect_url to an address "
            "that guests reach, with network 'nat' the bridge's: http://10.201.0.1:8081",
        )
    return ok(f"guests reach the hub at {url}")


def hub_connect_url(config: Config) -> str:
    """The URL that guests are given, by JupyterHub's own order of settings."""
    hub = config.get("JupyterHub", {})
    for section in ("GPUSpawner", "Spawner", "JupyterHub"):
        url = config.get(section, {}).get("hub_connect_url")
        if url:
            return str(url)
    bound = urlsplit(str(hub.get("hub_bind_url") or f"http://{hub.get('hub_ip', '127.0.0.1')}"))
    host = hub.get("hub_connect_ip") or bound.hostname or ""
    # Bound to all addresses, the hub gives its machine's name.
    name = socket.gethostname() if host in ("", "0.0.0.0", "::", "*") else str(host)
    return f"{bound.scheme}://{f'[{name}]' if ':' in name else name}:{bound.port or 8081}"


def images(config: Installation) -> Iterator[Finding]:
    """The images that every installation needs are built and whole."""
    folder = config.images_path()
    manifests = read_manifests(folder)
    for name in NEEDED_IMAGES:
        if name not in manifests:
            yield Finding(
                level="error",
                text=f"There is no image '{name}' in {folder}.",
                remedy=f"gpuspawner image build {name}",
            )
    for name, manifest in manifests.items():
        if "error" in manifest:
            yield Finding(
                level="error",
                text=f"The image '{name}' cannot be used: {manifest['error']}.",
                remedy=f"gpuspawner image build {name}",
            )
        else:
            yield ok(f"image '{name}', built {manifest.get('built_at')}")


def libvirt(uri: str) -> Finding:
    """libvirt answers at ``uri`` within a bound."""
    try:
        text = bounded(lambda: _libvirt_version(uri), LIBVIRT_DEADLINE_S)
    except ImportError:
        return Finding(
            level="error",
            text="libvirt-python is not installed beside gpuspawner.",
            remedy="pip install 'gpuspawner[libvirt]' (needs libvirt-dev, gcc and pkg-config)",
        )
    except FutureTimeout:
        why = f"no answer within {LIBVIRT_DEADLINE_S:.0f} s"
    except Exception as error:
        # libvirt.libvirtError; the library is not imported here.
        why = str(error)
    else:
        return ok(f"{uri} answers: {text}")
    return Finding(
        level="error",
        text=f"libvirt does not answer at {uri}: {why}.",
        remedy="Start it (systemctl start libvirtd), and run this as root or in group libvirt.",
    )


def _libvirt_version(uri: str) -> str:
    import libvirt

    def say_nothing(_context: Any, _error: Any) -> None:
        """libvirt prints every error by itself otherwise."""

    libvirt.registerErrorHandler(say_nothing, None)
    connection = libvirt.openReadOnly(uri)
    try:
        return (
            f"libvirt {_dotted(connection.getLibVersion())}, "
            f"{connection.getType()} {_dotted(connection.getVersion())}"
        )
    finally:
        connection.close()


def _dotted(number: int) -> str:
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


def bounded(call: Callable[[], str], seconds: float) -> str:
    """What ``call`` returns, or ``TimeoutError`` while its thread is left behind."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(call).result(seconds)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def health(config: Installation) -> Finding:
    """The allocator answers and works."""

    async def run() -> Finding:
        async with AllocatorClient(config.allocator_url, config.spawner_token()) as client:
            answer = await client.health()
        if answer.ok:
            return ok(f"the allocator at {config.allocator_url} works, version {answer.version}")
        bad = [f"{name} is {state}" for name, state in answer.hosts.items() if state != "ready"]
        return Finding(
            level="error",
            text=f"The allocator is not well: {', '.join(bad) or 'its log says why'}.",
            remedy="Look at each host with 'gpuspawner host check NAME', and at the log.",
        )

    try:
        return asyncio.run(run())
    except (AllocatorProblem, ConfigError, ValueError) as error:
        return Finding(
            level="error",
            text=f"{error}.".replace("..", "."),
            remedy="Start gpuspawner-allocator (systemctl start gpuspawner-allocator); its log "
            "says why if it does not stay up.",
        )
