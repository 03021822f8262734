"""Process 1 of the service VM: mount, load modules, run the checks, report, power off."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from . import AGENT
from .arguments import parse
from .kernel import load_modules, mount, power_off
from .plan import EMULATED
from .ports import find_gpus
from .protocol import Channel
from .report import Subject
from .runner import Runner
from .sysfs import SysfsMachine, VirtioPort

PORT = "org.gpuspawner.service.0"
IMAGE_FILE = Path("/etc/gpuspawner-image")
MODULES = Path("/modules")


def prepare() -> None:
    """What an init does first."""
    mount("proc", "/proc")
    mount("sysfs", "/sys")
    mount("devtmpfs", "/dev")
    load_modules(MODULES)
    # Locked pages may still be moved to make room for large ones; a DMA buffer must stay.
    compact = Path("/proc/sys/vm/compact_unevictable_allowed")
    if compact.exists():
        compact.write_text("0")


def diagnose() -> None:
    """One run, from ``hello`` to the host's acknowledgement."""
    arguments = parse(Path("/proc/cmdline").read_text())
    channel = Channel(VirtioPort(PORT), arguments.run, arguments.nonce)
    boot_s = round(time.clock_gettime(time.CLOCK_BOOTTIME), 2)
    image = IMAGE_FILE.read_text().strip()
    channel.send("hello", {"image": image, "agent": AGENT, "boot_s": boot_s})
    machine = SysfsMachine()
    subject = Subject(
        machine,
        find_gpus(machine.functions()),
        bytes.fromhex(arguments.nonce),
        arguments.rounds,
    )
    Runner(channel, subject, arguments.pause).run(EMULATED)
    channel.wait_for_ack()


def main() -> None:
    """Never returns, and always ends in power off: a service VM that lingers holds a GPU."""
    try:
        prepare()
        diagnose()
    except BaseException:
        # For the console log, where a person looks when there is no report.
        sys.excepthook(*sys.exc_info())
    finally:
        power_off()


if __name__ == "__main__":
    main()
