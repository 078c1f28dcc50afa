"""CPU kernel (numba) of `noise`: see `reference.py` for the mathematics."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from ecospec_kernels.blocks import bits_of_float, compiled, float_of_bits, view
from ecospec_kernels.draw_rows.reference import BITS, FACTORS, SHIFTS, STEP, signed

_STEP, _FIRST, _SECOND = (np.uint64(word) for word in (STEP, *FACTORS))
_A, _B, _C = (np.uint64(shift) for shift in SHIFTS)
_DROPPED = np.uint64(64 - BITS)
_UNIT = np.float32(2.0**-BITS)
_HALF_ROOT = 0x3F3504F3  # bits of sqrt(1/2)


@numba.njit(nogil=True)
def _mix(x: np.uint64) -> np.uint64:
    x += _STEP
    x = (x ^ (x >> _A)) * _FIRST
    x = (x ^ (x >> _B)) * _SECOND
    return x ^ (x >> _C)


@numba.njit(nogil=True, fastmath={"contract"})
def log(x: np.float32) -> np.float32:
    """Natural logarithm of a normal number > 0, within 2 units in the last place; written to vectorise.

    x = 2^e * m, m from sqrt(1/2) to sqrt(2). Coefficients: Moshier, Cephes Mathematical Library (logf), 1992.
    """
    bits = bits_of_float(x) - np.uint32(_HALF_ROOT)
    e = np.float32(np.int32(bits) >> np.int32(23))
    m = float_of_bits((bits & np.uint32(0x7FFFFF)) + np.uint32(_HALF_ROOT)) - np.float32(1.0)
    p = np.float32(7.0376836292e-2)
    p = p * m - np.float32(1.1514610310e-1)
    p = p * m + np.float32(1.1676998740e-1)
    p = p * m - np.float32(1.2420140846e-1)
    p = p * m + np.float32(1.4249322787e-1)
    p = p * m - np.float32(1.6668057665e-1)
    p = p * m + np.float32(2.0000714765e-1)
    p = p * m - np.float32(2.4999993993e-1)
    p = p * m + np.float32(3.3333331174e-1)
    square = m * m
    tail = p * m * square - np.float32(2.12194440e-4) * e - np.float32(0.5) * square
    return m + tail + np.float32(0.693359375) * e


@compiled
def _noise(seed: int, position: int, count: int, temperature: float, out: int) -> None:
    values, factor = view(out, count, np.float32), np.float32(temperature)
    start = _mix(_mix(np.uint64(seed)) + np.uint64(position))
    for i in range(count):
        bits = _mix(start + np.uint64(i) * _STEP) >> _DROPPED
        uniform = (np.float32(np.int32(bits)) + np.float32(0.5)) * _UNIT
        values[i] = -log(-log(uniform)) * factor


def noise(seed: int, position: int, count: int, temperature: float) -> NDArray[np.float32]:
    """See `reference.noise`."""
    out = np.empty(count, np.float32)
    _noise(signed(seed), position, count, temperature, out.ctypes.data)
    return out
