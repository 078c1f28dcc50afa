"""`tree_attention`: attention of the few rows of a verification pass over cached and new keys, under any mask.

out[t, h] = sum_j softmax_j(scale * q[h, t] . k[g, j] + mask[t, j]) v[g, j], with g the key-value head of h. A sink of the head,
where there is one, takes part in the softmax as one more logit without a value. An additive mask of HIDDEN or less hides
its key, as `start` hides those before it; a row that sees no key is zero. A logit of NaN or +inf that a row does see,
be it by q, k, mask or sink, makes that row of the head NaN; one of -inf has no weight. Values must be finite, hidden ones
too, but for those before `start`, which nothing reads.

Shapes: n rows, H query heads, G key-value heads, J keys (cached rows first, then the n new ones), D head dimension;
values, and so the output, may have another one.
"""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from ecospec_kernels.checks import FLOATS, refuse, wrong

HIDDEN = -1e30


def invalid(
    q_HnD: Tensor, k_GJD: Tensor, v_GJD: Tensor, mask_nJ: Tensor | None, scale: float, sinks_H: Tensor | None = None,
    start: Tensor | None = None,
) -> str | None:  # fmt: skip
    """What is wrong with the arguments. Written to be quick: the engine asks in every layer."""
    q_shape, k_shape, v_shape, dtype, device = q_HnD.shape, k_GJD.shape, v_GJD.shape, q_HnD.dtype, q_HnD.device
    if not len(q_shape) == len(k_shape) == len(v_shape) == 3:
        return f"q {list(q_shape)}, k {list(k_shape)} and v {list(v_shape)} are not [H, n, D], [G, J, D] and [G, J, D']"
    (heads, n, width), (groups, keys, key_width), (v_groups, v_keys, value_width) = q_shape, k_shape, v_shape
    if not (heads and n and width and groups and keys and value_width):
        return f"q {list(q_shape)}, k {list(k_shape)} or v {list(v_shape)} is empty"
    if key_width != width or v_groups != groups or v_keys != keys or heads % groups:
        return f"q {list(q_shape)}, k {list(k_shape)} and v {list(v_shape)} do not fit each other"
    if dtype not in FLOATS or k_GJD.dtype is not dtype or v_GJD.dtype is not dtype:
        return f"q {dtype}, k {k_GJD.dtype} and v {v_GJD.dtype} are not one of float32, bfloat16, float16"
    if not isinstance(scale, (float, int)) or not isfinite(scale):
        return f"scale {scale} is not a finite number"
    if k_GJD.device != device or v_GJD.device != device:
        return f"k lies on {k_GJD.device} and v on {v_GJD.device}, the first argument on {device}"
    if mask_nJ is not None:
        if mask_nJ.shape != (n, keys):
            return f"mask has shape {list(mask_nJ.shape)}, not [{n}, {keys}]"
        if mask_nJ.dtype not in (torch.bool, dtype, torch.float32):
            return f"mask is {mask_nJ.dtype}, neither bool nor float32 nor q's {dtype}"
        if mask_nJ.device != device:
            return f"mask lies on {mask_nJ.device}, the first argument on {device}"
    if sinks_H is not None and not (
        sinks_H.shape == (heads,) and sinks_H.dtype in FLOATS and sinks_H.is_contiguous() and sinks_H.device == device
    ):
        return wrong("sinks", sinks_H, (heads,), FLOATS, q_HnD)
    return None if start is None else wrong("start", start, (1,), (torch.int64,), q_HnD)


def tree_attention(
    q_HnD: Tensor, k_GJD: Tensor, v_GJD: Tensor, mask_nJ: Tensor | None, scale: float, sinks_H: Tensor | None = None,
    start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """-> [n, H, D] in q's dtype. `mask`: None (every key), bool (True: may look) or additive, of q's dtype or float32.

    `start` [1] int64: keys before it are hidden from every row, whatever the mask says of them, and may hold anything: where
    a sliding window begins. A tensor, so that a captured graph reads it anew at each replay. ValueError for what `invalid` names.
    """
    refuse("tree_attention", invalid(q_HnD, k_GJD, v_GJD, mask_nJ, scale, sinks_H, start))
    group = q_HnD.size(0) // k_GJD.size(0)
    k, v = (x.float().repeat_interleave(group, 0) for x in (k_GJD, v_GJD))
    scores_HnJ = scale * q_HnD.float() @ k.mT
    if mask_nJ is not None and mask_nJ.dtype == torch.bool:
        scores_HnJ = scores_HnJ.masked_fill(~mask_nJ, -torch.inf)
    elif mask_nJ is not None:
        scores_HnJ = (scores_HnJ + mask_nJ.float()).masked_fill(mask_nJ <= HIDDEN, -torch.inf)
    if start is not None:
        early_J = torch.arange(k.size(1), device=start.device) < start
        scores_HnJ, v = scores_HnJ.masked_fill(early_J, -torch.inf), v.masked_fill(early_J[:, None], 0)
    if sinks_H is not None:
        sinks = sinks_H.float()[:, None, None].expand(-1, scores_HnJ.size(1), 1)
        scores_HnJ, v = torch.cat((scores_HnJ, sinks), -1), torch.cat((v, v.new_zeros(len(v), 1, v.size(2))), 1)
    blind = (scores_HnJ == -torch.inf).all(-1, keepdim=True)
    return (scores_HnJ.softmax(-1).masked_fill(blind, 0) @ v).transpose(0, 1).to(q_HnD.dtype).contiguous()
