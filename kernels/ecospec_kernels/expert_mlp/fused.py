"""Triton twin of `expert_mlp`: see `reference.py` for the mathematics, `kernels.py` for the kernels.

Four launches, whose shapes depend on the shapes of the arguments alone (a CUDA graph can replay them): `plan` sorts the
pairs of token and slot by expert; `gate_up` and `down` run one column of programs per touched expert, each of which reads
its part of the weights once for all tokens of the expert; `combine` adds each token's slots in their order, so that the
same inputs give the same bits. Sums are fp32; the units between the two products keep fp32's precision.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecospec_kernels.expert_mlp import kernels
from ecospec_kernels.expert_mlp.reference import GROUP, SWIGLU, Fp8, Gate, Matrix, invalid
from ecospec_kernels.launch import BACKEND, HIP, TYPES, Configuration, on_device, power_of_two, refuse_launch, smallest

MAX_TOKENS, MAX_PAIRS, MAX_EXPERTS = 64, 1024, 512
ID_TYPES = ("i32", "i64")  # of `index`
PLAIN, FP8, MXFP4 = "plain", "fp8", "mxfp4"
PAIRS, BINS = (32, 128, MAX_PAIRS), (256, 512, 2 * MAX_EXPERTS)  # sizes of `plan` that are compiled
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


def form(n: int, dtype: torch.dtype, backend: str = BACKEND, kind: str = PLAIN) -> Form:
    """The tile for n tokens of `dtype` and matrices of a kind: as many rows as tokens, since any may want the same expert."""
    rows = max(16, power_of_two(n))
    if kind == FP8:
        return Form(Tile(rows, 32 if rows == 64 else 64, 64), 8 if rows == 64 else 4, 2 if backend == HIP else 3)
    if kind == MXFP4:
        return Form(
            Tile(rows, 16 if rows == 64 else 32, 128), 8 if rows == 64 else 4, 2 if rows == 64 or backend == HIP else 3
        )
    if backend == HIP:  # 64 KB of shared memory
        return Form(Tile(rows, 64, 64 if dtype.itemsize == 2 else 32), 4, 2)
    warps = 8 if rows == 64 else 4
    if dtype is torch.float32:
        return Form(Tile(rows, 32 if rows == 64 else 64, 64 if rows == 16 else 32), warps, 3)
    return Form(Tile(rows, 64, 64), warps, 4)


def kind_of(matrix: Matrix) -> str:
    """`FORMAT` of the kernels."""
    return PLAIN if isinstance(matrix, Tensor) else FP8 if isinstance(matrix, Fp8) else MXFP4


def _operand(matrix: Matrix) -> dict[str, Any]:
    """What the kernels are told of a matrix."""
    scales: Tensor | None
    kind, block = kind_of(matrix), (1, GROUP)
    if isinstance(matrix, Tensor):
        values, scales, (expert, row, depth) = matrix, None, matrix.stride()
    else:
        values, scales, (expert, row), depth = (
            matrix.values.view(torch.uint8),
            matrix.scales,
            matrix.values.stride()[:2],
            1,
        )
        block = matrix.block if isinstance(matrix, Fp8) else block
    found = {"w": values, "w_expert": expert, "w_row": row, "w_depth": depth, "FORMAT": kind}
    steps = (0, 0) if scales is None else scales.stride()[:2]
    return found | {
        "scales": scales,
        "scales_expert": steps[0],
        "scales_row": steps[1],
        "BLOCK_ROWS": block[0],
        "BLOCK": block[1],
    }


def _refused(name: str, matrix: Matrix, dtype: torch.dtype, depth: int) -> str | None:
    """Why the kernels refuse a valid matrix beside activations of `dtype`, if they do; `depth`: columns of a tile."""
    if isinstance(matrix, Tensor):
        dense = matrix.stride(1) == 1 or matrix.stride(2) == 1
        return None if dense else "rows or columns of gate_up and down must be dense"
    if dtype.itemsize != 2:
        return f"hidden is {dtype}, and the quantised {name} wants bf16 or fp16"
    if isinstance(matrix, Fp8) and matrix.block[1] % depth:
        return f"{name}: blocks are {matrix.block[1]} columns wide, not a multiple of {depth}"
    if matrix.values.stride()[2:] != ((1,) if isinstance(matrix, Fp8) else (GROUP // 2, 1)):
        return f"rows of {name} must be dense"
    return None


def unsupported(
    hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor, gate_up: Matrix, down: Matrix, gate: Gate = SWIGLU,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> str | None:  # fmt: skip
    """Why the kernel refuses these arguments, if it does."""
    problem = invalid(hidden_ND, index_NK, weight_NK, gate_up, down, gate, gate_up_bias, down_bias)
    if problem is not None:
        return problem
    matrices = {"gate_up": gate_up, "down": down}
    (n, hidden), (experts, _, units) = hidden_ND.shape, down.shape
    if not (0 < n <= MAX_TOKENS and 0 < index_NK.numel() <= MAX_PAIRS and 0 < experts <= MAX_EXPERTS):
        return f"1 to {MAX_TOKENS} tokens, {MAX_PAIRS} pairs and {MAX_EXPERTS} experts are taken, not {n}, {index_NK.numel()}, {experts}"
    if not hidden or not units:
        return f"hidden [n, {hidden}] and {units} units: nothing to multiply"
    for name, m in matrices.items():
        if isinstance(m, Tensor) and m.dtype is not hidden_ND.dtype:
            return f"{name} is {m.dtype}, hidden {hidden_ND.dtype}"
    if hidden_ND.stride(1) != 1 or not index_NK.is_contiguous() or not weight_NK.is_contiguous():
        return "rows of hidden, index and weight must be dense"
    for name, m in matrices.items():
        problem = _refused(name, m, hidden_ND.dtype, form(n, hidden_ND.dtype, kind=kind_of(m)).tile.K)
        if problem is not None:
            return problem
    for name, bias in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):
        if bias is not None and not bias.is_contiguous():
            return f"{name} is not contiguous"
    return None


def expert_mlp(
    hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor, gate_up: Matrix, down: Matrix, gate: Gate = SWIGLU,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Same contract as the reference, but ids outside [0, E) add nothing: a check would wait for the device.

    Quantised matrices are decoded in registers, beside activations that stay bf16 or fp16. Raises ValueError for what
    `unsupported` names.
    """
    problem = unsupported(hidden_ND, index_NK, weight_NK, gate_up, down, gate, gate_up_bias, down_bias)
    refuse_launch("expert_mlp", problem, hidden_ND)
    (n, hidden), (experts, _, units), top_k = hidden_ND.shape, down.shape, index_NK.size(1)
    pairs, device, dtype = n * top_k, hidden_ND.device, hidden_ND.dtype
    slot_count = min(experts, pairs)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    slots = torch.empty((3, slot_count), dtype=torch.int32, device=device)
    split = dtype.itemsize == 2
    inner = torch.empty((1 + split, pairs, units), dtype=dtype, device=device)
    low = pairs * units
    y = torch.empty((pairs, hidden), dtype=torch.float32, device=device)
    out = torch.empty((n, hidden), dtype=dtype, device=device)

    def product(kernel: Any, matrix: Matrix, bias: Tensor | None, *arguments: Any, **constants: Any) -> None:
        tile, num_warps, num_stages = form(n, dtype, kind=kind_of(matrix))
        kernel[(-(-matrix.shape[1] // tile.C), slot_count)](
            *arguments, bias=bias, BIAS=bias is not None, SPLIT=split, **constants, **_operand(matrix), **tile._asdict(),
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip

    with on_device(hidden_ND):
        kernels.plan[(experts,)](index_NK, order, slots, pairs, experts, slot_count,
                                 P=smallest(pairs, PAIRS), E=smallest(experts + 1, BINS))  # fmt: skip
        product(kernels.gate_up, gate_up, gate_up_bias, hidden_ND, order, slots, inner, hidden_ND.stride(0), slot_count,
                top_k, hidden, units, low, *map(float, gate[1:]), INTERLEAVED=gate.interleaved)  # fmt: skip
        product(kernels.down, down, down_bias, inner, order, slots, weight_NK, y, slot_count, hidden, units, low)
        kernels.combine[(-(-hidden // COMBINED), n)](y, index_NK, out, top_k, experts, hidden, C=COMBINED)
    return out


def _products(n: int, dtype: torch.dtype, kind: str, transposed: bool, backend: str) -> list[Configuration]:
    """Both products of one form, weights of its type or fp32 as DeepSeek's routers give them; transposed or MXFP4 ones as GPT-OSS has them, interleaved and biased."""
    name, (tile, warps, stages), gpt_oss = TYPES[dtype], form(n, dtype, backend, kind), transposed or kind == MXFP4
    constants = {"w_row" if transposed else "w_depth": 1, "SPLIT": dtype.itemsize == 2, "BIAS": gpt_oss, "FORMAT": kind}
    constants |= {"BLOCK_ROWS": 128 if kind == FP8 else 1, "BLOCK": 128 if kind == FP8 else GROUP, **tile._asdict()}
    types = {"order": "*i32", "slots": "*i32", "inner": f"*{name}", "slot_count": "i32"}
    types |= dict.fromkeys(("scales_expert", "scales_row"), "i32") | ({"bias": f"*{name}"} if gpt_oss else {})
    constants |= {} if gpt_oss else {"bias": None}
    types |= dict.fromkeys(("w_expert", "w_depth" if transposed else "w_row", "hidden", "units", "low"), "i32")
    types["w"] = f"*{name}" if kind == PLAIN else "*u8"
    if kind == PLAIN:
        constants["scales"] = None
    else:
        types["scales"] = "*fp32" if kind == FP8 else "*u8"
    label = f"{name} rows={tile.R}{' transposed' if transposed else ''}"
    label = label if kind == PLAIN else f"{kind} {label}"
    up = types | {"x": f"*{name}", "x_row": "i32", "top_k": "i32"} | dict.fromkeys(("alpha", "limit", "shift"), "fp32")
    interleaved = constants | {"INTERLEAVED": gpt_oss}
    out = types | {"y": "*fp32"}
    return [
        Configuration(f"expert_mlp.gate_up {label}", kernels.gate_up, up, interleaved, warps, stages),
        *(Configuration(f"expert_mlp.down {label}{' fp32 weight' * (weight != name)}", kernels.down,
                        out | {"weight": f"*{weight}"}, constants, warps, stages)
          for weight in sorted({name, "fp32"})),
    ]  # fmt: skip


def configurations(backend: str) -> list[Configuration]:
    """Every compiled form: layouts of Qwen-MoE (rows dense), GPT-OSS (transposed, or MXFP4) and DeepSeek-V3 (FP8)."""
    found = []
    for dtype in TYPES:
        kinds = [(PLAIN, False), (PLAIN, True)] + [(FP8, False), (MXFP4, False)] * (dtype.itemsize == 2)
        for n in (16, 32, 64):
            for kind, transposed in kinds:
                found += _products(n, dtype, kind, transposed, backend)
    counts = dict.fromkeys(("top_k", "experts", "hidden"), "i32")
    for ids, name in itertools.product(ID_TYPES, TYPES.values()):
        types = {"y": "*fp32", "index": f"*{ids}", "out": f"*{name}", **counts}
        label = f"expert_mlp.combine {name} {ids}"
        found.append(Configuration(label, kernels.combine, types, {"C": COMBINED}))
    counts = dict.fromkeys(("pairs", "experts", "slot_count"), "i32")
    for ids, pairs, bins in itertools.product(ID_TYPES, PAIRS, BINS):
        types = {"index": f"*{ids}", "order": "*i32", "slots": "*i32", **counts}
        label = f"expert_mlp.plan {pairs} pairs {bins} bins {ids}"
        found.append(Configuration(label, kernels.plan, types, {"P": pairs, "E": bins}))
    return found
