"""The minimum cut against exhaustive search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_runtime.policies import build_policy, parse_policy
from ecospec_runtime.pool import Candidates, is_closed
from ecospec_train.closure import exact_set, net_worth
from tests.pools import exhaustive, make_candidates, make_profile


@st.composite
def pools(draw: st.DrawFn) -> Candidates:
    """Any tree of up to 14 nodes over two layers of eight experts."""
    n = draw(st.integers(0, 14))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    acceptance = [draw(st.floats(0, 1)) for _ in range(n)]
    masks = [draw(st.integers(0, 2**16 - 1)) for _ in range(n + 1)]
    return make_candidates(parents, acceptance, masks[1:], masks[0], layers=2, experts=8)


LAYERS = st.sampled_from([(), (1.0, 1.0), (0.2, 1.8), (0.0, 2.0)])  # what an expert of each layer costs
COSTS = st.sampled_from([0.0, 1e-12, 0.003, 0.05, 0.11, 0.7, 1e6])


@settings(max_examples=150, deadline=None)
@given(pools(), COSTS, COSTS, st.sampled_from([0.0, 0.2]), st.floats(0, 3), LAYERS)
def test_no_closed_set_is_worth_more(
    candidates: Candidates, expert_ms: float, token_ms: float, saving_ms: float, price: float, layers: tuple[float, ...]
) -> None:
    profile = make_profile(expert_ms, token_ms).model_copy(update={"plain_saving_ms": saving_ms, "layer_costs": layers})
    chosen = exact_set(candidates, profile, price)
    assert chosen == sorted(set(chosen))
    assert is_closed(chosen, candidates.pool.parents)
    best = exhaustive(candidates, price, profile)
    assert net_worth(candidates, chosen, profile, price) == pytest.approx(max(0.0, best - price * saving_ms), abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(pools(), st.sampled_from([0.003, 0.05, 0.11]), st.floats(0.2, 3), LAYERS)
def test_the_fast_rule_is_never_wrongly_empty(
    candidates: Candidates, expert_ms: float, price: float, layers: tuple[float, ...]
) -> None:
    profile = make_profile(expert_ms, 0.01).model_copy(update={"layer_costs": layers})
    exact = exact_set(candidates, profile, price)
    chosen = build_policy(parse_policy(f"throughput:price={price}")).select(candidates, profile, 0)
    best, found = (net_worth(candidates, nodes, profile, price) for nodes in (exact, chosen))
    assert found <= best + 1e-6
    assert chosen or best < 1e-3
