"""CPU kernel of `accept_tree` (numba): see `reference.py`. One call: its twenty array operations would each fetch code anew."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ecospec_kernels.accept_tree.reference import LOGIT_BOUND, NONE, OUT_OF_RANGE
from ecospec_kernels.blocks import compiled
from ecospec_kernels.predict_pool.cpu import finite
from ecospec_kernels.predict_pool.inputs import LOG_P_FLOOR, Floats, Tree


@compiled
def accept(log_probs: Any, parents: Any, state_rows: Any, ranks: Any, depths: Any, entropies: Any, weights: Any, logits: Any,
           tau: Any, normalizers: Any, out: Any) -> bool:  # fmt: skip
    """Fill `out`; False if a parent or state row is out of range."""
    n, most = len(log_probs), -1
    tempered, linear, shared = len(normalizers) > 0, len(weights) > 0, len(weights) + len(logits) > 0
    known = len(normalizers) if tempered else len(entropies)
    for i in range(n):
        if parents[i] < -1 or ((tempered or linear) and not 0 <= state_rows[i] < known):
            return False
        most = max(most, parents[i])
    totals, terms = np.zeros(most + 2 if shared and not tempered else 0), np.empty(n)
    for i in range(n):
        log_p = log_probs[i]
        if tempered:
            terms[i] = math.exp(min(log_p / tau - normalizers[state_rows[i]], np.float32(0.0)))
        elif shared:
            total = np.float32(0.0)
            if linear:
                total = max(finite(log_p), np.float32(LOG_P_FLOOR)) * weights[0] + np.float32(ranks[i]) * weights[1]
                total += np.float32(depths[i]) * weights[2] + finite(entropies[state_rows[i]]) * weights[3] + weights[4]
            if len(logits):
                total += logits[i]
            if np.isfinite(total):
                terms[i] = math.exp(min(max(np.float64(total), -LOGIT_BOUND), LOGIT_BOUND))
                totals[parents[i] + 1] += terms[i]
            else:
                terms[i] = np.nan
    for i in range(n):
        value = terms[i] / (1.0 + totals[parents[i] + 1]) if shared and not tempered else terms[i]
        if not (tempered or shared) or not np.isfinite(value):
            log_p = log_probs[i]
            value = 0.0 if math.isnan(log_p) else math.exp(min(log_p, np.float32(0.0)))
        out[i] = min(max(np.float32(value), np.float32(0.0)), np.float32(1.0))
    return True


def accept_tree(
    tree: Tree, weights: Floats = NONE, logits: Floats = NONE, tau: float = 1.0, normalizers_s: Floats = NONE
) -> Floats:  # fmt: skip
    """Same contract as the reference."""
    out = np.empty(len(tree.log_probs), np.float32)
    whole, real = np.int64, np.float32
    done = accept(
        np.ascontiguousarray(tree.log_probs, real), np.ascontiguousarray(tree.parents, whole),
        np.ascontiguousarray(tree.state_rows, whole), np.ascontiguousarray(tree.ranks, whole),
        np.ascontiguousarray(tree.depths, whole), np.ascontiguousarray(tree.entropies, real),
        np.ascontiguousarray(weights, real), np.ascontiguousarray(logits, real), np.float32(tau),
        np.ascontiguousarray(normalizers_s, real), out,
    )  # fmt: skip
    if not done:
        raise IndexError(OUT_OF_RANGE)
    return out
