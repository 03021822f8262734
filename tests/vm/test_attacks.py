"""Root in a guest attacks: the other guests, the host, the allocator, libvirt, the hub's API.

Every attempt has a name. What it is aimed at is shown to be there, from where it may be reached.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.layers import wait_for_async
from tests.vm.attack import (
    BROADCAST,
    arp_reply,
    ethernet,
    hear,
    heard_on,
    listeners,
    mark,
    reachable,
    requests,
    send,
    send_from_host,
    udp,
    udp6,
)
from tests.vm.daemon import Daemon
from tests.vm.hub import TINY, HubSite
from tests.vm.pool import GATEWAY, Server, declaration

NO_GPU = "nodes:\n  - {id: 0, cores: 6, memory_mib: 8192, reserve_mib: 512}\n"
OTHER_ADDRESS = "198.51.100.9"  # of the host's, on another network than the guests'
HUB = (GATEWAY, 8081)
IPV4, ARP, IPV6, VLAN, UNKNOWN = 0x0800, 0x0806, 0x86DD, 0x8100, 0x88B5


@pytest.fixture
async def site(site_folder: Path, images_dir: Path, libvirtd: Daemon) -> AsyncIterator[HubSite]:
    """A whole installation; two users may each have a tiny guest without a GPU."""
    run("ip", "addr", "replace", f"{OTHER_ADDRESS}/32", "dev", "lo")
    profile = {**TINY, "spawner_override": {**TINY["spawner_override"], "gpus": 0}}
    site = HubSite(site_folder / "site", profile)
    site.use_image(images_dir / "tiny")
    site.use_image(images_dir / "service")
    try:
        await asyncio.to_thread(site.start)
        await site.add_host(declaration(NO_GPU))
        site.start_proxy()

        async def has_image() -> bool:
            images = await site.client.images()
            return any(image.name == "tiny" and image.hosts for image in images)

        await wait_for_async(has_image, 90, "the host to have the image", 0.3)
        await site.start_hub()
        yield site
    finally:
        await site.remove()
        run("ip", "addr", "del", f"{OTHER_ADDRESS}/32", "dev", "lo")
        print(site.log.read_text()[-6000:])


def run(*command: str) -> str:
    """An admin's command on the host."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def bridge_of(site: HubSite) -> str:
    """The bridge of the guests' network."""
    told = site.virsh("net-info", f"gs-{site.instance}-emu1")
    return next(line.split()[1] for line in told.splitlines() if line.startswith("Bridge:"))


def link_local(bridge: str) -> str:
    """The host's IPv6 address on the bridge; libvirt has switched IPv6 off there."""
    Path(f"/proc/sys/net/ipv6/conf/{bridge}/disable_ipv6").write_text("0")
    address = "fe80::ace"
    run("ip", "-6", "addr", "add", f"{address}/64", "dev", bridge, "nodad")
    return address


def mac_of_bridge(bridge: str) -> str:
    """The host's own MAC there."""
    return Path(f"/sys/class/net/{bridge}/address").read_text().strip()


def mac_of(site: HubSite, server: Server) -> str:
    """A guest's MAC."""
    told = site.virsh("domiflist", site.domain(server.lease.id))
    return told.split()[-1]


async def test_root_in_a_guest_reaches_the_hubs_api_and_nothing_else(site: HubSite) -> None:
    tokens = dict(zip(("ada", "bob"), await asyncio.gather(
        site.start_lab("ada"), site.start_lab("bob")), strict=True))  # fmt: skip
    ada, bob = [Server(site, (await site.client.leases(user, ""))[0]) for user in tokens]
    await connections(site, ada, bob)
    await frames(site, ada, bob)
    await hub_api(site, ada, tokens["ada"])


