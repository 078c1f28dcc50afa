"""`expert_mlp`: the experts of one MoE layer, reading each touched expert's weights once for all of its tokens.

out[t] = sum_k weights[t, k] * down_e(gated(gate_e(x[t]), up_e(x[t]))) with e = index[t, k]; the sum runs in slot order k.
`Gate` says what `gated` is.

Shapes: n tokens, K experts per token, E experts, D hidden size, M units per expert. Layouts follow the attributes of
transformers' experts modules (`transformers.integrations.moe.use_experts_implementation`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Gate(NamedTuple):
    """gated(gate, up) = (clamp(up, -limit, limit) + shift) * g * sigmoid(alpha * g), g = min(gate, limit).

    `interleaved`: rows of gate_up alternate gate, up; else all gates come first.
    """

    interleaved: bool = False
    alpha: float = 1.0
    limit: float = float("inf")
    shift: float = 0.0

    def apply(self, gate_up: Tensor) -> Tensor:
        """[..., 2M] -> [..., M]."""
        gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if self.interleaved else gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + self.shift) * gate * torch.sigmoid(self.alpha * gate)


SWIGLU = Gate()


def touched_experts(index_NK: Tensor, experts: int) -> list[int]:
    """Expert ids that occur, rising. Ids of `experts` or more are expert-parallel sentinels and are left out."""
    return [e for e in torch.unique(index_NK).tolist() if e < experts]


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return F.linear(x, weight.T if transposed else weight, bias)


def module_experts(module: Any, hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """Experts function for any transformers experts module, in its own dtype; see the module docstring.

    Honours `is_transposed`, `has_bias`, `has_gate`, `_apply_gate` (which knows about `is_concatenated`, clamps and
    activations), `has_post_expert_norm` and expert-parallel sentinels; attributes that older releases lack default.
    """
    transposed = getattr(module, "is_transposed", False)
    gated = getattr(module, "has_gate", True)
    biased = getattr(module, "has_bias", False)
    name = "gate_up_proj" if gated else "up_proj"
    up, up_bias = getattr(module, name), getattr(module, f"{name}_bias") if biased else None
    slots = torch.zeros((*index_NK.shape, hidden_ND.size(-1)), dtype=torch.float32, device=hidden_ND.device)
    for e in touched_experts(index_NK, module.num_experts):
        token, slot = torch.where(index_NK == e)
        inner = _project(hidden_ND[token], up[e], None if up_bias is None else up_bias[e], transposed)
        inner = module._apply_gate(inner) if gated else module.act_fn(inner)
        y = _project(inner, module.down_proj[e], module.down_proj_bias[e] if biased else None, transposed)
        if getattr(module, "has_post_expert_norm", False):
            y = module.post_expert_norm(y)
        slots[token, slot] = y.float() * weight_NK[token, slot, None].float()
    return slots.sum(1).to(hidden_ND.dtype)


def expert_mlp(
    hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor, gate_up: Tensor, down: Tensor, gate: Gate = SWIGLU,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """gate_up [E, 2M, D], down [E, D, M], biases [E, 2M] and [E, D] or None -> [n, D] in hidden's dtype.

    Everything between input and output is fp32. Raises IndexError for an expert id outside [0, E].
    """
    experts = gate_up.size(0)
    if index_NK.numel() and not 0 <= int(index_NK.min()) <= int(index_NK.max()) <= experts:
        raise IndexError(f"expert id outside [0, {experts}]")
    slots = torch.zeros((*index_NK.shape, hidden_ND.size(-1)), dtype=torch.float32, device=hidden_ND.device)
    for e in touched_experts(index_NK, experts):
        token, slot = torch.where(index_NK == e)
        biases = [None if bias is None else bias[e].float() for bias in (gate_up_bias, down_bias)]
        inner = gate.apply(F.linear(hidden_ND[token].float(), gate_up[e].float(), biases[0]))
        y = F.linear(inner, down[e].float(), biases[1])
        slots[token, slot] = y * weight_NK[token, slot, None].float()
    return slots.sum(1).to(hidden_ND.dtype)
