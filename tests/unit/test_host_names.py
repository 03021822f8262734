"""Names, network, filter and console: what is pure about volumes, networks and guests."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from gpuspawner.host import guests, volumes
from gpuspawner.host.api import HostError, ImageFile
from gpuspawner.host.network import GuestNetwork

SCHEMAS = Path("/usr/share/libvirt/schemas")
NAT = GuestNetwork(
    "0badcafe", "gpu1", "10.201.0.0/24", hub_address=("10.201.0.1", 8081), blocked=("10.0.0.0/8",)
)
BRIDGE = GuestNetwork("0badcafe", "gpu1", "192.0.2.0/24", "br0", "192.0.2.254", ("192.0.2.9", 80))


def valid(schema: str, xml: str, path: Path) -> None:
    if not (SCHEMAS / schema).exists() or shutil.which("xmllint") is None:
        pytest.fail("libvirt's schemas or xmllint are missing: run 'tests/run'")
    path.write_text(xml)
    command = ["xmllint", "--noout", "--relaxng", str(SCHEMAS / schema), str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_image_marks_read_back() -> None:
    digest = "sha256:" + "a" * 64
    mark = volumes.image_mark(digest)
    file = ImageFile(Path("x"), "b" * 64, 1)
    names = [mark, "home-ada", volumes.file_volume(file), volumes.file_volume(file) + ".ok"]
    assert volumes.marked_images(names) == {digest}


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "Home", "image-x.ok", "gpu-1", "guest-x", "-a"]
)
def test_homes_cannot_be_taken_for_anything_else(name: str) -> None:
    with pytest.raises(HostError):
        volumes.home_volume(name)


def test_volume_names_of_gpus_differ() -> None:
    assert volumes.gpu_volume("0000:41:00.0") == "gpu-0000-41-00-0"


def test_network_and_filter_follow_libvirts_schemas(tmp_path: Path) -> None:
    valid("network.rng", NAT.network_xml(), tmp_path / "network.xml")
    for network in (NAT, BRIDGE):
        valid("nwfilter.rng", network.filter_xml(), tmp_path / "filter.xml")


def test_network_is_nat_without_dhcp() -> None:
    root = ET.fromstring(NAT.network_xml())
    assert root.find("forward[@mode='nat']") is not None
    assert root.find("ip/dhcp") is None
    assert root.find("ip[@address='10.201.0.1'][@prefix='24']") is not None


def test_bridge_names_fit_an_interface_and_differ() -> None:
    names = {
        GuestNetwork("0badcafe", host, "10.0.0.0/24").bridge_name for host in ("a", "b" * 40, "c")
    }
    assert len(names) == 3
    assert all(re.fullmatch(r"gs[0-9a-f]{10}", name) for name in names)
    assert BRIDGE.bridge_name == "br0"
    assert BRIDGE.gateway_address == "192.0.2.254"


def test_filter_opens_the_hub_and_closes_the_rest() -> None:
    rules = [
        (rule.get("action"), int(rule.get("priority", "0")), rule[0].tag, dict(rule[0].attrib))
        for rule in ET.fromstring(NAT.filter_xml()).iterfind("rule")
    ]
    opened = [rule for rule in rules if rule[0] == "accept"]
    closed = [rule for rule in rules if rule[0] == "drop" and rule[2] == "all"]
    assert opened[0][3] == {"dstipaddr": "10.201.0.1", "dstportstart": "8081"}
    assert {rule[3]["dstipaddr"] for rule in closed} == {"10.201.0.1", "10.201.0.0", "10.0.0.0"}
    assert max(rule[1] for rule in opened) < min(rule[1] for rule in closed)
    assert ET.fromstring(NAT.filter_xml()).find("filterref[@filter='clean-traffic']") is not None


def test_a_bridged_guest_reaches_the_hub_and_its_name_server_alone() -> None:
    rules = ET.fromstring(BRIDGE.filter_xml()).findall("rule")
    opened = {
        (rule[0].get("dstipaddr"), rule[0].get("dstportstart"))
        for rule in rules
        if rule.get("action") == "accept"
    }
    assert opened == {("192.0.2.9", "80"), ("192.0.2.254", "53")}
    closed = {
        (rule[0].get("dstipaddr"), rule[0].get("dstipmask"))
        for rule in rules
        if rule.get("action") == "drop" and rule[0].tag == "all"
    }
    assert closed == {("192.0.2.0", "24"), ("192.0.2.254", "32"), ("192.0.2.9", "32")}


def test_console_text_is_readable() -> None:
    raw = b"\x1b[2J\x1b[1;31mred\x1b[0m\r\nb\x07ell\x00 \xff caf\xc3\xa9\ttab"
    assert guests.readable(raw) == "red\nbell � café\ttab"


def test_capabilities() -> None:
    text = """<capabilities><host><cpu><vendor>AMD</vendor></cpu>
      <secmodel><model>apparmor</model></secmodel>
      <secmodel><model>dac</model><baselabel type='kvm'>+64055:+107</baselabel></secmodel>
      </host><guest><arch name='x86_64'><domain type='qemu'/><domain type='kvm'/></arch></guest>
      </capabilities>"""
    found = guests.parse_capabilities(text)
    assert found == guests.Capabilities(True, True, 64055, 107, ("apparmor",))
