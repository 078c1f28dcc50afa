"""Each CPU kernel against its reference, on odd sizes; and its rows alone against its rows in company, bit for bit."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ecospec_kernels import dispatch
from ecospec_kernels.expert_mlp.reference import Gate, Mxfp4
from ecospec_kernels.group_router.reference import Rule
from ecospec_kernels.mtp_layer.reference import MtpWeights

from .cases import BF16, FP16, FP32, assert_near, mxfp4, random, routing

pytest.importorskip("numba")
MIXED = (
    2**-16
)  # of the largest output: what fp32 rows lose in a product with bf16 weights on processors with AVX512-BF16
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])


def op(name: str, implementation: str, folder: str = "") -> Any:
    """The function of one implementation."""
    return getattr(importlib.import_module(f"ecospec_kernels.{folder or name}.{implementation}"), name)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output starts as NaN, or -1: an element that a kernel does not write is found."""

    def poisoned(made: Any) -> Any:
        return lambda *a, **k: (out := made(*a, **k)).fill_(float("nan") if out.is_floating_point() else -1)

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@DTYPES
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 63])
@pytest.mark.parametrize(("columns", "outputs"), [(16, 8), (18, 9), (30, 13), (56, 48), (258, 31), (256, 128)])
def test_linear(n: int, columns: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight = random(1, n, columns, dtype=dtype), random(2, outputs, columns, dtype=dtype)
    for bias in (None, random(3, outputs, dtype=dtype)):
        result = op("few_row_linear", "cpu")(x, weight, bias)
        assert_near(result, op("few_row_linear", "reference")(x, weight, bias))
        alone = [op("few_row_linear", "cpu")(x[i : i + 1], weight, bias) for i in range(n)]
        assert torch.equal(torch.cat(alone), result)


def test_linear_takes_strided_rows_and_mixed_dtypes() -> None:
    x, weight = random(1, 3, 64)[:, :32], random(2, 16, 32, dtype=BF16)
    assert_near(op("few_row_linear", "cpu")(x, weight), op("few_row_linear", "reference")(x, weight), MIXED)


@pytest.mark.parametrize("value", [3.4028e38, float("inf")])
def test_numbers_above_bf16_are_infinite_at_worst(value: float) -> None:
    """Of fp32 rows; not infinity less infinity, which is NaN."""
    x, weight = torch.full((2, 32), value), torch.full((8, 32), 1.0, dtype=BF16)
    assert (op("few_row_linear", "cpu")(x, weight, None) == float("inf")).all()


def experts_case(n: int, experts: int, top_k: int, units: int, dtype: torch.dtype, used: int | None = None) -> Any:
    """Inputs of `expert_mlp` with hidden size 32."""
    index = routing(n, n, experts, top_k, used)
    weight = random(3, n, top_k, dtype=dtype).abs()
    up, down = (
        random(4, experts, 2 * units, 32, dtype=dtype, scale=0.3),
        random(5, experts, 32, units, dtype=dtype, scale=0.3),
    )
    return random(2, n, 32, dtype=dtype), index, weight, up, down


@DTYPES
@pytest.mark.parametrize("n", [1, 3, 63])
@pytest.mark.parametrize(("experts", "top_k", "units"), [(6, 2, 16), (48, 4, 56), (60, 4, 24), (128, 8, 18)])
def test_experts(n: int, experts: int, top_k: int, units: int, dtype: torch.dtype) -> None:
    case = experts_case(n, experts, top_k, units, dtype)
    result = op("expert_mlp", "cpu")(*case)
    assert_near(result, op("expert_mlp", "reference")(*case))
    hidden, index, weight, *matrices = case
    alone = [
        op("expert_mlp", "cpu")(hidden[i : i + 1], index[i : i + 1], weight[i : i + 1], *matrices) for i in range(n)
    ]
    assert torch.equal(torch.cat(alone), result)


@DTYPES
@pytest.mark.parametrize("n", [1, 5, 63])
@pytest.mark.parametrize("interleaved", [True, False])
def test_gates_and_biases(n: int, interleaved: bool, dtype: torch.dtype) -> None:
    """GPT-OSS's experts: clamped, shifted, biased; the sizes reach the clamps."""
    hidden, index, weight, up, down = experts_case(n, 12, 4, 18, dtype)
    gate = Gate(interleaved, 1.702, 1.5, 1.0)
    biases = random(6, 12, 36, dtype=dtype), random(7, 12, 32, dtype=dtype)
    for rest in ((gate,), (gate, *biases), (gate, None, biases[1])):
        expected = op("expert_mlp", "reference")(hidden, index, weight, up, down, *rest)
        assert_near(op("expert_mlp", "cpu")(hidden, index, weight, up, down, *rest), expected)
    plain = op("expert_mlp", "reference")(hidden, index, weight, up, down)
    assert not torch.allclose(plain, expected, rtol=0.1)


def test_experts_that_nobody_chose_are_not_read() -> None:
    """Only the first three experts are used; the others hold NaN."""
    case = experts_case(5, 12, 2, 16, BF16, used=3)
    for matrix in case[3:]:
        matrix[3:] = float("nan")
    result = op("expert_mlp", "cpu")(*case)
    assert torch.isfinite(result).all()
    assert_near(result, op("expert_mlp", "reference")(*case))


def test_an_expert_named_twice_by_a_token() -> None:
    hidden, index, *rest = experts_case(4, 6, 3, 16, FP32)
    index[:, 2] = index[:, 0]
    assert_near(op("expert_mlp", "cpu")(hidden, index, *rest), op("expert_mlp", "reference")(hidden, index, *rest))


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_expert_ids(implementation: str) -> None:
    """The id E is a sentinel of expert parallelism and adds nothing; others are refused."""
    hidden, index, weight, *matrices = experts_case(4, 6, 2, 16, FP32)
    index[:, 1] = 6
    one = op("expert_mlp", implementation)(hidden, index[:, :1].contiguous(), weight[:, :1].contiguous(), *matrices)
    torch.testing.assert_close(op("expert_mlp", implementation)(hidden, index, weight, *matrices), one)
    for wrong in (-1, 7):
        index[0, 0] = wrong
        with pytest.raises(IndexError, match="outside"):
            op("expert_mlp", implementation)(hidden, index, weight, *matrices)


@pytest.mark.parametrize("columns", [5, 64, 256])
@pytest.mark.parametrize("n", [1, 3, 63])
def test_norm(n: int, columns: int) -> None:
    """Two roundings to bf16 (before and after the weight), so two units in the last place."""
    x, weight = random(1, n, columns, dtype=BF16, scale=3), random(2, columns, dtype=BF16)
    result = op("rms_norm", "cpu")(x, weight, 1e-6)
    torch.testing.assert_close(result, op("rms_norm", "reference")(x, weight, 1e-6), rtol=2**-7, atol=1e-6)
    assert torch.equal(torch.cat([op("rms_norm", "cpu")(x[i : i + 1], weight, 1e-6) for i in range(n)]), result)


def attention_masks(shown: Tensor) -> dict[str, Tensor]:
    """The forms in which a mask arrives."""
    additive = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(BF16).min)
    return {"bool": shown, "bf16": additive.to(BF16), "fp32": additive.masked_fill(~shown, -torch.inf)}


