"""The benchmark of selection: its bounds hold on a few pools, and its critical price is where sets stop paying."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from ecospec_runtime.policies.throughput import ThroughputPolicy, _Search
from ecospec_runtime.pool import is_closed
from ecospec_train.closure import exact_set
from pipelines.benchmark import selection
from pipelines.benchmark.pools import MODELS, SHAPES, draw_pool, draw_profile


def test_sets_pay_below_the_critical_price_only() -> None:
    rng = np.random.default_rng(3)
    for shape in SHAPES.values():
        candidates, profile = (
            draw_pool(rng, MODELS["small reference"], shape),
            draw_profile(rng, MODELS["small reference"]),
        )
        assert len(candidates) == shape.pool_size
        assert all(mask.bit_count() == 7 * 4 for mask in (candidates.root_mask, *candidates.masks))
        price = selection.critical_price(candidates, profile)
        below, above = (exact_set(candidates, profile, price * factor) for factor in (0.999, 1.001))
        assert below and not above
        assert is_closed(below, candidates.pool.parents)


@pytest.mark.parametrize("tight", [False, True])
def test_the_fast_rule_keeps_its_bounds(tight: bool) -> None:
    row = selection.gap_row("small reference", 60, 5, tight)
    assert row["worth_drafting"] >= 15
    assert row["mean_gap"] <= 0.001
    assert row["worst_gap"] <= selection.WORST
    assert row["wrongly_empty"] == 0


def test_a_greedy_rule_would_not_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(search: _Search, budget: int | None) -> list[int]:
        flags, covered, cost = [False] * len(search.parents), search.root_mask, search.expert_cost
        for i, parent in enumerate(search.parents):
            if (parent < 0 or flags[parent]) and search.worth[i] > cost * (search.masks[i] & ~covered).bit_count():
                flags[i], covered = True, covered | search.masks[i]
        return [i for i, flag in enumerate(flags) if flag]

    monkeypatch.setattr(_Search, "run", greedy)
    row = selection.gap_row("small reference", 60, 5, True)
    assert row["mean_gap"] > 0.1
    assert row["wrongly_empty"] > 0


def test_the_command_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = [str(tmp_path / name) for name in ("out.json", "out.md")]
    monkeypatch.setattr(selection, "MODELS", {"small reference": MODELS["small reference"]})
    monkeypatch.setattr(
        sys, "argv", ["selection", "--pools", "10", "--timed", "1", "--json", out[0], "--markdown", out[1]]
    )
    selection.main()
    table = Path(out[1]).read_text()
    assert table.strip() in capsys.readouterr().out
    assert "| small reference | tight | 10 of 10 |" in table
    assert "| `utility` |" in table
    assert len(json.loads(Path(out[0]).read_text())["gaps"]) == 2
    monkeypatch.setattr(ThroughputPolicy, "select", lambda *_: [])
    with pytest.raises(SystemExit):
        selection.main()
