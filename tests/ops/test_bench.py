"""The benchmark's registry, its gate, its counted bytes and its computed floors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from bench import attention, floors, measure, registry, steps
from bench.case import Case
from bench.measure import correctness, gated, timing
from bench.models import CHIPS
from ecospec_kernels.tree_attention import fused as attention_fused

from .cases import BF16, FP32, under_interpreter

ODD = registry.chosen()
SLOW = ("of 128 experts", "of 256 experts")  # interpreted; test_fused_experts has these sizes


class CountingClock:
    """A clock that runs what it is given once and counts it."""

    def __init__(self) -> None:
        self.calls = 0

    def graph(self, call: Callable[[], Any]) -> float:
        self.calls += 1
        call()
        return 2.0

    eager = graph


def small(op: str) -> Case:
    """The smallest case of an op, as one that is timed, against its own reference."""
    case = next(case for case in ODD if case.op == op)
    real = registry.chosen([op], timed=True)[0]
    return replace(case, work=real.work, baselines={"reference": case.twin("reference")})


def test_every_op_has_small_and_real_cases_under_names_of_their_own() -> None:
    for op in registry.ops():
        assert registry.chosen([op]) and {case.model for case in registry.chosen([op], timed=True)} >= {"DeepSeek-V3.1"}
    names = [case.name for case in registry.cases()]
    assert len(set(names)) == len(names) and {case.op for case in registry.cases()} == set(registry.ops())


@under_interpreter
@pytest.mark.parametrize("op", registry.ops())
def test_small_cases_are_right(op: str) -> None:
    cases = [case for case in registry.chosen([op]) if not any(size in case.shape for size in SLOW)]
    assert cases and [row for row in (correctness(case, "cpu") for case in cases) if row["failed"]] == []


def spoiled(value: Any) -> Any:
    """A result that is off a little somewhere."""
    if isinstance(value, tuple):
        return type(value)(spoiled(value[0]), *value[1:]) if not hasattr(value, "_fields") else value._replace(**{value._fields[0]: spoiled(value[0])})  # fmt: skip
    wrong = value.clone()
    flat = wrong.view(-1)
    flat[-1] = flat[-1] * 1.1 + 0.1 * value.float().abs().max() if value.is_floating_point() else flat[-1] ^ 1
    return wrong


@under_interpreter
@pytest.mark.parametrize("op", registry.ops())
def test_a_wrong_result_is_not_timed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every op: the gate finds one wrong number, and the clock is not asked."""
    case, clock = small(op), CountingClock()
    row = timing(case, "cpu", clock, 1e9)
    assert (
        row["failed"] is None and row["ms"] == 2.0 and row["baselines"] == {"reference": {"ms": 2.0, "captured": True}}
    )
    assert clock.calls == 3  # captured, eager, and the baseline
    module = import_module(f"ecospec_kernels.{op}.fused")
    right = getattr(module, op)
    monkeypatch.setattr(module, op, lambda *arguments: spoiled(right(*arguments)))
    row = timing(case, "cpu", clock, 1e9)
    assert row["failed"] and "ms" not in row and clock.calls == 3
    assert correctness(case, "cpu")["failed"]


@under_interpreter
def test_what_is_never_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("ecospec_kernels.argmax_rows.fused")
    monkeypatch.setattr(module, "argmax_rows", lambda x: torch.empty(len(x), dtype=torch.int64))
    with pytest.raises(AssertionError):
        gated(small("argmax_rows"), "cpu")


@under_interpreter
def test_baselines_that_compute_something_else_are_not_timed() -> None:
    """Nor do they fail the case; one that cannot be captured is timed as Python launches it."""

    class Refusing(CountingClock):
        def graph(self, call: Callable[[], Any]) -> float:
            if self.calls:
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().graph(call)

        def eager(self, call: Callable[[], Any]) -> float:
            return 5.0

    case = small("tree_attention")
    calls = {"wrong": lambda *a: 1.1 * case.twin("reference")(*a), "broken": lambda *a: 1 / 0, "sdpa": attention.sdpa}
    row = timing(replace(case, baselines=calls), "cpu", Refusing(), 1e9)
    assert row["failed"] is None and row["baselines"]["sdpa"] == {"ms": 5.0, "captured": False}
    assert (
        row["baselines"]["wrong"] == {"error": "gives another result"}
        and "ZeroDivisionError" in row["baselines"]["broken"]["error"]
    )


class FakeCuda:
    """Graphs that take 16 ms and one more for each call that was captured; everything else does nothing."""

    def __init__(self) -> None:
        self.calls, self.captured, self.capturing = 0, 0, False

    def __call__(self, *_: Any, **__: Any) -> FakeCuda:
        return self

    def __enter__(self) -> None:
        self.captured, self.capturing = 0, True

    def __exit__(self, *_: Any) -> None:
        self.capturing = False

    def call(self) -> None:
        self.calls += 1
        self.captured += self.capturing

    def elapsed_time(self, end: FakeCuda) -> float:
        return 16.0 + self.captured

    L2_cache_size = 1 << 10
    wait_stream = record = synchronize = replay = lambda *_: None


