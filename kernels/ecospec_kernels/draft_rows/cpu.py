"""CPU kernel of `draft_rows` (numba): see `reference.py`; fusion, embedding and layer in one call."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ecospec_kernels.blocks import LANES, compiled, read_row, view, workspace
from ecospec_kernels.draft_layer.cpu import layer as draft_layer
from ecospec_kernels.draft_layer.cpu import optional, product
from ecospec_kernels.draft_layer.cpu import scratch_size as layer_scratch
from ecospec_kernels.draft_layer.reference import Rope
from ecospec_kernels.draft_rows.reference import RowWeights, normed
from ecospec_kernels.few_row_linear.cpu import SPLIT_BYTES, few_row_linear


@compiled
def _rows(tokens: int, m: int, features: int, features_stride: int, features_bf16: bool, width: int, fc: int,
          embedding: int, embedding_bf16: bool, hidden: int, heads: int, groups: int, dim: int, inner: int, bf16: bool,
          eps: float, normed_residual: bool, input_norm: int, hidden_norm: int, post_norm: int, qkv_w: int, out_w: int,
          gate_up_w: int, down_w: int, qkv_bias: int, out_bias: int, output_norm: int, cos: int, sin: int, keys: int,
          values: int, cache_stride: int, past: int, seen: int, states: int, scratch: int) -> None:  # fmt: skip
    """Strides in bytes; `fc` 0: the features are fused already. `seen`: lower triangle of ones, uint8 [m, m].

    `scratch`: features, fused rows and embeddings in fp32, then what product and layer need.
    """
    row, new = hidden * 4, past * dim * 4
    fused = scratch + m * width * 4 if fc else scratch
    embed = scratch + m * (width * 4 + row)
    rest = embed + m * row
    ids = view(tokens, m, np.int64)
    for t in range(m):
        read_row(features + t * features_stride, width, features_bf16, scratch + t * width * 4)
        read_row(embedding + ids[t] * hidden * (2 if embedding_bf16 else 4), hidden, embedding_bf16, embed + t * row)
    if fc:
        product(scratch, m, width, fc, bf16, hidden, rest, fused)
    draft_layer(embed, fused, m, hidden, heads, groups, dim, inner, bf16, eps, normed_residual, input_norm, hidden_norm,
           post_norm, qkv_w, out_w, gate_up_w, down_w, qkv_bias, out_bias, output_norm, cos, sin, dim * 4, keys, values,
           cache_stride, past, keys + new, values + new, cache_stride, m, seen, states + past * row, rest)  # fmt: skip


def draft_rows(
    w: RowWeights, tokens: list[int], features_mF: Tensor, rope: Rope, keys_GRD: Tensor, values_GRD: Tensor,
    states_RH: Tensor, past: int,
) -> None:  # fmt: skip
    """Same contract as the reference. IndexError for a token that the embedding lacks."""
    if not 0 <= min(tokens) <= max(tokens) < len(w.embedding):
        raise IndexError(f"token ids outside 0..{len(w.embedding) - 1}")
    layer, m, hidden, fc = w.layer, len(tokens), states_RH.shape[1], w.fc_HF.data_ptr()
    features = features_mF
    if w.feature_norms or features.dtype not in (torch.bfloat16, torch.float32) or features.stride(1) != 1:
        features = normed(features.float().contiguous(), w.feature_norms, layer)
    if torch.get_num_threads() > 1 and w.fc_HF.numel() * w.fc_HF.element_size() >= SPLIT_BYTES:
        features, fc = few_row_linear(features.float(), w.fc_HF), 0
    width, inner, dim = features.shape[1], layer.down.shape[1], layer.head_dim
    ids, seen = np.array(tokens, np.int64), np.tri(m, dtype=np.uint8)
    inside = layer_scratch(m, hidden, layer.heads * dim, layer.qkv.shape[0], inner, past, m)
    _rows(
        ids.ctypes.data, m, features.data_ptr(), features.stride(0) * features.element_size(),
        features.dtype == torch.bfloat16, width, fc, w.embedding.data_ptr(), w.embedding.dtype == torch.bfloat16, hidden,
        layer.heads, layer.kv_heads, dim, inner, layer.qkv.dtype == torch.bfloat16, layer.eps, layer.norm_before_residual,
        layer.input_norm.data_ptr(), layer.hidden_norm.data_ptr(), layer.post_norm.data_ptr(), layer.qkv.data_ptr(),
        layer.out.data_ptr(), layer.gate_up.data_ptr(), layer.down.data_ptr(), *optional(layer), rope[0].data_ptr(),
        rope[1].data_ptr(), keys_GRD.data_ptr(), values_GRD.data_ptr(), 4 * keys_GRD.stride(0), past, seen.ctypes.data,
        states_RH.data_ptr(),
        workspace(m * (width + 2 * hidden) + max(inside, m * (width + 2 * LANES))),
    )  # fmt: skip
