"""The pages that do something: each asks first (GET), then does it (POST).

The question is a page of its own; the pages' script shows it in a dialog.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from gpuspawner import schema
from gpuspawner.allocator.api_leases import stop_title
from gpuspawner.allocator.clock import now_ms
from gpuspawner.allocator.pages import data
from gpuspawner.allocator.pages.base import Page, PageError, not_there
from gpuspawner.allocator.pages.hub import HubSilent, Said
from gpuspawner.allocator.pages.looks import GPU_ACTION_TEXTS
from gpuspawner.allocator.routes import Call
from gpuspawner.ledger import audit as audit_ledger
from gpuspawner.ledger import gpus as gpu_ledger
from gpuspawner.ledger import hosts as host_ledger
from gpuspawner.ledger import leases as lease_ledger
from gpuspawner.ledger.database import Transaction
from gpuspawner.ledger.records import GpuRecord, LeaseRecord
from gpuspawner.pool.states import LeaseState

log = logging.getLogger(__name__)

_LONGEST_REASON = 400
_LONGEST_HOLD = 500


@dataclass(frozen=True, slots=True)
class Field:
    """One thing that is asked for, as an HTML input of type ``kind`` (``text``, ``number``,
    ``hidden``), or as a choice if there are ``options`` of (value, text). ``known`` are values to
    choose from while typing."""

    name: str
    label: str = ""
    value: str = ""
    kind: str = "text"
    options: tuple[tuple[str, str], ...] = ()
    known: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked before something is done. ``reason``: ``needed``, ``welcome`` or ``none``."""

    title: str
    what: str
    effect: str
    button: str
    back: str
    reason: str = "none"
    grave: bool = False
    fields: tuple[Field, ...] = ()


class Action(Page):
    """Ask, then do."""

    def ask(self, question: Question, problem: str = "") -> None:
        """The question, as a page or as the inside of a dialog."""
        template = "parts/question.html" if self.fragment else "question.html"
        self.show(
            template,
            400 if problem else 200,
            question=question,
            problem=problem,
            given={
                name: self.get_body_argument(name, "", strip=False)
                for name in self.request.body_arguments
            },
        )

    def given(self, name: str) -> str:
        """What a field was answered with, on one line and fit to be stored."""
        text = self.get_body_argument(name, "", strip=False)
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())

    def reason(self) -> str:
        """The reason that was given, on one line."""
        return self.given("reason")[:_LONGEST_REASON]

    def answered(self, question: Question) -> bool:
        """Everything that was asked for is there; otherwise the question is asked again."""
        if question.reason == "needed" and not self.reason():
            self.ask(question, "Give a reason; others read it.")
            return False
        return True


# ------------------------------------------------------------------ servers


def _name_of(lease: LeaseRecord) -> str:
    if lease.server_name:
        return f"the server {lease.server_name!r} of {lease.username}"
    return f"the default server of {lease.username}"


class StopServer(Action):
    """Shared by the user's and the admin's stop."""

    async def lease(self, lease_id: str) -> LeaseRecord:
        """The lease; 404 if there is none."""
        found = await self.site.context.ledger.read(lease_ledger.get, lease_id)
        if found is None:
            raise not_there("such server")
        return found

    async def hub_has(self, lease: LeaseRecord) -> bool:
        """The lease is of our hub, and the hub knows its server."""
        if lease.hub_id != self.site.hub_id:
            return False
        assert self.site.hub is not None
        try:
            return await self.site.hub.has_server(lease.username, lease.server_name)
        except HubSilent as error:
            raise _silent(error) from error

    async def hub_stop(self, lease: LeaseRecord, token: str | None) -> Said:
        """Let the hub stop it."""
        assert self.site.hub is not None
        try:
            return await self.site.hub.stop(lease.username, lease.server_name, token)
        except HubSilent as error:
            raise _silent(error) from error

    async def over(self, lease: LeaseRecord) -> bool:
        """Whether it is ending or has ended by now."""
        fresh = await self.lease(lease.id)
        return fresh.state in (LeaseState.STOPPING, LeaseState.ENDED)


def _silent(error: HubSilent) -> PageError:
    return PageError(
        503,
        "The server was not stopped",
        f"{error} Servers are stopped through JupyterHub, so that it knows.",
        "Try again in a minute. If it stays so, an administrator can end the lease with "
        "'gpuspawner lease end'.",
    )


