"""CPU kernel of `draft_layer` (numba): see `reference.py` for the mathematics.

The whole layer is one call, since a handful of rows costs less than the dozens of small operations around them. Rows and
cache are fp32; matrices bf16 or fp32. A row's result does not depend on the rows beside it, nor on whether the rows it
sees are committed or recent: scores are summed in the order of the rows seen.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from ecospec_kernels.blocks import LANES, NARROW, compiled, exp, view, workspace
from ecospec_kernels.draft_layer.reference import LayerWeights, Rope
from ecospec_kernels.products import BLOCK, _dots, matmul, matmul_f32, pack_row, plane_length, planes_of

_wide_dot, _narrow_dot = _dots(1, 1, False, 1, LANES), _dots(1, 1, False, 1, NARROW)


@numba.njit(nogil=True, fastmath={"contract", "reassoc"})
def rms(x: int, weight: int, columns: int, eps: float, out: int) -> None:
    """RMS norm of one fp32 row."""
    row, scale, result = view(x, columns, np.float32), view(weight, columns, np.float32), view(out, columns, np.float32)
    total = np.float32(0.0)
    for i in range(columns):
        total += row[i] * row[i]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(columns) + np.float32(eps))
    for i in range(columns):
        result[i] = row[i] * factor * scale[i]


@numba.njit(nogil=True)
def product(x: int, n: int, columns: int, w: int, bf16: bool, outputs: int, packed: int, out: int) -> None:
    """out [n, outputs] = x [n, columns] @ w [outputs, columns].T; x and out dense fp32, `packed` is room for x packed."""
    planes, plane = planes_of(False, bf16), plane_length(columns, bf16)
    stride = planes * plane * 4
    for t in range(n):
        pack_row(x + t * columns * 4, columns, bf16, planes, packed + t * stride)
    words = columns // 2 if bf16 else columns
    matmul(bf16, planes, w, 4 * words, words, 0, outputs, packed, stride, plane, n, out, outputs * 4)


@numba.njit(nogil=True)
def _add_bias(rows: int, n: int, outputs: int, bias: int) -> None:
    """Add one fp32 row to each of n; 0 is none."""
    if bias:
        values, row = view(rows, n * outputs, np.float32), view(bias, outputs, np.float32)
        for t in range(n):
            for i in range(outputs):
                values[t * outputs + i] += row[i]


@numba.njit(nogil=True)
def _rotate(row: int, dim: int, cos: int, sin: int, out: int) -> None:
    """One head's rotary embedding, from `row` to `out` (may be the same)."""
    x, c, s, result = (view(row, dim, np.float32), view(cos, dim, np.float32), view(sin, dim, np.float32),
                       view(out, dim, np.float32))  # fmt: skip
    half = dim // 2
    for i in range(half):
        low, high = x[i], x[i + half]
        result[i] = low * c[i] + high * s[i]
        result[i + half] = high * c[i + half] + low * s[i + half]


@numba.njit(nogil=True)
def _scores(q: int, q_stride: int, n: int, keys: int, count: int, dim: int, out: int, out_stride: int) -> None:
    """out[t, j] = q[t] . keys[j] for `count` dense fp32 keys."""
    if count >= BLOCK:
        matmul_f32(keys, dim * 4, dim, 0, count, q, q_stride, dim, n, out, out_stride)
    else:
        for t in range(n):
            for j in range(count):
                if dim < LANES:
                    _narrow_dot(keys + j * dim * 4, 0, dim, q + t * q_stride, 0, dim, out + t * out_stride + j * 4, 0)
                else:
                    _wide_dot(keys + j * dim * 4, 0, dim, q + t * q_stride, 0, dim, out + t * out_stride + j * 4, 0)


@numba.njit(nogil=True, fastmath={"contract", "reassoc"})
def _softmax(scores: int, kept: int, scale: float) -> None:
    """Softmax of `scale` times `kept` fp32 numbers, in place."""
    p = view(scores, kept, np.float32)
    top = p[0]
    for i in range(kept):
        top = max(top, p[i])
    total = np.float32(0.0)
    for i in range(kept):
        p[i] = exp((p[i] - top) * np.float32(scale))
        total += p[i]
    share = np.float32(1.0) / total
    for i in range(kept):
        p[i] *= share


