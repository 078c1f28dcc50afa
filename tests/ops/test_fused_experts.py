"""The Triton kernel of `expert_mlp`, interpreted on the CPU, against its reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from ecospec_kernels import dispatch
from ecospec_kernels.expert_mlp import fused, reference
from ecospec_kernels.expert_mlp.reference import SWIGLU, Fp8, Gate, Mxfp4

from .cases import BF16, FP16, FP32, assert_near, random, routing, under_interpreter

pytestmark = under_interpreter
ARGUMENTS = ("hidden", "index", "weight", "gate_up", "down", "gate", "gate_up_bias", "down_bias")
GPT_OSS = Gate(True, 1.702, 1.5, 1.0)  # the limit is low enough to bite


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer starts as NaN, or as a number that is no index: an element that a kernel does not write is found."""
    empty = torch.empty

    def poisoned(*arguments: Any, **options: Any) -> Tensor:
        made = empty(*arguments, **options)
        return made.fill_(float("nan") if made.is_floating_point() else 1 << 29)

    monkeypatch.setattr(torch, "empty", poisoned)


def case(n: int, experts: int, top_k: int, units: int, dtype: torch.dtype, used: int | None = None, hidden: int = 40) -> Any:  # fmt: skip
    """Inputs of `expert_mlp`, the chosen experts among the first `used`."""
    up = random(4, experts, 2 * units, hidden, dtype=dtype, scale=0.3)
    down = random(5, experts, hidden, units, dtype=dtype, scale=0.3)
    index, weight = routing(n, n, experts, top_k, used), random(3, n, top_k, dtype=dtype).abs()
    return [random(2, n, hidden, dtype=dtype), index, weight, up, down]


def biases(experts: int, units: int, dtype: torch.dtype, hidden: int = 40) -> tuple[Tensor, Tensor]:
    """Biases that go with `case`."""
    return random(6, experts, 2 * units, dtype=dtype), random(7, experts, hidden, dtype=dtype)


@pytest.mark.parametrize(("n", "experts", "top_k", "units", "hidden", "used", "dtype"), [
    (1, 6, 2, 16, 32, 6, BF16), (3, 60, 4, 35, 75, 60, FP16), (63, 128, 4, 24, 40, 5, FP32), (17, 256, 8, 18, 70, 12, BF16),
])  # fmt: skip
def test_against_the_reference(n: int, experts: int, top_k: int, units: int, hidden: int, used: int, dtype: torch.dtype) -> None:  # fmt: skip
    """Sizes that fill no tile, experts with many rows, one and none; see `assert_near` for the tolerance."""
    arguments = case(n, experts, top_k, units, dtype, used, hidden)
    assert_near(fused.expert_mlp(*arguments), reference.expert_mlp(*arguments))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gates_biases_and_layouts(interleaved: bool, transposed: bool, dtype: torch.dtype) -> None:
    hidden, index, weight, up, down = case(5, 6, 3, 35, dtype)
    if transposed:
        up, down = up.mT.contiguous().mT, down.mT.contiguous().mT
    both = biases(6, 35, dtype)
    for rest in ((GPT_OSS._replace(interleaved=interleaved), *both), (SWIGLU._replace(interleaved=interleaved), None, both[1])):  # fmt: skip
        arguments = hidden, index, weight, up, down, *rest
        assert_near(fused.expert_mlp(*arguments), reference.expert_mlp(*arguments))


def test_experts_that_nobody_chose_are_not_read() -> None:
    arguments = case(5, 12, 2, 16, BF16, used=3)
    for matrix in arguments[3:]:
        matrix[3:] = float("nan")
    assert_near(fused.expert_mlp(*arguments), reference.expert_mlp(*arguments))


def test_nan_is_not_clamped_away() -> None:
    hidden, *rest = case(2, 6, 2, 16, FP32)
    hidden[1, 3] = float("nan")
    result = fused.expert_mlp(hidden, *rest, GPT_OSS)
    assert result[1].isnan().all() and result[0].isfinite().all()


