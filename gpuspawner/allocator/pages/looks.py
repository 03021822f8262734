"""How states look and what they mean: a word, a shape and a colour, never a colour alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Tone = Literal["ok", "busy", "wait", "bad", "off"]


@dataclass(frozen=True, slots=True)
class Look:
    """``label`` is the word on the badge, ``icon`` the shape's name in ``icons.html``, ``meaning``
    a sentence for whoever wonders."""

    label: str
    icon: str
    tone: Tone
    meaning: str = ""


UNKNOWN = Look("unknown", "question", "off")

GPU_LOOKS: Mapping[str, Look] = {
    "unassigned": Look(
        "free", "check", "ok", "Wiped and proved good. The next server that fits gets it."
    ),
    "reserved": Look(
        "reserved", "half", "busy", "Promised to a server whose virtual machine does not run yet."
    ),
    "assigned": Look("in use", "full", "busy", "In a user's virtual machine."),
    "used": Look(
        "to be wiped",
        "drop",
        "wait",
        "Somebody had it, or its fate is unknown. Nobody gets it before it is wiped and checked.",
    ),
    "diagnosing": Look(
        "being wiped", "turn", "wait", "A service VM is wiping and checking it right now."
    ),
    "new": Look(
        "new", "plus", "wait", "Found on the host, never enrolled. An admin has to enrol it once."
    ),
    "quarantined": Look(
        "quarantined",
        "pause",
        "bad",
        "Several diagnoses in a row came to no verdict. It waits for an admin.",
    ),
    "failed": Look("failed", "cross", "bad", "A diagnosis found it broken. It waits for an admin."),
    "lost": Look("lost", "question", "bad", "It does not answer on the bus. See to the hardware."),
    "retired": Look("retired", "minus", "off", "Taken out of the pool for good."),
}

# A GPU that is proved good and that nobody gets all the same is not shown as free.
HELD = Look("held", "pause", "wait", "Proved good, and held back by an admin.")
UNUSABLE = Look("not usable", "cross", "bad", "Something on its host keeps it out of the pool.")


def gpu_look(state: str, held: bool, problems: bool) -> tuple[str, Look]:
    """A word for filters, and the look: the state's own, but for a free GPU that is not."""
    if state == "unassigned" and problems:
        return "unusable", UNUSABLE
    if state == "unassigned" and held:
        return "held", HELD
    return state, GPU_LOOKS.get(state, UNKNOWN)


LEASE_LOOKS: Mapping[str, Look] = {
    "queued": Look("waiting", "half", "wait", "Waits for a GPU that is being wiped and checked."),
    "placed": Look("starting", "turn", "wait", "Has its GPU; its virtual machine is being made."),
    "starting": Look("starting", "turn", "wait", "Its virtual machine is starting."),
    "running": Look("running", "check", "ok", "JupyterLab has answered."),
    "stopping": Look("stopping", "turn", "off", "Its virtual machine is being shut down."),
    "ended": Look("ended", "minus", "off", "It is gone."),
}

HOST_LOOKS: Mapping[str, Look] = {
    "ready": Look("ready", "check", "ok"),
    "new": Look("connecting", "turn", "wait"),
    "unreachable": Look("unreachable", "cross", "bad"),
}

OUTCOME_LOOKS: Mapping[str, Look] = {
    "running": Look("running", "turn", "wait"),
    "pass": Look("passed", "check", "ok"),
    "fail": Look("failed", "cross", "bad"),
    "lost": Look("not on the bus", "question", "bad"),
    "inconclusive": Look("no verdict", "pause", "wait"),
}

CHECK_LOOKS: Mapping[str, Look] = {
    "pass": Look("passed", "check", "ok"),
    "fail": Look("failed", "cross", "bad"),
    "degraded": Look("degraded", "pause", "wait"),
    "skip": Look("skipped", "minus", "off"),
    "timeout": Look("too slow", "half", "wait"),
    "error": Look("could not run", "cross", "wait"),
}

# What an admin may ask of a GPU, by its state. None of it leads to ``unassigned``.
_RETIRABLE = frozenset({"new", "used", "unassigned", "failed", "lost", "quarantined"})
_RETESTABLE = frozenset({"unassigned", "failed", "lost", "quarantined", "used"})


def gpu_actions(state: str, held: bool) -> tuple[str, ...]:
    """The actions that make sense for a GPU, the likeliest first."""
    actions = []
    if state == "new":
        actions.append("enroll")
    if state in _RETESTABLE:
        actions.append("retest")
    if state != "retired":
        actions.append("hold")
    if held:
        actions.append("unhold")
    if state in _RETIRABLE:
        actions.append("retire")
    return tuple(actions)


@dataclass(frozen=True, slots=True)
class ActionText:
    """An action's words: on its button, over its confirmation, what it does, and what has been
    done. ``reason`` says whether one must be given."""

    button: str
    title: str
    effect: str
    done: str
    reason: Literal["needed", "welcome"]
    grave: bool = False


GPU_ACTION_TEXTS: Mapping[str, ActionText] = {
    "enroll": ActionText(
        "Enrol",
        "Enrol this GPU?",
        "It is wiped and checked now. If it passes, what it says of itself becomes the record that "
        "it is compared with from then on, and it may be given out.",
        "It will be wiped, checked and enrolled.",
        "welcome",
    ),
    "retest": ActionText(
        "Retest",
        "Wipe and check this GPU again?",
        "Nobody gets it until it has passed. That takes a few minutes.",
        "It will be wiped and checked.",
        "welcome",
    ),
    "hold": ActionText(
        "Hold",
        "Hold this GPU back?",
        "Nobody gets it until the hold is taken away. A server that has it now keeps it.",
        "It is held: nobody gets it until the hold is taken away.",
        "needed",
    ),
    "unhold": ActionText(
        "Take hold away",
        "Take the hold away?",
        "The GPU goes on in its life: a free one may be given out at once.",
        "The hold is taken away.",
        "welcome",
    ),
    "retire": ActionText(
        "Retire",
        "Take this GPU out of the pool for good?",
        "It is never given out or checked again. Its history is kept.",
        "It is retired.",
        "needed",
        grave=True,
    ),
}
