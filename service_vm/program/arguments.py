"""What the host tells the program: words of the kernel command line.

=========================  ========================================================================
``gpuspawner.run=ID``      id of this run, repeated in every line
``gpuspawner.nonce=HEX``   32 hex digits, used once, repeated in every line; also keys the patterns
``gpuspawner.tier=L1``     depth: L1, L2 or L3 write and read back the memory 1, 2 or 4 times over
``gpuspawner.pause=C:N``   fault drill: wait N seconds (at most 600) before check C begins, after
                           announcing it with a ``progress`` line.  ``read_back:5`` opens a window
                           between the writing of the first pattern and its reading, in which a
                           person or a test flips a bit from outside and sees it found.  It can
                           only delay a run; it weakens no check.
=========================  ========================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ROUNDS = {"L1": 1, "L2": 2, "L3": 4}
PAUSE_LIMIT_S = 600


@dataclass(frozen=True)
class Pause:
    """A fault drill: wait `seconds` before `check` begins."""

    check: str
    seconds: float


@dataclass(frozen=True)
class Arguments:
    """The parsed words.  `rounds` is how often the patterns go over the memory."""

    run: str
    nonce: str
    rounds: int
    pause: Pause | None


def parse(command_line: str) -> Arguments:
    """The arguments in `command_line`.

    :raises ValueError: a word is missing or malformed.  The run then ends before ``hello``, which
        the host takes as inconclusive: nothing can be reported without run id and nonce.
    """
    words = dict(
        word.removeprefix("gpuspawner.").split("=", 1)
        for word in command_line.split()
        if word.startswith("gpuspawner.") and "=" in word
    )
    run, nonce, tier = words.get("run", ""), words.get("nonce", ""), words.get("tier", "L1")
    if not re.fullmatch(r"[0-9A-Za-z-]{1,64}", run):
        raise ValueError("gpuspawner.run is missing or malformed")
    if not re.fullmatch(r"[0-9a-f]{32}", nonce):
        raise ValueError("gpuspawner.nonce is missing or not 32 hex digits")
    if tier not in ROUNDS:
        raise ValueError(f"gpuspawner.tier is {tier!r}, known are {', '.join(ROUNDS)}")
    return Arguments(run, nonce, ROUNDS[tier], _pause(words["pause"]) if "pause" in words else None)


def _pause(text: str) -> Pause:
    check, _, seconds = text.partition(":")
    if not re.fullmatch(r"[a-z_]{1,32}", check) or not re.fullmatch(r"[0-9]{1,3}", seconds):
        raise ValueError(f"gpuspawner.pause is {text!r}, not CHECK:SECONDS")
    return Pause(check, float(min(int(seconds), PAUSE_LIMIT_S)))
