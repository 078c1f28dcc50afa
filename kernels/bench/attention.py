"""Cases of `tree_attention`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import BF16, FP16, FP32, ROUNDING, Case, Device, Inputs, Work, distance, draw
from bench.models import CONTEXTS, MODELS, ROWS, Model
from ecospec_kernels.tree_attention import fused

NEW_KEYS = 4.0  # keys of the pass are this much longer: their weights matter beside a long context's


def tree(n: int, context: int, window: int = 0) -> Tensor:
    """Mask [n, context + n] of a random tree: every row sees the context, or the last `window` keys of it, and its path."""
    generator = torch.Generator().manual_seed(n)
    sees = torch.eye(n, dtype=torch.bool)
    for row in range(1, n):
        sees[row] |= sees[int(torch.randint(0, row, (1,), generator=generator))]
    cached = torch.ones(n, context, dtype=torch.bool)
    if window:
        cached &= context + sees.sum(1, keepdim=True) - 1 - torch.arange(context) < window
    return torch.cat((cached, sees), 1)


def first_seen(mask: Tensor) -> int:
    """The first key that any row sees."""
    return int(mask.any(0).int().argmax())


def inputs(mask: Tensor, heads: int, groups: int, width: int, value_width: int, sinks: bool, dtype: torch.dtype, device: Device) -> Inputs:  # fmt: skip
    """Arguments of the op; in the latent form (one key for all heads, wider than 256) values are the first columns of keys.

    `start` is given where keys lie before a window.
    """
    n, keys = mask.shape
    k = draw(device, 2, groups, keys, width, dtype=dtype)
    k[:, keys - n :] *= NEW_KEYS
    latent = groups == 1 and width > 256
    v = k[..., :value_width] if latent else draw(device, 3, groups, keys, value_width, dtype=dtype)
    q = draw(device, 1, n, heads, width, dtype=dtype).transpose(0, 1)
    first = first_seen(mask)
    start = torch.tensor([first], device=device) if first else None
    return q, k, v, mask.to(device), width**-0.5, draw(device, 4, heads, dtype=dtype) if sinks else None, start


def check(result: Tensor, expected: Tensor, given: Inputs) -> None:
    """Weights of the values are rounded to their dtype, by u each, and so is the output.

    Each element errs by at most u max|v| for the first and 2 u of itself for the second, fp32 sums by 1e-5 max|v|. Over a long
    context that says little, because outputs are small there; but roundings are as often up as down, so that all elements
    together are within 2 u.
    """
    assert result.dtype is expected.dtype, f"{result.dtype}, not {expected.dtype}"
    u = ROUNDING[expected.dtype]
    most = float(given[2].abs().max())
    torch.testing.assert_close(result.float(), expected.float(), rtol=2 * u, atol=(u + 1e-5) * most)
    found = distance(result, expected)
    assert found <= 2 * u + 1e-5, f"relative error {found:.1e}"


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Any, start: Any) -> Tensor:
    """torch's attention; it knows no sinks, and of keys before a window no more than the mask says."""
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def work(mask: Tensor, heads: int, groups: int, width: int, value_width: int, dtype: torch.dtype = BF16) -> Work:
    """Floor: keys and values that any row sees. A mask row is loaded for every head, a query for every chunk of keys.

    Nothing before the first key that any row sees is loaded, nor are chunks that lie before it.
    """
    (n, keys), first = mask.shape, first_seen(mask)
    rows, latent = heads // groups * n, groups == 1 and width > 256
    tile = fused.form(rows, width, value_width, dtype)
    tiles = -(-rows // tile.R)
    chunks, chunk = fused.splits(keys, groups, tiles, tile.J)
    chunks, keys = chunks - first // chunk, keys - first
    key = groups * (width if latent else width + value_width) * dtype.itemsize
    queries, out, seen = (heads * n * width * dtype.itemsize, heads * n * value_width * dtype.itemsize, n * keys)
    part = chunks * heads * n * (value_width + 2) * 4
    return Work(
        floor=int(mask.any(0).sum()) * key + queries + out + seen,
        moved=keys * key + queries + out + seen + 2 * part,
        repeats=(tiles - 1) * keys * key + (chunks - 1) * queries + (heads - 1) * seen,
        flops=2 * heads * int(mask.sum()) * (width + value_width),
    )


def _real(model: Model, n: int, context: int, window: int = 0) -> Case:
    def make(device: Device) -> Inputs:
        return inputs(tree(n, context, window), model.heads, model.groups, model.width, model.value_width, model.sinks, BF16, device)  # fmt: skip

    shape = f"{n} row{'s' * (n > 1)}, {context} cached{f', window {window}' if window else ''}"
    name = "sdpa without sinks" if model.sinks else "sdpa"
    counted = work(tree(n, context, window), model.heads, model.groups, model.width, model.value_width)
    return Case("tree_attention", model.name, shape, make, check, counted, {name: sdpa}, alike=not model.sinks)


def _odd(n: int, context: int, heads: int, groups: int, width: int, value_width: int, dtype: torch.dtype, sinks: bool, window: int = 0) -> Case:  # fmt: skip
    def make(device: Device) -> Inputs:
        return inputs(tree(n, context, window), heads, groups, width, value_width, sinks, dtype, device)

    extras = f"{', sinks' * sinks}{f', window {window}' if window else ''}"
    return Case("tree_attention", "odd", f"{n} rows, {context} cached, {heads}/{groups} heads of {width}/{value_width}, {str(dtype)[6:]}{extras}",
                make, check)  # fmt: skip


def cases() -> list[Case]:
    """Widths of models and odd ones, keys in one chunk and in several; then the real ones."""
    return [
        _odd(1, 2, 4, 2, 64, 64, BF16, False),
        _odd(3, 74, 6, 2, 96, 96, FP32, True),
        _odd(63, 77, 2, 1, 64, 64, BF16, True, window=9),
        _odd(5, 295, 4, 4, 128, 128, FP16, False),
        _odd(5, 700, 8, 2, 64, 64, BF16, True, window=70),
        _odd(3, 147, 4, 2, 192, 128, BF16, False),
        _odd(2, 88, 4, 2, 256, 256, FP32, False),
        _odd(3, 147, 7, 1, 576, 512, BF16, False),
        *(_real(model, n, context) for context in CONTEXTS for model in MODELS for n in ROWS),
        *(_real(model, n, CONTEXTS[-1], model.window) for model in MODELS if model.window for n in ROWS),
    ]
