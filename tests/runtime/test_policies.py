"""Selection: closed whatever the input, within budget, faithful to its rule, and near the exact optimum."""

from __future__ import annotations

import functools
import math
from operator import or_
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.policies import POLICIES, PolicySpec, build_policy, parse_policies, parse_policy
from ecospec_runtime.policies.base import Pausing
from ecospec_runtime.policies.throughput import _Search
from ecospec_runtime.pool import Candidates, is_closed
from ecospec_train.closure import exact_set
from tests.pools import exhaustive, make_candidates, make_profile, random_candidates, worth

ODD = st.one_of(st.floats(0, 1), st.sampled_from([math.nan, math.inf, -math.inf, -0.5, 0.0, 1.0, 7.0, 1e-45, 3e38]))


@st.composite
def odd_candidates(draw: st.DrawFn) -> Candidates:
    """Any tree with acceptance values that no good model gives, and any predicted experts, also none."""
    n = draw(st.integers(0, 20))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    acceptance = [draw(ODD) for _ in range(n)]
    masks = [draw(st.integers(0, 2**24 - 1)) for _ in range(n + 1)]
    return make_candidates(parents, acceptance, masks[1:], masks[0], layers=3, experts=8)


SPECS = parse_policies(
    "off,confidence:budget=1,confidence:budget=5,ratio:budget=3,ratio:budget=9,epsilon=1e-6,ratio:budget=9,capacity=3,"
    "prefix,prefix:overlap=1,prefix:budget=2,utility,utility:budget=3,"
    "throughput,throughput:price=0,throughput:price=3,budget=2,throughput:capacity=3,penalty=5,throughput:budget=1"
)


def test_the_page_on_the_method_explains_every_parameter() -> None:
    page = (Path(__file__).parents[2] / "docs/method.md").read_text()
    rows = [line.split(" | ") for line in page.partition("| parameter |")[2].splitlines() if line.startswith("| `")]
    for name, policy in POLICIES.items():
        for parameter, field in policy.model_fields.items():
            _, whose, default, _ = next(row for row in rows if f"`{parameter}`" in row[0])
            assert f"`{name}`" in whose or whose == "all but `off`"
            assert ("none" if field.default is None else f"{field.default:g}") in default


@settings(max_examples=200, deadline=None)
@given(odd_candidates(), st.sampled_from(SPECS), st.sampled_from([0.0, 0.02, 1.0]))
def test_every_policy_chooses_a_closed_set_within_budget(candidates: Candidates, spec: PolicySpec, cost: float) -> None:
    policy, profile = build_policy(spec), make_profile(cost, cost / 2)
    chosen = policy.select(candidates, profile, context=5)
    assert chosen == sorted(set(chosen))
    assert all(type(i) is int and 0 <= i < len(candidates) for i in chosen)
    assert is_closed(chosen, candidates.pool.parents)
    assert len(chosen) <= (policy.parameters().get("budget") or len(candidates))
    assert chosen == policy.select(candidates, profile, context=5)


@settings(max_examples=60, deadline=None)
@given(odd_candidates(), st.integers(1, 25))
def test_fixed_budgets_are_used_up(candidates: Candidates, budget: int) -> None:
    for name in ("confidence", "ratio"):
        policy = build_policy(PolicySpec(name=name, parameters={"budget": budget}))
        assert len(policy.select(candidates, make_profile(), 0)) == min(budget, len(candidates))


def test_confidence_takes_the_most_probable_and_breaks_ties_by_index() -> None:
    candidates = make_candidates([-1, -1, 0, 0, 1, -1], [0.5, 0.3, 1.0, 0.5, 0.9, 0.25], [0] * 6, 0, 1, 4)
    chosen = {m: parse_and_select(f"confidence:budget={m}", candidates) for m in (1, 2, 3, 4, 5)}
    assert chosen == {1: [0], 2: [0, 2], 3: [0, 1, 2], 4: [0, 1, 2, 4], 5: [0, 1, 2, 3, 4]}


