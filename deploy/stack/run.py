"""The running installation: what is started, in which order, and how it is taken down again.

Everything that is started registers how it is undone on one stack, at once, so that Ctrl-C, a
failed start and a child that dies all leave the machine by the same way.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar
from urllib.parse import urlsplit

from deploy import libvirtd as daemon
from deploy.stack import images
from deploy.stack.emulated import write_declaration
from deploy.stack.leftovers import instance_of, remove_leftovers
from deploy.stack.options import Options
from deploy.stack.process import Child, answers, last_lines
from deploy.stack.say import Problem, complain, line, step
from deploy.stack.state import (
    Secrets,
    State,
    gpuspawner_config,
    hub_environment,
    hub_url,
    make_secrets,
    write_private,
)
from deploy.stack.tools import CHECKOUT, find_node, make_proxy, run_quietly
from gpuspawner.client import AllocatorClient, AllocatorProblem
from gpuspawner.schema import AddHost, Host, Lease

T = TypeVar("T")

HOST_NAME = "quickstart"
IMAGES = ("service", "lab")
ALLOCATOR_START_S = 60.0
HOST_READY_S = 600.0
HUB_START_S = 120.0
# A guest gets 120 s under emulation to shut down, then its domain is destroyed.
LEASES_END_S = 180.0
STALE_END_S = 20.0
SYSTEMD = Path("/run/systemd/system")


class Signals:
    """Ctrl-C and SIGTERM: the first interrupts the run, a second hurries its end."""

    def __init__(self) -> None:
        self.stopping = False
        self.hurry = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.stopping:
            self.hurry = True
        else:
            self.stopping = True
            raise KeyboardInterrupt


def run(options: Options, state: State) -> int:
    """Prepare, start, watch, and take down. Exit status 0 after Ctrl-C.

    :raises Problem: when a step fails or a process ends by itself; all is taken down by then.
    """
    signals = Signals()
    if options.purge:
        with ExitStack() as undo:
            start_libvirtd(state, undo)
            remove_leftovers(instance_of(state.root))
        state.purge()
        line(f"Deleted {state.root}.")
        return 0
    python = state.venv / "bin" / "python"
    proxy_command = make_proxy(state.root / "chp", find_node(python))
    for name in IMAGES:
        command = images.builder(python, name)
        images.build(command, name, state.images, state.cache, state.log(f"image-{name}"))
    if options.prepare:
        line(f"Everything is prepared in {state.root}.")
        return 0
    secrets = make_secrets(state)
    write_private(state.config, gpuspawner_config(state, options))
    write_declaration(state.emulated_host)
    status = 0
    with ExitStack() as undo:
        undo.callback(line, "Stopped; nothing is left running.")
        try:
            start(options, state, secrets, proxy_command, signals, undo)
        except KeyboardInterrupt:
            line("\nStopping; users' machines are shut down first. Ctrl-C again hurries.")
        except Problem as problem:
            complain(f"\n{problem}\n")
            line("Stopping everything else.")
            status = 1
        finally:
            signals.stopping = True
    return status


def start(
    options: Options,
    state: State,
    secrets: Secrets,
    proxy_command: list[str],
    signals: Signals,
    undo: ExitStack,
) -> NoReturn:
    """Start all parts and watch them until one ends or a signal comes.

    :raises KeyboardInterrupt: on a signal.
    :raises Problem: when a part does not start or ends by itself.
    """
    binaries = state.venv / "bin"
    environment = {
        "GPUSPAWNER_CONFIG": str(state.config),
        "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    # QEMU must be able to read what hub and allocator write for it, but nobody their secrets.
    os.umask(0o022)

    check_libvirtd = start_libvirtd(state, undo)
    undo.callback(lambda: remove_leftovers(instance_of(state.root)))

    ask = Asker(options, state)
    with step("Starting the allocator"):
        allocator = Child(
            "allocator", [str(binaries / "gpuspawner-allocator")], state.log("allocator"),
            state.root, environment,
        )  # fmt: skip
        undo.callback(allocator.stop)
        allocator.wait_until(
            lambda: answers(f"{ask.url}health"), ALLOCATOR_START_S, "does not answer"
        )
    undo.callback(lambda: end_leases(ask, allocator, signals))

    add_host(ask, allocator, options, state)

    with step("Starting the proxy"):
        proxy = Child(
            "proxy",
            [
                *proxy_command,
                *("--ip", options.host, "--port", str(options.port)),
                *("--api-ip", "127.0.0.1", "--api-port", str(options.proxy_api_port)),
                *("--error-target", f"{hub_url(options)}/hub/error"),
            ],
            state.log("proxy"),
            state.root,
            environment | {"CONFIGPROXY_AUTH_TOKEN": secrets.proxy_token},
        )
        undo.callback(proxy.stop)
    page = f"http://{_reachable(options.host)}:{options.port}"
    with step("Starting the hub"):
        hub = Child(
            "hub",
            [str(binaries / "jupyterhub"), "-f", str(CHECKOUT / "jupyterhub_config.py")],
            state.log("hub"),
            state.root,
            environment | hub_environment(options),
        )  # fmt: skip
        undo.callback(hub.stop)
        children = (proxy, allocator)

        def up() -> bool:
            for child in children:
                child.check()
            return answers(f"{page}/hub/login")

        hub.wait_until(up, HUB_START_S, "shows no login page")
    welcome(page, state, secrets)
    while True:
        for _ in range(10):
            for child in (hub, proxy, allocator):
                child.check()
            time.sleep(0.5)
        check_libvirtd()


def _reachable(address: str) -> str:
    return "127.0.0.1" if address in ("0.0.0.0", "") else address


def welcome(page: str, state: State, secrets: Secrets) -> None:
    """What the reader does next."""
    line(
        f"""
