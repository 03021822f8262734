"""The seed: a NoCloud disk with what one VM must know at boot.

Pure: from a ``SeedSpec`` to the bytes of an ISO 9660 image (Joliet and Rock Ridge, label
``cidata``), as cloud-init's NoCloud source finds it. It carries secrets, so it is built in memory
and never touches the allocator's disk.
"""

from __future__ import annotations

import io
import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pycdlib

LABEL = "cidata"
MAX_PAYLOAD_BYTES = 4 * 1024 * 1024  # far above any environment; far below the guest's tmpfs


@dataclass(frozen=True, slots=True)
class SeedNetwork:
    """The guest's one address: ``address`` with prefix length, the rest without."""

    mac: str
    address: str
    gateway: str
    dns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SeedUser:
    """The account that JupyterLab runs as."""

    name: str = "jovyan"
    uid: int = 1000
    sudo: bool = True


@dataclass(frozen=True, slots=True)
class SeedServer:
    """What to start: ``files`` maps absolute paths in the guest to their content."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    port: int = 8888


@dataclass(frozen=True, slots=True)
class SeedSpec:
    """All that a seed says. ``home_new`` allows the guest to format the home volume if it finds
    nothing on it; ``None`` means that there is no home. ``user_data`` is cloud-init's, for images
    that are not ours."""

    lease_id: str
    hostname: str
    network: SeedNetwork | None = None
    home_new: bool | None = None
    user: SeedUser = field(default_factory=SeedUser)
    server: SeedServer | None = None
    user_data: str = "#cloud-config\n{}\n"


def build_seed(spec: SeedSpec) -> bytes:
    """The ISO image. Raises ``ValueError`` if the payload is larger than 4 MiB."""
    files = {
        "meta-data": _yaml({"instance-id": spec.lease_id, "local-hostname": spec.hostname}),
        "network-config": _yaml(network_config(spec.network)),
        "user-data": spec.user_data.encode(),
        "gpuspawner.json": json.dumps(payload(spec), ensure_ascii=True, sort_keys=True).encode(),
    }
    total = sum(len(content) for content in files.values())
    if total > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"The boot data of lease {spec.lease_id} has {total} bytes, more than "
            f"{MAX_PAYLOAD_BYTES}. Make the server's environment smaller."
        )
    return _iso(files)


def payload(spec: SeedSpec) -> dict[str, Any]:
    """The content of ``gpuspawner.json``, version 1."""
    content: dict[str, Any] = {
        "v": 1,
        "lease_id": spec.lease_id,
        "hostname": spec.hostname,
        "user": {"name": spec.user.name, "uid": spec.user.uid, "sudo": spec.user.sudo},
    }
    if spec.network is not None:
        content["network"] = {
            "mac": spec.network.mac,
            "address": spec.network.address,
            "gateway": spec.network.gateway,
            "dns": list(spec.network.dns),
        }
    if spec.home_new is not None:
        content["home"] = {"serial": "home", "new": spec.home_new}
    if spec.server is not None:
        content["server"] = {
            "argv": list(spec.server.argv),
            "env": dict(spec.server.env),
            "files": dict(spec.server.files),
            "port": spec.server.port,
        }
    return content


def network_config(network: SeedNetwork | None) -> dict[str, Any]:
    """Netplan version 2, the card matched by MAC: its name in the guest is not known here."""
    if network is None:
        return {"version": 2, "ethernets": {}}
    address = ipaddress.ip_interface(network.address)
    route = "::/0" if address.version == 6 else "0.0.0.0/0"
    ethernet: dict[str, Any] = {
        "match": {"macaddress": network.mac.lower()},
        "dhcp4": False,
        "dhcp6": False,
        "addresses": [str(address)],
        "routes": [{"to": route, "via": network.gateway}],
    }
    if network.dns:
        ethernet["nameservers"] = {"addresses": list(network.dns)}
    return {"version": 2, "ethernets": {"lab0": ethernet}}


def _yaml(content: Mapping[str, Any]) -> bytes:
    # JSON is YAML, and there is only one way to quote in it.
    return (json.dumps(content, ensure_ascii=True, sort_keys=True) + "\n").encode()


def _iso(files: Mapping[str, bytes]) -> bytes:
    iso = pycdlib.PyCdlib()
    iso.new(interchange_level=3, joliet=3, rock_ridge="1.09", vol_ident=LABEL)
    try:
        for number, (name, content) in enumerate(sorted(files.items())):
            # The plain ISO 9660 name is the one that nobody reads: Rock Ridge and Joliet carry
            # the real one.
            iso.add_fp(
                io.BytesIO(content),
                len(content),
                iso_path=f"/SEED{number}.;1",
                rr_name=name,
                joliet_path=f"/{name}",
            )
        out = io.BytesIO()
        iso.write_fp(out)
        return out.getvalue()
    finally:
        iso.close()
