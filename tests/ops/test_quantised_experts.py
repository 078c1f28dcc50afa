"""`expert_mlp` of FP8 and MXFP4 matrices: the Triton kernels, interpreted, against the reference, and their codes one by one.

Tolerance: every code is exact in the activations' type and its products are exact in fp32, so kernel and reference differ only
in the order of fp32 sums and in scaling sums instead of numbers (2^-24 each), and in the units, of which the kernel keeps two
16-bit numbers (2^-16, see `kernels.gate_up`): that much of the largest output is allowed where a sum cancels, else one rounding.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations import finegrained_fp8

pytest.importorskip("triton")
import triton
import triton.language as tl

from ecospec_kernels import dispatch
from ecospec_kernels.expert_mlp import fused, kernels, reference
from ecospec_kernels.expert_mlp.kernels import e2m1, e4m3, e8m0
from ecospec_kernels.expert_mlp.reference import SWIGLU, Fp8, Gate, Mxfp4
from ecospec_runtime import compute

from .cases import BF16, FP16, FP32, assert_near, fp8, mxfp4, poisoned, random, routing, under_interpreter

pytestmark = under_interpreter
GPT_OSS = Gate(True, 1.702, 1.5, 1.0)  # the limit is low enough to bite
UNITS = 2**-16  # what the kernel's units lose
CODES = torch.arange(256, dtype=torch.uint8)


def case(make: Any, n: int, experts: int, top_k: int, units: int, hidden: int, dtype: torch.dtype = BF16, used: int | None = None) -> list[Any]:  # fmt: skip
    """Inputs of `expert_mlp`, the chosen experts among the first `used`."""
    index, weight = routing(n, n, experts, top_k, used), random(3, n, top_k, dtype=dtype).abs()
    matrices = make(4, experts, 2 * units, hidden), make(5, experts, hidden, units)
    return [random(2, n, hidden, dtype=dtype), index, weight, *matrices]


def check(*arguments: Any) -> None:
    """Kernel, on workspaces that start as NaN, against reference."""
    assert_near(poisoned(fused.expert_mlp, *arguments), reference.expert_mlp(*arguments), UNITS)


@pytest.mark.parametrize(("make", "n", "experts", "top_k", "units", "hidden", "used", "dtype"), [
    (fp8, 1, 6, 2, 70, 150, 6, BF16), (fp8, 3, 60, 4, 35, 75, 60, FP16), (fp8, 63, 128, 4, 24, 40, 5, BF16),
    (fp8, 17, 256, 8, 18, 70, 12, FP16), (mxfp4, 1, 6, 2, 64, 160, 6, BF16), (mxfp4, 3, 60, 4, 32, 96, 60, FP16),
    (mxfp4, 63, 128, 4, 32, 64, 5, BF16), (mxfp4, 17, 256, 8, 32, 32, 12, FP16),
])  # fmt: skip
def test_against_the_reference(make: Any, n: int, experts: int, top_k: int, units: int, hidden: int, used: int, dtype: torch.dtype) -> None:  # fmt: skip
    """Sizes that fill neither tile nor block, experts with many rows, one and none."""
    check(*case(make, n, experts, top_k, units, hidden, dtype, used))


@pytest.mark.parametrize(("make", "units", "hidden"), [(fp8, 150, 300), (mxfp4, 160, 96)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gates_biases_and_several_blocks(interleaved: bool, make: Any, units: int, hidden: int) -> None:
    """Blocks that reach from gates into ups; interleaved, biased and clamped as GPT-OSS is; biases in fp32."""
    arguments = case(make, 3, 3, 2, units, hidden)
    biases = random(6, 3, 2 * units), random(7, 3, hidden)
    check(*arguments, GPT_OSS._replace(interleaved=interleaved), *biases)
    check(*arguments, SWIGLU._replace(interleaved=interleaved), None, biases[1])


def test_blocks_of_other_sizes_and_matrices_of_two_kinds() -> None:
    hidden, index, weight, _, down = case(fp8, 3, 3, 2, 35, 300)
    check(hidden, index, weight, fp8(4, 3, 70, 300, (48, 256)), down)
    check(hidden, index, weight, random(4, 3, 70, 300, dtype=BF16), down)


@pytest.mark.parametrize("make", [fp8, mxfp4])
def test_experts_that_nobody_chose_are_not_read(make: Any) -> None:
    arguments = case(make, 5, 12, 2, 32, 64, used=3)
    for matrix in arguments[3:]:
        matrix.values.view(torch.uint8)[3:] = 255
        matrix.scales[3:] = float("nan") if matrix.scales.is_floating_point() else 255
    check(*arguments)


@triton.jit
def decode(code, out, FUNCTION: tl.constexpr):  # type: ignore[no-untyped-def]
    """out [256] = what one of the decoders makes of each byte."""
    i = tl.arange(0, 256)
    tl.store(out + i, FUNCTION(tl.load(code + i)))


def test_every_byte_is_decoded_bit_for_bit() -> None:
    """NaN, subnormal numbers and -0 too; and every code is a number of bf16 and of fp16, so that no rounding follows."""
    numbers = torch.tensor([*reference.E2M1, *(-x for x in reference.E2M1)])
    exponents = torch.tensor([2.0 ** (code - 127) for code in range(255)] + [math.nan])
    for function, expected in ((e4m3, CODES.view(torch.float8_e4m3fn).float()), (e2m1, numbers.repeat(16)), (e8m0, exponents)):  # fmt: skip
        out = torch.full((256,), 7.0)
        decode[(1,)](CODES, out, function)
        known = ~expected.isnan()
        assert torch.equal(out[known].view(torch.int32), expected[known].view(torch.int32))
        assert out[~known].isnan().all()
        if function is not e8m0:
            assert all(torch.equal(expected[known].to(dtype).float(), expected[known]) for dtype in (BF16, FP16))


def columns_of_one(down: Fp8 | Mxfp4, factor: float = 1.0) -> Tensor:
    """First column of `down` times `factor`, in fp32: what the op makes of an expert whose first unit is exactly 1, the others 0."""
    _, hidden, units = down.shape
    gate_up = torch.zeros(1, 2 * units, hidden, dtype=BF16)
    gate_up[0, 0, 0], gate_up[0, units, 0] = 64, 2**-6  # sigmoid(64) is 1 in fp32
    x = torch.zeros(1, hidden, dtype=BF16)
    x[0, 0] = 1
    arguments = x, torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), factor), gate_up, down
    result, expected = poisoned(fused.expert_mlp, *arguments)[0], reference.expert_mlp(*arguments)[0]
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    return result.float()


def test_every_e4m3_code_through_the_op() -> None:
    for factor in (1.0, 2.0**-100, 2.0**100):
        values = torch.zeros(1, 256, 40, dtype=torch.uint8)
        values[0, :, 0] = CODES
        down = Fp8(values.view(torch.float8_e4m3fn), torch.full((1, 2, 1), factor))
        expected = CODES.view(torch.float8_e4m3fn).float() * factor
        torch.testing.assert_close(columns_of_one(down), expected, rtol=0, atol=0, equal_nan=True)
        assert expected.nan_to_num().max() == 448 * factor and expected.isnan().sum() == 2


@pytest.mark.parametrize(("factor", "exponents"), [(2.0**10, [0, 1, 2, 127]), (1.0, [126, 253, 254, 255])])
def test_every_e2m1_code_with_extreme_scales_through_the_op(factor: float, exponents: list[int]) -> None:
    """From 2^-128 (times 2^10, since the interpreter has no subnormal bf16) to where fp32 overflows; 255 is NaN, whatever it multiplies."""
    values = torch.zeros(1, 64, 1, 16, dtype=torch.uint8)
    values[0, :, 0, 0] = torch.arange(64) % 16
    scales = torch.tensor(exponents, dtype=torch.uint8).repeat_interleave(16).reshape(1, 64, 1)
    result = columns_of_one(Mxfp4(values, scales), factor).view(4, 16)
    numbers = torch.tensor([*reference.E2M1, *(-x for x in reference.E2M1)], dtype=torch.float64) * factor
    for row, exponent in zip(result, exponents, strict=True):
        expected = (numbers * 2.0 ** (exponent - 127)).float() if exponent < 255 else torch.full((16,), math.nan)
        torch.testing.assert_close(row, expected, rtol=0, atol=0, equal_nan=True)
    if factor == 1:
        assert result[2, 3] == 1.5 * 2.0**127 and result[2, 7] == math.inf and result[2, 15] == -math.inf


def test_the_low_half_of_a_byte_comes_first() -> None:
    values = torch.full((1, 32, 1, 16), 0x21, dtype=torch.uint8)
    scales = torch.full((1, 32, 1), 127, dtype=torch.uint8)
    assert Mxfp4(values, scales).dequantized(0)[0, :4].tolist() == [0.5, 1.0, 0.5, 1.0]
    assert (columns_of_one(Mxfp4(values, scales)) == 0.5).all()


def test_dequantised_as_transformers_does() -> None:
    """GPT-OSS's layout, read by transformers' own code; it gives the transposed matrix."""
    mxfp4_module = pytest.importorskip("transformers.integrations.mxfp4")
    matrix = mxfp4(1, 2, 70, 96)
    theirs = mxfp4_module.convert_moe_packed_tensors(matrix.values, matrix.scales, dtype=FP32)
    for e in range(2):
        assert torch.equal(theirs[e].T, matrix.dequantized(e))


def test_codes_beyond_two_to_the_31st(tmp_path: Path) -> None:
    """Experts lie 2^31 bytes apart in a sparse file: an offset of 32 bits would miss the second."""
    apart = 1 << 31
    stored = torch.from_file(str(tmp_path / "codes"), shared=True, size=apart + (1 << 16), dtype=torch.uint8)
    for make in (fp8, mxfp4):
        *arguments, up, down = case(make, 3, 2, 2, 32, 64)
        far = []
        for matrix, offset in ((up, 0), (down, 1 << 15)):
            values = stored.as_strided(matrix.values.shape, (apart, *matrix.values.stride()[1:]), offset)
            far.append(matrix._replace(values=values.copy_(matrix.values.view(torch.uint8)).view(matrix.values.dtype)))
        assert_near(poisoned(fused.expert_mlp, *arguments, *far), reference.expert_mlp(*arguments, up, down), UNITS)


@pytest.mark.parametrize(("make", "at", "change", "message"), [
    (fp8, 0, lambda t: t.float(), "hidden is torch.float32, and the quantised gate_up wants bf16 or fp16"),
    (fp8, 3, lambda m: m._replace(values=m.values.float()), "gate_up: FP8 is float8_e4m3fn"),
    (fp8, 3, lambda m: m._replace(block=(64, 128)), r"gate_up: scales has shape \[6, 1, 1\], not \[6, 2, 1\]"),
    (fp8, 4, lambda m: m._replace(block=(128, 0)), "down: FP8 has a scale for so many rows and columns"),
    (fp8, 4, lambda m: m._replace(block=(128,)), r"down: FP8 .* two whole numbers above 0, not \(128,\)"),
    (fp8, 3, lambda m: m._replace(block=(128, 128, 128)), "gate_up: FP8 .* two whole numbers above 0"),
    (fp8, 3, lambda m: m._replace(block=(128.0, 128.0)), "gate_up: FP8 .* two whole numbers above 0"),
    (fp8, 4, lambda m: m._replace(block=(128, 96)), "down: blocks are 96 columns wide, not a multiple of"),
    (fp8, 4, lambda m: m._replace(scales=m.scales.double()), "down: scales is float64, not float32"),
    (fp8, 4, lambda m: m._replace(scales=m.scales.to("meta")), "down: scales lies on meta"),
    (fp8, 4, lambda m: Fp8(*(t.to("meta") for t in m[:2])), "down is on meta, the first argument on cpu"),
    (fp8, 4, lambda m: m._replace(values=m.values.mT.contiguous().mT), "rows of down must be dense"),
    (mxfp4, 3, lambda m: m._replace(values=m.values.flatten(2)), "gate_up: MXFP4 is uint8"),
    (mxfp4, 3, lambda m: m._replace(values=m.values[0, 0]), "gate_up: MXFP4 is uint8"),
    (mxfp4, 3, lambda m: m._replace(values=m.values.view(torch.int8)), "gate_up: MXFP4 is uint8"),
    (mxfp4, 4, lambda m: m._replace(scales=m.scales[..., :0]), "down: scales has shape"),
    (mxfp4, 4, lambda m: m._replace(scales=m.scales.mT.contiguous().mT), "down: scales is not contiguous"),
    (mxfp4, 4, lambda m: m._replace(values=m.values.mT.contiguous().mT), "rows of down must be dense"),
    (mxfp4, 4, lambda m: Mxfp4(m.values[:, :32], m.scales[:, :32].contiguous()), "do not fit hidden"),
])  # fmt: skip
def test_wrong_arguments_are_refused_before_a_launch(make: Any, at: int, change: Any, message: str) -> None:
    arguments = case(make, 4, 6, 2, 64, 96)
    arguments[at] = change(arguments[at])
    with pytest.raises(ValueError, match=message):
        fused.expert_mlp(*arguments)
    if reference.invalid(*arguments):
        with pytest.raises(ValueError, match=message):
            reference.expert_mlp(*arguments)
    else:
        assert reference.expert_mlp(*arguments).isfinite().all()


@triton.jit
def swapped(code):  # type: ignore[no-untyped-def]
    """e2m1 of the other half of a byte."""
    return e2m1((code >> 4) | (code << 4))


@triton.jit
def fnuz(code):  # type: ignore[no-untyped-def]
    """Bytes read as the e4m3 of AMD, whose exponents are one lower."""
    return e4m3(code) * 0.5


@pytest.mark.parametrize(("make", "name", "value"), [
    (mxfp4, "e2m1", swapped), (fp8, "e4m3", fnuz), (mxfp4, "e8m0", e4m3), (fp8, "BLOCK_ROWS", 256), (fp8, "BLOCK", 256),
])  # fmt: skip
def test_a_wrong_kernel_is_found(make: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: halves of bytes, a format, exponents and blocks mistaken for others."""
    arguments = case(make, 3, 3, 2, 160, 320)
    if name.startswith("BLOCK"):
        operand = fused._operand
        monkeypatch.setattr(fused, "_operand", lambda matrix: operand(matrix) | {name: value})
    else:
        monkeypatch.setattr(kernels, name, value)
    with pytest.raises(AssertionError):
        check(*arguments)


