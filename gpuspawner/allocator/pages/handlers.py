"""The pages that show something."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import Any, ClassVar

from jupyterhub.services.auth import HubOAuthCallbackHandler
from tornado import web

from gpuspawner import schema
from gpuspawner.allocator import views
from gpuspawner.allocator.clock import moment
from gpuspawner.allocator.pages import data, details
from gpuspawner.allocator.pages.base import Page, PageError, not_there
from gpuspawner.allocator.pages.limit_data import standing_line
from gpuspawner.allocator.pages.site import Site
from gpuspawner.ledger import diagnoses as diagnosis_ledger
from gpuspawner.ledger import gpus as gpu_ledger
from gpuspawner.ledger import hosts as host_ledger
from gpuspawner.ledger import leases as lease_ledger
from gpuspawner.ledger import limits as limit_ledger
from gpuspawner.ledger.database import Transaction
from gpuspawner.ledger.records import HostRecord, LeaseRecord
from gpuspawner.pool.quota import standing
from gpuspawner.pool.states import LeaseState

_RUNS = 12
_STEPS = 30
_POOL_STEPS = 12
_RECENT = 20


def lease_row(record: LeaseRecord, hosts: dict[str, HostRecord], site: Site) -> data.LeaseRow:
    """One lease as pages show it."""
    host = hosts.get(record.host or "")
    known = host.inventory.gpus if host is not None and host.inventory is not None else ()
    held = record.claim.gpus if record.claim is not None else ()
    emulated = any(gpu.imitation for gpu in known if gpu.address in held)
    return data.lease_row(views.lease(record, host, False), site.urls, emulated)


class PartsPage(Page):
    """A page in parts. Its script fetches a part again when something in it has changed."""

    template: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]

    async def send(self, read: Any, *args: Any) -> None:
        """Read what the page shows in one transaction, then send the page or the part."""
        name = self.fragment
        if name is not None and name not in self.parts:
            raise not_there("such part of this page")
        values = await self.site.context.ledger.read(read, *args)
        if values is None:
            raise not_there("such GPU or diagnosis in the pool")
        template = self.template if name is None else f"parts/{name}.html"
        self.show(template, **values)


class UserPage(PartsPage):
    """``/``: a user's servers and limits, why the last one ended, and what is free."""

    template = "user.html"
    parts = ("limit", "mine", "counts")

    async def get(self) -> None:
        """The page, or a part of it."""
        name = self.visitor.name
        await self.send(self._read, name, tuple(self.current_user.get("groups") or ()))

    def _read(self, tx: Transaction, username: str, groups: tuple[str, ...]) -> dict[str, Any]:
        site = self.site
        hosts = {host.name: host for host in host_ledger.every(tx)}
        records = [
            one for one in lease_ledger.recent(tx, 200, username) if one.hub_id == site.hub_id
        ]
        opened = [one for one in records if one.state is not LeaseState.ENDED]
        ended = [one for one in records if one.state is LeaseState.ENDED]
        last = None
        if ended:
            newest = max(ended, key=lambda one: one.ended_ms or one.created_ms)
            events = [views.event(one) for one in lease_ledger.events_after(tx, newest.id, 0)]
            last = data.last_end(views.lease(newest, None, False), events)
        counts = views.counts(gpu_ledger.every(tx), hosts)
        known = standing(limit_ledger.load(tx), limit_ledger.holdings(tx), username, groups)
        return {
            "standing": [standing_line(one) for one in known],
            "rows": [lease_row(one, hosts, site) for one in opened],
            "last": last,
            "counts": [data.count_row(one) for one in counts],
        }