def test_ratio_follows_the_published_score() -> None:
    # Node 0 is likelier but needs two new experts; node 1 needs none. Under node 1 hangs what node 0 would also need.
    candidates = make_candidates([-1, -1, 1, 0], [0.6, 0.4, 0.5, 0.9], [0b1100, 0b0001, 0b1100, 0b110000], 0b0001, 1, 8)
    assert parse_and_select("ratio:budget=1,epsilon=1", candidates) == [1]  # 0.4/1 against 0.6/3
    assert parse_and_select("ratio:budget=2,epsilon=1", candidates) == [0, 1]  # 0.6/3 against 0.2/3
    assert parse_and_select("ratio:budget=3,epsilon=1", candidates) == [0, 1, 2]  # 0.2/1 (now covered) against 0.54/3
    assert parse_and_select("ratio:budget=1,epsilon=100", candidates) == [0]  # a large epsilon forgets the cost


def test_capacity_makes_an_overflowing_layer_dearer() -> None:
    candidates = make_candidates([-1, -1], [0.6, 0.5], [0b0110, 0b1000_0000], 0b0001_0001, layers=2, experts=4)
    assert parse_and_select("ratio:budget=1,epsilon=0.1", candidates) == [1]
    dear = make_candidates([-1, -1], [0.6, 0.5], [0b0010, 0b0110_0000], 0b0001_0001, layers=2, experts=4)
    assert parse_and_select("ratio:budget=1,epsilon=5", dear) == [0]
    assert parse_and_select("ratio:budget=1,epsilon=5,capacity=1", dear) == [0]
    tight = make_candidates([-1, -1], [0.6, 0.55], [0b0110, 0b0010_0010], 0b0001_0001, layers=2, experts=4)
    assert parse_and_select("ratio:budget=1,epsilon=1", tight) == [0]
    assert parse_and_select("ratio:budget=1,epsilon=1,capacity=2,penalty=9", tight) == [1]  # node 0 overflows layer 0
    assert parse_and_select("throughput:price=5", tight) == [0, 1]
    assert parse_and_select("throughput:price=5,capacity=2,penalty=9", tight) == [1]


def test_prefix_cuts_where_a_step_gives_most_per_time() -> None:
    """A node takes 0.01 ms and (1 - overlap) of half the plain step's 1 ms."""
    candidates = make_candidates([-1, 0, 0, -1], [0.9, 0.8, 0.1, 0.6], [], 0, 2, 8)
    profile = make_profile()
    assert parse_and_select("prefix:overlap=1", candidates, profile) == [0, 1, 2, 3]
    assert parse_and_select("prefix:overlap=0.4", candidates, profile) == [0, 1, 3]  # 3.22 / 1.93 is the best
    assert parse_and_select("prefix:overlap=0", candidates, profile) == [0, 1]  # 2.62 / 2.02, 3.22 / 2.53
    assert parse_and_select("prefix", candidates, profile.model_copy(update={"plain_saving_ms": 3.0})) == []


def test_two_nodes_that_pay_only_together_are_taken() -> None:
    shared = 0b111111
    candidates = make_candidates([-1, -1], [0.5, 0.45], [shared, shared], 0, 1, 8)
    profile = make_profile(expert_ms=0.1, token_ms=0.0)
    one = PolicySpec(name="throughput", parameters={"price": 1.0})
    assert build_policy(one).select(candidates, profile, 0) == [0, 1]  # 0.95 for 0.6, though neither pays 0.6 alone
    assert build_policy(one.model_copy(update={"parameters": {"price": 1.6}})).select(candidates, profile, 0) == []


