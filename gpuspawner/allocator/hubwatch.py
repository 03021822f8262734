"""Asking the hub which servers it knows: a lease that it has forgotten is ended.

The hub forgets servers when it is killed at the wrong moment or when a stop fails. It must *answer*
twice, some time apart, that it has no such server; a hub that is silent ends nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from typing import Any
from urllib.parse import quote

from tornado.httpclient import AsyncHTTPClient

from gpuspawner.allocator.clock import now_ms
from gpuspawner.allocator.context import Context
from gpuspawner.allocator.lease_runner import LeaseRunners
from gpuspawner.ledger import leases as lease_ledger
from gpuspawner.ledger.database import Deposed
from gpuspawner.ledger.records import LeaseRecord
from gpuspawner.pool.states import EndReason, LeaseState

log = logging.getLogger(__name__)


class HubWatch:
    """Looks every ``every_s``; two answers at least ``apart_s`` apart end a lease."""

    def __init__(
        self,
        context: Context,
        runners: LeaseRunners,
        api_url: str,
        token: str,
        hub_id: str,
        every_s: float = 30,
        apart_s: float = 60,
    ) -> None:
        self.ctx = context
        self.runners = runners
        self.api_url = api_url.rstrip("/")
        self.token = token
        self.hub_id = hub_id
        self.every_s = every_s
        self.apart_s = apart_s
        self._first_miss: dict[str, int] = {}
        self._http = AsyncHTTPClient()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.look()
            except (asyncio.CancelledError, Deposed):
                raise
            except Exception:
                log.exception("hubwatch_error")
            await asyncio.sleep(self.every_s)

    async def look(self) -> None:
        """One round over all leases of this hub."""
        leases = [
            lease
            for lease in await self.ctx.ledger.read(lease_ledger.open_leases)
            if lease.hub_id == self.hub_id and lease.state is not LeaseState.STOPPING
        ]
        by_user: dict[str, list[LeaseRecord]] = defaultdict(list)
        for lease in leases:
            by_user[lease.username].append(lease)
        for username, owned in by_user.items():
            servers = await self._servers(username)
            for lease in owned:
                if servers is None or lease.server_name in servers:
                    self._first_miss.pop(lease.id, None)
                else:
                    await self._missed(lease)
        known = {lease.id for lease in leases}
        self._first_miss = {k: v for k, v in self._first_miss.items() if k in known}

    async def _missed(self, lease: LeaseRecord) -> None:
        first = self._first_miss.setdefault(lease.id, now_ms())
        if now_ms() - first < self.apart_s * 1000:
            return
        log.warning(
            "hub_forgot lease=%s user=%r server=%r", lease.id, lease.username, lease.server_name
        )
        await self.runners.end(
            lease.id, EndReason.HUB_FORGOT, "JupyterHub has no such server any more."
        )

    async def _servers(self, username: str) -> frozenset[str] | None:
        """Names of the user's active or pending servers; ``None`` if the hub gave no answer."""
        try:
            response = await self._http.fetch(
                f"{self.api_url}/users/{quote(username, safe='')}",
                headers={"Authorization": f"Bearer {self.token}"},
                connect_timeout=3,
                request_timeout=10,
                raise_error=False,
            )
        except Exception as error:
            log.debug("hub_silent error=%s", error)
            return None
        if response.code == 404:
            return frozenset()
        if response.code != 200:
            return None
        return _active(response.body)


def _active(body: bytes) -> frozenset[str] | None:
    try:
        user: Any = json.loads(body)
        servers = user["servers"]
        return frozenset(
            name for name, server in servers.items() if not server.get("stopped", False)
        )
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
