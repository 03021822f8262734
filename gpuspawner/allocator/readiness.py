"""Asking a guest's server whether it answers yet."""

from __future__ import annotations

from tornado.httpclient import AsyncHTTPClient

# A guest whose card is not up yet leaves the connection hanging.
_CONNECT_S = 1.5
_REQUEST_S = 5.0


def pause_s(waited_s: float) -> float:
    """Seconds from one question to the next, after so many seconds of waiting: a fortieth of
    them, so that a start is noticed with hardly any delay of its own and many long ones at once
    cost little."""
    return min(1.0, max(0.25, waited_s / 40))


async def answers(http: AsyncHTTPClient, url: str) -> bool:
    """Whether the server at ``url`` answers with success, within 5 s. Never raises."""
    try:
        response = await http.fetch(
            url, connect_timeout=_CONNECT_S, request_timeout=_REQUEST_S, raise_error=False
        )
    except Exception:  # every way of not answering is the same here
        return False
    return bool(response.code == 200)
