"""A host's libvirt connection that never blocks the event loop and survives a daemon that hangs.

libvirt's calls are synchronous and may hang for ever (a stopped daemon, a dead network, a driver
waiting for storage). So every call runs on a daemon thread under a deadline. A call that passes
it is *abandoned* together with its thread and its connection, and both are replaced. Each thread
has a connection of its own, opened when it is needed: libvirt's client before 10.3 may crash where
two threads wait for answers on one (CVE-2024-4418, in Debian 12's 9.0). After
``FAILURES`` abandoned calls or failed connects in a row the host is unreachable: calls then fail
at once, until a reconnect in the background succeeds.

One thread per process runs libvirt's event loop (keepalive, lifecycle events, streams). All
threads are daemon threads: the process can exit while a call hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import libvirt

from gpuspawner.host.api import HostError, HostFull, HostTimeout, HostUnreachable

log = logging.getLogger(__name__)

T = TypeVar("T")
Beat = Callable[[], None]
# What to do with a connection just opened; gives how to undo it before it is closed.
Prepare = Callable[[Any], Callable[[], None]]

THREADS = 4  # a host's, for all but volume streams, each with a connection
STREAMS = 2  # as many for volume streams
FAILURES = 3
KEEPALIVE_S = 5
KEEPALIVE_COUNT = 3
BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
# A connect to a stopped daemon hangs before keepalive starts, and with it its thread. More than
# these are never left hanging; the next attempt waits until one of them returned.
MAX_STUCK_LANES = 8

_event_loop_lock = threading.Lock()
_event_loop_runs = False


def start_event_loop() -> None:
    """Start the process' libvirt event loop, once. Must precede every ``libvirt.open``."""
    global _event_loop_runs
    with _event_loop_lock:
        if _event_loop_runs:
            return
        libvirt.registerErrorHandler(lambda _ctx, _error: None, None)  # or it prints to stderr
        libvirt.virEventRegisterDefaultImpl()
        threading.Thread(target=_run_event_loop, name="libvirt-events", daemon=True).start()
        _event_loop_runs = True


def _run_event_loop() -> None:
    while True:
        try:
            libvirt.virEventRunDefaultImpl()
        except Exception:  # the loop must outlive any callback
            log.exception("libvirt's event loop stumbled")
            time.sleep(1)


class _Job(Generic[T]):
    """One call on its way through a lane. ``beat`` is the last sign of life, monotonic."""

    def __init__(self, fn: Callable[[Any, Beat], T]) -> None:
        self._fn = fn
        self.future: Future[T] = Future()
        self.beat = time.monotonic()
        self.lane: _Lane | None = None  # whose thread runs it

    def tick(self) -> None:
        self.beat = time.monotonic()

    def run(self, lane: _Lane) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        self.lane = lane
        self.tick()
        try:
            result = self._fn(lane.connection(), self.tick)
        except BaseException as error:
            lane.check()
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class _Lane:
    """One libvirt connection and the daemon thread that uses it, for jobs of a queue that it
    shares with others."""

    def __init__(
        self, uri: str, name: str, jobs: queue.SimpleQueue[_Job[Any] | None], prepare: Prepare
    ) -> None:
        self._uri = uri
        self._jobs = jobs
        self._prepare = prepare
        self._connection: Any = None
        self._undo: Callable[[], None] = _nothing
        self._retired = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def connection(self) -> Any:
        """The open connection; opens it where there is none or it was lost. Only for the lane's
        own thread, as all below that is not said to be for others."""
        self.check()
        if self._connection is None:
            connection = libvirt.open(self._uri)
            # Not every driver has keepalive (test:///); the remote one does, local or not.
            with contextlib.suppress(libvirt.libvirtError):
                connection.setKeepAlive(KEEPALIVE_S, KEEPALIVE_COUNT)
            if self._retired:  # it was given up while it connected
                connection.close()
                raise HostTimeout("This connection was abandoned.")
            self._undo = self._prepare(connection)
            self._connection = connection
        return self._connection

    def check(self) -> None:
        """Forget the connection if it is no longer alive."""
        if self._connection is not None and not _is_alive(self._connection):
            self._forget()

    def retire(self) -> None:
        """Take no more jobs after this one; for any thread. The lane's own closes the connection
        when it returns: closing it under a thread that is inside libvirt would free what it
        uses."""
        self._retired = True

    @property
    def stuck(self) -> bool:
        """Retired, but the thread has not come back yet; for any thread."""
        return self._retired and self._thread.is_alive()

    def _work(self) -> None:
        while not self._retired and (job := self._jobs.get()) is not None:
            job.run(self)
            del job  # its function may hold domains, and they the connection
        connection = self._connection
        if connection is not None:
            self._forget()
            with contextlib.suppress(libvirt.libvirtError):
                connection.close()

    def _forget(self) -> None:
        """An event subscription keeps its connection open, so it goes first."""
        with contextlib.suppress(libvirt.libvirtError):
            self._undo()
        self._connection, self._undo = None, _nothing


