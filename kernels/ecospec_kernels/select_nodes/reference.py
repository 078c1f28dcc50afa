"""`select_nodes`: grow a verification set along the frontier, the best node under the experts covered so far first.

A node is open once its parent is in the set. V is its reach, made safe: a value that is NaN, infinite or negative counts
as 0, and none exceeds its parent's or 1. With reads(U) = |U| + penalty * sum over layers of max(0, |U_l| - capacity) and
U the experts that root and set need, new(v) = reads(U | experts of v) - reads(U). Equal scores: the lower index.

- `ratio` adds the open node of largest V / (new + base), until `budget` nodes are in the set. Same choice as
  `ecospec_runtime/policies/ratio.py`, with base = its epsilon * layers, where all layers' experts cost the same.
- `throughput` adds the open node of largest gain V - base - expert_cost * new, base and expert_cost being the price of
  time (tokens per ms) times a token's and an expert's ms, while the gain is above 0. The set is then kept if its gains
  sum to more than `saving`, the price times what a plain step saves (`DeviceProfile.plain_saving_ms`), else empty.
  This is the first part of `_Search._sweep` in `ecospec_runtime/policies/throughput.py`, on nodes instead of paths. The
  host's search also takes a path that pays only as a whole, tries paths on credit, and cuts to a budget by dropping
  leaves; none of that is done here. With unlimited capacity and a budget of n this set is a subset of what that sweep
  takes, which is a subset of an optimal set: its worth is a lower bound of the policy's. With a budget or a capacity
  below that, neither bounds the other.

Legend of shapes: n nodes, L MoE layers, W words of a set of experts (see `bitsets`), m the budget.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ecospec_kernels.bitsets import unpack
from ecospec_kernels.checks import IDS, first, refuse, wrong

UNLIMITED = 2**30  # a capacity that no layer reaches


class Rule(NamedTuple):
    """What the score is. A captured graph reads `parameters` anew at each replay: write into it to change the price.

    `ratio` and `throughput` make rules and say which numbers they take; nothing later looks at what lies on a device.
    """

    kind: Literal["ratio", "throughput"]
    parameters: Tensor  # [5] float64: base, expert_cost, saving, capacity, penalty
    limited: bool  # False: capacity is not reached and need not be looked at


class Selection(NamedTuple):
    """Outputs of fixed size; entries from `number` on are -1."""

    nodes: Tensor  # [m] int32 chosen nodes, ascending
    parent_rows: Tensor  # [m] int32 row of each one's parent in the pass: 0 the root, i + 1 the i-th of `nodes`
    number: Tensor  # [1] int32 chosen nodes


def _rule(
    kind: Literal["ratio", "throughput"], costs: list[float], capacity: int | None, penalty: float, device: torch.device | str
) -> Rule:  # fmt: skip
    """ValueError for numbers by which two nodes could not be compared; a captured graph looks at none of them."""
    if not all(map(math.isfinite, costs)) or not 0 <= penalty < math.inf:
        raise ValueError(f"{kind}: costs {costs} and penalty {penalty} must be finite, the penalty 0 or more")
    if capacity is not None and not (1 <= capacity <= UNLIMITED and capacity == int(capacity)):
        raise ValueError(f"{kind}: the capacity is {capacity}, not a whole number from 1 to {UNLIMITED}")
    values = [*costs, UNLIMITED if capacity is None else capacity, penalty]
    return Rule(kind, torch.tensor(values, dtype=torch.float64, device=device), capacity is not None)


def ratio(
    epsilon: float, layers: int, capacity: int | None = None, penalty: float = 1.0, device: torch.device | str = "cpu"
) -> Rule:
    """The rule of `RatioPolicy` with these parameters. ValueError as there, so for an epsilon of 0: a node that nothing needs
    would have a score of 0 / 0."""
    if not epsilon * layers > 0:
        raise ValueError(f"ratio: epsilon {epsilon} times {layers} layers must be above 0")
    return _rule("ratio", [epsilon * layers, 0.0, 0.0], capacity, penalty, device)


def throughput(
    token_cost: float, expert_cost: float, saving: float = 0.0, capacity: int | None = None, penalty: float = 1.0,
    device: torch.device | str = "cpu",
) -> Rule:  # fmt: skip
    """The frontier form of `ThroughputPolicy`: costs in expected tokens, that is price times ms. ValueError as there."""
    return _rule("throughput", [token_cost, expert_cost, saving], capacity, penalty, device)


def invalid(
    reach_n: Tensor, parents_n: Tensor, masks_nLW: Tensor, root_LW: Tensor, rule: Rule, budget: int
) -> str | None:
    """What is wrong with the arguments."""
    if reach_n.dim() != 1 or masks_nLW.dim() != 3:
        return f"reach has shape {list(reach_n.shape)}, masks {list(masks_nLW.shape)}; they must be [n] and [n, layers, words]"
    n, (_, layers, words) = reach_n.size(0), masks_nLW.shape
    if rule.kind not in ("ratio", "throughput"):
        return f"the rule is '{rule.kind}', not ratio or throughput"
    if budget < 1 or n < 1 or layers < 1 or words < 1:
        return f"budget {budget}, {n} nodes, {layers} layers and {words} words: each must be at least 1"
    return first(
        wrong("reach", reach_n, (n,), (torch.float32,), reach_n),
        wrong("parents", parents_n, (n,), IDS, reach_n),
        wrong("masks", masks_nLW, (n, layers, words), IDS, reach_n),
        wrong("root", root_LW, (layers, words), (masks_nLW.dtype,), reach_n),
        wrong("the rule's parameters", rule.parameters, (5,), (torch.float64,), reach_n),
    )


def _reads(members: Tensor, capacity: Tensor, penalty: Tensor) -> Tensor:
    """Bool `[..., L, bits]` -> float64 `[...]`; see `policies.base.ExpertBuffer`."""
    held_L = members.sum(-1)
    return held_L.sum(-1) + penalty * (held_L - capacity).clamp(min=0).sum(-1)


def select_nodes(
    reach_n: Tensor, parents_n: Tensor, masks_nLW: Tensor, root_LW: Tensor, rule: Rule, budget: int
) -> Selection:  # fmt: skip
    """Choose up to `budget` nodes. `reach` float32; `parents`: a lower index, -1 for the root, outside -1..n-1 for padding.

    `masks` and `root`: predicted experts, int32 or int64 words.
    """
    refuse("select_nodes", invalid(reach_n, parents_n, masks_nLW, root_LW, rule, budget))
    parents_n = torch.where(parents_n < len(reach_n), parents_n, -2)
    base, expert_cost, saving, capacity, penalty = rule.parameters.unbind()
    value_n = torch.where((reach_n >= 0) & (reach_n < torch.inf), reach_n, 0.0).double().clamp(max=1.0)
    masks, covered = unpack(masks_nLW), unpack(root_LW)
    open_n = parents_n == -1
    chosen_n = torch.zeros_like(open_n)
    total = torch.zeros_like(base)
    for _ in range(min(budget, len(reach_n))):
        new_n = _reads(masks | covered, capacity, penalty) - _reads(covered, capacity, penalty)
        score_n = value_n / (new_n + base) if rule.kind == "ratio" else value_n - base - expert_cost * new_n
        score_n = score_n.masked_fill(~open_n, -torch.inf)
        best = score_n.argmax(keepdim=True)  # the first of equal ones
        taken = score_n[best] > (-torch.inf if rule.kind == "ratio" else 0.0)
        total = total + torch.where(taken, score_n[best], 0.0)
        added_n = torch.zeros_like(open_n).index_fill(0, best, True) & taken
        chosen_n |= added_n
        covered = covered | (masks & added_n[:, None, None]).any(0)
        child_n = (parents_n == best) & taken
        value_n = torch.where(child_n, torch.minimum(value_n, value_n[best]), value_n)
        open_n = (open_n | child_n) & ~added_n
    if rule.kind == "throughput":
        chosen_n &= total > saving
    return _packed(chosen_n, parents_n, budget)


def _packed(chosen_n: Tensor, parents_n: Tensor, budget: int) -> Selection:
    """Chosen nodes in front, in order."""
    n = len(chosen_n)
    row_n = chosen_n.cumsum(0)  # of a chosen node in the pass
    row_of_parent_n = torch.where(parents_n < 0, 0, row_n[parents_n.clamp(min=0).long()])
    place_n = torch.where(chosen_n, row_n - 1, budget)
    blank = torch.full((budget + 1,), -1, device=chosen_n.device)
    nodes = blank.scatter(0, place_n, torch.arange(n, device=chosen_n.device))
    return Selection(nodes[:-1].int(), blank.scatter(0, place_n, row_of_parent_n)[:-1].int(), row_n[-1:].int())
