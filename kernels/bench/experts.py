"""Cases of `expert_mlp`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.case import BF16, FP16, FP32, Case, Device, Inputs, Work, draw, near
from bench.models import DEEPSEEK, GPT_OSS, MODELS, ROWS, Model
from ecospec_kernels.expert_mlp.fused import FP8, MXFP4, PLAIN
from ecospec_kernels.expert_mlp.reference import GROUP, SWIGLU, Fp8, Gate, Matrix, Mxfp4
from ecospec_kernels.expert_mlp.traffic import traffic

FEW = 4  # rows up to which transformers' batched form is timed: it copies the weights of every pair
UNITS_LOST = 2.0**-16  # by the two 16-bit numbers that hold a unit, see `kernels.gate_up`
FP8_BLOCK = 128


class Layer(NamedTuple):
    """Experts of one layer, and how they are stored."""

    experts: int
    hidden: int
    units: int
    kind: str = PLAIN
    dtype: torch.dtype = BF16  # of activations, and of plain matrices
    gate: Gate = SWIGLU
    transposed: bool = False  # plain matrices stored [E, D, 2M] and [E, M, D]
    biased: bool = False

    def matrix(self, device: Device, seed: int, rows: int, columns: int) -> Matrix:
        """[E, rows, columns], small enough that products are of order one."""
        scale = columns**-0.5
        if self.kind == MXFP4:
            generator = torch.Generator(device).manual_seed(seed)
            shape = (self.experts, rows, columns // GROUP)
            options: dict[str, Any] = {"generator": generator, "dtype": torch.uint8, "device": device}
            code = 127 - (columns.bit_length() - 1) // 2 - 2
            return Mxfp4(
                torch.randint(0, 256, (*shape, GROUP // 2), **options), torch.randint(code, code + 2, shape, **options)
            )
        if self.kind == FP8:
            values = draw(device, seed, self.experts, rows, columns, dtype=BF16).to(torch.float8_e4m3fn)
            grid = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
            return Fp8(values, draw(device, seed + 1, self.experts, *grid).abs_().add_(0.5).mul_(scale))
        if self.transposed:
            return draw(device, seed, self.experts, columns, rows, dtype=self.dtype, scale=scale).mT
        return draw(device, seed, self.experts, rows, columns, dtype=self.dtype, scale=scale)

    def inputs(self, index_NK: Tensor, device: Device) -> Inputs:
        """Arguments of the op."""
        matrices = (
            self.matrix(device, 10, 2 * self.units, self.hidden),
            self.matrix(device, 20, self.hidden, self.units),
        )
        biases = [draw(device, seed, self.experts, size, dtype=self.dtype) if self.biased else None
                  for seed, size in ((3, 2 * self.units), (4, self.hidden))]  # fmt: skip
        weight = draw(device, 5, *index_NK.shape).softmax(-1).to(self.dtype)
        x = draw(device, 6, index_NK.size(0), self.hidden, dtype=self.dtype)
        return x, index_NK.to(device), weight, *matrices, self.gate, *biases

    def work(self, index_NK: Tensor) -> Work:
        """Of one call."""
        counted = traffic(index_NK, self.experts, self.hidden, self.units, self.dtype, self.kind)
        touched = len(index_NK.unique())
        biases = touched * (2 * self.units + self.hidden) * self.dtype.itemsize if self.biased else 0
        return Work(counted.floor + biases, counted.weights + counted.activations + biases, counted.repeats,
                    flops=index_NK.numel() * 6 * self.hidden * self.units)  # fmt: skip

    @property
    def check(self) -> Callable[[Any, Any, Inputs], None]:
        """Both products are sums in another order."""
        return near(self.hidden + self.units, 2e-6 if self.dtype is FP32 else UNITS_LOST)


def routing(seed: int, n: int, experts: int, top_k: int, groups: tuple[int, int] = (1, 1), used: int | None = None) -> Tensor:  # fmt: skip
    """Distinct experts per token [n, K], uniform: of `groups[0]` groups a token uses `groups[1]`; of experts the first `used`."""
    generator = torch.Generator().manual_seed(seed)
    size = experts // groups[0]

    def one() -> Tensor:
        allowed = torch.randperm(groups[0], generator=generator)[: groups[1]].tolist()
        ids = torch.cat([torch.arange(g * size, (g + 1) * size) for g in allowed])[:used]
        return ids[torch.randperm(len(ids), generator=generator)[:top_k]]

    return torch.stack([one() for _ in range(n)])


def baseline(name: str) -> Callable[..., Any]:
    """An experts function of transformers, on plain matrices."""

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


def _real(model: Model, n: int, kind: str = PLAIN) -> Case:
    layer = Layer(model.experts, model.hidden, model.units, kind, gate=model.gate, biased=model.transposed,
                  transposed=model.transposed and kind == PLAIN)  # fmt: skip
    index = routing(n, n, model.experts, model.top_k, model.routing_groups)
    names = () if kind != PLAIN else ("grouped_mm", "batched_mm") if n <= FEW else ("grouped_mm",)
    shape = f"{n} row{'s' * (n > 1)}, {len(index.unique())} experts{f', {kind}' * (kind != PLAIN)}"
    return Case("expert_mlp", model.name, shape, lambda device: layer.inputs(index, device), layer.check, layer.work(index),
                {name: baseline(name) for name in names})  # fmt: skip


def _odd(n: int, top_k: int, used: int, layer: Layer) -> Case:
    index = routing(n, n, layer.experts, top_k, used=used)
    extras = f"{', transposed' * layer.transposed}{', biased' * layer.biased}"
    shape = f"{n} rows, {used} of {layer.experts} experts, {layer.hidden}x{layer.units}, {layer.kind}, {str(layer.dtype)[6:]}{extras}"
    return Case("expert_mlp", "odd", shape, lambda device: layer.inputs(index, device), layer.check)


def cases() -> list[Case]:
    """Sizes that fill no tile, experts with many rows, one and none, every layout and gate; then the real ones."""
    clamped = Gate(True, 1.702, 1.5, 1.0)
    return [
        _odd(1, 2, 6, Layer(6, 40, 16)),
        _odd(3, 4, 60, Layer(60, 75, 35, dtype=FP16)),
        _odd(63, 4, 5, Layer(128, 40, 24, dtype=FP32)),
        _odd(17, 8, 12, Layer(256, 70, 18)),
        _odd(5, 3, 6, Layer(6, 40, 35, gate=clamped, transposed=True, biased=True)),
        _odd(33, 3, 3, Layer(6, 70, 18, dtype=FP32, gate=clamped, transposed=True, biased=True)),
        _odd(3, 2, 5, Layer(6, 150, 70, FP8)),
        _odd(33, 2, 3, Layer(6, 75, 35, FP8, FP16)),
        _odd(3, 2, 5, Layer(6, 96, 32, MXFP4, gate=clamped, biased=True)),
        _odd(33, 2, 3, Layer(6, 32, 64, MXFP4, FP16)),
        *(_real(model, n) for model in MODELS for n in ROWS),
        *(_real(DEEPSEEK, n, FP8) for n in ROWS),
        *(_real(GPT_OSS, n, MXFP4) for n in ROWS),
    ]
