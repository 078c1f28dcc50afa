"""Replay against an independent, slow simulation, and the search for the price of `throughput`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.policies import POLICIES as NAMES
from ecospec_runtime.policies import build_policy, parse_policy
from ecospec_runtime.pool import Candidates, Pool
from ecospec_runtime.predictor import Prediction
from ecospec_runtime.scoring import Scorer
from ecospec_train import replay as replay_module
from ecospec_train.replay import ReplayRows, load_rows, replay, replay_at_best_price
from ecospec_train.replay_pools import CutPools
from ecospec_train.traces import Traces, TraceShard
from tests.train.invented import NearlyRightPredictor, make_profile
from tests.train.synthetic import EXPERTS, LAYERS, TOP_K, write_traces


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["greedy", "sampled"])
def traces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Traces:
    folder = tmp_path_factory.mktemp("replay")
    return Traces(write_traces(folder, prompts=8, positions=12, temperature=request.param, shard_rows=50))


@pytest.fixture(scope="module")
def rows(traces: Traces) -> ReplayRows:
    return load_rows(traces, NearlyRightPredictor())  # type: ignore[arg-type]


POLICIES = [
    "off", "confidence:budget=3", "confidence:budget=6,acceptance=temperature,depth=2", "confidence:budget=5,acceptance=head",
    "ratio:budget=4,epsilon=0.5,acceptance=logistic", "prefix:overlap=0.6,depth=2", "ratio:budget=6,depth=1", "throughput:price=0.6,pause=0",
    "throughput:price=0.4,acceptance=raw,depth=2,capacity=5,pause=0", "confidence:budget=6,min_reach=0.1", "ratio:budget=2,acceptance=head",
    "throughput:price=0.5,acceptance=logistic,min_reach=0.3,pause=0",
]  # fmt: skip


LAYER_COSTS = tuple(2.0 * (1 + layer) / (1 + LAYERS) for layer in range(LAYERS))  # of an expert; their mean is 1


def smaller(pool: Pool, depth: int, min_reach: float) -> tuple[Pool, list[int]]:
    """The pool without its deeper levels and less likely nodes, node by node; and which nodes are left."""
    reach = np.exp(pool.log_probs.astype(np.float64))
    for i in range(len(pool)):
        reach[i] *= reach[pool.parents[i]] if pool.parents[i] >= 0 else 1.0
    keep = [i for i in range(len(pool)) if pool.depths[i] <= depth and reach[i] >= min_reach]
    columns = ("tokens", "depths", "ranks", "log_probs", "state_rows")
    parents = [keep.index(pool.parents[i]) if pool.parents[i] >= 0 else -1 for i in keep]
    pool = replace(pool, parents=np.array(parents, np.int64), **{name: getattr(pool, name)[keep] for name in columns})
    return pool, keep


def slow_steps(
    traces: Traces, text: str, profile: DeviceProfile, oracle: bool
) -> Iterator[tuple[int, int, int, float]]:
    """(emitted, nodes, experts, ms) of each pass, straight from the columns with sets and recursion."""
    spec = parse_policy(text)
    policy, kind = build_policy(spec), spec.acceptance_kind("head")
    scorer = Scorer(NearlyRightPredictor(), kind, LAYERS, EXPERTS)  # type: ignore[arg-type]
    embed = traces.embedding()
    positions: dict[tuple[int, int], tuple[TraceShard, int]] = {}
    for shard in traces.shards():
        positions |= {(int(shard.prompt_id[r]), int(shard.position[r])): (shard, r) for r in range(len(shard))}
    for prompt in sorted({p for p, _ in positions}):
        position = 0
        while (prompt, position) in positions:
            shard, row = positions[prompt, position]
            depth = min(spec.depth or 3, getattr(policy, "budget", None) or 3, 3)
            pool, keep = smaller(shard.pool(row), depth, spec.min_reach or 0.0)
            verified = [0, *(i + 1 for i in keep)]
            routing, next_tokens = shard.routing_of(row)[verified], shard.next_tokens_of(row)[verified]
            experts = [{(layer, e) for layer in range(LAYERS) for e in node[layer].tolist()} for node in routing]
            chosen: set[int] = set()
            if len(pool):
                candidates = scorer.score(pool, embed, True)
                if oracle:
                    candidates = with_true_routing(candidates, experts)
                chosen = set(policy.select(candidates, profile, int(shard.context[row])))

            def follow(at: int, pool: Pool = pool, chosen: set[int] = chosen, wanted: np.ndarray = next_tokens) -> int:
                hit = [i for i in chosen if pool.parents[i] == at and pool.tokens[i] == wanted[at + 1]]
                return 1 + (follow(hit[0]) if hit else 0)

            used = set().union(experts[0], *(experts[i + 1] for i in chosen))
            reads = sum(profile.layer_costs[layer] for layer, _ in used) if profile.layer_costs else len(used)
            ms = 0.2 + 0.01 * (1 + len(chosen)) + 0.05 * reads + 1e-4 * int(shard.context[row])
            if policy.drafts:
                grown = [d for d in range(1, depth + 1) if d == 1 or (pool.depths == d - 1).any()]
                expanded = sum(min(2, int((pool.depths == d - 1).sum())) for d in grown[1:])
                ms += 0.03 + 0.02 * (len(grown) - 1) + 0.0005 * expanded + 0.004
                if len(pool) and policy.needs_routing:
                    ms += 0.01 + 0.0005 * len(pool)
                elif len(pool) and kind == "head":
                    ms += 0.004 + 0.0002 * len(pool)
            emitted = follow(-1)
            yield emitted, len(chosen), len(used), ms
            position += emitted


def with_true_routing(candidates: Candidates, experts: list[set[tuple[int, int]]]) -> Candidates:
    masks = [sum(1 << (layer * EXPERTS + e) for layer, e in used) for used in experts]
    return replace(candidates, masks=masks[1 : len(candidates) + 1], root_mask=masks[0])


UNLIKE = [
    ("ratio:budget=4", LAYER_COSTS),
    ("throughput:price=0.6,pause=0", LAYER_COSTS),
    ("prefix:overlap=0.6", LAYER_COSTS),
]


@pytest.mark.parametrize("oracle", [False, True])
@pytest.mark.parametrize(("text", "layer_costs"), [*((text, ()) for text in POLICIES), *UNLIKE])
def test_replay_equals_a_slow_simulation(
    traces: Traces, rows: ReplayRows, text: str, layer_costs: tuple[float, ...], oracle: bool
) -> None:
    profile = make_profile().model_copy(update={"layer_costs": layer_costs})
    steps = np.array(list(slow_steps(traces, text, profile, oracle)))
    result = replay(parse_policy(text), rows, profile, oracle)
    assert result.tokens == steps[:, 0].sum()
    assert result.passes == len(steps)
    assert result.nodes == pytest.approx(steps[:, 1].mean())
    assert result.experts_per_layer == pytest.approx(steps[:, 2].mean() / LAYERS)
    assert result.ms == pytest.approx(steps[:, 3].sum())
    assert result.tokens_per_ms == pytest.approx(steps[:, 0].sum() / steps[:, 3].sum())
    assert result.accept_length == pytest.approx(steps[:, 0].mean())


def test_off_emits_one_token_per_position(rows: ReplayRows) -> None:
    result = replay(parse_policy("off"), rows, make_profile())
    assert (result.tokens, result.passes, result.draft_share) == (len(rows), len(rows), 0.0)
    assert result.experts_per_layer == TOP_K


def test_speculation_accepts_something(rows: ReplayRows) -> None:
    assert replay(parse_policy("confidence:budget=8"), rows, make_profile()).accept_length > 1.2


def test_price_by_dinkelbach_beats_a_grid(tmp_path: Path) -> None:
    rows = load_rows(Traces(write_traces(tmp_path, 30, 12, temperature=1.0)), NearlyRightPredictor())  # type: ignore[arg-type]
    profile = make_profile()
    spec, best = replay_at_best_price(parse_policy("throughput:pause=0"), rows, profile)
    rates = {p: replay(parse_policy(f"throughput:pause=0,price={p}"), rows, profile).tokens_per_ms
             for p in np.linspace(0.2, 3.0, 12) / profile.plain_ms}  # fmt: skip
    assert best.tokens_per_ms >= 0.98 * max(rates.values()) > 1.1 * min(rates.values())
    assert replay(spec, rows, profile) == best
    assert spec.parameters["price"] == pytest.approx(best.tokens_per_ms, rel=0.1)


def test_the_gate_is_told_what_nodes_really_add(rows: ReplayRows) -> None:
    """However little a policy charges them: it stops at what drafting loses, where every pass costs two plain steps."""
    profile = make_profile(per_expert_ms=0.3)
    charged = "throughput:acceptance=raw,node_experts=0.01"
    spec, found = replay_at_best_price(parse_policy(charged), rows, profile)
    seen = replay(parse_policy(f"{charged},pause=0,price={1 / profile.plain_ms}"), rows, profile)
    assert spec.parameters["gate_experts"] == pytest.approx((seen.experts_per_layer - TOP_K) / seen.nodes, rel=0.2)
    assert replay(spec, rows, profile) == found
    blind = spec.model_copy(update={"parameters": {**spec.parameters, "gate_experts": None}})
    assert replay(blind, rows, profile).drafts > found.drafts


def test_without_predictor_only_raw_can_be_replayed(traces: Traces) -> None:
    bare = load_rows(traces, None)
    assert replay(parse_policy("confidence:budget=2"), bare, make_profile()).passes > 0
    with pytest.raises(UserError, match="acceptance=head needs a predictor"):
        replay(parse_policy("confidence:acceptance=head"), bare, make_profile())
    with pytest.raises(UserError, match="predictor"):
        replay(parse_policy("throughput"), bare, make_profile())


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_can_be_replayed_with_the_experts_really_used(traces: Traces, rows: ReplayRows, name: str) -> None:
    spec, profile = parse_policy(f"{name}:acceptance=raw"), make_profile(per_expert_ms=0.02)
    oracle = replay(spec, rows, profile, oracle=True)
    assert replay(spec, load_rows(traces, None), profile, oracle=True) == oracle, "no prediction is looked at"
    if not build_policy(spec).needs_routing:
        assert replay(spec, rows, profile) == oracle


def test_prompts_are_chosen_whole(traces: Traces) -> None:
    some = load_rows(traces, None, prompts={1, 4, 5, 7}, max_positions=20)
    assert [len(prompt) for prompt in some.prompts] == [12, 12]
    with pytest.raises(UserError, match="no positions"):
        load_rows(traces, None, prompts={99})


def test_shards_are_scored_once_and_held_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: neither scoring nor replay keeps what it has left behind, nor does the folder."""
    opened: list[weakref.ref[object]] = []
    most = predicted = 0

    def watched(make: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal most
            made = make(*args, **kwargs)
            opened.append(weakref.ref(made))
            most = max(most, sum(one() is not None for one in opened))
            return made

        return wrapper

    class Counting(NearlyRightPredictor):
        def predict(self, pool: Pool, embed: object, routing: bool = True) -> Prediction:
            nonlocal predicted
            predicted += 1
            return super().predict(pool, embed)

    monkeypatch.setattr(Traces, "shard", watched(Traces.shard))
    monkeypatch.setattr(replay_module, "CutPools", watched(CutPools))
    traces = Traces(write_traces(tmp_path / "traces", prompts=8, positions=5, shard_rows=5))
    (tmp_path / "out").mkdir()
    rows = load_rows(traces, Counting(), folder=tmp_path / "out")  # type: ignore[arg-type]
    assert len(opened) == len(traces.manifest.shards) == 8
    for text in POLICIES[:4]:
        replay(parse_policy(text), rows, make_profile())
    assert len(opened) == 5 * 8
    assert most <= 2, "the one before is let go when the next is there"
    assert predicted == len(rows) == 40
    assert list((tmp_path / "out").iterdir())
    alone = replace(rows, prompts=rows.prompts[3:4])
    del rows
    assert replay(parse_policy("off"), alone, make_profile()).tokens == 5, "the files stay while any prompt is there"
    del alone
    assert not list((tmp_path / "out").iterdir())


def test_sharding_does_not_matter(rows: ReplayRows, traces: Traces, tmp_path: Path) -> None:
    temperature, profile = traces.manifest.temperature, make_profile()
    one = Traces(write_traces(tmp_path, prompts=8, positions=12, temperature=temperature, shard_rows=1000))
    whole = load_rows(one, NearlyRightPredictor())  # type: ignore[arg-type]
    assert len({prompt.shard for prompt in whole.prompts}) == 1 < len({prompt.shard for prompt in rows.prompts})
    for spec in map(parse_policy, POLICIES):
        result = replay(spec, rows, profile)
        assert replay(spec, whole, profile) == result
        parts = [replay(spec, replace(rows, prompts=[prompt]), profile) for prompt in rows.prompts]
        assert sum(part.passes for part in parts) == result.passes


def test_foreign_or_sparse_traces_are_refused(traces: Traces, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="predictor was fitted for"):
        load_rows(traces, NearlyRightPredictor("x" * 64))  # type: ignore[arg-type]
    sparse = Traces(write_traces(tmp_path, prompts=2, positions=2))
    sparse.manifest.stride = 4
    with pytest.raises(UserError, match="--stride 1"):
        load_rows(sparse, None)


def test_a_step_pays_for_as_much_of_the_predictor_as_it_runs() -> None:
    """And no less than it took to run all of it where acceptance alone was not timed."""
    profile = make_profile(predict_ms=0.2, predict_node_ms=0.01, accept_ms=0.05, accept_node_ms=0.001)
    assert profile.predicting_ms(10, "whole") == pytest.approx(0.3)
    assert profile.predicting_ms(10, "acceptance") == pytest.approx(0.06)
    assert profile.predicting_ms(10, "none") == profile.predicting_ms(0, "whole") == 0
    older = profile.model_copy(update={"accept_ms": None, "accept_node_ms": None})
    assert older.predicting_ms(10, "acceptance") == pytest.approx(0.3)
    assert profile.draft_ms(2, 3, 10, "whole") - profile.draft_ms(2, 3, 10, "none") == pytest.approx(0.3)
