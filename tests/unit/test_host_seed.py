"""The seed is read back as a guest reads it."""

from __future__ import annotations

import io
import json
from typing import Any

import pycdlib
import pytest
import yaml

from gpuspawner.host.seed import (
    LABEL,
    MAX_PAYLOAD_BYTES,
    SeedNetwork,
    SeedServer,
    SeedSpec,
    build_seed,
)

HOSTILE = "a'b\"c\n$(reboot) `x` \\ \0 \x1b ]]> </x> {{ y }} %s 日本 \ud800"
NETWORK = SeedNetwork("52:54:00:AA:00:01", "10.201.0.10/24", "10.201.0.1", ("10.201.0.1",))


def read_back(image: bytes) -> tuple[str, dict[str, bytes], dict[str, bytes]]:
    """The label, and the files as Rock Ridge and as Joliet name them."""
    iso = pycdlib.PyCdlib()
    iso.open_fp(io.BytesIO(image))
    found: list[dict[str, bytes]] = []
    for kind in ("rr_path", "joliet_path"):
        files = {}
        for child in iso.list_children(**{kind: "/"}):
            if child is None or child.is_dir():
                continue
            if kind == "rr_path":
                name = child.rock_ridge.name().decode()
            else:
                name = child.file_identifier().decode("utf-16-be")
            out = io.BytesIO()
            iso.get_file_from_iso_fp(out, **{kind: f"/{name}"})
            files[name] = out.getvalue()
        found.append(files)
    label = iso.pvd.volume_identifier.decode().strip()
    iso.close()
    return label, found[0], found[1]


def lease(**more: Any) -> SeedSpec:
    server = SeedServer(
        argv=("jupyterhub-singleuser", HOSTILE),
        env={"JUPYTERHUB_API_TOKEN": "secret", "ODD": HOSTILE, HOSTILE: "odd name"},
        files={"/run/gpuspawner/ssl/key.pem": HOSTILE},
    )
    settings: dict[str, Any] = {"network": NETWORK, "home_new": True, "server": server, **more}
    return SeedSpec("11111111-2222-4333-8444-555555555501", "gs-ada", **settings)


def test_label_and_names_are_what_cloud_init_looks_for() -> None:
    label, rock_ridge, joliet = read_back(build_seed(lease()))
    assert label == LABEL == "cidata"
    names = {"meta-data", "network-config", "user-data", "gpuspawner.json"}
    assert set(rock_ridge) == set(joliet) == names
    assert rock_ridge == joliet


def test_hostile_values_survive() -> None:
    _label, files, _joliet = read_back(build_seed(lease()))
    server = json.loads(files["gpuspawner.json"])["server"]
    assert server["env"]["ODD"] == HOSTILE
    assert server["env"][HOSTILE] == "odd name"
    assert server["argv"][1] == HOSTILE
    assert server["files"] == {"/run/gpuspawner/ssl/key.pem": HOSTILE}


def test_payload_is_the_contract() -> None:
    spec = SeedSpec("l", "h", NETWORK, False, server=SeedServer(("x",), {"A": "b"}))
    _label, files, _joliet = read_back(build_seed(spec))
    assert json.loads(files["gpuspawner.json"]) == {
        "v": 1,
        "lease_id": "l",
        "hostname": "h",
        "network": {
            "mac": "52:54:00:AA:00:01",
            "address": "10.201.0.10/24",
            "gateway": "10.201.0.1",
            "dns": ["10.201.0.1"],
        },
        "home": {"serial": "home", "new": False},
        "user": {"name": "jovyan", "uid": 1000, "sudo": True},
        "server": {"argv": ["x"], "env": {"A": "b"}, "files": {}, "port": 8888},
    }


def test_network_config_is_static_and_matched_by_mac() -> None:
    _label, files, _joliet = read_back(build_seed(lease()))
    config = yaml.safe_load(files["network-config"])
    assert config["version"] == 2
    card = config["ethernets"]["lab0"]
    assert card["match"] == {"macaddress": "52:54:00:aa:00:01"}
    assert card["addresses"] == ["10.201.0.10/24"]
    assert card["routes"] == [{"to": "0.0.0.0/0", "via": "10.201.0.1"}]
    assert card["dhcp4"] is False


def test_user_data_and_meta_data_are_cloud_inits() -> None:
    _label, files, _joliet = read_back(build_seed(lease()))
    assert files["user-data"].startswith(b"#cloud-config\n")
    assert yaml.safe_load(files["meta-data"])["instance-id"] == lease().lease_id


def test_payload_that_is_too_large_is_refused() -> None:
    server = SeedServer(("x",), {"BIG": "x" * MAX_PAYLOAD_BYTES})
    with pytest.raises(ValueError, match="Make the server's environment smaller"):
        build_seed(lease(server=server))
