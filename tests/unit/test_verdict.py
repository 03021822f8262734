"""The verdict: a pass takes everything, and the worse of two witnesses wins."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuspawner.pool.states import GPU_STEPS, GpuState, Outcome
from gpuspawner.pool.verdict import (
    EMULATED,
    CheckResult,
    Identity,
    Report,
    Witness,
    judge,
)

IDS = ("1234:11e8", "1af4:1110")
WHO = Identity("emulated", "S1", "GPU-1", "Emulated GPU 16M", "1.0", 16, IDS)
SEEN = Witness("0000:40:00.0", True, "boot", IDS, 16.0, 16)
GOOD = Report((WHO,), tuple(CheckResult(c, "pass") for c in EMULATED.required), True)


def verdict(report=GOOD, enrolled=WHO, before=SEEN, after=SEEN, policy=EMULATED):
    return judge(report, enrolled=enrolled, before=before, after=after, policy=policy)


def test_all_passed() -> None:
    assert verdict().outcome is Outcome.PASS
    assert verdict(enrolled=None).outcome is Outcome.PASS, "the first pass enrols"


@pytest.mark.parametrize("check", EMULATED.required)
@pytest.mark.parametrize("status", ["fail", "degraded", "skip", "timeout", "error", None])
def test_every_required_check_must_pass(check: str, status: str | None) -> None:
    results = tuple(
        CheckResult(one.check, status or "") if one.check == check else one
        for one in GOOD.results
        if not (status is None and one.check == check)
    )
    outcome = verdict(replace(GOOD, results=results)).outcome
    assert outcome is (Outcome.FAIL if status == "fail" else Outcome.INCONCLUSIVE)


def test_the_hosts_own_eyes() -> None:
    gone = replace(SEEN, present=False)
    assert verdict(before=gone).outcome is Outcome.LOST
    assert verdict(after=gone).outcome is Outcome.LOST
    assert verdict(after=None).outcome is Outcome.INCONCLUSIVE
    assert verdict(after=replace(SEEN, boot_id="other")).outcome is Outcome.INCONCLUSIVE
    assert verdict(after=replace(SEEN, aer={"fatal": 1})).outcome is Outcome.FAIL
    assert verdict(after=replace(SEEN, aer={"correctable": 9})).outcome is Outcome.PASS
    assert verdict(after=replace(SEEN, ids=("ffff:ffff",))).outcome is Outcome.FAIL


def test_a_narrower_link_fails_and_a_slower_one_does_not() -> None:
    """A link that has nothing to do slows down, on good cards too. It never gets narrower."""
    seen = replace(SEEN, port_link_speed_gts=16.0, port_link_width=16, reset_methods=("flr", "bus"))
    idle = replace(seen, link_speed_gts=2.5, port_link_speed_gts=2.5)
    assert verdict(before=seen, after=idle).outcome is Outcome.PASS
    for change in ({"link_width": 8}, {"port_link_width": 8}, {"reset_methods": ("bus",)}):
        found = verdict(before=seen, after=replace(seen, **change))
        assert found.outcome is Outcome.FAIL, change
        assert found.reasons, change


def test_a_broken_report_says_nothing_good_or_bad() -> None:
    results = (CheckResult("dma", "fail"),)
    broken = replace(GOOD, results=results, broken="wrong nonce")
    assert verdict(broken).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize(
    "change",
    [{"serial": "S2"}, {"uuid": "x"}, {"vbios": "2"}, {"memory_mib": 8}, {"ids": IDS[:1]},
     {"model": "y"}],
)  # fmt: skip
def test_another_identity_fails(change: dict) -> None:
    result = verdict(replace(GOOD, identities=(replace(WHO, **change),)))
    assert result.outcome is Outcome.FAIL
    assert result.reasons


def test_an_emulated_gpu_never_passes_where_it_is_not_allowed() -> None:
    policy = replace(EMULATED, kinds=("nvidia",))
    assert verdict(policy=policy).outcome is Outcome.FAIL


def test_two_gpus_or_none() -> None:
    assert verdict(replace(GOOD, identities=(WHO, WHO))).outcome is Outcome.FAIL
    assert verdict(replace(GOOD, identities=())).outcome is Outcome.INCONCLUSIVE


statuses = st.sampled_from(["pass", "fail", "degraded", "skip", "timeout", "error"])
reports = st.builds(
    Report,
    identities=st.lists(st.just(WHO) | st.builds(replace, st.just(WHO), serial=st.text())).map(
        tuple
    ),
    results=st.lists(
        st.builds(CheckResult, st.sampled_from([*EMULATED.required, "other"]), statuses)
    ).map(tuple),
    complete=st.booleans(),
    broken=st.none() | st.text(min_size=1),
)


@given(reports, st.none() | st.builds(replace, st.just(SEEN), present=st.booleans()))
def test_no_report_passes_that_lacks_anything(report: Report, after: Witness | None) -> None:
    """The invariant in one line: a pass is complete, believed, of the enrolled GPU, and every
    required check of it passed."""
    if verdict(report, after=after).outcome is Outcome.PASS:
        assert report.complete
        assert report.broken is None
        assert report.identities == (WHO,)
        passed = {one.check for one in report.results if one.status == "pass"}
        assert passed >= set(EMULATED.required)
        assert not [one for one in report.results if one.status == "fail"]
        assert after == SEEN


def test_one_edge_leads_to_unassigned() -> None:
    edges = [step[0] for step in GPU_STEPS if step[1] is GpuState.UNASSIGNED]
    assert edges == [GpuState.DIAGNOSING]
