"""CPU kernel of `draft_rows` (numba): see `reference.py`; fusion, embedding and layer in one call."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ecospec_kernels.blocks import LANES, compiled, read_row, view, workspace
from ecospec_kernels.draft_layer.cpu import _layer, product
from ecospec_kernels.draft_layer.cpu import _scratch_size as layer_scratch
from ecospec_kernels.draft_layer.reference import Rope
from ecospec_kernels.draft_rows.reference import RowWeights


@compiled
def _rows(tokens: int, m: int, features: int, features_stride: int, features_bf16: bool, width: int, fc: int,
          embedding: int, embedding_bf16: bool, hidden: int, heads: int, groups: int, dim: int, inner: int, bf16: bool,
          eps: float, normed_residual: bool, input_norm: int, hidden_norm: int, post_norm: int, qkv_w: int, out_w: int,
          gate_up_w: int, down_w: int, cos: int, sin: int, keys: int, values: int, cache_stride: int, past: int,
          states: int, scratch: int) -> None:  # fmt: skip
    """Strides in bytes. `scratch`: features, fused rows and embeddings in fp32, then what product and layer need."""
    row, new = hidden * 4, past * dim * 4
    fused = scratch + m * width * 4
    embed = fused + m * row
    rest = embed + m * row
    ids, seen = view(tokens, m, np.int64), np.zeros((m, m), np.uint8)
    for t in range(m):
        read_row(features + t * features_stride, width, features_bf16, scratch + t * width * 4)
        read_row(embedding + ids[t] * hidden * (2 if embedding_bf16 else 4), hidden, embedding_bf16, embed + t * row)
        seen[t, : t + 1] = 1
    product(scratch, m, width, fc, bf16, hidden, rest, fused)
    _layer(embed, fused, m, hidden, heads, groups, dim, inner, bf16, eps, normed_residual, input_norm, hidden_norm,
           post_norm, qkv_w, out_w, gate_up_w, down_w, cos, sin, dim * 4, keys, values, cache_stride, past, keys + new,
           values + new, cache_stride, m, seen.ctypes.data, states + past * row, rest)  # fmt: skip


def draft_rows(
    w: RowWeights, tokens: list[int], features_mF: Tensor, rope: Rope, keys_GRD: Tensor, values_GRD: Tensor,
    states_RH: Tensor, past: int,
) -> None:  # fmt: skip
    """Same contract as the reference; feature rows dense, no feature norms."""
    layer, m, hidden, width = w.layer, len(tokens), states_RH.shape[1], features_mF.shape[1]
    inner, dim = layer.down.shape[1], layer.head_dim
    ids = np.array(tokens, np.int64)
    inside = layer_scratch(m, hidden, layer.heads * dim, layer.qkv.shape[0], inner, past, m)
    _rows(
        ids.ctypes.data, m, features_mF.data_ptr(), features_mF.stride(0) * features_mF.element_size(),
        features_mF.dtype == torch.bfloat16, width, w.fc_HF.data_ptr(), w.embedding.data_ptr(),
        w.embedding.dtype == torch.bfloat16, hidden, layer.heads, layer.kv_heads, dim, inner,
        layer.qkv.dtype == torch.bfloat16, layer.eps, layer.norm_before_residual, layer.input_norm.data_ptr(),
        layer.hidden_norm.data_ptr(), layer.post_norm.data_ptr(), layer.qkv.data_ptr(), layer.out.data_ptr(),
        layer.gate_up.data_ptr(), layer.down.data_ptr(), rope[0].data_ptr(), rope[1].data_ptr(), keys_GRD.data_ptr(),
        values_GRD.data_ptr(), 4 * keys_GRD.stride(0), past, states_RH.data_ptr(),
        workspace(m * (width + 2 * hidden) + max(inside, m * (width + 2 * LANES))),
    )  # fmt: skip
