"""`expert_mlp`: the experts of one MoE layer, reading each touched expert's weights once for all of its tokens.

out[t] = sum_k weights[t, k] * down_e(gated(gate_e(x[t]), up_e(x[t]))) with e = index[t, k]; the sum runs in slot order k.
`Gate` says what `gated` is.

Shapes: n tokens, K experts per token, E experts, D hidden size, M units per expert. Layouts follow the attributes of
transformers' experts modules (`transformers.integrations.moe.use_experts_implementation`). Matrices are plain tensors or
quantised ones, `Fp8` or `Mxfp4`, which mean the numbers that `dequantized` gives; activations are never quantised.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ecospec_kernels.checks import FLOATS, IDS, not_tensors, refuse, wrong

GROUP = 32  # MXFP4 numbers that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; 8 to 15 are their negatives


def exponents(codes: Tensor) -> Tensor:
    """2**(code - 127) in float32 for E8M0 codes (uint8), NaN for 255."""
    bits = codes.int()
    values = torch.where(bits == 0, 1 << 22, bits << 23)  # 2**-127 is subnormal
    return values.view(torch.float32).masked_fill(bits == 255, math.nan)


class Fp8(NamedTuple):
    """A matrix [R, C] of each expert as DeepSeek stores it: number * scale of its block.

    values: float8_e4m3fn [E, R, C]. scales (`weight_scale_inv`): fp32 [E, ceil(R / block[0]), ceil(C / block[1])], blocks
    counted from the first row and column of the whole matrix (of gate_up: gates and ups together).
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int] = (128, 128)

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, R, C)."""
        return tuple(self.values.shape)

    def invalid(self) -> str | None:
        """What is wrong with dtypes and shapes, if anything."""
        problem = not_tensors({"values": self.values, "scales": self.scales})
        if problem:
            return problem
        if self.values.dim() != 3 or self.values.dtype is not torch.float8_e4m3fn:
            return f"FP8 is float8_e4m3fn [E, R, C], not {self.values.dtype} {list(self.values.shape)}"
        if len(self.block) != 2 or not all(isinstance(size, int) and size > 0 for size in self.block):
            return f"FP8 has a scale for so many rows and columns, two whole numbers above 0, not {self.block}"
        grid = [math.ceil(size / step) for size, step in zip(self.shape[1:], self.block, strict=True)]
        return wrong("scales", self.scales, (self.shape[0], *grid), (torch.float32,), self.values)

    def dequantized(self, e: int) -> Tensor:
        """Expert e's matrix [R, C] in fp32."""
        values, (rows, columns) = self.values[e].float(), self.block
        scales = self.scales[e].repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return values * scales[: values.size(0), : values.size(1)]


class Mxfp4(NamedTuple):
    """A matrix [R, C] of each expert in the OCP Microscaling format, laid out as GPT-OSS stores it.

    values (`_blocks`): uint8 [E, R, C / 32, 16], two e2m1 numbers a byte, the one in the low half first. scales (`_scales`):
    uint8 [E, R, C / 32], the factor 2**(code - 127) of 32 numbers, NaN for 255.
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, R, C)."""
        experts, rows, groups = self.values.shape[:3]
        return experts, rows, groups * GROUP

    def invalid(self) -> str | None:
        """What is wrong with dtypes and shapes, if anything."""
        problem = not_tensors(self._asdict())
        if problem:
            return problem
        shape = (*self.values.shape[:3], GROUP // 2)
        if self.values.dim() != 4 or self.values.shape != shape or self.values.dtype is not torch.uint8:
            return f"MXFP4 is uint8 [E, R, C / 32, 16], not {self.values.dtype} {list(self.values.shape)}"
        return wrong("scales", self.scales, shape[:3], (torch.uint8,), self.values)

    def dequantized(self, e: int) -> Tensor:
        """Expert e's matrix [R, C] in fp32."""
        numbers = torch.tensor([*E2M1, *(-number for number in E2M1)], device=self.values.device)
        pairs = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], dim=1)  # [256, 2] of a byte
        grouped = F.embedding(self.values[e].int(), pairs).flatten(-2)  # [R, G, 32]
        return (grouped * exponents(self.scales[e])[..., None]).flatten(1)


Matrix = Tensor | Fp8 | Mxfp4