@numba.njit(nogil=True, fastmath={"contract"})
def _mix(weights: int, count: int, values: int, index: int, dim: int, out: int) -> None:
    """out [dim] += weights[i] * values[i] in order; rows of `values` by `index` (int64) if it is not 0."""
    result, weight = view(out, dim, np.float32), view(weights, count, np.float32)
    rows = view(index if index else weights, count if index else 0, np.int64)
    for i in range(count):
        row, w = view(values + (rows[i] if index else i) * dim * 4, dim, np.float32), weight[i]
        for d in range(dim):
            result[d] += w * row[d]


@numba.njit(nogil=True)
def _attend(qkv: int, n: int, width: int, heads: int, groups: int, dim: int, scale: float, keys: int, values: int,
            cache_stride: int, past: int, recent_keys: int, recent_values: int, recent_stride: int, recent: int,
            seen: int, out: int, scratch: int) -> None:  # fmt: skip
    """Attention of n rows of `qkv` (row width `width`) -> out [n, heads * dim]; `scratch`: recent * 2 + n * keys fp32."""
    total = past + recent
    index = view(scratch, recent, np.int64)
    scores = scratch + recent * 8
    for head in range(heads):
        group = head // (heads // groups)
        q = qkv + head * dim * 4
        _scores(q, width * 4, n, keys + group * cache_stride, past, dim, scores, total * 4)
        _scores(q, width * 4, n, recent_keys + group * recent_stride, recent, dim, scores + past * 4, total * 4)
        for t in range(n):
            line = view(scores + t * total * 4, total, np.float32)
            mask = view(seen + t * recent, recent, np.uint8)
            kept = 0
            for j in range(recent):
                if mask[j]:
                    line[past + kept] = line[past + j]
                    index[kept] = j
                    kept += 1
            weights = scores + t * total * 4
            _softmax(weights, past + kept, scale)
            result = out + (t * heads + head) * dim * 4
            view(result, dim, np.float32)[:] = np.float32(0.0)
            _mix(weights, past, values + group * cache_stride, 0, dim, result)
            _mix(weights + past * 4, kept, recent_values + group * recent_stride, scratch, dim, result)


@compiled
def layer(embed: int, h: int, n: int, hidden: int, heads: int, groups: int, dim: int, inner: int, bf16: bool, eps: float,
           normed_residual: bool, input_norm: int, hidden_norm: int, post_norm: int, qkv_w: int, out_w: int,
           gate_up_w: int, down_w: int, qkv_bias: int, out_bias: int, output_norm: int, cos: int, sin: int,
           rope_stride: int, keys: int, values: int, cache_stride: int, past: int, recent_keys: int, recent_values: int,
           recent_stride: int, recent: int, seen: int, out: int, scratch: int) -> None:  # fmt: skip
    """Strides in bytes; everything but the matrices fp32; biases and output norm 0 if none. `scratch`: see `scratch_size`."""
    width = (heads + 2 * groups) * dim
    packed = scratch
    x = packed + n * (2 * max(hidden, heads * dim, inner) + 4 * LANES) * 4
    qkv = x + n * max(2 * hidden, heads * dim, inner) * 4
    state = qkv + n * max(width, 2 * inner, hidden) * 4
    rest = state + n * hidden * 4
    for t in range(n):
        at = x + t * 2 * hidden * 4
        rms(embed + t * hidden * 4, input_norm, hidden, eps, at)
        rms(h + t * hidden * 4, hidden_norm, hidden, eps, at + hidden * 4)
        residual = at + hidden * 4 if normed_residual else h + t * hidden * 4
        view(state + t * hidden * 4, hidden, np.float32)[:] = view(residual, hidden, np.float32)
    product(x, n, 2 * hidden, qkv_w, bf16, width, packed, qkv)
    _add_bias(qkv, n, width, qkv_bias)
    for t in range(n):
        row, c, s, slot = qkv + t * width * 4, cos + t * rope_stride, sin + t * rope_stride, (recent - n + t) * dim * 4
        for head in range(heads):
            _rotate(row + head * dim * 4, dim, c, s, row + head * dim * 4)
        for g in range(groups):
            _rotate(row + (heads + g) * dim * 4, dim, c, s, recent_keys + g * recent_stride + slot)
            view(recent_values + g * recent_stride + slot, dim, np.float32)[:] = view(
                row + (heads + groups + g) * dim * 4, dim, np.float32
            )
    _attend(qkv, n, width, heads, groups, dim, 1.0 / np.sqrt(dim), keys, values, cache_stride, past, recent_keys,
            recent_values, recent_stride, recent, seen, x, rest)  # fmt: skip
    product(x, n, heads * dim, out_w, bf16, hidden, packed, qkv)
    _add_bias(qkv, n, hidden, out_bias)
    states, added = view(state, n * hidden, np.float32), view(qkv, n * hidden, np.float32)
    for i in range(n * hidden):
        states[i] += added[i]
    for t in range(n):
        rms(state + t * hidden * 4, post_norm, hidden, eps, x + t * hidden * 4)
    product(x, n, hidden, gate_up_w, bf16, 2 * inner, packed, qkv)
    for t in range(n):
        gate, up = (
            view(qkv + t * 2 * inner * 4, inner, np.float32),
            view(qkv + (2 * t + 1) * inner * 4, inner, np.float32),
        )
        active = view(x + t * inner * 4, inner, np.float32)
        for i in range(inner):
            active[i] = gate[i] / (np.float32(1.0) + exp(-gate[i])) * up[i]
    product(x, n, inner, down_w, bf16, hidden, packed, out)
    result = view(out, n * hidden, np.float32)
    for i in range(n * hidden):
        result[i] += states[i]
    if output_norm:
        for t in range(n):
            rms(out + t * hidden * 4, output_norm, hidden, eps, out + t * hidden * 4)


