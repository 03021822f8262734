"""Starting servers: what the allocator is asked for, what users see meanwhile, what goes wrong."""

from __future__ import annotations

import asyncio
import json
import re
from html import escape
from typing import Any

import pytest

from tests.layers import wait_for_async
from tests.service.fake_allocator import FakeAllocator
from tests.service.real_hub import RealHub


async def ready(hub: RealHub, user: str, name: str = "") -> dict[str, Any]:
    """Wait until a server is ready."""

    async def look() -> dict[str, Any] | None:
        server = await hub.server(user, name)
        return server if server and server["ready"] else None

    return await wait_for_async(look, 20, f"{user}'s server to be ready")


async def failure(hub: RealHub, user: str) -> tuple[int, str]:
    """Start a server that must fail at once; the API's answer."""
    status, answer = await hub.api("POST", f"users/{user}/server", {})
    return status, answer["message"]


async def test_a_server_starts_and_stops(hub: RealHub, allocator: FakeAllocator) -> None:
    await hub.add_user("ada")
    status, _ = await hub.api("POST", "users/ada/server", {"user_options": {"profile": "choice"}})
    assert status in (201, 202)
    server = await ready(hub, "ada")

    lease = allocator.only()
    body = lease.body
    assert (body["username"], body["server_name"]) == ("ada", "")
    assert re.fullmatch(r"[A-Za-z0-9_-]{8,64}", body["start_id"])
    assert body["request"] == {
        "gpus": 1, "gpu_model": None, "cores": 1, "memory_mib": 1536, "image": "lab",
        "policy": "strict", "home_mib": 10240,
    }  # fmt: skip
    assert body["ready_path"] == "/user/ada/api"
    assert lease.payload is not None
    env = lease.payload["env"]
    assert lease.payload["argv"] == ["jupyterhub-singleuser"]
    assert env["JUPYTERHUB_SERVICE_URL"] == "http://0.0.0.0:8888/user/ada/"
    assert env["JUPYTERHUB_API_URL"] == f"http://10.201.0.1:{hub.port}/hub/api"
    assert len(env["JUPYTERHUB_API_TOKEN"]) >= 32
    assert "PATH" not in env, "the hub's own environment stays at home"
    assert server["state"] == {
        "v": 1,
        "lease_id": lease.id,
        "start_id": body["start_id"],
        "url": f"http://127.0.0.1:{allocator.guest_port}",
    }
    assert server["user_options"]["profile"] == "choice"
    assert env["JUPYTERHUB_API_TOKEN"] not in hub.log_text()

    status, _ = await hub.api("DELETE", "users/ada/server")
    assert status == 204
    assert (lease.state, lease.reason) == ("ended", "released")
    assert await hub.server("ada") is None
    assert not allocator.called("POST leases/release")


async def test_stop_answers_when_the_machine_is_gone(
    hub: RealHub, allocator: FakeAllocator
) -> None:
    await hub.add_user("bob")
    await hub.api("POST", "users/bob/server", {})
    await ready(hub, "bob")
    gone = allocator.hold("stopping")
    status, _ = await hub.api("DELETE", "users/bob/server")
    assert status == 202
    server = await hub.server("bob")
    assert server is not None
    assert server["pending"] == "stop"
    gone.set()
    await wait_for_async(lambda: _none(hub.server("bob")), 10, "the server to be gone")
    assert allocator.only().state == "ended"


async def _none(awaitable: Any) -> bool:
    return await awaitable is None


async def test_every_tab_is_told_the_same(hub: RealHub, allocator: FakeAllocator) -> None:
    await hub.add_user("cyd")
    more = allocator.hold("running")
    starting = asyncio.create_task(hub.api("POST", "users/cyd/server", {}))
    await wait_for_async(lambda: bool(allocator.leases), 10, "the acquire")
    early = await hub.listen("cyd")
    await wait_for_async(lambda: len(allocator.only().events) == 5, 10, "five events")
    late = await hub.listen("cyd")
    more.set()
    first, second = await early, await late
    assert (await starting)[0] in (201, 202)
    assert first == second
    messages = [e["message"] for e in first if "message" in e]
    assert messages == [
        "Server requested",
        "Asking for Emulated GPU",
        "A GPU is reserved for you",
        "Starting your virtual machine",
        "JupyterLab is starting",
        "Still starting",
        "JupyterLab has answered",
        "Server ready at /user/cyd/",
    ]
    percents = [e["progress"] for e in first]
    assert percents == sorted(percents)
    assert max(percents[:-1]) <= 95
    assert len(allocator.streams) == 1, "one stream for all tabs"


