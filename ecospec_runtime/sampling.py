"""The target's processed distribution, and draws from it that depend on nothing but (seed, position).

Processing follows transformers' order: repetition penalty, temperature, top-k, top-p, min-p. The draw is the Gumbel-max
trick: the largest logit once every token's has its own noise, so the same logits, seed and position give the same token whatever
else a pass verified. A drafter that adds the same noise to its logits guesses that token far more often than one that does not
know the dice, and the text stays the target's own.
Source: Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv 2408.07978.

Host-side numpy, and `Draws`, the same draw on a device. Legend of shapes: V vocabulary, n rows of a pass.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ecospec_kernels import dispatch
from ecospec_kernels.draw_rows import reference
from ecospec_runtime.config import GenerationConfig
from ecospec_runtime.pool import Floats

Row = NDArray[np.float64]
KEPT = 16  # positions whose noise is remembered: those of a tree, which verification asks for again


class Sampler:
    """Chooses tokens as one `GenerationConfig` asks."""

    def __init__(self, config: GenerationConfig):
        self.config = config
        self.penalises = config.repetition_penalty != 1.0
        self.greedy = config.temperature == 0.0
        self._noise: dict[int, Floats] = {}  # by position
        self._draws: Draws | None = None
        self._widest = 0  # vocabulary that was asked for: drafters' may be smaller than the target's

    @property
    def plain_argmax(self) -> bool:
        """Whether a row's token is just its argmax, with nothing to process."""
        return self.greedy and not self.penalises

    @property
    def plain(self) -> bool:
        """Whether a row's token is its argmax or, above temperature 0, that of logits and noise: nothing to process."""
        c = self.config
        return not self.penalises and (self.greedy or (c.top_k == 0 and c.top_p == 1.0 and c.min_p == 0.0))

    def draws(self, device: torch.device) -> Draws:
        """The same draws on `device`. Needs temperature > 0, and `plain`."""
        if self._draws is None or self._draws.seed.device != device:
            self._draws = Draws(self.config.seed, self.config.temperature, device)
        return self._draws

    def choose(self, logits_V: NDArray[np.floating], position: int, seen: set[int]) -> int:
        """Token for `position` (its index in prompt + generated text), given the raw logits and the ids before it."""
        if self.greedy:
            return int(self._penalised(logits_V.astype(np.float64), seen).argmax())
        row = self._processed(logits_V, seen)
        return int((row * self.config.temperature + self.noise(position, row.size)).argmax())

    def noise(self, position: int, size: int) -> Floats:
        """What a drafter adds to its logits of the tokens 0 to `size` - 1 for `position`, `[size]`; zeros at temperature 0.

        The noise of the draw times the temperature: the draw is the argmax of the logits plus this.
        """
        known = self._noise.get(position)
        if known is None or known.size < size:
            self._widest = max(self._widest, size)
            known = dispatch.noise(self.config.seed, position, self._widest, self.config.temperature)
            self._noise[position] = known
            while len(self._noise) > KEPT:
                del self._noise[next(iter(self._noise))]
        return known[:size]

    def probabilities(self, logits_V: NDArray[np.floating], seen: set[int] | None = None) -> Row:
        """The processed distribution `[V]`, summing to 1. Needs temperature > 0."""
        row = self._processed(logits_V, seen or set())
        p = np.exp(row - row.max())
        return p / p.sum()

    def _processed(self, logits_V: NDArray[np.floating], seen: set[int]) -> Row:
        """Logits of the processed distribution `[V]`, up to a constant; -inf for tokens that are cut off."""
        config = self.config
        row = self._penalised(logits_V.astype(np.float64), seen) / config.temperature
        if 0 < config.top_k < row.size:
            row[row < np.partition(row, -config.top_k)[-config.top_k]] = -np.inf
        if config.top_p == 1.0 and config.min_p == 0.0:
            return row
        p = np.exp(row - row.max())
        if config.top_p < 1.0:
            order = np.argsort(-p, kind="stable")
            before = np.cumsum(p[order]) - p[order]  # mass of the tokens ahead of each one
            p[order[before >= config.top_p * p.sum()]] = 0.0
        row[(p == 0.0) | (p < config.min_p * p.max())] = -np.inf
        return row

    def _penalised(self, row: Row, seen: set[int]) -> Row:
        if self.penalises and seen:
            ids = np.fromiter(seen, np.int64, len(seen))
            values = row[ids]
            penalty = self.config.repetition_penalty
            row[ids] = np.where(values < 0, values * penalty, values / penalty)
        return row


class Draws:
    """A `Sampler`'s draws on a device, without filters and penalties: the `choose` of a `DeviceStep`.

    In float32: another token only where the two largest sums are as good as equal, see `draw_rows`. `seed` and `temperature`
    are tensors, which a replayed step reads anew: copy others into them to decode another text.
    """

    def __init__(self, seed: int, temperature: float, device: torch.device | str):
        """`temperature` above 0; `seed` as in `GenerationConfig`."""
        self.seed = torch.tensor([seed], device=device)
        self.temperature = torch.tensor([temperature], device=device)

    def __call__(self, logits_nV: Tensor, positions_n: Tensor) -> Tensor:
        """Tokens `[n]` for these positions."""
        return dispatch.draw_rows(logits_nV, positions_n, self.seed, self.temperature)

    def noise(self, positions_n: Tensor, ids_V: Tensor) -> Tensor:
        """What a drafter adds to its logits of the tokens `ids_V`, float32 `[n, V]`; as `Sampler.noise`."""
        return self.temperature * reference.gumbels(reference.noise_bits(positions_n, self.seed, ids_V))


def log_probability(logits_V: NDArray[np.floating], token: int) -> float:
    """Raw log-probability of a token under a row of logits."""
    row = logits_V.astype(np.float64)
    top = row.max()
    return float(row[token] - top - np.log(np.exp(row - top).sum()))
