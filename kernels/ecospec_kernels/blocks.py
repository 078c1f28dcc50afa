"""Building blocks of the CPU kernels (numba): packing of rows, vectorised dot products, bf16 and exp.

Contract that all of them keep: *a row's result does not depend on the rows beside it*. Every dot product is summed in
one fixed order whatever the number of rows, so a token verified among others gets bit for bit what it gets alone.

Weights are read once per call, straight from their bf16 (or fp32) storage. Two bf16 numbers sit in one 32-bit word: a
shift yields the even element as fp32, a mask the odd one. Rows of x are therefore *packed* first: fp32, an even plane
and an odd plane (one plane for fp32 weights), each padded to whole vectors.

Shapes: n rows, K columns of x and of a weight, O outputs (rows of a weight). Addresses are plain int64, in bytes.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from ecospec_kernels.lanes import LANES

if LANES == 16 and numba.config.CPU_FEATURES is None:  # else LLVM splits wide vectors where it thinks them slow
    numba.config.CPU_FEATURES = binding.get_host_cpu_features().flatten() + ",-prefer-256-bit"

NARROW = 8  # fp32 numbers in a vector for rows too short for LANES
SUMMED = 8  # vectors that are summed together, each down to one number
BLOCK = 8  # outputs computed together, so that n > 4 rows re-read their weights from the first-level cache
# Bytes ahead of the weights being read, and the cache level they are brought to: far from memory, then near from there. One
# prefetch alone leaves arithmetic waiting: with both, a further row costs a third, all rows on a core 5-15 % less.
PREFETCHES = ((8192, 2), (1024, 1))
CACHE_LINE = 64  # bytes
_F = TypeVar("_F", bound=Callable[..., Any])


def _cache_folder() -> str:
    """Per-user cache of compiled kernels; its name changes with these sources, which numba's own check would miss."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "ecospec", "kernels", digest.hexdigest()[:16])


def is_cold() -> bool:
    """Whether nothing has been compiled yet for this user and these sources: the first pass then takes up to a minute."""
    return not any(Path(numba.config.CACHE_DIR or _cache_folder()).rglob("*.nbi"))


def compiled(function: _F) -> _F:
    """Decorate with `numba.njit`: GIL released, machine code cached on disk (`NUMBA_CACHE_DIR` overrides where)."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = before or _cache_folder()
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # no writable folder for the cache
        return numba.njit(nogil=True, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before


def specialised(function: _F, *what: object) -> _F:
    """`numba.njit` of one of several functions from the same source, under a name of its own.

    Machine code is cached together with what it calls, by name and a number that counts compilations in a process: of two
    functions with one name, code from two processes would call the one that was loaded first.
    """
    function.__qualname__ = "_".join(map(str, (function.__qualname__, *what)))
    return numba.njit(nogil=True)(function)


@intrinsic
def float_of_bits(context: Any, bits: Any) -> Any:
    """uint32 bits -> the float32 they spell."""

    def codegen(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def bits_of_float(context: Any, value: Any) -> Any:
    """float32 -> its uint32 bits."""

    def codegen(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def _pointer(context: Any, address: Any, dtype: Any) -> Any:
    """int64 address -> typed pointer for `numba.carray`."""
    target = types.CPointer(dtype.dtype)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return target(types.int64, dtype), codegen


@numba.njit
def view(address: int, count: int, dtype: Any) -> Any:
    """`count` numbers of `dtype` at `address`, as an array that does not own them."""
    return numba.carray(_pointer(address, dtype), (count,))


@numba.njit
def load_bf16(bits: Any) -> Any:
    """uint16 bits of a bf16 number -> float32."""
    return float_of_bits(np.uint32(bits) << np.uint32(16))


@numba.njit
def to_bf16(value: Any) -> Any:
    """float32 -> uint16 bits of the nearest bf16 (ties to even; NaN stays NaN)."""
    bits = bits_of_float(value)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(0x7FC0) if value != value else np.uint16(rounded)


@numba.njit(fastmath={"contract"})
def exp(x: Any) -> Any:
    """e^x in float32 within 2 units in the last place for x in [-87, 88], clamped outside; written to vectorise."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * float_of_bits(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))


@numba.njit
def vector_length(length: int) -> int:
    """Numbers in one vector for rows of this many."""
    return LANES if length >= LANES else NARROW