async def test_the_pending_page_stops_the_right_server(
    hub: RealHub, allocator: FakeAllocator
) -> None:
    await hub.add_user("dan")
    allocator.hold("starting")
    async with hub.browser("dan") as browser:
        await hub.api("POST", "users/dan/servers/train", {})
        page = await browser.get("spawn-pending/dan/train")
        assert 'data-server="/hub/api/users/dan/servers/train"' in page.text
        assert 'id="gs-stop"' in page.text
        assert 'id="stop-server-btn"' not in page.text
        assert "Starting train" in page.text
        assert 'href="/hub/spawn/dan/train"' in page.text
        page = await browser.get("home")
        assert page.status == 200
    await hub.api("DELETE", "users/dan/servers/train")


async def test_cancelling_gives_the_gpu_back(hub: RealHub, allocator: FakeAllocator) -> None:
    await hub.add_user("eve")
    allocator.hold("starting")
    await hub.api("POST", "users/eve/server", {})
    lease = allocator.only()
    status, _ = await hub.api("DELETE", "users/eve/server")
    assert status == 204
    assert lease.state == "ended"
    assert allocator.called("POST leases/release") == [
        {"username": "eve", "server_name": "", "start_id": lease.body["start_id"]}
    ]
    allocator.hold("starting").set()
    await hub.api("POST", "users/eve/server", {})
    await ready(hub, "eve")
    assert allocator.only().body["start_id"] != lease.body["start_id"]
    await hub.api("DELETE", "users/eve/server")


async def test_cancelling_before_the_acquire_came_back(
    hub: RealHub, allocator: FakeAllocator
) -> None:
    await hub.add_user("fay")
    late = allocator.hold("acquire")
    await hub.api("POST", "users/fay/server", {})
    status, _ = await hub.api("DELETE", "users/fay/server")
    assert status == 204
    (start_id,) = {body["start_id"] for body in allocator.called("POST leases/release")}
    assert allocator.called("POST leases")[0]["start_id"] == start_id
    late.set()
    # If the acquire is still under way, it finds that it was released.
    assert all(lease.state == "ended" for lease in allocator.of("fay"))


async def test_a_start_that_takes_too_long_says_where_it_stood(
    hub: RealHub, allocator: FakeAllocator
) -> None:
    await hub.add_user("gil", "quick")
    allocator.hold("running")
    await hub.api("POST", "users/gil/server", {})
    event = (await hub.progress("gil"))[-1]  # also told to those who come too late
    assert event["message"].startswith(
        "Spawn failed: The server was not ready within 2 seconds. "
        "The last thing that happened was: Still starting."
    )
    async with hub.browser("gil") as browser:
        page = await browser.get("spawn-pending/gil")
        assert page.status == 504
        assert event["html_message"] in page.text
    await wait_for_async(lambda: allocator.only().state == "ended", 10, "the lease to end")


REFUSAL = {
    "status": 503,
    "reason": "capacity",
    "constraint": "memory",
    "message": "Node 0 of host h1 has 12 of 1536 MiB & 100% <b>",
    "retry_after_s": 33,
}


async def test_a_refusal_reads_the_same_everywhere(hub: RealHub, allocator: FakeAllocator) -> None:
    await hub.add_user("hal")
    allocator.refusal = REFUSAL
    status, message = await failure(hub, "hal")
    assert status == 503
    assert message == (
        "Node 0 of host h1 has 12 of 1536 MiB & 100% <b>. Choose a profile with less memory, or "
        "try again when a server has stopped."
    )
    assert "Traceback" not in hub.log_text().split("hal's server")[-1]
    cause, _, remedy = message.partition(". ")
    html = f"<strong>{escape(cause)}.</strong> {escape(remedy)}"
    (event,) = await hub.progress("hal")
    assert event["failed"]
    assert event["message"] == f"Spawn failed: {message}"
    assert event["html_message"] == html
    async with hub.browser("hal") as browser:
        page = await browser.get("spawn-pending/hal")
        assert page.status == 503
        assert html in page.text
        assert "<b>" not in page.text.split('id="gs-reason"')[1].split("</div>")[0]
        # And on the form, after a start that failed within the first second.
        form = await browser.get("spawn")
        page = await browser.submit(form, {"profile": "emulated"})
        assert page.status == 503
        assert escape(cause) in page.text.split('id="gs-error"')[1].split("</div>")[0]
        assert 'id="gs-profiles"' in page.text, "the form is there for another choice"


