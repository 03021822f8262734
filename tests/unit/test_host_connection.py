"""Calls that hang, against libvirt's own test driver."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import libvirt
import pytest
import pytest_asyncio

from gpuspawner.host.api import HostError, HostTimeout, HostUnreachable
from gpuspawner.host.connection import FAILURES, Connection

URI = "test:///default"


@pytest_asyncio.fixture
async def events() -> list[str]:
    return []


@pytest_asyncio.fixture
async def host(events: list[str]) -> AsyncIterator[Connection]:
    connection = Connection("a", URI, events.append)
    await connection.open()
    yield connection
    await connection.close()


@pytest.fixture
def release() -> Any:
    """An event that every hanging call waits for; set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


async def hang(connection: Connection, release: threading.Event) -> None:
    with pytest.raises(HostTimeout, match="abandoned"):
        await connection.call(lambda _c: release.wait(30), "hanging", deadline_s=0.05)


async def until(condition: Callable[[], bool], limit_s: float = 10) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  (it is no event of ours)
            await asyncio.sleep(0.01)


async def test_call_runs_beside_the_event_loop(host: Connection) -> None:
    thread, names = await host.call(
        lambda c: (threading.current_thread(), [d.name() for d in c.listAllDomains()]), "listing"
    )
    assert names == ["test"]
    assert thread is not threading.main_thread()
    assert thread.daemon


async def test_refusal_by_libvirt_has_a_remedy(host: Connection) -> None:
    with pytest.raises(HostError, match=r"Host a: looking failed: .*libvirt's log on a") as caught:
        await host.call(lambda c: c.lookupByName("none"), "looking")
    assert isinstance(caught.value.__cause__, libvirt.libvirtError)
    assert host.reachable


async def test_abandoned_call_is_replaced_with_its_connection(
    host: Connection, release: threading.Event
) -> None:
    before = await host.call(lambda c: c, "asking")
    await hang(host, release)
    after = await host.call(lambda c: c, "asking")
    assert after is not before
    assert host.reachable


async def test_three_in_a_row_make_the_host_unreachable_until_it_answers(
    host: Connection, release: threading.Event, events: list[str]
) -> None:
    for _ in range(FAILURES):
        assert host.reachable
        await hang(host, release)
    assert not host.reachable
    begun = time.monotonic()
    with pytest.raises(HostUnreachable, match="virsh -c test:///default list"):
        await host.call(lambda c: c, "asking")
    assert time.monotonic() - begun < 0.5
    await until(lambda: host.reachable)
    assert await host.call(lambda c: c.isAlive(), "asking") == 1
    await until(lambda: "" in events)  # events may have been missed


async def test_success_in_between_starts_the_count_anew(
    host: Connection, release: threading.Event
) -> None:
    for _ in range(FAILURES + 1):
        await hang(host, release)
        await host.call(lambda c: c.isAlive(), "asking")
    assert host.reachable


async def test_call_that_never_began_is_not_the_hosts_fault(
    host: Connection, release: threading.Event
) -> None:
    async with asyncio.TaskGroup() as group:
        busy = [
            group.create_task(host.call(lambda _c: release.wait(30), "busy", deadline_s=20))
            for _ in range(4)
        ]
        await asyncio.sleep(0.1)
        ran = []
        for _ in range(FAILURES):
            with pytest.raises(HostTimeout, match="tried again"):
                await host.call(lambda _c: ran.append(1), "waiting", deadline_s=0.05)
        assert host.reachable
        release.set()
    assert all(task.result() for task in busy)
    assert ran == []


async def test_one_host_does_not_delay_another(host: Connection, release: threading.Event) -> None:
    other = Connection("b", URI, lambda _uuid: None)
    await other.open()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(hang(host, release))
            begun = time.monotonic()
            await other.call(lambda c: c.isAlive(), "asking")
            assert time.monotonic() - begun < 1
    finally:
        await other.close()


async def test_transfer_lives_as_long_as_it_beats(host: Connection) -> None:
    def slow(_connection: Any, beat: Callable[[], None]) -> str:
        for _ in range(6):
            time.sleep(0.05)
            beat()
        return "done"

    assert await host.transfer(slow, "copying", stall_s=0.2) == "done"
    with pytest.raises(HostTimeout):
        await host.transfer(lambda _c, _b: time.sleep(0.5), "copying", stall_s=0.1)


async def test_domain_events_arrive_on_the_loop(host: Connection, events: list[str]) -> None:
    uuid = await host.call(lambda c: c.lookupByName("test").UUIDString(), "looking")
    await host.call(lambda c: c.lookupByName("test").destroy(), "ending")
    await until(lambda: uuid in events)


async def test_unknown_host_is_unreachable() -> None:
    connection = Connection("b", "test:///nowhere.xml", lambda _uuid: None)
    with pytest.raises(HostError):
        await connection.open()
    await connection.close()


async def test_closed_connection_refuses(host: Connection) -> None:
    await host.close()
    with pytest.raises(HostUnreachable, match="closed"):
        await host.call(lambda c: c, "asking")


def test_process_exits_while_a_call_hangs() -> None:
    program = f"""
import asyncio, threading
from gpuspawner.host.connection import Connection
async def main():
    host = Connection("a", "{URI}", print)
    await host.open()
    try:
        await host.call(lambda c: threading.Event().wait(), "hanging", deadline_s=0.1)
    except Exception as error:
        print(type(error).__name__)
    await host.close()
asyncio.run(main())
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "HostTimeout\n", "")
