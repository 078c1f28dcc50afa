"""What the Triton kernels share: checks before a launch, the device they run on, and the list of what is shipped.

Each `fused.py` has `unsupported(...)`, the first reason why it refuses a call, or None, and `configurations(backend)`, every
compiled form it launches, which `ecospec_kernels.aot` compiles for chips that this machine lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from ecospec_kernels.checks import refuse

CUDA, HIP = "cuda", "hip"
BACKEND = HIP if torch.version.hip else CUDA
INTERPRETED = bool(knobs.runtime.interpret)  # by which `triton.jit` decides, once, what a kernel becomes
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # Triton's names


@dataclass(frozen=True)
class Configuration:
    """One compiled form of a kernel. `types`: Triton's type of each argument that is not in `constants`."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3  # what CUDA kernels get whose launch names no number
    fp_fusion: bool = field(default=True, kw_only=True)  # whether products and sums may become one multiply-add


def cannot_run(t: Tensor) -> str | None:
    """Why no Triton kernel runs where `t` lies, if none does."""
    if t.is_cuda or (t.is_cpu and INTERPRETED):
        return None
    return (
        f"the Triton kernel runs on CUDA and ROCm devices, not on {t.device.type} tensors: call the op through "
        "`ecospec_kernels.dispatch`, which chooses an implementation that runs there, or set TRITON_INTERPRET=1 before "
        "Triton is imported, which interprets it on CPU tensors"
    )


def refuse_launch(op: str, problem: str | None, t: Tensor) -> None:
    """What every `fused` asks first. ValueError for a problem with its arguments, or if no kernel runs where `t`, one of them, lies."""
    refuse(op, problem or cannot_run(t))


def on_device(t: Tensor) -> AbstractContextManager[Any]:
    """Makes the GPU of `t` the current one, where Triton launches."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def smallest(n: int, sizes: tuple[int, ...]) -> int:
    """The first of these rising sizes that is at least n; the last one is, by the op's own check. Few sizes, few forms."""
    return next(size for size in sizes if size >= n)