class AdminPage(PartsPage):
    """``/admin``: hosts with their nodes and GPUs, everybody's servers, what happened lately."""

    template = "admin.html"
    parts = ("hosts", "leases", "history")
    needs = "view"

    async def get(self) -> None:
        """The page, or a part of it."""
        _ = self.visitor
        await self.send(self._read)

    def _read(self, tx: Transaction) -> dict[str, Any]:
        site = self.site
        records = host_ledger.every(tx)
        hosts = {host.name: host for host in records}
        known = site.context.placing.views.load(tx).views
        opened = lease_ledger.open_leases(tx)
        owners = {lease.id: lease.username for lease in opened}
        gpus = [
            views.gpu(one, hosts.get(one.host), owners.get(one.lease_id or ""))
            for one in gpu_ledger.every(tx)
        ]
        by_host: dict[str, list[schema.Gpu]] = {host.name: [] for host in records}
        for gpu in gpus:
            by_host.setdefault(gpu.host, []).append(gpu)
        recent = [
            one for one in lease_ledger.recent(tx, _RECENT * 3) if one.state is LeaseState.ENDED
        ]
        return {
            "hosts": [
                data.host_card(views.host(one, known.get(one.name)), by_host[one.name], site.urls)
                for one in records
            ],
            "states": data.state_counts(gpus),
            "gpu_count": len(gpus),
            "rows": [lease_row(one, hosts, site) for one in opened],
            "ended": [lease_row(one, hosts, site) for one in recent[:_RECENT]],
            "ended_at": {one.id: moment(one.ended_ms or one.created_ms) for one in recent},
            "steps": [
                details.step(row, moment(row["at_ms"]), site.urls)
                for row in gpu_ledger.pool_history(tx, _POOL_STEPS)
            ],
            "hub_id": site.hub_id,
        }


class GpuPage(PartsPage):
    """``/admin/gpus/HOST/ADDRESS``: everything about one GPU."""

    template = "gpu.html"
    parts = ("gpu",)
    needs = "view"

    async def get(self, host: str, address: str) -> None:
        """The page, or its one part."""
        _ = self.visitor
        await self.send(self._read, host, address)

    def _read(self, tx: Transaction, host: str, address: str) -> dict[str, Any] | None:
        record = gpu_ledger.get(tx, host, address)
        if record is None:
            return None
        urls = self.site.urls
        home = host_ledger.get(tx, host)
        lease = lease_ledger.get(tx, record.lease_id) if record.lease_id else None
        progress = self.site.context.diagnosis_progress
        found = details.gpu_details(
            views.gpu(record, home, None if lease is None else lease.username),
            None if record.enrolled is None else asdict(record.enrolled),
            [
                views.diagnosis(one, progress.get(one.id))
                for one in diagnosis_ledger.recent(tx, host, address, _RUNS)
            ],
            [
                details.step(row, moment(row["at_ms"]), urls)
                for row in gpu_ledger.history(tx, host, address, _STEPS)
            ],
            urls,
        )
        newest = found.runs[0] if found.runs else None
        console = diagnosis_ledger.need(tx, newest.id).console if newest else None
        row = None
        if lease is not None and home is not None:
            row = lease_row(lease, {host: home}, self.site)
        return {"details": found, "newest": newest, "console": console or "", "lease": row}


class DiagnosisPage(PartsPage):
    """``/admin/diagnoses/ID``: one run of the service VM."""

    template = "diagnosis.html"
    parts = ("run",)
    needs = "view"

    async def get(self, run_id: str) -> None:
        """The page, or its one part."""
        _ = self.visitor
        await self.send(self._read, run_id)

    def _read(self, tx: Transaction, run_id: str) -> dict[str, Any] | None:
        try:
            record = diagnosis_ledger.need(tx, run_id)
        except LookupError:
            return None
        progress = self.site.context.diagnosis_progress.get(run_id)
        run = details.run(views.diagnosis(record, progress), self.site.urls)
        return {"run": run, "console": record.console or ""}


class LoginDone(Page, HubOAuthCallbackHandler):  # type: ignore[misc]  # no types upstream
    """``/oauth_callback``: back from the hub's login."""

    logs_in = True

    async def prepare(self) -> None:
        """Whoever comes here is not logged in yet."""
        if self.site.auth is None:
            await super().prepare()
        self.set_default_headers()
        self._hub_auth_user_cache = self.current_user = None

    async def get(self) -> None:
        """Finish the login."""
        await HubOAuthCallbackHandler.get(self)


class Nothing(Page):
    """Any other address."""

    async def prepare(self) -> None:
        """404, whoever asks, and whether or not the hub can say who that is."""
        with contextlib.suppress(PageError):
            await super().prepare()
        raise PageError(
            404,
            "There is no such page",
            "Nothing is at this address.",
            "Go to the page of your servers; links from older versions may lead nowhere.",
        )


class Static(web.StaticFileHandler):
    """Our own style and script."""

    def set_extra_headers(self, path: str) -> None:
        """They are what they say they are."""
        self.set_header("X-Content-Type-Options", "nosniff")