@torch.no_grad()
def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised matrices go to Triton where it runs, else to the reference; the CPU kernel reads no FP8."""
    dispatch.CALLS.clear()
    arguments = case(fp8, 2, 6, 2, 16, 32)
    first = dispatch.expert_mlp(*arguments)
    assert dispatch.CALLS == {("expert_mlp", "reference"): 1}
    assert dispatch.fast_experts(*arguments) is None
    monkeypatch.setattr(dispatch, "runs_triton", lambda t: True)
    assert_near(dispatch.expert_mlp(*arguments), first, UNITS)
    assert dispatch.CALLS == {("expert_mlp", "reference"): 1, ("expert_mlp", "fused"): 1}


def fp8_module(units: int = 128, hidden: int = 256, block: Any = (128, 128), scheme: str = "dynamic", form: str = "float", **settings: Any) -> Any:  # fmt: skip
    """transformers' FP8 experts, six of them, with random weights."""
    config = SimpleNamespace(
        num_experts=6, moe_intermediate_size=units, hidden_size=hidden, hidden_act="silu", **settings
    )
    config._experts_implementation = "eager"
    module = finegrained_fp8.FP8Experts(config, block, scheme, form)
    for seed, name in enumerate(("gate_up_proj", "down_proj")):
        weight, scales = (getattr(module, name + end).data for end in ("", "_scale_inv"))
        weight.copy_(random(seed, *weight.shape, scale=60))
        scales.copy_((1 + torch.rand(scales.shape, generator=torch.Generator().manual_seed(seed))) * 0.002)
    return module


