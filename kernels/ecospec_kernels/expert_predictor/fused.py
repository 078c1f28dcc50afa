"""Triton kernel of `expert_predictor`: see `reference.py`. One program per layer and tile of rows.

It keeps the logits of its rows and all experts of the layer in registers and writes bits only: the layer's share of the
head is read once per tile of rows, from memory once if the second-level cache holds it. Products are fp32 throughout, so
that the sets are the host's up to ties within the rounding of a sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ecospec_kernels.bitsets import WORD, words_for
from ecospec_kernels.expert_predictor.reference import OUTPUTS, Output, invalid
from ecospec_kernels.launch import BACKEND, Configuration, on_device, power_of_two, refuse_launch

MAX_WIDTH, MAX_EXPERTS = 1024, 512


class Form(NamedTuple):
    """Rows, padded experts and width of a step of the product, and launch options."""

    R: int
    E: int
    K: int
    num_warps: int
    num_stages: int


def form(experts: int, backend: str = BACKEND) -> Form:
    """The tile for so many experts."""
    padded = max(WORD, power_of_two(experts))
    return Form(16, padded, 16, 4 if padded <= 128 else 8, 2)


@triton.jit(do_not_specialize=["n", "layers", "words", "top_k"])
def predict_kernel(  # type: ignore[no-untyped-def]
    hidden, head, bias, out, n, width, experts, layers, words, top_k, shrinkage,
    MASKS: tl.constexpr, PROBABILITIES: tl.constexpr, WIDTH: tl.constexpr, WORD: tl.constexpr,
    R: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Program (layer, tile of rows). All tensors contiguous. WIDTH: no less than `width`."""
    layer = tl.program_id(0)
    row = tl.program_id(1) * R + tl.arange(0, R)
    e, k, i = tl.arange(0, E), tl.arange(0, K), tl.arange(0, WIDTH)
    real, live = (e < experts)[None, :], (row < n)[:, None]
    second = hidden + tl.minimum(n - 1, 1) * width
    pair = 0.5 * tl.load(hidden + i, mask=i < width, other=0.0) + 0.5 * tl.load(second + i, mask=i < width, other=0.0)
    agreed = tl.max(tl.where(tl.abs(pair) < float("inf"), 0, 1), 0) == 0  # halves: finite numbers have a finite mean
    weights = head + (layer.to(tl.int64) * experts + e)[:, None] * width
    x = tl.zeros([R, E], tl.float32)
    for start in range(0, width, K):
        inside = start + k < width
        lean = 0.5 * tl.load(hidden + start + k, mask=inside, other=0.0)
        lean += 0.5 * tl.load(second + start + k, mask=inside, other=0.0)
        lean = tl.where(agreed, shrinkage * lean, 0.0)
        h = tl.load(hidden + row[:, None] * width + (start + k)[None, :], mask=live & inside[None, :], other=0.0)
        w = tl.load(weights + (start + k)[None, :], mask=(e < experts)[:, None] & inside[None, :], other=0.0)
        x = tl.dot(h + lean[None, :], tl.trans(w), x, input_precision="ieee")
    b = tl.load(bias + layer * experts + e, mask=e < experts, other=0.0)
    x += (b + tl.where(agreed, shrinkage * b, 0.0))[None, :]
    at = row.to(tl.int64) * layers + layer
    odd = (tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), 1) > 0)[:, None]  # padding is zero here
    if MASKS:
        distance = (e[None, :] + experts - (row * top_k % experts)[:, None]) % experts
        x = tl.where(real, tl.where(odd, -distance.to(tl.float32), x), float("-inf"))
        word = tl.arange(0, E // WORD)[None, :]
        bits = tl.zeros([R, E // WORD], tl.int32)
        for _ in range(top_k):
            best = tl.argmax(x, 1)[:, None]  # of equal ones the first
            bits |= tl.where(word == best // WORD, 1 << (best % WORD), 0)
            x = tl.where(e[None, :] == best, float("-inf"), x)
        tl.store(out + at[:, None] * words + word, bits, mask=live & (word < words))
    else:
        if PROBABILITIES:
            x = tl.where(odd, 0.0, tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x))))  # log of the sigmoid
            x = tl.where(real, x, float("-inf"))
            x = tl.exp(x - tl.max(x, 1)[:, None])
            x = top_k * x / tl.sum(x, 1)[:, None]
        tl.store(out + at[:, None] * experts + e[None, :], x, mask=live & real)


def unsupported(
    hidden_NW: Tensor, head_LEW: Tensor, bias_LE: Tensor, top_k: int, shrinkage: float = 0.0, output: Output = "masks"
) -> str | None:
    """Why this kernel does not take these arguments."""
    problem = invalid(hidden_NW, head_LEW, bias_LE, top_k, shrinkage, output)
    if problem is None and (head_LEW.size(1) > MAX_EXPERTS or head_LEW.size(2) > MAX_WIDTH):
        return f"more than {MAX_EXPERTS} experts or a width above {MAX_WIDTH}"
    return problem


def expert_predictor(
    hidden_NW: Tensor, head_LEW: Tensor, bias_LE: Tensor, top_k: int, shrinkage: float = 0.0, output: Output = "masks"
) -> Tensor:
    """Same contract as the reference."""
    refuse_launch("expert_predictor", unsupported(hidden_NW, head_LEW, bias_LE, top_k, shrinkage, output), hidden_NW)
    (n, width), (layers, experts, _) = hidden_NW.shape, head_LEW.shape
    words, masks = words_for(experts), output == "masks"
    shape, dtype = ((n, layers, words), torch.int32) if masks else ((n, layers, experts), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=hidden_NW.device)
    tile = form(experts)
    with on_device(hidden_NW):
        predict_kernel[(layers, -(-n // tile.R))](
            hidden_NW, head_LEW, bias_LE, out, n, width, experts, layers, words, top_k, float(shrinkage),
            **constants(output), **tile._asdict(),
        )  # fmt: skip
    return out


def constants(output: Output) -> dict[str, int]:
    """Compile-time values of one kind of output."""
    return {"MASKS": output == "masks", "PROBABILITIES": output == "probabilities", "WIDTH": MAX_WIDTH, "WORD": WORD}


def configurations(backend: str) -> list[Configuration]:
    """Every number of experts, padded, and every output."""
    integers = dict.fromkeys(("n", "width", "experts", "layers", "words", "top_k"), "i32")
    types = dict.fromkeys(("hidden", "head", "bias"), "*fp32") | {"shrinkage": "fp32"} | integers
    found = []
    for output in OUTPUTS:
        for experts in (32, 64, 128, 256, MAX_EXPERTS):
            *tile, warps, stages = form(experts, backend)
            values = constants(output) | dict(zip("REK", tile, strict=True))
            named = types | {"out": "*i32" if output == "masks" else "*fp32"}
            name = f"expert_predictor {output} {experts} experts"
            found.append(Configuration(name, predict_kernel, named, values, warps, stages))
    return found
