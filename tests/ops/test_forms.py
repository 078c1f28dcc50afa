"""What the ops launch is what `ecospec_kernels.aot` compiles: constants, types of tensors and options of every launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ecospec_kernels.argmax_rows import fused as argmax_rows
from ecospec_kernels.commit_path import fused as commit_path
from ecospec_kernels.draw_rows import fused as draw_rows
from ecospec_kernels.expert_predictor import fused as expert_predictor
from ecospec_kernels.launch import BACKEND, TYPES, Configuration
from ecospec_kernels.select_nodes import fused as select_nodes
from ecospec_kernels.select_nodes import reference
from ecospec_kernels.tree_attention import fused as tree_attention
from ecospec_kernels.verify_tree import fused as verify_tree

NAMES = {f"*{name}": dtype for dtype, name in TYPES.items()}
NAMES |= {"*u8": torch.uint8, "*i32": torch.int32, "*i64": torch.int64, "*fp64": torch.float64}
Launch = tuple[Any, dict[str, Any]]


def launches(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *names: str) -> list[Launch]:
    """Takes the place of kernels; the list fills with (kernel, its arguments and options)."""
    seen: list[Launch] = []
    for name in names:
        kernel = getattr(module, name)

        def launch(*positional: Any, kernel: Any = kernel, **named: Any) -> None:
            seen.append((kernel, dict(zip(kernel.arg_names, positional, strict=False)) | named))

        stand_in = type("Recorder", (), {"__getitem__": lambda _, grid, launch=launch: launch})()
        monkeypatch.setattr(module, name, stand_in)
    return seen


def is_compiled(launch: Launch, forms: list[Configuration]) -> bool:
    """Whether one of the forms is this launch. A pointer that the constants leave unused may be None."""
    kernel, given = launch
    return any(
        form.kernel is kernel
        and all(given[name] == value for name, value in form.constants.items())
        and all(
            given[name] is None or given[name].dtype is NAMES[kind]
            for name, kind in form.types.items()
            if kind in NAMES
        )
        and given.get("num_warps", 4) == form.num_warps
        and given.get("num_stages", form.num_stages) == form.num_stages
        and given.get("enable_fp_fusion", True) == form.fp_fusion
        for form in forms
    )


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def selections() -> Iterator[Any]:
    sizes = (1, 1), (16, 16), (16, 17), (64, 4), (65, 9), (3, 100), (128, 128)
    for (n, budget), words in product(sizes, (1, 4, 5, 9, 16)):
        for make in (reference.ratio, reference.throughput):
            for capacity in (None, 3):
                masks = zeros(n, 2, words, dtype=torch.int32)
                pool = zeros(n, dtype=torch.float32), zeros(n), masks, masks[0].clone()
                yield *pool, make(1.0, 2, capacity=capacity), budget


def walks() -> Iterator[Any]:
    for n in (0, 1, 15, 16, 63, 64, 127, 128, 1023):
        yield zeros(n + 1), zeros(n), zeros(n, dtype=torch.int32)


def commits() -> Iterator[Any]:
    for dtype in TYPES:
        for m in (1, 16, 17, 65, 128):
            cache, one = zeros(1, 130, 4, dtype=dtype), zeros(1, dtype=torch.int32)
            yield cache, cache, zeros(m, dtype=torch.int32), one, zeros(1)


def rows() -> Iterator[Any]:
    for dtype in TYPES:
        for vocabulary in (1, 30000, argmax_rows.MAX_PIECES * argmax_rows.PIECE):
            yield (zeros(1, vocabulary, dtype=dtype),)


def draws() -> Iterator[Any]:
    return ((*logits, zeros(1), zeros(1), zeros(1, dtype=torch.float32)) for logits in rows())


def attentions() -> Iterator[Any]:
    for dtype, (width, value_width) in product(TYPES, tree_attention.WIDTHS):
        for n, kind, sinks in product((1, 17, 33, 64), (None, torch.bool, dtype), (False, True)):
            q, k = zeros(2, n, width, dtype=dtype), zeros(2, 300, width, dtype=dtype)
            mask = None if kind is None else zeros(n, 300, dtype=kind)
            for v in (zeros(2, 300, value_width, dtype=dtype), k[..., :value_width]):
                yield q, k, v, mask, 1.0, zeros(2, dtype=dtype) if sinks else None
            if mask is not None and width <= tree_attention.MAX_WINDOWED:
                v = zeros(2, 300, value_width, dtype=dtype)
                yield q, k, v, mask, 1.0, zeros(2, dtype=dtype) if sinks else None, zeros(1)


def predictions() -> Iterator[Any]:
    for output in ("masks", "probabilities", "logits"):
        for experts in (1, 32, 33, 100, 160, 256, 384, 512):
            shapes = (2, 16), (3, experts, 16), (3, experts)
            yield *(zeros(*shape, dtype=torch.float32) for shape in shapes), 1, 0.0, output


@pytest.mark.parametrize(("module", "op", "kernels", "calls"), [
    (select_nodes, "select_nodes", ["select_kernel"], selections),
    (verify_tree, "verify_tree", ["walk_kernel"], walks),
    (commit_path, "commit_path", ["commit_kernel"], commits),
    (argmax_rows, "argmax_rows", ["argmax_kernel", "combine_kernel"], rows),
    (draw_rows, "draw_rows", ["draw_kernel"], draws),
    (tree_attention, "tree_attention", ["attend", "combine"], attentions),
    (expert_predictor, "expert_predictor", ["predict_kernel"], predictions),
])  # fmt: skip
def test_every_launch_is_among_the_compiled_forms(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, op: str, kernels: list[str], calls: Callable[[], Iterator[Any]]
) -> None:  # fmt: skip
    """And every form is launched by one of the calls, so that none is compiled for nothing."""
    forms = module.configurations(BACKEND)
    seen = launches(monkeypatch, getattr(module, "kernels", module), *kernels)
    if module is draw_rows:
        launches(monkeypatch, argmax_rows, "combine_kernel")
    for arguments in calls():
        getattr(module, op)(*arguments)
    assert seen
    for launch in seen:
        assert is_compiled(launch, forms), {k: v for k, v in launch[1].items() if not torch.is_tensor(v)}
    for form in forms:
        assert any(is_compiled(launch, [form]) for launch in seen), form.name
