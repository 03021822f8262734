"""What a user is told when a server cannot start, and what she can do about it.

JupyterHub shows an error in three places: the REST API's answer, the last event of the progress
stream and a page. ``GPUSpawnError`` makes all three say the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from http import HTTPStatus

from jupyterhub.spawner import SpawnException

from gpuspawner.client import AllocatorError, AllocatorProblem
from gpuspawner.schema import Lease, Refusal


@dataclass(frozen=True)
class Advice:
    """What is said for one reason: a sentence in case the allocator said nothing more exact, and
    what to do next."""

    cause: str
    remedy: str
    status: int = HTTPStatus.SERVICE_UNAVAILABLE
    retry_after_s: int | None = None


_TELL_ADMIN = "If it happens again, tell an administrator the time and your user name."

_NO_ENTRY = Advice(
    "The hub is not allowed to use the GPU pool.",
    "An administrator has to give hub and allocator the same token; then start again.",
)

# Reasons why an allocator refuses a lease (schema.Refusal.reason).
REFUSALS: dict[str, Advice] = {
    "capacity": Advice(
        "There is no room for this server right now.",
        "Choose another profile, or try again when another server has stopped.",
        retry_after_s=60,
    ),
    "limit": Advice(
        "This server would pass a limit that is set for you.",
        "Stop one of your other servers, or ask an administrator for more.",
        HTTPStatus.FORBIDDEN,
    ),
    "conflict": Advice(
        "This start was asked for twice, with different contents.",
        "Start the server again.",
        HTTPStatus.CONFLICT,
    ),
    "bad-request": Advice(
        "The GPU pool does not understand this request.",
        "Choose another profile; an administrator should look at this one.",
        HTTPStatus.BAD_REQUEST,
    ),
    "unknown-image": Advice(
        "The image of this profile does not exist.",
        "Choose another image, or ask an administrator.",
        HTTPStatus.BAD_REQUEST,
    ),
    "too-little-memory": Advice(
        "The image needs more memory than this profile gives.",
        "Choose a profile with more memory, or another image.",
        HTTPStatus.BAD_REQUEST,
    ),
    "ended": Advice(
        "This start has already ended.", "Start the server again.", HTTPStatus.CONFLICT
    ),
    "in-use": Advice("The server still runs.", "Stop it first.", HTTPStatus.CONFLICT),
    "database": Advice(
        "The GPU pool cannot write down who has which GPU, so it gives none out.",
        "Try again in a few minutes. " + _TELL_ADMIN,
        retry_after_s=60,
    ),
    "deposed": Advice(
        "The GPU pool is just being taken over by a newer process.",
        "Try again in a minute.",
        retry_after_s=30,
    ),
    "unauthorized": _NO_ENTRY,
    "forbidden": _NO_ENTRY,
    "hub-unreachable": _NO_ENTRY,
    "token": _NO_ENTRY,
    "bad-answer": Advice(
        "The GPU pool gave an answer that makes no sense.",
        "An administrator should look at the hub's log. " + _TELL_ADMIN,
    ),
    "unreachable": Advice(
        "The GPU pool does not answer.",
        "Try again in a few minutes. " + _TELL_ADMIN,
        retry_after_s=60,
    ),
}

# What helps against a placement that failed on one constraint (schema.Refusal.constraint).
CONSTRAINTS: dict[str, str] = {
    "gpu": "Choose a profile with another or with fewer GPUs, or try again when a server has "
    "stopped.",
    "cores": "Choose a profile with fewer cores, or try again when a server has stopped.",
    "memory": "Choose a profile with less memory, or try again when a server has stopped.",
    "home": "Your files are on a host that has no room now. Try again later, or start a server "
    "with another name, which has files of its own.",
    "image": "Choose another image, or ask an administrator to copy this one to the hosts.",
    "drained": "The hosts are being serviced. Try again later.",
    "address": "Try again when a server has stopped. " + _TELL_ADMIN,
    "reachable": "A host does not answer. Try again in a few minutes. " + _TELL_ADMIN,
}

# Reasons why a lease ended (schema.Lease.reason).
ENDS: dict[str, Advice] = {
    "released": Advice(
        "The start was cancelled.", "Start the server again when you need it.", HTTPStatus.CONFLICT
    ),
    "never-started": Advice(
        "The start was cancelled.", "Start the server again when you need it.", HTTPStatus.CONFLICT
    ),
    "refused": Advice(
        "There was no room for this server.",
        "Choose another profile, or try again when another server has stopped.",
        retry_after_s=60,
    ),
    "superseded": Advice(
        "A newer start of this server took its place.",
        "Go to the home page, where the newer one is shown.",
        HTTPStatus.CONFLICT,
    ),
    "guest-gone": Advice(
        "The virtual machine ended by itself: it was shut down, rebooted or crashed.",
        "Your files are kept; start the server again.",
    ),
    "boot-failed": Advice(
        "The virtual machine came up, but JupyterLab did not answer in time.",
        "Start the server again. " + _TELL_ADMIN,
    ),
    "hub-forgot": Advice(
        "JupyterHub had no record of this server any more, so its virtual machine was ended.",
        "Your files are kept; start the server again.",
    ),
    "wait-timeout": Advice(
        "No GPU became free while this start waited.",
        "Try again in a few minutes, or choose another profile.",
        retry_after_s=120,
    ),
    "host-lost": Advice(
        "The machine that the server ran on was restarted or lost.",
        "Files in your home are kept; start the server again.",
    ),
    "host-error": Advice(
        "The machine that should run the server reported an error.",
        "Start the server again. " + _TELL_ADMIN,
    ),
    "admin": Advice(
        "An administrator ended this server.",
        "Ask an administrator before you start it again.",
        HTTPStatus.CONFLICT,
    ),
}

# The hub's own reasons.
OWN: dict[str, Advice] = {
    "boot-timeout": Advice(
        "The server was not ready in the time that is allowed for a start.",
        "Start it again. " + _TELL_ADMIN,
        HTTPStatus.GATEWAY_TIMEOUT,
    ),
    "hub-url": Advice(
        "Virtual machines could not reach this hub.",
        "An administrator has to set hub_connect_url to an address that they can reach.",
        HTTPStatus.INTERNAL_SERVER_ERROR,
    ),
    "configuration": Advice(
        "The hub's settings for GPU servers are not complete.",
        "An administrator has to correct them; the hub's log says where.",
        HTTPStatus.INTERNAL_SERVER_ERROR,
    ),
    "payload": Advice(
        "The settings for this server cannot be carried into a virtual machine.",
        "An administrator should look at the hub's log.",
        HTTPStatus.INTERNAL_SERVER_ERROR,
    ),
    "rename": Advice(
        "A server cannot be given another name, because its files belong to its name.",
        "Make a new server with the name that you want; its display name can be changed freely.",
        HTTPStatus.BAD_REQUEST,
    ),
    "profile": Advice("This choice is not possible.", "Choose again on the start page.", 400),
    "profile-not-allowed": Advice(
        "This choice is not open to you.",
        "Choose another, or ask an administrator for access.",
        HTTPStatus.FORBIDDEN,
    ),
}

_UNKNOWN = Advice("The server ended unexpectedly.", "Start it again. " + _TELL_ADMIN)


class GPUSpawnError(SpawnException):  # type: ignore[misc]  # JupyterHub has no types
    """A start that failed for a reason which the user is told.

    ``reason`` is a fixed word for metrics. ``cause`` says what happened and ``remedy`` what to do;
    both are plain text and are escaped for HTML here. ``log_message`` stands only in the hub's
    log. Either sentence defaults to the table's one for the reason.
    """

    def __init__(
        self,
        cause: str = "",
        *,
        reason: str,
        remedy: str | None = None,
        status_code: int | None = None,
        retry_after_s: int | None = None,
        log_message: str = "",
    ) -> None:
        advice = advice_for(reason)
        self.cause = _sentence(cause or advice.cause)
        self.remedy = _sentence(advice.remedy if remedy is None else remedy)
        text = f"{self.cause} {self.remedy}".strip()
        html = f"<strong>{escape(self.cause)}</strong> {escape(self.remedy)}".strip()
        super().__init__(
            text,
            reason=reason,
            message_html=html,
            status_code=int(status_code or advice.status),
        )
        # Tornado's constructor, which runs last, overwrites log_message with the text in which
        # every % is doubled, and later uses it as a format. Keep that, but never show it.
        self._log_text = log_message or text
        self.log_message = self._log_text.replace("%", "%%")
        # JupyterHub 6.1's pages and progress events look at these two only.
        self.jupyterhub_message = text
        self.jupyterhub_html_message = html
        self.headers: dict[str, str] = {}
        seconds = advice.retry_after_s if retry_after_s is None else retry_after_s
        if seconds is not None:
            self.headers["Retry-After"] = str(max(1, int(seconds)))

    def get_message(self) -> str:
        """For the log."""
        return self._log_text

    def __str__(self) -> str:
        return f"{self.status_code} {type(self).__name__}(reason={self.reason}): {self._log_text}"


def _sentence(text: str) -> str:
    """One line of text that ends like a sentence."""
    text = " ".join(text.split())
    return text if not text or text[-1] in ".!?…" else f"{text}."


def advice_for(reason: str) -> Advice:
    """The table's entry for a reason, from whichever side it comes."""
    return REFUSALS.get(reason) or ENDS.get(reason) or OWN.get(reason) or _UNKNOWN


