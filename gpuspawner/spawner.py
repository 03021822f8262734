"""``GPUSpawner``: a lease, and so a virtual machine, for each JupyterHub server.

The allocator owns the truth. What is kept here is a cache: JupyterHub never calls ``stop()`` when
a server dies by itself, forgets servers whose ``stop()`` raised, and loses the state of a start
that it was killed in. So nothing here is needed to give a GPU back; it only happens sooner.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from jupyterhub.spawner import Spawner
from pydantic import ValidationError

from gpuspawner.choosing import ChoosingSpawner
from gpuspawner.client import AllocatorError, AllocatorProblem, AllocatorUnreachable
from gpuspawner.config import ConfigError
from gpuspawner.errors import GPUSpawnError, from_lease, from_problem
from gpuspawner.hub_url import hub_url_problem
from gpuspawner.profile_list import first_error
from gpuspawner.progress import ProgressEvent, Story
from gpuspawner.schema import AcquireLease, BootPayload, Lease, ReleaseLease

_T = TypeVar("_T")

STATE_VERSION = 1
GUEST_CERTS = "/run/gpuspawner/ssl"
_RELEASE_WAIT_S = 5.0
_RELEASE_LIMIT_S = 300.0


class GPUSpawner(ChoosingSpawner, Spawner):  # type: ignore[misc]  # JupyterHub has no types
    """Starts JupyterLab in a virtual machine with whole GPUs, through the allocator."""

    # The event loop keeps only weak references to tasks.
    _releases: ClassVar[set[asyncio.Task[None]]] = set()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._lease_id = ""
        self._start_id = ""
        self._url = ""
        self._starting = False
        # A spawner that neither started anything nor was told a lease belongs to a hub that was
        # restarted, perhaps in the middle of a start: then a running lease of this key is ours.
        self._may_adopt = True
        self._silence_logged = False
        self._selection = None
        self._asked = False
        self._cert_files: dict[str, str] = {}
        self._story = Story()
        super().__init__(*args, **kwargs)

    # -- what JupyterHub keeps for us ----------------------------------------------------------

    def load_state(self, state: Mapping[str, Any]) -> None:
        """After a restart of the hub."""
        super().load_state(state)
        self._lease_id = str(state.get("lease_id") or "")
        self._start_id = str(state.get("start_id") or "")
        self._url = str(state.get("url") or "")

    def get_state(self) -> dict[str, Any]:
        """What identifies the lease; JupyterHub keeps it once ``start()`` has returned."""
        state: dict[str, Any] = super().get_state()
        if self._lease_id:
            state |= {
                "v": STATE_VERSION,
                "lease_id": self._lease_id,
                "start_id": self._start_id,
                "url": self._url,
            }
        return state

    def clear_state(self) -> None:
        """Called before each start and after each stop."""
        super().clear_state()
        self._lease_id = self._start_id = self._url = ""
        self._may_adopt = False
        self._selection = None
        self._cert_files = {}
        self._story.end()
        self._story = Story()

    # -- starting ------------------------------------------------------------------------------

    async def start(self) -> str:
        """Get a lease and wait until JupyterLab answers; returns its URL.

        However this ends except by returning (an error, JupyterHub's time-out, a user who
        cancels), the lease is released, also if its acquire never came back.
        """
        self._starting = True
        self._may_adopt = self._asked = False
        self._start_id = secrets.token_urlsafe(18)
        clock = asyncio.timeout(self.start_budget)
        try:
            async with clock:
                return await self._start()
        except BaseException as error:
            if self._asked:
                await self._undo_start()
            else:
                self._start_id = ""
            if isinstance(error, TimeoutError) and clock.expired():
                raise self._too_late() from error
            if isinstance(error, AllocatorProblem):
                raise from_problem(error) from error
            if isinstance(error, GPUSpawnError) or not isinstance(error, Exception):
                raise
            # JupyterHub logs no traceback for errors that are made for users.
            self.log.exception("The start of %s failed unexpectedly", self._log_name)
            raise GPUSpawnError(
                "Something went wrong in the hub while it started the server.",
                reason="internal",
                status_code=500,
                log_message=f"{type(error).__name__} in start()",
            ) from error
        finally:
            self._starting = False

    async def _start(self) -> str:
        story = self._story
        self._check_hub_url()
        # An admin may have put something else in the place of apply_user_options.
        selection = self._selection or await self._select(self.user_options or {})
        for note in selection.notes:
            story.add(note)
        request = AcquireLease(
            username=self.user.name,
            server_name=self.name,
            start_id=self._start_id,
            groups=sorted(group.name for group in self.user.groups),
            request=selection.request,
            payload=self._payload(),
            ready_path=self.server.base_url.rstrip("/") + "/api",
        )
        story.add(f"Asking for {selection.profile.title}", 1)
        self._asked = True
        lease = await self._patiently(lambda: self._client().acquire(request))
        self._lease_id = lease.id
        if lease.hub_id != self.hub_id:
            self.log.warning(
                "The allocator knows this hub as %r, the hub itself is configured as %r",
                lease.hub_id,
                self.hub_id,
            )
        if lease.payload_needed:
            await self._send_payload(lease.id, request.payload)
        if lease.state not in ("running", "stopping", "ended"):
            lease = await self._follow(lease, request.payload, story)
        if lease.state != "running":
            raise from_lease(lease)
        self._url = self._url_of(lease)
        return self._url

    async def _follow(self, lease: Lease, payload: BootPayload, story: Story) -> Lease:
        """Retell the lease's events until it runs or ends; returns it as it is then."""

        def trouble(text: str) -> None:
            self.log.warning("Start of %s: %s", self._log_name, text)
            story.add("The GPU pool does not answer just now; still waiting")

        said = ""
        async with aclosing(self._client().events(lease.id, on_trouble=trouble)) as events:
            async for event in events:
                if event.kind == "payload-needed":
                    await self._send_payload(lease.id, payload)
                if event.kind == "error" or event.state in ("stopping", "ended"):
                    said = event.message or said
                if event.state in ("stopping", "ended"):
                    break  # the error that follows says why, with what to do
                story.add(event.message, event.progress)
                if event.state == "running":
                    break
        lease = await self._patiently(lambda: self._client().lease(lease.id))
        if lease.state in ("stopping", "ended") and not lease.message:
            return lease.model_copy(update={"message": said})
        return lease

    async def _send_payload(self, lease_id: str, payload: BootPayload) -> None:
        try:
            await self._patiently(lambda: self._client().put_payload(lease_id, payload))
        except AllocatorError as error:
            if error.status not in (404, 409, 410):
                raise
            # The lease went on or ended meanwhile; its events say which.
            self.log.info("The payload of %s is not needed any more: %s", lease_id, error)

    async def _patiently(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat a call while the allocator does not answer, up to ``allocator_patience``."""
        loop = asyncio.get_running_loop()
        give_up: float | None = None
        pause_s = 0.25
        while True:
            try:
                return await call()
            except AllocatorUnreachable as error:
                # Counted from the first silence: a call may wait long for an answer by design.
                give_up = give_up or loop.time() + self.allocator_patience
                if loop.time() + pause_s > give_up:
                    raise
                self.log.warning("%s; asking again", error)
                self._story.add("The GPU pool does not answer; asking again")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 5.0)

    def _payload(self) -> BootPayload:
        env = {key: str(value) for key, value in self.get_env().items() if value is not None}
        try:
            return BootPayload(
                argv=[*self.cmd, *self.get_args()],
                env=env,
                files=dict(self._cert_files),
                port=self.port,
                user=self.guest_user,
                uid=self.guest_uid,
                sudo=self.guest_sudo,
            )
        except ValidationError as error:
            # The error's own text holds values, and one of them is the token.
            key, text = first_error(error)
            raise GPUSpawnError(
                reason="payload", log_message=f"boot payload: {key}: {text}"
            ) from None

    def _too_late(self) -> GPUSpawnError:
        minutes = self.start_budget / 60
        allowed = f"{minutes:.0f} minutes" if minutes >= 2 else f"{self.start_budget:.0f} seconds"
        doing = self._story.last_line.rstrip(".")
        return GPUSpawnError(
            f"The server was not ready within {allowed}."
            + (f" The last thing that happened was: {doing}." if doing else ""),
            reason="boot-timeout",
        )

    def _check_hub_url(self) -> None:
        url = self.hub_connect_url or self.hub.api_url
        problem = hub_url_problem(url)
        if problem:
            raise GPUSpawnError(
                f"Virtual machines could not reach this hub. {problem}", reason="hub-url"
            )

    async def _undo_start(self) -> None:
        """Release what this start may have got. The work outlives whatever happens to the caller;
        it is waited for only so long that a quick retry finds the place free."""
        body = ReleaseLease(username=self.user.name, server_name=self.name, start_id=self._start_id)
        task = asyncio.create_task(self._release(body))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        await asyncio.wait([task], timeout=_RELEASE_WAIT_S)

    async def _release(self, body: ReleaseLease) -> None:
        pause_s = 0.5
        try:
            async with asyncio.timeout(_RELEASE_LIMIT_S):
                while True:
                    try:
                        await self._client().release(body)
                        return
                    except AllocatorUnreachable:
                        await asyncio.sleep(pause_s)
                        pause_s = min(pause_s * 2, 15.0)
        except Exception:
            self.log.exception(
                "The failed start of %s could not be released. The allocator ends its lease by "
                "itself once this hub tells it that there is no such server.",
                self._log_name,
            )

    # -- telling -------------------------------------------------------------------------------

    def emit(self, message: str, percent: int | None = None) -> None:
        """Add a line to the page that a user sees while her server starts. For hooks."""
        self._story.add(message, percent)

    async def progress(self) -> AsyncGenerator[ProgressEvent, None]:
        """What happens during the start; the same for every listener, from the beginning."""
        while True:
            story = self._story
            async with aclosing(story.replay()) as events:
                async for event in events:
                    yield event
            # A listener that came before JupyterHub cleared the state of the time before.
            if story is self._story or not self._spawn_pending:
                return

    # -- running -------------------------------------------------------------------------------

    async def poll(self) -> int | None:
        """None while the server starts, runs or is being stopped; else an exit status.

        Never raises. An allocator that does not answer says nothing about a known lease: taking
        its server for stopped would make JupyterHub forget a machine that runs.
        """
        if self._starting:
            return None
        try:
            lease = await self._look()
        except Exception as error:
            if not self._silence_logged:
                self._silence_logged = True
                self.log.warning("Cannot ask for the server of %s: %s", self._log_name, error)
            return None if self._lease_id else 0
        self._silence_logged = False
        if lease is None:
            return 0
        if lease.state != "ended":
            return None
        return 0 if lease.reason == "released" else 1

    async def _look(self) -> Lease | None:
        """The lease of this server; None if there is none."""
        if self._lease_id:
            try:
                return await self._client().lease(self._lease_id)
            except AllocatorError as error:
                if error.status == 404:
                    return None
                raise
        if not self._start_id and not self._may_adopt:
            return None
        for lease in await self._client().leases(self.user.name, self.name):
            if self._start_id and lease.start_id == self._start_id:
                self._lease_id = lease.id
                return lease
            if self._may_adopt and lease.state == "running":
                self.log.warning("Taking over the running lease %s of %s", lease.id, self._log_name)
                self._lease_id, self._start_id = lease.id, lease.start_id
                self._url = self._url_of(lease)
                return lease
        return None

    async def get_url(self) -> str:
        """Where the server is, as the allocator knows it; asked after a restart of the hub."""
        try:
            lease = await self._look()
            if lease is not None and lease.state == "running":
                self._url = self._url_of(lease)
        except (AllocatorProblem, ConfigError, GPUSpawnError) as error:
            self.log.warning("Cannot ask where the server of %s is: %s", self._log_name, error)
        if self._url:
            return self._url
        url: str = await super().get_url()
        return url

    def _url_of(self, lease: Lease) -> str:
        if not lease.address or not lease.port:
            raise GPUSpawnError(
                reason="bad-answer", log_message=f"lease {lease.id} runs, but has no address"
            )
        host = f"[{lease.address}]" if ":" in lease.address else lease.address
        return f"{'https' if self.internal_ssl else 'http'}://{host}:{lease.port}"

    # -- stopping ------------------------------------------------------------------------------

    async def stop(self, now: bool = False) -> None:
        """End the lease and wait until its machine is gone, at most ``stop_timeout``. Never
        raises: JupyterHub would forget the server all the same, and say nothing."""
        try:
            async with asyncio.timeout(self.stop_timeout):
                await self._stop()
        except Exception as error:
            self.log.error(
                "The server of %s may still be stopping (lease %s): %s. The allocator goes on "
                "ending it.",
                self._log_name,
                self._lease_id or "not known",
                error if str(error) else f"not gone after {self.stop_timeout} s",
                exc_info=not isinstance(error, AllocatorProblem | TimeoutError),
            )

    async def _stop(self) -> None:
        if not self._lease_id:
            if not self._start_id:
                return
            body = ReleaseLease(
                username=self.user.name, server_name=self.name, start_id=self._start_id
            )
            lease = await self._patiently(lambda: self._client().release(body))
            if lease is None:
                return
            self._lease_id = lease.id
        lease_id = self._lease_id
        pause_s = 0.25
        while True:
            try:
                lease = await self._patiently(
                    lambda: self._client().stop(lease_id, wait_s=float(self.stop_timeout))
                )
            except AllocatorError as error:
                if error.status == 404:
                    return
                raise
            if lease.state == "ended":
                return
            # The allocator's own limit came first.
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 5.0)

    async def delete_forever(self) -> None:
        """The server, or its user, is deleted: its home goes to the trash."""
        try:
            await self._patiently(lambda: self._client().forget_home(self.user.name, self.name))
        except Exception:
            # JupyterHub deletes the server whatever happens here.
            self.log.exception(
                "The home of the deleted server %s is still in its place. It can be put into the "
                "trash later by asking the allocator again (POST api/v1/homes/forget).",
                self._log_name,
            )

    async def rename(self, old_name: str, new_name: str) -> None:
        """Refused: the home is found by the server's name."""
        raise GPUSpawnError(reason="rename")

    # -- the rest ------------------------------------------------------------------------------

    async def move_certs(self, paths: Mapping[str, str]) -> dict[str, str]:
        """internal_ssl: the certificates travel with the boot payload. The guest's address is not
        known when they are made, so ``ssl_alt_names`` has to list the range of the guests."""
        moved = {}
        for key, path in paths.items():
            name = f"{GUEST_CERTS}/{key.removesuffix('file')}.pem"
            self._cert_files[name] = await asyncio.to_thread(Path(path).read_text)
            moved[key] = name
        return moved
