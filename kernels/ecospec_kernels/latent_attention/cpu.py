"""CPU kernels of `latent_attention` (numba): see `reference.py` for the mathematics, `products.py` for how it runs.

Rows go one by one, each over the keys that it may see, in order: as in `tree_attention`, its result is that of a pass without
the others. All tensors have one dtype.
"""

from __future__ import annotations

from itertools import pairwise

import numba
import numpy as np
import torch
from torch import Tensor

from ecospec_kernels.blocks import LANES, compiled, read_row, view, workspace, write_row
from ecospec_kernels.checks import refuse
from ecospec_kernels.draft_layer.cpu import rms
from ecospec_kernels.few_row_linear.cpu import SPLIT_BYTES, pool
from ecospec_kernels.latent_attention.reference import invalid
from ecospec_kernels.products import BLOCK, matmul, pack_row, plane_length, planes_of
from ecospec_kernels.tree_attention.cpu import MASKED, bias_of, mask_arguments, pad_keys, softmax

AT_ONCE = 4  # rows that are added to a sum together


@numba.njit(nogil=True)
def _rotate(row: int, dim: int, cos: int, sin: int, interleaved: bool, out: int) -> None:
    """fp32 numbers from `row` to `out`, another place."""
    half = dim // 2
    x, y = view(row, dim, np.float32), view(out, dim, np.float32)
    c, s = view(cos, half, np.float32), view(sin, half, np.float32)
    for i in range(half):
        first, second = (x[2 * i], x[2 * i + 1]) if interleaved else (x[i], x[half + i])
        y[i], y[half + i] = first * c[i] - second * s[i], second * c[i] + first * s[i]