@numba.njit
def plane_length(columns: int, planes: int) -> int:
    """Length of one plane of a packed row: columns / planes, rounded up to whole vectors."""
    lanes = vector_length(columns // planes)
    return (columns // planes + lanes - 1) // lanes * lanes


def _emit_dots(rows: int, outputs: int, bf16: bool, lanes: int) -> Callable[..., Any]:
    """LLVM code of `dots`: `rows * outputs` vector accumulators over the columns, each then summed as a fixed tree."""
    i32, i64, f32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
    floats, words = ir.VectorType(f32, lanes), ir.VectorType(i32, lanes)

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
            if bf16:
                word = load(b, b.add(address, weight_at), words)
                even = b.shl(word, ir.Constant(words, [16] * lanes))
                odd = b.and_(word, ir.Constant(words, [0xFFFF0000] * lanes))
                parts.append([b.bitcast(even, floats), b.bitcast(odd, floats)])
            else:
                parts.append([load(b, b.add(address, weight_at), floats)])
        for t in range(rows):
            at = b.add(x_rows[t], x_at)
            planes = [load(b, at, floats)]
            if bf16:
                planes.append(load(b, b.add(at, b.mul(plane, i64(4))), floats))
            for r in range(outputs):
                value = sums[t][r]
                for left, right in zip(parts[r], planes, strict=True):
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


def _dots(rows: int, outputs: int, bf16: bool, lanes: int) -> Any:
    """Intrinsic `dots(weight, weight_stride, words_per_row, x, x_stride, plane, out, out_stride)`.

    out[t, r] (fp32) = weight[r] . x[t] for t < rows, r < outputs. Strides in bytes; `words_per_row`: 32-bit words in a
    weight row (at least `lanes`); `plane`: plane length of the packed x.
    """

    @intrinsic
    def dots(context: Any, w: Any, ws: Any, words: Any, x: Any, xs: Any, plane: Any, out: Any, os: Any) -> Any:
        return types.void(*[types.int64] * 8), _emit_dots(rows, outputs, bf16, lanes)

    return dots


def _make_matmul(bf16: bool, lanes: int) -> Any:
    """`matmul` for one weight type and vector width.

    Two outputs side by side, whatever the rows: more would hide more of the latency of sums (4-8: faster on weights that
    lie in a cache), but reads that jump between more rows of a weight come slower from memory, which decides.
    """
    one, two, three, four = (_dots(rows, 2, bf16, lanes) for rows in (1, 2, 3, 4))

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

    return specialised(matmul, "bf16" if bf16 else "f32", lanes)


def _by_width(bf16: bool) -> Any:
    """`matmul` for one weight type, in vectors as wide as `vector_length` says of its rows."""
    wide = _make_matmul(bf16, LANES)
    if LANES == NARROW:
        return wide
    narrow = _make_matmul(bf16, NARROW)

    def matmul(w: int, stride: int, words: int, first: int, outputs: int, x: int, x_stride: int, plane: int, n: int,
               out: int, out_stride: int) -> None:  # fmt: skip
        """See `_make_matmul`."""
        if words < LANES:
            narrow(w, stride, words, first, outputs, x, x_stride, plane, n, out, out_stride)
        else:
            wide(w, stride, words, first, outputs, x, x_stride, plane, n, out, out_stride)

    return specialised(matmul, "bf16" if bf16 else "f32")


matmul_bf16 = _by_width(True)
matmul_f32 = _by_width(False)


@numba.njit(nogil=True)
def matmul(bf16: bool, w: int, stride: int, words: int, first: int, outputs: int, x: int, x_stride: int, plane: int,
           n: int, out: int, out_stride: int) -> None:  # fmt: skip
    """`matmul_bf16` or `matmul_f32` by the weights' type."""
    if bf16:
        matmul_bf16(w, stride, words, first, outputs, x, x_stride, plane, n, out, out_stride)
    else:
        matmul_f32(w, stride, words, first, outputs, x, x_stride, plane, n, out, out_stride)


@numba.njit(nogil=True)
def read_row(address: int, columns: int, bf16: bool, row: int) -> None:
    """bf16 or fp32 numbers at `address` -> fp32 numbers at `row`."""
    out = view(row, columns, np.float32)
    if bf16:
        bits = view(address, columns, np.uint16)
        for i in range(columns):
            out[i] = load_bf16(bits[i])
    else:
        values = view(address, columns, np.float32)
        for i in range(columns):
            out[i] = values[i]


@numba.njit(nogil=True)
def write_row(row: int, columns: int, bf16: bool, address: int) -> None:
    """fp32 numbers at `row` -> bf16 or fp32 numbers at `address`."""
    values = view(row, columns, np.float32)
    if bf16:
        bits = view(address, columns, np.uint16)
        for i in range(columns):
            bits[i] = to_bf16(values[i])
    else:
        out = view(address, columns, np.float32)
        for i in range(columns):
            out[i] = values[i]


@numba.njit(nogil=True)
def pack_row(row: int, columns: int, planes: int, packed: int) -> None:
    """fp32 numbers at `row` -> their packed form (`planes * plane_length` fp32), zeros where a vector repeats columns."""
    length, plane = columns // planes, plane_length(columns, planes)
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


_local = threading.local()


def workspace(count: int) -> int:
    """Address (a multiple of CACHE_LINE) of at least `count` fp32 numbers, this thread's until its next call."""
    buffer = getattr(_local, "buffer", None)
    if buffer is None or buffer.size < count + CACHE_LINE // 4:
        _local.buffer = buffer = np.empty(max(count, 1 << 14) + CACHE_LINE // 4, np.float32)
        _local.address = -(-buffer.ctypes.data // CACHE_LINE) * CACHE_LINE
    return _local.address  # type: ignore[no-any-return]
