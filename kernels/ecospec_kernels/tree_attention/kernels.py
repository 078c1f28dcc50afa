"""Triton kernels of `tree_attention`; `fused.py` launches them and says how they work together.

Names: R rows (pairs of query head and tree row) of a tile, J its keys; a head's width is A + B, powers of two, B possibly 0;
V its value width. A row is head * n + t. Offsets of keys and values are 64-bit: a cache may pass 2^31 numbers, but no mask.

Scores are scaled by log2(e) only once the largest is taken off: 3e38 in a mask is a number, and stays one. NaN is not ordered,
and a maximum may drop it; the sum of weights keeps it.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
HIDDEN = tl.constexpr(-1e30)  # additive masks at or below this hide a key: see `reference.py`
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _first_key(start, keys):  # type: ignore[no-untyped-def]
    """`start` within the keys: the first that any row may see."""
    return tl.minimum(tl.maximum(tl.load(start), 0), keys).to(tl.int32)


@triton.jit(
    do_not_specialize=["mask_row", "n", "share", "keys"], do_not_specialize_on_alignment=["mask", "start", "total"]
)
def attend(q, k, v, mask, start, part, top, total, q_head, q_row, k_head, k_row, v_head, v_row, mask_row, n, share, keys,  # type: ignore[no-untyped-def]
           chunk, width, value_width, scale, MASK: tl.constexpr, SAME: tl.constexpr, START: tl.constexpr, R: tl.constexpr,
           J: tl.constexpr, A: tl.constexpr, B: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """Attention of R rows over one chunk of the keys: values weighed and not divided yet, largest score, sum of weights.

    `MASK`: 0 none, 1 bool, 2 additive. `SAME`: values are the first V columns of the keys. `START`: keys before `start` are
    not read, and chunks that lie before it are left alone; the others begin where they would without.
    part [splits, rows of all heads, value_width], top and total [splits, rows of all heads], all fp32.
    """
    split = tl.program_id(0)
    group = tl.program_id(2)
    r = tl.program_id(1) * R + tl.arange(0, R)
    live = r < share * n
    begin = split * chunk
    if START:
        first_key = _first_key(start, keys)
        live = live & (begin + chunk > first_key)
        begin += tl.maximum(first_key - begin, 0) // J * J
    t = r % n
    head = group * share + r // n
    a, b, c = tl.arange(0, A), A + tl.arange(0, B if B else 16), tl.arange(0, V)
    q_R = q + head.to(tl.int64) * q_head + t.to(tl.int64) * q_row
    q_a = tl.load(q_R[:, None] + a[None, :], mask=live[:, None] & (a < width)[None, :], other=0.0)
    if B:
        q_b = tl.load(q_R[:, None] + b[None, :], mask=live[:, None] & (b < width)[None, :], other=0.0)
    k_at, v_at = k + group.to(tl.int64) * k_head, v + group.to(tl.int64) * v_head
    mask_R = t * mask_row
    best = tl.full([R], float("-inf"), tl.float32)
    weight = tl.full([R], 0.0, tl.float32)
    acc = tl.full([R, V], 0.0, tl.float32)
    end = tl.minimum(split * chunk + chunk, keys)
    for first in range(begin, end, J):
        j = first + tl.arange(0, J)
        inside = j < end
        if START:  # from first_key to end in one comparison, which costs fewer registers than two
            inside = (j - first_key).to(tl.uint32, bitcast=True) < (end - first_key).to(tl.uint32, bitcast=True)
        k_J = k_at + j.to(tl.int64) * k_row
        k_a = tl.load(k_J[:, None] + a[None, :], mask=inside[:, None] & (a < width)[None, :], other=0.0)
        if INTERPRETED:  # numpy knows no bf16
            s = tl.dot(q_a.to(tl.float32), tl.trans(k_a).to(tl.float32))
        else:
            s = tl.dot(q_a, tl.trans(k_a), input_precision="ieee")
        if B:
            k_b = tl.load(k_J[:, None] + b[None, :], mask=inside[:, None] & (b < width)[None, :], other=0.0)
            if INTERPRETED:
                s += tl.dot(q_b.to(tl.float32), tl.trans(k_b).to(tl.float32))
            else:
                s = tl.dot(q_b, tl.trans(k_b), s, input_precision="ieee")
        s *= scale
        seen = inside[None, :]  # rows that are not live, too: nothing of theirs is stored
        if MASK:
            there = live[:, None] & (j < end)[None, :]  # without `first_key`, with which some chip's compiler spills
            m = tl.load(mask + (mask_R[:, None] + j[None, :]), mask=there, other=0)
            if MASK == 1:
                seen = seen & (m != 0)
            else:
                m = m.to(tl.float32)
                seen = seen & ~(m <= HIDDEN)  # NaN does not hide
                s += m
        s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(best, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key seen so far: exp2(-inf - 0) is 0
        p = tl.exp2((s - base[:, None]) * LOG2E)
        shrink = tl.exp2((best - base) * LOG2E)
        weight = weight * shrink + tl.sum(p, 1)
        acc *= shrink[:, None]
        if SAME:
            values = k_a
        else:
            v_J = v_at + j.to(tl.int64) * v_row
            values = tl.load(v_J[:, None] + c[None, :], mask=inside[:, None] & (c < value_width)[None, :], other=0.0)
        if INTERPRETED:
            acc += tl.dot(p.to(values.dtype).to(tl.float32), values.to(tl.float32))
        else:
            acc = tl.dot(p.to(values.dtype), values, acc, input_precision="ieee")
        best = higher
    at = (split * tl.num_programs(2) + group) * share * n + r
    tl.store(part + at[:, None] * value_width + c[None, :], acc, mask=live[:, None] & (c < value_width)[None, :])
    tl.store(top + at, best, mask=live)
    tl.store(total + at, weight, mask=live)


@triton.jit(
    do_not_specialize=["splits", "rows", "n", "heads", "keys"],
    do_not_specialize_on_alignment=["total", "sinks", "start"],
)
def combine(part, top, total, sinks, out, start, splits, rows, n, heads, value_width, keys, chunk, SINKS: tl.constexpr,  # type: ignore[no-untyped-def]
            START: tl.constexpr, S: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """out [n, heads, value_width] of one row: the chunks weighed by their sums, in order, and divided once."""
    row = tl.program_id(0)
    head, t = row // n, row % n
    s, c = tl.arange(0, S), tl.arange(0, V)
    begin = _first_key(start, keys) // chunk if START else 0  # chunks before it hold nothing
    there = (s >= begin) & (s < splits)
    tops = tl.load(top + s * rows + row, mask=there, other=float("-inf"))
    totals = tl.load(total + s * rows + row, mask=there, other=0.0)
    best = tl.max(tops, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        best = tl.maximum(best, sink)
    best = tl.where(best == float("-inf"), 0.0, best)
    weight = tl.sum(totals * tl.exp2((tops - best) * LOG2E), 0)
    if SINKS:
        weight += tl.exp2((sink - best) * LOG2E)
    acc = tl.full([V], 0.0, tl.float32)
    for i in range(begin, splits):
        at = i * rows + row
        share = tl.exp2((tl.load(top + at) - best) * LOG2E)
        acc += share * tl.load(part + at * value_width + c, mask=c < value_width, other=0.0)
    acc /= tl.where(weight == 0.0, 1.0, weight)  # a row that sees nothing has summed up nothing
    tl.store(out + (t * heads + head) * value_width + c, acc.to(out.dtype.element_ty), mask=c < value_width)
