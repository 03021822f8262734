"""Can a virtual machine reach the hub? The most common mistake with spawners that are not local."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def hub_url_problem(url: str) -> str | None:
    """What is wrong with the URL that guests are given for the hub's API; None if nothing is.

    Only the text is looked at, so this is quick and needs no network. ``0.0.0.0`` and ``::`` are
    addresses to listen on, not to connect to.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not host:
        return f"{url!r} is no URL that a virtual machine could use."
    if host == "localhost" or host.endswith(".localhost"):
        return f"A virtual machine that is told {url!r} would look for the hub inside itself."
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if address.is_loopback:
        return f"A virtual machine that is told {url!r} would look for the hub inside itself."
    if address.is_unspecified:
        return f"{host} in {url!r} is an address to listen on; nobody can connect to it."
    return None
