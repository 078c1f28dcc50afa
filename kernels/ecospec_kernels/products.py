"""Products of a few rows with weights, for the CPU kernels (numba): packing of rows, vectorised dot products.

Contract: *a row's result does not depend on the rows beside it*. Every dot product is summed in one fixed order whatever
the number of rows, so a token verified among others gets bit for bit what it gets alone.

Weights are read once per call, straight from their bf16 (or fp32) storage. Two bf16 numbers sit in one 32-bit word: a
shift yields the even element as fp32, a mask the odd one. Rows of x are therefore *packed* first: fp32, an even plane
and an odd plane (one plane for fp32 weights), each padded to whole vectors.

On processors with AVX512-BF16 (PAIRED) one instruction multiplies words by words and sums in fp32, taking numbers below
2^-126 as zero. There a packed row is words too: one plane if x is bf16, else one of its halves rounded to bf16 and one of
what is left (16 bits of mantissa).

Shapes: n rows, K columns of x and of a weight, O outputs (rows of a weight). Addresses are plain int64, in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from ecospec_kernels.blocks import CACHE_LINE, LANES, NARROW, load_bf16, specialised, to_bf16, view

# Whether words of two bf16 numbers are multiplied by words.
PAIRED = LANES == 16 and binding.get_host_cpu_features().get("avx512bf16", False) and binding.llvm_version_info >= (17,)
SUMMED = 8  # vectors that are summed together, each down to one number
BLOCK = 8  # outputs computed together, so that n > 4 rows re-read their weights from the first-level cache
# Bytes ahead of the weights being read, and the cache level they are brought to: far from memory, then near from there. One
# prefetch alone leaves arithmetic waiting: with both, a further row costs a third, all rows on a core 5-15 % less.
PREFETCHES = ((8192, 2), (1024, 1))


@numba.njit
def vector_length(length: int) -> int:
    """Numbers in one vector for rows of this many."""
    return LANES if length >= LANES else NARROW


@numba.njit
def planes_of(x_bf16: bool, w_bf16: bool) -> int:
    """Planes of a packed row of x."""
    return 2 if w_bf16 and not (PAIRED and x_bf16) else 1


@numba.njit
def plane_length(columns: int, w_bf16: bool) -> int:
    """32-bit words of one plane of a packed row: those of a weight's row, rounded up to whole vectors."""
    words = columns // 2 if w_bf16 else columns
    lanes = vector_length(words)
    return (words + lanes - 1) // lanes * lanes


@numba.njit(nogil=True)
def _low(value: Any) -> Any:
    """float32 -> bits of what rounding to bf16 leaves of it; 0 if that is not finite."""
    rest = value - load_bf16(to_bf16(value))
    return np.uint16(0) if rest - rest != 0 else to_bf16(rest)


