"""A whole installation: allocator, proxy and hub as siblings, each of which may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.layers import wait_for_async
from tests.vm.pool import GATEWAY, Pool

CHECKOUT = Path(__file__).resolve().parents[2]
TOKEN = "h" * 40
BASE = "http://127.0.0.1:8000"
HUB_URL = f"http://{GATEWAY}:8081"
PASSWORD = "a password for the tests"
WORKSPACE = {"data": {}, "metadata": {"id": "default"}}


TINY = {
    "slug": "tiny",
    "display_name": "Tiny guest",
    "spawner_override": {"gpus": 1, "cores": 1, "memory_mib": 512, "image": "tiny", "home_mib": 64},
}


class HubSite(Pool):
    """A pool with a hub and a proxy before it. ``profile`` takes the place of the standard one,
    which is JupyterLab's."""

    def __init__(self, folder: Path, profile: dict[str, Any] | None = None, **traits: Any) -> None:
        super().__init__(folder, hub_api_url=f"{HUB_URL}/hub/api", **traits)
        if profile is not None:
            with (folder / "gpuspawner_config.py").open("a") as config:
                config.write(f"c.GPUSpawner.profile_list = [{profile!r}]\n")
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.left: list[int] = []  # services that a killed hub has left behind
        for name, text in (
            ("service.token", "s" * 40),
            ("proxy.token", "p" * 40),
            ("password", PASSWORD),
            ("admin.password", PASSWORD * 2),
        ):
            path = folder / name
            path.touch(mode=0o600)
            path.write_text(text)

    def _spawn(self, name: str, command: list[str]) -> None:
        environment = {
            **os.environ,
            "GPUSPAWNER_CONFIG": str(self.folder / "gpuspawner_config.py"),
            "GPUSPAWNER_HUB_URL": HUB_URL,
            "GPUSPAWNER_BIND_URL": BASE,
            "CONFIGPROXY_AUTH_TOKEN": "p" * 40,
            "PYTHONPATH": str(CHECKOUT),
            "GPUSPAWNER_TEST_HUB_TOKEN": TOKEN,
        }
        with (self.folder / f"{name}.log").open("ab") as out:
            self.children[name] = subprocess.Popen(
                command,
                env=environment,
                cwd=self.folder,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def start_proxy(self) -> None:
        """configurable-http-proxy, as production runs it."""
        program = shutil.which("configurable-http-proxy")
        if program is None:
            pytest.exit("configurable-http-proxy is missing: run 'tests/run'.", returncode=4)
        self._spawn(
            "proxy",
            [program, "--ip", "127.0.0.1", "--port", "8000", "--api-ip", "127.0.0.1",
             "--api-port", "8001", "--error-target", f"{HUB_URL}/hub/error"],
        )  # fmt: skip

    async def start_hub(self) -> None:
        """The hub; back when its pages answer through the proxy."""
        self._spawn(
            "hub",
            [sys.executable, "-m", "jupyterhub", "-f", str(CHECKOUT / "tests/vm/hub_config.py")],
        )

        async def answers() -> bool:
            assert self.children["hub"].poll() is None, (self.folder / "hub.log").read_text()[
                -3000:
            ]
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with (
                    aiohttp.ClientSession() as session,
                    session.get(BASE + "/hub/login") as page,
                ):
                    return page.status == 200
            return False

        await wait_for_async(answers, 90, "the hub to answer", 0.3)

    def kill_child(self, name: str) -> None:
        """``kill -9``. The services that a hub manages outlive it, as they would in production."""
        for thread in Path(f"/proc/{self.children[name].pid}/task").iterdir():
            self.left += map(int, (thread / "children").read_text().split())
        self.children[name].send_signal(signal.SIGKILL)
        self.children[name].wait()

    async def remove(self) -> None:
        """End hub and proxy, then the pool."""
        for pid in self.left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for name in ("hub", "proxy"):
            child = self.children.get(name)
            if child is not None and child.poll() is None:
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(child.wait, 30)
        await super().remove()
        print((self.folder / "hub.log").read_text()[-6000:] if self.children else "")

    # ------------------------------------------------------------------ the hub's API

    async def hub(
        self, method: str, path: str, body: Any = None, token: str = TOKEN
    ) -> tuple[int, Any]:
        """One call of the hub's API through the proxy."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
            session.request(
                method,
                f"{BASE}/hub/api/{path}",
                json=body,
                headers={"Authorization": f"Bearer {token}"},
            ) as answer,
        ):
            text = await answer.text()
            return answer.status, json.loads(text) if text else None

    async def start_lab(self, user: str, options: dict[str, Any] | None = None) -> str:
        """Start a user's server as a portal would; returns a token of the user's."""
        token = await self.token_of(user)
        await self.ask_for_lab(user, options)
        await self.lab_ready(user)
        return token

    async def token_of(self, user: str) -> str:
        """A token of a user's, who is made if need be."""
        await self.hub("POST", f"users/{user}", {})
        status, made = await self.hub("POST", f"users/{user}/tokens", {"note": "tests"})
        assert status in (200, 201), made
        return str(made["token"])

    async def ask_for_lab(self, user: str, options: dict[str, Any] | None = None) -> None:
        """Ask the hub to start a user's server; does not wait for it."""
        status, answer = await self.hub("POST", f"users/{user}/server", options or {})
        assert status in (201, 202), answer

    async def lab_ready(self, user: str, timeout: float = 400) -> None:
        """Wait until the hub says that the server is ready."""

        async def ready() -> bool:
            _status, model = await self.hub("GET", f"users/{user}")
            server = model["servers"].get("")
            assert server is not None, f"the start failed: {await self.hub('GET', f'users/{user}')}"
            return bool(server["ready"])

        await wait_for_async(ready, timeout, f"the server of {user}", 1.0)

    async def stop_lab(self, user: str) -> None:
        """Stop it through the hub."""
        status, answer = await self.hub("DELETE", f"users/{user}/server")
        assert status in (202, 204), answer

        async def stopped() -> bool:
            _status, model = await self.hub("GET", f"users/{user}")
            return not model["servers"]

        await wait_for_async(stopped, 300, "the server to stop", 1.0)


class Lab:
    """A user's JupyterLab, through the proxy: kernels and files."""

    def __init__(self, user: str, token: str) -> None:
        self.base = f"{BASE}/user/{user}"
        self.headers = {"Authorization": f"Bearer {token}"}
        self.kernel = ""

    async def call(self, method: str, path: str, body: Any = None, below: str = "api") -> Any:
        """One call of Jupyter Server's API, or of JupyterLab's (``lab/api``)."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
            session.request(
                method, f"{self.base}/{below}/{path}", json=body, headers=self.headers
            ) as answer,
        ):
            text = await answer.text()
            assert answer.status < 300, f"{path}: {answer.status} {text[:500]}"
            return json.loads(text) if text else None

    async def start_kernel(self) -> None:
        """A Python kernel; cells run in it until the server stops."""
        self.kernel = (await self.call("POST", "kernels", {"name": "python3"}))["id"]

    async def first_page(self) -> str:
        """Where the server sends a browser that comes from the hub, below its own address."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.base}/", headers=self.headers, allow_redirects=False) as answer,
        ):
            assert answer.status == 302, await answer.text()
            place = answer.headers["Location"].removeprefix(self.base.removeprefix(BASE))
            return place.removesuffix("?")

    async def use(self) -> None:
        """Leave behind what a browser does that has shown JupyterLab: a workspace."""
        await self.call("PUT", "workspaces/default", WORKSPACE, below="lab/api")

    async def run(self, code: str, timeout: float = 180) -> str:
        """Run a cell and return what it printed."""
        return (await self.execute(code, timeout))[0]

    async def execute(self, code: str, timeout: float = 180) -> tuple[str, list[dict[str, Any]]]:
        """Run a cell; what it printed, and what it showed as MIME type -> data.

        :raises AssertionError: the cell ended with an error.
        """
        message_id = uuid.uuid4().hex
        header = {
            "msg_id": message_id, "msg_type": "execute_request", "session": "tests",
            "username": "tests", "version": "5.3", "date": "",
        }  # fmt: skip
        content = {
            "code": code, "silent": False, "store_history": False, "user_expressions": {},
            "allow_stdin": False, "stop_on_error": True,
        }  # fmt: skip
        request = {
            "channel": "shell", "header": header, "parent_header": {}, "metadata": {},
            "content": content, "buffers": [],
        }  # fmt: skip
        printed: list[str] = []
        shown: list[dict[str, Any]] = []
        async with (
            asyncio.timeout(timeout),
            aiohttp.ClientSession() as session,
            session.ws_connect(
                f"{self.base}/api/kernels/{self.kernel}/channels", headers=self.headers
            ) as socket,
        ):
            await socket.send_json(request)
            async for frame in socket:
                message = json.loads(frame.data)
                if message["parent_header"].get("msg_id") != message_id:
                    continue
                kind, told = message["msg_type"], message["content"]
                if kind == "stream":
                    printed.append(told["text"])
                elif kind in ("display_data", "execute_result"):
                    shown.append(told["data"])
                elif kind == "error":
                    raise AssertionError(f"{told['ename']}: {told['evalue']}")
                elif kind == "status" and told["execution_state"] == "idle":
                    return "".join(printed), shown
        raise AssertionError("the kernel's connection closed")
