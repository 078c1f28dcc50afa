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

CUDA, HIP = "cuda", "hip"
BACKEND = HIP if torch.version.hip else CUDA
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


def on_device(t: Tensor) -> AbstractContextManager[Any]:
    """Makes the GPU of `t` the current one, where Triton launches."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def smallest(n: int, sizes: tuple[int, ...]) -> int:
    """The first of these rising sizes that is at least n; the last one is, by the op's own check. Few sizes, few forms."""
    return next(size for size in sizes if size >= n)


def elsewhere(first: Tensor, **others: Tensor | None) -> str | None:
    """Why these tensors do not lie together, if they do not."""
    for name, t in others.items():
        if t is not None and t.device != first.device:
            return f"{name} is on {t.device}, the first argument on {first.device}"
    return None
