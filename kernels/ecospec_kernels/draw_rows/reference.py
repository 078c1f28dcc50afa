"""`draw_rows`: the target's token after each row of a pass above temperature 0, from noise keyed by (seed, position).

The Gumbel-max draw of `ecospec_runtime/sampling.py`: the largest of logits + temperature * noise, the noise of a token being
-log(-log(u)), u = (bits + 1/2) / 2^23, its 23 bits from SplitMix64 started at a mix of seed and position, a step a token.

The bits are the same everywhere. A float32 log is not: implementations are off by 1 to 4 units in the last place, so noise
differs by up to `noise_error`, and sum and product are float32 here (float64 there). A draw can differ
only where the two largest sums lie within that of each other; on one device it is always the same.

Filters (top-k, top-p, min-p, penalties) come before: a token that they cut off has -inf.

Legend of shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ecospec_kernels.argmax_rows import reference as argmax
from ecospec_kernels.checks import first, refuse, wrong

STEP, FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # SplitMix64
SHIFTS = (30, 27, 31)
BITS = 23


def noise_error(noise: Tensor) -> Tensor:
    """Bound of the difference between two float32 computations of this noise, one with logs off by 4 units, one by 2.

    An error of 6 * 2^-23 relative in -log(u) is one of as much absolute in its log, which adds its own, relative.
    """
    return 6 * 2.0**-23 * (1 + noise.abs())


def invalid(logits_RV: Tensor, positions_R: Tensor, seed: Tensor, temperature: Tensor) -> str | None:
    """What is wrong with the arguments."""
    return first(
        argmax.invalid(logits_RV),
        wrong("positions", positions_R, tuple(logits_RV.shape[:1]), (torch.int64,), logits_RV),
        wrong("seed", seed, (1,), (torch.int64,), logits_RV),
        wrong("temperature", temperature, (1,), (torch.float32,), logits_RV),
    )


def signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(x: Tensor, places: int) -> Tensor:
    """Right shift of int64 as if it were unsigned."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = x + signed(STEP)
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        x = (x ^ _shifted(x, shift)) * signed(factor)
    return x ^ _shifted(x, SHIFTS[-1])


def noise_bits(positions_R: Tensor, seed: Tensor, ids_V: Tensor) -> Tensor:
    """23 bits of each token of `ids` at each position, int64 `[R, V]`."""
    start_R = _mix(_mix(seed) + positions_R)
    return _shifted(_mix(start_R[:, None] + ids_V * signed(STEP)), 64 - BITS)


def gumbels(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, from bits of any shape."""
    uniform = (bits.float() + 0.5) * 2.0**-BITS  # in (0, 1), exact
    return -torch.log(-torch.log(uniform))


def noise(seed: int, position: int, count: int, temperature: float) -> NDArray[np.float32]:
    """On the host: `temperature` times the noise of tokens 0 to `count` - 1 at a position, `[count]`."""
    bits = noise_bits(torch.tensor([position]), torch.tensor([signed(seed)]), torch.arange(count))[0]
    return gumbels(bits).numpy() * np.float32(temperature)


def draw_rows(logits_RV: Tensor, positions_R: Tensor, seed: Tensor, temperature: Tensor) -> Tensor:
    """Token of each row -> [R] int64. `positions` [R] int64: each token's index in prompt and generated text.

    `seed` [1] int64 and `temperature` [1] float32 are tensors, so that a captured graph reads them anew at each replay. Ties
    and NaN as in `argmax_rows`.
    """
    refuse("draw_rows", invalid(logits_RV, positions_R, seed, temperature))
    noise_RV = gumbels(noise_bits(positions_R, seed, torch.arange(logits_RV.size(1), device=seed.device)))
    return argmax.argmax_rows(logits_RV.float() + temperature * noise_RV)
