"""`tree_attention`: attention of the few rows of a verification pass over cached and new keys, under any mask.

out[t, h] = sum_j softmax_j(scale * q[h, t] . k[g, j] + mask[t, j]) v[g, j], with g the key-value head of h. A sink of the head,
where there is one, takes part in the softmax as one more logit without a value. An additive mask of HIDDEN or less hides
its key; a row that sees no key is zero.

Shapes: n rows, H query heads, G key-value heads, J keys (cached rows first, then the n new ones), D head dimension;
values, and so the output, may have another one.
"""

from __future__ import annotations

import torch
from torch import Tensor

HIDDEN = -1e30


def tree_attention(
    q_HnD: Tensor, k_GJD: Tensor, v_GJD: Tensor, mask_nJ: Tensor | None, scale: float, sinks_H: Tensor | None = None
) -> Tensor:
    """-> [n, H, D] in q's dtype. `mask`: None (every key), bool (True: may look) or additive of q's dtype."""
    group = q_HnD.size(0) // k_GJD.size(0)
    k, v = (x.float().repeat_interleave(group, 0) for x in (k_GJD, v_GJD))
    scores_HnJ = scale * q_HnD.float() @ k.mT
    if mask_nJ is not None:
        bias = (
            torch.zeros_like(mask_nJ, dtype=torch.float32).masked_fill(~mask_nJ, -torch.inf)
            if mask_nJ.dtype == torch.bool
            else mask_nJ
        )
        scores_HnJ = (scores_HnJ + bias.float()).masked_fill(bias.float() <= HIDDEN, -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.float()[:, None, None].expand(-1, scores_HnJ.size(1), 1)
        scores_HnJ, v = torch.cat((scores_HnJ, sinks), -1), torch.cat((v, v.new_zeros(len(v), 1, v.size(2))), 1)
    blind = (scores_HnJ == -torch.inf).all(-1, keepdim=True)
    return (scores_HnJ.softmax(-1).masked_fill(blind, 0) @ v).transpose(0, 1).to(q_HnD.dtype).contiguous()
