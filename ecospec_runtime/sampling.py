"""The target's processed distribution, and draws from it that depend on nothing but (seed, position).

Processing follows transformers' order: repetition penalty, temperature, top-k, top-p, min-p. The draw is the inverse
CDF over token ids in float64, so the same logits, seed and position give the same token whatever else a pass verified.
Host-side numpy. Legend of shapes: V vocabulary, n rows of a pass.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ecospec_runtime.config import GenerationConfig

Row = NDArray[np.float64]
_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from seed and position alone. Source: splitmix64's finaliser (Steele et al., 2014), twice."""
    return (_mix(_mix(seed) + position) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class Sampler:
    """Chooses tokens as one `GenerationConfig` asks."""

    def __init__(self, config: GenerationConfig):
        self.config = config
        self.penalises = config.repetition_penalty != 1.0
        self.greedy = config.temperature == 0.0

    @property
    def plain_argmax(self) -> bool:
        """Whether a row's token is just its argmax, with nothing to process."""
        return self.greedy and not self.penalises

    def choose(self, logits_V: NDArray[np.floating], position: int, seen: set[int]) -> int:
        """Token for `position` (its index in prompt + generated text), given the raw logits and the ids before it."""
        if self.greedy:
            return int(self._penalised(logits_V.astype(np.float64), seen).argmax())
        cumulative = self.probabilities(logits_V, seen).cumsum()
        u = uniform(self.config.seed, position)
        return int(cumulative.searchsorted(u * cumulative[-1], side="right"))

    def probabilities(self, logits_V: NDArray[np.floating], seen: set[int] | None = None) -> Row:
        """The processed distribution `[V]`, summing to 1. Needs temperature > 0."""
        config = self.config
        row = self._penalised(logits_V.astype(np.float64), seen or set()) / config.temperature
        if 0 < config.top_k < row.size:
            row[row < np.partition(row, -config.top_k)[-config.top_k]] = -np.inf
        p = np.exp(row - row.max())
        if config.top_p < 1.0:
            order = np.argsort(-p, kind="stable")
            before = np.cumsum(p[order]) - p[order]  # mass of the tokens ahead of each one
            p[order[before >= config.top_p * p.sum()]] = 0.0
        if config.min_p > 0.0:
            p[p < config.min_p * p.max()] = 0.0
        return p / p.sum()

    def _penalised(self, row: Row, seen: set[int]) -> Row:
        if self.penalises and seen:
            ids = np.fromiter(seen, np.int64, len(seen))
            values = row[ids]
            penalty = self.config.repetition_penalty
            row[ids] = np.where(values < 0, values * penalty, values / penalty)
        return row


def log_probability(logits_V: NDArray[np.floating], token: int) -> float:
    """Raw log-probability of a token under a row of logits."""
    row = logits_V.astype(np.float64)
    top = row.max()
    return float(row[token] - top - np.log(np.exp(row - top).sum()))
