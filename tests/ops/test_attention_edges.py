"""What every implementation of `tree_attention` agrees on: wrong calls, logits that are no numbers, keys before `start`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from ecospec_kernels import dispatch
from ecospec_kernels.tree_attention import reference

from .cases import BF16, FP16, FP32, random, under_interpreter

NAN, INF = float("nan"), float("inf")
IMPLEMENTATIONS = ["reference", pytest.param("cpu"), pytest.param("fused", marks=under_interpreter)]
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def twin(implementation: str) -> Any:
    """The op's function in one of its modules."""
    pytest.importorskip({"cpu": "numba", "fused": "triton"}.get(implementation, "torch"))
    return import_module(f"ecospec_kernels.tree_attention.{implementation}").tree_attention


def case(n: int = 3, keys: int = 20, heads: int = 4, groups: int = 2, width: int = 64, dtype: torch.dtype = BF16) -> list[Any]:  # fmt: skip
    """q, k, v, an additive mask of zeros, scale, sinks."""
    q = random(1, n, heads, width, dtype=dtype).transpose(0, 1)
    k, v = (random(seed, groups, keys + 9, width, dtype=dtype)[:, :keys] for seed in (2, 3))
    return [q, k, v, torch.zeros(n, keys, dtype=dtype), width**-0.5, random(5, heads, dtype=dtype)]


