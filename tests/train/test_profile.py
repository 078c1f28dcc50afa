"""The cost model recovers what generated its data; the experiment runs end to end on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecospec_runtime.config import PoolConfig
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.errors import UserError
from ecospec_runtime.target import Target
from ecospec_train.cost_model import PassCost, fit_pass_cost, layer_costs
from ecospec_train.passes import (
    ExpertClock,
    expert_popularity,
    prefilled,
    spread_experts,
    text_tokens,
    union_of,
)
from ecospec_train.profile import (
    Cell,
    ProfileConfig,
    base_profile,
    complaints,
    costs_by_layer,
    design,
    measure_passes,
    profile,
)
from ecospec_train.quiet import OtherLoad, wait_until_quiet


def test_cost_model_recovers_its_coefficients() -> None:
    rng = np.random.default_rng(0)
    n, context = rng.integers(1, 33, 80).astype(float), rng.choice([48.0, 160.0, 384.0], 80)
    union = np.minimum(28 * n, 330) * rng.uniform(0.3, 1.0, 80)
    ms = (2.0 + 0.1 * n + 0.05 * union + 0.002 * context) * rng.normal(1.0, 0.01, 80)
    cost = fit_pass_cost(n, union, context, ms)
    found = (cost.fixed, cost.per_token, cost.per_expert, cost.per_context)
    assert found == pytest.approx((2.0, 0.1, 0.05, 0.002), rel=0.15)
    assert cost.heldout_error < 0.02
    assert cost.heldout_r2 > 0.98


def test_cost_model_never_goes_negative_and_owns_up_to_a_bad_fit() -> None:
    rng = np.random.default_rng(1)
    n, union = rng.integers(1, 33, 60).astype(float), rng.integers(28, 300, 60).astype(float)
    falling = fit_pass_cost(n, union, np.full(60, 64.0), 10.0 + 0.05 * union - 0.1 * n)
    assert min(falling.fixed, falling.per_token, falling.per_expert, falling.per_context) >= 0.0
    assert falling.per_token == 0.0
    noise = fit_pass_cost(n, union, np.full(60, 64.0), rng.uniform(1.0, 20.0, 60))
    assert noise.heldout_error > 0.3


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_layers_that_cost_the_same_are_alike_and_others_form_groups(noise: float) -> None:
    rng = np.random.default_rng(3)
    n = np.repeat([2.0, 4.0, 8.0, 16.0], 3)
    union = 4 + np.tile([0.0, 0.5, 1.0], 4) * (np.minimum(4 * n, 48) - 4)

    def found(costs: list[float]) -> tuple[float, ...]:
        ms = 0.1 + 0.05 * n[:, None] + union[:, None] * np.array(costs)
        return layer_costs(n, union, ms * rng.normal(1.0, noise, ms.shape))

    assert found([0.1] * 7) == ()
    assert found([0.1, 0.11, 0.1, 0.12]) == ()
    assert found([0.1, 0.0, 0.1]) == found([0.0, 0.0]) == (), "an expert that costs nothing was not measured"
    mixed = found([0.1, 0.4, 0.1, 0.4, 0.1])
    assert mixed == pytest.approx([0.1 / 0.22, 0.4 / 0.22] * 2 + [0.1 / 0.22], rel=0.1)
    assert len(set(mixed)) == 2


@given(st.integers(1, 16), st.integers(1, 10), st.integers(0, 60), st.floats(0, 1))
def test_spread_experts_are_distinct_in_a_row_and_so_many_together(n: int, top_k: int, more: int, share: float) -> None:
    experts = top_k + more
    union = top_k + round(share * (min(n * top_k, experts) - top_k))
    order = np.random.default_rng(n).permutation(experts).tolist()
    rows = spread_experts(n, top_k, union, order)
    assert len(rows) == n
    assert all(len(set(row)) == len(row) == top_k for row in rows)
    assert set().union(*rows) == set(order[:union])


@pytest.fixture(scope="module")
def quick(tiny_target_dir: Path, tiny_drafter_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ProfileConfig:
    return ProfileConfig(
        target=str(tiny_target_dir), drafter=str(tiny_drafter_dir), out=tmp_path_factory.mktemp("p") / "profile.json",
        tokens=(1, 3, 6), contexts=(8, 24), repeats=3, max_seconds=5, allow_busy=True, pool=PoolConfig(depth=3, beam=2, width=4),
    )  # fmt: skip


def test_profile_runs_end_to_end(quick: ProfileConfig, capsys: pytest.CaptureFixture[str]) -> None:
    result = profile(quick)
    assert DeviceProfile.model_validate(json.loads(quick.out.read_text())) == result
    assert result.slug.endswith(f"-float32-{result.threads}t")
    assert result.plain_ms > 0
    assert result.draft_fixed_ms > 0
    assert result.select_ms > 0
    assert 0 < result.expert_share < 1
    assert min(result.fixed_ms, result.per_token_ms, result.per_expert_ms, result.per_context_ms) >= 0
    assert "prediction counts as free" in capsys.readouterr().err


def test_design_varies_unions_apart_from_rows_and_leaves_the_cache_alone(quick: ProfileConfig) -> None:
    target = Target.from_pretrained(quick.target)
    text = text_tokens(target, 200)
    cells, rng = design(quick), np.random.default_rng(0)
    assert {(c.context, c.n) for c in cells} == {(c, n) for c in (8, 24) for n in (1, 3, 6)}
    caches = {context: prefilled(target, text[:context]) for context in quick.contexts}
    for cell in cells:
        drawn = [cell.draw(text, rng) for _ in range(4)]
        assert len({tuple(rows.tokens) for rows in drawn}) > 1, "rows of its own for every pass"
        for rows in drawn:
            cell.unions.append(union_of(target, rows, caches[cell.context]))
            assert len(rows.tokens) == len(rows.parents) + 1 == cell.n
            assert len(caches[cell.context]) == cell.context
    slots = target.moe_layers * target.top_k
    assert all(c.union == slots for c in cells if c.n == 1)
    own = [c.union for c in cells if c.n == 6 and c.forced is None]
    assert all(slots <= union <= 6 * slots for union in own)


def test_forced_passes_read_what_they_shall(quick: ProfileConfig) -> None:
    target = Target.from_pretrained(quick.target)
    text, rng = text_tokens(target, 200), np.random.default_rng(0)
    cache, popularity_LE = prefilled(target, text[:8]), expert_popularity(target, text)
    assert popularity_LE.shape == (target.moe_layers, target.experts)
    np.testing.assert_allclose(popularity_LE.sum(axis=1), 1.0)
    forced = {
        cell.forced: cell for cell in design(quick) if cell.n == 3 and cell.context == 8 and cell.forced is not None
    }
    most = min(3 * target.top_k, target.experts)
    unions = [forced[share].layer_union(target) for share in sorted(forced)]
    assert target.top_k <= unions[0] < unions[-1] <= most
    for cell in forced.values():
        rows = cell.draw(text, rng)
        with cell.routing(target, popularity_LE, rng):
            assert union_of(target, rows, cache) == target.moe_layers * cell.layer_union(target)
    assert len(design(quick.model_copy(update={"tp": 2}))) < len(design(quick)), "parts of a target are not forced"


def test_a_layer_with_dearer_experts_is_found(quick: ProfileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on 1 ms for every expert that a layer reads, 4 ms in the last one."""
    target, seconds = Target.from_pretrained(quick.target), [0.0]
    monkeypatch.setattr(ExpertClock, "now", lambda self: seconds[0])

    def clocked(module: Any, cost: float) -> None:
        own = module.forward

        def forward(hidden: torch.Tensor, index: torch.Tensor, *rest: Any) -> torch.Tensor:
            seconds[0] += cost * len(index.unique())
            return own(hidden, index, *rest)  # type: ignore[no-any-return]

        module.forward = forward

    for module in target.expert_modules:
        clocked(module, 4e-3 if module is target.expert_modules[-1] else 1e-3)
    cells, plain = measure_passes(target, load_drafter(quick.drafter, target), text_tokens(target, 200), quick)
    assert plain[0] == pytest.approx(1.0 * target.top_k * (target.moe_layers + 3))
    assert all(len(layers) == target.moe_layers for cell in cells for layers in cell.layers_ms)
    mean = (target.moe_layers + 3) / target.moe_layers
    expected = [1 / mean] * (target.moe_layers - 1) + [4 / mean]
    assert costs_by_layer(target, cells) == pytest.approx(expected, rel=1e-3)