@pytest.mark.parametrize("kind", ["none", "bool", "bf16", "fp32"])
@pytest.mark.parametrize(("n", "keys", "heads", "groups", "dim"), [(1, 3, 4, 2, 16), (3, 7, 2, 2, 18), (5, 77, 6, 2, 64),
                                                                   (63, 130, 4, 1, 24)])  # fmt: skip
def test_attention(n: int, keys: int, heads: int, groups: int, dim: int, kind: str) -> None:
    q = random(1, n, heads, dim, dtype=BF16).transpose(0, 1)
    k, v = (random(s, groups, keys + 9, dim, dtype=BF16)[:, :keys] for s in (2, 3))
    shown = torch.rand(n, keys, generator=torch.Generator().manual_seed(4)) < 0.6
    shown[:, 0] = True
    mask = None if kind == "none" else attention_masks(shown)[kind]
    sinks = random(5, heads, dtype=BF16, scale=2)
    with_sinks = op("tree_attention", "cpu")(q, k, v, mask, 0.3, sinks)
    assert_near(with_sinks, op("tree_attention", "reference")(q, k, v, mask, 0.3, sinks))
    result = op("tree_attention", "cpu")(q, k, v, mask, 0.3)
    assert_near(result, op("tree_attention", "reference")(q, k, v, mask, 0.3))
    assert not torch.equal(result, with_sinks)
    for i in range(n):  # a row by itself, with only the keys it may see in the cache
        seen = torch.arange(keys) if mask is None else shown[i].nonzero()[:, 0]
        alone = op("tree_attention", "cpu")(q[:, i : i + 1], k[:, seen], v[:, seen], None, 0.3)
        assert torch.equal(alone[0], result[i])


