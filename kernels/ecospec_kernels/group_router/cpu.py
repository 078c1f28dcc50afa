"""CPU kernel of `group_router` (numba): see `reference.py` for the mathematics. Of equals the lower id; NaN counts as largest."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from ecospec_kernels.blocks import compiled, exp, view, workspace
from ecospec_kernels.checks import refuse
from ecospec_kernels.group_router.reference import Rule, invalid


@numba.njit(nogil=True)
def _take(values: np.ndarray, taken: np.ndarray) -> int:
    """Place of the largest number that is not taken yet; it then is."""
    best = -1
    for i in range(len(values)):
        larger = best < 0 or values[i] > values[best] or (np.isnan(values[i]) and not np.isnan(values[best]))
        if larger and not taken[i]:
            best = i
    taken[best] = True
    return best


@compiled
def route(logits: int, bias: int, n: int, experts: int, top_k: int, groups: int, kept_groups: int, normalise: bool,
           factor: float, weights: int, index: int, scratch: int) -> None:  # fmt: skip
    """All dense; `scratch`: 2 * experts + groups fp32 numbers."""
    score, choice = view(scratch, experts, np.float32), view(scratch + 4 * experts, experts, np.float32)
    group, kept, chosen = (
        view(scratch + 8 * experts, groups, np.float32),
        np.empty(groups, np.bool_),
        np.empty(experts, np.bool_),
    )
    shift, share = view(bias, experts, np.float32), experts // groups
    for t in range(n):
        x = view(logits + 4 * t * experts, experts, np.float32)
        w, ids = view(weights + 4 * t * top_k, top_k, np.float32), view(index + 8 * t * top_k, top_k, np.int64)
        for e in range(experts):
            score[e] = np.float32(1.0) / (np.float32(1.0) + exp(-x[e]))
            choice[e] = score[e] + shift[e]
        for g in range(groups):
            first = second = np.float32(-np.inf)
            group[g] = np.float32(0.0)
            for e in range(g * share, (g + 1) * share):
                first, second = max(first, choice[e]), max(second, min(first, choice[e]))
                if np.isnan(choice[e]):
                    group[g] = np.nan
            group[g] += first + second
        kept[:] = False
        for _ in range(kept_groups):
            _take(group, kept)
        for e in range(experts):
            chosen[e] = False
            if not kept[e // share]:
                choice[e] = -np.inf
        total = np.float32(0.0)
        for k in range(top_k):
            ids[k] = _take(choice, chosen)
            w[k] = score[ids[k]]
            total += w[k]
        scale = np.float32(factor) / (total + np.float32(1e-20)) if normalise else np.float32(factor)
        for k in range(top_k):
            w[k] *= scale


def group_router(logits_nE: Tensor, bias_E: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Same contract as the reference; both dense."""
    refuse("group_router", invalid(logits_nE, bias_E, rule))
    n, experts = logits_nE.shape
    weights, index = torch.empty((n, rule.top_k)), torch.empty((n, rule.top_k), dtype=torch.int64)
    route(logits_nE.data_ptr(), bias_E.data_ptr(), n, experts, *rule, weights.data_ptr(), index.data_ptr(),
           workspace(2 * experts + rule.groups))  # fmt: skip
    return weights, index