def _refused(said: Said) -> PageError:
    words = f" It said: {said.message}" if said.message else ""
    if said.status == 403:
        return PageError(
            403,
            "JupyterHub did not allow the stop",
            f"The server goes on.{words}",
            "Log out and in again, then try once more, or use the button on JupyterHub's home "
            "page. An administrator finds the needed scope (delete:servers) in "
            "jupyterhub_config.py.",
        )
    return PageError(
        502,
        "JupyterHub could not stop the server",
        f"It answered with status {said.status}.{words}",
        "Try again in a minute.",
    )


class StopMine(StopServer):
    """``/leases/ID/stop``: a user stops her own server, with her own rights at the hub."""

    async def _mine(self, lease_id: str) -> LeaseRecord:
        name = self.visitor.name
        lease = await self.lease(lease_id)
        if lease.username != name or lease.hub_id != self.site.hub_id:
            raise not_there("such server of yours")
        return lease

    def _question(self, lease: LeaseRecord) -> Question:
        return Question(
            title="Stop your server?",
            what=data.server_title(lease.server_name),
            effect="What is not saved is lost, and so is what is in the GPU's memory. The files "
            "in your home are kept.",
            button="Stop it",
            back=self.site.urls.prefix,
            grave=True,
        )

    async def get(self, lease_id: str) -> None:
        """Ask."""
        self.ask(self._question(await self._mine(lease_id)))

    async def post(self, lease_id: str) -> None:
        """Stop it."""
        lease = await self._mine(lease_id)
        said = await self.hub_stop(lease, self.hub_auth.get_token(self))
        if said.status == 404 or (said.ok and not await self.over(lease)):
            if await self.hub_has(lease):
                self.say("Your server is being stopped.")
            else:
                self.say(
                    "JupyterHub does not know this server any more. The allocator notices that by "
                    "itself and ends it within a few minutes.",
                    "wait",
                )
        elif said.ok:
            self.say("Your server is being stopped. Your files are kept.")
        else:
            raise _refused(said)
        self.go(self.site.urls.prefix)


class StopAny(StopServer):
    """``/admin/leases/ID/stop``: an admin stops somebody's server."""

    needs = "manage"

    def _question(self, lease: LeaseRecord) -> Question:
        return Question(
            title="Stop this server?",
            what=_name_of(lease),
            effect="What the user has not saved is lost; the home is kept. She reads the reason. "
            "It is stopped through JupyterHub; if JupyterHub does not know the server, its lease "
            "is ended directly.",
            button="Stop it",
            back=f"{self.site.urls.prefix}admin#leases",
            reason="needed",
            grave=True,
        )

    async def get(self, lease_id: str) -> None:
        """Ask."""
        _ = self.visitor
        self.ask(self._question(await self.lease(lease_id)))

    async def post(self, lease_id: str) -> None:
        """Stop it, through the hub if the hub knows it."""
        by = self.visitor
        lease = await self.lease(lease_id)
        question = self._question(lease)
        if not self.answered(question):
            return
        if await self.over(lease):
            self.say(f"Nothing to do: {_name_of(lease)} is ending already.", "wait")
        elif await self.hub_has(lease):
            await self._tell(lease, by.name)
            said = await self.hub_stop(lease, None)
            if not said.ok:
                await self._audit(lease, by.name, f"JupyterHub refused: {said.message}")
                raise _refused(said)
            self.say(f"JupyterHub is stopping {_name_of(lease)}.")
        else:
            body = schema.EndLease(reason=self.reason())
            await self.site.leases.end(Call(by, {"id": lease.id}, {}, body))
            other = lease.hub_id != self.site.hub_id
            why = f"It belongs to the hub {lease.hub_id!r}" if other else "JupyterHub does not know"
            self.say(
                f"{why}{'' if other else f' {_name_of(lease)}'}, so its lease was ended directly.",
                "wait",
            )
        log.info(
            "lease_stopped_by_admin lease=%s by=%r reason=%r", lease.id, by.name, self.reason()
        )
        self.go(question.back)

    async def _tell(self, lease: LeaseRecord, by: str) -> None:
        """The reason goes into the lease's story first: the user reads it there."""

        def write(tx: Transaction) -> None:
            fresh = lease_ledger.need(tx, lease.id)
            text = f"{by} (an admin) stops this server: {self.reason()}"
            lease_ledger.add_event(tx, fresh, now_ms(), "progress", 100, text)
            audit_ledger.add(tx, now_ms(), by, stop_title(lease), self.reason())

        await self.site.context.ledger.write(write)
        self.site.context.signals.ring(f"events:{lease.id}", "audit")

    async def _audit(self, lease: LeaseRecord, by: str, why: str) -> None:
        what = f"not done: {stop_title(lease)}"
        await self.site.context.ledger.write(audit_ledger.add, now_ms(), by, what, why)
        self.site.context.signals.ring("audit")


