"""Bytes that `expert_mlp` counts from its launch geometry, against those that the interpreter sees loaded and stored."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from ecospec_kernels.expert_mlp import fused
from ecospec_kernels.expert_mlp.traffic import traffic

from .cases import BF16, FP32, fp8, mxfp4, random, routing, under_interpreter


def observed(monkeypatch: pytest.MonkeyPatch, weights: tuple[Tensor, ...]) -> Counter[str]:
    """A counter of bytes: `weights` loaded from these tensors, `activations` all other floating-point numbers."""
    from triton.runtime.interpreter import InterpreterBuilder

    found: Counter[str] = Counter()
    ranges = [(w.data_ptr(), w.data_ptr() + w.nbytes) for w in weights]

    def count(pointers: Any, mask: Any) -> None:
        kind = pointers.get_element_ty()
        if mask.data.any():
            first = int(pointers.data[mask.data].min())
            weight = any(begin <= first < end for begin, end in ranges)
            if weight or kind.is_floating():
                found["weights" if weight else "activations"] += int(mask.data.sum()) * kind.primitive_bitwidth // 8

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        count(pointers, mask)
        return load(self, pointers, mask, *rest)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counted_store)
    return found


@under_interpreter
@pytest.mark.parametrize(("dtype", "repeat"), [(BF16, False), (FP32, True)], ids=["bf16", "fp32 with repeats"])
def test_counted_is_what_programs_move(dtype: torch.dtype, repeat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n, experts, top_k, units, hidden = 17, 8, 3, 70, 75
    index = routing(1, n, experts, top_k, used=5)
    if repeat:  # one expert has more pairs than a tile has rows, and is read twice
        index[:, 1] = index[:, 2] = 7
    up, down = random(4, experts, 2 * units, hidden, dtype=dtype), random(5, experts, hidden, units, dtype=dtype)
    weight = random(3, n, top_k, dtype=dtype)
    found = observed(monkeypatch, (up, down))
    fused.expert_mlp(random(2, n, hidden, dtype=dtype), index, weight, up, down)
    counted = traffic(index, experts, hidden, units, dtype)
    assert found["weights"] == counted.weights
    read = (counted.weights - counted.floor + 2 * n * hidden * dtype.itemsize) / (3 * hidden * units * dtype.itemsize)
    assert read == repeat  # experts read twice
    routing_weights = n * top_k * dtype.itemsize * -(-hidden // fused.form(n, dtype).tile.C)
    assert found["activations"] - routing_weights == counted.activations + counted.repeats


@under_interpreter
@pytest.mark.parametrize(("kind", "make", "units", "hidden"), [("fp8", fp8, 70, 150), ("mxfp4", mxfp4, 64, 96)])
def test_counted_is_what_programs_move_of_codes_and_scales(
    kind: str, make: Any, units: int, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, experts, top_k = 17, 8, 3
    index, weight = routing(1, n, experts, top_k, used=5), random(3, n, top_k, dtype=BF16)
    up, down = make(4, experts, 2 * units, hidden), make(5, experts, hidden, units)
    found = observed(monkeypatch, (up.values, up.scales, down.values, down.scales))
    fused.expert_mlp(random(2, n, hidden, dtype=BF16), index, weight, up, down)
    counted = traffic(index, experts, hidden, units, BF16, kind)
    stored = sum(t.nbytes for m in (up, down) for t in (m.values, m.scales)) // experts
    assert counted.weights == len(index.unique()) * stored == counted.floor - 4 * n * hidden
    routing_weights = n * top_k * 2 * -(-hidden // fused.form(n, BF16, kind=kind).tile.C)
    assert found.total() - routing_weights == counted.weights + counted.activations + counted.repeats


QWEN, GPT_OSS, DEEPSEEK = (128, 8, 4096, 1536), (128, 4, 2880, 2880), (256, 8, 7168, 2048)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [(QWEN, "plain"), (GPT_OSS, "plain"), (DEEPSEEK, "plain"), (GPT_OSS, "mxfp4"), (DEEPSEEK, "fp8")],
    ids=["Qwen3-235B", "GPT-OSS-120B", "DeepSeek-V3", "GPT-OSS-120B in MXFP4", "DeepSeek-V3 in FP8"],
)
@pytest.mark.parametrize("n", [1, 3, 16, 63])
def test_within_a_twentieth_of_the_floor(n: int, shape: tuple[int, ...], kind: str) -> None:
    """Weights once, in the bytes that they are stored in; activations and workspaces little beside them.

    Up to 16 tokens even if no cache held any activation; a fifth then for quantised weights, which are two to four times fewer
    bytes beside the same activations, in tiles of fewer columns, and whose FP8 scales are loaded by each column of their block.
    """
    experts, top_k, hidden, units = shape
    counted = traffic(routing(n, n, experts, top_k), experts, hidden, units, BF16, kind)
    assert counted.weights + counted.activations <= 1.05 * counted.floor
    plain = kind == "plain"
    if n <= 16:
        assert counted.weights + counted.activations + counted.repeats <= (1.05 if plain else 1.2) * counted.floor
    assert counted.repeats < (0.15 if plain else 0.75) * counted.floor
