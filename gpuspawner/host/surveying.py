"""Asking a host what it has and how it is: the questions behind survey and inspection."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import libvirt

from gpuspawner.host import guests as vms
from gpuspawner.host.api import HostError
from gpuspawner.host.inspection import (
    Daemon,
    Finding,
    Inspection,
    Seen,
    Version,
    inspect_declared,
    inspect_real,
    inspect_without_shell,
)
from gpuspawner.host.inventory import HostRules, kept_back, parse_inventory
from gpuspawner.host.nodedev import UNKNOWN, Heard, parse_hardware
from gpuspawner.host.volumes import Pool
from gpuspawner.pool.topology import Inventory

log = logging.getLogger(__name__)

Probe = Callable[[str], Awaitable[dict[str, Any]]]


async def survey_real(
    name: str,
    probe: Probe,
    listing: Callable[[], Awaitable[Sequence[vms.Found]]],
    rules: HostRules,
) -> tuple[Inventory, dict[str, Any]]:
    """A real host's inventory, and the probe's answer that it was made from. What a guest that
    comes or goes meanwhile holds counts as neither free nor held."""
    before = {each.guest.uuid for each in await listing()}
    answer = await probe("inventory")
    held = vms.held_mib(each for each in await listing() if each.guest.uuid in before)
    return parse_inventory(name, answer, rules, held), answer


async def survey_by_libvirt(
    name: str, listen: Callable[[], Awaitable[Heard]], rules: HostRules
) -> tuple[Inventory, dict[str, Any]]:
    """As ``survey_real``, of a host whose shell cannot be used: nothing of it is given out."""
    try:
        answer = parse_hardware(await listen())
    except ValueError as error:
        raise HostError(f"Host {name}: {error}.", "Look at libvirt's log there.") from error
    return kept_back(parse_inventory(name, answer, rules)), answer


def inspect_by_libvirt(
    inventory: Inventory,
    answer: Mapping[str, Any],
    said: Daemon,
    why: HostError,
    *,
    rules: HostRules,
    kvm: bool,
) -> Inspection:
    """As ``inspect``, from what ``survey_by_libvirt`` gave. ``why`` is what the shell answered."""
    finding = Finding(
        "error",
        f"{why.args[0]} Only libvirt was asked, and nothing of the host is given out. Not known: "
        f"{UNKNOWN}.",
        why.remedy,
    )
    seen = Seen(machine=answer["machine"], rules=rules, daemon=said, kvm=kvm, rest=answer)
    return inspect_without_shell(inventory, seen, finding)


async def inspect(
    inventory: Inventory,
    answer: Mapping[str, Any],
    probe: Probe,
    said: Daemon,
    *,
    rules: HostRules,
    kvm: bool,
    firmware: str,
) -> Inspection:
    """What the host says of itself beside its inventory. ``answer`` is what ``survey_real`` gave,
    empty for an emulated host; ``kvm`` is whether libvirt offers it, and ``firmware`` what
    guests boot with unless their GPUs need another."""
    started = time.time()
    machine = await probe("machine")
    seen = Seen(
        machine=machine,
        rules=rules,
        daemon=said,
        kvm=kvm,
        firmware=firmware,
        # The probe looked at its clock at some time between asking and answering.
        off_s=_outside(float(machine["time"]), started, time.time()),
        rest=answer,
    )
    return inspect_real(inventory, seen) if answer else inspect_declared(inventory, seen)


def daemon(connection: Any, pool: Pool) -> Daemon:
    """What libvirt says of itself and of the room in its pool; blocks."""
    with contextlib.suppress(libvirt.libvirtError):
        pool.refresh(connection)  # refused while a volume is written: then the figure is older
    return Daemon(
        libvirt=_version(connection.getLibVersion()),
        qemu=_version(connection.getVersion()),
        efi=_efi(connection),
        place=f"{pool.name} at {pool.path}",
        free_mib=pool.free_mib(connection),
    )


def _version(number: int) -> Version:
    """libvirt counts 9.0.1 as 9000001."""
    return number // 1_000_000, number // 1000 % 1000, number % 1000


def _efi(connection: Any) -> bool | None:
    try:
        text = connection.getDomainCapabilities(None, "x86_64", "q35", None, 0)
    except libvirt.libvirtError as error:
        log.debug("domain capabilities: %s", error)
        return None
    return vms.offers_efi(text)


def own_boot_id() -> str:
    """Of the machine that this runs on."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _outside(value: float, first: float, last: float) -> float:
    """How far ``value`` is from the span; negative before it."""
    return min(0.0, value - first) + max(0.0, value - last)
