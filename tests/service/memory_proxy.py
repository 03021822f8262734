"""A proxy for JupyterHub that only remembers its routes: tests need no Node."""

from __future__ import annotations

from typing import Any, ClassVar

from jupyterhub.proxy import Proxy


class MemoryProxy(Proxy):  # type: ignore[misc]  # JupyterHub has no types
    """The smallest proxy that the hub accepts. Requests go to the hub directly."""

    should_start = False
    routes: ClassVar[dict[str, dict[str, Any]]] = {}

    async def add_route(self, routespec: str, target: str, data: dict[str, Any]) -> None:
        self.routes[routespec] = {"routespec": routespec, "target": target, "data": data}

    async def delete_route(self, routespec: str) -> None:
        self.routes.pop(routespec, None)

    async def get_all_routes(self) -> dict[str, dict[str, Any]]:
        return dict(self.routes)
