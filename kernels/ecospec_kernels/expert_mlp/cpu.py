"""CPU kernel of `expert_mlp` (numba): see `reference.py` for the mathematics, `products.py` for how it runs."""

from __future__ import annotations

from functools import cache

import numba
import numpy as np
import torch
from torch import Tensor

from ecospec_kernels.blocks import CACHE_LINE, LANES, compiled, exp, read_row, view, workspace, write_row
from ecospec_kernels.checks import refuse
from ecospec_kernels.expert_mlp.reference import E2M1, GROUP, SWIGLU, Gate, Mxfp4, exponents, invalid
from ecospec_kernels.few_row_linear.cpu import SPLIT_BYTES, pool
from ecospec_kernels.products import matmul, pack_row, plane_length, planes_of

DECODED = (
    GROUP  # rows of an MXFP4 matrix that are decoded at a time, into what stays in a cache; it has whole groups of them
)


@cache
def _codes() -> np.ndarray:
    """The two bf16 numbers, exactly, that a byte of MXFP4 holds under each scale: uint32 [256 scales, 256 bytes], first one low."""
    numbers = torch.tensor([*E2M1, *(-number for number in E2M1)])
    scaled = exponents(torch.arange(256))[:, None] * numbers
    bits = scaled.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return np.ascontiguousarray(bits[:, None, :] | bits[:, :, None] << 16).reshape(-1)


@numba.njit(nogil=True)
def _sort_pairs(index: int, pairs: int, experts: int, starts: int, order: int) -> bool:
    """Pairs (token, slot) by expert: those of e are order[starts[e]:starts[e + 1]], rising. False: an id out of range."""
    ids, begin, sorted_pairs = (
        view(index, pairs, np.int64),
        view(starts, experts + 2, np.int64),
        view(order, pairs, np.int64),
    )
    for e in range(experts + 2):
        begin[e] = 0
    for i in range(pairs):
        if ids[i] < 0 or ids[i] > experts:
            return False
        begin[ids[i] + 1] += 1
    for e in range(experts + 1):
        begin[e + 1] += begin[e]
    for i in range(pairs - 1, -1, -1):  # from the back: begin[e + 1] falls from the end of e to its start
        begin[ids[i] + 1] -= 1
        sorted_pairs[begin[ids[i] + 1]] = i
    for e in range(experts + 1):  # now begin[e + 1] is the start of e: move down by one
        begin[e] = begin[e + 1]
    begin[experts + 1] = pairs
    return True


@numba.njit(nogil=True, fastmath={"contract"}, error_model="numpy")  # a check for division by zero would not vectorise
def _gated(gate_up: int, units: int, interleaved: bool, alpha: float, limit: float, shift: float, row: int) -> None:
    """See `Gate` in `reference.py`; both loops have constant strides, so that they vectorise."""
    values, out = view(gate_up, 2 * units, np.float32), view(row, units, np.float32)
    a, most, s = np.float32(alpha), np.float32(limit), np.float32(shift)
    if interleaved:
        for i in range(units):
            gate = min(values[2 * i], most)
            out[i] = gate / (np.float32(1.0) + exp(-a * gate)) * (min(max(values[2 * i + 1], -most), most) + s)
    else:
        for i in range(units):
            gate = min(values[i], most)
            out[i] = gate / (np.float32(1.0) + exp(-a * gate)) * (min(max(values[units + i], -most), most) + s)


@numba.njit(nogil=True)
def _add_bias(row: int, columns: int, bias: int, bf16: bool, scratch: int) -> None:
    """row += bias; `scratch` has room for `columns` numbers."""
    if bias:
        read_row(bias, columns, bf16, scratch)
        out, values = view(row, columns, np.float32), view(scratch, columns, np.float32)
        for i in range(columns):
            out[i] += values[i]


@numba.njit(nogil=True)
def _decode(values: int, scales: int, groups: int, codes: int, out: int) -> None:
    """`groups` groups of MXFP4 numbers -> bf16; `codes`: see `_codes`."""
    given, scale, table = (
        view(values, groups * 16, np.uint8),
        view(scales, groups, np.uint8),
        view(codes, 1 << 16, np.uint32),
    )
    words = view(out, groups * 16, np.uint32)
    for g in range(groups):
        first = np.int64(scale[g]) << 8
        for i in range(16 * g, 16 * g + 16):
            words[i] = table[first + given[i]]