def test_a_plain_step_costs_what_was_measured(quick: ProfileConfig) -> None:
    target, cells = Target.from_pretrained(quick.target), [Cell(8, 1, "chain", [14]), Cell(8, 3, "chain", [30])]
    cost = PassCost(2.0, 0.5, 0.25, 0.125, 0.0, 1.0)
    config = quick.model_copy(update={"device": "cpu"})
    found = base_profile(target, cells, cost, (3.0, 5.0), config)
    assert (found.plain_ms, found.plain_saving_ms, found.expert_share) == pytest.approx((5.0, 2.0, 0.6))  # formula: 7
    assert found.pass_ms(1, 14, 8) == pytest.approx(5.0)
    assert found.pass_ms(3, 30, 8) == pytest.approx(2.0 + 1.5 + 7.5 + 1.0)
    slow = base_profile(target, cells, cost, (3.0, 9.0), config)
    assert slow.plain_saving_ms == 0.0


def test_every_round_has_plain_steps(quick: ProfileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes are compared with is measured beside them: their medians over the rounds."""
    rounds = iter([(1.0, 2.0), (7.0, 9.0), (3.0, 5.0)])
    monkeypatch.setattr("ecospec_train.profile.plain_steps", lambda *_: next(rounds))
    target = Target.from_pretrained(quick.target)
    _, plain = measure_passes(target, load_drafter(quick.drafter, target), text_tokens(target, 200), quick)
    assert plain == (3.0, 5.0)
    assert next(rounds, None) is None


def test_doubts_are_voiced(quick: ProfileConfig) -> None:
    target = Target.from_pretrained(quick.target)
    noisy = [Cell(8, n, "chain", [14 * n], [5.0, 9.0, 20.0, 6.0]) for n in (1, 2, 3)]
    cost = fit_pass_cost(np.ones(20), np.ones(20), np.ones(20), np.linspace(1, 30, 20))
    lines = complaints(
        base_profile(target, noisy, cost, (3.0, 5.0), quick.model_copy(update={"device": "cpu"})), noisy, blind=False
    )
    assert any("off by" in line for line in lines)
    assert any("busy" in line for line in lines)


def test_a_busy_machine_is_waited_for_and_then_refused(
    quick: ProfileConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cores = iter([2.0, 2.0, 0.0])
    monkeypatch.setattr("ecospec_train.quiet.SAMPLE", 0.0)
    monkeypatch.setattr("ecospec_train.quiet.OtherLoad.cores", lambda self: next(cores, 2.0))
    wait_until_quiet("remedy", patience=60.0)
    assert next(cores, None) is None, "it went on before the machine was quiet"
    assert capsys.readouterr().err.count("waiting for other processes") == 1
    before = quick.out.read_bytes() if quick.out.exists() else None
    monkeypatch.setattr("ecospec_train.quiet.PATIENCE", 0.0)
    with pytest.raises(UserError, match=r"other processes use 2\.0 of .*--allow-busy"):
        profile(quick.model_copy(update={"allow_busy": False}))
    assert before == (quick.out.read_bytes() if quick.out.exists() else None)


def test_a_profile_of_a_busy_machine_says_so(quick: ProfileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecospec_train.quiet.OtherLoad.cores", lambda self: 1.7)
    assert profile(quick).other_load == 1.7
    quiet = base_profile(Target.from_pretrained(quick.target), [Cell(8, 1, "chain", [14], [5.0])],
                         PassCost(2.0, 0.5, 0.25, 0.125, 0.0, 1.0), (3.0, 5.0), quick.model_copy(update={"device": "cpu"}))  # fmt: skip
    cells = [Cell(8, 1, "chain", [14], [5.0, 5.0, 5.0])]
    assert not complaints(quiet, cells, blind=False)
    assert any(
        "1.7 of" in line for line in complaints(quiet.model_copy(update={"other_load": 1.7}), cells, blind=False)
    )


def test_other_load_is_what_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 seconds of all processors, 2 of them our own, in 2 seconds: 1.5 cores."""
    busy, own, clock = iter([100.0, 105.0]), iter([10.0, 12.0]), iter([0.0, 2.0])
    monkeypatch.setattr("ecospec_train.quiet.busy_seconds", lambda: next(busy))
    monkeypatch.setattr("ecospec_train.quiet.own_seconds", lambda: next(own))
    load = OtherLoad(since=next(clock))
    monkeypatch.setattr("ecospec_train.quiet.time.monotonic", lambda: next(clock))
    assert load.cores() == pytest.approx(1.5)


def test_mistakes_are_named(quick: ProfileConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="folder"):
        profile(quick.model_copy(update={"out": tmp_path}))
    with pytest.raises(UserError, match="repeats"):
        ProfileConfig(target="t", drafter="d", out=tmp_path / "p.json", repeats=1)
    for tokens in ((), (1,), (2, 3), (-1, 1)):
        with pytest.raises(UserError, match="tokens"):
            ProfileConfig(target="t", drafter="d", out=tmp_path / "p.json", tokens=tokens)
