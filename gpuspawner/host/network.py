"""The guests' network on a host, and the filter that every guest's card passes.

``nat``: a libvirt network of our own, for a host that is the hub's machine. ``bridge``: one that
the admin made. Addresses are given in the seed; there is no DHCP. The filter assumes root in the
guest, and so sits on the host's side of the card.
"""

from __future__ import annotations

import hashlib
import ipaddress
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import libvirt

from gpuspawner.host.devices import el

_NAMESPACE = uuid.UUID("0d6a6a7e-52f4-4a57-8a0a-3b0f5e0c1d64")


@dataclass(frozen=True, slots=True)
class GuestNetwork:
    """One host's guest network.

    ``cidr`` is the guests' range, whose first address is the gateway unless ``gateway`` names it.
    ``bridge`` names an existing bridge; without it there is a NAT network. ``hub_address`` is the
    hub API as guests reach it. ``blocked`` are further networks that no guest may reach: other
    addresses of the host, the allocator, the machines' own LAN.
    """

    instance: str
    host: str
    cidr: str
    bridge: str | None = None
    gateway: str | None = None
    hub_address: tuple[str, int] | None = None
    blocked: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the libvirt network and of the filter: ``gs-<instance>-<host>``."""
        return f"gs-{self.instance}-{self.host}"

    @property
    def bridge_name(self) -> str:
        """Name of the bridge: an interface's name has 15 characters at most, so a hash of the
        network's, behind ``gs``."""
        return self.bridge or "gs" + hashlib.sha256(self.name.encode()).hexdigest()[:10]

    @property
    def gateway_address(self) -> str:
        """The host's (or router's) address on this network, without prefix."""
        if self.gateway is not None:
            return str(ipaddress.ip_address(self.gateway))
        return str(ipaddress.ip_network(self.cidr)[1])

    @property
    def libvirt_network(self) -> str | None:
        """The libvirt network for a guest's card, ``None`` in bridge mode."""
        return None if self.bridge else self.name

    def network_xml(self) -> str:
        """A routed network with NAT and a DNS forwarder at the gateway, without DHCP."""
        network = ipaddress.ip_network(self.cidr)
        address = el(
            "ip",
            family="ipv6" if network.version == 6 else "ipv4",
            address=self.gateway_address,
            prefix=str(network.prefixlen),
        )
        root = el(
            "network",
            el("name", text=self.name),
            el("uuid", text=str(uuid.uuid5(_NAMESPACE, self.name))),
            el("forward", mode="nat"),
            # No spanning tree: there is no loop, and a port would wait 30 s before it forwards.
            el("bridge", name=self.bridge_name, stp="off", delay="0"),
            address,
        )
        return ET.tostring(root, encoding="unicode")

    def filter_xml(self) -> str:
        """clean-traffic (no foreign MAC, address or ARP), then, in order: the hub's API, DNS at
        the gateway, answers to connections from outside; nothing else to the gateway, the hub's
        machine, other guests or ``blocked``; the rest of the world."""
        gateway = self.gateway_address
        version = ipaddress.ip_network(self.cidr).version
        root = el("filter", name=self.name, chain="root")
        root.append(el("uuid", text=str(uuid.uuid5(_NAMESPACE, "filter " + self.name))))
        root.append(el("filterref", filter="clean-traffic"))
        if self.hub_address is not None:
            address, port = self.hub_address
            root.append(_rule("accept", 100, "tcp", dstipaddr=address, dstportstart=str(port)))
        # The seed names the gateway as the name server, whoever keeps it.
        root.append(_rule("accept", 110, "udp", dstipaddr=gateway, dstportstart="53"))
        root.append(_rule("accept", 110, "tcp", dstipaddr=gateway, dstportstart="53"))
        for network in self._closed():
            # Only what the guest begins: the proxy's connections to it must get their answers.
            root.append(
                _rule(
                    "drop",
                    500,
                    "all",
                    state="NEW,INVALID",
                    dstipaddr=str(network.network_address),
                    dstipmask=str(network.prefixlen),
                )
            )
        if version == 4:
            # Addresses are IPv4 and static; IPv6 would go round every rule above.
            root.append(_rule("drop", 400, "ipv6"))
        return ET.tostring(root, encoding="unicode")

    def _closed(self) -> Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]:
        nets = {ipaddress.ip_network(text, strict=False) for text in self.blocked}
        nets.add(ipaddress.ip_network(self.gateway_address))
        # The isolated port stops what goes straight to another guest; this stops what a guest
        # sends there by way of the gateway.
        nets.add(ipaddress.ip_network(self.cidr, strict=False))
        if self.hub_address is not None:
            nets.add(ipaddress.ip_network(self.hub_address[0]))
        return sorted(nets, key=str)

    def ensure(self, connection: Any) -> None:
        """Network and filter, as described here; safe at every start. Guests keep running: a
        filter that changes is put on their cards by libvirt, a network that runs is left."""
        connection.nwfilterDefineXML(self.filter_xml())
        if self.bridge is not None:
            return
        try:
            network = connection.networkLookupByName(self.name)
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_NETWORK:
                raise
            network = connection.networkDefineXML(self.network_xml())
        if not network.isActive():
            connection.networkDefineXML(self.network_xml())  # what has changed since
            network.create()
        network.setAutostart(1)

    def remove(self, connection: Any) -> None:
        """Take network and filter away; no guest may be using them."""
        try:
            network = connection.networkLookupByName(self.name)
            if network.isActive():
                network.destroy()
            network.undefine()
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_NETWORK:
                raise
        try:
            connection.nwfilterLookupByName(self.name).undefine()
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_NWFILTER:
                raise


def _rule(action: str, priority: int, protocol: str, **attributes: str) -> ET.Element:
    """A rule on what the guest sends (``out`` is out of the guest). Lower priority first."""
    return el(
        "rule",
        el(protocol, **attributes),
        action=action,
        direction="out",
        priority=str(priority),
    )
