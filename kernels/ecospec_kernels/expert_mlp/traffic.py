"""Bytes that the Triton kernels of `expert_mlp` move, counted from their launch geometry; for benchmarks and tests."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ecospec_kernels.expert_mlp.fused import form


class Traffic(NamedTuple):
    """Bytes of one call. What a cache serves is apart, since every program of an expert reads the same few rows.

    weights: what all programs load of the experts' matrices. floor: the touched experts' matrices, input and output, each
    once. activations: input, workspaces (written and read) and output, each once. repeats: further loads of input rows and of
    units by the programs of an expert; they fit a GPU's second-level cache severalfold.
    """

    weights: int
    floor: int
    activations: int
    repeats: int


def traffic(index_NK: Tensor, experts: int, hidden: int, units: int, dtype: torch.dtype) -> Traffic:
    """Of experts without biases, gate_up [E, 2 units, hidden] and down [E, hidden, units] of `dtype`."""
    n, size, unit_size = index_NK.size(0), dtype.itemsize, 4  # units: fp32, or two numbers of a 16-bit type
    tile = form(n, dtype).tile
    inside = index_NK[(index_NK >= 0) & (index_NK < experts)].long()
    counts = [count for count in torch.bincount(inside, minlength=experts).tolist() if count]
    pairs, matrices = sum(counts), 3 * hidden * units * size
    reads = pairs * hidden * size * -(-2 * units // tile.C), pairs * units * unit_size * -(-hidden // tile.C)
    once = n * hidden * size, pairs * units * unit_size
    return Traffic(
        weights=sum(-(-count // tile.R) for count in counts) * matrices,
        floor=len(counts) * matrices + 2 * n * hidden * size,
        activations=2 * once[0] + 2 * once[1] + 2 * pairs * hidden * 4,
        repeats=sum(reads) - sum(once),
    )
