"""Muon for weight matrices, batched so that one call orthogonalises all experts of a layer.

Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024). `torch.optim.Muon` takes
2-D parameters only; the experts of a transformers MoE are one 3-D parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_NS = (3.4445, -4.7750, 2.0315)


def orthogonalize(update: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix of each `[..., rows, cols]` matrix."""
    wide = update if update.size(-2) <= update.size(-1) else update.mT
    x = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _NS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if update.size(-2) <= update.size(-1) else x.mT


class Muon(torch.optim.Optimizer):
    """Momentum, then orthogonalisation; the step's RMS is matched to AdamW's, so one learning rate scale serves both."""

    def __init__(self, params: Iterable[Tensor], lr: float = 3e-3, momentum: float = 0.95, weight_decay: float = 0.05):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                buffer = state.setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(buffer, group["momentum"]))
                scale = 0.2 * max(p.size(-2), p.size(-1)) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)
        return loss