WRONG = [
    (0, lambda t: t[0], "q .*, k .* and v .* are not \\[H, n, D\\]"),
    (2, lambda t: t[0], "are not \\[H, n, D\\]"),
    (0, lambda t: t[:3], "do not fit each other"),
    (0, lambda t: t[..., :32], "do not fit each other"),
    (1, lambda t: t[:, :-1], "do not fit each other"),
    (2, lambda t: t[:, :-1], "do not fit each other"),
    (2, lambda t: t[:1], "do not fit each other"),
    (0, lambda t: t[:0], "is empty"),
    (0, lambda t: t[:, :0], "is empty"),
    (1, lambda t: t[:0], "is empty"),
    (0, lambda t: t.double(), "q torch.float64, k torch.bfloat16 and v torch.bfloat16 are not one of"),
    (1, lambda t: t.float(), "are not one of"),
    (2, lambda t: t.to("meta"), "v on meta, the first argument on cpu"),
    (3, lambda t: t[:, :-1], "mask has shape \\[3, 19\\], not \\[3, 20\\]"),
    (3, lambda t: t[:1], "mask has shape"),
    (3, lambda t: t[None], "mask has shape"),
    (3, lambda t: t.long(), "mask is torch.int64, neither bool nor float32 nor q's torch.bfloat16"),
    (3, lambda t: t.to(torch.uint8), "mask is torch.uint8"),
    (3, lambda t: t.half(), "mask is torch.float16"),
    (3, lambda t: t.to("meta"), "mask lies on meta, the first argument on cpu"),
    (4, lambda x: NAN, "scale nan is not a finite number"),
    (4, lambda x: -INF, "scale -inf is not"),
    (4, lambda x: None, "scale None is not"),
    (5, lambda t: t[:-1], "sinks has shape \\[3\\], not \\[4\\]"),
    (5, lambda t: t[None], "sinks has shape"),
    (5, lambda t: t.long(), "sinks is int64"),
    (5, lambda t: t.repeat_interleave(2)[::2], "sinks is not contiguous"),
    (5, lambda t: t.to("meta"), "sinks lies on meta"),
    (6, lambda x: torch.zeros(2, dtype=torch.int64), "start has shape \\[2\\], not \\[1\\]"),
    (6, lambda x: torch.tensor(3), "start has shape"),
    (6, lambda x: torch.zeros(1), "start is float32, not int64"),
    (6, lambda x: torch.zeros(1, dtype=torch.int64, device="meta"), "start lies on meta"),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(("at", "change", "message"), WRONG)
@pytest.mark.parametrize("implementation", ["dispatch", *IMPLEMENTATIONS])
def test_a_wrong_call_is_refused_in_one_line(implementation: str, at: int, change: Any, message: str) -> None:
    """By every implementation, and whichever is chosen, the same one."""
    arguments = [*case(), None]
    arguments[at] = change(arguments[at])
    call = dispatch.tree_attention if implementation == "dispatch" else twin(implementation)
    with pytest.raises(ValueError, match=f"^tree_attention: .*{message}") as caught:
        call(*arguments)
    assert str(caught.value) == f"tree_attention: {reference.invalid(*arguments)}"


ODD = {
    "NaN in the mask": (3, (1, 4), NAN), "+inf in the mask": (3, (1, 4), INF), "NaN in a query": (0, (1, 1, 3), NAN),
    "NaN in a sink": (5, (1,), NAN), "a sink of +inf": (5, (1,), INF),
}  # fmt: skip


@each
@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("seen", ["all", "one", "none"])
def test_what_is_no_number_makes_its_row_nan(implementation: str, what: str, seen: str) -> None:
    """That row of its heads and no other; also where the row sees nothing else, and a sink where it sees nothing at all."""
    arguments = case(keys=300)  # two chunks
    at, place, value = ODD[what]
    arguments[3][1] = 0 if seen == "all" else -INF
    if seen == "one":
        arguments[3][1, 4] = 0
    if not (seen == "none" and at == 3):  # then no key is left to have a mask
        arguments[at][place] = value
    result = twin(implementation)(*arguments).float()
    expected = torch.zeros(3, 4, dtype=torch.bool)
    if at == 5:
        expected[:, 1] = True
    elif seen != "none":
        expected[1, 1 if at == 0 else slice(None)] = True
    assert torch.equal(result.isnan().all(-1), expected) and torch.equal(result.isnan().any(-1), expected)
    if seen == "none" and at == 0:
        assert not result[1].any()
    assert torch.equal(reference.tree_attention(*arguments).isnan(), result.isnan())


@each
def test_huge_numbers_in_a_mask_stay_numbers(implementation: str) -> None:
    """3e38 outweighs all else, -9e29 is outweighed, and neither overflows; a sink of -inf is none."""
    arguments = case(keys=300)
    sharp = arguments[3].clone()
    sharp[0, 7], sharp[1, :299], sharp[2, [3, 280]] = 3e38, -9e29, 3e38
    arguments[3], arguments[5] = sharp, torch.full((4,), -INF, dtype=BF16)
    result, expected = twin(implementation)(*arguments), reference.tree_attention(*arguments)
    v = arguments[2].repeat_interleave(2, 0)
    torch.testing.assert_close(result, expected, rtol=2**-7, atol=2**-7)
    assert torch.equal(result[0], v[:, 7]) and torch.equal(result[1], v[:, 299])
    assert torch.equal(twin(implementation)(*arguments[:5]), result)


@each
def test_a_logit_of_minus_infinity_has_no_weight(implementation: str) -> None:
    """Products that overflow: of one key, and of all, of which nothing is left."""
    q, k, v, mask, scale, _ = case()
    q[:, 1], k[:, 5] = 1e38, -1e38
    k[:, [i for i in range(20) if i != 5]] = 0
    shown = twin(implementation)(q, k, v, mask, scale)[1]
    expected = v.float()[:, [i for i in range(20) if i != 5]].mean(1).repeat_interleave(2, 0)
    torch.testing.assert_close(shown.float(), expected, rtol=2**-7, atol=2**-7)
    k[:] = -1e38
    assert not twin(implementation)(q, k, v, mask, scale)[1].any()


def windowed(keys: int, first: int, n: int, **shape: Any) -> tuple[list[Any], Tensor]:
    """Arguments whose mask hides some keys, and from every row those before `first`; and `first` as the op takes it."""
    arguments = case(n, keys, **shape)
    shown = torch.rand(n, keys, generator=torch.Generator().manual_seed(4)) < 0.6
    shown[:, first:][:, :1] = True
    shown[:, :first] = False
    arguments[3] = shown
    return arguments, torch.tensor([first])


SIZES = [
    (20, 7),
    (20, 0),
    (300, 255),
    (300, 256),
    (300, 257),
    (600, 449),
    (600, 77),
    (1100, 1090),
    (64, 63),
    (600, 600),
]


@pytest.mark.parametrize(("keys", "first"), SIZES)
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@each
def test_a_start_changes_no_bit(implementation: str, dtype: torch.dtype, kind: str, keys: int, first: int) -> None:
    """Of what a mask gives that hides those keys; with a start they may be NaN, and the mask may say anything of them."""
    if implementation == "cpu" and dtype is not BF16:
        pytest.skip("bf16 only")
    if dtype is not BF16 and keys > 300:
        pytest.skip("the same code")
    op = twin(implementation)
    arguments, start = windowed(keys, first, 5, dtype=dtype)
    if kind == "additive":
        arguments[3] = torch.zeros(5, keys, dtype=dtype).masked_fill_(~arguments[3], torch.finfo(dtype).min)
    expected = op(*arguments)
    assert expected.isfinite().all()
    assert torch.equal(op(*arguments, start), expected)
    assert torch.equal(op(*arguments, torch.tensor([-5])), expected)
    for t in arguments[1:3]:
        t[:, :first] = NAN
    if kind == "additive":
        arguments[3][:, :first] = NAN
    else:
        arguments[3][:, :first] = True
    assert torch.equal(op(*arguments, start), expected)


@each
def test_a_start_without_a_mask_or_behind_all_keys(implementation: str) -> None:
    op = twin(implementation)
    q, k, v, mask, scale, sinks = case(keys=300)
    start = torch.tensor([270])
    shown = torch.arange(300).expand(3, -1) >= 270
    assert torch.equal(op(q, k, v, None, scale, sinks, start), op(q, k, v, shown, scale, sinks))
    for given in (None, mask):
        for far in (300, 1000, 2**40):
            assert not op(q, k, v, given, scale, sinks, torch.tensor([far])).any()


@under_interpreter
def test_keys_before_a_start_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor chunks that lie before it written or read: what they hold at first does not matter."""
    op = twin("fused")
    arguments, start = windowed(1100, 1000, 3)
    expected = op(*arguments)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(NAN))
    for place in (1, 2):
        arguments[place] = arguments[place].clone()
        arguments[place][:, :1000] = NAN
    assert torch.equal(op(*arguments, start), expected)
    kernels = import_module("ecospec_kernels.tree_attention.kernels")
    attend = kernels.attend
    forgets: Any = lambda grid: lambda *a, **k: attend[grid](*a, **{**k, "START": False})  # noqa: E731
    monkeypatch.setattr(kernels, "attend", type("Wrong", (), {"__getitem__": lambda _, grid: forgets(grid)})())
    assert op(*arguments, start).isnan().all(), "a kernel that forgets the start is found"
