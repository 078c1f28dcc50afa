"""`commit_path`: what the engine's cache keeps, in place, also where source and destination overlap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from ecospec_kernels.commit_path import fused, reference
from ecospec_runtime.cache import TargetCache
from tests.ops.cases import BF16, far_apart, poisoned, random


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_kept(kept: list[int], past: int, rows: int, dims: tuple[int, int], heads: int, dtype: torch.dtype) -> None:
    """Both implementations leave the rows that `TargetCache.keep` leaves; those before stay, in a strided buffer."""
    keys, values = (random(i, 1, heads, past + rows, dim, dtype=dtype) for i, dim in enumerate(dims))
    cache = TargetCache()
    cache.inner.update(keys, values, 0)
    cache.keep(past, kept)
    expected = cache.inner.layers[0]
    padded = int32(*kept, *[-1] * (rows - len(kept)))
    for op in (reference, fused):
        buffers = [torch.nn.functional.pad(x[0], (0, 3, 0, 2), value=7.0) for x in (keys, values)]
        inside = [buffer[..., :dim] for buffer, dim in zip(buffers, dims, strict=True)]
        got = poisoned(op.commit_path, *inside, padded, int32(len(kept)), torch.tensor([past]))
        assert got.tolist() == [past + len(kept)] and got.dtype == torch.int64
        for mine, theirs in zip(inside, (expected.keys, expected.values), strict=True):
            assert torch.equal(mine[:, : past + len(kept)], theirs[0])
        assert all((b[..., -3:] == 7.0).all() and (b[:, -2:] == 7.0).all() for b in buffers)


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(1, 11)), st.integers(0, 4), st.sampled_from([(4, 4), (5, 2)]))
def test_the_engines_cache_keeps_the_same(accepted: set[int], past: int, dims: tuple[int, int]) -> None:
    assert_kept([0, *sorted(accepted)], past, 12, dims, 2, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize(
    ("kept", "rows"), [([0], 1), ([0, 2], 3), ([0, 1, 2, 40, 62], 63), (list(range(0, 100, 3)), 100)]
)  # fmt: skip
def test_sizes(kept: list[int], rows: int, dtype: torch.dtype) -> None:
    """Dimensions of latent attention: keys are wider than values."""
    assert_kept(kept, 5, rows, (192, 128), 1, dtype)


def test_not_a_number_moves_as_any_other() -> None:
    for op in (reference, fused):
        keys, values = torch.zeros(1, 4, 2), torch.zeros(1, 4, 2)
        keys[0, 3, 0], values[0, 3, 1] = torch.nan, -torch.inf
        op.commit_path(keys, values, int32(0, 2), int32(2), int32(1))
        assert keys[0, 2].isnan().tolist() == [True, False] and values[0, 2].tolist() == [0.0, -torch.inf]


@pytest.mark.parametrize("rows_first", [False, True])
def test_caches_beyond_two_to_the_31st(tmp_path: Path, rows_first: bool) -> None:
    """Heads, or rows, lie so far apart that an offset of 32 bits would miss the last: the last stride ends above 2^31."""
    rows, count, past = int32(0, 2), int32(2), torch.tensor([1])
    values = random(2, 2, 4, 3, dtype=BF16)
    expected, got = random(1, 2, 4, 5, dtype=BF16), random(1, 2, 4, 5, dtype=BF16)
    if rows_first:
        got = far_apart(tmp_path, got.transpose(0, 1), 1 << 30).transpose(0, 1)
    else:
        got = far_apart(tmp_path, got, 1 << 31)
    reference.commit_path(expected, values.clone(), rows, count, past)
    fused.commit_path(got, values.clone(), rows, count, past)
    assert torch.equal(got[:, :3], expected[:, :3])


def test_bad_arguments_are_refused_before_a_launch() -> None:
    keys, rows, one = torch.zeros(2, 8, 4), int32(0, 2), int32(1)
    cases = [
        (r"keys of shape \[8, 4\]", (keys[0], keys, rows, one, one)),
        ("values of shape", (keys, keys[:, :7], rows, one, one)),
        ("values of shape", (keys, torch.zeros(2, 4, 8).mT, rows, one, one)),
        ("values are torch.int32", (keys, keys.int(), rows, one, one)),
        ("values are torch.float32 on meta", (keys, keys.to("meta"), rows, one, one)),
        ("rows is int64, not int32", (keys, keys, rows.long(), one, one)),
        ("rows are empty", (keys, keys, rows[:0], one, one)),
        (r"count has shape \[2\], not \[1\]", (keys, keys, rows, rows, one)),
    ]
    for message, arguments in cases:
        for op in (reference, fused):
            with pytest.raises(ValueError, match=f"commit_path: .*{message}"):
                op.commit_path(*arguments)
    with pytest.raises(ValueError, match="more than 128 rows"):
        fused.commit_path(keys, keys, torch.zeros(129, dtype=torch.int32), one, one)


@pytest.mark.parametrize(("past", "rows"), [(3, [1, 3]), (20, [1]), (-4, [1]), (2, [-6, 1]), (6, [0, 3])])
def test_rows_beyond_the_buffer_are_left_alone(past: int, rows: list[int]) -> None:
    """Whatever the arguments say, nothing outside a head's own rows is read or written."""
    whole = torch.arange(3.0 * 8 * 2).view(3, 8, 2)
    before, cache = whole.clone(), whole[1:2]
    path = torch.tensor(rows, dtype=torch.int32), torch.tensor([len(rows)], dtype=torch.int32), torch.tensor([past])
    fused.commit_path(cache, cache.clone(), *path)
    assert torch.equal(whole[0], before[0])
    assert torch.equal(whole[2], before[2])
    assert set(whole[1].flatten().tolist()) <= set(before[1].flatten().tolist())