@pytest.mark.parametrize("value_dim", [8, 40])
def test_values_of_another_width(value_dim: int) -> None:
    q, k = random(1, 4, 5, 24, dtype=BF16), random(2, 2, 77, 24, dtype=BF16)
    v = random(3, 2, 77, value_dim, dtype=BF16)
    result = op("tree_attention", "cpu")(q, k, v, None, 0.3)
    assert_near(result, op("tree_attention", "reference")(q, k, v, None, 0.3))
    assert result.shape == (5, 4, value_dim)


def latent_case(n: int, cached: int, heads: int, dims: tuple[int, int, int, int], dtype: torch.dtype) -> Any:
    """Inputs of `latent_attention` but the mask; dims: plain and rotated part of a key, latent, value. Caches are strided."""
    plain, rotated, latent, values = dims
    cache = random(2, cached, latent + rotated, dtype=dtype)
    up = random(3, heads * (plain + values), latent, dtype=dtype, scale=latent**-0.5)
    return random(1, n, heads, plain + rotated, dtype=dtype), cache[:, :latent], cache[:, latent:], up


LATENT_DIMS = [(1, 3, 4, (16, 16, 32, 16)), (3, 77, 2, (7, 18, 34, 9)), (5, 130, 6, (64, 32, 128, 40)),
               (64, 70, 1, (16, 128, 128, 64))]  # fmt: skip


@DTYPES
@pytest.mark.parametrize("kind", ["none", "bool", "bf16", "fp32"])
@pytest.mark.parametrize(("n", "cached", "heads", "dims"), LATENT_DIMS)
def test_latent_attention(
    n: int, cached: int, heads: int, dims: tuple[int, int, int, int], kind: str, dtype: torch.dtype
) -> None:
    q, latent, key, up = latent_case(n, cached, heads, dims, dtype)
    shown = torch.rand(n, cached, generator=torch.Generator().manual_seed(4)) < 0.6
    shown[:, 0] = True
    mask = None if kind == "none" else attention_masks(shown)[kind]
    result = op("latent_attention", "cpu")(q, latent, key, up, mask, 0.3)
    assert_near(
        result, op("latent_attention", "reference")(q, latent, key, up, mask, 0.3), 2e-6 if dtype is FP32 else 1e-4
    )
    for i in range(n):  # a row by itself, with only the keys it may see in the cache
        seen = torch.arange(cached) if mask is None else shown[i].nonzero()[:, 0]
        alone = op("latent_attention", "cpu")(q[i : i + 1], latent[seen], key[seen], up, None, 0.3)
        assert torch.equal(alone[0], result[i])


def test_latents_that_no_row_sees_are_not_read() -> None:
    """A mask's NaN hides nothing: it makes the row NaN."""
    q, latent, key, up = latent_case(4, 40, 2, (16, 16, 32, 16), BF16)
    added = torch.zeros(4, 40)
    added[1, 3] = float("nan")
    for name in ("cpu", "reference"):
        assert op("latent_attention", name)(q, latent, key, up, added, 0.3).isnan().flatten(1).all(1).tolist() == [
            False,
            True,
            False,
            False,
        ]
    shown = torch.ones(4, 40, dtype=torch.bool).tril(30)
    shown[2] = False  # a row that sees nothing is zero
    latent[34:], key[34:] = float("nan"), float("nan")
    result = op("latent_attention", "cpu")(q, latent, key, up, shown, 0.3)
    expected = op("latent_attention", "reference")(q, latent[:34], key[:34], up, shown[:, :34], 0.3)
    assert_near(result, expected, 1e-4)
    assert not result[2].any()


