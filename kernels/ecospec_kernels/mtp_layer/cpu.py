"""CPU kernel of `mtp_layer` (numba): see `reference.py` for the mathematics; its parts are the kernels of their own ops.

The whole layer is one call: its arithmetic takes a quarter of the time of the forty small operations that it is made of.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from ecospec_kernels.blocks import CACHE_LINE, LANES, compiled, exp, view, workspace
from ecospec_kernels.checks import refuse
from ecospec_kernels.draft_layer.cpu import product, rms
from ecospec_kernels.expert_mlp.cpu import combine, experts_scratch, run_experts
from ecospec_kernels.group_router.cpu import route
from ecospec_kernels.latent_attention.cpu import attend, attend_scratch, new_rows
from ecospec_kernels.mtp_layer.reference import MtpWeights, invalid
from ecospec_kernels.tree_attention.cpu import BOOL_MASK


class _Layer(NamedTuple):
    """Addresses and sizes of `MtpWeights`; 0 for what there is not."""

    embedding_norm: int
    hidden_norm: int
    input_norm: int
    post_norm: int
    output_norm: int
    q_norm: int
    latent_norm: int
    project: int
    q_down: int
    q_up: int
    compress: int
    up: int
    out: int
    router: int
    router_bias: int
    gate_up: int
    down: int
    shared_gate: int
    shared_up: int
    shared_down: int
    hidden: int
    heads: int
    plain: int
    dim: int
    latent: int
    values: int
    rank: int
    experts: int
    units: int
    shared: int
    widest: int  # of all rows between two products
    top_k: int
    groups: int
    kept_groups: int
    normalise: bool
    factor: float
    scale: float
    interleaved: bool
    eps: float
    latent_eps: float
    bf16: bool  # matrices and cache


@numba.njit(nogil=True)
def _norms(x: int, x_stride: int, n: int, weight: int, columns: int, eps: float, out: int, out_stride: int) -> None:
    for t in range(n):
        rms(x + 4 * t * x_stride, weight, columns, eps, out + 4 * t * out_stride)


@numba.njit(nogil=True)
def _add(state: int, more: int, count: int) -> None:
    total, values = view(state, count, np.float32), view(more, count, np.float32)
    for i in range(count):
        total[i] += values[i]


@compiled
def _layer(w: _Layer, n: int, embed: int, h: int, cos: int, sin: int, latents: int, keys: int, cached: int, mask: int,
           out: int, scratch: int) -> None:  # fmt: skip
    """All dense; all fp32 but matrices, cache and the bool mask. `scratch`: as `_scratch_size` counts."""
    size, hidden, width = 2 if w.bf16 else 4, w.hidden, w.plain + w.dim
    index = scratch
    weights = index + 8 * n * w.top_k
    a = weights + 4 * n * w.top_k
    b = a + 4 * n * w.widest
    c = b + 4 * n * w.widest
    state = c + 4 * n * w.widest
    y = state + 4 * n * hidden
    packed = y + 4 * n * w.top_k * hidden
    rest = (packed + 4 * n * (w.widest + 2 * LANES) + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
    _norms(embed, hidden, n, w.embedding_norm, hidden, w.eps, a, 2 * hidden)
    _norms(h, hidden, n, w.hidden_norm, hidden, w.eps, a + 4 * hidden, 2 * hidden)
    product(a, n, 2 * hidden, w.project, w.bf16, hidden, packed, state)
    _norms(state, hidden, n, w.input_norm, hidden, w.eps, a, hidden)
    if w.rank:
        product(a, n, hidden, w.q_down, w.bf16, w.rank, packed, c)
        _norms(c, w.rank, n, w.q_norm, w.rank, w.latent_eps, c, w.rank)
        product(c, n, w.rank, w.q_up, w.bf16, w.heads * width, packed, b)
    else:
        product(a, n, hidden, w.q_up, w.bf16, w.heads * width, packed, b)
    product(a, n, hidden, w.compress, w.bf16, w.latent + w.dim, packed, c)
    past = cached - n
    new_rows(b, n, w.heads, w.plain, w.dim, c, w.latent, w.latent_norm, w.latent_eps, cos, sin, 4 * w.dim, w.interleaved,
             False, w.bf16, latents + past * w.latent * size, keys + past * w.dim * size, rest)  # fmt: skip
    attend(b, n, w.heads, w.plain, w.dim, latents, w.latent * size, w.latent, keys, w.dim * size, cached, w.up, w.values,
           mask, cached, BOOL_MASK, w.scale, False, w.bf16, 0, w.heads, a, rest)  # fmt: skip
    product(a, n, w.heads * w.values, w.out, w.bf16, hidden, packed, b)
    _add(state, b, n * hidden)
    _norms(state, hidden, n, w.post_norm, hidden, w.eps, a, hidden)
    product(a, n, hidden, w.router, False, w.experts, packed, b)
    route(b, w.router_bias, n, w.experts, w.top_k, w.groups, w.kept_groups, w.normalise, w.factor, weights, index, rest)
    run_experts(a, 4 * hidden, n, hidden, index, w.top_k, w.experts, w.gate_up, w.down, w.units, 0, 0, 0, False, w.bf16, w.bf16, False, 1.0,
                np.inf, 0.0, 0, 0, 0, 1, y, rest)  # fmt: skip
    combine(y, n, hidden, index, weights, w.top_k, w.experts, b, False, False, rest)
    _add(state, b, n * hidden)
    product(a, n, hidden, w.shared_gate, w.bf16, w.shared, packed, b)
    product(a, n, hidden, w.shared_up, w.bf16, w.shared, packed, c)
    gate, other = view(b, n * w.shared, np.float32), view(c, n * w.shared, np.float32)
    for i in range(n * w.shared):
        gate[i] = gate[i] / (np.float32(1.0) + exp(-gate[i])) * other[i]
    product(b, n, w.shared, w.shared_down, w.bf16, hidden, packed, c)
    _add(state, c, n * hidden)
    _norms(state, hidden, n, w.output_norm, hidden, w.eps, out, hidden)


def _scratch_size(w: _Layer, n: int, cached: int) -> int:
    """fp32 numbers that `_layer` needs."""
    inside = max(
        5 * max(w.latent, 2 * w.dim),
        attend_scratch(w.heads, w.plain, w.dim, w.latent, w.values, cached),
        2 * w.experts + w.groups,
        experts_scratch(n, w.hidden, w.units, w.top_k, w.experts),
        w.hidden + n * w.top_k,
    )
    return n * (3 * w.top_k + 4 * w.widest + w.hidden + w.top_k * w.hidden + 2 * LANES) + CACHE_LINE // 4 + inside


def _addresses(w: MtpWeights) -> _Layer:
    heads, latent, dim = w.heads, w.up.shape[1], w.compress.shape[0] - w.up.shape[1]
    plain = w.q_up.shape[0] // heads - dim
    values, rank = w.up.shape[0] // heads - plain, 0 if w.q_down is None else w.q_down.shape[0]
    hidden, shared = w.out.shape[0], w.shared_down.shape[1]
    widest = max(2 * hidden, w.q_up.shape[0], heads * values, rank, latent + dim, len(w.router), shared)
    tensors = {name: 0 if value is None else value.data_ptr() for name, value in vars(w).items() if name in _TENSORS}
    return _Layer(
        **tensors, hidden=hidden, heads=heads, plain=plain, dim=dim, latent=latent, values=values, rank=rank,
        experts=len(w.router), units=w.down.shape[2], shared=shared, widest=widest, top_k=w.rule.top_k, groups=w.rule.groups,
        kept_groups=w.rule.kept_groups, normalise=bool(w.rule.normalise), factor=float(w.rule.factor), scale=float(w.scale),
        interleaved=bool(w.interleaved), eps=float(w.eps), latent_eps=float(w.latent_eps), bf16=w.up.dtype is torch.bfloat16,
    )  # fmt: skip


_TENSORS = _Layer._fields[: _Layer._fields.index("hidden")]


def mtp_layer(
    w: MtpWeights, embed_nH: Tensor, h_nH: Tensor, cos_nR: Tensor, sin_nR: Tensor, latent_JL: Tensor, key_JR: Tensor,
    mask_nJ: Tensor,
) -> Tensor:  # fmt: skip
    """Same contract as the reference; see `dispatch.supports_mtp` for what it takes. ValueError unless cached rows are dense."""
    sparse = None if latent_JL.is_contiguous() and key_JR.is_contiguous() else "rows of latents and keys must be dense"
    refuse("mtp_layer", invalid(w, embed_nH, h_nH, cos_nR, sin_nR, latent_JL, key_JR, mask_nJ) or sparse)
    layer, n, cached = _addresses(w), len(embed_nH), len(latent_JL)
    embed, h, cos, sin = (x.contiguous() for x in (embed_nH, h_nH, cos_nR, sin_nR))
    mask, out = mask_nJ.contiguous(), torch.empty(embed_nH.shape)
    _layer(layer, n, embed.data_ptr(), h.data_ptr(), cos.data_ptr(), sin.data_ptr(), latent_JL.data_ptr(),
           key_JR.data_ptr(), cached, mask.data_ptr(), out.data_ptr(), workspace(_scratch_size(layer, n, cached)))  # fmt: skip
    return out
