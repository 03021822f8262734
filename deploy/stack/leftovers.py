"""Taking away what an installation has in libvirt: domains, networks, filters, pools.

The allocator never does this by itself: its virtual machines outlive it on purpose. The files of
storage pools, among them the users' homes, stay where they are.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from deploy.stack.say import complain, step

URI = "qemu:///system"


def instance_of(state: Path) -> str | None:
    """The installation's id from the allocator's database; ``None`` before its first start."""
    for path in sorted(state.glob("*.sqlite")):
        address = f"file:{quote(str(path))}?mode=ro"
        try:
            connection = sqlite3.connect(address, uri=True, timeout=5)
        except sqlite3.Error:
            continue
        try:
            row = connection.execute("SELECT instance FROM installation").fetchone()
        except sqlite3.Error:
            continue  # another database, such as the hub's
        finally:
            connection.close()
        if row:
            return str(row[0])
    return None


def remove_leftovers(instance: str | None, uri: str = URI) -> None:
    """Remove everything in libvirt whose name begins with ``gs-<instance>``.

    Goes on after a failure, which is reported: one stuck network must not keep the others.
    """
    if not instance:
        return
    import libvirt

    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    try:
        connection = libvirt.open(uri)
    except libvirt.libvirtError as error:
        complain(f"  !!  libvirt cannot be reached to take networks away: {error}")
        return
    try:
        kinds: tuple[tuple[str, Callable[[], Iterable[Any]], tuple[str, ...]], ...] = (
            ("virtual machine", connection.listAllDomains, ("destroy", "undefine")),
            ("network", connection.listAllNetworks, ("destroy", "undefine")),
            ("filter", connection.listAllNWFilters, ("undefine",)),
            ("storage pool", connection.listAllStoragePools, ("destroy", "undefine")),
        )
        prefix = f"gs-{instance}"
        ours = [
            (kind, thing, verbs)
            for kind, list_all, verbs in kinds
            for thing in list_all()
            if thing.name().startswith(prefix)
        ]
        if not ours:
            return
        with step("Taking away virtual machines, networks and storage pools"):
            for kind, thing, verbs in ours:
                _remove(kind, thing, verbs, libvirt.libvirtError)
    except libvirt.libvirtError as error:
        complain(f"  !!  {error}")
    finally:
        connection.close()


def _remove(kind: str, thing: Any, verbs: Iterable[str], failure: type[Exception]) -> None:
    name = thing.name()
    for verb in verbs:
        # What is transient is gone once it is destroyed, and what is not active cannot be.
        active = getattr(thing, "isActive", None)
        persistent = getattr(thing, "isPersistent", None)
        try:
            if verb == "destroy" and active is not None and not active():
                continue
            if verb == "undefine" and persistent is not None and not persistent():
                continue
            getattr(thing, verb)()
        except failure as error:
            if "not found" not in str(error).lower() and "no domain" not in str(error).lower():
                complain(f"  !!  The {kind} {name} could not be taken away: {error}")
            return
