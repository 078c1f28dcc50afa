"""`group_router`: which experts DeepSeek-V3's router chooses, and with which weights, given its logits.

Scores are sigmoids. What is chosen by is score plus a bias: first the groups whose two best experts sum highest, then the best
experts of those. Weights are the chosen scores without the bias, divided by their sum if asked for, times a factor.
Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.1.2.

Shapes: n rows, E experts, K chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ecospec_kernels.checks import first, refuse, wrong


class Rule(NamedTuple):
    """How many are chosen, and what becomes of their scores."""

    top_k: int
    groups: int  # E is a multiple, twice the groups at least
    kept_groups: int
    normalise: bool
    factor: float


def invalid(logits_nE: Tensor, bias_E: Tensor, rule: Rule) -> str | None:
    """What is wrong with the arguments."""
    problem = first(
        wrong("logits", logits_nE, (None, None), (torch.float32,), logits_nE),
        wrong("bias", bias_E, (logits_nE.shape[-1],), (torch.float32,), logits_nE),
    )
    experts = logits_nE.shape[-1]
    if problem is None and (rule.groups < 1 or experts % rule.groups or experts < 2 * rule.groups):
        problem = f"{experts} experts are no {rule.groups} groups of two or more"
    if problem is None and not (1 <= rule.kept_groups <= rule.groups and 1 <= rule.top_k <= experts):
        problem = f"{rule.top_k} of {experts} experts, {rule.kept_groups} of {rule.groups} groups cannot be chosen"
    return problem


def group_router(logits_nE: Tensor, bias_E: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """fp32 logits and bias -> weights `[n, K]` fp32 and expert ids `[n, K]` int64, the preferred expert first; NaN is preferred.

    ValueError for what `invalid` names.
    """
    refuse("group_router", invalid(logits_nE, bias_E, rule))
    scores = logits_nE.sigmoid()
    choice = (scores + bias_E).unflatten(-1, (rule.groups, -1))
    kept = choice.topk(2, dim=-1).values.sum(-1).topk(rule.kept_groups, dim=-1).indices
    hidden = torch.ones(choice.shape[:-1], dtype=torch.bool, device=choice.device).scatter_(-1, kept, False)
    index = choice.masked_fill(hidden[..., None], -torch.inf).flatten(-2).topk(rule.top_k, dim=-1).indices
    weights = scores.gather(-1, index)
    if rule.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * rule.factor, index
