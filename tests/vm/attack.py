"""What somebody who is root in a guest can send, and how it is seen whether it arrived."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from tests.vm.pool import Server

MARK = re.compile(rb"attempt<([^>]*)>")
BROADCAST = "ff:ff:ff:ff:ff:ff"
ETH_P_ALL = 3

# Both run in the guest, by its own Python.
_SEND = """
import socket
out = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
out.bind(("eth0", 0))
for frame in FRAMES:
    out.send(bytes.fromhex(frame))
"""
_HEAR = """
import json, re, socket, time
ear = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
ear.bind(("eth0", 3))
ear.settimeout(0.2)
end, heard = time.monotonic() + SECONDS, set()
while time.monotonic() < end and STOP not in heard:
    try:
        found = re.findall(b"attempt<([^>]*)>", ear.recv(4096))
    except TimeoutError:
        continue
    heard.update(each.decode(errors="replace") for each in found)
print(json.dumps(sorted(heard)))
"""
_HTTP = """
import json, socket
answers = {}
for name, text in REQUESTS.items():
    with socket.create_connection(TARGET, timeout=20) as line:
        line.sendall(text.encode())
        answer = b""
        while chunk := line.recv(65536):
            answer += chunk
    answers[name] = answer.decode(errors="replace")
print(json.dumps(answers))
"""


async def run_python(server: Server, script: str, timeout: int = 60, **values: Any) -> str:
    """Run a script in the guest; ``values`` are its constants. What it printed."""
    head = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    body = f"python3 - <<'END'\n{head}{script}END\n".encode()
    done = json.loads(await server.ask("exec", body, timeout=timeout))
    assert done["rc"] == 0, done["output"]
    return str(done["output"])


async def send(server: Server, frames: Iterable[bytes]) -> None:
    """Put frames on the guest's wire, whatever is in them."""
    await run_python(server, _SEND, FRAMES=[frame.hex() for frame in frames])


async def hear(server: Server, stop: str, seconds: int = 40) -> set[str]:
    """The attempts that reach a guest's card, up to the one named ``stop``."""
    told = await run_python(server, _HEAR, seconds + 15, SECONDS=seconds, STOP=stop)
    return set(json.loads(told))


async def requests(
    server: Server, target: tuple[str, int], token: str, wanted: dict[str, tuple[str, str]]
) -> dict[str, tuple[int, str]]:
    """HTTP from inside a guest, with a token: name to (method, path); status and body of each."""
    texts = {
        name: f"{method} {path} HTTP/1.0\r\nHost: {target[0]}\r\nAuthorization: Bearer {token}\r\n"
        "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        for name, (method, path) in wanted.items()
    }
    told = json.loads(await run_python(server, _HTTP, REQUESTS=texts, TARGET=target))
    return {name: (int(text.split(" ", 2)[1]), text) for name, text in told.items()}


# -- frames ---------------------------------------------------------------------------------------


def mark(name: str) -> bytes:
    """What an attempt is recognized by."""
    return f"attempt<{name}>".encode()


def ethernet(src: str, dst: str, kind: int, payload: bytes) -> bytes:
    """A frame."""
    head = bytes.fromhex(dst.replace(":", "")) + bytes.fromhex(src.replace(":", ""))
    return head + struct.pack("!H", kind) + payload.ljust(46, b"\0")


def udp(name: str, src: str, dst: str, ports: tuple[int, int] = (4000, 4001)) -> bytes:
    """An IPv4 packet with one datagram."""
    data = mark(name)
    body = struct.pack("!HHHH", *ports, 8 + len(data), 0) + data
    addresses = socket.inet_aton(src) + socket.inet_aton(dst)
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 1, 0, 64, 17, 0) + addresses
    total = sum(struct.unpack("!10H", head))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return head[:10] + struct.pack("!H", ~total & 0xFFFF) + head[12:] + body


def udp6(name: str) -> bytes:
    """An IPv6 packet to all nodes of the link."""
    data = mark(name)
    body = struct.pack("!HHHH", 4000, 4001, 8 + len(data), 0) + data
    ends = (socket.inet_pton(socket.AF_INET6, text) for text in ("fe80::bad", "ff02::1"))
    return struct.pack("!IHBB", 6 << 28, len(body), 17, 255) + b"".join(ends) + body


def arp_reply(name: str, mac: str, address: str, to: tuple[str, str]) -> bytes:
    """ "``address`` is at ``mac``", behind which the mark stands as padding."""
    sides = b"".join(
        bytes.fromhex(hw.replace(":", "")) + socket.inet_aton(ip) for hw, ip in ((mac, address), to)
    )
    return struct.pack("!HHBBH", 1, 0x0800, 6, 4, 2) + sides + mark(name)


# -- the host's side ------------------------------------------------------------------------------


@contextlib.contextmanager
def heard_on(interface: str) -> Iterator[set[str]]:
    """The attempts that come through to an interface of the host, as they come."""
    heard: set[str] = set()
    done = threading.Event()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as ear:
        ear.bind((interface, ETH_P_ALL))
        ear.settimeout(0.2)

        def listen() -> None:
            while not done.is_set():
                with contextlib.suppress(TimeoutError):
                    frame, sender = ear.recvfrom(65536)
                    if sender[2] != socket.PACKET_OUTGOING:  # type: ignore[attr-defined]
                        heard.update(found.decode() for found in MARK.findall(frame))

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield heard
        finally:
            done.set()
            thread.join()


def send_from_host(interface: str, frame: bytes) -> None:
    """Put a frame on the host's side of the wire."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as out:
        out.bind((interface, 0))
        out.send(frame)


@contextlib.contextmanager
def listeners(places: Iterable[tuple[str, int]]) -> Iterator[None]:
    """Something listens at each of these addresses of the host's (one with ``%`` is IPv6)."""
    with contextlib.ExitStack() as stack:
        for host, port in places:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            server = stack.enter_context(socket.socket(found[0], socket.SOCK_STREAM))
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(found[4])
            server.listen(64)
        yield


async def reachable(host: str, port: int) -> bool:
    """Whether a connection can be made from the host itself."""
    try:
        async with asyncio.timeout(5):
            _reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True
