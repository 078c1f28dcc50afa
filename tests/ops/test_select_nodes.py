"""`select_nodes`: the reference is the host's policy, the Triton kernel is the reference, ties included."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from ecospec_kernels.bitsets import pack, unpack
from ecospec_kernels.select_nodes import fused, reference
from ecospec_kernels.select_nodes.reference import Rule, Selection
from ecospec_runtime.policies import PolicySpec, build_policy
from ecospec_runtime.pool import Candidates
from tests.ops.cases import poisoned
from tests.pools import make_candidates, make_profile, random_candidates, worth

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
VALUES = st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0, 0.3, 7.0, math.nan, math.inf, -math.inf, -0.5, 1e-45, 3e38])


def inputs(candidates: Candidates) -> Inputs:
    """The op's arguments for a pool on the host."""
    layers, experts = candidates.layers, candidates.experts
    bits = [[(mask >> b) & 1 for b in range(layers * experts)] for mask in (candidates.root_mask, *candidates.masks)]
    words = pack(torch.tensor(bits, dtype=torch.bool).view(-1, layers, experts))
    return (
        torch.from_numpy(candidates.reach), torch.from_numpy(candidates.pool.parents), words[1:].contiguous(),
        words[0].contiguous(),
    )  # fmt: skip


def chosen(selection: Selection) -> list[int]:
    """The nodes; asserts that the padding is as promised."""
    count = int(selection.number)
    assert (selection.nodes[count:] == -1).all() and (selection.parent_rows[count:] == -1).all()
    return selection.nodes[:count].tolist()


def assert_same(got: Selection, expected: Selection) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), (got, expected)


@st.composite
def pools(draw: st.DrawFn, most: int = 16) -> Candidates:
    """Few distinct values and few experts, so that scores tie often."""
    n = draw(st.integers(1, most))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    masks = [draw(st.sampled_from([0, 1, 2, 3, 0x111111, 0xABCDEF, 0xFFFFFF])) for _ in range(n + 1)]
    return make_candidates(parents, [draw(VALUES) for _ in range(n)], masks[1:], masks[0], layers=3, experts=8)


LIMITS = st.sampled_from([(None, 1.0), (2, 0.3), (1, 2.0), (5, 1e9)])


@settings(max_examples=150, deadline=None)
@given(pools(), st.integers(1, 20), st.sampled_from([1.0, 1e-6, 0.1]), LIMITS)
def test_ratio_is_the_policy(
    candidates: Candidates, budget: int, epsilon: float, limit: tuple[int | None, float]
) -> None:
    capacity, penalty = limit
    parameters = {"budget": budget, "epsilon": epsilon, "capacity": capacity, "penalty": penalty}
    expected = build_policy(PolicySpec(name="ratio", parameters=parameters)).select(candidates, make_profile(), 0)
    rule = reference.ratio(epsilon, candidates.layers, capacity, penalty)
    selection = reference.select_nodes(*inputs(candidates), rule, budget)
    assert chosen(selection) == expected
    row_of = {-1: 0} | {node: row for row, node in enumerate(expected, start=1)}
    parent_rows = [row_of[p] for p in candidates.pool.parents[expected].tolist()]
    assert selection.parent_rows[: len(expected)].tolist() == parent_rows


@settings(max_examples=15, deadline=None)
@given(pools(most=8), st.integers(1, 4), st.booleans(), LIMITS)
def test_the_kernel_is_the_reference(
    candidates: Candidates, budget: int, ratio: bool, limit: tuple[int | None, float]
) -> None:  # fmt: skip
    rule = reference.ratio(0.1, 3, *limit) if ratio else reference.throughput(0.05, 0.04, 0.1, *limit)
    arguments = (*inputs(candidates), rule, budget)
    assert_same(poisoned(fused.select_nodes, *arguments), reference.select_nodes(*arguments))


def random_inputs(n: int, layers: int, experts: int, top_k: int) -> Inputs:
    """A random pool; half of the nodes have the reach of an odd model, often above their parent's."""
    rng = np.random.default_rng(n + layers)
    reach, *rest = inputs(random_candidates(rng, n, layers, experts, top_k))
    odd = torch.from_numpy(rng.choice([0.0, 0.3, 0.6, 0.9, 2.0, math.nan, -math.inf], n)).float()
    return torch.where(torch.from_numpy(rng.random(n) < 0.5), odd, reach), *rest


