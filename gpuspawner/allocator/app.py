"""The allocator's process: configuration, start, stop."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import ipaddress
import logging
import signal
import socket
import ssl
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jupyterhub.services.auth import HubAuth
from tornado import web
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from traitlets import Enum, Float, Int, List, Unicode
from traitlets.config import Application
from traitlets.utils.importstring import import_item

from gpuspawner.allocator.acquire import Placing
from gpuspawner.allocator.api_leases import LeaseApi
from gpuspawner.allocator.api_limits import LimitApi
from gpuspawner.allocator.api_pool import PoolApi
from gpuspawner.allocator.auth import Gatekeeper
from gpuspawner.allocator.context import Context, Limits
from gpuspawner.allocator.drivers import DriverSettings
from gpuspawner.allocator.hosts import HostKeeper
from gpuspawner.allocator.hubwatch import HubWatch
from gpuspawner.allocator.images import ImageStore
from gpuspawner.allocator.lease_runner import LeaseRunners
from gpuspawner.allocator.metrics import Metrics
from gpuspawner.allocator.pages.routes import page_routes
from gpuspawner.allocator.pages.site import cookie_secret, make_site
from gpuspawner.allocator.queue import QueueKeeper
from gpuspawner.allocator.server import MAX_BODY_BYTES, application
from gpuspawner.allocator.signals import Signals
from gpuspawner.config import ConfigError, Installation, load_config
from gpuspawner.ledger.database import Ledger

log = logging.getLogger("gpuspawner.allocator")

# Starting again would depose the other one in its turn; systemd is told not to.
EXIT_DEPOSED = 78


class Allocator(Application):
    """Owns the GPU pool: gives leases, runs their VMs, wipes and diagnoses GPUs after use."""

    name = "gpuspawner-allocator"
    description = __doc__ or ""

    db_url = Unicode(
        help="""SQLAlchemy URL of the ledger: SQLite or PostgreSQL
        (``postgresql+psycopg://user@host/name``). Default: ``ledger.sqlite`` in ``state_dir``."""
    ).tag(config=True)
    url = Unicode(
        help="""Where to listen. Default: ``Installation.allocator_url``. An address other than
        loopback needs ``certificate`` and ``key``."""
    ).tag(config=True)
    certificate = Unicode(help="PEM file with the TLS certificate chain.").tag(config=True)
    key = Unicode(help="PEM file with the TLS key.").tag(config=True)
    hub_api_url = Unicode(
        "http://127.0.0.1:8081/hub/api",
        help="JupyterHub's API, as the allocator reaches it.",
    ).tag(config=True)
    hub_token_file = Unicode(
        help="File with the allocator's token at the hub. Default: ``service.token``."
    ).tag(config=True)
    hub_guest_url = Unicode(
        help="""JupyterHub's API address as guests reach it (``hub_connect_url``): the one thing on
        the host that the guests' filter lets them talk to. Default: ``hub_api_url``."""
    ).tag(config=True)
    hub_public_url = Unicode(
        help="""JupyterHub's pages as browsers reach them, ending in ``/hub/``. Needed only where
        they are not beside ours, for instance when JupyterHub gives every user a subdomain.
        Default: derived from the path of ``url``."""
    ).tag(config=True)
    driver = Unicode(
        "gpuspawner.allocator.drivers.libvirt_host",
        help="""Function that makes a host's driver: ``f(name, settings, DriverSettings)`` gives a
        ``gpuspawner.host.api.GpuHost``.""",
    ).tag(config=True)
    pool_dir = Unicode(
        "/var/lib/libvirt/images",
        help="Folder on each host under which its libvirt storage pool is made.",
    ).tag(config=True)

    log_name = Unicode("INFO", help="Least level that is logged: DEBUG, INFO, ...").tag(config=True)

    wait_s = Float(180, help="How long a start waits for a GPU that is being wiped.").tag(
        config=True
    )
    boot_s = Float(600, help="How long a VM may take until JupyterLab answers.").tag(config=True)
    stop_s = Float(60, help="How long a guest may take to shut down; twice that without KVM.").tag(
        config=True
    )
    diagnosis_s = Float(900, help="How long one diagnosis may take.").tag(config=True)
    diagnosis_silence_s = Float(
        90, help="How long the service VM may be silent before the run is given up."
    ).tag(config=True)
    diagnosis_attempts = Int(
        3, help="Inconclusive diagnoses in a row after which a GPU is quarantined."
    ).tag(config=True)
    diagnosis_backoff_s = List(
        Float(), [60.0, 300.0, 1800.0], help="Waiting time before each further attempt."
    ).tag(config=True)
    diagnoses_per_host = Int(2, help="Diagnoses at a time on one host.").tag(config=True)
    placement = Enum(
        ["pack", "spread"],
        "pack",
        help="""Where a server goes that fits in several places. 'pack': where it leaves the fewest
        GPUs useless for what was asked for lately, of equals in the tightest place. 'spread': on
        the host with the most free GPUs, for cooling and so that a lost host ends few servers.""",
    ).tag(config=True)
    guests_blocked = List(
        Unicode(),
        help="""Networks (CIDR) that guests must not reach, beside their host, the hub's machine,
        other guests and the guests of other hosts: the management network, for instance.""",
    ).tag(config=True)
    hub_watch_s = Float(30, help="How often the hub is asked which servers it knows.").tag(
        config=True
    )
    hub_forgot_s = Float(
        60, help="How far apart two answers of the hub must be that end a forgotten lease."
    ).tag(config=True)

    aliases = {
        "url": "Allocator.url",
        "db": "Allocator.db_url",
        "log": "Allocator.log_name",
    }

    def initialize(self, argv: Any = None) -> None:
        """Read the shared configuration file, then the command line."""
        self.update_config(load_config())
        self.parse_command_line(argv)
        self.shared = Installation(parent=self)
        logging.basicConfig(
            level=self.log_name,
            format="%(asctime)s %(levelname)s %(name)s %(message)s",
            stream=sys.stderr,
        )
        logging.getLogger("alembic").setLevel(logging.WARNING)
        # JupyterHub's login library names sessions in its messages, and over plain HTTP it warns at
        # every request. Its errors, and defects of ours, are errors.
        logging.getLogger("tornado.application").setLevel(logging.ERROR)

    def start(self) -> None:
        """Run until SIGTERM or SIGINT."""
        Path(self.shared.state_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        asyncio.run(self._main())

    # ------------------------------------------------------------------ wiring

    async def _main(self) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        async with contextlib.AsyncExitStack() as stack:
            ledger = await self.serve(stack)
            waits = [asyncio.create_task(one.wait()) for one in (stop, ledger.deposed)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            log.info("allocator_stopping: guests go on")
            if ledger.deposed.is_set():
                log.error("allocator_deposed: another allocator uses this database")
                sys.exit(EXIT_DEPOSED)

    async def serve(self, stack: contextlib.AsyncExitStack) -> Ledger:
        """Open everything and listen; the stack closes it again in the right order.

        The port comes first: a second allocator that is started by mistake fails on it, and must
        not have deposed the first one by then.
        """
        sockets = self._bind()
        for one in sockets:
            stack.callback(one.close)
        ledger = Ledger(self.db_url or f"sqlite:///{self.shared.state_dir}/ledger.sqlite")
        await ledger.open()
        stack.push_async_callback(ledger.close)
        images = ImageStore(self.shared.images_path())
        images.refresh()
        context = Context(
            ledger=ledger,
            signals=Signals(),
            images=images,
            metrics=Metrics(),
            limits=Limits(
                wait_s=self.wait_s,
                boot_s=self.boot_s,
                stop_s=self.stop_s,
                diagnosis_s=self.diagnosis_s,
                diagnosis_silence_s=self.diagnosis_silence_s,
                diagnosis_attempts=self.diagnosis_attempts,
                diagnosis_backoff_s=tuple(self.diagnosis_backoff_s),
                diagnoses_per_host=self.diagnoses_per_host,
                guests_blocked=frozenset(self.guests_blocked),
            ),
            placing=Placing(prefer="spread" if self.placement == "spread" else "pack"),
        )
        runners = LeaseRunners(context)
        stack.push_async_callback(runners.close)
        keeper = HostKeeper(context, self._factory(context))
        stack.push_async_callback(keeper.close)
        queue = QueueKeeper(context, runners)
        self._background(stack, queue.run(), "queue")
        self._background(stack, queue.housekeeping(), "housekeeping")

        token = self._hub_token()
        gatekeeper = Gatekeeper(
            {self.shared.spawner_token(): self.shared.hub_id},
            HubAuth(api_token=token, api_url=self.hub_api_url, cache_max_age=30) if token else None,
        )
        lease_api = LeaseApi(context, runners, self.shared.hub_id)
        pool_api = PoolApi(context, keeper)
        limit_api = LimitApi(context)
        site = make_site(
            context,
            lease_api,
            pool_api,
            limit_api,
            hub_id=self.shared.hub_id,
            prefix=self._prefix(),
            hub_public_url=self.hub_public_url,
            hub_api_url=self.hub_api_url,
            hub_token=token,
        )
        routes = [*lease_api.routes(), *pool_api.routes(), *limit_api.routes()]
        secret = cookie_secret(Path(self.shared.state_dir))
        app = application(
            self._prefix(), gatekeeper, context, lease_api, routes, pool_api.health,
            page_routes(site), secret,
        )  # fmt: skip
        self._listen(stack, sockets, app)
        await keeper.open()
        await runners.resume()
        if token:
            watch = HubWatch(
                context, runners, self.hub_api_url, token, self.shared.hub_id,
                self.hub_watch_s, self.hub_forgot_s,
            )  # fmt: skip
            self._background(stack, watch.run(), "hubwatch")
        log.info(
            "allocator_ready url=%s instance=%s epoch=%d",
            self._address().geturl(), ledger.instance, ledger.epoch,
        )  # fmt: skip
        return ledger

    def _background(self, stack: contextlib.AsyncExitStack, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        stack.push_async_callback(end)

    def _factory(self, context: Context) -> Any:
        make = import_item(self.driver)
        guest_url = urlsplit(self.hub_guest_url or self.hub_api_url)
        settings = DriverSettings(
            instance=context.ledger.instance,
            hub_address=(guest_url.hostname or "127.0.0.1", guest_url.port or 80),
            pool_dir=self.pool_dir,
            state_dir=self.shared.state_dir,
            images=context.images,
        )
        return lambda name, host_settings: make(name, host_settings, settings)

    def _hub_token(self) -> str | None:
        path = Path(self.hub_token_file or Path(self.shared.state_dir) / "service.token")
        if not path.exists():
            log.warning("no_hub_token path=%s: hub users cannot use the API", path)
            return None
        return path.read_text().strip()

    def _address(self) -> Any:
        return urlsplit(self.url or self.shared.allocator_url)

    def _prefix(self) -> str:
        return str(self._address().path).rstrip("/") + "/"

    def _bind(self) -> list[socket.socket]:
        address = self._address()
        host, port = address.hostname or "127.0.0.1", address.port or 8091
        try:
            return bind_sockets(port, host)
        except OSError as error:
            raise ConfigError(
                f"The allocator cannot listen on {host}:{port}: {error.strerror}. "
                "Stop what listens there, or choose another Installation.allocator_url."
            ) from error

    def _listen(
        self,
        stack: contextlib.AsyncExitStack,
        sockets: list[socket.socket],
        app: web.Application,
    ) -> None:
        address = self._address()
        host = address.hostname or "127.0.0.1"
        context_tls: ssl.SSLContext | None = None
        if self.certificate:
            context_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context_tls.load_cert_chain(self.certificate, self.key or None)
        elif not (host == "localhost" or ipaddress.ip_address(host).is_loopback):
            raise ConfigError(
                f"The allocator would listen on {host} without TLS. Set Allocator.certificate and "
                "Allocator.key, or listen on 127.0.0.1."
            )
        server = HTTPServer(app, ssl_options=context_tls, max_body_size=MAX_BODY_BYTES)
        server.add_sockets(sockets)

        async def close() -> None:
            server.stop()
            await server.close_all_connections()

        stack.push_async_callback(close)


def main() -> None:
    """Entry point of ``gpuspawner-allocator``."""
    # libvirt's client is C: what kills the process there leaves the stack of each thread behind.
    faulthandler.enable()
    app = Allocator.instance()
    try:
        app.initialize(sys.argv[1:])
        app.start()
    except ConfigError as error:
        sys.exit(f"gpuspawner-allocator: {error}")
