"""Login by OpenID Connect, with groups, by configuration alone."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote_plus, urlencode, urljoin

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from gpuspawner.client import AllocatorClient
from tests.service.harness import Site, lease_in
from tests.service.real_hub import RealHub, free_port
from tests.service.scripted import WORLDS

CLIENT, SECRET = "jupyterhub", "client-secret-" + "c" * 24
PEOPLE: dict[str, list[str]] = {
    "ada": ["gpu-users", "few"],
    "bob": ["gpu-users"],
    "root": ["gpu-admins"],
    "eve": ["others"],
}


class Provider:
    """An OpenID Connect provider: codes with PKCE, one use each; a token; claims with groups.
    Who has logged in at it is a cookie, as with a real one."""

    def __init__(self, port: int, callback: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.callback = callback
        self.codes: dict[str, tuple[str, str]] = {}
        self.tokens: dict[str, str] = {}

    def app(self) -> web.Application:
        """Its three addresses."""
        app = web.Application()
        app.router.add_get("/authorize", self.authorize)
        app.router.add_post("/token", self.token)
        app.router.add_get("/userinfo", self.userinfo)
        return app

    async def authorize(self, request: web.Request) -> web.Response:
        """Back to the hub, with a code for whoever is logged in here."""
        asked = request.query
        assert (asked["client_id"], asked["response_type"]) == (CLIENT, "code")
        assert asked["redirect_uri"] == self.callback
        assert "openid" in asked["scope"].split()
        assert asked["code_challenge_method"] == "S256"
        code = secrets.token_hex(8)
        self.codes[code] = (request.cookies["who"], asked["code_challenge"])
        query = urlencode({"code": code, "state": asked["state"]})
        raise web.HTTPFound(f"{self.callback}?{query}")

    async def token(self, request: web.Request) -> web.Response:
        """A token for a code, to the client that knows its secret and the verifier."""
        sent = {name: words[0] for name, words in parse_qs(await request.text()).items()}
        kind, _, word = request.headers.get("Authorization", "").partition(" ")
        if kind == "Basic":
            name, _, password = base64.b64decode(word).decode().partition(":")
            sent |= {"client_id": unquote_plus(name), "client_secret": unquote_plus(password)}
        assert (sent["client_id"], sent["client_secret"]) == (CLIENT, SECRET)
        assert sent["grant_type"] == "authorization_code"
        user, challenge = self.codes.pop(sent["code"])
        digest = hashlib.sha256(sent["code_verifier"].encode()).digest()
        assert base64.urlsafe_b64encode(digest).decode().rstrip("=") == challenge
        token = secrets.token_hex(8)
        self.tokens[token] = user
        return web.json_response({"access_token": token, "token_type": "Bearer"})

    async def userinfo(self, request: web.Request) -> web.Response:
        """The claims."""
        user = self.tokens[request.headers["Authorization"].partition(" ")[2]]
        claims = {"sub": f"id-{user}", "preferred_username": user, "groups": PEOPLE[user]}
        return web.json_response(claims)


class Login:
    """A hub that knows nobody by itself, the provider, and an allocator."""

    def __init__(self, hub: RealHub, client: AllocatorClient, provider: Provider) -> None:
        self.hub = hub
        self.client = client
        self.provider = provider

    async def of(self, user: str, path: str = "home") -> tuple[int, str]:
        """A browser's way from a page of the hub through the login; the last page."""
        jar = aiohttp.CookieJar(unsafe=True)
        async with asyncio.timeout(60), aiohttp.ClientSession(cookie_jar=jar) as session:
            jar.update_cookies({"who": user})
            async with session.get(urljoin(self.hub.url, path)) as page:
                text = await page.text()
                assert "/hub/oauth_login" in text, text
            url = f"{self.hub.url}oauth_login?{urlencode({'next': f'/hub/{path}'})}"
            async with session.get(url) as page:
                return page.status, await page.text()


@pytest_asyncio.fixture
async def login(tmp_path: Path) -> AsyncIterator[Login]:
    """Set up as docs/install.md says: traits in gpuspawner_config.py, nothing else."""
    folder = tmp_path / "hub"
    folder.mkdir()
    hub = RealHub(folder)
    (folder / "password").unlink()
    port = free_port()
    provider = Provider(port, f"{hub.url}oauth_callback")
    with (folder / "gpuspawner_config.py").open("a") as config:
        for name, value in {
            "client_id": CLIENT,
            "client_secret": SECRET,
            "oauth_callback_url": provider.callback,
            "authorize_url": f"{provider.url}/authorize",
            "token_url": f"{provider.url}/token",
            "userdata_url": f"{provider.url}/userinfo",
            "allowed_groups": {"gpu-users"},
        }.items():
            config.write(f"c.GenericOAuthenticator.{name} = {value!r}\n")
    site = Site(tmp_path / "allocator", hub_api_url=hub.url + "api")
    (site.folder / "service.token").write_text("s" * 40)
    site.port = hub.allocator_port
    site.url = f"http://127.0.0.1:{site.port}/services/gpu/"
    site.world("h1")
    runner = web.AppRunner(provider.app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.to_thread(hub.start)
    try:
        async with site.running() as client:
            await site.add_host(client, 1)
            yield Login(hub, client, provider)
    finally:
        await asyncio.to_thread(hub.stop)
        await runner.cleanup()
        await WORLDS["h1"].close()


async def model(login: Login, user: str) -> dict[str, Any]:
    """What the hub knows of a user."""
    status, found = await login.hub.api("GET", f"users/{user}")
    assert status == 200, found
    return dict(found)


async def test_groups_come_from_the_claim(login: Login) -> None:
    """Profiles, limits and admin rights follow the provider's groups."""
    status, page = await login.of("ada", "spawn")
    assert status == 200, page
    assert "For few" in page, "the profile of her group"
    ada = await model(login, "ada")
    assert sorted(ada["groups"]) == ["few", "gpu-users"]
    assert not ada["admin"]
    status, page = await login.of("bob", "spawn")
    assert status == 200, page
    assert "For few" not in page
    assert (await model(login, "bob"))["groups"] == ["gpu-users"]
    status, refused = await login.hub.api("POST", "users/bob/server", {"profile": "secret"})
    assert status >= 400, refused

    await login.client.set_limit("group", "few", 0, "a test")
    status, refused = await login.hub.api("POST", "users/ada/server", {"profile": "emulated"})
    assert status == 403, refused
    assert "Your group few may use 0 GPUs at once" in refused["message"]
    await login.client.set_limit("group", "few", 1, "a test")
    status, answer = await login.hub.api("POST", "users/ada/server", {"profile": "emulated"})
    assert status in (201, 202), answer
    lease = (await login.client.leases(username="ada"))[0]
    await lease_in(login.client, lease.id, "running")

    status, page = await login.of("root", "admin")
    assert status == 200, page
    root = await model(login, "root")
    assert root["admin"]
    assert root["groups"] == ["gpu-admins"]


async def test_groups_follow_the_next_login(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has left a group at the provider has left it here."""
    await login.of("ada")
    monkeypatch.setitem(PEOPLE, "ada", ["gpu-users"])
    status, page = await login.of("ada", "spawn")
    assert status == 200, page
    assert "For few" not in page
    assert (await model(login, "ada"))["groups"] == ["gpu-users"]


async def test_who_is_in_no_allowed_group_is_told_so(login: Login) -> None:
    """A page for people, and no user."""
    status, page = await login.of("eve")
    assert status == 403
    assert "not currently authorized" in page
    assert "administrator" in page
    status, _ = await login.hub.api("GET", "users/eve")
    assert status == 404