class _Lanes:
    """A host's lanes for one purpose, as many as calls were made at once, ``most`` at most. Only
    for the asyncio loop's thread."""

    def __init__(self, uri: str, name: str, most: int, prepare: Prepare) -> None:
        self._uri = uri
        self._name = name
        self._most = most
        self._prepare = prepare
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._lanes: list[_Lane] = []
        self._open: list[_Job[Any]] = []  # jobs that wait or run

    def submit(self, job: _Job[Any]) -> None:
        """Have a job done by the lane that is free first, a new one if none is."""
        self._open = [*(each for each in self._open if not each.future.done()), job]
        if len(self._lanes) < min(self._most, len(self._open)):
            self._start()
        self._jobs.put(job)

    def replace(self, lane: _Lane) -> None:
        """Have a new lane for this one, which hangs, if it is one of these."""
        if lane in self._lanes:
            lane.retire()
            self._lanes.remove(lane)
            self._start()

    def retire(self) -> None:
        """Take no more calls."""
        for lane in self._lanes:
            lane.retire()
            self._jobs.put(None)

    def _start(self) -> None:
        name = f"libvirt-{self._name}-{len(self._lanes)}"
        self._lanes.append(_Lane(self._uri, name, self._jobs, self._prepare))


def _nothing() -> None:
    pass


def _no_more(_connection: Any) -> Callable[[], None]:
    return _nothing


def _is_alive(connection: Any) -> bool:
    try:
        return bool(connection.isAlive())
    except libvirt.libvirtError:
        return False


