"""CPU kernel of `group_router` (numba): see `reference.py` for the mathematics. Of equals the lower id."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from ecospec_kernels.blocks import compiled, exp, view, workspace
from ecospec_kernels.group_router.reference import Rule


@numba.njit(nogil=True)
def _take(values: np.ndarray, otherwise: int) -> int:
    """Place of the largest number, which becomes NaN; `otherwise` if all are NaN."""
    best = -1
    for i in range(len(values)):
        if values[i] == values[i] and (best < 0 or values[i] > values[best]):
            best = i
    if best < 0:
        return otherwise
    values[best] = np.nan
    return best


@compiled
def route(logits: int, bias: int, n: int, experts: int, top_k: int, groups: int, kept_groups: int, normalise: bool,
           factor: float, weights: int, index: int, scratch: int) -> None:  # fmt: skip
    """All dense; `scratch`: 2 * experts + groups fp32 numbers."""
    score, choice = view(scratch, experts, np.float32), view(scratch + 4 * experts, experts, np.float32)
    group, hidden = view(scratch + 8 * experts, groups, np.float32), np.empty(groups, np.bool_)
    shift, share = view(bias, experts, np.float32), experts // groups
    for t in range(n):
        x = view(logits + 4 * t * experts, experts, np.float32)
        w, ids = view(weights + 4 * t * top_k, top_k, np.float32), view(index + 8 * t * top_k, top_k, np.int64)
        for e in range(experts):
            score[e] = np.float32(1.0) / (np.float32(1.0) + exp(-x[e]))
            choice[e] = score[e] + shift[e]
        for g in range(groups):
            first = second = np.float32(-np.inf)
            for e in range(g * share, (g + 1) * share):
                first, second = max(first, choice[e]), max(second, min(first, choice[e]))
            group[g], hidden[g] = first + second, True
        for k in range(kept_groups):
            hidden[_take(group, k)] = False
        for e in range(experts):
            if hidden[e // share]:
                choice[e] = -np.inf
        total = np.float32(0.0)
        for k in range(top_k):
            ids[k] = _take(choice, k)
            w[k] = score[ids[k]]
            total += w[k]
        scale = np.float32(factor) / (total + np.float32(1e-20)) if normalise else np.float32(factor)
        for k in range(top_k):
            w[k] *= scale


def group_router(logits_nE: Tensor, bias_E: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Same contract as the reference; both dense."""
    n, experts = logits_nE.shape
    weights, index = torch.empty((n, rule.top_k)), torch.empty((n, rule.top_k), dtype=torch.int64)
    route(logits_nE.data_ptr(), bias_E.data_ptr(), n, experts, *rule, weights.data_ptr(), index.data_ptr(),
           workspace(2 * experts + rule.groups))  # fmt: skip
    return weights, index
