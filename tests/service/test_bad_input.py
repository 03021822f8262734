"""Whatever is sent, the answer says what to do, tells no secret, and nothing is changed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import sqlalchemy as sa
from yarl import URL

from gpuspawner import schema
from gpuspawner.allocator import app as allocator_app
from gpuspawner.client import AllocatorClient
from gpuspawner.ledger import tables
from tests.service.harness import HEADERS, Site, acquire_body, lease_in

SECRET = "hunter2-the-secret-of-the-payload"
NOBODY = {"Authorization": "Bearer token-of-eve"}
MANAGER = {"Authorization": "Bearer token-of-mia"}
NO_LEASE = "00000000-0000-4000-8000-000000000000"


class FakeHubAuth:
    """The hub as the allocator asks it about tokens."""

    def __init__(self, **_settings: Any) -> None:
        self.users = {
            "token-of-eve": {"kind": "user", "name": "eve", "scopes": []},
            "token-of-mia": {"kind": "user", "name": "mia", "scopes": ["custom:gpu:manage"]},
            "token-of-the-service-ada": {"kind": "service", "name": "ada", "scopes": []},
        }

    async def user_for_token(self, token: str, sync: bool = True) -> dict[str, Any] | None:
        """Who it is."""
        if token == "token-of-a-broken-hub":
            raise OSError("the hub is away")
        return self.users.get(token)


@dataclass
class Door:
    """The allocator as somebody without our client sees it."""

    site: Site
    session: aiohttp.ClientSession
    client: AllocatorClient
    engine: sa.Engine

    async def send(
        self, method: str, path: str, headers: dict[str, str] = HEADERS, **how: Any
    ) -> tuple[int, Any]:
        """Status and body. ``path`` is sent as it is."""
        url = URL(self.site.url + "api/v1/" + path, encoded=True)
        async with self.session.request(method, url, headers=headers, **how) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text else None

    async def refused(
        self, status: int, method: str, path: str, headers: dict[str, str] = HEADERS, **how: Any
    ) -> schema.Refusal:
        """The refusal, which every kind of caller can show as it is."""
        got, body = await self.send(method, path, headers, **how)
        assert got == status, body
        refusal = schema.Refusal.model_validate(body)
        assert refusal.status == status
        assert refusal.message.endswith((".", ").")), refusal.message
        assert len(refusal.message) < 1000
        assert refusal.reason
        assert SECRET not in json.dumps(body)
        return refusal

    def ledger(self) -> dict[str, list[Any]]:
        """All that is stored but for how hosts and GPUs fare by themselves."""
        with self.engine.connect() as tx:
            return {
                table.name: sorted(map(repr, tx.execute(sa.select(table)).all()))
                for table in tables.metadata.sorted_tables
            }


@contextlib.asynccontextmanager
async def opened(folder: Path, db_url: str | None) -> AsyncIterator[Door]:
    """A site with one host, one running lease of ada, and a hub that knows three tokens."""
    site = Site(folder, db_url, hub_api_url="http://127.0.0.1:9/hub/api", hub_watch_s=3600)
    (folder / "service.token").write_text("s" * 40)
    world = site.world(cores=16)
    engine = sa.create_engine(db_url or f"sqlite:///{folder}/ledger.sqlite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allocator_app, "HubAuth", FakeHubAuth)
        async with site.running() as client, aiohttp.ClientSession() as session:
            await site.add_host(client, 0)
            lease = await client.acquire(acquire_body("ada"))
            await lease_in(client, lease.id, "running")
            yield Door(site, session, client, engine)
    engine.dispose()
    await world.close()


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    """For what is decided before the database is asked."""
    async with opened(tmp_path, None) as one:
        yield one


@pytest.fixture
async def each_door(tmp_path: Path, db_url: str | None) -> AsyncIterator[Door]:
    """For what the databases may take differently."""
    async with opened(tmp_path, db_url) as one:
        yield one


@contextlib.contextmanager
def unchanged(door: Door) -> Any:
    """Nothing in the ledger is another after the block."""
    before = door.ledger()
    yield
    assert door.ledger() == before


def body(**changes: Any) -> dict[str, Any]:
    """An acquire body with some fields set by dotted names; ``...`` takes one away."""
    whole = acquire_body("bob").model_dump(mode="json")
    whole["payload"]["env"]["JUPYTERHUB_API_TOKEN"] = SECRET
    for name, value in changes.items():
        *parts, last = name.split("__")
        place = whole
        for part in parts:
            place = place[part]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return whole


BAD_ACQUIRES: list[tuple[dict[str, Any], str]] = [
    ({"request__image": "nothing"}, "there are: lab"),
    ({"request__image": "service"}, "there are: lab"),
    ({"request__image": "../../etc/passwd"}, "request.image"),
    ({"request__image": ""}, "request.image"),
    ({"request__memory_mib": 255}, "request.memory_mib"),
    *(
        ({f"request__{field}": value}, f"request.{field}")
        for field in ("gpus", "cores", "memory_mib", "home_mib")
        for value in (-1, 10**9, 10**30, 1.5, True, "1", None, [1], {})
    ),
    ({"request__gpus": ...}, "request.gpus"),
    ({"request__gpu_model": "x" * 121}, "request.gpu_model"),
    ({"request__gpu_model": "a\0b"}, "request.gpu_model"),
    ({"request__node": 1}, "request.node"),
    ({"id": NO_LEASE}, "id"),
    ({"x" * 5000: 1}, "xxx"),
    ({"payload__token": SECRET}, "payload.token"),
    ({"payload__env": {"A": 1, "B": SECRET}}, "payload.env.A"),
    ({"payload__env": {"A": SECRET + "\0"}}, "NUL"),
    ({"payload__env": {"A=B": SECRET}}, "payload.env"),
    ({"payload__env": SECRET}, "payload.env"),
    ({"payload__env": {f"V{n}": SECRET for n in range(513)}}, "payload.env"),
    ({"payload__argv": []}, "payload.argv"),
    ({"payload__argv": [SECRET + "\0"]}, "payload.argv"),
    ({"payload__argv": [SECRET] * 65}, "payload.argv"),
    ({"payload__files": {"/etc/x": SECRET + "\0"}}, "payload.files"),
    ({"payload__port": 0}, "payload.port"),
    ({"payload__port": 65536}, "payload.port"),
    ({"payload__user": "root; " + SECRET}, "payload.user"),
    ({"payload__uid": 0}, "payload.uid"),
    ({"payload__sudo": SECRET}, "payload.sudo"),
    ({"payload": SECRET}, "payload"),
    ({"ready_path": "no/slash"}, "ready_path"),
    ({"ready_path": "/a b"}, "ready_path"),
    ({"ready_path": "/a\r\nHost: elsewhere"}, "ready_path"),
    ({"ready_path": "/" + "x" * 8192}, "ready_path"),
    ({"username": ""}, "username"),
    ({"username": "x" * 256}, "username"),
    ({"username": "a\0b"}, "username"),
    ({"username": "a\nb"}, "username"),
    ({"username": 7}, "username"),
    ({"server_name": "x" * 256}, "server_name"),
    ({"server_name": "a\0"}, "server_name"),
    ({"start_id": "short"}, "start_id"),
    ({"start_id": "../../../etc"}, "start_id"),
    ({"start_id": "x" * 65}, "start_id"),
    ({"groups": ["a", ""]}, "groups.1"),
    ({"groups": ["g\0"]}, "groups.0"),
    ({"groups": ["g"] * 1001}, "groups"),
    ({"groups": "sar"}, "groups"),
]  # fmt: skip


async def test_leases_that_nobody_can_have(each_door: Door) -> None:
    """Each bad field is named, whatever is wrong with it."""
    door = each_door
    with unchanged(door):
        for changes, named in BAD_ACQUIRES:
            refusal = await door.refused(400, "POST", "leases", json=body(**changes))
            assert named in refusal.message, (changes, refusal.message)


async def test_bodies_that_are_no_requests(door: Door) -> None:
    """Neither JSON nor small nor what was promised."""
    good = json.dumps(body())
    as_json = {**HEADERS, "Content-Type": "application/json"}
    with unchanged(door):
        for raw in ("", "{", "null", "[]", "7", f'"{SECRET}"', "[" * 100_000, '{"a": "\ud800"}',
                    good[:-1], good + "x", f"token={SECRET}"):  # fmt: skip
            data = raw.encode("utf-8", "surrogatepass")
            await door.refused(400, "POST", "leases", as_json, data=data)
        await door.refused(400, "POST", "leases", as_json, data=b"\xff\xfe{}")
        escaped = good.replace('"bob"', '"\\ud800"')
        await door.refused(400, "POST", "leases", as_json, data=escaped.encode())
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            headers = {**HEADERS, "Content-Type": kind}
            await door.refused(415, "POST", "leases", headers, data=good.encode())
        large = await door.refused(
            413, "POST", "leases", as_json, data=b" " * (4 * 1024 * 1024 + 1)
        )
        assert "4 MiB" in large.message

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(80):
                yield b" " * 65536

        await door.refused(413, "POST", "leases", as_json, data=pieces())


BAD_CALLS: list[tuple[int, str, str, Any]] = [
    (404, "GET", "leases/7", None),
    (404, "GET", f"leases/{NO_LEASE}", None),
    (404, "GET", f"leases/{NO_LEASE}/events", None),
    (404, "GET", "leases/..%2f..%2fetc%2fpasswd", None),
    (404, "GET", "leases/%00", None),
    (404, "GET", "leases/a%0ab", None),
    (404, "GET", "leases/" + "x" * 5000, None),
    (400, "GET", "leases/%ff%fe", None),
    (404, "DELETE", f"leases/{NO_LEASE}?wait=1", None),
    (404, "PUT", f"leases/{NO_LEASE}/payload", {"argv": ["a"], "env": {"T": SECRET}}),
    (404, "POST", f"leases/{NO_LEASE}/end", {"reason": ""}),
    (400, "POST", f"leases/{NO_LEASE}/end", {"reason": "x" * 501}),
    (400, "POST", f"leases/{NO_LEASE}/end", {"reason": "a\0b"}),
    (400, "GET", "leases?limit=many", None),
    (400, "GET", "leases?limit=1.5", None),
    (400, "GET", "leases?limit=" + "9" * 5000, None),
    (400, "GET", "leases?username=a%00", None),
    (400, "GET", "leases?username=%ff", None),
    (400, "GET", "diagnoses?limit=%C2%B2", None),
    (400, "GET", "diagnoses?host=%00", None),
    (404, "GET", "diagnoses/7/console", None),
    (404, "GET", "", None),
    (404, "GET", "nothing", None),
    (404, "GET", "leases/", None),
    (404, "GET", "/leases", None),
    (404, "GET", "../../health/x", None),
    (405, "PUT", "leases", {}),
    (405, "PATCH", f"leases/{NO_LEASE}", {}),
    (405, "DELETE", "gpus", None),
    (405, "OPTIONS", "leases", None),
    (405, "POST", f"leases/{NO_LEASE}/events", {}),
    (405, "PROPFIND", "leases", None),
    (405, "DELETE", "openapi.json", None),
    (404, "PATCH", "hosts/nothing", {"drained": True}),
    (404, "PATCH", "hosts/h1%00", {"drained": True}),
    (400, "PATCH", "hosts/h1", {"drained": "yes"}),
    (400, "PATCH", "hosts/h1", {"drained": 1}),
    (400, "PATCH", "hosts/h1", {}),
    (404, "GET", "hosts/nothing/check", None),
    (404, "POST", "gpus/h1/0000:99:00.0/action", {"action": "retest"}),
    (404, "POST", "gpus/nothing/0000:40:00.0/action", {"action": "retest"}),
    (404, "POST", "gpus/h1/%00/action", {"action": "retest"}),
    (400, "POST", "gpus/h1/0000:40:00.0/action", {"action": "release"}),
    (400, "POST", "gpus/h1/0000:40:00.0/action", {"action": "unassigned"}),
    (409, "POST", "gpus/h1/0000:40:00.0/action", {"action": "enroll"}),
    *(
        (400, "POST", "hosts", {"name": "h2", **changes})
        for changes in (
            {"name": "../h2"}, {"name": "H 2"}, {"name": ""}, {"name": "x" * 41}, {"name": None},
            {"cidr": "999.1.1.1/99"}, {"cidr": "10.0.0.0/31"}, {"cidr": "10.0.0.0/0"},
            {"cidr": "fd00::/64"}, {"cidr": "x"}, {"network": "bridge"}, {"network": "open"},
            {"bridge": "br0; rm"}, {"accel": "fast"}, {"uri": "x" * 1025}, {"uri": "a\0b"},
            {"shell": "ssh h2"}, {"shell": ["a\0"]}, {"uri": "qemu+tls://h2/system"},
            {"emulated": "x" * 65537}, {"state": "ready"},
        )
    ),
    *(
        (400, "PUT", "limits/user/ada", {"why": "a test", **changes})
        for changes in (
            {}, {"gpus": -1}, {"gpus": 1.5}, {"gpus": True}, {"gpus": "1"}, {"gpus": 100_001},
            {"gpus": 1, "why": ""}, {"gpus": 1, "why": "x" * 501}, {"gpus": 1, "why": "\0"},
            {"gpus": 1, "who": "somebody else"},
        )
    ),
    (404, "PUT", "limits/nobody/ada", {"gpus": 1, "why": "a test"}),
    (404, "PUT", "limits/user/a%00", {"gpus": 1, "why": "a test"}),
    (404, "PUT", "limits/user/", {"gpus": 1, "why": "a test"}),
    (400, "PUT", "limits/user/" + "x" * 256, {"gpus": 1, "why": "a test"}),
    (400, "POST", "homes/forget", {"username": "", "server_name": ""}),
    (400, "POST", "homes/forget", {"username": "a\0"}),
    (409, "POST", "homes/forget", {"username": "ada", "server_name": ""}),
    (400, "POST", "leases/release", {"username": "ada", "start_id": "x"}),
    (400, "POST", "leases/release", {"username": "a\0", "start_id": "start-0001"}),
]  # fmt: skip


async def test_calls_that_make_no_sense(each_door: Door) -> None:
    """Ids that are none, wrong methods, wrong fields: each with its status and a sentence."""
    door = each_door
    with unchanged(door):
        wrong: list[str] = []
        for status, method, path, json_body in BAD_CALLS:
            how = {} if json_body is None else {"json": json_body}
            try:
                await door.refused(status, method, path, **how)
            except (AssertionError, ValueError) as error:
                wrong.append(f"{method} {path[:80]} {str(json_body)[:80]}: {error}"[:300])
        assert wrong == []


async def test_whoever_has_no_right_token(door: Door) -> None:
    """No token, a wrong one, one of another kind; and a hub that cannot be asked."""
    with unchanged(door):
        for value in (None, "", "Bearer", "Bearer ", "Basic YTpi", "Bearer " + "x" * 5000,
                      "Bearer " + "t" * 39, "Bearer é", "t" * 40):  # fmt: skip
            headers = {} if value is None else {"Authorization": value}
            await door.refused(401, "GET", "leases", headers)
            await door.refused(401, "POST", "leases", headers, json=body())
        away = {"Authorization": "Bearer token-of-a-broken-hub"}
        await door.refused(503, "GET", "leases", away)


async def test_a_hub_user_sees_and_does_what_is_hers(door: Door) -> None:
    """Another's lease is as if it were not there; verbs of admins and of the spawner are refused
    before their body is looked at."""
    (lease,) = await door.client.leases()
    gpu = lease.gpus[0]
    with unchanged(door):
        for path in (f"leases/{lease.id}", f"leases/{lease.id}/events"):
            missing = await door.refused(404, "GET", path, NOBODY)
            unknown = await door.refused(404, "GET", path.replace(lease.id, NO_LEASE), NOBODY)
            assert missing.message.replace(lease.id, "") == unknown.message.replace(NO_LEASE, "")
        for query in ("", "?username=ada", "?username=ada&server_name=", "?all=1"):
            assert await door.send("GET", "leases" + query, NOBODY) == (200, {"leases": []})
        # A service that is called like a user is not that user.
        service = {"Authorization": "Bearer token-of-the-service-ada"}
        assert await door.send("GET", "leases", service) == (200, {"leases": []})
        await door.refused(404, "GET", f"leases/{lease.id}", service)
        for path in ("hosts", "hosts/h1/check", "gpus", "diagnoses", "images", "limits", "audit"):
            refusal = await door.refused(403, "GET", path, NOBODY)
            assert "custom:gpu:view" in refusal.message
        for method, path in (
            ("POST", "hosts"), ("PATCH", "hosts/h1"), ("POST", f"gpus/h1/{gpu}/action"),
            ("PUT", "limits/default"), ("PUT", "limits/user/eve"),
            ("POST", f"leases/{lease.id}/end"),
        ):  # fmt: skip
            refusal = await door.refused(403, method, path, NOBODY, json={"env": SECRET})
            assert "custom:gpu:manage" in refusal.message
        for who in (NOBODY, MANAGER):
            for method, path in (
                ("POST", "leases"), ("POST", "leases/release"), ("DELETE", f"leases/{lease.id}"),
                ("PUT", f"leases/{lease.id}/payload"), ("POST", "homes/forget"),
            ):  # fmt: skip
                refusal = await door.refused(403, method, path, who, json=body())
                assert "the hub's own token" in refusal.message


NAMES = (
    "a b", " a b", "a b ", "a/b", "a\\b", "a.b", ".", "..", "../a", "A/B", "a%2Fb", "ä", "a\u0308",
    "Ä", "名前", "🛰", "a\u200bb", "a\u00a0b", "-a", "x" * 254, "x" * 255, "🛰" * 255, "'; --", "<b>",
)  # fmt: skip


async def test_names_of_all_kinds_have_homes_of_their_own(each_door: Door) -> None:
    """Users and servers alike: each name gets through, and no two share a volume."""
    door = each_door
    world = door.site.worlds["h1"]
    before = len(world.homes)

    async def loop(user: str, server: str) -> None:
        lease = await door.client.acquire(acquire_body(user, server=server, gpus=0))
        await lease_in(door.client, lease.id, "running")
        (found,) = await door.client.leases(user, server)
        assert (found.id, found.username, found.server_name) == (lease.id, user, server)
        await door.client.stop(lease.id, wait_s=20)

    await asyncio.gather(*(loop(*one) for one in _keys()))
    with door.engine.connect() as tx:
        volumes = tx.execute(sa.select(tables.homes.c.volume)).scalars().all()
    assert len(set(volumes)) == len(NAMES) + 1
    assert len(world.homes) == before + len(NAMES)


def _keys() -> list[tuple[str, str]]:
    """Each name once, as a user's or as a server's."""
    return [(name, "") if n % 2 else ("dave", name) for n, name in enumerate(NAMES)]
