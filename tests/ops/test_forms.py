"""What the ops launch is what `ecospec_kernels.aot` compiles: constants, types of tensors and options of every launch; at the
sizes of the listed models also what Triton assumes of every number and address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

from bench.models import GPT_OSS, MODELS, PREDICTOR_WIDTH, ROWS
from ecospec_kernels import launch as launch_module
from ecospec_kernels.argmax_rows import fused as argmax_rows
from ecospec_kernels.bitsets import words_for
from ecospec_kernels.commit_path import fused as commit_path
from ecospec_kernels.draw_rows import fused as draw_rows
from ecospec_kernels.expert_mlp import fused as expert_mlp
from ecospec_kernels.expert_mlp.fused import FP8, MXFP4, PLAIN
from ecospec_kernels.expert_mlp.reference import GROUP, SWIGLU, Fp8, Gate, Matrix, Mxfp4
from ecospec_kernels.expert_predictor import fused as expert_predictor
from ecospec_kernels.launch import BACKEND, HIP, TYPES, Configuration
from ecospec_kernels.select_nodes import fused as select_nodes
from ecospec_kernels.select_nodes import reference
from ecospec_kernels.tree_attention import fused as tree_attention
from ecospec_kernels.verify_tree import fused as verify_tree

NAMES = {f"*{name}": dtype for dtype, name in TYPES.items()}
NAMES |= {"*u8": torch.uint8, "*i32": torch.int32, "*i64": torch.int64, "*fp64": torch.float64}
Launch = tuple[Any, dict[str, Any]]


def launches(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *names: str) -> list[Launch]:
    """Takes the place of kernels, on any device; the list fills with (kernel, its arguments and options)."""
    monkeypatch.setattr(launch_module, "cannot_run", lambda t: None)
    seen: list[Launch] = []
    for name in names:
        kernel = getattr(module, name)

        def launch(*positional: Any, kernel: Any = kernel, **named: Any) -> None:
            seen.append((kernel, dict(zip(kernel.arg_names, positional, strict=False)) | named))

        stand_in = type("Recorder", (), {"__getitem__": lambda _, grid, launch=launch: launch})()
        monkeypatch.setattr(module, name, stand_in)
    return seen


def launched(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, op: str, kernels: list[str], calls: Callable[[], Iterator[Any]]
) -> list[Launch]:  # fmt: skip
    """What an op launches of `kernels` in these calls."""
    seen = launches(monkeypatch, getattr(module, "kernels", module), *kernels)
    if module is draw_rows:
        launches(monkeypatch, argmax_rows, "combine_kernel")
    for arguments in calls():
        getattr(module, op)(*arguments)
    assert seen
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


def is_exactly_compiled(launch: Launch, forms: list[Configuration]) -> bool:
    """Whether one of the forms is what Triton would compile for this launch: see `aot.compiled`."""
    kernel, given = launch
    options = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)  # interpreted, or not
    fixed, unaligned = (options[name] or () for name in ("do_not_specialize", "do_not_specialize_on_alignment"))

    def matches(name: str, form: Configuration) -> bool:
        if "constexpr" in kernel.fn.__annotations__.get(name, ""):
            return bool(form.constants[name] == given[name])
        kind, assumed = native_specialize_impl(
            CUDABackend, given[name], False, name not in fixed, name not in unaligned
        )
        if kind == "constexpr":  # None or 1
            return name in form.constants and form.constants[name] == given[name]
        return form.types.get(name) == kind and (assumed in ("D", None) or name in unaligned)

    return any(all(matches(name, form) for name in kernel.arg_names) for form in forms if is_compiled(launch, [form]))


def zeros(*shape: int, dtype: torch.dtype = torch.int64, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def selections() -> Iterator[Any]:
    sizes = (1, 1), (16, 16), (16, 17), (64, 4), (65, 9), (3, 100), (128, 128)
    for (n, budget), words in product(sizes, (1, 4, 5, 9, 16)):
        for make in (reference.ratio, reference.throughput):
            for capacity in (None, 3):
                masks = zeros(n, 2, words, dtype=torch.int32)
                pool = zeros(n, dtype=torch.float32), zeros(n), masks, masks[0].clone()
                yield *pool, make(1.0, 2, capacity=capacity), budget


def walks() -> Iterator[Any]:
    for n, ids in product((0, 1, 15, 16, 63, 64, 127, 128, 1023), (torch.int32, torch.int64)):
        yield zeros(n + 1), zeros(n), zeros(n, dtype=ids)


def commits() -> Iterator[Any]:
    for dtype, ids in product(TYPES, (torch.int32, torch.int64)):
        for m in (1, 16, 17, 65, 128):
            cache, one = zeros(1, 130, 4, dtype=dtype), zeros(1, dtype=torch.int32)
            yield cache, cache, zeros(m, dtype=torch.int32), one, zeros(1, dtype=ids)


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


def expert_call(
    n: int, experts: int, top_k: int, hidden: int = 64, units: int = 32, dtype: torch.dtype = torch.bfloat16,
    kind: str = PLAIN, transposed: bool = False, ids: torch.dtype = torch.int64, weight: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Arguments without data; transposed or MXFP4 ones as GPT-OSS has them."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def matrix(rows: int, columns: int) -> Matrix:
        if kind == FP8:
            scales = empty(experts, -(-rows // 128), -(-columns // 128), dtype=torch.float32)
            return Fp8(empty(experts, rows, columns, dtype=torch.float8_e4m3fn), scales)
        if kind == MXFP4:
            scales = empty(experts, rows, columns // GROUP, dtype=torch.uint8)
            return Mxfp4(empty(*scales.shape, GROUP // 2, dtype=torch.uint8), scales)
        return empty(experts, columns, rows).mT if transposed else empty(experts, rows, columns)

    gpt_oss = transposed or kind == MXFP4
    biases = (empty(experts, 2 * units), empty(experts, hidden)) if gpt_oss else (None, None)
    routed = empty(n, hidden), empty(n, top_k, dtype=ids), empty(n, top_k, dtype=weight or dtype)
    matrices = matrix(2 * units, hidden), matrix(hidden, units)
    return *routed, *matrices, Gate(True, 1.702, 7, 1) if gpt_oss else SWIGLU, *biases


def experts() -> Iterator[Any]:
    layouts = (PLAIN, False), (PLAIN, True), (FP8, False), (MXFP4, False)
    for dtype, n, (kind, transposed) in product(TYPES, (1, 17, 33, 64), layouts):
        if kind == PLAIN or dtype.itemsize == 2:
            for weight in (dtype, torch.float32):
                yield expert_call(n, 6, 2, dtype=dtype, kind=kind, transposed=transposed, weight=weight)
    for ids in (torch.int32, torch.int64):
        for dtype in TYPES:
            yield expert_call(1, 6, 2, dtype=dtype, ids=ids)
        for (n, top_k), count in product(((1, 8), (16, 8), (64, 16)), (100, 256, 512)):
            yield expert_call(n, count, top_k, ids=ids)


@pytest.mark.parametrize(("module", "op", "kernels", "calls"), [
    (expert_mlp, "expert_mlp", ["plan", "gate_up", "down", "combine"], experts),
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
    seen = launched(monkeypatch, module, op, kernels, calls)
    for launch in seen:
        assert is_compiled(launch, forms), {k: v for k, v in launch[1].items() if not torch.is_tensor(v)}
    for form in forms:
        assert any(is_compiled(launch, [form]) for launch in seen), form.name


def test_rocm_launches_of_attention_are_among_its_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the tile depends on the kind of mask, too."""
    forms = tree_attention.configurations(HIP)
    monkeypatch.setattr(tree_attention, "form", partial(tree_attention.form, backend=HIP))
    for launch in launched(monkeypatch, tree_attention, "tree_attention", ["attend", "combine"], attentions):
        assert is_compiled(launch, forms), {k: v for k, v in launch[1].items() if not torch.is_tensor(v)}


