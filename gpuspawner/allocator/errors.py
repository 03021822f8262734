"""What the API answers when it does not do what was asked."""

from __future__ import annotations

from typing import Any

from gpuspawner.schema import Refusal


class ApiError(Exception):
    """A refusal with its HTTP status, a fixed word for programs, and a sentence for people."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        constraint: str | None = None,
        details: list[dict[str, Any]] | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.body = Refusal(
            status=status,
            message=message,
            reason=reason,
            constraint=constraint,
            details=details or [],
            retry_after_s=retry_after_s,
        )


def not_found(what: str) -> ApiError:
    """404 for a thing that the ledger does not have."""
    return ApiError(404, "not-found", f"There is no {what}.")
