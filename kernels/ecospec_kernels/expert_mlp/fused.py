"""Triton twin of `expert_mlp`: see `reference.py` for the mathematics, `kernels.py` for the kernels.

Four launches, whose shapes depend on the shapes of the arguments alone (a CUDA graph can replay them): `plan` sorts the
pairs of token and slot by expert; `gate_up` and `down` run one column of programs per touched expert, each of which reads
its part of the weights once for all tokens of the expert; `combine` adds each token's slots in their order, so that the
same inputs give the same bits. Sums are fp32; the units between the two products keep fp32's precision.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecospec_kernels.expert_mlp import kernels
from ecospec_kernels.expert_mlp.reference import SWIGLU, Gate
from ecospec_kernels.launch import BACKEND, HIP, TYPES, Configuration, elsewhere, on_device, power_of_two

MAX_TOKENS, MAX_PAIRS, MAX_EXPERTS = 64, 1024, 512
COMBINED = 512  # outputs of one program of `combine`


class Tile(NamedTuple):
    """What one program computes at a time: see `kernels.py`."""

    R: int
    C: int
    K: int


class Form(NamedTuple):
    """Tile and launch options of one product."""

    tile: Tile
    num_warps: int
    num_stages: int


def form(n: int, dtype: torch.dtype, backend: str = BACKEND) -> Form:
    """The tile for n tokens: as many rows as tokens, since any may want the same expert."""
    rows = max(16, power_of_two(n))
    if backend == HIP:  # 64 KB of shared memory
        return Form(Tile(rows, 64, 64 if dtype.itemsize == 2 else 32), 4, 2)
    warps = 8 if rows == 64 else 4
    if dtype is torch.float32:
        return Form(Tile(rows, 32 if rows == 64 else 64, 64 if rows == 16 else 32), warps, 3)
    return Form(Tile(rows, 64, 64), warps, 4)


def _strides(w: Tensor) -> tuple[int, int, int] | None:
    """(expert, row, depth) strides if rows or columns are dense."""
    expert, row, depth = w.stride()
    return (expert, row, depth) if row == 1 or depth == 1 else None


def unsupported(
    hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor, gate_up: Tensor, down: Tensor, gate: Gate = SWIGLU,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> str | None:  # fmt: skip
    """Why the kernel refuses these arguments, if it does."""
    if hidden_ND.dim() != 2 or index_NK.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3:
        return "hidden [n, D], index [n, K], gate_up [E, 2M, D] and down [E, D, M] are wanted"
    (n, hidden), (experts, _, units) = hidden_ND.shape, down.shape
    biases = {"gate_up_bias": (gate_up_bias, (experts, 2 * units)), "down_bias": (down_bias, (experts, hidden))}
    if gate_up.shape != (experts, 2 * units, hidden) or down.size(1) != hidden:
        return f"gate_up {list(gate_up.shape)} and down {list(down.shape)} do not fit hidden {list(hidden_ND.shape)}"
    if weight_NK.shape != index_NK.shape or index_NK.size(0) != n:
        return f"index {list(index_NK.shape)} and weight {list(weight_NK.shape)} are not [{n}, K] both"
    if not (0 < n <= MAX_TOKENS and 0 < index_NK.numel() <= MAX_PAIRS and 0 < experts <= MAX_EXPERTS):
        return f"1 to {MAX_TOKENS} tokens, {MAX_PAIRS} pairs and {MAX_EXPERTS} experts are taken, not {n}, {index_NK.numel()}, {experts}"
    if not (hidden_ND.dtype is gate_up.dtype is down.dtype) or gate_up.dtype not in TYPES:
        return f"hidden {hidden_ND.dtype}, gate_up {gate_up.dtype}, down {down.dtype} are not one of bf16, fp16, fp32"
    if index_NK.dtype not in (torch.int64, torch.int32) or weight_NK.dtype not in TYPES:
        return f"index is {index_NK.dtype}, weight {weight_NK.dtype}"
    if hidden_ND.stride(1) != 1 or not index_NK.is_contiguous() or not weight_NK.is_contiguous():
        return "rows of hidden, index and weight must be dense"
    if _strides(gate_up) is None or _strides(down) is None:
        return "rows or columns of gate_up and down must be dense"
    for name, (bias, shape) in biases.items():
        if bias is not None and (bias.shape != shape or not bias.is_contiguous() or bias.dtype not in TYPES):
            return f"{name} {list(bias.shape)} must be a dense {list(shape)}"
    return elsewhere(hidden_ND, index=index_NK, weight=weight_NK, gate_up=gate_up, down=down,
                     gate_up_bias=gate_up_bias, down_bias=down_bias)  # fmt: skip


def expert_mlp(
    hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor, gate_up: Tensor, down: Tensor, gate: Gate = SWIGLU,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Same contract as the reference, but ids outside [0, E) add nothing: a check would wait for the device.

    Raises ValueError for what `unsupported` names.
    """
    reason = unsupported(hidden_ND, index_NK, weight_NK, gate_up, down, gate, gate_up_bias, down_bias)
    if reason is not None:
        raise ValueError(f"expert_mlp: {reason}")
    (n, hidden), (experts, _, units), top_k = hidden_ND.shape, down.shape, index_NK.size(1)
    pairs, device = n * top_k, hidden_ND.device
    slot_count = min(experts, pairs)
    tile, num_warps, num_stages = form(n, gate_up.dtype)
    options: dict[str, Any] = {**tile._asdict(), "num_warps": num_warps, "num_stages": num_stages}
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    slots = torch.empty((3, slot_count), dtype=torch.int32, device=device)
    split = gate_up.dtype.itemsize == 2
    inner = torch.empty((1 + split, pairs, units), dtype=gate_up.dtype, device=device)
    low = pairs * units
    y = torch.empty((pairs, hidden), dtype=torch.float32, device=device)
    out = torch.empty((n, hidden), dtype=hidden_ND.dtype, device=device)
    with on_device(hidden_ND):
        kernels.plan[(experts,)](index_NK, order, slots, pairs, experts, slot_count,
                                 P=power_of_two(pairs), E=power_of_two(experts + 1))  # fmt: skip
        kernels.gate_up[(-(-2 * units // tile.C), slot_count)](
            hidden_ND, order, slots, gate_up, gate_up_bias, inner, hidden_ND.stride(0), *gate_up.stride(), slot_count,
            top_k, hidden, units, low, gate.alpha, gate.limit, gate.shift, INTERLEAVED=gate.interleaved,
            BIAS=gate_up_bias is not None, SPLIT=split, **options,
        )  # fmt: skip
        kernels.down[(-(-hidden // tile.C), slot_count)](
            inner, order, slots, down, down_bias, weight_NK, y, *down.stride(), slot_count, hidden, units, low,
            BIAS=down_bias is not None, SPLIT=split, **options,
        )  # fmt: skip
        kernels.combine[(-(-hidden // COMBINED), n)](y, index_NK, out, top_k, experts, hidden, C=COMBINED)
    return out


def configurations(backend: str) -> list[Configuration]:
    """Every compiled form: layouts of Qwen-MoE (rows dense) and GPT-OSS (transposed, interleaved, biased)."""
    found = []
    for dtype, name in TYPES.items():
        for n in (16, 32, 64):
            tile, *options = form(n, dtype, backend)
            for transposed in (False, True):
                dense = {"w_row" if transposed else "w_depth": 1, **tile._asdict()}
                integers = dict.fromkeys(
                    ("w_expert", "w_depth" if transposed else "w_row", "hidden", "units", "low"), "i32"
                )
                common = {"order": "*i32", "slots": "*i32", "inner": f"*{name}", "w": f"*{name}", "bias": f"*{name}",
                          "slot_count": "i32", **integers}  # fmt: skip
                label = f"{name} rows={tile.R}{' transposed' if transposed else ''}"
                up = common | {"x": f"*{name}", "x_row": "i32", "top_k": "i32"}
                up |= dict.fromkeys(("alpha", "limit", "shift"), "fp32")
                constants = dense | {"INTERLEAVED": transposed, "BIAS": transposed, "SPLIT": dtype.itemsize == 2}
                found.append(Configuration(f"expert_mlp.gate_up {label}", kernels.gate_up, up, constants, *options))
                out = common | {"weight": f"*{name}", "y": "*fp32"}
                constants = dense | {"BIAS": transposed, "SPLIT": dtype.itemsize == 2}
                found.append(Configuration(f"expert_mlp.down {label}", kernels.down, out, constants, *options))
        types = {"y": "*fp32", "index": "*i64", "out": f"*{name}"} | dict.fromkeys(
            ("top_k", "experts", "hidden"), "i32"
        )
        found.append(Configuration(f"expert_mlp.combine {name}", kernels.combine, types, {"C": COMBINED}))
    types = {"index": "*i64", "order": "*i32", "slots": "*i32"}
    types |= dict.fromkeys(("pairs", "experts", "slot_count"), "i32")
    largest = {"P": MAX_PAIRS, "E": 2 * MAX_EXPERTS}
    return [*found, Configuration("expert_mlp.plan", kernels.plan, types, largest)]
