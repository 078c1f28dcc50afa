"""`argmax_rows`: the target's token after each row of a pass at temperature 0.

Legend of shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from ecospec_kernels.checks import FLOATS, refuse


def invalid(logits_RV: Tensor) -> str | None:
    """What is wrong with the argument."""
    if logits_RV.dim() != 2 or not logits_RV.numel() or logits_RV.stride(1) != 1:
        return f"logits of shape {list(logits_RV.shape)} and strides {logits_RV.stride()} are not [rows, vocabulary], each row dense"
    return None if logits_RV.dtype in FLOATS else f"logits are {logits_RV.dtype}, not float32, bfloat16 or float16"


def argmax_rows(logits_RV: Tensor) -> Tensor:
    """Lowest id of the largest logit of each row -> [R] int64. A NaN is larger than any number; one zero equals the other."""
    refuse("argmax_rows", invalid(logits_RV))
    return logits_RV.argmax(-1)