def from_refusal(refusal: Refusal) -> GPUSpawnError:
    """The allocator refused: its own sentence, and what helps against that constraint."""
    remedy = CONSTRAINTS.get(refusal.constraint or "") if refusal.reason == "capacity" else None
    if "Try again" in refusal.message:
        remedy = ""  # it says what to do; twice would be confusing
    known = refusal.reason in REFUSALS
    internal = REFUSALS.get(refusal.reason) is _NO_ENTRY or refusal.reason == "bad-answer"
    return GPUSpawnError(
        # What a wrong token or a foreign answer looks like is for the log, not for users.
        "" if internal else refusal.message,
        reason=refusal.reason if known else "refusal",
        remedy=remedy,
        status_code=None if internal else _error_status(refusal.status),
        retry_after_s=refusal.retry_after_s,
        log_message=f"{refusal.reason} ({refusal.status}): {refusal.message}",
    )


def from_problem(problem: AllocatorProblem) -> GPUSpawnError:
    """A call to the allocator failed."""
    if isinstance(problem, AllocatorError):
        return from_refusal(problem.refusal)
    return GPUSpawnError(reason="unreachable", log_message=str(problem))


def from_lease(lease: Lease) -> GPUSpawnError:
    """A lease ended before its server was ready."""
    reason = lease.reason or "unknown"
    return GPUSpawnError(
        lease.message or "",
        reason=reason if reason in ENDS else "server-ended",
        log_message=f"lease {lease.id} ended ({reason}): {lease.message or 'no message'}",
    )


def why_ended(lease: Lease) -> str | None:
    """One line for the start page on why the last server ended; None when its user knows."""
    reason = lease.reason or "unknown"
    if reason in ("released", "never-started", "superseded"):
        return None
    return _sentence(lease.message or advice_for(reason).cause)


def _error_status(status: int) -> int:
    """The hub must answer with an error, whatever the allocator sent."""
    return status if 400 <= status < 600 and status not in (401, 404) else 503