@pytest.mark.parametrize(
    ("reason", "said", "cause"),
    [
        (
            "boot-failed",
            None,
            "The virtual machine came up, but JupyterLab did not answer in time.",
        ),
        ("guest-gone", "The guest panicked", "The guest panicked."),
        ("new-word", None, "The server ended unexpectedly."),
    ],
)
async def test_a_lease_that_ends_while_starting(
    hub: RealHub, allocator: FakeAllocator, reason: str, said: str | None, cause: str
) -> None:
    user = f"ida-{reason}"
    await hub.add_user(user)
    allocator.end_at["running"] = (reason, said)
    status, message = await failure(hub, user)
    assert status == 503
    if reason == "new-word":
        assert message.startswith("Ended."), "the last event's words, if there is nothing better"
    else:
        assert message.startswith(cause if said else "Ended.")
    (event,) = await hub.progress(user)
    assert event["message"] == f"Spawn failed: {message}"


async def test_the_payload_is_sent_again(hub: RealHub, allocator: FakeAllocator) -> None:
    await hub.add_user("jan")
    allocator.lose_payload = True
    await hub.api("POST", "users/jan/server", {})
    await ready(hub, "jan")
    asked = allocator.called("POST leases")[0]["payload"]
    sent = allocator.called("PUT leases/ID/payload")
    assert sent
    assert all(payload == asked for payload in sent)


async def test_an_allocator_that_restarts_in_the_middle(
    hub: RealHub, allocator: FakeAllocator
) -> None:
    await hub.add_user("kim")
    more = allocator.hold("running")
    await hub.api("POST", "users/kim/server", {})
    progress = await hub.listen("kim")
    await wait_for_async(lambda: len(allocator.only().events) == 5, 10, "five events")
    await allocator.down()
    await wait_for_async(lambda: "cannot be reached" in hub.log_text(), 10, "the hub to notice")
    await allocator.up()
    more.set()
    await ready(hub, "kim")
    assert len(allocator.of("kim")) == 1
    assert allocator.last_event_ids == [None, "5"]
    messages = [e.get("message") for e in await progress]
    assert "The GPU pool does not answer just now; still waiting" in messages


async def test_streams_that_keep_breaking(hub: RealHub, allocator: FakeAllocator) -> None:
    await hub.add_user("leo")
    allocator.cut_streams_after = 2
    await hub.api("POST", "users/leo/server", {})
    await ready(hub, "leo")
    assert len(allocator.streams) >= 3


async def test_an_allocator_that_is_away(hub: RealHub, allocator: FakeAllocator) -> None:
    await hub.add_user("mia")
    await allocator.down()
    status, _ = await hub.api("POST", "users/mia/server", {})
    assert status in (202, 503)
    events = await hub.progress("mia")
    assert events[-1]["failed"]
    assert events[-1]["message"].startswith("Spawn failed: The GPU pool does not answer.")


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (200, b"<html>It works!", "text/html"),
        (500, b"Traceback (most recent call last)", "text/plain"),
        (201, b"{}", "application/json"),
        (201, b"[[[[", "application/json"),
    ],
)
async def test_nonsense_instead_of_a_lease(
    hub: RealHub, allocator: FakeAllocator, status: int, body: bytes, kind: str
) -> None:
    user = f"ned{status}{len(body)}"
    await hub.add_user(user)
    allocator.answer("POST leases", status, body, kind)
    code, message = await failure(hub, user)
    assert code == 503
    assert message.startswith("The GPU pool gave an answer that makes no sense.")
    assert "Traceback" not in message
    assert await hub.server(user) is None


async def test_a_hub_that_guests_cannot_reach(hub: RealHub, allocator: FakeAllocator) -> None:
    await hub.add_user("ola", "loop")
    status, message = await failure(hub, "ola")
    assert status == 500
    assert message.startswith("Virtual machines could not reach this hub.")
    assert "inside itself" in message
    # A release of the server of another test may still be on its way.
    asked = [*allocator.called("POST leases"), *allocator.called("POST leases/release")]
    assert not [body for body in asked if body["username"] == "ola"], "nothing was asked for"


async def test_the_allocators_events_cannot_bring_html(
    hub: RealHub, allocator: FakeAllocator
) -> None:
    await hub.add_user("pat")
    allocator.stages = (("starting", 20, "<img src=x>"), ("running", 100, "done"))
    allocator.hold("running")
    await hub.api("POST", "users/pat/server", {})
    progress = await hub.listen("pat")
    await wait_for_async(lambda: len(allocator.only().events) == 1, 10, "one event")
    allocator.hold("running").set()
    text = json.dumps(await progress)
    assert "&lt;img src=x&gt;" in text
    await ready(hub, "pat")
