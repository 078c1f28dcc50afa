"""`verify_tree`: from one pass's next tokens to the path that they accept.

The walk of `ecospec_runtime/verify.py`: at each row, root first, the target's next token is given; the first child that
carries it is accepted, and the walk goes on there. A child's row is above its parent's.

Legend of shapes: n nodes, R = n + 1 rows of the pass (the root first).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ecospec_kernels.checks import IDS, first, refuse, wrong


class Accepted(NamedTuple):
    """Outputs of fixed size; entries from `number` on are -1."""

    rows: Tensor  # [R] int32 accepted rows, ascending, the root's 0 first
    tokens: Tensor  # [R] int64 the target's token after each of them
    number: Tensor  # [1] int32 accepted rows, the root included: how many tokens the pass yields
    root: Tensor  # [1] int64 the last of `tokens`: the next step's root


def invalid(next_R: Tensor, tokens_n: Tensor, parents_n: Tensor) -> str | None:
    """What is wrong with the arguments."""
    if next_R.dim() != 1 or next_R.size(0) < 1:
        return f"next tokens have shape {list(next_R.shape)}, not [1 + nodes]"
    n = next_R.size(0) - 1
    return first(
        wrong("next tokens", next_R, (n + 1,), (torch.int64,), next_R),
        wrong("tokens", tokens_n, (n,), (torch.int64,), next_R),
        wrong("parents", parents_n, (n,), IDS, next_R),
    )


def verify_tree(next_R: Tensor, tokens_n: Tensor, parents_n: Tensor) -> Accepted:
    """Walk from the root. Node i is row i + 1; `parents`: rows, negative for a node of padding, which is never accepted.

    So is a node whose parent does not come before it.
    """
    refuse("verify_tree", invalid(next_R, tokens_n, parents_n))
    n = len(tokens_n)
    parents_n = torch.where(parents_n > torch.arange(n, device=next_R.device), -1, parents_n)
    row = torch.zeros(1, dtype=torch.int64, device=next_R.device)
    accepted_R = torch.zeros(n + 1, dtype=torch.bool, device=next_R.device).index_fill(0, row, True)
    for _ in range(n):
        match_n = (parents_n == row) & (tokens_n == next_R[row])
        child_n = match_n & (match_n.cumsum(0) == 1)
        accepted_R[1:] |= child_n
        row = torch.where(match_n.any(), 1 + child_n.int().argmax(), row)
    count = accepted_R.sum(0, keepdim=True)
    order = torch.where(accepted_R, accepted_R.cumsum(0) - 1, n + 1)
    blank = torch.full((n + 2,), -1, device=next_R.device)
    rows = blank.scatter(0, order, torch.arange(n + 1, device=next_R.device))
    return Accepted(rows[:-1].int(), blank.scatter(0, order, next_R)[:-1], count.int(), next_R[row])
