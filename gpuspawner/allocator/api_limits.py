"""The API of limits and their audit."""

from __future__ import annotations

import logging

from gpuspawner import schema
from gpuspawner.allocator.clock import moment, now_ms
from gpuspawner.allocator.context import Context
from gpuspawner.allocator.errors import ApiError
from gpuspawner.allocator.routes import Answer, Call, Route, reply_list
from gpuspawner.ledger import limits as limit_ledger

log = logging.getLogger(__name__)


class LimitApi:
    """How many GPUs users and groups may hold at once."""

    def __init__(self, context: Context) -> None:
        self.ctx = context

    def routes(self) -> list[Route]:
        """The rows of this part."""
        return [
            Route("GET", "limits", "view", self.limits, "All limits", None,
                  reply_list("limits", schema.Limit)),
            Route("PUT", "limits/default", "manage", self.put_default, "Limit of every user",
                  schema.SetLimit, None, (204,)),
            Route("PUT", "limits/{kind}/{name}", "manage", self.put, "Limit of a user or group",
                  schema.SetLimit, None, (204,)),
            Route("GET", "audit", "view", self.audit, "Who changed which limit", None,
                  reply_list("audit", schema.AuditEntry)),
        ]  # fmt: skip

    async def limits(self, call: Call) -> Answer:
        """All limits, the default first."""
        known = await self.ctx.ledger.read(limit_ledger.load)
        found = []
        if known.default is not None:
            found.append(schema.Limit(kind="default", name="", gpus=known.default))
        found += [
            schema.Limit(kind="group", name=n, gpus=g) for n, g in sorted(known.groups.items())
        ]
        found += [schema.Limit(kind="user", name=n, gpus=g) for n, g in sorted(known.users.items())]
        return Answer(200, {"limits": found})

    async def put_default(self, call: Call) -> Answer:
        """The limit of users who have none of their own."""
        return await self._put(call, "default", "")

    async def put(self, call: Call) -> Answer:
        """The limit of one user or group."""
        if call.path["kind"] not in ("user", "group"):
            raise ApiError(404, "not-found", "There are limits of kind default, user and group.")
        return await self._put(call, call.path["kind"], call.path["name"])

    async def _put(self, call: Call, kind: str, name: str) -> Answer:
        body: schema.SetLimit = call.body
        if len(name) > 255:
            raise ApiError(400, "bad-request", "No user or group has a name that long.")
        await self.ctx.ledger.write(
            limit_ledger.put, kind, name, body.gpus, call.principal.name, body.why, now_ms()
        )
        log.info("limit kind=%s name=%r gpus=%s by=%r", kind, name, body.gpus, call.principal.name)
        return Answer(204)

    async def audit(self, call: Call) -> Answer:
        """The newest changes first."""
        rows = await self.ctx.ledger.read(limit_ledger.audit, 200)
        entries = [schema.AuditEntry(at=moment(row.pop("at_ms")), **row) for row in rows]
        return Answer(200, {"audit": entries})