class Connection:
    """The calls to one host's libvirt.

    ``on_event(uuid)`` is called on the asyncio loop when a domain starts or ends, and with an
    empty string after a reconnect, when events may have been missed.
    """

    def __init__(self, host: str, uri: str, on_event: Callable[[str], None]) -> None:
        self.host = host
        self.uri = uri
        self._on_event = on_event
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failures = 0
        self._why = ""
        self._was_open = False
        self._reconnecting: asyncio.Task[None] | None = None
        self._retired: list[_Lane] = []
        self._closed = False
        self._control = self._new_control()
        self._bulk = self._new_bulk()

    @property
    def reachable(self) -> bool:
        """False from the third failure in a row to the next successful reconnect."""
        return self._failures < FAILURES

    async def open(self) -> None:
        """Connect. Raises ``HostUnreachable`` if that fails."""
        self._loop = asyncio.get_running_loop()
        self._closed = False
        start_event_loop()
        await self.call(lambda connection: connection.getLibVersion(), "connecting", deadline_s=30)

    async def close(self) -> None:
        """Let go of threads and connections; does not wait for calls that hang."""
        self._closed = True
        self._was_open = False
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            self._reconnecting = None
        self._control.retire()
        self._bulk.retire()
        self._control, self._bulk = self._new_control(), self._new_bulk()

    async def call(self, fn: Callable[[Any], T], what: str, *, deadline_s: float = 15.0) -> T:
        """``fn(virConnect)`` on a thread. ``what`` is the call in words, for errors.

        Raises ``HostTimeout`` past the deadline (it may have taken effect), ``HostUnreachable``
        if the host does not answer, ``HostError`` for any other refusal by libvirt.
        """
        return await self._run(
            self._control, lambda connection, _beat: fn(connection), what, deadline_s
        )

    async def transfer(
        self, fn: Callable[[Any, Beat], T], what: str, *, stall_s: float = 60.0
    ) -> T:
        """As ``call``, on connections for volume streams alone: ``fn(virConnect, beat)``
        must call ``beat`` as it gets on, and has ``stall_s`` seconds from one to the next."""
        return await self._run(self._bulk, fn, what, stall_s)

    async def _run(
        self, lanes: _Lanes, fn: Callable[[Any, Beat], T], what: str, limit_s: float
    ) -> T:
        if self._closed:
            raise HostUnreachable(f"Host {self.host}: the connection is closed.")
        if not self.reachable:
            raise self._unreachable()
        job = _Job(fn)
        waiter = self._submit(lanes, job)
        try:
            while not waiter.done():
                left_s = job.beat + limit_s - time.monotonic()
                if left_s <= 0:
                    raise self._abandon(job, what, limit_s)
                await asyncio.wait({waiter}, timeout=left_s)
            result = waiter.result()
        except libvirt.libvirtError as error:
            raise self._translate(what, error) from error
        finally:
            job.future.cancel()  # our caller was cancelled: it need not begin any more
        self._failures = 0
        return result

    def _submit(self, lanes: _Lanes, job: _Job[T]) -> asyncio.Future[T]:
        lanes.submit(job)
        waiter = asyncio.wrap_future(job.future)
        # What an abandoned call comes back with is nobody's news any more.
        waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
        return waiter

    def _abandon(self, job: _Job[Any], what: str, limit_s: float) -> HostError:
        text = f"Host {self.host}: {what} took longer than {limit_s:g} s and was abandoned."
        if job.future.cancel():  # all threads were busy: it will not run, and is nobody's fault
            return HostTimeout(text, "The host is busy; it is tried again.")
        self._replace(job)
        self._failed(text)
        return HostTimeout(
            text, f"Look at libvirt's daemon on {self.host} if this comes back (journalctl)."
        )

    def _replace(self, job: _Job[Any]) -> None:
        """Give up the lane in which a job hangs."""
        if job.lane is not None:
            self._retired = [*(old for old in self._retired if old.stuck), job.lane]
            self._control.replace(job.lane)
            self._bulk.replace(job.lane)

    def _translate(self, what: str, error: Any) -> HostError:
        if is_connection_error(error):
            self._failed(str(error))
            if self.reachable:
                return HostUnreachable(
                    f"Host {self.host}: {what} failed: {error}.", _connect_remedy(self.uri)
                )
            return self._unreachable()
        self._failures = 0
        return explain(self.host, what, error)

    def _failed(self, why: str) -> None:
        self._failures += 1
        self._why = why
        if not self.reachable and self._reconnecting is None and not self._closed:
            log.warning("host %s is unreachable: %s", self.host, why)
            self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect())

    def _unreachable(self) -> HostUnreachable:
        return HostUnreachable(
            f"Host {self.host} does not answer: {self._why}", _connect_remedy(self.uri)
        )

    async def _reconnect(self) -> None:
        attempt = 0
        while True:
            await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])
            attempt += 1
            self._retired = [lane for lane in self._retired if lane.stuck]
            if len(self._retired) >= MAX_STUCK_LANES:
                continue
            job: _Job[object] = _Job(lambda connection, _beat: connection.getLibVersion())
            waiter = self._submit(self._control, job)
            try:
                await asyncio.wait_for(waiter, 10)
            except (TimeoutError, libvirt.libvirtError) as error:
                self._why = str(error) or "connecting took longer than 10 s"
                if isinstance(error, TimeoutError):
                    self._replace(job)
                continue
            log.info("host %s answers again", self.host)
            self._failures = 0
            self._reconnecting = None
            return

    def _new_control(self) -> _Lanes:
        return _Lanes(self.uri, self.host, THREADS, self._subscribe)

    def _new_bulk(self) -> _Lanes:
        return _Lanes(self.uri, f"{self.host}-bulk", STREAMS, _no_more)

    def _subscribe(self, connection: Any) -> Callable[[], None]:
        """On a lane's thread, right after a control connection was opened. Each of a host's tells
        of each event: it is heard several times, and missed by none that was lost."""
        subscription = connection.domainEventRegisterAny(
            None, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._lifecycle, None
        )
        if self._was_open:
            self._tell("")
        self._was_open = True
        return lambda: connection.domainEventDeregisterAny(subscription)

    def _lifecycle(self, _connection: Any, domain: Any, event: int, *_rest: Any) -> None:
        if event in (
            libvirt.VIR_DOMAIN_EVENT_STARTED,
            libvirt.VIR_DOMAIN_EVENT_STOPPED,
            libvirt.VIR_DOMAIN_EVENT_CRASHED,
        ):
            self._tell(domain.UUIDString())

    def _tell(self, uuid: str) -> None:
        if self._loop is not None and not self._closed:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._on_event, uuid)