@pytest.mark.parametrize("sizes", [(4, 16, 2), (2, 8, 1), (7, 48, 4)])
def test_throughput_is_close_to_the_exhaustive_optimum(sizes: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(7)
    gaps = []
    for _ in range(100):
        candidates = random_candidates(rng, int(rng.integers(2, 15)), *sizes, likeness=float(rng.uniform(0, 1)))
        price, profile = (
            float(rng.uniform(0.3, 3.0)),
            make_profile(float(rng.choice([0.3, 1.0, 3.0])) / (sizes[0] * sizes[2])),
        )
        best = exhaustive(candidates, price, profile)
        chosen = build_policy(PolicySpec(name="throughput", parameters={"price": price})).select(candidates, profile, 0)
        found = worth(candidates, chosen, price, profile)
        assert found <= best + 1e-6
        if best > 1e-3:
            assert chosen, "wrongly empty"
            gaps.append((best - found) / (1.0 + best))
    print(f"gap to the exhaustive optimum: mean {np.mean(gaps):.5f}, worst {np.max(gaps):.5f} over {len(gaps)} pools")
    assert len(gaps) > 40
    assert np.mean(gaps) <= 0.001
    assert np.max(gaps) <= 0.02


def test_throughput_is_close_to_the_minimum_cut_on_full_pools() -> None:
    rng = np.random.default_rng(8)
    gaps = []
    for _ in range(25):
        candidates = random_candidates(rng, 48, layers=7, experts=48, top_k=4, likeness=float(rng.uniform(0, 1)))
        price, profile = float(rng.uniform(0.5, 2.5)), make_profile(float(rng.choice([0.005, 0.02])))
        best = worth(candidates, exact_set(candidates, profile, price), price, profile)
        chosen = build_policy(PolicySpec(name="throughput", parameters={"price": price})).select(candidates, profile, 0)
        gaps.append((best - worth(candidates, chosen, price, profile)) / (1.0 + best))
    print(f"gap to the minimum cut: mean {np.mean(gaps):.5f}, worst {np.max(gaps):.5f}")
    assert min(gaps) > -1e-4
    assert np.mean(gaps) <= 0.001
    assert np.max(gaps) <= 0.02


def test_the_search_keeps_its_books() -> None:
    rng = np.random.default_rng(10)
    # Node 2 brings node 0 in; node 3, then reached through node 1, must not count node 0 a second time.
    shared = make_candidates([-1, 0, 0, 1], [0.3, 0.97, 0.94, 0.96], [0b1111, 0b11110000, 0b1111, 0], 0, 1, 8)
    for candidates in (shared, *(random_candidates(rng, 20) for _ in range(100))):
        cost = 0.1 if candidates is shared else float(rng.uniform(0.01, 0.05))
        parents, values = candidates.pool.parents.tolist(), candidates.reach.tolist()
        search = _Search(parents, values, candidates.masks, candidates.root_mask, cost, None)
        search.run(None)
        flags = [False] * len(candidates)
        covered, value, _ = search._sweep(flags, candidates.root_mask, 0.0)
        chosen = [i for i, flag in enumerate(flags) if flag]
        assert value == pytest.approx(worth(candidates, chosen, 1.0, make_profile(cost, 0.0)), abs=1e-5)
        assert covered == functools.reduce(or_, (candidates.masks[i] for i in chosen), candidates.root_mask)


def test_throughput_beats_the_others_on_its_own_objective() -> None:
    rng = np.random.default_rng(9)
    for _ in range(40):
        candidates, profile, price = random_candidates(rng, 30), make_profile(), 1.2
        own = build_policy(PolicySpec(name="throughput", parameters={"price": price})).select(candidates, profile, 0)
        for text in ("off", *(f"{name}:budget={m}" for name in ("confidence", "ratio") for m in (1, 2, 4, 8, 16))):
            other = worth(candidates, parse_and_select(text, candidates, profile), price, profile)
            assert worth(candidates, own, price, profile) >= other - 1e-6, text


def test_a_flat_charge_needs_no_prediction_and_asks_the_same_of_every_node() -> None:
    """price 1, token 0.01 ms, 2 layers * 1.5 experts * 0.05 ms: a node must be worth more than 0.16."""
    candidates = make_candidates([-1, 0, 1, -1], [0.9, 0.5, 0.3, 0.2], [], 0, 2, 8)
    profile = make_profile(expert_ms=0.05)
    policy = build_policy(parse_policy("throughput:price=1,node_experts=1.5"))
    assert not policy.needs_routing
    assert policy.select(candidates, profile, 0) == [0, 1, 3]  # V: 0.9, 0.45, 0.135, 0.2
    assert isinstance(policy, Pausing)
    assert policy.outlook(candidates, [0, 1, 3], profile, 0.2) == pytest.approx((0.9 + 0.45 + 0.2, 3 * 0.16 + 0.2))
    dear = build_policy(PolicySpec(name="throughput", parameters={"price": 9.0, "node_experts": 1.5}))
    assert isinstance(dear, Pausing)
    assert dear.outlook(candidates, [0, 1, 3], profile, 0.2) == policy.outlook(candidates, [0, 1, 3], profile, 0.2)
    assert policy.outlook(None, [], profile, 0.2) == pytest.approx((0.0, 0.2))
    honest = build_policy(parse_policy("throughput:price=1,node_experts=1.5,gate_experts=2.5"))
    assert isinstance(honest, Pausing)
    assert honest.select(candidates, profile, 0) == [0, 1, 3]
    assert honest.outlook(candidates, [0, 1, 3], profile, 0.2) == pytest.approx((0.9 + 0.45 + 0.2, 3 * 0.26 + 0.2))
    assert honest.outlook(None, [], profile, 0.2) == pytest.approx((0.0, 0.2))
    with pytest.raises(UserError, match="'capacity' needs predicted experts"):
        parse_policy("throughput:node_experts=1.5,capacity=4")
    with pytest.raises(UserError, match="'gate_experts' is for 'node_experts'"):
        parse_policy("throughput:gate_experts=1.5")


def test_a_set_must_earn_what_a_plain_step_saves() -> None:
    candidates = make_candidates([-1, 0], [0.9, 0.5], [0b10, 0b100], 0b1, 1, 8)
    policy, profile = build_policy(parse_policy("throughput:price=1")), make_profile(expert_ms=0.1)
    assert policy.select(candidates, profile, 0) == [0, 1]  # worth 1.35 - 2 * 0.11 = 1.13
    assert policy.select(candidates, profile.model_copy(update={"plain_saving_ms": 1.1}), 0) == [0, 1]
    assert policy.select(candidates, profile.model_copy(update={"plain_saving_ms": 1.2}), 0) == []


def test_without_predicted_routing_cost_aware_policies_refuse() -> None:
    blind = make_candidates([-1], [0.5], [], 0, 1, 4)
    assert parse_and_select("confidence", blind) == [0]
    for name in ("ratio", "throughput"):
        with pytest.raises(UserError, match=f"{name}.*predictor"):
            parse_and_select(name, blind)


def test_text_form_reads_back() -> None:
    for text in (
        "off",
        "confidence:budget=4,acceptance=raw,depth=4",
        "throughput:price=0.125,capacity=9,acceptance=head",
    ):
        spec = parse_policy(text)
        assert parse_policy(str(spec)) == spec
        assert build_policy(spec).parameters().items() >= spec.parameters.items()
    assert [
        s.name for s in parse_policies("off,confidence:budget=4,acceptance=raw, ratio,prefix,utility,throughput")
    ] == list(POLICIES)
    assert parse_policy("ratio").acceptance_kind("head") == "head"
    assert parse_policy("confidence").acceptance_kind("head") == "raw"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("topk", "off, confidence, ratio, prefix, utility, throughput"), ("ratio:budgets=3", "budget, epsilon"), ("ratio:budget=0", "budget"),
        ("ratio:budget", "key=value"), ("ratio:acceptance=best", "logistic"), ("ratio:depth=0", "depth"),
        ("confidence:budget=x", "budget"), ("throughput:price=nan", "price"), ("ratio:budget=1,budget=2", "twice"),
    ],
)  # fmt: skip
def test_mistakes_are_named(text: str, named: str) -> None:
    with pytest.raises(UserError, match=named) as error:
        parse_policy(text)
    assert "\n" not in str(error.value)


