"""Triton kernels of `expert_mlp`; `fused.py` launches them and says how they work together.

Names: R rows (pairs of token and slot) of a tile, C its output columns, K its depth. A pair is token * top_k + slot.
Offsets of weights are 64-bit: one layer's experts may pass 2^31 numbers.

`FORMAT` of a matrix: "plain" (numbers), "fp8" (bytes of e4m3, decoded by whole-number arithmetic, since not every chip knows
the type) or "mxfp4" (bytes of two e2m1). Codes are decoded in registers, exactly, in the activations' 16-bit type; their scale
multiplies fp32 sums, of K columns that share it ("fp8") or of each group of 32 ("mxfp4").
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
GROUP = tl.constexpr(32)  # numbers of MXFP4 that share a scale
E4M3_BIAS, E2M1_BIAS = tl.constexpr(2.0**120), tl.constexpr(2.0**126)  # by which their exponents fall short of fp32's


@triton.jit(do_not_specialize=["pairs", "experts", "slot_count"])
def plan(index, order, slots, pairs, experts, slot_count, P: tl.constexpr, E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program e: where the pairs of expert e stand in `order` (pairs by expert, rising), and its slot.

    `slots` [3, slot_count]: expert, first place in `order` and pairs of each touched expert, rising; then zero pairs.
    """
    expert = tl.program_id(0)
    i = tl.arange(0, P)
    ids = tl.load(index + i, mask=i < pairs, other=experts)
    ids = tl.where((ids >= 0) & (ids < experts), ids, experts).to(tl.int32)
    counts = tl.histogram(ids, E)
    e = tl.arange(0, E)
    touched = (counts > 0) & (e < experts)
    before = tl.sum((touched & (e < expert)).to(tl.int32), 0)
    mine = ids == expert
    begin = tl.sum((ids < expert).to(tl.int32), 0)
    count = tl.sum(mine.to(tl.int32), 0)
    tl.store(order + begin + tl.cumsum(mine.to(tl.int32), 0) - 1, i, mask=mine)
    slot = tl.where(count > 0, before, tl.sum(touched.to(tl.int32), 0) + expert - before)
    if slot < slot_count:
        tl.store(slots + slot, expert)
        tl.store(slots + slot_count + slot, begin)
        tl.store(slots + 2 * slot_count + slot, count)


@triton.jit
def e4m3(code):  # type: ignore[no-untyped-def]
    """fp32 of bytes of float8_e4m3fn; subnormal ones become normal by the product."""
    bits = code.to(tl.uint32)
    number = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * E4M3_BIAS
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def e2m1(code):  # type: ignore[no-untyped-def]
    """fp32 of the low four bits of bytes, in e2m1."""
    bits = code.to(tl.uint32)
    return (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True) * E2M1_BIAS


@triton.jit
def e8m0(code):  # type: ignore[no-untyped-def]
    """fp32 of exponents: 2^(code - 127), NaN for 255."""
    bits = code.to(tl.uint32)
    number = tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)  # 2^-127 is subnormal
    return tl.where(bits == 255, float("nan"), number)


