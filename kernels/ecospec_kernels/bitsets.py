"""Sets of experts as packed bits: expert e of a layer is bit `e % 32` of int32 word `e // 32`.

int64 words hold the same bytes (little-endian), so a `view` turns one into the other. Bits past the last expert are zero.
Legend of shapes: E experts, W words.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32


def words_for(experts: int) -> int:
    """int32 words that hold so many experts."""
    return -(-experts // WORD)


def pack(members: Tensor) -> Tensor:
    """Bool `[..., E]` -> int32 `[..., W]`."""
    padding = words_for(members.size(-1)) * WORD - members.size(-1)
    bits = torch.nn.functional.pad(members, (0, padding)).unflatten(-1, (-1, WORD))
    return (bits.long() << torch.arange(WORD, device=members.device)).sum(-1).int()  # bit 31 wraps into the sign


def unpack(words: Tensor) -> Tensor:
    """int32 or int64 `[..., W]` -> bool `[..., bits]`."""
    places = torch.arange(words.element_size() * 8, device=words.device, dtype=words.dtype)
    return ((words.unsqueeze(-1) >> places) & 1).bool().flatten(-2)
