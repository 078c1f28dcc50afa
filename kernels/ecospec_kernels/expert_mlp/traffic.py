"""Bytes that the Triton kernels of `expert_mlp` move, counted from their launch geometry; for benchmarks and tests."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ecospec_kernels.expert_mlp.fused import FP8, MXFP4, PLAIN, form
from ecospec_kernels.expert_mlp.reference import GROUP


class Traffic(NamedTuple):
    """Bytes of one call. What a cache serves is apart, since every program of an expert reads the same few rows.

    weights: what all programs load of the experts' matrices, and their scales once a reading. floor: the touched experts'
    matrices and scales, input and output, each once. activations: input, workspaces (written and read) and output, each once.
    repeats: further loads of input rows and of units by the programs of an expert, and of an FP8 block's scale by its columns;
    they fit a GPU's second-level cache severalfold.
    """

    weights: int
    floor: int
    activations: int
    repeats: int


def _scales(rows: int, columns: int, kind: str, block: tuple[int, int], depth: int) -> tuple[int, int]:
    """Bytes of the scales of one matrix, and what its programs load of them in tiles `depth` deep."""
    if kind == PLAIN:
        return 0, 0
    if kind == MXFP4:
        return 2 * (rows * columns // GROUP,)
    return 4 * math.ceil(rows / block[0]) * math.ceil(columns / block[1]), 4 * rows * math.ceil(columns / depth)


def traffic(
    index_NK: Tensor, experts: int, hidden: int, units: int, dtype: torch.dtype, kind: str = PLAIN,
    block: tuple[int, int] = (128, 128),
) -> Traffic:  # fmt: skip
    """Of experts without biases, gate_up [E, 2 units, hidden] and down [E, hidden, units], beside activations of `dtype`.

    `kind` "plain" (of `dtype` too), "fp8" (in blocks of this size) or "mxfp4".
    """
    n, size, unit_size = index_NK.size(0), dtype.itemsize, 4  # units: fp32, or two numbers of a 16-bit type
    tile = form(n, dtype, kind=kind).tile
    inside = index_NK[(index_NK >= 0) & (index_NK < experts)].long()
    counts = [count for count in torch.bincount(inside, minlength=experts).tolist() if count]
    pairs, readings = sum(counts), sum(-(-count // tile.R) for count in counts)
    scales = [_scales(*shape, kind, block, tile.K) for shape in ((2 * units, hidden), (hidden, units))]
    numbers = 3 * hidden * units
    matrices = {PLAIN: numbers * size, FP8: numbers, MXFP4: numbers // 2}[kind] + sum(once for once, _ in scales)
    reads = pairs * hidden * size * -(-2 * units // tile.C), pairs * units * unit_size * -(-hidden // tile.C)
    once = n * hidden * size, pairs * units * unit_size
    return Traffic(
        weights=readings * matrices,
        floor=len(counts) * matrices + 2 * n * hidden * size,
        activations=2 * once[0] + 2 * once[1] + 2 * pairs * hidden * 4,
        repeats=sum(reads) - sum(once) + readings * sum(loaded - once for once, loaded in scales),
    )
