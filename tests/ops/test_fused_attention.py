"""The Triton kernel of `tree_attention`, interpreted on the CPU, against its reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from ecospec_kernels.tree_attention import fused, reference

from .cases import BF16, FP16, FP32, random, under_interpreter

pytestmark = under_interpreter


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer starts as NaN: an element that a kernel does not write is found."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


def case(n: int, keys: int, heads: int, groups: int, width: int, value_width: int, dtype: torch.dtype) -> Any:
    """q, k, v as slices of larger tensors, a mask that shows each row its first key and some others, scale, sinks."""
    q = random(1, n, heads, width, dtype=dtype).transpose(0, 1)
    k = random(2, groups, keys + 9, width, dtype=dtype)[:, :keys]
    v = k[..., :value_width] if width == 576 else random(3, groups, keys + 9, value_width, dtype=dtype)[:, :keys]
    mask = torch.rand(n, keys, generator=torch.Generator().manual_seed(4)) < 0.6
    mask[:, 0] = True
    return [q, k, v, mask, width**-0.5, random(5, heads, dtype=dtype) + 4]


def assert_close(arguments: Any) -> Tensor:
    """The kernel's result, within what its roundings allow.

    A weight p_j is rounded to the values' dtype (relative error u = 2^-9 in bf16, 2^-12 in fp16: half a unit in the last
    place), so the output errs by at most u max|v|, and is rounded once more, by at most u of itself on each side. fp32: sums of
    up to a few hundred products of another order, 1e-5 max|v|.
    """
    result, expected = fused.tree_attention(*arguments), reference.tree_attention(*arguments)
    assert result.shape == expected.shape and result.dtype == expected.dtype
    unit = {BF16: 2**-8, FP16: 2**-11, FP32: 0.0}[result.dtype]
    most = float(arguments[2].abs().max())
    torch.testing.assert_close(result.float(), expected.float(), rtol=2 * unit, atol=(unit + 1e-5) * most)
    return result


@pytest.mark.parametrize(("n", "keys", "heads", "groups", "width", "value_width", "dtype"), [
    (1, 3, 4, 2, 64, 64, BF16), (3, 77, 6, 2, 96, 96, FP32), (63, 140, 2, 1, 64, 64, BF16), (5, 300, 4, 4, 128, 128, FP16),
    (3, 150, 4, 2, 192, 128, BF16), (2, 90, 4, 2, 256, 256, FP32), (3, 150, 7, 1, 576, 512, BF16), (2, 70, 2, 1, 18, 8, FP32),
])  # fmt: skip
def test_against_the_reference(n: int, keys: int, heads: int, groups: int, width: int, value_width: int, dtype: torch.dtype) -> None:  # fmt: skip
    """Widths of models and odd ones, keys in one chunk and in several, the latent form whose values are keys."""
    *plain, sinks = case(n, keys, heads, groups, width, value_width, dtype)
    with_sinks = assert_close([*plain, sinks])
    assert not torch.allclose(assert_close(plain), with_sinks, rtol=0.01)


@pytest.mark.parametrize("kind", ["none", "bf16", "lowest"])
def test_masks(kind: str) -> None:
    *before, mask, scale, _ = case(3, 77, 4, 2, 64, 64, BF16)
    additive = random(6, *mask.shape).masked_fill(~mask, torch.finfo(BF16).min if kind == "lowest" else -torch.inf)
    assert_close([*before, None if kind == "none" else additive.to(BF16), scale])


@pytest.mark.parametrize("additive", [False, True])
def test_a_row_that_sees_nothing_is_zero(additive: bool) -> None:
    """With a sink or without; and a chunk of which a row sees nothing leaves the others as they are."""
    *before, mask, scale, sinks = case(3, 600, 2, 2, 64, 64, BF16)
    mask[1], mask[2, 64:] = False, False
    if additive:
        mask = torch.zeros(mask.shape, dtype=BF16).masked_fill(~mask, torch.finfo(BF16).min)
    for rest in ((scale, sinks), (scale,)):
        assert (assert_close([*before, mask, *rest])[1] == 0).all()


def test_hidden_keys_may_hold_anything_finite_and_large_scores_do_not_overflow() -> None:
    q, k, v, mask, scale, _ = case(3, 77, 4, 2, 64, 64, FP32)
    before = fused.tree_attention(q, k, v, mask & mask[0], scale)
    k[:, ~mask[0]], v[:, ~mask[0]] = 1e4, 1e4
    assert torch.equal(fused.tree_attention(q, k, v, mask & mask[0], scale), before)
    assert fused.tree_attention(1e3 * q, k, v, mask, scale).isfinite().all()


def test_keys_beyond_two_to_the_31st(tmp_path: Path) -> None:
    """Heads lie 2^31 numbers apart in a sparse file: an offset of 32 bits would miss the second."""
    apart = 1 << 31
    stored = torch.from_file(str(tmp_path / "cache"), shared=True, size=apart + (1 << 16), dtype=BF16)
    arguments = case(2, 40, 4, 2, 64, 64, BF16)
    expected = fused.tree_attention(*arguments)
    for i in (1, 2):
        far = stored.as_strided((2, 40, 64), (apart, 64, 1), i << 14)
        arguments[i] = far.copy_(arguments[i])
    assert torch.equal(fused.tree_attention(*arguments), expected)


def test_chunks_cover_every_key_once() -> None:
    for keys in (1, 31, 32, 4095, 100_000):
        for groups, tiles in ((1, 1), (8, 2), (128, 64)):
            count, chunk = fused.splits(keys, groups, tiles, 32)
            assert (count - 1) * chunk < keys <= count * chunk and chunk % 32 == 0 and count <= fused.MAX_SPLITS


@pytest.mark.parametrize(("at", "change", "message"), [
    (0, lambda t: t.repeat(1, 40, 1), "up to 64 rows"),
    (1, lambda t: t.mT.contiguous().mT, "rows of q, k, v and mask must be dense"),
    (3, lambda t: t.mT.contiguous().mT, "rows of q, k, v and mask must be dense"),
    (3, lambda t: t.float(), "neither bool nor q's"),
    (3, lambda t: torch.empty_strided(t.shape, (1 << 30, 1), dtype=t.dtype), r"a mask of 2 rows, .* passes 2\^31"),
    (5, lambda t: t.float(), "sinks are torch.float32, not q's"),
])  # fmt: skip
def test_what_the_kernel_alone_refuses(at: int, change: Any, message: str) -> None:
    """Before a launch; the reference takes it."""
    arguments = case(2, 20, 4, 2, 64, 64, BF16)
    arguments[at] = change(arguments[at])
    if at == 0:
        arguments[3] = arguments[3].repeat(40, 1)
    assert fused.unsupported(*arguments) and reference.invalid(*arguments) is None
    with pytest.raises(ValueError, match=message):
        fused.tree_attention(*arguments)


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: a kernel that ignores the mask, and one that drops the last key."""
    kernel, arguments = fused.kernels.attend, case(3, 600, 2, 2, 64, 64, BF16)
    blind: Any = lambda grid: lambda *a, **k: kernel[grid](*a, **{**k, "MASK": fused.NO_MASK})  # noqa: E731
    short: Any = lambda grid: lambda *a, **k: kernel[grid](*a[:16], a[16] - 1, *a[17:], **k)  # noqa: E731
    for wrong in (blind, short):
        monkeypatch.setattr(
            fused.kernels, "attend", type("Wrong", (), {"__getitem__": lambda _, grid, w=wrong: w(grid)})()
        )
        with pytest.raises(AssertionError):
            assert_close(arguments)
