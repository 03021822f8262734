"""A GPU that does not answer on the bus: what is tried, from the mildest to the hardest."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from gpuspawner.host.api import HostError, HostTimeout, HostUnreachable, Rung

#: The verbs of the probe. The bus is reset twice, since some cards come back the second time.
_LADDER = ("wake", "reset", "bus-reset", "bus-reset", "rescan", "power-cycle")
#: How long a step may take. The kernel waits for a minute for a function that was reset, and resets
#: each of a card's functions that it takes out of its list.
_STEP_S = 150.0
#: When no further step is begun.
BUDGET_S = 300.0

Probe = Callable[..., Awaitable[dict[str, Any]]]


async def recover(
    address: str, probe: Probe, clock: Callable[[], float] = time.monotonic
) -> tuple[Rung, ...]:
    """Climb until the GPU answers or a call hangs, and begin no step when five minutes are over;
    what was tried.

    :raises HostUnreachable: the host was lost meanwhile.
    """
    tried: list[Rung] = []
    end = clock() + BUDGET_S
    for verb in _LADDER:
        if clock() >= end:
            break
        outcome = ""
        try:
            await probe(verb, address, deadline_s=_STEP_S)
        except HostTimeout as error:
            # A write that hangs in the kernel holds the device: the next one would hang as well.
            return (*tried, Rung(verb, error.args[0]))
        except HostUnreachable:
            raise
        except HostError as error:
            outcome = error.args[0]
        tried.append(Rung(verb, outcome))
        if (await probe("witness", address))["present"]:
            break
    return tuple(tried)


def in_words(tried: tuple[Rung, ...]) -> str:
    """For the reason of a GPU that stays lost."""
    done = list(dict.fromkeys(rung.step for rung in tried if not rung.failure))
    if not tried:
        return ""
    what = f"Tried in vain: {', '.join(done)}." if done else "None of the resets could be tried."
    return f"{what} Powering the host off and on may bring it back; otherwise reseat the card."