def optional(w: LayerWeights) -> tuple[int, int, int]:
    """Addresses of the biases and of the output norm, 0 for each that the head lacks."""
    return tuple(0 if x is None else x.data_ptr() for x in (w.qkv_bias, w.out_bias, w.output_norm))  # type: ignore[return-value]


def scratch_size(n: int, hidden: int, attention: int, width: int, inner: int, past: int, recent: int) -> int:
    """fp32 numbers that `layer` needs."""
    widest = max(hidden, attention, inner)
    rows = 2 * widest + 4 * LANES + max(2 * hidden, attention, inner) + max(width, 2 * inner, hidden) + hidden
    return n * (rows + past + recent) + 2 * recent


def draft_layer(
    w: LayerWeights, embed_nH: Tensor, h_nH: Tensor, rope: Rope, keys_GPD: Tensor, values_GPD: Tensor,
    recent_keys_GrD: Tensor, recent_values_GrD: Tensor, seen_nr: Tensor,
) -> Tensor:  # fmt: skip
    """Same contract as the reference; rows of the caches dense, `seen_nr` contiguous."""
    n, hidden = embed_nH.shape
    width, inner = w.qkv.shape[0], w.down.shape[1]
    past, recent = keys_GPD.shape[1], recent_keys_GrD.shape[1]
    embed, h, seen = embed_nH.contiguous(), h_nH.contiguous(), seen_nr.contiguous()
    out = torch.empty((n, hidden))
    layer(
        embed.data_ptr(), h.data_ptr(), n, hidden, w.heads, w.kv_heads, w.head_dim, inner, w.qkv.dtype == torch.bfloat16,
        w.eps, w.norm_before_residual, w.input_norm.data_ptr(), w.hidden_norm.data_ptr(), w.post_norm.data_ptr(),
        w.qkv.data_ptr(), w.out.data_ptr(), w.gate_up.data_ptr(), w.down.data_ptr(), *optional(w), rope[0].data_ptr(),
        rope[1].data_ptr(), 4 * w.head_dim if rope[0].shape[0] > 1 else 0, keys_GPD.data_ptr(), values_GPD.data_ptr(),
        4 * keys_GPD.stride(0), past, recent_keys_GrD.data_ptr(), recent_values_GrD.data_ptr(),
        4 * recent_keys_GrD.stride(0), recent, seen.data_ptr(), out.data_ptr(),
        workspace(scratch_size(n, hidden, w.heads * w.head_dim, width, inner, past, recent)),
    )  # fmt: skip
    return out
