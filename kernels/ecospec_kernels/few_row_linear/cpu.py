"""CPU kernel of `few_row_linear` (numba): see `reference.py` for the mathematics, `products.py` for how it runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ecospec_kernels.blocks import LANES, compiled, read_row, view, workspace, write_row
from ecospec_kernels.products import BLOCK, matmul, pack_row, plane_length, planes_of

SPLIT_BYTES = 1 << 20  # weights smaller than this are not worth a second thread


@compiled
def _linear(x: int, x_stride: int, n: int, columns: int, w: int, w_stride: int, outputs: int, first: int, last: int,
            bias: int, out: int, x_bf16: bool, w_bf16: bool, scratch: int) -> None:  # fmt: skip
    """Outputs [first, last) of every row; `scratch` holds a row, the packed rows and the fp32 sums (`_scratch_size`)."""
    planes, size = planes_of(x_bf16, w_bf16), 2 if x_bf16 else 4
    plane = plane_length(columns, w_bf16)
    packed = scratch + 4 * max(columns, outputs)
    sums = packed + 4 * n * planes * plane
    for t in range(n):
        read_row(x + t * x_stride, columns, x_bf16, scratch)
        pack_row(scratch, columns, w_bf16, planes, packed + 4 * t * planes * plane)
    matmul(
        w_bf16, planes, w, w_stride, w_stride // 4, first, last, packed, planes * plane * 4, plane, n, sums, outputs * 4
    )
    if bias:
        read_row(bias, outputs, w_bf16, scratch)
    for t in range(n):
        values = sums + 4 * t * outputs
        if bias:
            added, row = view(scratch, outputs, np.float32), view(values, outputs, np.float32)
            for o in range(first, last):
                row[o] += added[o]
        write_row(values + 4 * first, last - first, x_bf16, out + (t * outputs + first) * size)


def _scratch_size(n: int, columns: int, outputs: int) -> int:
    return max(columns, outputs) + n * (columns + 2 * LANES + outputs)


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    """Worker threads; the kernels release the GIL."""
    return ThreadPoolExecutor(threads, thread_name_prefix="ecospec")


def few_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Same contract as the reference; see `dispatch.supports_linear` for what it takes."""
    shape, (outputs, columns) = x.shape, weight.shape
    x = x if x.is_contiguous() else x.contiguous()
    n = x.numel() // columns
    out = torch.empty((*shape[:-1], outputs), dtype=x.dtype)
    x_bf16, w_bf16 = x.dtype is torch.bfloat16, weight.dtype is torch.bfloat16
    start = (x.data_ptr(), columns * (2 if x_bf16 else 4), n, columns, weight.data_ptr(), columns * (2 if w_bf16 else 4),
             outputs)  # fmt: skip
    end = (0 if bias is None else bias.data_ptr(), out.data_ptr(), x_bf16, w_bf16)
    size = _scratch_size(n, columns, outputs)
    threads = torch.get_num_threads()
    if threads == 1 or outputs * columns * (2 if w_bf16 else 4) < SPLIT_BYTES:
        _linear(*start, 0, outputs, *end, workspace(size))
        return out
    blocks = -(-outputs // BLOCK)
    edges = [blocks * i // threads * BLOCK for i in range(threads)] + [outputs]
    spans = [(a, b) for a, b in pairwise(edges) if b > a]
    list(pool(threads).map(lambda s: _linear(*start, s[0], s[1], *end, workspace(size)), spans))
    return out
