"""What the ops check before a launch. Each op's `reference.invalid` says what is wrong with its arguments, or None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

IDS = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def first(*problems: str | None) -> str | None:
    """The first problem, if any."""
    return next((problem for problem in problems if problem), None)


def not_tensors(given: Mapping[str, Any]) -> str | None:
    """Which of these, by name, is no tensor, if any."""
    for name, t in given.items():
        if not isinstance(t, Tensor):
            return f"{name} is {type(t).__name__}, not a tensor"
    return None


def wrong(
    name: str, t: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], like: Tensor
) -> str | None:
    """How `t` differs from a contiguous tensor of this shape (None: any size) and one of these dtypes on the device of `like`."""
    if t.dim() != len(shape) or any(want not in (None, size) for want, size in zip(shape, t.shape, strict=True)):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        return f"{name} has shape {list(t.shape)}, not [{wanted}]"
    if t.dtype not in dtypes:
        return f"{name} is {_short(t.dtype)}, not {' or '.join(map(_short, dtypes))}"
    if t.device != like.device:
        return f"{name} lies on {t.device}, the first argument on {like.device}"
    return None if t.is_contiguous() else f"{name} is not contiguous"


def refuse(op: str, problem: str | None) -> None:
    """ValueError if there is a problem."""
    if problem:
        raise ValueError(f"{op}: {problem}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