@triton.jit
def _project(x_R, low, live_R, w_C, known_C, scale_C, depth, w_depth, FORMAT: tl.constexpr, BLOCK: tl.constexpr,  # type: ignore[no-untyped-def]
             R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """[R, C] fp32: rows at `x_R` times columns at `w_C`, whose numbers lie `w_depth` apart; dead ones are zero.

    `SPLIT`: a row is the sum of two, the second one `low` numbers further on; see `gate_up`. `scale_C`: a column's first scale,
    for the first `BLOCK` numbers, a multiple of K; the others follow it.
    """
    if FORMAT == "mxfp4":
        acc = _project_groups(x_R, low, live_R, w_C, known_C, scale_C, depth // GROUP, R, C, K // GROUP, SPLIT)
    else:
        acc = _project_columns(x_R, low, live_R, w_C, known_C, scale_C, depth, w_depth, FORMAT, BLOCK, R, C, K, SPLIT)
    return acc


@triton.jit
def _project_columns(x_R, low, live_R, w_C, known_C, scale_C, depth, w_depth, FORMAT: tl.constexpr, BLOCK: tl.constexpr,  # type: ignore[no-untyped-def]
                     R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """`_project` of plain numbers or FP8, K at a time."""
    acc = tl.full([R, C], 0.0, tl.float32)
    for first in range(0, depth, K):
        k = first + tl.arange(0, K)
        inside = k < depth
        x_at, x_mask = x_R[:, None] + k[None, :], live_R[:, None] & inside[None, :]
        x = tl.load(x_at, mask=x_mask, other=0.0)
        w_at = w_C[None, :] + k[:, None].to(tl.int64) * w_depth
        w = tl.load(w_at, mask=inside[:, None] & known_C[None, :], other=0)
        part = acc
        if FORMAT == "fp8":
            w = e4m3(w).to(x.dtype)
            part = tl.full([R, C], 0.0, tl.float32)
        part = _dot(x, w, part)
        if SPLIT:
            part = _dot(tl.load(x_at + low, mask=x_mask, other=0.0), w, part)
        if FORMAT == "fp8":
            part = acc + part * tl.load(scale_C + first // BLOCK, mask=known_C, other=0.0)[None, :]
        acc = part
    return acc


@triton.jit
def _project_groups(x_R, low, live_R, w_C, known_C, scale_C, groups,  # type: ignore[no-untyped-def]
                    R: tl.constexpr, C: tl.constexpr, G: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """`_project` of MXFP4, G groups at a time, whose sums stay apart to the end.

    The low halves of a group's bytes meet its even activations, the high halves its odd ones: no number changes place.
    """
    acc = tl.full([G, R, C], 0.0, tl.float32)
    for first in range(0, groups, G):
        group = first + tl.arange(0, G)
        inside = group < groups
        byte = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        w_mask = inside[:, None] & known_C[None, :]
        w = tl.load(w_C[None, None, :] + byte[:, :, None], mask=w_mask[:, None, :], other=0)
        k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x_at, x_mask = x_R[None, :, None] + k[:, None, :], live_R[None, :, None] & inside[:, None, None]
        x = tl.load(x_at, mask=x_mask, other=0.0)
        low_half, high_half = e2m1(w).to(x.dtype), e2m1(w >> 4).to(x.dtype)
        even, odd = tl.split(tl.reshape(x, [G, R, GROUP // 2, 2]))
        part = _dot(odd, high_half, _dot(even, low_half, tl.full([G, R, C], 0.0, tl.float32)))
        if SPLIT:
            x = tl.load(x_at + low, mask=x_mask, other=0.0)
            even, odd = tl.split(tl.reshape(x, [G, R, GROUP // 2, 2]))
            part = _dot(odd, high_half, _dot(even, low_half, part))
        scale = e8m0(tl.load(scale_C[None, :] + group[:, None], mask=w_mask, other=0))
        acc += part * scale[:, None, :]
    return tl.sum(acc, 0)


@triton.jit
def _dot(x, w, acc):  # type: ignore[no-untyped-def]
    """acc + x @ w in fp32."""
    if INTERPRETED:  # numpy knows no bf16
        x, w = x.to(tl.float32), w.to(tl.float32)
    return tl.dot(x, w, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["slot_count", "top_k", "scales_expert", "scales_row"])
def gate_up(x, order, slots, inner, x_row, slot_count, top_k, hidden, units, low, alpha, limit, shift, bias,  # type: ignore[no-untyped-def]
            w, w_expert, w_row, w_depth, scales, scales_expert, scales_row, FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
            BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
            R: tl.constexpr, C: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """inner [pairs, units] = gated(x @ gate_up.T + bias) for C / 2 units of one touched expert.

    `SPLIT`: in two numbers of a 16-bit type, the rounded value and, `low` further on, what it lacks: at most 2^-16 is lost
    (fp16: of numbers above 2^-8; beyond 65504 it overflows).
    """
    slot = tl.program_id(1)
    expert = tl.load(slots + slot).to(tl.int64)
    begin = tl.load(slots + slot_count + slot)
    count = tl.load(slots + 2 * slot_count + slot)
    U: tl.constexpr = C // 2
    c = tl.arange(0, C)
    if INTERLEAVED:
        row = tl.program_id(0) * C + c
        known = row < 2 * units
    else:  # first all gates of the tile, then all ups
        unit = tl.program_id(0) * U + c % U
        row = unit + (c // U) * units
        known = unit < units
    w_C = w + expert * w_expert + row.to(tl.int64) * w_row
    scale_C = w_C
    if FORMAT != "plain":
        scale_C = scales + expert * scales_expert + (row // BLOCK_ROWS) * scales_row
    u = tl.program_id(0) * U + tl.arange(0, U)
    for first in range(0, count, R):  # once, unless a token names an expert twice
        r = first + tl.arange(0, R)
        live = r < count
        pair = tl.load(order + begin + r, mask=live, other=0)
        x_R = x + (pair // top_k).to(tl.int64) * x_row
        acc = _project(x_R, 0, live, w_C, known, scale_C, hidden, w_depth, FORMAT, BLOCK, R, C, K, False)
        if BIAS:
            acc += tl.load(bias + expert * 2 * units + row, mask=known, other=0.0).to(tl.float32)[None, :]
        if INTERLEAVED:
            gate, up = tl.split(tl.reshape(acc, [R, U, 2]))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(acc, [R, 2, U]), [0, 2, 1]))
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        y = (up + shift) * gate * tl.sigmoid(alpha * gate)
        at, mask = inner + pair[:, None] * units + u[None, :], live[:, None] & (u < units)[None, :]
        high = y.to(inner.dtype.element_ty)
        tl.store(at, high, mask=mask)
        if SPLIT:
            tl.store(at + low, y - high.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["slot_count", "scales_expert", "scales_row"])
def down(inner, order, slots, weight, y, slot_count, hidden, units, low, bias,  # type: ignore[no-untyped-def]
         w, w_expert, w_row, w_depth, scales, scales_expert, scales_row, FORMAT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
         BLOCK: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
         R: tl.constexpr, C: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """y [pairs, hidden] (fp32) = weight * (inner @ down.T + bias) for C outputs of one touched expert."""
    slot = tl.program_id(1)
    expert = tl.load(slots + slot).to(tl.int64)
    begin = tl.load(slots + slot_count + slot)
    count = tl.load(slots + 2 * slot_count + slot)
    row = tl.program_id(0) * C + tl.arange(0, C)
    known = row < hidden
    w_C = w + expert * w_expert + row.to(tl.int64) * w_row
    scale_C = w_C
    if FORMAT != "plain":
        scale_C = scales + expert * scales_expert + (row // BLOCK_ROWS) * scales_row
    for first in range(0, count, R):
        r = first + tl.arange(0, R)
        live = r < count
        pair = tl.load(order + begin + r, mask=live, other=0)
        acc = _project(
            inner + pair * units, low, live, w_C, known, scale_C, units, w_depth, FORMAT, BLOCK, R, C, K, SPLIT
        )
        if BIAS:
            acc += tl.load(bias + expert * hidden + row, mask=known, other=0.0).to(tl.float32)[None, :]
        acc *= tl.load(weight + pair, mask=live, other=0.0).to(tl.float32)[:, None]
        tl.store(y + pair[:, None] * hidden + row[None, :], acc, mask=live[:, None] & known[None, :])


@triton.jit(do_not_specialize=["top_k", "experts"])
def combine(y, index, out, top_k, experts, hidden, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """out [n, hidden] = sum of y [n, top_k, hidden] in the order of slots; those of ids outside [0, experts) add nothing."""
    token = tl.program_id(1)
    c = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.full([C], 0.0, tl.float32)
    for slot in range(0, top_k):
        pair = token * top_k + slot
        expert = tl.load(index + pair)
        known = (expert >= 0) & (expert < experts)
        total += tl.load(y + pair * hidden + c, mask=known & (c < hidden), other=0.0)
    tl.store(out + token * hidden + c, total.to(out.dtype.element_ty), mask=c < hidden)
