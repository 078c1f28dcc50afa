"""Cases of `expert_mlp`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench.case import BF16, FP16, FP32, Case, Device, Inputs, Work, draw, near
from bench.models import MODELS, ROWS, Model
from ecospec_kernels.expert_mlp.reference import SWIGLU, Gate
from ecospec_kernels.expert_mlp.traffic import traffic

FEW = 4  # rows up to which transformers' batched form is timed: it copies the weights of every pair


def routing(seed: int, n: int, experts: int, top_k: int, groups: tuple[int, int] = (1, 1), used: int | None = None) -> Tensor:  # fmt: skip
    """Distinct experts per token [n, K], uniform: of `groups[0]` groups a token uses `groups[1]`; of experts the first `used`."""
    generator = torch.Generator().manual_seed(seed)
    size = experts // groups[0]

    def one() -> Tensor:
        allowed = torch.randperm(groups[0], generator=generator)[: groups[1]].tolist()
        ids = torch.cat([torch.arange(g * size, (g + 1) * size) for g in allowed])[:used]
        return ids[torch.randperm(len(ids), generator=generator)[:top_k]]

    return torch.stack([one() for _ in range(n)])


def inputs(
    index_NK: Tensor, experts: int, hidden: int, units: int, dtype: torch.dtype, gate: Gate, transposed: bool, device: Device,
) -> Inputs:  # fmt: skip
    """Arguments of the op; weights small enough that outputs are of order one. With biases if `transposed`."""
    up = draw(device, 1, experts, *((hidden, 2 * units) if transposed else (2 * units, hidden)), dtype=dtype, scale=hidden**-0.5)  # fmt: skip
    down = draw(device, 2, experts, *((units, hidden) if transposed else (hidden, units)), dtype=dtype, scale=units**-0.5)  # fmt: skip
    matrices = (up.mT, down.mT) if transposed else (up, down)
    biases = (draw(device, 3, experts, 2 * units, dtype=dtype), draw(device, 4, experts, hidden, dtype=dtype)) if transposed else (None, None)  # fmt: skip
    weight = draw(device, 5, *index_NK.shape).softmax(-1).to(dtype)
    x = draw(device, 6, index_NK.size(0), hidden, dtype=dtype)
    return x, index_NK.to(device), weight, *matrices, gate, *biases


def baseline(name: str) -> Callable[..., Any]:
    """An experts function of transformers."""

    def call(x: Tensor, index: Tensor, weight: Tensor, up: Tensor, down: Tensor, gate: Gate, up_bias: Any, down_bias: Any) -> Tensor:  # fmt: skip
        from transformers.integrations import moe

        transposed = not up.is_contiguous()
        module = SimpleNamespace(
            num_experts=up.size(0), gate_up_proj=up.mT if transposed else up, down_proj=down.mT if transposed else down,
            gate_up_proj_bias=up_bias, down_proj_bias=down_bias, has_bias=up_bias is not None, has_gate=True,
            is_transposed=transposed, has_post_expert_norm=False, _is_expert_parallel=False, _apply_gate=gate.apply,
        )  # fmt: skip
        result: Tensor = getattr(moe, f"{name}_experts_forward")(module, x, index, weight)
        return result

    return call


def _real(model: Model, n: int) -> Case:
    index = routing(n, n, model.experts, model.top_k, model.routing_groups)
    counted = traffic(index, model.experts, model.hidden, model.units, BF16)
    biases = len(index.unique()) * (2 * model.units + model.hidden) * BF16.itemsize if model.transposed else 0
    work = Work(counted.floor + biases, counted.weights + counted.activations + biases, counted.repeats,
                flops=index.numel() * 6 * model.hidden * model.units)  # fmt: skip

    def make(device: Device) -> Inputs:
        return inputs(index, model.experts, model.hidden, model.units, BF16, model.gate, model.transposed, device)

    names = ("grouped_mm", "batched_mm") if n <= FEW else ("grouped_mm",)
    shape = f"{n} row{'s' * (n > 1)}, {len(index.unique())} experts"
    return Case("expert_mlp", model.name, shape, make, near(model.hidden + model.units), work,
                {name: baseline(name) for name in names})  # fmt: skip


def _odd(n: int, experts: int, top_k: int, hidden: int, units: int, used: int, dtype: torch.dtype, gate: Gate, transposed: bool) -> Case:  # fmt: skip
    def make(device: Device) -> Inputs:
        return inputs(routing(n, n, experts, top_k, used=used), experts, hidden, units, dtype, gate, transposed, device)

    layout = "transposed, biased" if transposed else "dense rows"
    shape = f"{n} rows, {used} of {experts} experts, {hidden}x{units}, {str(dtype)[6:]}, {layout}"
    return Case("expert_mlp", "odd", shape, make, near(hidden + units))


def cases() -> list[Case]:
    """Sizes that fill no tile, experts with many rows, one and none, both layouts and gates; then the real ones."""
    clamped = Gate(True, 1.702, 1.5, 1.0)
    return [
        _odd(1, 6, 2, 40, 16, 6, BF16, SWIGLU, False),
        _odd(3, 60, 4, 75, 35, 60, FP16, SWIGLU, False),
        _odd(63, 128, 4, 40, 24, 5, FP32, SWIGLU, False),
        _odd(17, 256, 8, 70, 18, 12, BF16, SWIGLU, False),
        _odd(5, 6, 3, 40, 35, 6, BF16, clamped, True),
        _odd(33, 6, 3, 70, 18, 3, FP32, clamped, True),
        *(_real(model, n) for model in MODELS for n in ROWS),
    ]
