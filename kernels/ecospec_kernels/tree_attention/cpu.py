"""CPU kernel of `tree_attention` (numba), bf16 only: see `reference.py` for the mathematics.

Each row first gathers the keys it may see, in order, and only then takes maximum, sum and values over them: the result
is bit for bit the one of a pass that holds no other keys.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from ecospec_kernels.blocks import LANES, compiled, exp, load_bf16, read_row, view, workspace, write_row
from ecospec_kernels.checks import refuse
from ecospec_kernels.products import BLOCK, matmul, pack_row, plane_length, planes_of
from ecospec_kernels.tree_attention.reference import invalid

MASKED = np.float32(-1e30)  # additive masks at or below this hide a key
NO_MASK, BOOL_MASK, BF16_MASK, FP32_MASK = range(4)


@numba.njit(nogil=True)
def bias_of(mask: int, kind: int, j: int) -> np.float32:
    """Additive mask of one key; MASKED or less hides it."""
    if kind == NO_MASK:
        return np.float32(0.0)
    if kind == BOOL_MASK:
        return np.float32(0.0) if view(mask, j + 1, np.uint8)[j] else np.float32(-np.inf)
    if kind == BF16_MASK:
        return load_bf16(view(mask, j + 1, np.uint16)[j])
    return view(mask, j + 1, np.float32)[j]


@numba.njit(nogil=True, fastmath={"contract", "reassoc"})
def softmax(scores: int, kept: int, sink: np.float32) -> None:
    """Softmax in place over `kept` fp32 numbers and a sink, which gets no value; -inf is none. All others are finite."""
    p = view(scores, kept, np.float32)
    top = max(p[0], sink)
    for i in range(kept):
        top = max(top, p[i])
    total = exp(sink - top) if sink > MASKED else np.float32(0.0)
    for i in range(kept):
        p[i] = exp(p[i] - top)
        total += p[i]
    for i in range(kept):
        p[i] /= total


@numba.njit(nogil=True, fastmath={"contract"})
def _add_values(row: int, v: int, v_stride: int, keys: int, weights: int, kept: int, dim: int) -> None:
    """row [dim] = sum of weights[i] * v[keys[i]], in order."""
    out, index, weight = view(row, dim, np.float32), view(keys, kept, np.int64), view(weights, kept, np.float32)
    for d in range(dim):
        out[d] = 0
    for i in range(kept):
        values, w = view(v + index[i] * v_stride, dim, np.uint16), weight[i]
        for d in range(dim):
            out[d] += w * load_bf16(values[d])


@compiled
def _attend(q: int, q_head: int, q_row: int, k: int, k_head: int, k_row: int, v: int, v_head: int, v_row: int,
            mask: int, mask_row: int, mask_kind: int, heads: int, groups: int, n: int, keys: int, dim: int, value_dim: int,
            scale: float, sinks: int, out: int, scratch: int) -> None:  # fmt: skip
    """Strides in bytes. `keys` >= BLOCK. `sinks`: fp32 [heads], or 0. `scratch`: laid out as `_scratch_size` counts."""
    planes, plane = planes_of(True, True), plane_length(dim, True)
    share, stride = heads // groups, 4 * planes * plane
    kept_keys = scratch
    row = kept_keys + 8 * keys
    packed = row + 4 * max(dim, value_dim)
    scores = packed + n * share * stride
    for g in range(groups):
        for h in range(share):
            for t in range(n):
                read_row(q + (g * share + h) * q_head + t * q_row, dim, True, row)
                pack_row(row, dim, True, planes, packed + (h * n + t) * stride)
        matmul(
            True, planes, k + g * k_head, k_row, dim // 2, 0, keys, packed, stride, plane, share * n, scores, 4 * keys
        )
        index = view(kept_keys, keys, np.int64)
        for h in range(share):
            sink = np.float32(-np.inf)
            if sinks:
                sink = view(sinks, heads, np.float32)[g * share + h]
            for t in range(n):
                line = scores + (h * n + t) * 4 * keys
                score = view(line, keys, np.float32)
                kept, finite = 0, sink < np.inf
                for j in range(keys):
                    bias = bias_of(mask + t * mask_row, mask_kind, j)
                    if not bias <= MASKED:  # NaN does not hide
                        score[kept] = score[j] * np.float32(scale) + bias
                        finite &= score[kept] < np.inf
                        index[kept] = j
                        kept += score[kept] != -np.inf
                if finite:
                    softmax(line, kept, sink)
                    _add_values(row, v + g * v_head, v_row, kept_keys, line, kept, value_dim)
                else:
                    view(row, value_dim, np.float32)[:] = np.nan
                write_row(row, value_dim, True, out + (t * heads + g * share + h) * value_dim * 2)


def _scratch_size(n: int, share: int, keys: int, dim: int, value_dim: int) -> int:
    """fp32 numbers that `_attend` needs."""
    return 2 * keys + max(dim, value_dim) + n * share * (dim + 2 * LANES + keys)


def pad_keys(n: int, mask_nJ: Tensor | None, *rows: Tensor) -> tuple[Tensor, ...]:
    """Mask and cached rows `[..., J, D]` of n queries, with hidden keys up to a BLOCK."""
    keys = rows[0].shape[-2]
    shown = torch.ones((n, keys), dtype=torch.bool) if mask_nJ is None else mask_nJ
    padding = (0, BLOCK - keys)
    mask = torch.nn.functional.pad(shown, padding, value=False if shown.dtype == torch.bool else -torch.inf)
    return mask, *(torch.nn.functional.pad(x, (0, 0, *padding)) for x in rows)


def mask_arguments(mask_nJ: Tensor | None) -> tuple[int, int, int]:
    """Address, bytes from row to row, and kind."""
    if mask_nJ is None:
        return 0, 0, NO_MASK
    kind = {torch.bool: BOOL_MASK, torch.bfloat16: BF16_MASK, torch.float32: FP32_MASK}[mask_nJ.dtype]
    return mask_nJ.data_ptr(), mask_nJ.stride(0) * mask_nJ.element_size(), kind


def tree_attention(
    q_HnD: Tensor, k_GJD: Tensor, v_GJD: Tensor, mask_nJ: Tensor | None, scale: float, sinks_H: Tensor | None = None,
    start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Same contract as the reference; see `dispatch.supports_attention` for what it takes."""
    refuse("tree_attention", invalid(q_HnD, k_GJD, v_GJD, mask_nJ, scale, sinks_H, start))
    if start is not None:
        first = min(max(int(start), 0), k_GJD.size(1))
        k_GJD, v_GJD, mask_nJ = k_GJD[:, first:], v_GJD[:, first:], None if mask_nJ is None else mask_nJ[:, first:]
    heads, n, dim = q_HnD.shape
    groups, keys, value_dim = v_GJD.shape
    if keys < BLOCK:
        mask_nJ, k_GJD, v_GJD = pad_keys(n, mask_nJ, k_GJD, v_GJD)
        keys = BLOCK
    out = torch.empty((n, heads, value_dim), dtype=torch.bfloat16)
    sinks_H = None if sinks_H is None else sinks_H.float()
    q_head, q_row, _ = q_HnD.stride()
    k_head, k_row, _ = k_GJD.stride()
    v_head, v_row, _ = v_GJD.stride()
    _attend(q_HnD.data_ptr(), 2 * q_head, 2 * q_row, k_GJD.data_ptr(), 2 * k_head, 2 * k_row, v_GJD.data_ptr(),
            2 * v_head, 2 * v_row, *mask_arguments(mask_nJ), heads, groups, n, keys, dim, value_dim, scale,
            0 if sinks_H is None else sinks_H.data_ptr(), out.data_ptr(), workspace(_scratch_size(n, heads // groups, keys, dim, value_dim)))  # fmt: skip
    return out
