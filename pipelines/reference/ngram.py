"""N-gram language models over token arrays, as yardsticks for the reference target.

Interpolated Kneser-Ney with one absolute discount per order. N-grams are packed into 64-bit integers and counted by
sorting, so that ten million tokens take seconds. Source: Kneser and Ney 1995; Chen and Goodman 1999.

Legend of shapes: W windows, T tokens of a window, P predicted positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]


def pack(windows_WT: NDArray[np.integer], order: int, bits: int) -> Keys:
    """All n-grams inside the windows as integers, the last token in the lowest bits: `[W, T - order + 1]`."""
    last = windows_WT.shape[1] - order + 1
    keys = np.zeros((windows_WT.shape[0], last), np.int64)
    for i in range(order):
        keys = (keys << bits) | windows_WT[:, i : i + last].astype(np.int64)
    return keys


def _lookup(table: Keys, keys: Keys, values: NDArray[np.generic]) -> NDArray[np.float64]:
    """`values` at the places of `keys` in the sorted `table`; 0 where a key is absent."""
    places = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return np.where(table[places] == keys, values[places], 0).astype(np.float64)


@dataclass
class _Order:
    """Counts of one order: of n-grams, and of what follows each context."""

    grams: Keys
    counts: NDArray[np.int64]
    contexts: Keys
    totals: NDArray[np.int64]  # sum of counts after each context
    kinds: NDArray[np.int64]  # distinct tokens after each context
    discount: float


class KneserNey:
    """Interpolated Kneser-Ney model of an order; `vocabulary` tokens, unseen ones included through the uniform floor."""

    def __init__(self, windows_WT: NDArray[np.integer], vocabulary: int, order: int = 5):
        """Count the n-grams inside the windows. Raises ValueError if order * bits of a token pass 63."""
        self.order, self.vocabulary, self.bits = order, vocabulary, max(1, (vocabulary - 1).bit_length())
        if order * self.bits > 63:
            raise ValueError(f"{order}-grams over {vocabulary} tokens do not fit 63 bits")
        grams, counts = np.unique(pack(windows_WT, order, self.bits), return_counts=True)
        self.orders: list[_Order] = []  # highest first
        for n in range(order, 0, -1):
            self.orders.append(self._summarise(grams, counts))
            if n > 1:  # lower orders count the distinct tokens before a gram
                grams, counts = np.unique(grams & ((1 << (self.bits * (n - 1))) - 1), return_counts=True)

    def _summarise(self, grams: Keys, counts: NDArray[np.int64]) -> _Order:
        contexts, first = np.unique(grams >> self.bits, return_index=True)
        totals = np.add.reduceat(counts, first)
        kinds = np.diff(np.append(first, len(grams)))
        ones, twos = int((counts == 1).sum()), int((counts == 2).sum())
        discount = ones / (ones + 2 * twos) if ones else 0.5
        return _Order(grams, counts, contexts, totals, kinds, discount)

    def probabilities(self, windows_WT: NDArray[np.integer]) -> NDArray[np.float64]:
        """Probability of each token from position order - 1 on, given the ones before: `[W, T - order + 1]`."""
        keys = pack(windows_WT, self.order, self.bits).ravel()
        probability = np.full(len(keys), 1.0 / self.vocabulary)
        for n, counts in zip(range(1, self.order + 1), reversed(self.orders), strict=True):
            grams = keys & ((1 << (self.bits * n)) - 1)
            contexts = grams >> self.bits
            count = _lookup(counts.grams, grams, counts.counts)
            total = _lookup(counts.contexts, contexts, counts.totals)
            kinds = _lookup(counts.contexts, contexts, counts.kinds)
            seen = total > 0
            mixed = (np.maximum(count - counts.discount, 0) + counts.discount * kinds * probability) / np.maximum(
                total, 1
            )
            probability = np.where(seen, mixed, probability)
        return probability.reshape(windows_WT.shape[0], -1)


def unigram(windows_WT: NDArray[np.integer], vocabulary: int) -> NDArray[np.float64]:
    """Add-one relative frequencies `[vocabulary]`."""
    counts = np.bincount(windows_WT.ravel(), minlength=vocabulary) + 1
    return counts / counts.sum()


def perplexity(probabilities: NDArray[np.float64]) -> float:
    """exp of the mean negative log-probability."""
    return float(np.exp(-np.log(probabilities).mean()))