def real_experts() -> Iterator[Any]:
    for model, n, ids in product(MODELS, ROWS, (torch.int64, torch.int32)):
        sizes = n, model.experts, model.top_k, model.hidden, model.units
        for weight in (torch.bfloat16, torch.float32):  # DeepSeek's routers give float32
            yield expert_call(*sizes, transposed=model.transposed, ids=ids, weight=weight)
            if model is not GPT_OSS:
                yield expert_call(*sizes, kind=FP8, ids=ids, weight=weight)
        if model is GPT_OSS:
            yield expert_call(*sizes, kind=MXFP4, ids=ids)


def real_attentions() -> Iterator[Any]:
    bf16 = torch.bfloat16
    for model, n, past in product(MODELS, ROWS, (1023, 32768)):
        q = zeros(n, model.heads, model.width, dtype=bf16).transpose(0, 1)
        keys = past + n
        k = zeros(model.groups, 2 * keys, model.width, dtype=bf16)[:, :keys]  # of a cache that has room
        v = k[..., : model.value_width]
        v = v if model.width > model.value_width else zeros(*v.shape, dtype=bf16)
        sinks = zeros(model.heads, dtype=bf16) if model.sinks else None
        yield q, k, v, None, 1.0, sinks
        for dtype in (torch.bool, bf16):
            mask = zeros(n, keys + 5, dtype=dtype)
            yield q, k, v, mask[:, :keys], 1, sinks
            yield q, k, v, mask[:, 5:].contiguous(), 1.0, sinks, *([zeros(3)[1:2]] if model.window else [])


