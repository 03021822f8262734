"""Running servers: polls, restarts of the hub, stops that fail, deletion, names."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.layers import wait_for_async
from tests.service.fake_allocator import FakeAllocator
from tests.service.real_hub import RealHub


async def running(hub: RealHub, user: str, name: str = "") -> dict[str, Any]:
    """A user with a server that runs."""
    await hub.add_user(user)
    await hub.api("POST", f"users/{user}/{f'servers/{name}' if name else 'server'}", {})

    async def look() -> dict[str, Any] | None:
        server = await hub.server(user, name)
        return server if server and server["ready"] else None

    return await wait_for_async(look, 20, f"{user}'s server to be ready")


async def gone(hub: RealHub, user: str, name: str = "") -> None:
    """Wait until the hub knows of no such server."""

    async def look() -> bool:
        server = await hub.server(user, name)
        return server is None or server["stopped"]

    await wait_for_async(look, 20, f"{user}'s server to be gone")


async def polled(allocator: FakeAllocator, times: int = 2) -> None:
    """Wait until the hub has polled some more."""
    before = len(allocator.called("GET leases/ID"))
    await wait_for_async(
        lambda: len(allocator.called("GET leases/ID")) >= before + times, 20, "polls"
    )


async def test_a_silent_allocator_ends_nothing(hub: RealHub, allocator: FakeAllocator) -> None:
    await running(hub, "ada2")
    warned = hub.log_text().count("Cannot ask for the server of ada2")
    await allocator.down()
    await wait_for_async(
        lambda: hub.log_text().count("Cannot ask for the server of ada2") == warned + 1,
        20, "the hub to notice",
    )  # fmt: skip
    # More polls, in vain: whoever calls is hung up on.
    calls = 0

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        writer.close()

    broken = await asyncio.start_server(hang_up, "127.0.0.1", allocator.port)
    async with broken:
        await wait_for_async(lambda: calls >= 3, 20, "more polls")
    server = await hub.server("ada2")
    assert server is not None
    assert server["ready"]
    assert hub.log_text().count("Cannot ask for the server of ada2") == warned + 1, "said once"

    await allocator.up()
    await polled(allocator)
    server = await hub.server("ada2")
    assert server is not None
    assert server["ready"]


@pytest.mark.parametrize(
    ("status", "body"), [(500, b"oops"), (200, b"<html>"), (401, b"{}"), (200, b'{"id": 1}')]
)
async def test_a_confused_allocator_ends_nothing(
    hub: RealHub, allocator: FakeAllocator, status: int, body: bytes
) -> None:
    user = f"bob2-{status}{len(body)}"
    await running(hub, user)
    for _ in range(3):
        allocator.answer("GET leases/ID", status, body, "application/json")
    await polled(allocator, 4)
    server = await hub.server(user)
    assert server is not None
    assert server["ready"]
    await hub.api("DELETE", f"users/{user}/server")


async def test_a_guest_that_dies_is_noticed_and_explained(
    hub: RealHub, allocator: FakeAllocator
) -> None:
    await running(hub, "cyd2")
    await allocator.vanish(allocator.only())
    await gone(hub, "cyd2")
    assert not allocator.called("DELETE leases/ID"), "there is nothing left to stop"
    async with hub.browser("cyd2") as browser:
        page = await browser.get("spawn")
        assert 'id="gs-ended"' in page.text
        assert "The virtual machine ended by itself" in page.text
        page = await browser.get("user/cyd2/lab")
        assert page.status == 424
        assert "Your server is not running" in page.text
    # An ordinary stop needs no explanation.
    await running(hub, "cyd2")
    await hub.api("DELETE", "users/cyd2/server")
    await gone(hub, "cyd2")
    async with hub.browser("cyd2") as browser:
        assert 'id="gs-ended"' not in (await browser.get("spawn")).text


@pytest.mark.parametrize("answer", [(500, b"oops"), (200, b"<html>"), (409, b"{}")])
async def test_a_stop_that_fails_does_not_stay(
    hub: RealHub, allocator: FakeAllocator, answer: tuple[int, bytes]
) -> None:
    user = f"dan2-{answer[0]}"
    await running(hub, user)
    allocator.answer("DELETE leases/ID", *answer)
    status, _ = await hub.api("DELETE", f"users/{user}/server")
    assert status == 204
    await gone(hub, user)
    assert f"The server of {user} may still be stopping" in hub.log_text()
    # The next start takes the old lease's place; the allocator sees to that.
    await running(hub, user)
    assert len(allocator.of(user)) == 2
    await hub.api("DELETE", f"users/{user}/server")


async def test_a_stop_without_an_allocator(hub: RealHub, allocator: FakeAllocator) -> None:
    await running(hub, "eve2")
    await allocator.down()
    status, _ = await hub.api("DELETE", "users/eve2/server")
    assert status in (202, 204)
    await gone(hub, "eve2")
    assert "The server of eve2 may still be stopping" in hub.log_text()


async def test_a_stop_outlives_a_restart_of_the_allocator(
    hub: RealHub, allocator: FakeAllocator
) -> None:
    await running(hub, "fay2")
    finish = allocator.hold("stopping")
    await hub.api("DELETE", "users/fay2/server")
    await allocator.down()
    finish.set()
    await allocator.up()
    await gone(hub, "fay2")
    assert allocator.only().state == "ended"
    assert "The server of fay2 may still be stopping" not in hub.log_text()


async def test_named_servers_have_leases_and_homes_of_their_own(
    hub: RealHub, allocator: FakeAllocator
) -> None:
    await running(hub, "gil2")
    await running(hub, "gil2", "train")
    (default,), (named,) = allocator.of("gil2"), allocator.of("gil2", "train")
    assert named.body["ready_path"] == "/user/gil2/train/api"
    assert named.payload is not None
    assert named.payload["env"]["JUPYTERHUB_SERVER_NAME"] == "train"

    status, _ = await hub.api("DELETE", "users/gil2/servers/train", {"remove": True})
    assert status in (202, 204)
    await wait_for_async(
        lambda: allocator.called("POST homes/forget"), 10, "the home to be forgotten"
    )
    assert allocator.called("POST homes/forget") == [{"username": "gil2", "server_name": "train"}]
    assert (default.state, named.state) == ("running", "ended")
    await hub.api("DELETE", "users/gil2/server")


async def test_a_deleted_user_leaves_no_home(hub: RealHub, allocator: FakeAllocator) -> None:
    await running(hub, "hal2")
    await hub.api("DELETE", "users/hal2/server")
    await gone(hub, "hal2")
    allocator.answer("POST homes/forget", 500, b"oops")
    status, _ = await hub.api("DELETE", "users/hal2")
    assert status == 204
    assert allocator.called("POST homes/forget") == [{"username": "hal2", "server_name": ""}]
    assert "The home of the deleted server hal2 is still in its place" in hub.log_text()


async def test_renaming_is_refused_with_a_reason(hub: RealHub, allocator: FakeAllocator) -> None:
    await running(hub, "ida2", "old")
    await hub.api("DELETE", "users/ida2/servers/old")
    await gone(hub, "ida2", "old")
    status, answer = await hub.api("PATCH", "users/ida2/servers/old", {"name": "new"})
    assert status == 400
    assert "its files belong to its name" in answer["message"]
    status, _ = await hub.api("PATCH", "users/ida2/servers/old", {"display_name": "My training"})
    assert status == 200


async def test_the_hub_is_killed_and_comes_back(hub: RealHub, allocator: FakeAllocator) -> None:
    """One that runs, one whose guest dies meanwhile, and two in the middle of a start, of which
    one gets ready meanwhile."""
    before = await running(hub, "jan2")
    await running(hub, "kim2")
    more = allocator.hold("running")
    for user in ("leo2", "mia2"):
        await hub.add_user(user)
        await hub.api("POST", f"users/{user}/server", {})
    (jan,), (kim,), (leo,), (mia,) = map(allocator.of, ("jan2", "kim2", "leo2", "mia2"))

    hub.kill()
    await allocator.vanish(kim, "host-lost")
    assert mia.runner is not None
    mia.runner.cancel()
    more.set()
    await wait_for_async(lambda: leo.state == "running", 10, "the lease to run")
    hub.start()

    await wait_for_async(lambda: _ready(hub, "jan2"), 30, "the running server")
    after = await hub.server("jan2")
    assert after is not None
    assert after["state"] == before["state"]
    await gone(hub, "kim2")
    await wait_for_async(lambda: _ready(hub, "leo2"), 30, "the lease to be taken over")
    # What does not run yet is left to the allocator, which asks the hub about it.
    await gone(hub, "mia2")
    assert (jan.state, leo.state, mia.state) == ("running", "running", "starting")
    assert not allocator.called("POST leases/release")

    for user, lease in (("jan2", jan), ("leo2", leo)):
        status, _ = await hub.api("DELETE", f"users/{user}/server")
        assert status in (202, 204)
        await gone(hub, user)
        assert lease.state == "ended"


async def test_the_hub_ends_and_comes_back_without_the_allocator(
    hub: RealHub, allocator: FakeAllocator
) -> None:
    await running(hub, "ned2")
    hub.stop()
    assert allocator.only().state == "running", "an orderly end leaves servers alone"
    await allocator.down()
    hub.start()
    await wait_for_async(lambda: _ready(hub, "ned2"), 30, "the server to be taken for running")
    await allocator.up()
    await polled(allocator)
    assert await _ready(hub, "ned2")
    status, _ = await hub.api("DELETE", "users/ned2/server")
    assert status in (202, 204)
    await gone(hub, "ned2")
    assert allocator.only().state == "ended"


async def _ready(hub: RealHub, user: str) -> bool:
    server = await hub.server(user)
    return bool(server and server["ready"])
