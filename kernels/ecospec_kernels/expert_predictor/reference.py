"""`expert_predictor`: the linear routing head of the predictor, for every row and layer, down to sets of experts.

logits[n, l] = head[l] . hidden[n] + bias[l], plus `shrinkage` times the mean of the first two rows' logits: `shrink` in
`ecospec_runtime/predictor.py`, here as a mean of hidden rows, which is the same for a linear head of finite numbers. It
is left out if one of these rows has a number that is not finite. The trunk before the head is a few small products, which torch does well.

- `masks`: the `top_k` largest logits of a row and layer as bits, of equal ones the lower expert first. A row and layer with
  a logit that is not finite is unknown: it gets the experts row * top_k to row * top_k + top_k - 1, wrapping around. As
  `predicted_masks` there.
- `probabilities`: the sigmoids of a row and layer, scaled to sum to `top_k`; all equal where unknown.
- `logits`: as they are.

Legend of shapes: N rows (root and nodes), W width of the trunk, L MoE layers, E experts.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ecospec_kernels.bitsets import pack
from ecospec_kernels.checks import first, refuse, wrong

Output = Literal["masks", "probabilities", "logits"]
OUTPUTS: tuple[Output, ...] = get_args(Output)


def invalid(
    hidden_NW: Tensor, head_LEW: Tensor, bias_LE: Tensor, top_k: int, shrinkage: float = 0.0, output: Output = "masks"
) -> str | None:
    """What is wrong with the arguments."""
    if hidden_NW.dim() != 2 or head_LEW.dim() != 3 or not hidden_NW.numel() or not head_LEW.numel():
        return f"hidden {list(hidden_NW.shape)} and head {list(head_LEW.shape)} are not [rows, width] and [layers, experts, width]"
    layers, experts, width = head_LEW.shape
    if not 1 <= top_k <= experts or not 0 <= shrinkage <= 1 or output not in OUTPUTS:
        return (
            f"top_k {top_k} of {experts} experts, shrinkage {shrinkage}, output '{output}': one of them is out of range"
        )
    return first(
        wrong("hidden", hidden_NW, (None, width), (torch.float32,), hidden_NW),
        wrong("head", head_LEW, (layers, experts, width), (torch.float32,), hidden_NW),
        wrong("bias", bias_LE, (layers, experts), (torch.float32,), hidden_NW),
    )


def expert_predictor(
    hidden_NW: Tensor, head_LEW: Tensor, bias_LE: Tensor, top_k: int, shrinkage: float = 0.0, output: Output = "masks"
) -> Tensor:
    """-> masks `[N, L, words]` int32 (see `bitsets`), or probabilities or logits `[N, L, E]` float32. Row 0 is the root."""
    refuse("expert_predictor", invalid(hidden_NW, head_LEW, bias_LE, top_k, shrinkage, output))
    leading = hidden_NW[:2]
    agreed = leading.isfinite().all()
    lean_W = shrinkage * (leading / len(leading)).sum(0)  # halves: finite numbers have a finite mean
    hidden_NW = hidden_NW + torch.where(agreed, lean_W, 0.0)
    bias_LE = bias_LE + torch.where(agreed, shrinkage * bias_LE, 0.0)
    logits_NLE = F.linear(hidden_NW, head_LEW.flatten(0, 1), bias_LE.flatten()).unflatten(-1, bias_LE.shape)
    if output == "logits":
        return logits_NLE
    known_NL1 = logits_NLE.isfinite().all(-1, keepdim=True)
    if output == "probabilities":
        return top_k * F.logsigmoid(torch.where(known_NL1, logits_NLE, 0.0)).softmax(-1)
    row_N, expert_E = (torch.arange(size, device=bias_LE.device) for size in (len(hidden_NW), bias_LE.size(1)))
    distance_NE = (expert_E - row_N[:, None] * top_k) % len(expert_E)
    logits_NLE = torch.where(known_NL1, logits_NLE, -distance_NE[:, None].float())
    chosen_NLK = logits_NLE.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return pack(torch.zeros_like(logits_NLE, dtype=torch.bool).scatter(-1, chosen_NLK, True))