@DTYPES
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("n", [1, 5])
def test_latent_rows(n: int, interleaved: bool, dtype: torch.dtype) -> None:
    """Only the rotated part of q changes; heads and rows are those that each would get alone."""
    plain, rotated, latent = 7, 18, 34
    q, compressed = random(1, n, 3, plain + rotated, dtype=dtype), random(2, n, latent + rotated, dtype=dtype)
    angles = random(3, n, rotated // 2).repeat(1, 2)
    rest = random(4, latent, dtype=dtype), 1e-6, angles.cos().to(dtype), angles.sin().to(dtype), interleaved
    given, expected = q.clone(), q.clone()
    both = op("latent_rows", "cpu", "latent_attention")(given, compressed, *rest)
    for ours, theirs in zip(
        (given, *both),
        (expected, *op("latent_rows", "reference", "latent_attention")(expected, compressed, *rest)),
        strict=True,
    ):
        assert_near(ours, theirs)
    assert torch.equal(given[..., :plain], q[..., :plain])
    assert not torch.equal(given[..., plain:], q[..., plain:])


@pytest.mark.parametrize(
    ("experts", "groups", "kept", "top_k"), [(32, 4, 2, 4), (8, 1, 1, 3), (16, 8, 3, 6), (256, 8, 4, 8)]
)
@pytest.mark.parametrize("normalise", [True, False])
def test_group_router(experts: int, groups: int, kept: int, top_k: int, normalise: bool) -> None:
    rule = Rule(top_k, groups, kept, normalise, 2.5)
    logits, bias = random(1, 33, experts, scale=3), random(2, experts, scale=0.5)
    weights, index = op("group_router", "cpu")(logits, bias, rule)
    expected, chosen = op("group_router", "reference")(logits, bias, rule)
    assert torch.equal(index, chosen)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(index.sort().values, logits.topk(top_k).indices.sort().values)
    alone = op("group_router", "cpu")(logits[7:8], bias, rule)
    assert torch.equal(alone[0][0], weights[7]) and torch.equal(alone[1][0], index[7])
    broken = logits.clone()
    broken[0, 3] = broken[1] = float("nan")
    for row in (0, 1):  # as by torch.topk, so that the target's check finds it
        for name in ("cpu", "reference"):
            weights, index = op("group_router", name)(broken[row : row + 1], bias, rule)
            assert weights.isnan().any() and len(set(index[0].tolist())) == top_k
            assert (row == 1 or 3 in index) and index.min() >= 0 and index.max() < experts


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_wrong_calls_of_the_latent_kernels_are_refused(name: str) -> None:
    logits, bias = random(1, 2, 8), torch.zeros(8)
    for given, message in (
        ((logits, bias[:7], Rule(2, 2, 1, True, 1.0)), r"bias has shape \[7\], not \[8\]"),
        ((logits[0], bias, Rule(2, 2, 1, True, 1.0)), "logits has shape"),
        ((logits, bias, Rule(9, 2, 1, True, 1.0)), "9 of 8 experts"),
        ((logits, bias, Rule(2, 2, 3, True, 1.0)), "3 of 2 groups"),
        ((logits, bias, Rule(2, 3, 1, True, 1.0)), "no 3 groups of two or more"),
        ((logits, bias, Rule(2, 8, 1, True, 1.0)), "no 8 groups of two or more"),
    ):
        with pytest.raises(ValueError, match=f"group_router: .*{message}"):
            op("group_router", name)(*given)
    q, latent, key, up = latent_case(2, 12, 2, (16, 16, 32, 16), FP32)
    mask = torch.ones(2, 12, dtype=torch.bool)
    for arguments, message in (
        ((q, latent, key, up, mask[:, :5], 0.3), r"mask has shape \[2, 5\], not \[2, 12\]"),
        ((q, latent, key[:11], up, mask, 0.3), "keys have shape"),
        ((q, latent, key, up[:-1], mask, 0.3), "up has shape"),
        ((q, latent, key, up, mask.double(), 0.3), "mask is torch.float64"),
    ):
        with pytest.raises(ValueError, match=f"latent_attention: {message}"):
            op("latent_attention", name)(*arguments)


def mtp_case(n: int, cached: int, low: bool, dtype: torch.dtype) -> Any:
    """Weights and inputs of `mtp_layer` with odd sizes; a node of the tree sees the text, its path and itself."""
    hidden, heads, plain, rotated, latent, values, rank, experts, units, shared = 32, 2, 7, 18, 34, 9, 20, 16, 24, 18
    shapes = {
        "project": (hidden, 2 * hidden), "q_down": (rank, hidden), "q_up": (heads * (plain + rotated), rank if low else hidden),
        "compress": (latent + rotated, hidden), "up": (heads * (plain + values), latent), "out": (hidden, heads * values),
        "router": (experts, hidden), "gate_up": (experts, 2 * units, hidden), "down": (experts, hidden, units),
        "shared_gate": (shared, hidden), "shared_up": (shared, hidden), "shared_down": (hidden, shared),
    }  # fmt: skip
    matrices = {
        name: random(i, *shape, dtype=FP32 if name == "router" else dtype, scale=shape[-1] ** -0.5)
        for i, (name, shape) in enumerate(shapes.items())
    }
    norms = {name: 1 + random(20 + i, hidden, scale=0.2) for i, name in enumerate(
        ("embedding_norm", "hidden_norm", "input_norm", "post_norm", "output_norm"))}  # fmt: skip
    weights = MtpWeights(
        **(matrices if low else matrices | {"q_down": None}), **norms, q_norm=1 + random(26, rank, scale=0.2) if low else None,
        latent_norm=1 + random(27, latent, scale=0.2), router_bias=random(28, experts, scale=0.2), heads=heads, scale=0.2,
        interleaved=low, eps=1e-5, latent_eps=1e-6, rule=Rule(3, 4, 2, low, 1.5),
    )  # fmt: skip
    angles = random(29, n, rotated // 2).repeat(1, 2)
    mask = torch.ones(n, cached, dtype=torch.bool).tril(cached - n)
    mask[:, cached - n :] &= torch.rand(n, n, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[torch.arange(n), torch.arange(cached - n, cached)] = True
    cache = random(30, cached, latent, dtype=dtype), random(31, cached, rotated, dtype=dtype)
    return weights, [random(32, n, hidden), random(33, n, hidden), angles.cos(), angles.sin(), *cache, mask]


@DTYPES
@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize(("n", "cached"), [(1, 8), (5, 40), (64, 77)])
def test_mtp_layer(n: int, cached: int, low: bool, dtype: torch.dtype) -> None:
    """With what the rows leave in the cache; each row alone gives the same, given the others' latents."""
    weights, inputs = mtp_case(n, cached, low, dtype)
    assert dispatch.supports_mtp(weights)
    ours, theirs = ([x.clone() for x in inputs] for _ in range(2))
    ours[1] = ours[1][:1].expand(n, -1)  # siblings share the state that proposed them
    theirs[1] = ours[1]
    for latents in (ours[4], ours[5], theirs[4], theirs[5]):
        latents[-n:] = float("nan")  # written before it is read
    result = op("mtp_layer", "cpu")(weights, *ours)
    assert_near(result, op("mtp_layer", "reference")(weights, *theirs), 1e-3 if dtype is BF16 else 1e-5)
    for left, right in zip(ours[4:6], theirs[4:6], strict=True):
        assert_near(left, right, 1e-3 if dtype is BF16 else 1e-5)
    past = cached - n
    for i in range(n):
        rows = [x[i : i + 1] for x in ours[:4]]
        order = [*range(past), *(past + j for j in range(n) if j != i), past + i]  # its own row last
        alone = op("mtp_layer", "cpu")(weights, *rows, ours[4][order], ours[5][order], ours[6][i : i + 1, order])
        assert_near(alone[0], result[i], 1e-5)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_wrong_calls_of_the_mtp_layer_are_refused(name: str) -> None:
    """Before the cache is written."""
    weights, inputs = mtp_case(2, 9, True, FP32)
    before = [t.clone() for t in inputs]
    for at, change, message in (
        (0, lambda t: t[:, :-1], r"embeddings: \[2, 31\] .* not \[2, 32\]"), (0, lambda t: t[:0], "0 rows and 9 cached rows"),
        (0, lambda t: None, "embeddings is NoneType, not a tensor"), (0, lambda t: t[0, 0], "0 rows and 9"),
        (1, lambda t: t[:1], r"h: \[1, 32\]"), (1, lambda t: t.double(), "h: .* torch.float64 on cpu, not .* torch.float32"),
        (2, lambda t: t[:, :9], r"cos: \[2, 9\]"), (3, lambda t: t[:1], r"sin: \[1, 18\]"), (3, lambda t: t.to("meta"), "sin: .* on meta, not"),
        (4, lambda t: t[:1], "2 rows and 1 cached rows"), (4, lambda t: t[:, 1:], r"latents: \[9, 33\]"),
        (5, lambda t: t[:8], r"keys: \[8, 18\]"), (5, lambda t: t.bfloat16(), "keys: .*bfloat16"),
        (6, lambda t: t[:, :8], r"mask: \[2, 8\]"), (6, lambda t: t.float(), "mask: .* not .* torch.bool"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^mtp_layer: {message}"):
            op("mtp_layer", name)(weights, *inputs[:at], change(inputs[at]), *inputs[at + 1 :])
    for key, weight, message in (
        ("q_norm", None, "q_down and q_norm are given together"), ("up", weights.up[1:], r"up has shape \[31, 34\], not \[32, 34\]"),
        ("latent_norm", weights.latent_norm[1:], "up has shape"), ("shared_down", weights.shared_down.T, "shared_down has shape"),
        ("router_bias", weights.router_bias[1:], "router_bias has shape"), ("q_down", weights.q_down[:, 1:], "q_down has shape"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^mtp_layer: {message}"):
            op("mtp_layer", name)(replace(weights, **{key: weight}), *inputs)
    assert all(map(torch.equal, inputs, before))
    sparse = inputs[4].T.contiguous().T
    if name == "cpu":
        with pytest.raises(ValueError, match="rows of latents and keys must be dense"):
            op("mtp_layer", name)(weights, *inputs[:4], sparse, *inputs[5:])


@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_best_tokens(noisy: bool, dtype: torch.dtype) -> None:
    logits, noise = random(1, 3, 77, dtype=dtype, scale=3), random(2, 77) if noisy else None
    logits[1, 5:] = -torch.inf  # fewer finite ones than are asked for
    given = logits.clone()
    result, expected = (
        op("best_tokens", kind, "draft_propose")(logits, 8, (0.5, 1.0), noise) for kind in ("cpu", "reference")
    )
    assert torch.equal(logits, given)
    for ours, theirs in zip(result, expected, strict=True):
        finite = slice(0, 3, 2) if theirs is expected.ids or theirs is expected.entropies else slice(None)
        torch.testing.assert_close(ours[finite], theirs[finite], rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == 8 for row in result.ids.tolist())


@pytest.mark.parametrize("name", ["few_row_linear", "expert_mlp", "latent_attention"])
def test_threads_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {
        "few_row_linear": (random(1, 5, 64, dtype=BF16), random(2, 77, 64, dtype=BF16)),
        "expert_mlp": experts_case(5, 12, 4, 32, BF16),
        "latent_attention": (*latent_case(5, 40, 7, (16, 16, 32, 16), BF16), None, 0.3),
    }[name]
    one = op(name, "cpu")(*arguments)
    monkeypatch.setattr(f"ecospec_kernels.{name}.cpu.SPLIT_BYTES", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(op(name, "cpu")(*arguments), one)


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: a kernel that drops a column, one that forgets an output."""
    x, weight = random(1, 3, 64, dtype=BF16), random(2, 16, 64, dtype=BF16)
    cpu, expected = op("few_row_linear", "cpu"), op("few_row_linear", "reference")(x, weight)
    clipped = x.clone()
    clipped[:, -1] = 0
    for wrong in (cpu(clipped, weight), torch.cat([cpu(x, weight)[:, :-1], torch.empty(3, 1, dtype=BF16)], 1)):
        with pytest.raises(AssertionError):
            assert_near(wrong, expected)


def test_exp_of_the_kernels() -> None:
    """Within two units in the last place of the true value over the whole range that softmax and SiLU reach."""
    import numba
    import numpy as np

    from ecospec_kernels.blocks import exp

    @numba.njit
    def each(x: Any, y: Any) -> None:
        for i in range(len(x)):
            y[i] = exp(x[i])

    x = np.linspace(-86, 87, 20001, dtype=np.float32)
    y = np.empty_like(x)
    each(x, y)
    np.testing.assert_allclose(y, np.exp(x.astype(np.float64)), rtol=2.5e-7)


def test_functions_made_from_one_source_have_names_of_their_own() -> None:
    """Or code cached by two processes calls the wrong one: see `specialised`."""
    from numba.core.dispatcher import Dispatcher

    from ecospec_kernels import blocks, products

    found: dict[int, str] = {}

    def collect(function: Any) -> None:
        if isinstance(function, Dispatcher) and id(function) not in found:
            found[id(function)] = function.py_func.__qualname__
            for cell in function.py_func.__closure__ or ():
                collect(cell.cell_contents)

    for value in [*vars(blocks).values(), *vars(products).values()]:
        collect(value)
    assert len(found) > 10
    assert len(set(found.values())) == len(found)


@torch.no_grad()
@DTYPES
@pytest.mark.parametrize(
    ("n", "experts", "top_k", "units", "hidden"), [(1, 6, 2, 32, 64), (5, 12, 4, 96, 32), (70, 8, 2, 32, 96)]
)
def test_mxfp4_experts(n: int, experts: int, top_k: int, units: int, hidden: int, dtype: torch.dtype) -> None:
    """As the reference, with and without biases; and bit for bit as the kernel makes of the same numbers in bf16."""
    index, weight = routing(n, n, experts, top_k, experts - 1), random(3, n, top_k, dtype=dtype).abs()
    matrices = mxfp4(4, experts, 2 * units, hidden), mxfp4(5, experts, hidden, units)
    for matrix in matrices:
        matrix.scales[experts - 1] = 255  # of an expert that nobody chose
    plain = [torch.stack([m.dequantized(e) for e in range(experts)]).to(BF16) for m in matrices]
    biases = random(6, experts, 2 * units, dtype=dtype), random(7, experts, hidden, dtype=dtype)
    gate = Gate(True, 1.702, 1.5, 1.0)
    routed = random(2, n, hidden, dtype=dtype), index, weight
    for rest in ((), (gate, *biases), (gate, None, biases[1])):
        dispatch.CALLS.clear()
        out = dispatch.expert_mlp(*routed, *matrices, *rest)
        assert dispatch.CALLS == {("expert_mlp", "cpu"): 1}
        assert_near(out, op("expert_mlp", "reference")(*routed, *matrices, *rest), MIXED)
        if dtype is BF16:
            assert torch.equal(out, op("expert_mlp", "cpu")(*routed, *plain, *rest))


@torch.no_grad()
def test_what_the_kernel_does_not_take_of_mxfp4() -> None:
    """Refused by `supports_experts`, so that the reference says what is wrong or does it."""
    hidden, index, weight = random(2, 3, 64), routing(3, 3, 6, 2), random(3, 3, 2).abs()
    up, down = mxfp4(4, 6, 128, 64), mxfp4(5, 6, 64, 64)
    supports = dispatch.supports_experts
    assert supports(hidden, index, weight, up, down)
    for bad in (
        down._replace(values=down.values.mT.contiguous().mT), down._replace(scales=down.scales[:, :, :0]),
        down._replace(values=down.values[:, :32]), down.values, random(5, 6, 64, 64),
    ):  # fmt: skip
        assert not supports(hidden, index, weight, up, bad)
    assert not supports(hidden, index, weight, up, down, random(6, 6, 128), random(7, 6, 64, dtype=BF16))
    assert not supports(random(2, 3, 64, dtype=FP16), index, weight, up, down)
    assert not supports(random(2, 3, 96), index, weight, up, down)


def test_every_mxfp4_number_is_exact_in_bf16() -> None:
    """Each scale with each code, in both halves of a byte: subnormal numbers, infinities and NaN too."""
    from ecospec_kernels.expert_mlp.cpu import _codes

    words = (
        torch.from_numpy(_codes().view(np.int16).copy()).view(BF16).view(256, 256, 2)
    )  # little-endian: the low half first
    values = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(1, 256, 16, 16)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16)[None].contiguous()
    expected = Mxfp4(values, scales).dequantized(0).view(256, 256, 2)
    torch.testing.assert_close(words.float(), expected, rtol=0, atol=0, equal_nan=True)
    assert expected.isnan().sum() == 512