def test_ids_named_twice_or_outside() -> None:
    """More pairs of an expert than tokens; ids outside [0, E) add nothing."""
    hidden, index, weight, *matrices = case(17, 6, 3, 16, FP32)
    index[:, 2] = index[:, 0]
    index[:, 1] = index[0, 0]
    assert_near(
        fused.expert_mlp(hidden, index, weight, *matrices), reference.expert_mlp(hidden, index, weight, *matrices)
    )
    for outside in (-1, 6, 1 << 33):
        index[:, 2] = outside
        rest = index[:, :2].contiguous(), weight[:, :2].contiguous(), *matrices
        assert torch.equal(fused.expert_mlp(hidden, index, weight, *matrices), fused.expert_mlp(hidden, *rest))


def test_a_row_is_the_same_alone_and_in_company() -> None:
    """In fp32 up to the order of numpy's sums; on a GPU the order is that of the tile."""
    hidden, index, weight, *matrices = case(5, 6, 3, 16, FP32)
    result = fused.expert_mlp(hidden, index, weight, *matrices)
    assert torch.equal(result, fused.expert_mlp(hidden, index, weight, *matrices))
    assert_near(fused.expert_mlp(hidden[2:3], index[2:3], weight[2:3], *matrices), result[2:3])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_weights_beyond_two_to_the_31st(dtype: torch.dtype, tmp_path: Path) -> None:
    """Experts lie 2^31 numbers apart in a sparse file: an offset of 32 bits would miss the second."""
    apart = 1 << 31
    stored = torch.from_file(str(tmp_path / "weights"), shared=True, size=apart + (1 << 16), dtype=dtype)
    hidden, index, weight, up, down = case(3, 2, 2, 16, dtype)
    up_far, down_far = (
        stored.as_strided(w.shape, (apart, *w.stride()[1:]), offset).copy_(w)
        for w, offset in ((up, 0), (down, 1 << 15))
    )
    expected = reference.expert_mlp(hidden, index, weight, up, down)
    assert_near(fused.expert_mlp(hidden, index, weight, up_far, down_far), expected)


@pytest.mark.parametrize(("at", "change", "message"), [
    (0, lambda t: t.double(), "hidden is torch.float64, not float32, bfloat16 or float16"),
    (0, lambda t: t[0], "are wanted"),
    (0, lambda t: t.repeat(20, 1), r"are not \[80, K\] both"),
    (0, lambda t: t[:, :-1], "do not fit hidden"),
    (1, lambda t: t.float(), "index is torch.float32, not int32 or int64"),
    (1, lambda t: t[:-1], r"index \[3, 2\] and weight \[4, 2\] are not \[4, K\] both"),
    (1, lambda t: t[:, :1], "and weight"),
    (1, lambda t: t[0], "are wanted"),
    (1, lambda t: t.to("meta"), "index is on meta, the first argument on cpu"),
    (2, lambda t: t.to("meta"), "weight is on meta, the first argument on cpu"),
    (2, lambda t: t.T, "and weight"),
    (2, lambda t: t.double(), "weight is torch.float64, not float32"),
    (3, lambda t: t[:-1], "do not fit hidden"),
    (3, lambda t: t[:, 2:], "do not fit hidden"),
    (3, lambda t: t.int(), "gate_up is torch.int32, not float32"),
    (3, lambda t: t.to("meta"), "gate_up is on meta, the first argument on cpu"),
    (4, lambda t: t[0], "are wanted"),
    (4, lambda t: t[:, :-1], "do not fit hidden"),
    (5, lambda gate: gate._replace(limit=-1.0), "the gate's limit is -1.0, not 0 or more"),
    (5, lambda gate: gate._replace(limit=float("nan")), "the gate's limit is nan, not 0 or more"),
    (6, lambda t: t[0], r"gate_up_bias has shape \[32\], not \[6, 32\]"),
    (6, lambda t: t[:-1], r"gate_up_bias has shape \[5, 32\], not \[6, 32\]"),
    (6, lambda t: t.to("meta"), "gate_up_bias is on meta, the first argument on cpu"),
    (7, lambda t: t[0], r"down_bias has shape \[40\], not \[6, 40\]"),
    *((at, lambda t: None, f"{name} is NoneType, not a") for at, name in enumerate(ARGUMENTS[:6])),
    *((at, lambda t: [[1.0]], f"{name} is list, not a") for at, name in enumerate(ARGUMENTS)),
    *((at, lambda t: Fp8(t, None), f"{ARGUMENTS[at]}: scales is NoneType, not a tensor") for at in (3, 4)),
    *((at, lambda t: Mxfp4([1], t), f"{ARGUMENTS[at]}: values is list, not a tensor") for at in (3, 4)),
    (7, lambda t: t.long(), "down_bias is torch.int64, not float32"),
])  # fmt: skip
@torch.no_grad()
def test_a_wrong_call_is_the_same_error_everywhere(at: int, change: Any, message: str) -> None:
    cpu = pytest.importorskip("ecospec_kernels.expert_mlp.cpu", exc_type=ImportError)
    arguments = [*case(4, 6, 2, 16, FP32), SWIGLU, *biases(6, 16, FP32)]
    assert reference.invalid(*arguments) is fused.unsupported(*arguments) is None
    arguments[at] = change(arguments[at])
    for op in (fused, reference, cpu, dispatch):
        with pytest.raises(ValueError, match=f"^expert_mlp: .*{message}"):
            op.expert_mlp(*arguments)


