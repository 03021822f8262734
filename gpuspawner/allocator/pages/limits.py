"""The pages of limits and of the audit: what is set, who set it, and setting it."""

from __future__ import annotations

import re
from typing import Any

from gpuspawner import schema
from gpuspawner.allocator.pages import limit_data as data
from gpuspawner.allocator.pages.actions import Action, Field, Question
from gpuspawner.allocator.pages.base import not_there
from gpuspawner.allocator.pages.handlers import PartsPage
from gpuspawner.allocator.routes import Call
from gpuspawner.ledger import audit as audit_ledger
from gpuspawner.ledger import leases as lease_ledger
from gpuspawner.ledger import limits as limit_ledger
from gpuspawner.ledger.database import Transaction
from gpuspawner.pool.quota import Limits

_LINES = 50
_MOST = 100_000
_KNOWN = 500  # leases that are looked at for names


class LimitsPage(PartsPage):
    """``/admin/limits``: all limits."""

    template = "limits.html"
    parts = ("limits",)
    needs = "view"

    async def get(self) -> None:
        """The page, or its one part."""
        _ = self.visitor
        await self.send(self._read)

    def _read(self, tx: Transaction) -> dict[str, Any]:
        return {
            "groups": data.limit_groups(
                limit_ledger.load(tx),
                limit_ledger.holdings(tx),
                audit_ledger.last_of_limits(tx),
                self.site.urls,
            )
        }


class AuditPage(PartsPage):
    """``/admin/audit``: what admins did. ``?before=ID`` goes on after the line of that id."""

    template = "audit.html"
    parts = ("audit",)
    needs = "view"

    async def get(self) -> None:
        """The page, or its one part."""
        _ = self.visitor
        text = self.get_query_argument("before", "")
        if text and not re.fullmatch(r"[0-9]{1,18}", text):
            raise not_there("such page of the audit")
        await self.send(self._read, int(text) if text else None)

    def _read(self, tx: Transaction, before: int | None) -> dict[str, Any]:
        rows = audit_ledger.newest(tx, _LINES + 1, before)
        shown = rows[:_LINES]
        return {
            "rows": [data.audit_row(row) for row in shown],
            "before": before,
            "older": shown[-1]["id"] if len(rows) > _LINES else None,
        }


class ChangeLimit(Action):
    """``/admin/limits/KIND/set`` and ``clear``; of whom says ``?name=``."""

    needs = "manage"

    async def get(self, kind: str, verb: str) -> None:
        """Ask."""
        _ = self.visitor
        name = self.get_query_argument("name", "", strip=False)
        self.ask(await self._question(kind, verb, name))

    async def post(self, kind: str, verb: str) -> None:
        """Do it."""
        by = self.visitor
        known = self.get_body_argument("known", "", strip=False)
        question = await self._question(kind, verb, known)
        name = "" if kind == "default" else known or self.given("name")
        problem = self._problem(kind, verb, name)
        if problem:
            self.ask(question, problem)
            return
        if not self.answered(question):
            return
        gpus = int(self.given("gpus")) if verb == "set" else None
        body = schema.SetLimit(gpus=gpus, why=self.reason())
        await self.site.limits.change(Call(by, {}, {}, body), kind, name)
        whose = data.whose(kind, name)
        if gpus is None:
            self.say(f"{whose}: the limit is removed.")
        else:
            self.say(f"{whose}: at most {data.gpus(gpus)} at once.")
        self.go(question.back)

    def _problem(self, kind: str, verb: str, name: str) -> str:
        """What is wrong with the answers; empty if nothing."""
        if kind != "default" and not 0 < len(name) <= 255:
            return f"Say which {kind} the limit is for, as JupyterHub names it."
        number = self.given("gpus")
        if verb == "set" and not (re.fullmatch(r"[0-9]{1,6}", number) and int(number) <= _MOST):
            return f"A limit is a whole number from 0 to {_MOST}."
        return ""

    async def _question(self, kind: str, verb: str, name: str) -> Question:
        """``name`` is that of a limit in the list; empty for one that is to be typed."""
        limits, names = await self.site.context.ledger.read(_read, kind)
        old = _of(limits, kind, name)
        back = f"{self.site.urls.prefix}admin/limits"
        if verb == "clear":
            if old is None:
                raise not_there("such limit")
            return Question(
                title="Remove this limit?",
                what=f"{data.whose(kind, name)}: {data.gpus(old)} at once",
                effect=_without(limits, kind),
                button="Remove",
                back=back,
                reason="needed",
                grave=True,
                fields=(Field("known", value=name, kind="hidden"),),
            )
        fields: tuple[Field, ...] = ()
        if kind != "default" and name:
            fields = (Field("known", value=name, kind="hidden"),)
        elif kind != "default":
            fields = (Field("name", f"Name of the {kind}", known=names),)
        value = "" if old is None else str(old)
        return Question(
            title=f"Limit a {kind}" if not name and kind != "default" else "Change the limit",
            what=data.whose(kind, name) if name or kind == "default" else "",
            effect=_MEANING[kind],
            button="Set",
            back=back,
            reason="needed",
            fields=(*fields, Field("gpus", "GPUs at once", value, "number")),
        )


_MEANING = {
    "default": "Every user who has no limit of her own may hold so many GPUs at once. With 0 she "
    "starts servers without GPUs only.",
    "user": "She may hold so many GPUs at once, whatever the default is. With 0 she starts servers "
    "without GPUs only.",
    "group": "All members of the JupyterHub group together may hold so many GPUs at once.",
}


def _read(tx: Transaction, kind: str) -> tuple[Limits, tuple[str, ...]]:
    """The limits, and the names that the pool has seen lately and that have none."""
    limits = limit_ledger.load(tx)
    leases = lease_ledger.recent(tx, _KNOWN)
    if kind == "user":
        return limits, tuple(sorted({one.username for one in leases} - set(limits.users)))
    seen = {group for one in leases for group in one.groups}
    return limits, tuple(sorted(seen - set(limits.groups)))


def _of(limits: Limits, kind: str, name: str) -> int | None:
    if kind == "default":
        return limits.default
    return (limits.users if kind == "user" else limits.groups).get(name)


def _without(limits: Limits, kind: str) -> str:
    """What holds once a limit is gone."""
    if kind == "group":
        return "The group's members are then limited one by one only."
    if kind == "default":
        return "Users without a limit of their own may then hold as many GPUs as there are."
    if limits.default is None:
        return "She may then hold as many GPUs as there are."
    return f"The default then holds for her: {data.gpus(limits.default)} at once."
