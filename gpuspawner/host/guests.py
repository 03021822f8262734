"""A host's VMs: make, find, end. Functions take the open ``virConnect`` and block."""

from __future__ import annotations

import contextlib
import json
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import libvirt

from gpuspawner.host.api import Guest, GuestSpec, HostError
from gpuspawner.host.devices import empty_cdrom
from gpuspawner.host.domain import METADATA_URI

PROBE = "probe"  # kind of the VM that tries KVM out; no lease's and no diagnosis'

_STATES = {
    libvirt.VIR_DOMAIN_RUNNING: "running",
    libvirt.VIR_DOMAIN_BLOCKED: "running",
    libvirt.VIR_DOMAIN_PAUSED: "paused",
    libvirt.VIR_DOMAIN_PMSUSPENDED: "paused",
    libvirt.VIR_DOMAIN_SHUTDOWN: "shutting",
    libvirt.VIR_DOMAIN_SHUTOFF: "gone",
    libvirt.VIR_DOMAIN_CRASHED: "gone",
}
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|[^\n\t\x20-\x7e\xa0-\uffff]")


@dataclass(frozen=True, slots=True)
class Found:
    """A VM of this installation on this host, and what its metadata names: its GPUs, and the MiB
    of hugepages that it holds of each node."""

    guest: Guest
    gpus: tuple[str, ...]
    hugepages: tuple[tuple[int, int], ...] = ()


def start_deadline_s(spec: GuestSpec, accel: str) -> float:
    """How long QEMU may take to start this guest, in seconds: clearing and pinning its memory
    takes about 1 s a GiB, and several times that with passed-through devices (the formula is
    Proxmox VE's, with our floor)."""
    memory_s = max(60.0, spec.claim.memory_mib / 1024)
    if any(not gpu.emulated for gpu in spec.gpus):
        memory_s *= 4
    return memory_s if accel == "kvm" else max(memory_s, 120.0)


def lookup(connection: Any, uuid: str) -> Any | None:
    """The domain with this UUID, or ``None``."""
    try:
        return connection.lookupByUUIDString(uuid)
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            return None
        raise


def create(connection: Any, uuid: str, xml: str) -> None:
    """Start a transient domain; success if one with its UUID is there already."""
    if lookup(connection, uuid) is not None:
        return
    try:
        connection.createXML(xml, 0)
    except libvirt.libvirtError:
        # Two calls at once, the first of which was given up for dead.
        if lookup(connection, uuid) is None:
            raise


def no_direct_io(error: BaseException | None) -> bool:
    """QEMU refused a disk because its file system cannot do O_DIRECT (tmpfs)."""
    return isinstance(error, libvirt.libvirtError) and "O_DIRECT" in str(error)


def destroy(connection: Any, uuid: str, deadline_s: float) -> None:
    """End the domain and see it gone. libvirt returns when QEMU's process has ended; with devices
    to give back that takes a while, and may need another try."""
    end = time.monotonic() + deadline_s
    while (domain := lookup(connection, uuid)) is not None:
        try:
            domain.destroyFlags(libvirt.VIR_DOMAIN_DESTROY_DEFAULT)
        except libvirt.libvirtError as error:
            code = error.get_error_code()
            if code == libvirt.VIR_ERR_NO_DOMAIN:
                return
            if time.monotonic() > end:
                raise
        if time.monotonic() > end:
            raise HostError(
                f"The VM {uuid} does not end.",
                "Its QEMU process hangs in the kernel: look at dmesg on the host; a reboot of "
                "the host ends it.",
            )
        time.sleep(0.2)


def shutdown(connection: Any, uuid: str) -> None:
    """Press the power button. Nothing to do when the VM is gone or already on its way."""
    domain = lookup(connection, uuid)
    if domain is None:
        return
    try:
        domain.shutdownFlags(libvirt.VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN)
    except libvirt.libvirtError as error:
        if error.get_error_code() not in (
            libvirt.VIR_ERR_NO_DOMAIN,
            libvirt.VIR_ERR_OPERATION_INVALID,
        ):
            raise


def resume(connection: Any, uuid: str) -> None:
    """Let a VM go on that QEMU has stopped because there was no room for what it wrote; one that
    is paused for any other reason is left alone."""
    domain = lookup(connection, uuid)
    if domain is None:
        return
    try:
        state, why = domain.state(0)[:2]
        if (state, why) == (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_IOERROR):
            domain.resume()
    except libvirt.libvirtError as error:
        if error.get_error_code() not in (
            libvirt.VIR_ERR_NO_DOMAIN,
            libvirt.VIR_ERR_OPERATION_INVALID,
        ):
            raise


