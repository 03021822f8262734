"""What makes a lab host this one: its keys and addresses, as a tar that it lays over its root."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass

from deploy.labhost.network import ADMIN, BRIDGE, GUESTS, Networks


@dataclass(frozen=True)
class Keys:
    """Who may log in, and how the host proves who it is (OpenSSH's own formats)."""

    authorized: str
    host_private: str


def seed(networks: Networks, keys: Keys) -> bytes:
    """The tar, a multiple of 512 bytes as a disk must be."""
    files = {
        "root/.ssh/authorized_keys": (keys.authorized, 0o600),
        "etc/ssh/ssh_host_ed25519_key": (keys.host_private, 0o600),
        **{f"etc/systemd/network/{name}": (text, 0o644) for name, text in units(networks).items()},
    }
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        folder = tarfile.TarInfo("root/.ssh")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o700
        tar.addfile(folder)
        for name, (text, mode) in files.items():
            content = text.encode()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def units(networks: Networks) -> Mapping[str, str]:
    """systemd-networkd's files: the host's address, and the guests' bridge, which has none."""
    no_more = "LinkLocalAddressing=no\nIPv6AcceptRA=no\n"
    return {
        "10-admin.network": (
            f"[Match]\nMACAddress={ADMIN.mac}\n\n"
            f"[Network]\nAddress={networks.host_with_prefix()}\n{no_more}"
        ),
        # A port of a bridge without spanning tree would still wait 15 s before it forwards.
        "10-guests.netdev": (
            f"[NetDev]\nName={BRIDGE}\nKind=bridge\n\n[Bridge]\nSTP=no\nForwardDelaySec=0\n"
        ),
        # By driver as well: the bridge takes over the card's MAC.
        "20-guests-card.network": (
            f"[Match]\nMACAddress={GUESTS.mac}\nDriver=virtio_net\n\n"
            f"[Network]\nBridge={BRIDGE}\n{no_more}"
        ),
        "30-guests-bridge.network": f"[Match]\nName={BRIDGE}\n\n[Network]\n{no_more}",
    }
