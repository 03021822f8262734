"""The bench of large pools, on small ones."""

from __future__ import annotations

from tests.bench.scale import measure, table


def test_all_figures_are_there() -> None:
    result = measure([2, 3], 12, 6, None, ("sqlite",))
    for row in result["pools"]:
        assert row["decision_ms"]["n"] > 0
        assert row["sqlite"]["wall_ms"]["n"] > 0
        assert row["refusal_ms"]["median"] > 0
    assert result["pools"][0]["times_of_100"] == {"decision": 1.0, "sqlite": 1.0}
    assert len(list(table(result))) == 3