class Gate(NamedTuple):
    """gated(gate, up) = (clamp(up, -limit, limit) + shift) * g * sigmoid(alpha * g), g = min(gate, limit).

    `limit`: 0 or more. `interleaved`: rows of gate_up alternate gate, up; else all gates come first.
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


def _whole(matrix: Matrix, e: int) -> Tensor:
    return matrix[e].float() if isinstance(matrix, Tensor) else matrix.dequantized(e)


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


def invalid(
    hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor, gate_up: Matrix, down: Matrix, gate: Gate = SWIGLU,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> str | None:  # fmt: skip
    """What is wrong with the arguments. On a CPU it is asked for every layer of a pass: a few microseconds."""
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    tensors = {"hidden": hidden_ND, "index": index_NK, "weight": weight_NK}
    tensors |= {name: bias for name, bias in biases.items() if bias is not None}
    problem = not_tensors(tensors)
    if problem is not None:
        return problem
    for name, m in (("gate_up", gate_up), ("down", down)):
        if not isinstance(m, Matrix):
            return f"{name} is {type(m).__name__}, not a tensor, Fp8 or Mxfp4"
        problem = None if isinstance(m, Tensor) else m.invalid()
        if problem is not None:
            return f"{name}: {problem}"
    if not isinstance(gate, Gate):
        return f"gate is {type(gate).__name__}, not a Gate"
    x, index, up, out = hidden_ND.shape, index_NK.shape, gate_up.shape, down.shape
    if len(x) != 2 or len(index) != 2 or len(up) != 3 or len(out) != 3:
        return "hidden [n, D], index [n, K], gate_up [E, 2M, D] and down [E, D, M] are wanted"
    (n, hidden), (experts, rows, units) = x, out
    if rows != hidden or up != (experts, 2 * units, hidden):
        return f"gate_up {list(up)} and down {list(out)} do not fit hidden {list(x)}"
    if index[0] != n or weight_NK.shape != index:
        return f"index {list(index)} and weight {list(weight_NK.shape)} are not [{n}, K] both"
    if index_NK.dtype not in IDS:
        return f"index is {index_NK.dtype}, not int32 or int64"
    if not gate.limit >= 0:
        return f"the gate's limit is {gate.limit}, not 0 or more"
    for name, bias, size in (("gate_up_bias", gate_up_bias, 2 * units), ("down_bias", down_bias, hidden)):
        if bias is not None and bias.shape != (experts, size):
            return f"{name} has shape {list(bias.shape)}, not [{experts}, {size}]"
    device = hidden_ND.device
    for name, given in (tensors | {"gate_up": gate_up, "down": down}).items():
        if not isinstance(given, Tensor):
            given = given.values
        elif name != "index" and given.dtype not in FLOATS:
            return f"{name} is {given.dtype}, not float32, bfloat16 or float16"
        if given.device != device:
            return f"{name} is on {given.device}, the first argument on {device}"
    return None


def expert_mlp(
    hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor, gate_up: Matrix, down: Matrix, gate: Gate = SWIGLU,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """gate_up [E, 2M, D], down [E, D, M], biases [E, 2M] and [E, D] or None -> [n, D] in hidden's dtype.

    Each is of fp32, bf16 or fp16, not necessarily the same: everything between input and output is fp32. Ids are int32 or
    int64. Raises ValueError for what `invalid` names, IndexError for an expert id outside [0, E].
    """
    refuse("expert_mlp", invalid(hidden_ND, index_NK, weight_NK, gate_up, down, gate, gate_up_bias, down_bias))
    experts = gate_up.shape[0]
    if index_NK.numel() and not 0 <= int(index_NK.min()) <= int(index_NK.max()) <= experts:
        raise IndexError(f"expert id outside [0, {experts}]")
    slots = torch.zeros((*index_NK.shape, hidden_ND.size(-1)), dtype=torch.float32, device=hidden_ND.device)
    for e in touched_experts(index_NK, experts):
        token, slot = torch.where(index_NK == e)
        biases = [None if bias is None else bias[e].float() for bias in (gate_up_bias, down_bias)]
        inner = gate.apply(F.linear(hidden_ND[token].float(), _whole(gate_up, e), biases[0]))
        y = F.linear(inner, _whole(down, e), biases[1])
        slots[token, slot] = y * weight_NK[token, slot, None].float()
    return slots.sum(1).to(hidden_ND.dtype)