@pytest.mark.parametrize(("at", "change", "message"), [
    (0, lambda t: t.mT.contiguous().mT, "rows of hidden, index and weight must be dense"),
    (0, lambda t: t.bfloat16(), "gate_up is torch.float32, hidden torch.bfloat16"),
    (1, lambda t: t.mT.contiguous().mT, "rows of hidden, index and weight must be dense"),
    (3, lambda t: t.repeat_interleave(2, -1)[..., ::2], "rows or columns of gate_up and down must be dense"),
    (4, lambda t: t.half(), "down is torch.float16, hidden torch.float32"),
    (6, lambda t: t.mT.contiguous().mT, "gate_up_bias is not contiguous"),
])  # fmt: skip
def test_what_the_kernels_do_not_take_the_reference_computes(at: int, change: Any, message: str) -> None:
    arguments = [*case(4, 6, 2, 16, FP32), SWIGLU, *biases(6, 16, FP32)]
    expected = reference.expert_mlp(*arguments)
    arguments[at] = change(arguments[at])
    with pytest.raises(ValueError, match=f"^expert_mlp: {message}"):
        fused.expert_mlp(*arguments)
    found = reference.expert_mlp(*arguments)
    assert found.dtype == arguments[0].dtype
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


def test_ids_of_32_bits_and_a_limit_of_zero() -> None:
    hidden, index, *rest = case(4, 6, 2, 16, FP32)
    for op in (fused, reference):
        assert torch.equal(op.expert_mlp(hidden, index.int(), *rest), op.expert_mlp(hidden, index, *rest))
        assert not op.expert_mlp(hidden, index, *rest, SWIGLU._replace(limit=0.0)).any()


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 64 tokens"):
        fused.expert_mlp(*case(65, 6, 2, 16, FP32))


@pytest.mark.parametrize(("name", "change"), [
    ("gate_up", lambda a: {**a, "INTERLEAVED": True}), ("down", lambda a: {**a, "SPLIT": False}),
])  # fmt: skip
def test_a_wrong_kernel_is_found(name: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: gates taken for ups, and units rounded to bf16 once too often."""
    kernel = getattr(fused.kernels, name)

    class Wrong:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **options: kernel[grid](*arguments, **change(options))

    arguments = case(3, 6, 2, 35, BF16)
    monkeypatch.setattr(fused.kernels, name, Wrong())
    with pytest.raises(AssertionError):
        assert_near(fused.expert_mlp(*arguments), reference.expert_mlp(*arguments))