def real_predictions() -> Iterator[Any]:
    for model, n, output in product(MODELS, (1, 2, 18, 64), ("masks", "probabilities", "logits")):
        shapes = (n, PREDICTOR_WIDTH), (model.layers, model.experts, PREDICTOR_WIDTH), (model.layers, model.experts)
        tensors = (zeros(*shape, dtype=torch.float32, device="meta") for shape in shapes)
        yield *tensors, model.top_k, 0.25, output


def real_selections() -> Iterator[Any]:
    for model, n, budget, parents in product(MODELS, (1, 17, 60), (1, 7, 63), (torch.int64, torch.int32)):
        words = words_for(model.experts)
        masks = zeros(1 + n, model.layers, words, dtype=torch.int32)  # as `DevicePredictor` gives them
        for rule in (reference.ratio(1.0, model.layers, capacity=16), reference.throughput(0.1, 0.1)):
            yield zeros(n, dtype=torch.float32), zeros(n, dtype=parents), masks[1:], masks[0], rule, budget


def real_walks() -> Iterator[Any]:
    for rows, parents in product((1, 2, 8, 64), (torch.int64, torch.int32)):
        yield zeros(rows), zeros(rows)[1:], zeros(rows, dtype=parents)[1:]  # the root has no place in these


def real_commits() -> Iterator[Any]:
    for model, room, m in product(MODELS, (17, 4096), (1, 3, 64)):
        keys, values = (
            zeros(model.groups, room, width, dtype=torch.bfloat16) for width in (model.width, model.value_width)
        )
        yield keys, values, zeros(m, dtype=torch.int32), zeros(1, dtype=torch.int32), zeros(1)
        path = zeros(2 + m, dtype=torch.int32)  # as `GrowingLayer.keep` gives it
        yield keys, values, path[2:], path[:1], path[1:2]


def real_rows() -> Iterator[Any]:
    for model, rows, dtype in product(MODELS, (1, 3, 64), TYPES):
        yield (zeros(rows, model.vocabulary, dtype=dtype, device="meta"),)


def real_draws() -> Iterator[Any]:
    for (logits,) in real_rows():
        yield (
            logits, zeros(len(logits), device="meta"), zeros(1, device="meta"),
            zeros(1, dtype=torch.float32, device="meta"),
        )  # fmt: skip


REAL = [
    (tree_attention, "tree_attention", ["attend", "combine"], real_attentions),
    (expert_mlp, "expert_mlp", ["plan", "gate_up", "down", "combine"], real_experts),
    (expert_predictor, "expert_predictor", ["predict_kernel"], real_predictions),
    (select_nodes, "select_nodes", ["select_kernel"], real_selections),
    (verify_tree, "verify_tree", ["walk_kernel"], real_walks),
    (commit_path, "commit_path", ["commit_kernel"], real_commits),
    (argmax_rows, "argmax_rows", ["argmax_kernel", "combine_kernel"], real_rows),
    (draw_rows, "draw_rows", ["draw_kernel"], real_draws),
]


@pytest.mark.parametrize(("module", "op", "kernels", "calls"), REAL)
def test_launches_of_the_listed_models_are_compiled_as_they_are(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, op: str, kernels: list[str], calls: Callable[[], Iterator[Any]]
) -> None:  # fmt: skip
    """Down to what Triton takes for granted: numbers that are 1, numbers and addresses that are multiples of 16."""
    forms = module.configurations(BACKEND)
    seen = launched(monkeypatch, module, op, kernels, calls)
    for kernel, given in seen:
        assert is_exactly_compiled((kernel, given), forms), {
            k: v for k, v in given.items() if not torch.is_tensor(v) or not v.is_contiguous()
        }


def test_what_triton_would_compile_anew_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary that is no multiple of 16, rows that begin anywhere, one column."""
    forms, seen = argmax_rows.configurations(BACKEND), launches(monkeypatch, argmax_rows, "argmax_kernel")
    launches(monkeypatch, argmax_rows, "combine_kernel")
    logits = zeros(2, 48, dtype=torch.float32)
    for rows in (logits, logits[:, :40], logits[:, 1:33], logits[:, :1]):
        argmax_rows.argmax_rows(rows)
    assert all(is_compiled(launch, forms) for launch in seen)
    assert [is_exactly_compiled(launch, forms) for launch in seen] == [True, False, False, False]
