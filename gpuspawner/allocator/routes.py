"""How an API route is written down: one row says what it takes, what it gives and who may.

The server dispatches by these rows and the OpenAPI description is made from them, so that the two
cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model

from gpuspawner.allocator.auth import Principal
from gpuspawner.allocator.errors import ApiError

Access = Literal["public", "anyone", "view", "manage", "spawner"]

ACCESS_TEXT: Mapping[Access, str] = {
    "public": "without a token",
    "anyone": "any hub user, for what is theirs",
    "view": "scope custom:gpu:view",
    "manage": "scope custom:gpu:manage",
    "spawner": "the hub's spawner alone",
}


@dataclass(frozen=True, slots=True)
class Call:
    """One request, checked: path parameters, query, body and caller."""

    principal: Principal
    path: Mapping[str, str]
    query: Mapping[str, str]
    body: Any = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body; a body of ``None`` is an empty answer."""

    status: int
    body: BaseModel | dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """One row."""

    method: str
    path: str
    access: Access
    call: Callable[[Call], Awaitable[Answer]]
    summary: str
    body: type[BaseModel] | None = None
    reply: type[BaseModel] | None = None
    statuses: tuple[int, ...] = (200,)
    query: Mapping[str, str] = field(default_factory=dict)
    stream: bool = False
    conflicts: bool = False  # may answer 409

    @property
    def refusals(self) -> tuple[int, ...]:
        """The statuses of its refusals."""
        known = {400, 503}
        if self.access != "public":
            known.add(401)
        if self.access in ("view", "manage", "spawner"):
            known.add(403)
        if "{" in self.path:
            known.add(404)
        if self.body is not None:
            known |= {413, 415}
        if self.conflicts:
            known.add(409)
        return tuple(sorted(known))

    @property
    def pattern(self) -> re.Pattern[str]:
        """The path as a regular expression with named groups."""
        return re.compile("^" + re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", self.path) + "$")


def number(name: str, text: str, low: int, high: int) -> int:
    """A number of the query, brought between its bounds; 400 when it is none."""
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise ApiError(
            400, "bad-number", f"'{name}' takes a whole number from {low} to {high}. Send one."
        )
    return min(high, max(low, int(text)))


def reply_list(name: str, of: type[BaseModel]) -> type[BaseModel]:
    """The type of ``{"<name>": [...]}``, the shape of every list in the API."""
    model: type[BaseModel] = create_model(  # type: ignore[call-overload]
        f"{of.__name__}List",
        __config__=ConfigDict(frozen=True),
        **{name: (list[of], ...)},  # type: ignore[valid-type]
    )
    return model
