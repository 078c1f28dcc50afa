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


def normed(features_mF: Tensor, norms: tuple[Tensor, ...], layer: LayerWeights) -> Tensor:
    """Features `[..., m, F]` under a head's `feature_norms`."""
    if not norms:
        return features_mF
    parts = features_mF.split([w.shape[0] for w in norms], dim=-1)
    return torch.cat([layer.norm(x, w) for x, w in zip(parts, norms, strict=True)], dim=-1)


def draft_rows(
    w: RowWeights, tokens: list[int], features_mF: Tensor, rope: Rope, keys_GRD: Tensor, values_GRD: Tensor,
    states_RH: Tensor, past: int,
) -> None:  # fmt: skip
    """Fill rows P..P+m-1 (P is `past`) of the buffers, whose rows before are committed. `rope`: of the new rows."""
    m = len(tokens)
    features_mF = features_mF.to(states_RH.device, states_RH.dtype)
    h = linear(normed(features_mF, w.feature_norms, w.layer), w.fc_HF)
    embed = F.embedding(torch.tensor(tokens, device=w.embedding.device), w.embedding).to(h.dtype)
    causal = torch.ones(m, m, dtype=torch.bool, device=h.device).tril()
    new = slice(past, past + m)
    states_RH[new] = draft_layer(
        w.layer, embed, h, rope, keys_GRD[:, :past], values_GRD[:, :past], keys_GRD[:, new], values_GRD[:, new], causal
    )
