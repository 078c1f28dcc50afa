"""`accept_tree`: the acceptance probability of every node of a candidate tree, given that its parent was accepted.

One of three estimates. With `normalizers`: the drafter's probability at temperature `tau`. With `weights` or `logits`: a softmax over
the children of each parent and "none of these" (logit 0); a node's logit is the sum of its entry of `logits` and of what
`weights` make of log p, rank, depth, entropy and 1. With neither: the drafter's own probability, which also stands in where
another estimate is not finite.

Numpy in and out, it runs on the host between two passes; importing it is cheap. Legend of shapes: n nodes, s states.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ecospec_kernels.predict_pool.inputs import Floats, Tree, scalars_of

Ints = NDArray[np.int64]
LOGIT_BOUND = 30.0  # exp() of it is exact enough in float64 and far from overflow
NONE: Floats = np.zeros(0, np.float32)  # for an argument that is left out
OUT_OF_RANGE = "accept_tree: a node names a parent or a state that is not there"


def raw(log_probs: Floats) -> Floats:
    """The drafter's own probability `[n]`, in [0, 1]; an undefined one is 0."""
    own = np.exp(np.minimum(log_probs, 0.0))
    return np.where(np.isnan(own), 0.0, own).astype(np.float32)


def at_temperature(log_probs: Floats, log_normalizers: Floats, temperature: float) -> Floats:
    """Drafter probability at a temperature `[n]`, from log p at temperature 1 and the normalizer of its state `[n]`."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.exp(np.minimum(log_probs / np.float32(temperature) - log_normalizers, 0.0))


def sibling_softmax(logits: Floats, parents: Ints) -> Floats:
    """Softmax over the children of each parent and "none of these" (logit 0): `[n]`; siblings sum to at most 1.

    `parents` may be any group ids from -1 on. A NaN logit stays NaN and its siblings ignore it.
    """
    weights = np.exp(np.clip(logits.astype(np.float64), -LOGIT_BOUND, LOGIT_BOUND))
    totals = np.bincount(parents + 1, np.where(np.isnan(weights), 0.0, weights))
    return (weights / (1.0 + totals[parents + 1])).astype(np.float32)


def accept_tree(
    tree: Tree, weights: Floats = NONE, logits: Floats = NONE, tau: float = 1.0, normalizers_s: Floats = NONE
) -> Floats:  # fmt: skip
    """`[n]` in [0, 1]. `weights` `[5]`, `logits` `[n]`, `normalizers_s` `[s]` of `tau`.

    The tree's parents may be any group ids from -1 on. IndexError for a parent below -1 or a state row out of range.
    """
    known = len(normalizers_s) if len(normalizers_s) else len(tree.entropies)
    read = len(normalizers_s) or len(weights)
    if (tree.parents < -1).any() or (read and not ((tree.state_rows >= 0) & (tree.state_rows < known)).all()):
        raise IndexError(OUT_OF_RANGE)
    own = raw(tree.log_probs)
    if len(normalizers_s):
        estimate = at_temperature(tree.log_probs, normalizers_s[tree.state_rows], tau)
    elif len(weights) or len(logits):
        with np.errstate(over="ignore", invalid="ignore"):
            total = scalars_of(tree)[1:] @ weights[:4] + weights[4] if len(weights) else np.float32(0.0)
            total = total + logits if len(logits) else total
        estimate = sibling_softmax(np.where(np.isfinite(total), total, np.nan), tree.parents)
    else:
        estimate = own
    return np.clip(np.where(np.isfinite(estimate), estimate, own), 0.0, 1.0).astype(np.float32)
