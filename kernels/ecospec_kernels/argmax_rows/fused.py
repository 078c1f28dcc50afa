"""Triton kernels of `argmax_rows`: see `reference.py`. Each row is split over several programs, whose finds are compared."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ecospec_kernels.argmax_rows.reference import invalid
from ecospec_kernels.launch import TYPES, Configuration, on_device, refuse_launch

BLOCK = 2048  # logits that a program looks at in one go
PIECE = 8 * BLOCK  # logits of one program
MAX_PIECES = 64


@triton.jit
def _key(x, place):  # type: ignore[no-untyped-def]
    """int64 that orders by logit, NaN first, then by the lower place: the largest key is the argmax."""
    x = tl.where(x == 0, 0.0, x.to(tl.float32))  # one zero
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit(do_not_specialize=["pieces"])
def argmax_kernel(  # type: ignore[no-untyped-def]
    logits, keys, row_stride, vocabulary, pieces, BLOCK: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """Program (r, p): the largest key of piece p of row r."""
    r, p = tl.program_id(0), tl.program_id(1)
    line = logits + r.to(tl.int64) * row_stride
    best = tl.full([BLOCK], -(2**63), tl.int64)
    for start in range(p * PIECE, tl.minimum((p + 1) * PIECE, vocabulary), BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(line + place, mask=place < vocabulary, other=0.0)
        best = tl.where(place < vocabulary, tl.maximum(best, _key(x, place)), best)
    tl.store(keys + r * pieces + p, tl.max(best, 0))


@triton.jit(do_not_specialize=["pieces"])
def combine_kernel(keys, out, pieces, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program r: the place in the largest of row r's keys. P: a power of two, pieces or more."""
    r, piece = tl.program_id(0), tl.arange(0, P)
    best = tl.max(tl.load(keys + r * pieces + piece, mask=piece < pieces, other=-(2**63)), 0)
    tl.store(out + r, 0x7FFFFFFF - (best & 0x7FFFFFFF))


def unsupported(logits_RV: Tensor) -> str | None:
    """Why these kernels do not take this argument."""
    problem = invalid(logits_RV)
    return problem or (
        f"more than {MAX_PIECES * PIECE} logits a row" if logits_RV.size(1) > MAX_PIECES * PIECE else None
    )


def by_pieces(kernel: Any, logits_RV: Tensor, *inputs: Tensor, **options: Any) -> Tensor:
    """Launch a kernel that leaves the largest key of each piece of a row, and take the largest of each row -> places [R] int64."""
    (rows, vocabulary), device = logits_RV.shape, logits_RV.device
    pieces = -(-vocabulary // PIECE)
    keys = torch.empty((rows, pieces), dtype=torch.int64, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    with on_device(logits_RV):
        kernel[(rows, pieces)](
            logits_RV, *inputs, keys, logits_RV.stride(0), vocabulary, pieces, BLOCK=BLOCK, PIECE=PIECE, num_warps=8, **options
        )  # fmt: skip
        combine_kernel[(rows,)](keys, out, pieces, P=MAX_PIECES, num_warps=1)
    return out


def argmax_rows(logits_RV: Tensor) -> Tensor:
    """Same contract as the reference."""
    refuse_launch("argmax_rows", unsupported(logits_RV), logits_RV)
    return by_pieces(argmax_kernel, logits_RV)


def configurations(backend: str) -> list[Configuration]:
    """Every dtype, and the comparison of pieces."""
    integers = dict.fromkeys(("row_stride", "vocabulary", "pieces"), "i32")
    constants = {"BLOCK": BLOCK, "PIECE": PIECE}
    last = {"keys": "*i64", "out": "*i64", "pieces": "i32"}
    return [
        *(Configuration(f"argmax_rows {name}", argmax_kernel, {"logits": f"*{name}", "keys": "*i64", **integers}, constants, 8)
          for name in TYPES.values()),
        Configuration("argmax_rows combine", combine_kernel, last, {"P": MAX_PIECES}, 1),
    ]  # fmt: skip
