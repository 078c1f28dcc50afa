"""What a benchmark case is: an op at one shape, with its inputs, its twins, its bytes, and how two results are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}  # largest relative error of one rounding
LIKE = 0.05  # relative error (2-norm) below which a baseline computes the same thing, rounded elsewhere

Inputs = tuple[Any, ...]
Device = torch.device | str


class Work(NamedTuple):
    """What one call does. Bytes: `floor` every input that is wanted and every output once; `moved` what the launches
    load and store, but for `repeats`, further loads of the same few bytes, which a second-level cache serves."""

    floor: int
    moved: int
    repeats: int = 0
    flops: int = 0  # of products on tensor cores
    float32: int = 0  # of products on vector units


@dataclass(frozen=True)
class Case:
    """One op at one shape. `make(device)` draws its inputs; baselines take the same arguments."""

    op: str  # the folder in `ecospec_kernels`
    model: str  # whose shape; "odd": small, for correctness alone
    shape: str
    make: Callable[[Device], Inputs]
    check: Callable[[Any, Any, Inputs], None]  # result, reference's result, inputs; AssertionError if they differ
    work: Work | None = None  # None: not timed
    baselines: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    alike: bool = True  # whether baselines give what the op gives
    writes: tuple[int, ...] = ()  # arguments that the op changes: copied before a call that is compared

    @cached_property
    def name(self) -> str:
        """Unique in the registry."""
        return f"{self.op} {self.model} {self.shape}"

    def twin(self, implementation: str) -> Callable[..., Any]:
        """The op's `reference` or `fused`."""
        found: Callable[..., Any] = getattr(import_module(f"ecospec_kernels.{self.op}.{implementation}"), self.op)
        return found

    def observed(self, call: Callable[..., Any], inputs: Inputs) -> Any:
        """What a call returns, and what it leaves in the arguments that it changes."""
        own = tuple(t.clone() if i in self.writes else t for i, t in enumerate(inputs))
        result = call(*own)
        return (result, *(own[i] for i in self.writes)) if self.writes else result


def draw(device: Device, seed: int, *shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> Tensor:
    """Normal numbers, made on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, scale, generator=generator)


def equal(result: Any, expected: Any, inputs: Inputs) -> None:
    """Bit for bit, tensor by tensor."""
    pairs = zip(result, expected, strict=True) if isinstance(expected, tuple) else [(result, expected)]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def near(depth: int, lost: float = 2e-6) -> Callable[[Any, Any, Inputs], None]:
    """Equal up to one rounding of the output's dtype on each side, sums of `depth` products in another order, and what else
    is `lost`, both on the scale of the whole output.

    Tensor cores cut what does not fit 24 bits after every 16 products or so: an error of up to depth / 16 units of 2^-23. A
    product that is left out is off by much more.
    """

    def check(result: Tensor, expected: Tensor, inputs: Inputs) -> None:
        assert result.dtype is expected.dtype, f"{result.dtype}, not {expected.dtype}"
        rounding = 2 * ROUNDING[expected.dtype] if expected.dtype is not FP32 else 5e-6
        most = float(expected.float().abs().nan_to_num(0, 0, 0).max())
        other = (lost + depth / 16 * 2.0**-23) * most
        torch.testing.assert_close(result.float(), expected.float(), rtol=rounding, atol=other, equal_nan=True)

    return check


def distance(result: Tensor, expected: Tensor) -> float:
    """Relative distance in the 2-norm; NaN if anything is."""
    return float((result.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))
