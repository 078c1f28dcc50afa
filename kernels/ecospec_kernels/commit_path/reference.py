"""`commit_path`: keep the accepted rows of a pass in a key-value cache, in place, and drop the rest.

The pass's rows lie behind `past` committed ones. Row past + rows[i] moves to past + i for i < count; the cache then holds
past + count rows, and what lies behind them is rubbish. What `TargetCache.keep` in `ecospec_runtime/cache.py` does.

Legend of shapes: H key-value heads, C rows of the buffer, D dimension of a key, E of a value, m entries of `rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ecospec_kernels.checks import FLOATS, IDS, first, refuse, wrong


def _wrong_cache(name: str, t: Tensor, like: Tensor) -> str | None:
    """How a cache differs from [heads, rows, dim] whose last dimension is dense."""
    if t.dim() != 3 or not t.numel() or t.stride(2) != 1 or t.shape[:2] != like.shape[:2]:
        return f"{name} of shape {list(t.shape)} and strides {t.stride()} are not [heads, rows, dim] with dense rows, as many as keys"
    if t.dtype not in FLOATS or t.device != like.device:
        return f"{name} are {t.dtype} on {t.device}; they must be float32, bfloat16 or float16 on {like.device}"
    return None


def invalid(keys_HCD: Tensor, values_HCE: Tensor, rows_m: Tensor, count: Tensor, past: Tensor) -> str | None:
    """What is wrong with the arguments."""
    return first(
        _wrong_cache("keys", keys_HCD, keys_HCD),
        _wrong_cache("values", values_HCE, keys_HCD),
        wrong("rows", rows_m, (None,), (torch.int32,), keys_HCD),
        wrong("count", count, (1,), (torch.int32,), keys_HCD),
        wrong("past", past, (1,), IDS, keys_HCD),
        None if rows_m.numel() else "rows are empty",
    )


def commit_path(keys_HCD: Tensor, values_HCE: Tensor, rows_m: Tensor, count: Tensor, past: Tensor) -> Tensor:
    """Move the rows in both caches; returns the new number of committed rows, [1] of past's dtype.

    `rows` rise from 0 or more, as `verify_tree` gives them; entries from `count` on are not looked at.
    """
    refuse("commit_path", invalid(keys_HCD, values_HCE, rows_m, count, past))
    place_m = torch.arange(len(rows_m), device=rows_m.device)
    source_m = past + torch.where(place_m < count, rows_m, 0)
    target_m = past + torch.where(place_m < count, place_m, 0)  # what is not accepted: the first row again
    source_m = torch.where(place_m < count, source_m, source_m[:1])
    for cache in (keys_HCD, values_HCE):
        cache.index_copy_(1, target_m, cache.index_select(1, source_m))
    return past + count.to(past.dtype)
