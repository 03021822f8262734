"""The API of limits and of the audit."""

from __future__ import annotations

import logging

from gpuspawner import schema
from gpuspawner.allocator.clock import moment, now_ms
from gpuspawner.allocator.context import Context
from gpuspawner.allocator.errors import ApiError
from gpuspawner.allocator.routes import Answer, Call, Route, number, reply_list
from gpuspawner.ledger import audit as audit_ledger
from gpuspawner.ledger import limits as limit_ledger

log = logging.getLogger(__name__)


class LimitApi:
    """How many GPUs users and groups may hold at once, and what admins did."""

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
            Route("GET", "audit", "view", self.audit, "What admins did, newest first", None,
                  reply_list("audit", schema.AuditEntry),
                  query={"before": "older than the line of this id", "limit": "at most"}),
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
        return await self.change(call, "default", "")

    async def put(self, call: Call) -> Answer:
        """The limit of one user or group."""
        if call.path["kind"] not in ("user", "group"):
            raise ApiError(404, "not-found", "There are limits of kind default, user and group.")
        return await self.change(call, call.path["kind"], call.path["name"])

    async def change(self, call: Call, kind: str, name: str) -> Answer:
        """Set a limit or take it away, with a line of audit."""
        body: schema.SetLimit = call.body
        if len(name) > 255:
            raise ApiError(400, "bad-request", "No user or group has a name that long.")
        await self.ctx.ledger.write(
            limit_ledger.put, kind, name, body.gpus, call.principal.name, body.why, now_ms()
        )
        log.info("limit kind=%s name=%r gpus=%s by=%r", kind, name, body.gpus, call.principal.name)
        self.ctx.signals.ring("limits", "audit")
        return Answer(204)

    async def audit(self, call: Call) -> Answer:
        """The newest lines first; the ones before a line of that page come next."""
        limit = number("limit", call.query.get("limit", "200"), 1, 1000)
        text = call.query.get("before")
        before = None if text is None else number("before", text, 0, 2**63 - 1)
        rows = await self.ctx.ledger.read(audit_ledger.newest, limit, before)
        entries = [schema.AuditEntry(at=moment(row.pop("at_ms")), **row) for row in rows]
        return Answer(200, {"audit": entries})
