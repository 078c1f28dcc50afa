"""`draft_rows`: what an EAGLE-3 head makes of tokens that are settled: states, keys and values of new committed rows.

Legend of shapes: m new rows, P committed rows before them, H hidden, F feature width, G key-value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ecospec_kernels.draft_layer.reference import LayerWeights, Rope, draft_layer, linear


@dataclass(frozen=True)
class RowWeights:
    """What turns the target's features and a token into a row."""

    layer: LayerWeights
    fc_HF: Tensor
    feature_norms: tuple[Tensor, ...]  # one over all features, or one per captured layer, or none
    embedding: Tensor  # [target vocabulary, H]

    def fuse(self, features_mF: Tensor) -> Tensor:
        """First h `[..., m, H]` of rows from the target's features."""
        if self.feature_norms:
            parts = features_mF.split([w.shape[0] for w in self.feature_norms], dim=-1)
            normed = [self.layer.norm(x, w) for x, w in zip(parts, self.feature_norms, strict=True)]
            features_mF = torch.cat(normed, dim=-1)
        return linear(features_mF, self.fc_HF)


def draft_rows(
    w: RowWeights, tokens: list[int], features_mF: Tensor, rope: Rope, keys_GRD: Tensor, values_GRD: Tensor,
    states_RH: Tensor, past: int,
) -> None:  # fmt: skip
    """Fill rows P..P+m-1 (P is `past`) of the buffers, whose rows before are committed. `rope`: of the new rows."""
    m = len(tokens)
    h = w.fuse(features_mF.to(states_RH.device, states_RH.dtype))
    embed = F.embedding(torch.tensor(tokens, device=w.embedding.device), w.embedding).to(h.dtype)
    causal = torch.ones(m, m, dtype=torch.bool, device=h.device).tril()
    new = slice(past, past + m)
    states_RH[new] = draft_layer(
        w.layer, embed, h, rope, keys_GRD[:, :past], values_GRD[:, :past], keys_GRD[:, new], values_GRD[:, new], causal
    )
