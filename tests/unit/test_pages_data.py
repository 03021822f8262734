"""What pages show, from what the API shows: pure."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpuspawner import schema
from gpuspawner.allocator.pages import data, details
from gpuspawner.allocator.pages.looks import GPU_ACTION_TEXTS, GPU_LOOKS, gpu_actions
from gpuspawner.allocator.pages.site import cookie_secret, make_site
from gpuspawner.pool.states import GPU_STEPS, GpuState

NOW = datetime(2026, 11, 30, 20, 0, tzinfo=UTC)
URLS = data.Urls("/services/gpu/", "/hub/", "/")


def gpu(**changes: Any) -> schema.Gpu:
    return schema.Gpu(
        **{
            "host": "h1", "address": "0000:41:00.0", "model": "A100", "node": 0, "emulated": False,
            "memory_mib": 40960, "functions": [], "state": "unassigned", "since": NOW,
            "dirty": False, **changes,
        }
    )  # fmt: skip


def host(**changes: Any) -> schema.Host:
    node = schema.Node(
        id=0, cores=8, free_cores=6, memory_mib=65536, reserve_mib=2048, free_mib=47104
    )
    return schema.Host(
        **{
            "name": "h1", "uri": "qemu:///system", "kind": "libvirt", "state": "ready",
            "drained": False, "cidr": "10.201.0.0/24", "nodes": [node], **changes,
        }
    )  # fmt: skip


def test_every_state_has_a_look_and_no_two_look_alike() -> None:
    assert set(GPU_LOOKS) == {state.value for state in GpuState}
    assert len({(look.icon, look.label) for look in GPU_LOOKS.values()}) == len(GPU_LOOKS)
    assert len({look.icon for look in GPU_LOOKS.values()}) == len(GPU_LOOKS)


@pytest.mark.parametrize("state", list(GpuState))
def test_only_actions_that_the_ledger_would_take_are_offered(state: GpuState) -> None:
    to = {"enroll": GpuState.USED, "retest": GpuState.USED, "retire": GpuState.RETIRED}
    steps = {step[:2] for step in GPU_STEPS}
    for action in gpu_actions(state.value, held=True):
        assert action in GPU_ACTION_TEXTS
        if action in to and state is not to[action]:
            assert (state, to[action]) in steps


@pytest.mark.parametrize(
    ("mib", "text"), [(512, "512 MiB"), (1536, "1.5 GiB"), (65536, "64 GiB"), (515072, "503 GiB")]
)
def test_sizes(mib: int, text: str) -> None:
    assert data.size(mib) == text


def test_emulated_is_always_said() -> None:
    assert data.marked("NVIDIA A100", True) == "NVIDIA A100 (emulated)"
    assert data.marked("Emulated GPU 16M", True) == "Emulated GPU 16M"
    assert data.tile(gpu(emulated=True), URLS).model == "A100 (emulated)"


def test_a_held_gpu_is_not_shown_as_free() -> None:
    held = gpu(holds=["fan"])
    assert data.tile(held, URLS).look.label == "held"
    assert data.tile(gpu(problems=["no IOMMU"]), URLS).look.label == "not usable"
    counted = [(one.look.label, one.count) for one in data.state_counts([gpu(), held, held])]
    assert counted == [("free", 1), ("held", 2)]


def test_gpus_on_no_node_are_not_lost_from_sight() -> None:
    card = data.host_card(host(), [gpu(), gpu(address="0000:42:00.0", node=-1)], URLS)
    assert [(node.id, len(node.tiles)) for node in card.nodes] == [(0, 1), (None, 1)]
    assert card.nodes[0].memory_bar == (
        data.Segment("busy", 0.0, 25.0), data.Segment("off", 25.0, 3.12),
    )  # fmt: skip


def test_names_in_addresses_are_escaped() -> None:
    assert URLS.server("a/../b?c", "x y") == "/user/a%2F..%2Fb%3Fc/x%20y/"
    assert URLS.pending("ada@lab", "") == "/hub/spawn-pending/ada@lab"


def test_recovery_is_shown_step_by_step() -> None:
    one = {"recovery": [{"step": "wake", "failure": ""}, {"step": "reset", "failure": "held"}]}
    run = schema.Diagnosis(
        id="d1", host="h1", gpu="0000:41:00.0", state="done", attempt=1, started_at=NOW,
        policy_version=1, witness=one,
    )  # fmt: skip
    assert details.run(run, URLS).recovery == ("wake: done", "reset: held")


def test_witness_shows_what_changed() -> None:
    before = {"present": True, "ids": ["10de:20f1"], "link_width": 16, "aer": {}, "note": ""}
    rows = details.witness_rows(before, {**before, "link_width": 8})
    assert [(row.name, row.changed) for row in rows] == [
        ("answers on the bus", False), ("PCI ids", False), ("link width", True),
    ]  # fmt: skip
    assert [row.after for row in details.witness_rows(before, None)] == ["not asked"] * 3
    assert details.witness_rows(None, None) == ()


@pytest.mark.parametrize(
    ("prefix", "public", "hub", "base", "origin"),
    [
        ("/services/gpu/", "", "/hub/", "/", ""),
        ("/jupyter/services/gpu/", "", "/jupyter/hub/", "/jupyter/", ""),
        ("/services/gpu/", "https://hub.example/hub", "https://hub.example/hub/",
         "https://hub.example/", "https://hub.example"),
    ],
)  # fmt: skip
def test_where_the_hub_is(prefix: str, public: str, hub: str, base: str, origin: str) -> None:
    nothing: Any = None
    site = make_site(
        nothing, nothing, nothing, nothing, hub_id="hub", prefix=prefix, hub_public_url=public,
        hub_api_url="http://127.0.0.1:8081/hub/api", hub_token=None,
    )  # fmt: skip
    assert (site.urls.hub, site.urls.base, site.hub_origin) == (hub, base, origin)


def test_the_cookie_secret_is_made_once_and_for_us_alone(tmp_path: Path) -> None:
    first = cookie_secret(tmp_path)
    assert len(first) == 32
    assert cookie_secret(tmp_path) == first
    files = list(tmp_path.iterdir())
    assert [path.stat().st_mode & 0o777 for path in files] == [0o600]
