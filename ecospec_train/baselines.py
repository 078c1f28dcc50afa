"""Routing baselines that the predictor must beat: expert popularity, a token-id table, the previous token's routing.

Legend: N rows, U distinct tokens, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ecospec_runtime.pool import Floats, Ints


def expert_counts(
    index_N: Ints, routing_NLK: NDArray[np.unsignedinteger], rows: int, experts: int
) -> NDArray[np.uint32]:
    """How often each expert was used by the rows of each index: `[rows, L, E]`."""
    layers, top_k = routing_NLK.shape[1:]
    counts = np.empty((rows, layers, experts), np.uint32)
    base = np.repeat(index_N * experts, top_k)
    for layer in range(layers):
        flat = base + routing_NLK[:, layer].reshape(-1)
        counts[:, layer] = np.bincount(flat, minlength=rows * experts).reshape(rows, experts)
    return counts


class RoutingTable:
    """Counts per token id with the overall popularity behind them, which decides ties and unseen tokens."""

    def __init__(self, tokens: Ints, layers: int, experts: int):
        """Holds counts for the given token ids only: those that will be looked up."""
        self.tokens = np.unique(tokens)
        self.experts = experts
        self.counts = np.zeros((len(self.tokens), layers, experts), np.uint32)
        self.totals = np.zeros((layers, experts), np.uint64)

    def add(self, tokens_N: Ints, routing_NLK: NDArray[np.unsignedinteger]) -> None:
        """Count rows of the fit prompts."""
        self.totals += expert_counts(np.zeros_like(tokens_N), routing_NLK, 1, self.experts)[0]
        known = np.isin(tokens_N, self.tokens)
        index = np.searchsorted(self.tokens, tokens_N[known])
        self.counts += expert_counts(index, routing_NLK[known], len(self.tokens), self.experts)

    def popularity(self) -> Floats:
        """Share of each expert per layer `[L, E]`; at most 1."""
        return (self.totals / np.maximum(self.totals.sum(-1, keepdims=True), 1)).astype(np.float32)

    def scores(self, tokens_N: Ints) -> Floats:
        """Scores `[N, L, E]` of tokens given to the constructor; the K highest are the prediction."""
        return self.counts[np.searchsorted(self.tokens, tokens_N)] + self.popularity()


def top_ids(scores_NLE: Floats, top_k: int) -> Ints:
    """Ids of the highest scores `[N, L, K]`."""
    return np.argpartition(scores_NLE, -top_k, axis=-1)[..., -top_k:]


def hits(predicted_NLK: NDArray[np.integer], routing_NLK: NDArray[np.unsignedinteger], experts: int) -> Floats:
    """Share of each row's true experts that were predicted, over all layers: `[N]`."""
    used = np.zeros((*routing_NLK.shape[:2], experts), bool)
    np.put_along_axis(used, routing_NLK.astype(np.int64), True, axis=-1)
    found = np.take_along_axis(used, np.broadcast_to(predicted_NLK, routing_NLK.shape).astype(np.int64), axis=-1)
    return found.mean((1, 2), dtype=np.float32)


def distinct_tokens(tokens: Iterable[Ints]) -> Ints:
    """Sorted distinct token ids of several arrays."""
    found = [np.unique(t) for t in tokens]
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)
