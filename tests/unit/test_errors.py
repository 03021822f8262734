"""Every reason has a sentence and a next step, and nothing in them becomes HTML."""

from __future__ import annotations

import logging
import re
from datetime import UTC, datetime
from html import unescape
from typing import Any

import pytest

from gpuspawner.client import AllocatorError, AllocatorUnreachable
from gpuspawner.errors import (
    CONSTRAINTS,
    ENDS,
    OWN,
    REFUSALS,
    GPUSpawnError,
    from_lease,
    from_problem,
    from_refusal,
    why_ended,
)
from gpuspawner.pool.states import EndReason
from gpuspawner.schema import Lease, LeaseRequest, Refusal


def a_lease(**changes: Any) -> Lease:
    values: dict[str, Any] = {
        "id": "0" * 8 + "-0000-0000-0000-" + "0" * 12,
        "hub_id": "hub",
        "username": "ada",
        "server_name": "",
        "start_id": "start-12345",
        "state": "ended",
        "request": LeaseRequest(gpus=1, cores=1, memory_mib=1024, image="lab"),
        "created_at": datetime.now(UTC),
        "ended_at": datetime.now(UTC),
    }
    return Lease(**(values | changes))


def test_every_end_of_a_lease_has_an_explanation() -> None:
    assert set(ENDS) == {str(reason) for reason in EndReason}


@pytest.mark.parametrize("reason", [*REFUSALS, *ENDS, *OWN])
def test_every_reason_says_what_and_what_next(reason: str) -> None:
    error = GPUSpawnError(reason=reason)
    assert re.match(r"^[A-Z].*[.!?] [A-Z].*[.!?]$", error.jupyterhub_message)
    assert 400 <= error.status_code < 600


def test_what_to_do_is_said_once() -> None:
    said = "The only GPU is in use. Try again when somebody has stopped."
    refusal = Refusal(status=503, message=said, reason="capacity", constraint="gpu")
    assert from_refusal(refusal).jupyterhub_message == said


@pytest.mark.parametrize("constraint", sorted(CONSTRAINTS))
def test_capacity_names_what_helps(constraint: str) -> None:
    refusal = Refusal(
        status=503, message="No GPU is free", reason="capacity", constraint=constraint
    )
    error = from_refusal(refusal)
    assert error.jupyterhub_message == f"No GPU is free. {CONSTRAINTS[constraint]}"
    assert error.status_code == 503
    assert error.headers["Retry-After"] == "60"


def test_three_places_say_the_same() -> None:
    error = GPUSpawnError("Model <b>A&B</b> is 100% in use", reason="capacity", retry_after_s=7)
    plain = unescape(re.sub(r"</?strong>", "", error.jupyterhub_html_message))
    assert plain == error.jupyterhub_message == error.message
    assert "<b>" not in error.jupyterhub_html_message
    assert error.headers == {"Retry-After": "7"}


def test_percent_signs_survive_the_log(caplog: pytest.LogCaptureFixture) -> None:
    error = GPUSpawnError("100% busy %s %d", reason="capacity")
    # This is how tornado logs an HTTPError.
    with caplog.at_level(logging.WARNING):
        logging.getLogger("x").warning("%d %s: " + error.log_message, 503, "POST /")
    assert "100% busy %s %d" in caplog.text
    assert "100% busy %s %d" in str(error)
    assert "%%" not in error.get_message()


def test_the_log_may_say_more_than_the_user_reads() -> None:
    error = GPUSpawnError(reason="payload", log_message="env.X: too long")
    assert "env.X" in str(error)
    assert "env.X" not in error.jupyterhub_message


@pytest.mark.parametrize("reason", ["token", "unauthorized", "bad-answer"])
def test_technical_refusals_are_not_shown(reason: str) -> None:
    refusal = Refusal(status=401, message="secret detail", reason=reason)
    error = from_problem(AllocatorError(401, refusal))
    assert "secret detail" not in error.jupyterhub_message
    assert "secret detail" in str(error)
    assert error.status_code == 503


def test_unknown_reasons_stay_few_labels() -> None:
    error = from_refusal(Refusal(status=418, message="Odd", reason="brand-new"))
    assert error.reason == "refusal"
    assert error.jupyterhub_message.startswith("Odd. ")
    lease_error = from_lease(a_lease(reason="brand-new"))
    assert lease_error.reason == "server-ended"
    assert "unexpectedly" in lease_error.jupyterhub_message


@pytest.mark.parametrize("status", [200, 302, 401, 404])
def test_the_hub_answers_with_an_error_whatever_came(status: int) -> None:
    assert from_refusal(Refusal(status=status, message="m", reason="x")).status_code == 503


def test_unreachable() -> None:
    error = from_problem(AllocatorUnreachable("connection refused"))
    assert error.reason == "unreachable"
    assert "connection refused" not in error.jupyterhub_message
    assert "Retry-After" in error.headers


def test_why_a_server_ended() -> None:
    assert why_ended(a_lease(reason="released")) is None
    assert why_ended(a_lease(reason="admin", message="Ended by root: upgrade")) == (
        "Ended by root: upgrade."
    )
    assert why_ended(a_lease(reason="guest-gone")) == ENDS["guest-gone"].cause
