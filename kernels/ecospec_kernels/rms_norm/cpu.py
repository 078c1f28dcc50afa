"""CPU kernel of `rms_norm` (numba), bf16 only: see `reference.py` for the mathematics."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from ecospec_kernels.blocks import compiled, load_bf16, to_bf16, view


@numba.njit(nogil=True, fastmath={"contract", "reassoc"})
def _sum_of_squares(bits: np.ndarray) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(bits)):
        value = load_bf16(bits[i])
        total += value * value
    return total


@compiled
def _norm(x: int, rows: int, columns: int, weight: int, epsilon: float, out: int) -> None:
    scale = view(weight, columns, np.uint16)
    for t in range(rows):
        bits, result = view(x + t * columns * 2, columns, np.uint16), view(out + t * columns * 2, columns, np.uint16)
        mean = _sum_of_squares(bits) / np.float32(columns)
        factor = np.float32(1.0) / np.sqrt(mean + np.float32(epsilon))
        for i in range(columns):
            normed = load_bf16(to_bf16(load_bf16(bits[i]) * factor))
            result[i] = to_bf16(load_bf16(scale[i]) * normed)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Same contract as the reference, contiguous bf16 only."""
    out = torch.empty_like(x)
    columns = x.size(-1)
    _norm(x.data_ptr(), x.numel() // columns, columns, weight.data_ptr(), epsilon, out.data_ptr())
    return out
