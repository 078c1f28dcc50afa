"""The drafter protocol. A new kind is one file in this folder plus its line in `drafters/__init__.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ecospec_runtime.config import PoolConfig
from ecospec_runtime.pool import Ints, Pool
from ecospec_runtime.sampling import Sampler


class Drafter(Protocol):
    """Proposes candidate trees for one sequence at a time; a sequence's state lives in what `start` returns.

    Row j of a sequence is what the drafter knows once the target has seen position j and chosen the token at j + 1:
    the target's features at position j and that token. Rows are only ever added, so a rejected candidate leaves no
    trace. The prompt's first token is in no row. A drafter without a state of its own that could say something about
    experts (`features` is target_hidden) asks for the output of the target's last layer, `aux_layers = (target.layers,)`,
    and its pools carry that of the root's row. A pool may be empty. Legend: m rows, F feature width (`len(aux_layers)` times the target's hidden size).
    """

    kind: str
    features: str  # a `pool.Features`: what `states` of its pools holds
    width: int  # width d of the states in its pools
    aux_layers: tuple[int, ...]  # the features it needs: hidden states entering these target layers

    @property
    def fingerprint(self) -> str:
        """sha256 of its weights."""
        ...

    def check(self, target: Any) -> None:
        """Raise UserError if the drafter cannot serve this target."""
        ...

    def start(self) -> Any:
        """An empty sequence."""
        ...

    def extend(self, sequence: Any, tokens_m: Tensor, features_mF: Tensor) -> None:
        """Append m rows: features at consecutive positions and the token that follows each."""
        ...

    def expand(
        self, sequence: Any, root_token: int, config: PoolConfig, temperatures: tuple[float, ...] = (),
        sampler: Sampler | None = None,
    ) -> Pool:  # fmt: skip
        """The pool below `root_token`, the token of the last row, in the shape that `config` says; `levels` is filled.

        `sampler`: the one that the target's tokens are drawn with. The drafter guesses its draws: the pool is that of the
        logits plus `Sampler.noise` of each position, and so are its log-probabilities, entropies and normalizers.
        """
        ...

    def expand_many(
        self, sequence: Any, roots: list[int], config: PoolConfig, temperatures: tuple[float, ...] = (),
        sampler: Sampler | None = None,
    ) -> list[Pool]:  # fmt: skip
        """One pool per row index in `roots`, each as `expand` would have built it when that row was the last."""
        ...


class TreeDrafter(ABC):
    """What every kind does alike, from the pool of one row. A sequence has `tokens` and `length`, its number of rows."""

    def expand(
        self, sequence: Any, root_token: int, config: PoolConfig, temperatures: tuple[float, ...] = (),
        sampler: Sampler | None = None,
    ) -> Pool:  # fmt: skip
        """The pool below `root_token`, which must be the token of the last row."""
        if not sequence.tokens or sequence.tokens[-1] != root_token:
            raise ValueError(f"root token {root_token} is not the token of the last row")
        return self.expand_many(sequence, [sequence.length - 1], config, temperatures, sampler)[0]

    @torch.inference_mode()
    def expand_many(
        self, sequence: Any, roots: list[int], config: PoolConfig, temperatures: tuple[float, ...] = (),
        sampler: Sampler | None = None,
    ) -> list[Pool]:  # fmt: skip
        """One pool per row index in `roots`, quickest in rising order; the pool of row r sees rows 0..r only."""
        self.check_roots(sequence, roots)
        return [self.pool(sequence, root, config, temperatures, sampler) for root in roots]

    @abstractmethod
    def pool(
        self, sequence: Any, root: int, config: PoolConfig, temperatures: tuple[float, ...], sampler: Sampler | None
    ) -> Pool:  # fmt: skip
        """The pool of row `root`; the sequence is left as it was."""

    @staticmethod
    def check_roots(sequence: Any, roots: list[int]) -> None:
        """ValueError unless these are rows of the sequence."""
        if roots and not 0 <= min(roots) <= max(roots) < sequence.length:
            raise ValueError(f"roots must be in 0..{sequence.length - 1}")


def shared_noise(
    sampler: Sampler | None, root: int, depth: int, ids_V: Ints, device: torch.device
) -> Tensor | None:  # fmt: skip
    """What to add to the logits of the tokens `ids_V`, float32 `[1 + depth, V]`; None without a sampler or at temperature 0.

    Row 0 is for the token of row `root` itself, whose place in the text is root + 1, the others for `depth` levels below it.
    """
    if sampler is None or sampler.greedy:
        return None
    if device.type != "cpu":  # the host would take longer for a large vocabulary than the level that waits for it
        positions = torch.arange(root + 1, root + 2 + depth, device=device)
        return sampler.draws(device).noise(positions, torch.from_numpy(ids_V).to(device))
    size, noise_dV = int(ids_V.max()) + 1, np.empty((1 + depth, len(ids_V)), np.float32)
    for i, row_V in enumerate(noise_dV):
        sampler.noise(root + 1 + i, size).take(ids_V, out=row_V)
    return torch.from_numpy(noise_dV)