@numba.njit(nogil=True)
def _product(w: int, scales: int, expert: int, rows: int, columns: int, bf16: bool, planes: int, codes: int, decoded: int, x: int,
             x_stride: int, plane: int, n: int, out: int) -> None:  # fmt: skip
    """out [n, rows] (fp32) of an expert's matrix [rows, columns]: bf16 or fp32, or MXFP4 where it has `scales`."""
    if not scales:
        size = 2 if bf16 else 4
        matmul(bf16, planes, w + expert * rows * columns * size, columns * size, columns * size // 4, 0, rows,
               x, x_stride, plane, n, out, 4 * rows)  # fmt: skip
        return
    groups = columns // GROUP
    for first in range(expert * rows, (expert + 1) * rows, DECODED):
        _decode(w + first * groups * 16, scales + first * groups, DECODED * groups, codes, decoded)
        matmul(True, planes, decoded, 2 * columns, columns // 2, 0, DECODED, x, x_stride, plane, n, out, 4 * rows)
        out += 4 * DECODED


@compiled
def run_experts(x: int, x_stride: int, n: int, hidden: int, index: int, slots: int, experts: int, gate_up: int, down: int,
             units: int, gate_up_scales: int, down_scales: int, codes: int, x_bf16: bool, w_bf16: bool, b_bf16: bool,
             interleaved: bool, alpha: float, limit: float, shift: float, gate_up_bias: int, down_bias: int, part: int, parts: int,
             y: int, scratch: int) -> bool:  # fmt: skip
    """y [n * slots, hidden] (fp32): each pair's expert output, for every `parts`-th touched expert from `part` on."""
    planes, mid_planes, size = planes_of(x_bf16, w_bf16), planes_of(False, w_bf16), 2 if b_bf16 else 4
    in_plane, mid_plane = plane_length(hidden, w_bf16), plane_length(units, w_bf16)
    in_stride, mid_stride = 4 * planes * in_plane, 4 * mid_planes * mid_plane
    starts, order = scratch, scratch + 8 * (experts + 2)  # the layout that experts_scratch counts
    row = (order + 8 * n * slots + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE  # aligned vectors do not straddle lines
    packed_in = row + 4 * plane_length(max(hidden, units), False)
    packed_mid = packed_in + n * in_stride
    inner = packed_mid + n * mid_stride
    outer = inner + 8 * n * units
    bias = outer + 4 * n * hidden
    decoded = bias + 4 * max(hidden, 2 * units)
    if not _sort_pairs(index, n * slots, experts, starts, order):
        return False
    begins, pair = view(starts, experts + 2, np.int64), view(order, n * slots, np.int64)
    touched = 0
    for e in range(experts):
        begin, count = begins[e], begins[e + 1] - begins[e]
        if count == 0:
            continue
        touched += 1
        if touched % parts != part:
            continue
        # An expert named twice by one token has more pairs than tokens: take them n at a time.
        for chunk in range(begin, begin + count, n):
            rows = min(n, begin + count - chunk)
            for i in range(rows):
                read_row(x + pair[chunk + i] // slots * x_stride, hidden, x_bf16, row)
                pack_row(row, hidden, w_bf16, planes, packed_in + i * in_stride)
            _product(gate_up, gate_up_scales, e, 2 * units, hidden, w_bf16, planes, codes, decoded,
                     packed_in, in_stride, in_plane, rows, inner)  # fmt: skip
            for i in range(rows):
                at = inner + 8 * i * units
                _add_bias(at, 2 * units, gate_up_bias and gate_up_bias + e * 2 * units * size, b_bf16, bias)
                _gated(at, units, interleaved, alpha, limit, shift, row)
                pack_row(row, units, w_bf16, mid_planes, packed_mid + i * mid_stride)
            _product(down, down_scales, e, hidden, units, w_bf16, mid_planes, codes, decoded,
                     packed_mid, mid_stride, mid_plane, rows, outer)  # fmt: skip
            for i in range(rows):
                _add_bias(outer + 4 * i * hidden, hidden, down_bias and down_bias + e * hidden * size, b_bf16, bias)
                write_row(outer + 4 * i * hidden, hidden, False, y + pair[chunk + i] * hidden * 4)
    return True


def experts_scratch(n: int, hidden: int, units: int, slots: int, experts: int) -> int:
    """fp32 numbers that `run_experts` needs."""
    return (
        2 * (experts + 2 + n * slots)
        + CACHE_LINE // 4
        + max(hidden, units)
        + LANES
        + n * (2 * hidden + 3 * units + 4 * LANES)
        + max(hidden, 2 * units)
        + DECODED * max(hidden, units) // 2
    )


@compiled
def combine(y: int, n: int, hidden: int, index: int, weights: int, slots: int, experts: int, out: int, bf16: bool,
             weight_bf16: bool, scratch: int) -> None:  # fmt: skip
    """out[t] = sum over slots, in order, of weight * y; sentinels (id == experts) add nothing."""
    ids = view(index, n * slots, np.int64)
    row, factor = view(scratch, hidden, np.float32), scratch + 4 * hidden
    read_row(weights, n * slots, weight_bf16, factor)
    scale = view(factor, n * slots, np.float32)
    for t in range(n):
        for i in range(hidden):
            row[i] = 0
        for pair in range(t * slots, (t + 1) * slots):
            if ids[pair] < experts:
                values = view(y + pair * hidden * 4, hidden, np.float32)
                for i in range(hidden):
                    row[i] += scale[pair] * values[i]
        write_row(scratch, hidden, bf16, out + t * hidden * (2 if bf16 else 4))


def expert_mlp(
    hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor, gate_up: Tensor | Mxfp4, down: Tensor | Mxfp4, gate: Gate = SWIGLU,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Same contract as the reference; see `dispatch.supports_experts` for what it takes."""
    refuse("expert_mlp", invalid(hidden_ND, index_NK, weight_NK, gate_up, down, gate, gate_up_bias, down_bias))
    n, hidden = hidden_ND.shape
    slots, (experts, _, units) = index_NK.size(1), down.shape
    if isinstance(gate_up, Mxfp4) and isinstance(down, Mxfp4):
        addresses = gate_up.values.data_ptr(), down.values.data_ptr()
        scales, codes, w_bf16 = (gate_up.scales.data_ptr(), down.scales.data_ptr()), _codes().ctypes.data, True
    else:
        addresses = gate_up.data_ptr(), down.data_ptr()  # type: ignore[union-attr]
        scales, codes, w_bf16 = (0, 0), 0, gate_up.dtype == torch.bfloat16  # type: ignore[union-attr]
    x_bf16 = hidden_ND.dtype == torch.bfloat16
    b_bf16 = any(bias is not None and bias.dtype == torch.bfloat16 for bias in (gate_up_bias, down_bias))
    y = torch.empty((n * slots, hidden), dtype=torch.float32)
    out = torch.empty_like(hidden_ND)
    index = index_NK.data_ptr()
    arguments = (
        hidden_ND.data_ptr(), hidden_ND.stride(0) * (2 if x_bf16 else 4), n, hidden, index, slots, experts,
        *addresses, units, *scales, codes, x_bf16, w_bf16, b_bf16, *gate,
        0 if gate_up_bias is None else gate_up_bias.data_ptr(), 0 if down_bias is None else down_bias.data_ptr(),
    )  # fmt: skip
    size = experts_scratch(n, hidden, units, slots, experts)
    address, threads = y.data_ptr(), torch.get_num_threads()
    if threads == 1 or slots * 3 * units * hidden * (2 if w_bf16 else 4) < SPLIT_BYTES:
        known = run_experts(*arguments, 0, 1, address, workspace(size))
    else:
        parts = pool(threads).map(
            lambda p: run_experts(*arguments, p, threads, address, workspace(size)), range(threads)
        )
        known = all(list(parts))
    if not known:
        raise IndexError(f"expert id outside [0, {experts}]")
    combine(address, n, hidden, index, weight_NK.data_ptr(), slots, experts, out.data_ptr(), x_bf16,
             weight_NK.dtype == torch.bfloat16, workspace(hidden + n * slots))  # fmt: skip
    return out
