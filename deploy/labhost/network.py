"""The lab host's two cables: one for its shell and libvirt, one for its guests.

Both are taps of the network namespace that the lab is started in, with private addresses of their
own. Nothing is routed, translated or bridged to any other network of this machine.
"""

from __future__ import annotations

import ipaddress
import subprocess
from dataclasses import dataclass

from deploy.labhost.machine import Card
from deploy.stack.say import Problem

BRIDGE = "br0"  # inside


@dataclass(frozen=True)
class Networks:
    """The two ranges. In each the first address is this machine's.

    :ivar admin: the host itself has its second address.
    :ivar guests: a bridge inside, where only guests have addresses.
    """

    admin: str = "10.238.0.0/28"
    guests: str = "10.239.0.0/24"

    @property
    def host(self) -> str:
        """The lab host's address."""
        return str(ipaddress.ip_network(self.admin)[2])

    @property
    def gateway(self) -> str:
        """This machine as the guests see it: where their hub must listen."""
        return str(ipaddress.ip_network(self.guests)[1])

    def host_with_prefix(self) -> str:
        """The lab host's address, as its network card is given it."""
        return f"{self.host}/{ipaddress.ip_network(self.admin).prefixlen}"


ADMIN = Card("gslab-admin", "52:54:00:6c:61:01")
GUESTS = Card("gslab-guests", "52:54:00:6c:61:02")


def connect(networks: Networks) -> None:
    """Make the taps; what an earlier lab has left is replaced.

    :raises Problem: when the kernel refuses.
    """
    disconnect()
    for card, cidr in ((ADMIN, networks.admin), (GUESTS, networks.guests)):
        network = ipaddress.ip_network(cidr)
        _ip("tuntap", "add", "dev", card.tap, "mode", "tap")
        # No IPv6: the machine would answer there too.
        _ip("link", "set", "dev", card.tap, "addrgenmode", "none")
        _ip("addr", "add", f"{network[1]}/{network.prefixlen}", "dev", card.tap)
        _ip("link", "set", "dev", card.tap, "up")


def disconnect() -> None:
    """Take the taps away, if they are there."""
    for card in (ADMIN, GUESTS):
        subprocess.run(["ip", "link", "del", "dev", card.tap], capture_output=True, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Problem(
            f"'ip {' '.join(words)}' failed: {done.stderr.strip()}.",
            "The lab's network cards need CAP_NET_ADMIN and /dev/net/tun.",
        )
