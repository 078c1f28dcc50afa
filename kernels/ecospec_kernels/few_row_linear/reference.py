"""`few_row_linear`: a linear layer for the few rows of a decoding or verification pass.

out[t, o] = sum_k x[t, k] * weight[o, k] + bias[o], accumulated in fp32 and rounded once to x's dtype.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def few_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, K] @ weight [O, K].T (+ bias [O]) -> [n, O] in x's dtype; floating point inputs of any mix of dtypes."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