@numba.njit(nogil=True)
def _pack_words(row: int, columns: int, planes: int, packed: int) -> None:
    """`pack_row` for PAIRED."""
    plane = 2 * plane_length(columns, True)
    lanes = 2 * vector_length(columns // 2)
    whole = columns // lanes * lanes
    values, out = view(row, columns, np.float32), view(packed, planes * plane, np.uint16)
    for i in range(whole):
        out[i] = to_bf16(values[i])
    if planes == 2:
        for i in range(whole):
            out[plane + i] = _low(values[i])
    for i in range(whole, plane):
        column = i + columns - plane
        out[i] = to_bf16(values[column]) if column >= whole else np.uint16(0)
        if planes == 2:
            out[plane + i] = _low(values[column]) if column >= whole else np.uint16(0)


@numba.njit(nogil=True)
def pack_row(row: int, columns: int, w_bf16: bool, planes: int, packed: int) -> None:
    """fp32 numbers at `row` -> their packed form (`planes * plane_length` words), zeros where a vector repeats columns."""
    if PAIRED and w_bf16:
        _pack_words(row, columns, planes, packed)
        return
    length, plane = columns // planes, plane_length(columns, w_bf16)
    lanes = vector_length(length)
    whole = length // lanes * lanes
    values, out = view(row, columns, np.float32), view(packed, planes * plane, np.float32)
    if planes == 1:
        for i in range(whole):
            out[i] = values[i]
    else:
        for i in range(whole):  # constant strides, so that this vectorises
            out[i] = values[2 * i]
            out[plane + i] = values[2 * i + 1]
    if whole < length:
        for p in range(planes):
            for i in range(lanes):
                column = length - lanes + i
                out[p * plane + whole + i] = values[column * planes + p] if column >= whole else np.float32(0.0)


class _BFloat(ir.Type):
    """LLVM's bf16, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _emit_dots(rows: int, outputs: int, bf16: bool, planes: int, lanes: int) -> Callable[..., Any]:
    """LLVM code of `dots`: `rows * outputs` vector accumulators over the columns, each then summed as a fixed tree."""
    i32, i64, f32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
    floats, words, pairs = ir.VectorType(f32, lanes), ir.VectorType(i32, lanes), ir.VectorType(_BFloat(), 2 * lanes)
    paired = bf16 and PAIRED

    def load(b: Any, address: Any, kind: Any) -> Any:
        return b.load(b.inttoptr(address, kind.as_pointer()), align=4)

    def totals(b: Any, sums: list[Any]) -> Any:
        """One vector with the sum of each of SUMMED vectors: ((0+4)+(2+6)) + ((1+5)+(3+7)), without crossing halves twice.

        Vectors of 16 are first folded: 0+8, 1+9, ...
        """
        if lanes == 16:
            halves = [ir.Constant(ir.VectorType(i32, SUMMED), list(range(at, at + SUMMED))) for at in (0, SUMMED)]
            sums = [b.fadd(*(b.shuffle_vector(v, v, half) for half in halves)) for v in sums]
        half = len(sums) // 2
        pairs = list(zip(sums[:half], sums[half:], strict=True))
        for step, kept in (
            (4, (0, 1, 2, 3, 8, 9, 10, 11)),
            (2, (0, 1, 8, 9, 4, 5, 12, 13)),
            (1, (0, 2, 8, 10, 4, 6, 12, 14)),
        ):
            masks = [ir.Constant(ir.VectorType(i32, SUMMED), [lane + shift for lane in kept]) for shift in (0, step)]
            sums = [b.fadd(*(b.shuffle_vector(*pair, mask) for mask in masks)) for pair in pairs]
            pairs = list(zip(sums[::2], sums[1::2], strict=False))
        return sums[0]

    def multiply_add(b: Any, total: Any, left: Any, right: Any) -> Any:
        if paired:
            name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
            kind = ir.FunctionType(floats, [floats, pairs, pairs])
            return b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), [total, left, right])
        return b.fadd(total, b.fmul(left, right, flags=("contract",)), flags=("contract",))

    def prefetch(b: Any, address: Any, level: int) -> None:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        function = b.module.globals.get("llvm.prefetch.p0") or ir.Function(b.module, kind, "llvm.prefetch.p0")
        b.call(function, [b.inttoptr(address, pointer), *(ir.Constant(i32, v) for v in (0, 4 - level, 1))])

    def codegen(context: Any, b: Any, _: Any, arguments: Any) -> Any:
        weight, weight_stride, words_per_row, x, x_stride, plane, out, out_stride = arguments
        before, loop, body, done = b.block, *(b.append_basic_block(name) for name in ("loop", "body", "done"))
        weight_rows = [b.add(weight, b.mul(weight_stride, i64(r))) for r in range(outputs)]
        x_rows = [b.add(x, b.mul(x_stride, i64(t))) for t in range(rows)]
        last = b.sub(words_per_row, i64(lanes))
        b.branch(loop)
        b.position_at_end(loop)
        i = b.phi(i64)
        i.add_incoming(i64(0), before)
        sums = [[b.phi(floats) for _ in range(outputs)] for _ in range(rows)]
        b.cbranch(b.icmp_signed("<", i, plane), body, done)
        b.position_at_end(body)
        x_at = b.mul(i, i64(4))
        # The last vector of a row may reach back over columns already counted; their packed x is zero.
        weight_at = b.mul(b.select(b.icmp_signed("<", i, last), i, last), i64(4))
        reading = b.add(weight, b.mul(i, i64(4 * outputs)))
        for line in range(max(1, outputs * lanes // 16)):  # each cache line once, in the order of memory
            for ahead, level in PREFETCHES:
                prefetch(b, b.add(reading, i64(ahead + CACHE_LINE * line)), level)
        parts = []
        for address in weight_rows:
            if paired:
                parts.append([load(b, b.add(address, weight_at), pairs)] * planes)
            elif bf16:
                word = load(b, b.add(address, weight_at), words)
                even = b.shl(word, ir.Constant(words, [16] * lanes))
                odd = b.and_(word, ir.Constant(words, [0xFFFF0000] * lanes))
                parts.append([b.bitcast(even, floats), b.bitcast(odd, floats)])
            else:
                parts.append([load(b, b.add(address, weight_at), floats)])
        for t in range(rows):
            at = b.add(x_rows[t], x_at)
            values = [load(b, b.add(at, b.mul(plane, i64(4 * p))), pairs if paired else floats) for p in range(planes)]
            for r in range(outputs):
                value = sums[t][r]
                for left, right in zip(parts[r], values, strict=True):
                    value = multiply_add(b, value, left, right)
                sums[t][r].add_incoming(ir.Constant(floats, [0.0] * lanes), before)
                sums[t][r].add_incoming(value, b.block)
        i.add_incoming(b.add(i, i64(lanes)), b.block)
        b.branch(loop)
        b.position_at_end(done)
        flat = [value for row in sums for value in row]
        flat += [ir.Constant(floats, ir.Undefined)] * (-len(flat) % SUMMED)
        packs = [totals(b, flat[first : first + SUMMED]) for first in range(0, len(flat), SUMMED)]
        result = ir.VectorType(f32, outputs)
        for t in range(rows):
            places = ir.Constant(ir.VectorType(i32, outputs), [t * outputs % SUMMED + r for r in range(outputs)])
            pack = packs[t * outputs // SUMMED]
            address = b.inttoptr(b.add(out, b.mul(out_stride, i64(t))), result.as_pointer())
            b.store(b.shuffle_vector(pack, pack, places), address, align=4)
        return context.get_dummy_value()

    return codegen


def _dots(rows: int, outputs: int, bf16: bool, planes: int, lanes: int) -> Any:
    """Intrinsic `dots(weight, weight_stride, words_per_row, x, x_stride, plane, out, out_stride)`.

    out[t, r] (fp32) = weight[r] . x[t] for t < rows, r < outputs. Strides in bytes; `words_per_row`: 32-bit words in a
    weight row (at least `lanes`); `plane`: plane length of the packed x.
    """

    @intrinsic
    def dots(context: Any, w: Any, ws: Any, words: Any, x: Any, xs: Any, plane: Any, out: Any, os: Any) -> Any:
        return types.void(*[types.int64] * 8), _emit_dots(rows, outputs, bf16, planes, lanes)

    return dots


def _make_matmul(bf16: bool, planes: int, lanes: int) -> Any:
    """`matmul` for one weight type, number of planes and vector width.

    Two outputs side by side, whatever the rows: more would hide more of the latency of sums (4-8: faster on weights that
    lie in a cache), but reads that jump between more rows of a weight come slower from memory, which decides.
    """
    one, two, three, four = (_dots(rows, 2, bf16, planes, lanes) for rows in (1, 2, 3, 4))

    def matmul(w: int, stride: int, words: int, first: int, outputs: int, x: int, x_stride: int, plane: int, n: int,
               out: int, out_stride: int) -> None:  # fmt: skip
        """out[t, o] = w[o] . x[t] for o in [first, outputs), t < n; fp32 out; outputs >= BLOCK. See `_dots`."""
        for begin in range(first, outputs, BLOCK):
            o = min(begin, outputs - BLOCK)  # the last block may overlap the one before: same values again
            t = 0
            while t < n:
                xt, at = x + t * x_stride, out + t * out_stride + o * 4
                rows = min(4, n - t)
                for r in range(0, BLOCK, 2):
                    wr, to = w + (o + r) * stride, at + r * 4
                    if rows == 4:
                        four(wr, stride, words, xt, x_stride, plane, to, out_stride)
                    elif rows == 3:
                        three(wr, stride, words, xt, x_stride, plane, to, out_stride)
                    elif rows == 2:
                        two(wr, stride, words, xt, x_stride, plane, to, out_stride)
                    else:
                        one(wr, stride, words, xt, x_stride, plane, to, out_stride)
                t += rows

    return specialised(matmul, "bf16" if bf16 else "f32", planes, lanes)


def _by_width(bf16: bool, planes: int) -> Any:
    """`matmul` in vectors as wide as `vector_length` says of its rows."""
    wide = _make_matmul(bf16, planes, LANES)
    if LANES == NARROW:
        return wide
    narrow = _make_matmul(bf16, planes, NARROW)

    def matmul(w: int, stride: int, words: int, first: int, outputs: int, x: int, x_stride: int, plane: int, n: int,
               out: int, out_stride: int) -> None:  # fmt: skip
        """See `_make_matmul`."""
        if words < LANES:
            narrow(w, stride, words, first, outputs, x, x_stride, plane, n, out, out_stride)
        else:
            wide(w, stride, words, first, outputs, x, x_stride, plane, n, out, out_stride)

    return specialised(matmul, "bf16" if bf16 else "f32", planes)


matmul_f32 = _by_width(False, 1)
_matmul_split = _by_width(True, 2)
_matmul_words = _by_width(True, 1) if PAIRED else _matmul_split


@numba.njit(nogil=True)
def matmul(bf16: bool, planes: int, w: int, stride: int, words: int, first: int, outputs: int, x: int, x_stride: int, plane: int,
           n: int, out: int, out_stride: int) -> None:  # fmt: skip
    """See `_make_matmul`; `planes` as `planes_of` says."""
    if bf16 and planes == 1:
        _matmul_words(w, stride, words, first, outputs, x, x_stride, plane, n, out, out_stride)
    elif bf16:
        _matmul_split(w, stride, words, first, outputs, x, x_stride, plane, n, out, out_stride)
    else:
        matmul_f32(w, stride, words, first, outputs, x, x_stride, plane, n, out, out_stride)
