"""Triton twin of `tree_attention`: see `reference.py` for the mathematics, `kernels.py` for the kernels.

The keys are split into chunks, so that a long cache keeps the whole device busy with few rows. `attend` runs one program per
chunk, key-value head and tile of rows (each key serves all query heads of its group); `combine` joins the chunks in their
order. The number of chunks follows from shapes and types alone: the same inputs give the same bits, with a `start` that hides what the
mask hides or without. Sums are fp32; the weights of the values are rounded to the values' dtype before the product, as
everywhere on tensor cores.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecospec_kernels.launch import BACKEND, HIP, TYPES, Configuration, on_device, power_of_two, refuse_launch
from ecospec_kernels.tree_attention import kernels
from ecospec_kernels.tree_attention.reference import invalid

MAX_ROWS, MAX_WIDTH, MAX_SPLITS = 64, 576, 64
PROGRAMS = (
    264  # enough for two on each of an H200's 132 processors; also near what an MI300X (304) or a B200 (148) wants
)
NO_MASK, BOOL_MASK, ADDITIVE_MASK = range(3)


class Form(NamedTuple):
    """Tile of `attend` (see `kernels.py`) and its launch options."""

    R: int
    J: int
    A: int
    B: int
    V: int
    num_warps: int
    num_stages: int


def form(
    rows: int, width: int, value_width: int, dtype: torch.dtype, backend: str = BACKEND, additive: bool = False
) -> Form:
    """The tile for `rows` rows per key-value head, and heads of these widths; `additive`: the mask is one to add."""
    a = max(16, 1 << (width.bit_length() - 1))
    b = max(16, power_of_two(width - a)) if width > a else 0
    v = max(16, power_of_two(value_width))
    wide = max(a, v) > 256
    r = 16 if wide or dtype is torch.float32 or rows <= 16 else 32 if rows <= 32 or max(a, v) > 128 else 64
    if backend == HIP:  # 64 KB of shared memory
        few = dtype is torch.float32 or (additive and r > 16)  # more keys of an additive mask spill there
        return Form(min(r, 32), 16 if few else 32, a, b, v, 4, 1)
    if dtype is torch.float32:  # products on vector units hold the keys in registers, and spill with 32
        return Form(r, 16, a, b, v, 8, 2 if wide else 1)
    if wide:
        return Form(r, 64, a, b, v, 8, 2)
    split = b > 0 and r == 32  # a head in two parts: fewer keys instead of more warps, else some chip's compiler spills
    keys = 32 if max(a, v) > 128 or split else 64
    return Form(r, keys, a, b, v, 8 if r > 16 and max(a, v) > 64 and not split else 4, 2)


def splits(keys: int, groups: int, tiles: int, j: int) -> tuple[int, int]:
    """(chunks, keys in each, a multiple of j): enough programs for the device, and chunks of four tiles or more."""
    wanted = max(1, min(MAX_SPLITS, PROGRAMS // (groups * tiles), -(-keys // (4 * j))))
    chunk = -(-keys // (wanted * j)) * j
    return -(-keys // chunk), chunk


def unsupported(
    q_HnD: Tensor, k_GJD: Tensor, v_GJD: Tensor, mask_nJ: Tensor | None, scale: float, sinks_H: Tensor | None = None,
    start: Tensor | None = None,
) -> str | None:  # fmt: skip
    """Why the kernel refuses these arguments, if it does."""
    problem = invalid(q_HnD, k_GJD, v_GJD, mask_nJ, scale, sinks_H, start)
    if problem:
        return problem
    (_, n, width), (_, keys, value_width), dtype = q_HnD.shape, v_GJD.shape, q_HnD.dtype
    if n > MAX_ROWS or max(width, value_width) > MAX_WIDTH or keys >= 1 << 31:
        return f"up to {MAX_ROWS} rows and heads of {MAX_WIDTH} are taken, not {n} and {width} with {keys} keys"
    if any(t.stride(2) != 1 for t in (q_HnD, k_GJD, v_GJD)) or (mask_nJ is not None and mask_nJ.stride(1) != 1):
        return "rows of q, k, v and mask must be dense"
    if mask_nJ is not None and n * mask_nJ.stride(0) >= 1 << 31:
        return f"a mask of {n} rows, {mask_nJ.stride(0)} numbers apart, passes 2^31"
    if mask_nJ is not None and mask_nJ.dtype not in (torch.bool, dtype):
        return f"mask is {mask_nJ.dtype}, neither bool nor q's {dtype}"
    return None if sinks_H is None or sinks_H.dtype is dtype else f"sinks are {sinks_H.dtype}, not q's {dtype}"


def tree_attention(
    q_HnD: Tensor, k_GJD: Tensor, v_GJD: Tensor, mask_nJ: Tensor | None, scale: float, sinks_H: Tensor | None = None,
    start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Same contract as the reference. Raises ValueError for what `unsupported` names."""
    refuse_launch("tree_attention", unsupported(q_HnD, k_GJD, v_GJD, mask_nJ, scale, sinks_H, start), q_HnD)
    (heads, n, width), (groups, keys, value_width) = q_HnD.shape, v_GJD.shape
    kind = NO_MASK if mask_nJ is None else BOOL_MASK if mask_nJ.dtype is torch.bool else ADDITIVE_MASK
    tile = form(heads // groups * n, width, value_width, q_HnD.dtype, additive=kind == ADDITIVE_MASK)
    tiles = -(-(heads // groups * n) // tile.R)
    count, chunk = splits(keys, groups, tiles, tile.J)
    part = torch.empty((count, heads * n, value_width), dtype=torch.float32, device=q_HnD.device)
    top = torch.empty((2, count, heads * n), dtype=torch.float32, device=q_HnD.device)
    out = torch.empty((n, heads, value_width), dtype=q_HnD.dtype, device=q_HnD.device)
    same = (
        v_GJD.data_ptr() == k_GJD.data_ptr()
        and v_GJD.stride() == k_GJD.stride()
        and width > MAX_WINDOWED
        and value_width == tile.A == tile.V
    )
    mask, mask_row = mask_nJ, 0
    if mask_nJ is not None:
        mask, mask_row = mask_nJ.view(torch.uint8) if kind == BOOL_MASK else mask_nJ, mask_nJ.stride(0)
    with on_device(q_HnD):
        kernels.attend[(count, tiles, groups)](
            q_HnD, k_GJD, v_GJD, mask, start, part, top[0], top[1], *q_HnD.stride()[:2], *k_GJD.stride()[:2],
            *v_GJD.stride()[:2], mask_row, n, heads // groups, keys, chunk, width, value_width, float(scale),
            MASK=kind, SAME=same, START=start is not None, **tile._asdict(),
        )  # fmt: skip
        kernels.combine[(heads * n,)](
            part, top[0], top[1], sinks_H, out, start, count, heads * n, n, heads, value_width, keys, chunk,
            SINKS=sinks_H is not None, START=start is not None, S=MAX_SPLITS, V=tile.V,
        )  # fmt: skip
    return out


MAX_WINDOWED = 256  # widest head of the forms with a `start`: latent attention has no windows
WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (576, 512))  # the last: latent attention


def _listed(label: str, kernel: Any, types: dict[str, str], given: dict[str, str | None], constants: dict[str, Any], *options: int) -> Configuration:  # fmt: skip
    """A form with some tensors `given`, by their types, and others None, which is a constant to Triton."""
    there = {name: kind for name, kind in given.items() if kind is not None}
    return Configuration(label, kernel, types | there, constants | dict.fromkeys(given.keys() - there), *options)


def configurations(backend: str) -> list[Configuration]:
    """Every form for the head widths of models in use; others are compiled where they are met.

    `start` comes with a mask there.
    """
    found: dict[str, Configuration] = {}
    integers = ("q_head", "q_row", "k_head", "k_row", "v_head", "v_row", "mask_row", "keys", "chunk", "width", "value_width", "n", "share")  # fmt: skip
    masks = {NO_MASK: " no mask", BOOL_MASK: "", ADDITIVE_MASK: " additive"}
    for (dtype, name), (width, value_width) in product(TYPES.items(), WIDTHS):
        types: dict[str, Any] = dict.fromkeys(integers, "i32") | dict.fromkeys(("part", "top", "total"), "*fp32")
        types |= dict.fromkeys(("q", "k", "v"), f"*{name}") | {"scale": "fp32"}
        latent = (False, True) if width > MAX_WINDOWED else (False,)
        for rows, kind, same, start in product((16, 32, 64), masks, latent, (False, True)):
            if start and (kind == NO_MASK or same or width > MAX_WINDOWED):
                continue
            *tile, num_warps, num_stages = form(rows, width, value_width, dtype, backend, kind == ADDITIVE_MASK)
            constants = dict(zip("RJABV", tile, strict=True)) | {"MASK": kind, "SAME": same, "START": start}
            extras = f"{masks[kind]}{' latent' * same}{' start' * start}"
            label = f"tree_attention.attend {name} {width}/{value_width} rows={tile[0]}{extras}"
            given = {
                "mask": {NO_MASK: None, BOOL_MASK: "*u8", ADDITIVE_MASK: f"*{name}"}[kind],
                "start": "*i64" if start else None,
            }
            found[label] = _listed(label, kernels.attend, types, given, constants, num_warps, num_stages)
        types = dict.fromkeys(("part", "top", "total"), "*fp32") | {"out": f"*{name}"}
        types |= dict.fromkeys(("splits", "rows", "n", "heads", "value_width", "keys", "chunk"), "i32")
        for sinks, start in product((False, True), (False, True)):
            if start and width > MAX_WINDOWED:
                continue
            label = f"tree_attention.combine {name} {value_width}{' sinks' * sinks}{' start' * start}"
            constants = {"SINKS": sinks, "START": start, "S": MAX_SPLITS, "V": tile[4]}
            given = {"sinks": f"*{name}" if sinks else None, "start": "*i64" if start else None}
            found[label] = _listed(label, kernels.combine, types, given, constants)
    return list(found.values())