def eject(connection: Any, uuid: str) -> None:
    """Take the seed out of its drive, whether the guest has locked it or not."""
    domain = lookup(connection, uuid)
    if domain is None:
        return
    try:
        domain.updateDeviceFlags(
            empty_cdrom(),
            libvirt.VIR_DOMAIN_AFFECT_LIVE | libvirt.VIR_DOMAIN_DEVICE_MODIFY_FORCE,
        )
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN and lookup(connection, uuid):
            raise


def listing(connection: Any, instance: str, host: str) -> list[Found]:
    """This installation's VMs on this (declared) host, by name and metadata."""
    found = []
    for domain in connection.listAllDomains(0):
        if domain.name().startswith(f"gs-{instance}-"):
            each = _found(domain)
            if each is not None and each[0] == host:
                found.append(each[1])
    return sorted(found, key=lambda each: each.guest.uuid)


def one(connection: Any, uuid: str) -> Guest | None:
    """One VM by UUID."""
    domain = lookup(connection, uuid)
    found = None if domain is None else _found(domain)
    return None if found is None else found[1].guest


def _found(domain: Any) -> tuple[str, Found] | None:
    try:
        text = domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, METADATA_URI, 0)
        state = _STATES.get(domain.state(0)[0], "running")
    except libvirt.libvirtError as error:
        if error.get_error_code() in (
            libvirt.VIR_ERR_NO_DOMAIN,
            libvirt.VIR_ERR_NO_DOMAIN_METADATA,
        ):
            return None  # it ended just now, or is none of ours
        raise
    element = ET.fromstring(text)
    labels: dict[str, str] = {}
    with contextlib.suppress(ValueError):
        labels = {str(k): str(v) for k, v in json.loads(element.text or "{}").items()}
    guest = Guest(domain.UUIDString(), element.get("kind", ""), state, labels)
    return element.get("host", ""), Found(
        guest, tuple(element.get("gpus", "").split()), _parse_memory(element.get("memory", ""))
    )


def _parse_memory(text: str) -> tuple[tuple[int, int], ...]:
    """``0:65536 1:65536`` is 65536 MiB on each of two nodes."""
    return tuple(
        (int(node), int(mib)) for node, _, mib in (word.partition(":") for word in text.split())
    )


def held_mib(found: Iterable[Found]) -> dict[int, int]:
    """What VMs hold of each node's hugepages, in MiB."""
    held: dict[int, int] = {}
    for each in found:
        for node, mib in each.hugepages:
            held[node] = held.get(node, 0) + mib
    return held


def readable(console: bytes) -> str:
    """A console log without control characters and escape sequences."""
    text = console.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub("", text)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What of libvirt's capabilities concerns us. ``qemu_uid``/``qemu_gid``: QEMU's account."""

    kvm: bool
    amd: bool
    qemu_uid: int
    qemu_gid: int
    confining_models: tuple[str, ...]


def parse_capabilities(text: str) -> Capabilities:
    """From ``virConnectGetCapabilities``."""
    root = ET.fromstring(text)
    uid = gid = 0
    confining = []
    for model in root.iterfind("./host/secmodel"):
        name = model.findtext("model", "")
        if name in ("apparmor", "selinux"):
            confining.append(name)
        if name == "dac":
            label = re.match(r"\+(\d+):\+(\d+)", model.findtext("baselabel", ""))
            if label:
                uid, gid = int(label.group(1)), int(label.group(2))
    domains = root.iterfind("./guest/arch[@name='x86_64']/domain")
    return Capabilities(
        kvm=any(domain.get("type") == "kvm" for domain in domains),
        amd=root.findtext("./host/cpu/vendor") == "AMD",
        qemu_uid=uid,
        qemu_gid=gid,
        confining_models=tuple(confining),
    )


def offers_efi(text: str) -> bool | None:
    """Whether guests can boot with UEFI, from ``virConnectGetDomainCapabilities``: libvirt looks
    for a firmware as ``<os firmware='efi'>`` will. ``None`` if it does not say."""
    firmware = ET.fromstring(text).find("./os/enum[@name='firmware']")
    if firmware is None:
        return None
    return "efi" in {value.text for value in firmware.iterfind("value")}


def look(connection: Any) -> tuple[Capabilities, tuple[int, ...]]:
    """Capabilities, and the CPUs that are online."""
    present = connection.getCPUMap(0)[1]
    cpus = tuple(number for number, online in enumerate(present) if online)
    return parse_capabilities(connection.getCapabilities()), cpus
