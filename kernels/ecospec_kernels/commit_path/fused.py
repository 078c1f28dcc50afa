"""Triton kernel of `commit_path`: see `reference.py`. One launch for keys and values.

A program owns a few columns of one head. It reads all its accepted rows before it writes one, so that source and
destination may overlap; a row that stays where it is costs nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ecospec_kernels.commit_path.reference import invalid
from ecospec_kernels.launch import TYPES, Configuration, on_device, refuse_launch, smallest

ROWS = (16, 64, 128)  # of a pass: sizes that are compiled
MAX_ROWS = ROWS[-1]
COLUMNS = 64  # of one program


@triton.jit
def _move(cache, head_stride, row_stride, dim, start, room, rows, count, M: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """Move the rows of one head's columns. `start`: the number of committed rows; what is not within `room` rows stays."""
    i = tl.arange(0, M)
    source = tl.load(rows + i, mask=i < count, other=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    line = cache + tl.program_id(0).to(tl.int64) * head_stride + column[None, :]
    inside = (start >= 0) & (source >= 0) & (start + tl.maximum(source, i) < room)
    moves = ((i < count) & (source != i) & inside)[:, None] & (column < dim)[None, :]
    row_stride = row_stride.to(tl.int64)
    held = tl.load(line + (start + source)[:, None] * row_stride, mask=moves)
    tl.debug_barrier()
    tl.store(line + (start + i)[:, None] * row_stride, held, mask=moves)


@triton.jit(do_not_specialize=["room", "m"], do_not_specialize_on_alignment=["rows", "count", "past"])
def commit_kernel(  # type: ignore[no-untyped-def]
    keys, values, rows, count, past, length, key_head, key_row, value_head, value_row, room, key_dim, value_dim, m,
    M: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (head, columns, 0 for keys or 1 for values). M: a power of two, m or more."""
    start = tl.load(past).to(tl.int64)
    accepted = tl.minimum(tl.load(count), m)
    if tl.program_id(2) == 0:
        _move(keys, key_head, key_row, key_dim, start, room, rows, accepted, M, COLUMNS)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(length, start + tl.load(count))
    else:
        _move(values, value_head, value_row, value_dim, start, room, rows, accepted, M, COLUMNS)


def unsupported(keys_HCD: Tensor, values_HCE: Tensor, rows_m: Tensor, count: Tensor, past: Tensor) -> str | None:
    """Why this kernel does not take these arguments."""
    problem = invalid(keys_HCD, values_HCE, rows_m, count, past)
    return problem or (f"more than {MAX_ROWS} rows of a pass" if len(rows_m) > MAX_ROWS else None)


def commit_path(keys_HCD: Tensor, values_HCE: Tensor, rows_m: Tensor, count: Tensor, past: Tensor) -> Tensor:
    """Same contract as the reference, but rows that are not in the buffer are left alone: a check would wait for the device."""
    refuse_launch("commit_path", unsupported(keys_HCD, values_HCE, rows_m, count, past), keys_HCD)
    heads, room, key_dim = keys_HCD.shape
    value_dim, m = values_HCE.size(2), len(rows_m)
    length = torch.empty_like(past)
    with on_device(keys_HCD):
        commit_kernel[(heads, -(-max(key_dim, value_dim) // COLUMNS), 2)](
            keys_HCD, values_HCE, rows_m, count, past, length, *keys_HCD.stride()[:2], *values_HCE.stride()[:2],
            room, key_dim, value_dim, m, M=smallest(m, ROWS), COLUMNS=COLUMNS,
        )  # fmt: skip
    return length


def configurations(backend: str) -> list[Configuration]:
    """Every dtype and size of pass, and `past` of either type."""
    integers = ("key_head", "key_row", "value_head", "value_row", "room", "key_dim", "value_dim", "m")
    types = {"rows": "*i32", "count": "*i32"} | dict.fromkeys(integers, "i32")
    return [
        Configuration(f"commit_path {name} {m} rows {ids}", commit_kernel,
                      types | dict.fromkeys(("keys", "values"), f"*{name}") | dict.fromkeys(("past", "length"), f"*{ids}"),
                      {"M": m, "COLUMNS": COLUMNS})
        for name in TYPES.values() for m in ROWS for ids in ("i32", "i64")
    ]  # fmt: skip
