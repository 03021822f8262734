"""What all pages share: addresses, login, templates, static files."""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jupyterhub.services.auth import HubOAuth

from gpuspawner.allocator.api_leases import LeaseApi
from gpuspawner.allocator.api_limits import LimitApi
from gpuspawner.allocator.api_pool import PoolApi
from gpuspawner.allocator.context import Context
from gpuspawner.allocator.pages.data import Urls
from gpuspawner.allocator.pages.hub import HubApi
from gpuspawner.allocator.pages.looks import GPU_ACTION_TEXTS

HERE = Path(__file__).parent
# How long the hub's word about who somebody is may be used again. Actions always ask anew.
LOGIN_CACHE_S = 10


@dataclass
class Site:
    """The pages of one allocator. ``auth`` and ``hub`` are ``None`` without a hub token; then
    every page says how to get one. ``hub_origin`` is the hub's scheme and host where they are not
    the pages' own."""

    context: Context
    leases: LeaseApi
    pool: PoolApi
    limits: LimitApi
    hub_id: str
    urls: Urls
    hub_origin: str = ""
    auth: Any = None
    hub: HubApi | None = None
    templates: Environment = field(default_factory=lambda: _templates())
    static: dict[str, str] = field(default_factory=lambda: _hashes())

    def static_url(self, name: str) -> str:
        """A file of ours; its address changes with its content."""
        return f"{self.urls.prefix}static/{name}?v={self.static[name]}"


def make_site(
    context: Context,
    leases: LeaseApi,
    pool: PoolApi,
    limits: LimitApi,
    *,
    hub_id: str,
    prefix: str,
    hub_public_url: str,
    hub_api_url: str,
    hub_token: str | None,
) -> Site:
    """Everything from the settings. ``prefix`` is where the pages are (``/services/gpu/``);
    ``hub_public_url`` is empty where the hub's pages lie beside them."""
    base = prefix.rpartition("/services/")[0] + "/"
    public = hub_public_url or f"{base}hub/"
    public = public if public.endswith("/") else public + "/"
    parts = urlsplit(public)
    origin = f"{parts.scheme}://{parts.netloc}" if parts.netloc else ""
    urls = Urls(prefix=prefix, hub=public, base=public.removesuffix("hub/"))
    auth = hub = None
    if hub_token:
        name = prefix.strip("/").rpartition("/")[2]
        hub = HubApi(hub_api_url, hub_token)
        auth = HubOAuth(
            api_token=hub_token,
            api_url=hub_api_url,
            base_url=prefix,
            hub_host=origin,
            hub_prefix=parts.path,
            oauth_client_id=f"service-{name}",
            oauth_redirect_uri=f"{prefix}oauth_callback",
            access_scopes={"access:services", f"access:services!service={name}"},
            cache_max_age=LOGIN_CACHE_S,
            cookie_options={"samesite": "Lax"},
        )
    return Site(context, leases, pool, limits, hub_id, urls, origin, auth, hub)


def cookie_secret(state_dir: Path) -> bytes:
    """The key that cookies are signed with, made at the first start. It outlives restarts, so
    that nobody has to log in again."""
    path = state_dir / "pages.cookie_secret"
    if not path.exists():
        # Whole or not at all, and never readable by others, not even for a moment.
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    return bytes.fromhex(path.read_text().strip())


def _templates() -> Environment:
    templates = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["clock"] = _clock
    templates.globals["GPU_ACTION_TEXTS"] = GPU_ACTION_TEXTS
    return templates


def _clock(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M UTC")


def _hashes() -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for path in sorted((HERE / "static").iterdir())
        if path.is_file()
    }
