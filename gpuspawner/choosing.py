"""The part of the spawner that lets users choose: form, links, API options, live numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, ClassVar

from traitlets import default

from gpuspawner import form as start_form
from gpuspawner.client import AllocatorClient, AllocatorProblem
from gpuspawner.config import ConfigError
from gpuspawner.errors import GPUSpawnError
from gpuspawner.profile_list import Profile, ProfileListError, parse_profiles
from gpuspawner.profiles import Selection, choose, choose_stored, from_fields, offered
from gpuspawner.schema import GpuCounts, Lease
from gpuspawner.settings import GPUSpawnerSettings

_FORM_PATIENCE_S = 3.0


class ChoosingSpawner(GPUSpawnerSettings):
    """To be mixed in before ``jupyterhub.spawner.Spawner``, which has the rest."""

    # What is used of Spawner; it has no types.
    log: Any
    user: Any
    name: str
    user_options: dict[str, Any]

    _clients: ClassVar[dict[tuple[str, str], AllocatorClient]] = {}
    _selection: Selection | None = None

    @default("options_form")
    def _default_options_form(self) -> Callable[[Any], Awaitable[str]]:
        return self._options_form

    @default("options_from_form")
    def _default_options_from_form(self) -> Callable[[dict[str, Any]], Awaitable[dict[str, str]]]:
        return self._options_from_fields

    @default("apply_user_options")
    def _default_apply_user_options(self) -> Callable[[Any, dict[str, Any]], Awaitable[None]]:
        return self._apply_user_options

    def options_from_query(self, query_data: dict[str, Any]) -> Any:
        """A link with ``?opt-profile=…``; checked as the form is."""
        return self._options_from_fields(query_data)

    async def _options_from_fields(self, fields: dict[str, Any]) -> dict[str, str]:
        selection = choose(await self._profiles(), from_fields(fields), self._groups())
        return dict(selection.options)

    async def _apply_user_options(self, _spawner: Any, user_options: dict[str, Any]) -> None:
        self._selection = await self._select(user_options)

    async def _select(self, user_options: dict[str, Any]) -> Selection:
        profiles = await self._profiles()
        check = choose if self._asked_for_now() else choose_stored
        return check(profiles, user_options, self._groups())

    def _asked_for_now(self) -> bool:
        """Whether the options came with this very request to the API.

        JupyterHub hands over stored options in the same way, and those may have gone stale
        through no mistake of whoever starts the server. Forms and links were checked before.
        """
        body = getattr(getattr(self, "handler", None), "get_server_json_body", None)
        try:
            return body is not None and body()["user_options"] is not None
        except Exception:
            return False

    async def _profiles(self) -> tuple[Profile, ...]:
        raw = self.profile_list
        try:
            if callable(raw):
                raw = raw(self)
                raw = await raw if isawaitable(raw) else raw
            return parse_profiles(raw)
        except ProfileListError as error:
            self.log.error("c.GPUSpawner.profile_list: %s", error)
            raise GPUSpawnError(
                reason="configuration", log_message=f"profile_list: {error}"
            ) from error

    def _groups(self) -> frozenset[str]:
        return frozenset(group.name for group in self.user.groups)

    async def _options_form(self, _spawner: Any = None) -> str:
        """The start form. It must never fail: without it nobody could start anything."""
        profiles = offered(await self._profiles(), self._groups())
        counts, leases = await self._pool_now()
        try:
            last = dict(choose(profiles, self.user_options or {}, self._groups()).options)
        except GPUSpawnError:
            last = {}
        shown = start_form.Form(
            cards=start_form.cards(profiles, self._groups(), counts, last),
            counted_at=counts.at if counts else None,
            unreachable=counts is None,
            ended=start_form.last_end(leases),
        )
        return start_form.render(shown, self.profile_form_template)

    async def _pool_now(self) -> tuple[GpuCounts | None, list[Lease]]:
        try:
            client = self._client()
            async with asyncio.timeout(_FORM_PATIENCE_S):
                counts = await client.gpu_counts()
                return counts, await client.leases(self.user.name, self.name)
        except (AllocatorProblem, ConfigError, TimeoutError) as error:
            self.log.warning("The start form does without the pool's numbers: %s", error)
            return None, []

    def _client(self) -> AllocatorClient:
        """The hub's connections to the allocator, shared by all spawners."""
        try:
            token = self.installation().spawner_token()
        except ConfigError as error:
            self.log.error("%s", error)
            raise GPUSpawnError(reason="configuration", log_message=str(error)) from error
        key = (self.allocator_url, token)
        if key not in self._clients:
            try:
                self._clients[key] = AllocatorClient(self.allocator_url, token)
            except ValueError as error:
                raise GPUSpawnError(reason="configuration", log_message=str(error)) from error
        return self._clients[key]
