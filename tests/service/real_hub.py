"""A real JupyterHub as a process of its own, with the repository's ``jupyterhub_config.py``."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import aiohttp

from tests.layers import wait_for
from tests.service.fake_allocator import TOKEN

ROOT = Path(__file__).resolve().parents[2]
ADMIN_TOKEN = "admin-" + "a" * 32
PASSWORD = "password-for-tests"

CONFIG = """
load_subconfig({base!r})
c = get_config()
c.JupyterHub.log_level = 10
c.JupyterHub.proxy_class = "tests.service.memory_proxy.MemoryProxy"
c.JupyterHub.hub_bind_url = c.JupyterHub.hub_connect_url = "http://127.0.0.1:{port}"
# Nothing is culled while tests look on.
c.JupyterHub.services = [s for s in c.JupyterHub.services if s["name"] != "idle-culler"]
c.JupyterHub.load_roles = [r for r in c.JupyterHub.load_roles if r["name"] != "idle-culler"]
c.JupyterHub.services.append({{"name": "tester", "api_token": {token!r}}})
c.JupyterHub.load_roles.append(
    {{
        "name": "tester",
        "services": ["tester"],
        "scopes": ["admin:users", "admin:servers", "admin:groups", "admin:server_state"],
    }}
)
c.JupyterHub.load_roles.append(
    {{"name": "gpu-viewer", "groups": ["gpu-viewers"], "scopes": ["custom:gpu:view"]}}
)
# Servers that tests left behind are not waited for at a restart.
c.JupyterHub.init_spawners_timeout = 1
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 1, "slow_stop_timeout": 1}}
# Guests would reach it there; the single-user servers of these tests never call.
c.Spawner.hub_connect_url = "http://10.201.0.1:{port}"
c.Spawner.poll_interval = 1
c.GPUSpawner.allocator_patience = 3
small = {{"gpus": 1, "cores": 1, "memory_mib": 1536, "image": "lab"}}
c.GPUSpawner.profile_list = [
    {{
        "slug": "emulated",
        "display_name": "Emulated GPU",
        "default": True,
        "spawner_override": small,
    }},
    {{
        "slug": "choice",
        "display_name": "With options",
        "spawner_override": small,
        "profile_options": {{
            "image": {{
                "display_name": "Environment",
                "choices": {{
                    "lab": {{"display_name": "Lab <b>&"}},
                    "geo": {{"display_name": "Geo", "spawner_override": {{"image": "geo"}}}},
                }},
                "unlisted_choice": {{
                    "enabled": True,
                    "display_name": "Other",
                    "validation_regex": "[a-z]+",
                    "spawner_override": {{"image": "{{value}}"}},
                }},
            }}
        }},
    }},
    {{
        "slug": "huge",
        "display_name": "Eight GPUs",
        "spawner_override": {{**small, "gpus": 8}},
    }},
    {{
        "slug": "secret",
        "display_name": "For few",
        "allowed_groups": ["few"],
        "spawner_override": {{**small, "gpus": 0}},
    }},
]
c.Spawner.group_overrides = {{
    "quick": {{"groups": ["quick"], "spawner_override": {{"start_timeout": 3}}}},
    "loop": {{
        "groups": ["loop"],
        "spawner_override": {{"hub_connect_url": "http://127.0.0.1:{port}"}},
    }},
}}
"""


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RealHub:
    """Starts, kills and asks one hub. Its state directory outlives a restart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.allocator_port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/hub/"
        self.log = folder / "hub.log"
        self._process: subprocess.Popen[bytes] | None = None
        for name, text in {
            "spawner.token": TOKEN,
            "service.token": "s" * 40,
            "proxy.token": "p" * 40,
            "password": PASSWORD,
            "gpuspawner_config.py": (
                f"c.Installation.state_dir = {str(folder)!r}\n"
                "c.Installation.allocator_url = "
                f"'http://127.0.0.1:{self.allocator_port}/services/gpu/'\n"
            ),
            "test_config.py": CONFIG.format(
                base=str(ROOT / "jupyterhub_config.py"), port=self.port, token=ADMIN_TOKEN
            ),
        }.items():
            (folder / name).write_text(text)

    # -- the process --------------------------------------------------------------------------

    def start(self) -> None:
        """Start it and wait until it answers."""
        env = os.environ | {
            "GPUSPAWNER_CONFIG": str(self.folder / "gpuspawner_config.py"),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "jupyterhub", "-f", str(self.folder / "test_config.py")]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=env, stdout=log, stderr=subprocess.STDOUT
            )
        wait_for(self._answers, 60, "the hub to answer", every=0.1)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"the hub ended: {self.log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(self.url + "api/", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    @property
    def pid(self) -> int:
        """Its process, while it runs."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """As the power going off."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """An orderly end."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(5)
            self._process = None

    def log_text(self) -> str:
        """Everything it logged so far."""
        return self.log.read_text(errors="replace")

    # -- the API ------------------------------------------------------------------------------

    async def api(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Call the hub's API as an admin; returns status and answer."""
        headers = {"Authorization": f"token {ADMIN_TOKEN}"}
        async with (
            asyncio.timeout(60),
            aiohttp.ClientSession(headers=headers) as session,
            session.request(method, f"{self.url}api/{path}", json=body) as answer,
        ):
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def add_user(self, name: str, *groups: str) -> None:
        """A user, in groups."""
        status, answer = await self.api("POST", f"users/{name}")
        assert status in (201, 409), answer
        for group in groups:
            await self.api("POST", f"groups/{group}")
            status, answer = await self.api("POST", f"groups/{group}/users", {"users": [name]})
            assert status == 200, answer

    async def server(self, user: str, name: str = "") -> dict[str, Any] | None:
        """A server as the API shows it; None if it is not active."""
        _, model = await self.api("GET", f"users/{user}")
        found: dict[str, Any] | None = model["servers"].get(name)
        return found

    async def progress(
        self, user: str, name: str = "", listening: asyncio.Event | None = None
    ) -> list[dict[str, Any]]:
        """Every progress event until the stream ends; ``listening`` is set at the first."""
        where = f"servers/{name}" if name else "server"
        headers = {"Authorization": f"token {ADMIN_TOKEN}"}
        events = []
        async with (
            asyncio.timeout(60),
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"{self.url}api/users/{user}/{where}/progress") as answer,
        ):
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: "):
                    events.append(json.loads(line[6:]))
                    if listening is not None:
                        listening.set()
        return events

    async def listen(self, user: str) -> asyncio.Task[list[dict[str, Any]]]:
        """A browser tab with the progress page: returns when it has been told something."""
        listening = asyncio.Event()
        task = asyncio.create_task(self.progress(user, listening=listening))
        async with asyncio.timeout(20):
            await listening.wait()
        return task

    @asynccontextmanager
    async def browser(self, user: str) -> AsyncIterator[Browser]:
        """A logged-in visitor."""
        jar = aiohttp.CookieJar(unsafe=True)
        async with asyncio.timeout(60), aiohttp.ClientSession(cookie_jar=jar) as session:
            visitor = Browser(self.url, session)
            await visitor.log_in(user)
            yield visitor


