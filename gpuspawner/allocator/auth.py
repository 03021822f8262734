"""Who is asking: the hub's spawner by its token, everybody else by JupyterHub's."""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass
from typing import Any

from jupyterhub.services.auth import HubAuth

from gpuspawner.allocator.errors import ApiError

log = logging.getLogger(__name__)

VIEW = "custom:gpu:view"
MANAGE = "custom:gpu:manage"


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller. ``hub_id`` is set for a hub's spawner, which may do everything."""

    name: str
    hub_id: str | None = None
    scopes: frozenset[str] = frozenset()

    @property
    def may_view(self) -> bool:
        """Sees every host, GPU, lease and diagnosis."""
        return self.hub_id is not None or bool(self.scopes & {VIEW, MANAGE})

    @property
    def may_manage(self) -> bool:
        """Changes the pool and ends others' leases."""
        return self.hub_id is not None or MANAGE in self.scopes


class Gatekeeper:
    """Turns an ``Authorization`` header into a ``Principal``."""

    def __init__(self, spawners: dict[str, str], hub_auth: HubAuth | None) -> None:
        self._spawners = spawners  # token -> hub id
        self._hub_auth = hub_auth

    async def principal(self, header: str | None) -> Principal:
        """The caller; 401 without a valid token, 503 when the hub cannot be asked."""
        token = _token(header)
        if token is None:
            raise ApiError(401, "unauthorized", "Send a token: 'Authorization: Bearer <token>'.")
        for known, hub_id in self._spawners.items():
            if hmac.compare_digest(known.encode(), token.encode()):
                return Principal(f"spawner of {hub_id}", hub_id)
        user = await self._ask_hub(token)
        if user is None:
            raise ApiError(
                401, "unauthorized", "This token is not valid. Make a new one in JupyterHub."
            )
        name = str(user["name"])
        if user.get("kind", "user") != "user":
            # A service may be called like a user; it is not her, and has no leases.
            name = f"{user['kind']} {name}"
        return Principal(name, None, frozenset(user.get("scopes") or ()))

    async def _ask_hub(self, token: str) -> dict[str, Any] | None:
        if self._hub_auth is None:
            return None
        try:
            user: dict[str, Any] | None = await self._hub_auth.user_for_token(token, sync=False)
        except Exception as error:  # the library has its own zoo of HTTP errors
            log.warning("hub_unreachable error=%s", error)
            raise ApiError(
                503, "hub-unreachable", "JupyterHub cannot be asked who you are. Try again soon."
            ) from error
        return user


def _token(header: str | None) -> str | None:
    if not header:
        return None
    kind, _, token = header.partition(" ")
    return token.strip() or None if kind.lower() in ("bearer", "token") else None
