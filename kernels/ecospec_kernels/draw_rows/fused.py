"""Triton kernel of `draw_rows`: see `reference.py`. The argmax of `argmax_rows`, with noise made where it is added."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ecospec_kernels.argmax_rows import fused as argmax
from ecospec_kernels.argmax_rows.fused import BLOCK, PIECE, _key
from ecospec_kernels.checks import first
from ecospec_kernels.draw_rows import reference
from ecospec_kernels.launch import TYPES, Configuration, refuse_launch

STEP, (FACTOR, LAST_FACTOR) = tl.constexpr(reference.STEP), map(tl.constexpr, reference.FACTORS)
SHIFT, SECOND_SHIFT, LAST_SHIFT = map(tl.constexpr, reference.SHIFTS)
BITS, UNIT = tl.constexpr(reference.BITS), tl.constexpr(2.0**-reference.BITS)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """SplitMix64 of uint64."""
    x += STEP
    x = (x ^ (x >> SHIFT)) * FACTOR
    x = (x ^ (x >> SECOND_SHIFT)) * LAST_FACTOR
    return x ^ (x >> LAST_SHIFT)


@triton.jit
def noise_bits(start, place):  # type: ignore[no-untyped-def]
    """The bits of tokens `place`, int32, given the uint64 mix of seed and position."""
    return (_mix(start + place.to(tl.uint64) * STEP) >> (64 - BITS)).to(tl.int32)


@triton.jit(do_not_specialize=["pieces"])
def draw_kernel(  # type: ignore[no-untyped-def]
    logits, positions, seed, temperature, keys, row_stride, vocabulary, pieces, BLOCK: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """Program (r, p): the largest key of piece p of row r. As `argmax_kernel`, but for the noise."""
    r, p = tl.program_id(0), tl.program_id(1)
    line = logits + r.to(tl.int64) * row_stride
    start = _mix(_mix(tl.load(seed).to(tl.uint64)) + tl.load(positions + r).to(tl.uint64))
    warmth = tl.load(temperature)
    best = tl.full([BLOCK], -(2**63), tl.int64)
    for first_place in range(p * PIECE, tl.minimum((p + 1) * PIECE, vocabulary), BLOCK):
        place = first_place + tl.arange(0, BLOCK)
        x = tl.load(line + place, mask=place < vocabulary, other=0.0).to(tl.float32)
        uniform = (noise_bits(start, place).to(tl.float32) + 0.5) * UNIT
        x += warmth * -tl.log(-tl.log(uniform))
        best = tl.where(place < vocabulary, tl.maximum(best, _key(x, place)), best)
    tl.store(keys + r * pieces + p, tl.max(best, 0))


def unsupported(logits_RV: Tensor, positions_R: Tensor, seed: Tensor, temperature: Tensor) -> str | None:
    """Why these kernels do not take these arguments."""
    return first(reference.invalid(logits_RV, positions_R, seed, temperature)) or argmax.unsupported(logits_RV)


def draw_rows(logits_RV: Tensor, positions_R: Tensor, seed: Tensor, temperature: Tensor) -> Tensor:
    """Same contract as the reference."""
    refuse_launch("draw_rows", unsupported(logits_RV, positions_R, seed, temperature), logits_RV)
    return argmax.by_pieces(draw_kernel, logits_RV, positions_R, seed, temperature, enable_fp_fusion=False)


def configurations(backend: str) -> list[Configuration]:
    """Every dtype; the comparison of pieces is `argmax_rows`' own."""
    types = dict.fromkeys(("row_stride", "vocabulary", "pieces"), "i32")
    types |= {"positions": "*i64", "seed": "*i64", "temperature": "*fp32", "keys": "*i64"}
    constants = {"BLOCK": BLOCK, "PIECE": PIECE}
    return [
        Configuration(f"draw_rows {name}", draw_kernel, types | {"logits": f"*{name}"}, constants, 8, fp_fusion=False)
        for name in TYPES.values()
    ]
