"""A guest's virtio-serial port, both ways, over the libvirt connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import libvirt

from gpuspawner.host import guests
from gpuspawner.host.api import HostError
from gpuspawner.host.connection import Connection

# A hostile guest may write for ever; what nobody has read yet is kept in memory up to here.
MAX_BACKLOG_BYTES = 4 * 1024 * 1024
_WOULD_BLOCK = -2
_READ_BYTES = 65536


class StreamChannel:
    """The ``Channel`` of ``api.py`` over a non-blocking libvirt stream. libvirt's event thread
    reads; the asyncio side gets chunks through a queue."""

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._loop = loop
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._backlog = 0
        self._ended = False
        self._stream: Any = None

    def attach(self, connection: Any, uuid: str, port: str) -> None:
        """Open the port. Blocks; run by ``Connection.call``."""
        domain = guests.lookup(connection, uuid)
        if domain is None:
            raise HostError(f"The VM {uuid} is gone.", "")
        stream = connection.newStream(libvirt.VIR_STREAM_NONBLOCK)
        # Force: the reader before us may be an allocator that was killed.
        domain.openChannel(port, stream, libvirt.VIR_DOMAIN_CHANNEL_FORCE)
        self._stream = stream
        events = (
            libvirt.VIR_STREAM_EVENT_READABLE
            | libvirt.VIR_STREAM_EVENT_ERROR
            | libvirt.VIR_STREAM_EVENT_HANGUP
        )
        stream.eventAddCallback(events, self._on_event, None)

    async def read(self) -> AsyncIterator[bytes]:
        """Chunks as they come; ends when the port or the guest is gone, or when the guest has
        written 4 MiB that nobody read."""
        while (chunk := await self._chunks.get()) is not None:
            self._backlog -= len(chunk)
            yield chunk
        self._chunks.put_nowait(None)  # for whoever reads again

    async def write(self, data: bytes) -> None:
        """Send all of it. Raises ``HostError`` if the port is gone or not read for 10 s."""
        view = memoryview(data)
        while view:
            send = partial(self._send, bytes(view[:_READ_BYTES]))
            sent = await self._connection.call(send, "writing to a guest's port")
            if sent == 0:
                await asyncio.sleep(0.05)  # the port is full
            view = view[sent:]

    async def close(self) -> None:
        """Let go of the port; again is fine."""
        if self._stream is None:
            return
        stream, self._stream = self._stream, None
        with contextlib.suppress(HostError):
            await self._connection.call(lambda _connection: _let_go(stream), "closing a port")
        self._put(None)

    def _send(self, part: bytes, _connection: Any) -> int:
        if self._stream is None or self._ended:
            raise HostError("The guest's port is closed.", "")
        sent = self._stream.send(part)
        return 0 if sent == _WOULD_BLOCK else int(sent)

    def _on_event(self, stream: Any, _events: int, _opaque: Any) -> None:
        """On libvirt's event thread: take all there is."""
        while not self._ended:
            try:
                chunk = stream.recv(_READ_BYTES)
            except libvirt.libvirtError:
                chunk = b""
            if chunk == _WOULD_BLOCK:
                return
            if not chunk or self._backlog > MAX_BACKLOG_BYTES:
                self._ended = True
                _let_go(stream)
                self._tell(None)
                return
            self._tell(chunk)

    def _tell(self, chunk: bytes | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._put, chunk)

    def _put(self, chunk: bytes | None) -> None:
        self._backlog += len(chunk or b"")
        self._chunks.put_nowait(chunk)


def _let_go(stream: Any) -> None:
    for step in (stream.eventRemoveCallback, stream.abort):
        with contextlib.suppress(libvirt.libvirtError):
            step()