async def connections(site: HubSite, ada: Server, bob: Server) -> None:
    """TCP, straight and by detours."""
    bridge = bridge_of(site)
    local = link_local(bridge)
    listening = {
        "ssh": (GATEWAY, 22),
        "the proxy": (GATEWAY, 8000),
        "the proxy's API": (GATEWAY, 8001),
        "the allocator": (GATEWAY, 8091),
        "libvirt": (GATEWAY, 16509),
        "libvirt with TLS": (GATEWAY, 16514),
        "a migration": (GATEWAY, 49152),
        "ssh on another address": (OTHER_ADDRESS, 22),
        "the hub's port on another address": (OTHER_ADDRESS, 8081),
        "the allocator on another address": (OTHER_ADDRESS, 8091),
    }
    other_guest = {"the other guest": (bob.lease.address or "", 8888)}
    with listeners([*listening.values(), (f"{local}%{bridge}", 22)]):
        for name, place in {**listening, **other_guest}.items():
            assert await reachable(*place), f"{name}: nothing is there to be attacked"
        assert await reachable(f"{local}%{bridge}", 22)
        attempts = {**listening, **other_guest, "IPv6 link-local": (f"{local}%eth0", 22)}
        assert await attempt(ada, {"the hub": HUB}) == {"the hub"}
        assert await attempt(ada, attempts) == set()
    # Both are root and agree on a way round: by the gateway.
    for one, other in ((ada, bob), (bob, ada)):
        route = f"ip route replace {other.lease.address}/32 via {GATEWAY} dev eth0"
        assert json.loads(await one.ask("exec", route.encode()))["rc"] == 0
    assert await attempt(ada, other_guest) == set(), "by way of the gateway"


async def attempt(server: Server, targets: dict[str, tuple[str, int]]) -> set[str]:
    """Those that a guest can connect to."""

    async def one(host: str, port: int) -> bool:
        told = json.loads(await server.ask("connect", host=host, port=port, timeout=4))
        return bool(told["connected"])

    answers = await asyncio.gather(*(one(*place) for place in targets.values()))
    return {name for name, connected in zip(targets, answers, strict=True) if connected}


async def frames(site: HubSite, ada: Server, bob: Server) -> None:
    """Frames that no honest machine would send, and those that are meant for other guests."""
    bridge = bridge_of(site)
    ada_ip, bob_ip = str(ada.lease.address), str(bob.lease.address)
    ada_mac, bob_mac = mac_of(site, ada), mac_of(site, bob)
    host_mac = mac_of_bridge(bridge)
    everybody = "10.231.0.255"

    def ip(name: str, src_mac: str, src: str, dst: str = everybody) -> bytes:
        return ethernet(src_mac, BROADCAST, IPV4, udp(name, src, dst))

    # Never leave her card.
    forged = {
        "another's address": lambda n: ip(n, ada_mac, bob_ip),
        "another's MAC": lambda n: ip(n, bob_mac, ada_ip),
        "another's MAC and address": lambda n: ip(n, bob_mac, bob_ip),
        "the gateway's address": lambda n: ip(n, ada_mac, GATEWAY),
        "the gateway's MAC": lambda n: ip(n, host_mac, ada_ip),
        "an address from outside": lambda n: ip(n, ada_mac, "192.0.2.1"),
        "ARP, I am the gateway": lambda n: ethernet(
            ada_mac, BROADCAST, ARP, arp_reply(n, ada_mac, GATEWAY, (bob_mac, bob_ip))
        ),
        "ARP, I am the other guest": lambda n: ethernet(
            ada_mac, host_mac, ARP, arp_reply(n, ada_mac, bob_ip, (host_mac, GATEWAY))
        ),
        "ARP with another's MAC": lambda n: ethernet(
            ada_mac, BROADCAST, ARP, arp_reply(n, bob_mac, ada_ip, (host_mac, GATEWAY))
        ),
        "IPv6 to all nodes": lambda n: ethernet(ada_mac, "33:33:00:00:00:01", IPV6, udp6(n)),
        "IPv6 to the host": lambda n: ethernet(ada_mac, host_mac, IPV6, udp6(n)),
        "a VLAN": lambda n: ethernet(
            ada_mac, BROADCAST, VLAN, b"\x00\x01\x08\x00" + udp(n, ada_ip, everybody)
        ),
        "an unknown protocol": lambda n: ethernet(ada_mac, BROADCAST, UNKNOWN, mark(n)),
    }
    # May reach the host, which does not listen, and never the other guest.
    honest = {
        "a broadcast": lambda n: ip(n, ada_mac, ada_ip),
        "a DHCP offer": lambda n: ethernet(
            ada_mac, BROADCAST, IPV4, udp(n, ada_ip, "255.255.255.255", (67, 68))
        ),
        "a multicast": lambda n: ethernet(
            ada_mac, "01:00:5e:00:00:fb", IPV4, udp(n, ada_ip, "224.0.0.251", (5353, 5353))
        ),
        "straight to the other guest": lambda n: ethernet(
            ada_mac, bob_mac, IPV4, udp(n, ada_ip, bob_ip)
        ),
    }
    before = neighbour(bridge, bob_ip)
    stop = "the host to everybody"
    with heard_on(bridge) as heard:
        hearing = asyncio.create_task(hear(bob, stop))

        async def listens() -> bool:
            told = json.loads(await bob.ask("exec", b"cat /proc/net/packet"))
            return len(told["output"].splitlines()) > 1  # below the heading

        await wait_for_async(listens, 30, "the other guest to listen")
        await send(ada, [make(name) for name, make in (forged | honest).items()])
        # After all of them one more from her, which shows that they are through.
        await send(ada, [ip("the last", ada_mac, ada_ip)])
        await wait_for_async(lambda: "the last" in heard, 30, "her last frame at the host")
        send_from_host(bridge, ethernet(host_mac, BROADCAST, IPV4, udp(stop, GATEWAY, everybody)))
        reached_bob = await hearing
    assert {"a broadcast", "the last"} <= heard, "the host would have heard the others too"
    assert not heard & set(forged), heard & set(forged)
    assert reached_bob & {stop, *forged, *honest} == {stop}, reached_bob
    assert neighbour(bridge, bob_ip) == before == bob_mac


