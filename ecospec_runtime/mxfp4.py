"""GPT-OSS's experts as its checkpoints store them: MXFP4 blocks and scales, which the op `expert_mlp` reads as they are.

The router stays outside, where its choice can be read: transformers' own MXFP4 layer routes inside its kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ecospec_kernels import dispatch
from ecospec_kernels.expert_mlp.reference import GROUP, Mxfp4
from ecospec_runtime.compute import gate_of
from ecospec_runtime.errors import UserError
from ecospec_runtime.quantization import MXFP4

MATRICES = ("gate_up_proj", "down_proj")


class Mxfp4Experts(nn.Module):
    """Takes the place of an experts module whose matrices are [E, D, 2M] and [E, M, D]: its biases, and uint8 in their stead.

    Parameters: `gate_up_proj_blocks` [E, 2M, D / 32, 16], `gate_up_proj_scales` [E, 2M, D / 32], `down_proj_blocks`
    [E, D, M / 32, 16], `down_proj_scales` [E, D, M / 32]: a checkpoint's own names. UserError for a gate that the op does not know.
    """

    def __init__(self, plain: Any):
        super().__init__()
        self.num_experts: int = plain.num_experts
        with torch.device("cpu"):  # transformers makes models on `meta`, where nothing can be tried
            gate = gate_of(plain)
        if gate is None:
            raise UserError(f"{type(plain).__name__} join gate and up as EcoSpec does not know; give --dtype bfloat16")
        self.gate = gate
        for name in MATRICES:
            experts, columns, rows = getattr(plain, name).shape
            shape = experts, rows, columns // GROUP
            for end, size in (("blocks", (*shape, GROUP // 2)), ("scales", shape)):
                self.register_parameter(f"{name}_{end}", nn.Parameter(torch.empty(size, dtype=torch.uint8), False))
            self.register_parameter(f"{name}_bias", getattr(plain, f"{name}_bias"))

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """[n, D], [n, K], [n, K] -> [n, D]. More rows than the Triton kernel takes go through it in pieces."""
        held: Any = self
        matrices = [Mxfp4(getattr(held, f"{name}_blocks"), getattr(held, f"{name}_scales")) for name in MATRICES]
        rest = *matrices, self.gate, *(getattr(held, f"{name}_bias") for name in MATRICES)
        routed = hidden_states, router_indices, routing_weights
        if not dispatch.runs_triton(hidden_states) or hidden_states.dtype.itemsize != 2:
            return dispatch.expert_mlp(*routed, *rest)  # decodes each touched expert once, whatever the rows
        pieces = zip(*(tensor.split(dispatch.MAX_ROWS) for tensor in routed), strict=True)
        return torch.cat([dispatch.expert_mlp(*piece, *rest) for piece in pieces])


def keeping_mxfp4(kind: Any) -> Any:
    """A model class like `kind` whose experts hold MXFP4 from the start, so that loading makes no other matrices."""

    def build(self: Any, *arguments: Any, **settings: Any) -> None:
        kind.__init__(self, *arguments, **settings)
        for parent in list(self.modules()):
            for name, module in list(parent.named_children()):
                if type(module).__name__.endswith("Experts") and all(hasattr(module, m) for m in MATRICES):
                    setattr(parent, name, Mxfp4Experts(module))

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


def dtype_name(target: Any) -> str:
    """What profiles and policies call a target's weights, and `--dtype` gives again: float32, bfloat16, ... or mxfp4."""
    packed = any(isinstance(module, Mxfp4Experts) for module in target.expert_modules)
    return MXFP4 if packed else str(target.dtype).removeprefix("torch.")
