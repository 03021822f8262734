"""JupyterHub's API, as far as the pages use it: which servers it knows, and stopping one."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from tornado.httpclient import AsyncHTTPClient

log = logging.getLogger(__name__)

# A stop answers within the hub's slow_stop_timeout (10 s) at the latest.
_STOP_S = 40
_ASK_S = 10


class HubSilent(Exception):
    """The hub gave no usable answer."""


@dataclass(frozen=True, slots=True)
class Said:
    """The hub's answer to a request: its status and its own words about it."""

    status: int
    message: str = ""

    @property
    def ok(self) -> bool:
        """It did it, or is doing it."""
        return self.status in (200, 202, 204)


class HubApi:
    """One hub."""

    def __init__(self, api_url: str, service_token: str) -> None:
        self._url = api_url.rstrip("/")
        self._service_token = service_token
        self._http = AsyncHTTPClient()

    async def has_server(self, username: str, server_name: str) -> bool:
        """Whether the hub has this server as running, starting or stopping; ``HubSilent``."""
        answer = await self._call("GET", _user(username), self._service_token, _ASK_S)
        if answer.code == 404:
            return False
        try:
            servers = json.loads(answer.body)["servers"]
            server = servers.get(server_name)
            return server is not None and not server.get("stopped", False)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise HubSilent(f"JupyterHub answered with status {answer.code}.") from None

    async def stop(self, username: str, server_name: str, token: str | None = None) -> Said:
        """Stop a server with the rights of ``token``, else the allocator's; ``HubSilent``."""
        path = _user(username)
        path += f"/servers/{quote(server_name, safe='')}" if server_name else "/server"
        answer = await self._call("DELETE", path, token or self._service_token, _STOP_S)
        return Said(answer.code, _message(answer.body))

    async def _call(self, method: str, path: str, token: str, timeout_s: float) -> Any:
        try:
            return await self._http.fetch(
                f"{self._url}/{path}",
                method=method,
                headers={"Authorization": f"Bearer {token}"},
                connect_timeout=3,
                request_timeout=timeout_s,
                follow_redirects=False,
                raise_error=False,
            )
        except Exception as error:  # the client has many ways to say that nobody answers
            log.warning("hub_silent method=%s error=%s", method, error)
            raise HubSilent("JupyterHub does not answer.") from error


def _user(username: str) -> str:
    return f"users/{quote(username, safe='')}"


def _message(body: bytes) -> str:
    try:
        message = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    return str(message)[:300]