def test_the_clock_takes_off_what_lies_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for torch.cuda: eight calls in a graph, warmed up before."""
    fake = FakeCuda()
    for name in ("get_device_properties", "Stream", "current_stream", "CUDAGraph", "graph", "Event"):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(measure, "FLUSHED", 1 << 10)
    monkeypatch.setattr(measure, "CEILING_BYTES", 1 << 10)
    clock = measure.CudaClock("cpu")
    assert clock.between == 2.0 and clock.graph(fake.call) == 1.0
    assert fake.calls == measure.WARM_UPS + measure.COPIES
    fake.captured = 0
    assert measure.copy_rate("cpu") == 2 * 1024 / 0.016


@torch.no_grad()
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_baselines_of_experts_compute_what_the_op_does(n: int, transposed: bool) -> None:
    from bench import experts

    layer = experts.Layer(6, 32, 16, dtype=FP32, transposed=transposed, biased=transposed)
    inputs = layer.inputs(experts.routing(1, n, 6, 2), "cpu")
    expected = registry.chosen(["expert_mlp"])[0].twin("reference")(*inputs)
    for name in ("grouped_mm", "batched_mm"):
        torch.testing.assert_close(experts.baseline(name)(*inputs), expected, rtol=1e-4, atol=1e-5)


def test_a_tree_sees_its_paths_and_its_window() -> None:
    mask = attention.tree(5, 6, window=3)
    assert mask.shape == (5, 11) and mask[:, 6:].diagonal().all() and (mask[:, 6] == True).all()  # noqa: E712
    depths = mask[:, 6:].sum(1) - 1
    for row, depth in enumerate(depths.tolist()):
        assert mask[row, :6].nonzero().flatten().tolist() == list(range(4 + depth, 6))


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that interpreted programs load and store."""
    from triton.runtime.interpreter import InterpreterBuilder

    found: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        plain = getattr(InterpreterBuilder, f"create_masked_{name}")

        def counted(self: Any, pointers: Any, *rest: Any) -> Any:
            mask = rest[1] if name == "store" else rest[0]
            found[name] += int(mask.data.sum()) * max(8, pointers.get_element_ty().primitive_bitwidth) // 8
            return plain(self, pointers, *rest)

        return counted

    for name in ("load", "store"):
        monkeypatch.setattr(InterpreterBuilder, f"create_masked_{name}", counting(name))
    return found


@under_interpreter
@pytest.mark.parametrize(("n", "context", "heads", "groups", "width", "value_width", "dtype"), [
    (3, 700, 4, 2, 64, 64, FP32), (17, 150, 8, 1, 32, 16, BF16), (3, 300, 7, 1, 576, 512, BF16),
])  # fmt: skip
def test_counted_bytes_of_attention_are_what_its_programs_move(
    n: int, context: int, heads: int, groups: int, width: int, value_width: int, dtype: torch.dtype, moved: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Within a hundredth: sums of weights are read once more by `combine`."""
    mask = attention.tree(n, context)
    inputs = attention.inputs(mask, heads, groups, width, value_width, False, dtype, "cpu")
    attention_fused.tree_attention(*inputs)
    work = attention.work(mask, heads, groups, width, value_width, dtype)
    assert moved.total() == pytest.approx(work.moved + work.repeats, rel=0.01)


@under_interpreter
@pytest.mark.parametrize(
    "op", ["expert_predictor", "select_nodes", "argmax_rows", "draw_rows", "verify_tree", "commit_path"]
)
def test_counted_bytes_of_a_step_are_what_its_programs_move(op: str, moved: Counter[str]) -> None:
    """Within a tenth, or 200 bytes: numbers of a row or of a call are not counted one by one. Of a selection: at most."""
    shapes = {
        "expert_predictor": steps._predict("m", 20, 3, 60, 64, 4, "masks", 0.0, False),
        "select_nodes": steps._select("m", 20, 7, 128, 8, 6, "ratio"),
        "argmax_rows": steps._argmax("m", 3, 20000, BF16),
        "draw_rows": steps._draw("m", 2, 20000, BF16),
        "verify_tree": steps._verify("m", 40, 6),
        "commit_path": steps._commit("m", 2, 64, 32, 5, 16, [0, 2, 5, 9], BF16),
    }
    case = shapes[op]
    assert case.work is not None
    case.twin("fused")(*case.make("cpu"))
    most = case.work.moved + case.work.repeats
    if op == "select_nodes":
        assert case.work.moved <= moved.total() <= most
    else:
        assert moved.total() == pytest.approx(most, rel=0.1, abs=200)


def test_the_readmes_tables_are_the_scripts() -> None:
    text = floors.README.read_text(encoding="utf-8")
    assert floors.written(text) == text, "run: PYTHONPATH=.:kernels python -m bench.floors --write"
    with pytest.raises(ValueError, match="must each stand once"):
        floors.written("no marks")


def test_floors_are_the_larger_of_bytes_and_products() -> None:
    case = next(
        c
        for c in registry.cases()
        if c.model == "Qwen3-235B-A22B" and c.op == "expert_mlp" and c.shape.startswith("1 row")
    )
    assert case.work is not None
    weights = 8 * 3 * 4096 * 1536 * 2
    assert case.work.floor == weights + 2 * 4096 * 2
    h200 = next(chip for chip in CHIPS if chip.name == "H200")
    by_bytes, by_products = floors.seconds(case.work, h200)
    assert by_bytes == pytest.approx(weights / 4.8e12, rel=1e-3) and by_products < by_bytes
    assert "62.9" in floors.table([case])


@pytest.mark.parametrize("chip", CHIPS, ids=[chip.name for chip in CHIPS])
def test_selection_is_estimated_within_its_bar(chip: Any) -> None:
    """64 nodes, 58 layers of 256 experts, all 64 rounds: 0.3 ms."""
    one = floors.round_of(chip, *floors.SELECT)
    assert floors.SELECT == (64, 58, 256) and one.overlapped < one.serial
    assert 64 * 4 * 58 * 8 / chip.cache_rate in one.pipes.values()
    assert 0.05 < floors.select_ms(chip, one.overlapped, 64) <= 0.3
