"""Building blocks of the CPU kernels (numba): compilation, memory, bf16 and exp. Products of rows: `products.py`."""

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
def largest(row: int, count: int, width: int, top: int, ids: int) -> None:
    """The `width` largest of `count` fp32 numbers, falling, into `top` (fp32) and their places into `ids` (int64); of equal ones the first."""
    x, value, place = view(row, count, np.float32), view(top, width, np.float32), view(ids, width, np.int64)
    value[:] = -np.inf
    place[:] = 0
    floor = np.float32(-np.inf)
    for i in range(count):
        if x[i] > floor or (i < width and x[i] == x[i]):  # -inf too, while there is room
            j = min(i, width - 1)
            while j > 0 and x[i] > value[j - 1]:
                value[j], place[j] = value[j - 1], place[j - 1]
                j -= 1
            value[j], place[j] = x[i], i
            floor = value[width - 1]


_local = threading.local()


def workspace(count: int) -> int:
    """Address (a multiple of CACHE_LINE) of at least `count` fp32 numbers, this thread's until its next call."""
    buffer = getattr(_local, "buffer", None)
    if buffer is None or buffer.size < count + CACHE_LINE // 4:
        _local.buffer = buffer = np.empty(max(count, 1 << 14) + CACHE_LINE // 4, np.float32)
        _local.address = -(-buffer.ctypes.data // CACHE_LINE) * CACHE_LINE
    return _local.address  # type: ignore[no-any-return]
