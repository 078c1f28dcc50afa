"""`rms_norm`: root-mean-square normalisation as transformers' Llama-style modules compute it.

out = weight * round(x / sqrt(mean(x^2) + epsilon)): statistics in fp32, rounded to x's dtype before the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [..., K], weight [K] of the same dtype -> like x."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)