@pytest.mark.parametrize(
    ("n", "layers", "experts", "budget"),
    [(1, 1, 6, 1), (3, 58, 60, 7), (63, 7, 128, 9), (100, 1, 256, 3), (128, 1, 60, 5), (9, 94, 6, 4), (5, 3, 384, 9)],
)
@pytest.mark.parametrize("limited", [False, True])
def test_sizes(n: int, layers: int, experts: int, budget: int, limited: bool) -> None:
    top_k = min(4, experts // 2)
    arguments = random_inputs(n, layers, experts, top_k)
    capacity, penalty = (top_k + 2, 0.7) if limited else (None, 1.0)
    for rule in (reference.ratio(1.0, layers, capacity, penalty),
                 reference.throughput(0.01, 0.02 / layers, 0.0, capacity, penalty)):  # fmt: skip
        got = poisoned(fused.select_nodes, *arguments, rule, budget)
        assert_same(got, reference.select_nodes(*arguments, rule, budget))
    assert 0 < int(got.number) <= min(n, budget)


@pytest.mark.parametrize("seed", range(30))
def test_throughput_is_a_lower_bound_of_the_policy(seed: int) -> None:
    """Every node is in the policy's own set, and the set is worth no more."""
    rng = np.random.default_rng(seed)
    candidates, profile = random_candidates(rng, int(rng.integers(1, 24)), likeness=rng.uniform(0.3, 1)), make_profile()
    price = float(rng.uniform(0.3, 2))
    rule = reference.throughput(price * profile.per_token_ms, price * profile.per_expert_ms)
    found = chosen(reference.select_nodes(*inputs(candidates), rule, len(candidates)))
    policy = build_policy(PolicySpec(name="throughput", parameters={"price": price}))
    best = policy.select(candidates, profile, 0)
    assert set(found) <= set(best)
    assert worth(candidates, found, price, profile) <= worth(candidates, best, price, profile) + 1e-9
    assert worth(candidates, found, price, profile) >= 0


def test_a_set_that_gains_less_than_a_plain_step_saves_is_dropped() -> None:
    candidates = make_candidates([-1, 0], [0.5, 0.5], [1, 1], 1, layers=1, experts=8)
    for saving, count in ((0.5, 2), (0.75, 0)):  # gains 0.5 + 0.25, exactly
        rule = reference.throughput(0.0, 0.1, saving)
        for op in (reference, fused):
            assert int(op.select_nodes(*inputs(candidates), rule, 2).number) == count


def test_a_child_is_worth_no_more_than_its_parent() -> None:
    reach, links = torch.tensor([0.5, 0.4, 0.9]), torch.tensor([-1, -1, 0])
    masks, root = torch.tensor([[[1]], [[1]], [[3]]]), torch.tensor([[1]])  # the last one needs one more expert
    for op in (reference, fused):
        assert chosen(op.select_nodes(reach, links, masks, root, reference.ratio(1.0, 1), 2)) == [0, 1]


@pytest.mark.parametrize(("capacity", "expected"), [(3, 0), (2, 1)])
def test_an_expert_costs_more_from_the_capacity_on(capacity: int, expected: int) -> None:
    """The root holds one expert of either layer: two more of the first layer, or one more of each."""
    reach, links = torch.tensor([0.6, 0.5]), torch.tensor([-1, -1])
    masks, root = torch.tensor([[[7], [0]], [[3], [3]]]), torch.tensor([[1], [1]])
    for op in (reference, fused):
        assert chosen(op.select_nodes(reach, links, masks, root, reference.ratio(0.01, 1, capacity, 2.0), 1)) == [
            expected
        ]


def test_padding_is_never_chosen_and_wide_words_are_the_same() -> None:
    reach, parents, masks, root = random_inputs(12, 3, 60, 4)
    parents[[2, 7]] = -2
    rule = reference.ratio(1.0, 3)
    expected = reference.select_nodes(reach, parents, masks, root, rule, 12)
    assert not {2, 7} & set(chosen(expected)) and int(expected.number) > 3
    assert torch.equal(pack(unpack(masks)), masks)
    assert_same(fused.select_nodes(reach, parents, masks, root, rule, 12), expected)
    wide = (reach, parents.int(), masks.view(torch.int64), root.view(torch.int64), rule, 12)
    assert_same(fused.select_nodes(*wide), expected)
    assert_same(reference.select_nodes(*wide), expected)


def test_the_price_can_change_between_replays() -> None:
    arguments = random_inputs(12, 3, 60, 4)
    rule = reference.throughput(0.01, 0.002)
    many = int(fused.select_nodes(*arguments, rule, 12).number)
    rule.parameters[:2] *= 100
    assert int(fused.select_nodes(*arguments, rule, 12).number) < many


def test_bad_arguments_are_refused_before_a_launch() -> None:
    reach, parents, masks, root = random_inputs(4, 3, 60, 4)
    rule = reference.ratio(1.0, 3)
    cases: list[tuple[str, tuple[object, ...]]] = [
        (r"parents has shape \[3\], not \[4\]", (reach, parents[:3], masks, root, rule, 2)),
        ("reach is float64, not float32", (reach.double(), parents, masks, root, rule, 2)),
        ("masks is float32, not int32 or int64", (reach, parents, masks.float(), root, rule, 2)),
        (r"root has shape \[2, 2\], not \[3, 2\]", (reach, parents, masks, root[:2], rule, 2)),
        ("root is int64, not int32", (reach, parents, masks, root.long(), rule, 2)),
        ("masks is not contiguous", (reach, parents, masks.mT.contiguous().mT, root, rule, 2)),
        ("root lies on meta, the first argument on cpu", (reach, parents, masks, root.to("meta"), rule, 2)),
        ("budget 0", (reach, parents, masks, root, rule, 0)),
        ("the rule is 'best'", (reach, parents, masks, root, Rule("best", rule.parameters, False), 2)),  # type: ignore[arg-type]
    ]
    for message, arguments in cases:
        for op in (reference, fused):
            with pytest.raises(ValueError, match=f"select_nodes: .*{message}"):
                op.select_nodes(*arguments)
    with pytest.raises(ValueError, match="more than 128 nodes"):
        fused.select_nodes(reach, parents, masks, root, rule, 129)
    wide = torch.zeros(4, 1, 9, dtype=torch.int64)
    with pytest.raises(ValueError, match="more than 16 int32 words a layer"):
        fused.select_nodes(reach, parents, wide, wide[0], rule, 2)


@pytest.mark.parametrize("parent", [3, 16, 2**32, 2**32 - 1, -(2**32)])
def test_a_node_whose_parent_is_no_node_is_padding(parent: int) -> None:
    """Also a parent that the kernel's own padding has, or one that 32 bits would make another."""
    masks = torch.zeros(3, 1, 1, dtype=torch.int32)
    pool = torch.tensor([0.9, 0.8, 0.7]), torch.tensor([-1, parent, 0]), masks, masks[0]
    for op in (fused, reference):
        found = op.select_nodes(*pool, reference.ratio(1.0, 1), 3)
        assert found.nodes.tolist() == [0, 2, -1], op.__name__
        assert found.parent_rows.tolist() == [0, 1, -1]


@pytest.mark.parametrize(("make", "arguments", "message"), [
    (reference.ratio, {"epsilon": 0.0}, "epsilon 0.0 times 3 layers must be above 0"),
    (reference.ratio, {"epsilon": -1.0}, "epsilon -1.0 times 3 layers must be above 0"),
    (reference.ratio, {"epsilon": math.nan}, "epsilon nan times 3 layers must be above 0"),
    (reference.ratio, {"layers": 0}, "epsilon 1.0 times 0 layers must be above 0"),
    (reference.ratio, {"epsilon": math.inf}, "must be finite"),
    (reference.ratio, {"capacity": 1.5}, "the capacity is 1.5, not a whole number from 1 to"),
    (reference.ratio, {"capacity": 0}, "the capacity is 0, not"),
    (reference.ratio, {"capacity": math.nan}, "the capacity is nan, not"),
    (reference.ratio, {"capacity": 2**31}, "the capacity is 2147483648, not"),
    (reference.ratio, {"capacity": 1, "penalty": math.inf}, "penalty inf must be finite"),
    (reference.ratio, {"capacity": 1, "penalty": -1.0}, "penalty -1.0 must be finite, the penalty 0 or more"),
    (reference.throughput, {"token_cost": math.nan}, "must be finite"),
    (reference.throughput, {"saving": -math.inf}, "must be finite"),
    (reference.throughput, {"capacity": 1.5}, "the capacity is 1.5, not"),
])  # fmt: skip
def test_a_rule_that_could_not_compare_two_nodes_is_refused(make: Any, arguments: dict[str, Any], message: str) -> None:
    usual = {"epsilon": 1.0, "layers": 3} if make is reference.ratio else {"token_cost": 0.1, "expert_cost": 0.1}
    assert make(**usual, capacity=3.0).parameters[3] == 3 and not make(**usual).limited
    with pytest.raises(ValueError, match=f"^{make.__name__}: .*{message}"):
        make(**usual | arguments)