# ------------------------------------------------------------------ hosts


class Drain(Action):
    """``/admin/hosts/HOST/drain`` and ``undrain``."""

    needs = "manage"

    async def _question(self, host: str, verb: str) -> Question:
        if await self.site.context.ledger.read(host_ledger.get, host) is None:
            raise not_there(f"host {host[:40]!r}")
        back = f"{self.site.urls.prefix}admin#host-{host}"
        if verb == "drain":
            return Question(
                title="Drain this host?",
                what=host,
                effect="It takes no new servers. Those that run there go on until they are "
                "stopped.",
                button="Drain",
                back=back,
                reason="welcome",
            )
        return Question(
            title="Let this host take servers again?",
            what=host,
            effect="Its free GPUs may be given out at once.",
            button="Undrain",
            back=back,
            reason="welcome",
        )

    async def get(self, host: str, verb: str) -> None:
        """Ask."""
        _ = self.visitor
        self.ask(await self._question(host, verb))

    async def post(self, host: str, verb: str) -> None:
        """Do it."""
        by = self.visitor
        question = await self._question(host, verb)
        body = schema.ChangeHost(drained=verb == "drain", reason=self.reason())
        await self.site.pool.change_host(Call(by, {"name": host}, {}, body))
        taken = "takes no new servers" if body.drained else "takes servers again"
        self.say(f"Host {host} {taken}.")
        self.go(question.back)


# ------------------------------------------------------------------ GPUs


class ActOnGpu(Action):
    """``/admin/gpus/HOST/ADDRESS/ACTION``: retest, hold, unhold, enroll, retire."""

    needs = "manage"

    async def _gpu(self, host: str, address: str) -> GpuRecord:
        gpu = await self.site.context.ledger.read(gpu_ledger.get, host, address)
        if gpu is None:
            raise not_there(f"GPU {address[:16]} on host {host[:40]!r}")
        return gpu

    def _question(self, gpu: GpuRecord, action: str) -> Question:
        text = GPU_ACTION_TEXTS[action]
        fields: tuple[Field, ...] = ()
        effect = text.effect
        if action == "unhold" and len(gpu.holds) > 1:
            options = (("", "All of them"), *((hold, hold) for hold in gpu.holds))
            fields = (Field("choice", "Which one", options=options),)
        elif action == "unhold" and gpu.holds:
            fields = (Field("choice", value=gpu.holds[0], kind="hidden"),)
            effect = f"The hold: {gpu.holds[0]}. {effect}"
        return Question(
            title=text.title,
            what=f"{gpu.model} at {gpu.address} on {gpu.host}",
            effect=effect,
            button=text.button,
            back=self.site.urls.gpu(gpu.host, gpu.address),
            reason=text.reason,
            grave=text.grave,
            fields=fields,
        )

    async def get(self, host: str, address: str, action: str) -> None:
        """Ask."""
        _ = self.visitor
        self.ask(self._question(await self._gpu(host, address), action))

    async def post(self, host: str, address: str, action: Any) -> None:
        """Do it."""
        by = self.visitor
        gpu = await self._gpu(host, address)
        question = self._question(gpu, action)
        if not self.answered(question):
            return
        reason, hold = self.reason(), None
        if action == "hold":
            # Holds have no column for who made them, and whoever sees one asks.
            reason = f"{reason} ({by.name})"[:_LONGEST_HOLD]
        elif action == "unhold":
            hold = self.get_body_argument("choice", "", strip=False) or None
            if hold is not None and hold not in gpu.holds:
                self.ask(question, "This hold is gone. Look at those that are left.")
                return
        body = schema.GpuAction(action=action, reason=reason, hold=hold)
        await self.site.pool.act(Call(by, {"host": host, "address": address}, {}, body))
        self.say(f"GPU {gpu.address} on {gpu.host}: {GPU_ACTION_TEXTS[action].done}")
        self.go(question.back)
