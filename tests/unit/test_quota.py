"""Limits: who may hold how many GPUs at once."""

from __future__ import annotations

import pytest

from gpuspawner.pool.quota import Holding, Limits, Standing, excess, standing

NONE = Limits(None, {}, {})
ADA = Holding("ada", "train", ("sar",), 2)
BOB = Holding("bob", "", ("sar", "sea"), 1)


@pytest.mark.parametrize(
    ("limits", "gpus", "kind"),
    [
        (NONE, 9, None),
        (Limits(3, {}, {}), 1, None),
        (Limits(3, {}, {}), 2, "user"),
        (Limits(1, {"ada": 4}, {}), 2, None),
        (Limits(9, {"ada": 2}, {}), 1, "user"),
        (Limits(None, {"ada": 0}, {}), 0, None),
        (Limits(None, {}, {"sar": 4}), 1, None),
        (Limits(None, {}, {"sar": 3}), 1, "group"),
        (Limits(None, {}, {"sea": 0}), 1, None),
        (Limits(2, {}, {"sar": 3}), 1, "user"),
    ],
)
def test_limits(limits: Limits, gpus: int, kind: str | None) -> None:
    """Ada is in ``sar`` and holds two GPUs; Bob, in ``sar`` and ``sea``, one."""
    found = excess(limits, [ADA, BOB], username="ada", groups=["sar"], gpus=gpus)
    assert (None if found is None else found.kind) == kind


def test_where_a_user_stands() -> None:
    """Her own limit, or that she has none, and those of her groups that have one."""
    limits = Limits(5, {"ada": 4}, {"sar": 3, "other": 1})
    assert standing(limits, [ADA, BOB], "ada", ["sea", "sar"]) == (
        Standing("user", "ada", 4, 2),
        Standing("group", "sar", 3, 3),
    )
    assert standing(NONE, [ADA, BOB], "eve", ["sar"]) == (Standing("user", "eve", None, 0),)


def test_the_sentences_name_numbers_and_a_way_out() -> None:
    mine = excess(Limits(2, {}, {}), [ADA, BOB], username="ada", groups=[], gpus=1)
    assert mine is not None
    assert mine.sentence() == (
        "You already use 2 of the 2 GPUs that you may use at once (train). Stop one of those "
        "servers first."
    )
    ours = excess(Limits(None, {}, {"sar": 3}), [ADA, BOB], username="eve", groups=["sar"], gpus=1)
    assert ours is not None
    assert "Your group sar already uses 3 of the 3 GPUs" in ours.sentence()
    never = excess(Limits(1, {}, {}), [], username="eve", groups=[], gpus=2)
    assert never is not None
    assert "Choose a profile with fewer GPUs." in never.sentence()