class Browser:
    """What a browser does, as far as cookies, redirects and forms go."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def log_in(self, user: str) -> None:
        """With the shared password."""
        page = await self.get("login")
        fields = {"username": user, "password": PASSWORD, "_xsrf": self._xsrf(page.text)}
        target = urljoin(self.url, "login")
        async with self.session.post(target, data=fields, allow_redirects=False) as answer:
            assert answer.status == 302, await answer.text()

    async def get(self, path: str) -> Page:
        """A page, after all redirects inside the hub."""
        return await self._follow("GET", urljoin(self.url, path))

    async def submit(self, page: Page, fields: dict[str, str]) -> Page:
        """Send the start form of a page."""
        action = re.search(r'id="spawn_form"\s+action="([^"]+)"', page.text)
        assert action, page.text
        target = urljoin(page.url, action[1].replace("&amp;", "&"))
        return await self._follow("POST", target, fields)

    async def _follow(self, method: str, url: str, fields: dict[str, str] | None = None) -> Page:
        """Up to the door of the single-user server: only a proxy would know the way on."""
        for _ in range(8):
            async with self.session.request(
                method, url, data=fields, allow_redirects=False
            ) as answer:
                page = Page(answer.status, url, await answer.text())
                if answer.status not in (302, 303):
                    return page
                url = urljoin(url, answer.headers["Location"])
            method, fields = "GET", None
            if "/hub/" not in url:
                return Page(page.status, url, "")
        raise AssertionError(f"too many redirects, the last one to {url}")

    @staticmethod
    def _xsrf(text: str) -> str:
        found = re.search(r'name="_xsrf"\s+value="([^"]+)"', text)
        assert found, text
        return found[1]


class Page:
    """An answer that a person would see."""

    def __init__(self, status: int, url: str, text: str) -> None:
        self.status = status
        self.url = url
        self.text = text
