"""Random inputs of the ops, and the measure by which two results are compared."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from ecospec_kernels.expert_mlp.reference import GROUP, Fp8, Mxfp4

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
T = TypeVar("T")
under_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for a GPU here"
)


def random(seed: int, *shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> Tensor:
    """Normal numbers from a seed of their own."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def routing(seed: int, n: int, experts: int, top_k: int, used: int | None = None) -> Tensor:
    """Distinct experts per token, drawn from the first `used` only."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(used or experts, generator=generator)[:top_k] for _ in range(n)])


def fp8(seed: int, experts: int, rows: int, columns: int, block: tuple[int, int] = (128, 128)) -> Fp8:
    """Numbers about 0.3 in size, with scales that differ from block to block by a factor up to two."""
    grid = experts, -(-rows // block[0]), -(-columns // block[1])
    scales = (1 + torch.rand(grid, generator=torch.Generator().manual_seed(seed))) * 0.002
    return Fp8(random(seed, experts, rows, columns, scale=100).to(torch.float8_e4m3fn), scales, block)


def mxfp4(seed: int, experts: int, rows: int, columns: int) -> Mxfp4:
    """All codes equally often, with scales from 2^-6 to 2^-3."""
    generator = torch.Generator().manual_seed(seed)
    shape = experts, rows, columns // GROUP
    values = torch.randint(0, 256, (*shape, GROUP // 2), dtype=torch.uint8, generator=generator)
    return Mxfp4(values, torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator))


def assert_near(result: Tensor, expected: Tensor, floor: float = 2e-6) -> None:
    """Equal up to one rounding of the output's dtype, measured on the scale of the whole output.

    Both sides accumulate in fp32 (relative error about 1e-6 of the largest partial sum) and round once, so 16-bit results
    differ by at most one unit in the last place (at most 2^-7 of a bf16 number, 2^-10 of an fp16 one) where the fp32 sums straddle a rounding boundary.
    `floor`: what sums that cancel may lose, of the largest output.
    """
    assert result.shape == expected.shape and result.dtype == expected.dtype
    scale = float(expected.abs().max())
    step = {BF16: 2**-7, FP16: 2**-10, FP32: 5e-6}[expected.dtype]
    torch.testing.assert_close(result.float(), expected.float(), rtol=step, atol=floor * scale)


def far_apart(folder: Path, t: Tensor, apart: int) -> Tensor:
    """A copy of `t` whose first dimension's stride is `apart` numbers, in a sparse file: only what is touched takes memory."""
    t = t.contiguous()
    size = (t.size(0) - 1) * apart + t[0].numel()
    stored = torch.from_file(str(folder / f"far{apart}"), shared=True, size=size, dtype=t.dtype)
    return stored.as_strided(t.shape, (apart, *t.stride()[1:])).copy_(t)


def poisoned(op: Callable[..., T], *arguments: object) -> T:
    """Run an op while `torch.empty` gives NaN, or the largest integer: an output that is not written shows."""
    torch.use_deterministic_algorithms(True)
    try:
        return op(*arguments)
    finally:
        torch.use_deterministic_algorithms(False)