def neighbour(bridge: str, address: str) -> str:
    """The MAC that the host sends to for an address."""
    told = run("ip", "neigh", "show", address, "dev", bridge).split()
    return told[told.index("lladdr") + 1]


async def hub_api(site: HubSite, ada: Server, token: str) -> None:
    """The one open door, with all that ada's own token can do; a server's can do less."""
    controls = {"the API": ("GET", "/hub/api/"), "who am I": ("GET", "/hub/api/user")}
    attempts = {
        "all users": ("GET", "/hub/api/users"),
        "the other user": ("GET", "/hub/api/users/bob"),
        "a token of the other's": ("POST", "/hub/api/users/bob/tokens"),
        "the other's server": ("POST", "/hub/api/users/bob/servers/second"),
        "the other's server's end": ("DELETE", "/hub/api/users/bob/server"),
        "a new user": ("POST", "/hub/api/users/eve"),
        "the proxy's routes": ("GET", "/hub/api/proxy"),
        "the services": ("GET", "/hub/api/services"),
        "the hub's end": ("POST", "/hub/api/shutdown"),
        "the hub's metrics": ("GET", "/hub/metrics"),
        # What is no page of the hub's it sends to itself, below /hub/: there is nothing either.
        "the allocator behind the hub's port": ("GET", "/hub/services/gpu/"),
        "its API": ("GET", "/hub/services/gpu/api/v1/leases"),
        "its API without the hub": ("GET", "/services/gpu/api/v1/leases"),
        "the other guest behind the hub's port": ("GET", "/user/bob/test/env"),
    }
    answers = await requests(ada, HUB, token, controls | attempts)
    for name in controls:
        assert answers[name][0] == 200, answers[name]
    assert '"name": "ada"' in answers["who am I"][1]
    opened = {name: answers[name] for name in attempts if not refused(*answers[name])}
    assert not opened
    assert (await site.client.leases("bob", ""))[0].state == "running"


def refused(status: int, answer: str) -> bool:
    """Nothing was done and nothing told: not allowed, not there, or sent to the hub's own pages."""
    return status in (403, 404) or (status == 302 and "\nLocation: /hub/" in answer)
