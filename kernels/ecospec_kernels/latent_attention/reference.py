"""`latent_attention`: multi-head latent attention of few rows over a cache of latents that is never expanded.

A head's keys are `up_k @ latent` and a rotated part that all heads share, its values `up_v @ latent`. Instead of expanding
every cached row, `up_k` is applied to the query and `up_v` to the mixed latents: the same sums in another order.
Source: DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434, section 2.1.

Shapes: n rows, H heads, J cached rows (the n new ones last), L latent width, N and R width of a head's plain and rotated
part, V of its values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ecospec_kernels.checks import FLOATS, refuse
from ecospec_kernels.tree_attention.reference import tree_attention


def latent_rows(
    q_nHD: Tensor, compressed_nC: Tensor, norm_L: Tensor, eps: float, cos_nR: Tensor, sin_nR: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """What new rows add to the cache: `[n, L]` normed latents and `[n, R]` rotated keys; rotates the last R of `q` in place.

    `compressed_nC`: latent and key, C = L + R. Tables as transformers makes them: the second half repeats the first.
    `interleaved`: pairs lie side by side and move to the two halves.
    """
    latent, key = compressed_nC.split((norm_L.shape[0], cos_nR.shape[1]), dim=-1)
    wide = latent.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * norm_L.float()
    rotated = q_nHD[..., -cos_nR.shape[1] :]
    rotated.copy_(_rotate(rotated, cos_nR[:, None], sin_nR[:, None], interleaved))
    return normed.to(latent.dtype), _rotate(key, cos_nR, sin_nR, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    first, second, cos, sin = first.float(), second.float(), cos[..., :half].float(), sin[..., :half].float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def invalid(q_nHD: Tensor, latent_JL: Tensor, key_JR: Tensor, up_OL: Tensor, mask_nJ: Tensor | None) -> str | None:
    """What is wrong with the arguments of `latent_attention`."""
    (n, heads, width), (keys, latent), (outputs, inputs) = q_nHD.shape, latent_JL.shape, up_OL.shape
    if key_JR.shape[0] != keys or key_JR.shape[1] >= width:
        return f"keys have shape {list(key_JR.shape)} beside {keys} latents and queries {width} wide"
    if inputs != latent or outputs % heads or outputs // heads <= width - key_JR.shape[1]:
        return f"up has shape {[outputs, inputs]}, not [{heads} * (more than {width - key_JR.shape[1]}), {latent}]"
    if mask_nJ is not None and mask_nJ.shape != (n, keys):
        return f"mask has shape {list(mask_nJ.shape)}, not [{n}, {keys}]"
    if mask_nJ is not None and mask_nJ.dtype not in (torch.bool, *FLOATS):
        return f"mask is {mask_nJ.dtype}, not bool or a float of 16 or 32 bits"
    return None


def latent_attention(
    q_nHD: Tensor, latent_JL: Tensor, key_JR: Tensor, up_OL: Tensor, mask_nJ: Tensor | None, scale: float
) -> Tensor:
    """-> [n, H, V] in q's dtype. `up_OL`: for each head N rows for its keys, then V for its values; mask as in `tree_attention`.

    ValueError for what `invalid` names.
    """
    refuse("latent_attention", invalid(q_nHD, latent_JL, key_JR, up_OL, mask_nJ))
    up = up_OL.float().unflatten(0, (q_nHD.shape[1], -1))
    plain = q_nHD.shape[2] - key_JR.shape[1]
    absorbed = torch.einsum("nhd,hdl->nhl", q_nHD[..., :plain].float(), up[:, :plain])
    q = torch.cat((absorbed, q_nHD[..., plain:].float()), dim=-1).transpose(0, 1)
    k, v = torch.cat((latent_JL, key_JR), dim=-1)[None].float(), latent_JL[None].float()
    mask = mask_nJ.float() if mask_nJ is not None and mask_nJ.is_floating_point() else mask_nJ
    mixed = tree_attention(q, k, v, mask, scale)
    return torch.einsum("nhl,hvl->nhv", mixed, up[:, plain:]).to(q_nHD.dtype)
