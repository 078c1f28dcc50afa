"""Width of the vectors that the CPU kernels use; importable without numba."""

from __future__ import annotations

import torch

LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8  # fp32 numbers in one vector
