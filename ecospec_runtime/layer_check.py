"""What an EAGLE-3 head's own greedy chain gets right, on its target layers and on the neighbouring ones.

Tools number the captured layers differently, and a head that reads them one off still drafts: its acceptance falls to a
quarter and nothing fails. So measure it, and beside it the choice one layer later and one earlier, on the features of the
same passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ecospec_runtime.config import PoolConfig

if TYPE_CHECKING:
    from ecospec_runtime.target import Target

DEPTH = 3  # tokens of a chain
POSITIONS = 96  # chains per choice of layers, over all texts
FEWEST = 16  # chains from which anything is concluded
MUCH = 1.2  # a neighbour is better if it gets so many times as many tokens right ...
SIGMAS = 3.0  # ... and the difference, position by position, is so many times its own standard error


@dataclass(frozen=True)
class Chains:
    """What chains drafted from one choice of captured layers got right."""

    layers: tuple[int, ...]  # hidden states entering these
    right: NDArray[np.int64]  # per chain: tokens of the target's before the first wrong one

    @property
    def first(self) -> float:
        """Share of chains whose first token was the target's."""
        return float((self.right > 0).mean()) if len(self.right) else 0.0

    @property
    def mean(self) -> float:
        """Right tokens per chain."""
        return float(self.right.mean()) if len(self.right) else 0.0


def measure(target: Target, drafter: Any, texts: list[tuple[list[int], list[int]]]) -> list[Chains]:
    """Chains of the head's own layers first, then of those neighbouring choices that the target has.

    `texts` are prompts with the target's own greedy continuation; only tokens of the continuation are judged.
    """
    own: tuple[int, ...] = drafter.aux_layers
    shifted = [tuple(i + by for i in own) for by in (0, 1, -1)]
    choices = [ids for ids in shifted if all(0 <= i <= target.layers for i in ids)]
    captured = tuple(sorted({i for ids in choices for i in ids}))
    right: dict[tuple[int, ...], list[int]] = {ids: [] for ids in choices}
    for prompt, continuation in texts:
        tokens = [*prompt, *continuation]
        # the chain of row r guesses the tokens from r + 2 on
        rows = list(range(max(0, len(prompt) - 2), len(tokens) - 1 - DEPTH))
        rows = rows[:: max(1, round(len(rows) * len(texts) / POSITIONS))]
        if not rows:
            continue
        features = _features(target, tokens[:-1], captured)
        for ids in choices:
            right[ids] += _right(drafter, tokens, torch.cat([features[i] for i in ids], dim=-1), rows)
    return [Chains(ids, np.array(right[ids], np.int64)) for ids in choices]


def better_neighbour(chains: list[Chains]) -> Chains | None:
    """The neighbouring choice that does much better than the first, if there is one and the sample allows to say so."""
    own, best = chains[0], max(chains, key=lambda c: c.mean)
    more = best.right - own.right
    clear = more.sum() > SIGMAS * float(np.sqrt(np.square(more).sum()))
    return best if len(more) >= FEWEST and clear and best.mean >= MUCH * own.mean else None


def _features(target: Target, tokens: list[int], layers: tuple[int, ...]) -> dict[int, Tensor]:
    """Hidden states `[n, H]` entering each of these layers, from one pass."""
    device = target.device
    output = target.forward(
        torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device), None, target.new_cache(),
        aux_layers=layers, logits=False,
    )  # fmt: skip
    assert output.aux is not None
    return dict(zip(layers, output.aux.chunk(len(layers), dim=-1), strict=True))


def _right(drafter: Any, tokens: list[int], features: Tensor, rows: list[int]) -> list[int]:
    """Right tokens at the head of each row's greedy chain."""
    sequence = drafter.start()
    drafter.extend(sequence, torch.tensor(tokens[1:]), features)
    out = []
    for row, pool in zip(
        rows, drafter.expand_many(sequence, rows, PoolConfig(depth=DEPTH, beam=1, width=1)), strict=True
    ):
        same = [a == b for a, b in zip(pool.tokens.tolist(), tokens[row + 2 : row + 2 + DEPTH], strict=True)]
        out.append((*same, False).index(False))
    return out