JupyterHub is ready at {page}

    user name  any, such as ada   password  {secrets.user_password}
    user name  admin              password  {secrets.admin_password}

Logs are in {state.root}/logs. Ctrl-C stops everything; homes stay.
"""
    )


def start_libvirtd(state: State, undo: ExitStack) -> Callable[[], None]:
    """Use the libvirtd that runs, or start one and register its end.

    :returns: a function that raises ``Problem`` once it does not answer any more.
    :raises Problem: when there is none and none can be started.
    """
    own = state.root / "libvirtd"
    end_stale(own)
    if SYSTEMD.is_dir() and not daemon.answers(daemon.LIBVIRTD_SOCKET):
        run_quietly(["systemctl", "start", "libvirtd"], "Starting libvirtd")
    try:
        if daemon.answers(daemon.LIBVIRTD_SOCKET):
            undo.enter_context(daemon.libvirtd(own))
        else:
            with step("Starting libvirtd"):
                undo.enter_context(daemon.libvirtd(own))
    except daemon.LibvirtdError as error:
        raise Problem(str(error)) from error

    def check() -> None:
        if not daemon.answers(daemon.LIBVIRTD_SOCKET):
            tail = "\n".join(f"    | {text}" for text in last_lines(own / "libvirtd.log"))
            raise Problem(f"libvirtd does not answer any more.\n{tail}")

    return check


def end_stale(folder: Path) -> None:
    """End daemons of ours that a killed quickstart left behind; their guests go on."""
    for name in ("libvirtd", "virtlogd"):
        try:
            pid = int((folder / f"{name}.pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if str(folder / f"{name}.conf").encode() not in command:
                continue  # the number is somebody else's by now
            os.kill(pid, signal.SIGTERM)
        except (OSError, ValueError):
            continue
        deadline = time.monotonic() + STALE_END_S
        while Path(f"/proc/{pid}/cmdline").exists() and time.monotonic() < deadline:
            time.sleep(0.1)


class Asker:
    """One question at a time to the allocator."""

    def __init__(self, options: Options, state: State) -> None:
        self.url = f"http://127.0.0.1:{options.allocator_port}/services/gpu/"
        self._token = (state.root / "spawner.token").read_text().strip()

    def __call__(self, question: Callable[[AllocatorClient], Awaitable[T]]) -> T:
        """:raises AllocatorProblem: when it refuses or cannot be reached."""

        async def run() -> T:
            async with AllocatorClient(self.url, self._token) as client:
                return await question(client)

        return asyncio.run(run())


def add_host(ask: Asker, allocator: Child, options: Options, state: State) -> None:
    """Take this machine into the pool as an emulated host, and wait for its network.

    The hub listens on the guests' bridge, so that bridge must be there before the hub.
    """
    last: Host | None = None

    def ready() -> bool:
        nonlocal last
        last = next((host for host in ask(lambda c: c.hosts()) if host.name == HOST_NAME), None)
        # "ready" may be what the ledger remembers of the last run; the bridge cannot.
        return last is not None and last.state == "ready" and bridge_is_up(options)

    with step("Making the emulated host and its network"):
        try:
            # Adding a host that is there already gives it these settings.
            body = AddHost(
                name=HOST_NAME,
                cidr=options.network,
                accel=options.accel,
                emulated=state.emulated_host.read_text(),
            )
            ask(lambda client: client.add_host(body))
            allocator.wait_until(ready, HOST_READY_S, "has no ready host")
        except AllocatorProblem as error:
            why = f" ({last.reason})" if last is not None and last.reason else ""
            raise Problem(f"The host was not taken into the pool: {error}{why}.") from error


def bridge_is_up(options: Options) -> bool:
    """Whether the hub could listen on the guests' bridge now."""
    address = urlsplit(hub_url(options))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.hostname, address.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Problem(
                    f"Port {options.hub_port} on the guests' bridge is taken.",
                    "Stop what listens there, or choose another with --hub-port PORT.",
                ) from error
            return False
    return True


def ending(lease_id: str) -> Callable[[AllocatorClient], Awaitable[Lease]]:
    """The question that ends one lease."""
    return lambda client: client.end_lease(lease_id, "The quickstart was stopped.")


def end_leases(ask: Asker, allocator: Child, signals: Signals) -> None:
    """Shut the users' machines down through the allocator, within a bound."""
    if allocator.ended() is not None:
        return

    def open_leases() -> list[str]:
        return [lease.id for lease in ask(lambda c: c.leases()) if lease.state != "ended"]

    try:
        waiting = open_leases()
        if not waiting:
            return
        with step(f"Shutting down {len(waiting)} virtual machine(s)"):
            for lease_id in waiting:
                ask(ending(lease_id))
            deadline = time.monotonic() + LEASES_END_S
            while open_leases() and time.monotonic() < deadline and not signals.hurry:
                time.sleep(0.5)
    except (AllocatorProblem, Problem) as error:
        complain(f"  !!  Leases could not be ended, their machines are switched off: {error}")