@compiled
def new_rows(q: int, n: int, heads: int, plain: int, dim: int, compressed: int, latent: int, norm: int, eps: float, cos: int,
             sin: int, table_stride: int, interleaved: bool, x_bf16: bool, bf16: bool, latents: int, keys: int,
             scratch: int) -> None:  # fmt: skip
    """`dim`: of a rotated part; `bf16`: what is written to the cache, `x_bf16`: all else. `scratch`: norm, row, cosines, sines and result, each as wide as latent or twice `dim`."""
    x_size, size, room = 2 if x_bf16 else 4, 2 if bf16 else 4, 4 * max(latent, 2 * dim)
    weight, row, c, s, out = scratch, scratch + room, scratch + 2 * room, scratch + 3 * room, scratch + 4 * room
    read_row(norm, latent, x_bf16, weight)
    for t in range(n):
        at = compressed + t * (latent + dim) * x_size
        read_row(at, latent, x_bf16, row)
        rms(row, weight, latent, eps, out)
        write_row(out, latent, bf16, latents + t * latent * size)
        read_row(cos + t * table_stride, dim // 2, x_bf16, c)
        read_row(sin + t * table_stride, dim // 2, x_bf16, s)
        read_row(at + latent * x_size, dim, x_bf16, row)
        _rotate(row, dim, c, s, interleaved, out)
        write_row(out, dim, bf16, keys + t * dim * size)
        for h in range(heads):
            part = q + ((t * heads + h) * (plain + dim) + plain) * x_size
            read_row(part, dim, x_bf16, row)
            _rotate(row, dim, c, s, interleaved, out)
            write_row(out, dim, x_bf16, part)


def latent_rows(
    q_nHD: Tensor, compressed_nC: Tensor, norm_L: Tensor, eps: float, cos_nR: Tensor, sin_nR: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Same contract as the reference; see `dispatch.supports_latent` for what it takes."""
    n, heads, width = q_nHD.shape
    latent, dim, bf16 = norm_L.shape[0], cos_nR.shape[1], q_nHD.dtype is torch.bfloat16
    latents, keys = (torch.empty((n, width), dtype=q_nHD.dtype) for width in (latent, dim))
    new_rows(q_nHD.data_ptr(), n, heads, width - dim, dim, compressed_nC.data_ptr(), latent, norm_L.data_ptr(), eps,
          cos_nR.data_ptr(), sin_nR.data_ptr(), cos_nR.stride(0) * cos_nR.element_size(), interleaved,
          bf16, bf16, latents.data_ptr(), keys.data_ptr(), workspace(5 * max(latent, 2 * dim)))  # fmt: skip
    return latents, keys


@numba.njit(nogil=True)
def _read_rows(rows: int, stride: int, chosen: int, first: int, count: int, columns: int, bf16: bool, block: int) -> None:  # fmt: skip
    """fp32 copies of `count` of the rows: of those that `chosen` (int64) lists from `first` on, or of all if it is 0."""
    index = view(chosen if chosen else block, first + count if chosen else 0, np.int64)
    for i in range(count):
        read_row(rows + (index[first + i] if chosen else first + i) * stride, columns, bf16, block + 4 * i * columns)


@numba.njit(nogil=True, fastmath={"contract"})
def _add_rows(block: int, count: int, columns: int, weights: int, out: int) -> None:
    """out [columns] += weights[i] * block[i] for up to AT_ONCE rows, one after the other: all fp32."""
    w, total = view(weights, count, np.float32), view(out, columns, np.float32)
    rows = view(block, count * columns, np.float32).reshape(count, columns)
    if count == AT_ONCE:
        a, b, c, d = rows[0], rows[1], rows[2], rows[3]
        for i in range(columns):
            total[i] = total[i] + w[0] * a[i] + w[1] * b[i] + w[2] * c[i] + w[3] * d[i]
    else:
        for j in range(count):
            for i in range(columns):
                total[i] += w[j] * rows[j, i]


@compiled
def attend(q: int, n: int, heads: int, plain: int, dim: int, latents: int, latent_row: int, latent: int, keys: int,
            key_row: int, cached: int, up: int, values: int, mask: int, mask_row: int, mask_kind: int, scale: float,
            x_bf16: bool, bf16: bool, first: int, last: int, out: int, scratch: int) -> None:  # fmt: skip
    """Heads [first, last) of every row; `x_bf16`: q and out, `bf16`: the others; strides in bytes; `cached` >= BLOCK rows. `scratch`: as `attend_scratch` counts."""
    planes, size, x_size, many = planes_of(False, bf16), 2 if bf16 else 4, 2 if x_bf16 else 4, last - first
    plane, dim_plane = plane_length(latent, bf16), plane_length(dim, bf16)
    stride, dim_stride = 4 * planes * plane, 4 * planes * dim_plane
    shown = scratch
    added = shown + 8 * cached
    packed = added + 4 * cached
    packed_keys = packed + many * stride
    scores = packed_keys + many * dim_stride
    key_scores = scores + 4 * many * cached
    mixed = key_scores + 4 * many * cached
    row = mixed + 4 * many * latent
    block = row + 4 * max(plain, dim, values)
    index, bias = view(shown, cached, np.int64), view(added, cached, np.float32)
    up_head = (plain + values) * latent * size
    for t in range(n):
        kept = 0
        for j in range(cached):
            shift = bias_of(mask + t * mask_row, mask_kind, j)
            if not shift <= MASKED:  # NaN does not hide
                index[kept], bias[kept] = j, shift
                kept += 1
        view(mixed, many * latent, np.float32)[:] = np.float32(0.0)
        for h in range(many):
            at = q + (t * heads + first + h) * (plain + dim) * x_size
            read_row(at, plain, x_bf16, row)
            for d in range(0, plain, AT_ONCE):
                count = min(AT_ONCE, plain - d)
                _read_rows(up + (first + h) * up_head, latent * size, 0, d, count, latent, bf16, block)
                _add_rows(block, count, latent, row + 4 * d, mixed + 4 * h * latent)
            pack_row(mixed + 4 * h * latent, latent, bf16, planes, packed + h * stride)
            read_row(at + plain * x_size, dim, x_bf16, row)
            pack_row(row, dim, bf16, planes, packed_keys + h * dim_stride)
        matmul(
            bf16,
            planes,
            latents,
            latent_row,
            latent // planes,
            0,
            cached,
            packed,
            stride,
            plane,
            many,
            scores,
            4 * cached,
        )
        matmul(bf16, planes, keys, key_row, dim // planes, 0, cached, packed_keys, dim_stride, dim_plane, many, key_scores,
               4 * cached)  # fmt: skip
        for h in range(many):
            score = view(scores + 4 * h * cached, cached, np.float32)
            more = view(key_scores + 4 * h * cached, cached, np.float32)
            for i in range(kept):
                score[i] = (score[index[i]] + more[index[i]]) * np.float32(scale) + bias[i]
            softmax(scores + 4 * h * cached, kept, np.float32(-np.inf))
        view(mixed, many * latent, np.float32)[:] = np.float32(0.0)
        for i in range(0, kept, AT_ONCE):
            count = min(AT_ONCE, kept - i)
            _read_rows(latents, latent_row, shown, i, count, latent, bf16, block)
            for h in range(many):
                _add_rows(block, count, latent, scores + 4 * (h * cached + i), mixed + 4 * h * latent)
        for h in range(many):
            pack_row(mixed + 4 * h * latent, latent, bf16, planes, packed)
            matmul(bf16, planes, up + (first + h) * up_head + plain * latent * size, latent * size, latent // planes, 0,
                   values, packed, stride, plane, 1, row, 4 * values)  # fmt: skip
            write_row(row, values, x_bf16, out + (t * heads + first + h) * values * x_size)


def attend_scratch(heads: int, plain: int, dim: int, latent: int, values: int, cached: int) -> int:
    """fp32 numbers that `attend` needs for this many heads."""
    row = max(plain, dim, values) + AT_ONCE * latent
    return 3 * cached + heads * (2 * latent + dim + 4 * LANES + 2 * cached) + row


def latent_attention(
    q_nHD: Tensor, latent_JL: Tensor, key_JR: Tensor, up_OL: Tensor, mask_nJ: Tensor | None, scale: float
) -> Tensor:
    """Same contract as the reference; see `dispatch.supports_latent` for what it takes."""
    refuse("latent_attention", invalid(q_nHD, latent_JL, key_JR, up_OL, mask_nJ))
    n, heads, width = q_nHD.shape
    latent, dim = latent_JL.shape[1], key_JR.shape[1]
    if latent_JL.shape[0] < BLOCK:
        mask_nJ, latent_JL, key_JR = pad_keys(n, mask_nJ, latent_JL, key_JR)
    cached, plain = latent_JL.shape[0], width - dim
    values = up_OL.shape[0] // heads - plain
    out, size = torch.empty((n, heads, values), dtype=q_nHD.dtype), q_nHD.element_size()
    bf16, (mask, mask_row, mask_kind) = q_nHD.dtype is torch.bfloat16, mask_arguments(mask_nJ)
    start = (q_nHD.data_ptr(), n, heads, plain, dim, latent_JL.data_ptr(), latent_JL.stride(0) * size, latent,
             key_JR.data_ptr(), key_JR.stride(0) * size, cached, up_OL.data_ptr(), values, mask, mask_row, mask_kind,
             scale, bf16, bf16)  # fmt: skip

    def run(first: int, last: int) -> None:
        room = attend_scratch(last - first, plain, dim, latent, values, cached)
        attend(*start, first, last, out.data_ptr(), workspace(room))

    threads = min(torch.get_num_threads(), heads)
    if threads == 1 or up_OL.numel() * size < SPLIT_BYTES:
        run(0, heads)
    else:
        list(pool(threads).map(lambda span: run(*span), pairwise(heads * i // threads for i in range(threads + 1))))
    return out
