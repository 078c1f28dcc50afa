"""Balance of experts by a bias on the router's choice, without a loss.

Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", arXiv 2408.15664, as in DeepSeek-V3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

STEP = 1e-3  # by which a bias moves after each training step


class BiasBalance:
    """Counts what every router with an `e_score_correction_bias` chooses; `step` moves the biases."""

    def __init__(self, model: nn.Module):
        self.loads: dict[Any, Tensor] = {}  # router -> tokens by expert in its last pass
        self.routers = [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]
        for router in self.routers:
            router.register_forward_hook(self._count)

    def _count(self, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits_NE, _, index_NK = output
        self.loads[router] = torch.bincount(index_NK.flatten(), minlength=logits_NE.size(-1)).float()

    @torch.no_grad()
    def step(self) -> float:
        """Favour the experts that got less than the mean; returns the largest over the mean load, averaged over routers."""
        worst = 0.0
        for router, load_E in self.loads.items():
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(load_E)
            router.e_score_correction_bias += STEP * torch.sign(load_E.mean() - load_E)
            worst += (load_E.max() / load_E.mean()).item() / len(self.loads)
        return worst