def installed(module: Any) -> Any:
    """As the experts of a model that stays quantised."""
    model: Any = torch.nn.Sequential(module)
    model.is_quantized = True
    for _ in range(2):
        compute.install(model)
    return module


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"swiglu_limit": 0.4}, {"swiglu_limit": 1.5, "swiglu_alpha": 1.7}])
def test_experts_of_a_model_that_stays_fp8(settings: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """They go through the kernel, with transformers' own dequantised numbers; what it does not take, through their own function."""
    module = installed(fp8_module(**settings))
    restore = finegrained_fp8.Fp8Dequantize(None)._dequantize_one
    parts = (("gate_up_proj", "gate_up_proj_scale_inv"), ("down_proj", "down_proj_scale_inv"))
    matrices = [restore(*(getattr(module, name) for name in names), FP32) for names in parts]
    hidden, index, weight = random(2, 3, 256, dtype=BF16), routing(3, 3, 6, 2), random(4, 3, 2).abs()
    slots = torch.zeros(3, 256)
    for t, k in torch.cartesian_prod(torch.arange(3), torch.arange(2)).tolist():
        up, down = (m[index[t, k]] for m in matrices)
        slots[t] += weight[t, k] * (down @ module._apply_gate(up @ hidden[t].float()))
    monkeypatch.setattr(finegrained_fp8.FP8Experts, "forward", lambda self, hidden, *a: "its own")
    monkeypatch.setattr(dispatch, "runs_triton", lambda t: True)
    dispatch.CALLS.clear()
    assert_near(module(hidden, index, weight), slots.to(BF16), UNITS)
    assert dispatch.CALLS == {("expert_mlp", "fused"): 1}
    many = random(2, 65, 256, dtype=BF16), routing(3, 65, 6, 2), random(4, 65, 2)
    assert module(*many) == module(hidden.float(), index, weight) == "its own"
    monkeypatch.setattr(dispatch, "runs_triton", lambda t: False)
    assert module(hidden, index, weight) == "its own" and dispatch.CALLS == {("expert_mlp", "fused"): 1}


@pytest.mark.parametrize("settings", [
    {"units": 192}, {"block": None}, {"scheme": "static"}, {"form": "ue8m0"}, {"mlp_gate_softcap": 3.0, "mlp_up_softcap": 3.0},
])  # fmt: skip
def test_fp8_experts_of_other_kinds_stay_as_they_are(settings: dict[str, Any]) -> None:
    """Blocks that reach from gates into ups, a scale per weight, scaled activations, scales of another type, another gate."""
    assert type(installed(fp8_module(**settings))) is finegrained_fp8.FP8Experts