def parse_and_select(text: str, candidates: Candidates, profile: DeviceProfile | None = None) -> list[int]:
    return build_policy(parse_policy(text)).select(candidates, profile or make_profile(), 0)


def test_costs_of_another_targets_layers_are_refused() -> None:
    profile = make_profile().model_copy(update={"layer_costs": (0.5, 1.5)})
    profile.check_layers(2)
    make_profile().check_layers(7)
    with pytest.raises(UserError, match="layer_costs of 2 MoE layers, the target has 3"):
        profile.check_layers(3)


def test_a_dear_layers_expert_is_worth_less() -> None:
    """Two nodes alike but for the layer that their expert lies in."""
    candidates = make_candidates([-1, -1], [0.5, 0.5], [0b0001, 0b0001 << 8], 0, 2, 8)
    profile = make_profile(expert_ms=0.3, token_ms=0.0)
    for costs, chosen in (((), [0, 1]), ((0.5, 1.5), [0]), ((1.5, 0.5), [1])):
        unlike = profile.model_copy(update={"layer_costs": costs})
        policy = PolicySpec(name="throughput", parameters={"price": 1.2})
        assert build_policy(policy).select(candidates, unlike, 0) == chosen
        ratio = build_policy(PolicySpec(name="ratio", parameters={"budget": 1})).select(candidates, unlike, 0)
        assert ratio == (chosen or [0])[:1]