def is_connection_error(error: Any) -> bool:
    """The daemon could not be reached or was lost, as opposed to having refused."""
    code, domain = error.get_error_code(), error.get_error_domain()
    if code in (libvirt.VIR_ERR_NO_CONNECT, libvirt.VIR_ERR_RPC, libvirt.VIR_ERR_INVALID_CONN):
        return True
    # A socket that cannot be opened, or was closed under a call, comes as a system or internal
    # error of the RPC or the remote driver.
    return domain in (libvirt.VIR_FROM_RPC, libvirt.VIR_FROM_REMOTE) and code in (
        libvirt.VIR_ERR_SYSTEM_ERROR,
        libvirt.VIR_ERR_INTERNAL_ERROR,
    )


_REMEDIES = {
    libvirt.VIR_ERR_AUTH_FAILED: (
        "Give the allocator's user the right to manage libvirt there (group libvirt, or the ssh "
        "login's key)."
    ),
    libvirt.VIR_ERR_OPERATION_DENIED: "Connect with an account that may manage libvirt there.",
    libvirt.VIR_ERR_OPERATION_TIMEOUT: "Something else holds the object; it is tried again.",
    libvirt.VIR_ERR_NO_STORAGE_POOL: "Restart the allocator, or add the host again, to make it.",
    libvirt.VIR_ERR_CONFIG_UNSUPPORTED: "Update libvirt and QEMU on the host.",
}


NO_SPACE = "No space left on device"

# libvirt has one code for most of what QEMU and the system say.
_REMEDIES_BY_TEXT = (
    (
        NO_SPACE,
        "Free some space on the disk of the host's storage pool, or make it larger.",
    ),
    (
        "Network is already in use",
        "Give the host another range for its guests; this one is on an interface there already.",
    ),
    (
        "Permission denied",
        "QEMU runs under an account of its own there: it must be able to pass every folder above "
        "the storage pool (chmod o+x).",
    ),
    (
        "Cannot allocate memory",
        "The node has less memory than the pool believes: raise its reserve, or look at what "
        "else runs on the host.",
    ),
)


def explain(host: str, what: str, error: Any) -> HostError:
    """A refusal by libvirt as a ``HostError`` with what to do next."""
    remedy = _REMEDIES.get(error.get_error_code(), "")
    text = str(error)
    remedy = next((remedy for part, remedy in _REMEDIES_BY_TEXT if part in text), remedy)
    if not remedy:
        remedy = f"Look at libvirt's log on {host}."
    kind = HostFull if NO_SPACE in text else HostError
    return kind(f"Host {host}: {what} failed: {error}.", remedy)


def _connect_remedy(uri: str) -> str:
    return f"Check that libvirt runs there and that 'virsh -c {uri} list' works from this machine."
