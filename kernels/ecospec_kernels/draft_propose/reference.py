"""`draft_propose`: what a draft head proposes at each state: norm, output matrix, log-softmax, the best tokens.

Legend of shapes: n states, H hidden, V draft vocabulary, w proposals, t temperatures.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Proposals(NamedTuple):
    """All float32 but the ids."""

    log_probs: Tensor  # [n, w] falling
    ids: Tensor  # [n, w] int64 draft ids
    entropies: Tensor  # [n] nats
    log_normalizers: Tensor  # [n, t] log sum_j exp(log p_j / temperature)


def draft_propose(
    states_nH: Tensor, norm_H: Tensor | None, eps: float, lm_head_VH: Tensor, width: int, temperatures: tuple[float, ...],
    noise: Tensor | None = None,
) -> Proposals:  # fmt: skip
    """The `width` best tokens of each state with their log-probabilities, and the whole distribution's statistics.

    `norm_H` None: the states are normed already. `noise`, float32 `[V]` or `[n, V]`, is added to the logits: all that follows
    is of the distribution that they then have.
    """
    normed = states_nH if norm_H is None else F.rms_norm(states_nH, norm_H.shape, norm_H, eps)
    return best_tokens(F.linear(normed, lm_head_VH.to(normed.dtype)), width, temperatures, noise)


def best_tokens(
    logits_nV: Tensor, width: int, temperatures: tuple[float, ...], noise: Tensor | None = None
) -> Proposals:  # fmt: skip
    """The same of given logits: for drafters that have an output layer of their own."""
    log_probs = (logits_nV.float() if noise is None else logits_nV.float() + noise).log_softmax(-1)
    best = log_probs.topk(width)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    normalizers = [(log_probs / t).logsumexp(-1) for t in temperatures]
    return Proposals(
        best.values, best.indices, entropies, torch.stack(normalizers, dim=-1) if normalizers else log_probs[:, :0]
    )
