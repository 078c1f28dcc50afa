"""Triton kernels of `verify_tree`: see `reference.py`. One program walks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ecospec_kernels.launch import Configuration, on_device, refuse_launch, smallest
from ecospec_kernels.verify_tree.reference import Accepted, invalid

ROWS = (16, 64, 128, 1024)  # of a pass: sizes that are compiled
MAX_NODES = ROWS[-1] - 1


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["tokens", "parents"])
def walk_kernel(  # type: ignore[no-untyped-def]
    following, tokens, parents, rows, out_tokens, count, root, n, N: tl.constexpr
):  # fmt: skip
    """N: a power of two above n."""
    node = tl.arange(0, N)
    token = tl.load(tokens + node, mask=node < n, other=-1)
    parent = tl.load(parents + node, mask=node < n, other=-1)
    parent = tl.where((parent < 0) | (parent > node), -1, parent).to(tl.int32)  # in order, so that the walk ends
    row, length, last = 0, 0, tl.load(following)
    while row >= 0:
        last = tl.load(following + row)
        tl.store(rows + length, row)
        tl.store(out_tokens + length, last)
        length += 1
        child = tl.min(tl.where((parent == row) & (token == last), node, N), 0)
        row = tl.where(child < N, child + 1, -1)
    tl.store(count, length)
    tl.store(root, last)
    blank = (node >= length) & (node <= n)
    tl.store(rows + node, -1, mask=blank)
    tl.store(out_tokens + node, -1, mask=blank)


def warps(rows: int) -> int:
    """For so many rows of a pass: one, unless it would spill."""
    return 1 if rows <= 128 else 4


def unsupported(next_R: Tensor, tokens_n: Tensor, parents_n: Tensor) -> str | None:
    """Why the walk does not take these arguments."""
    problem = invalid(next_R, tokens_n, parents_n)
    return problem or (f"more than {MAX_NODES} nodes" if len(tokens_n) > MAX_NODES else None)


def verify_tree(next_R: Tensor, tokens_n: Tensor, parents_n: Tensor) -> Accepted:
    """Same contract as the reference."""
    refuse_launch("verify_tree", unsupported(next_R, tokens_n, parents_n), next_R)
    n, device = len(tokens_n), next_R.device
    size = smallest(n + 1, ROWS)
    rows, count = (torch.empty(size, dtype=torch.int32, device=device) for size in (n + 1, 1))
    tokens, root = (torch.empty(size, dtype=torch.int64, device=device) for size in (n + 1, 1))
    with on_device(next_R):
        walk_kernel[(1,)](
            next_R, tokens_n, parents_n, rows, tokens, count, root, n, N=size, num_warps=warps(size)
        )  # fmt: skip
    return Accepted(rows, tokens, count, root)


def configurations(backend: str) -> list[Configuration]:
    """Every size of pass, and parents of either type."""
    types = {"following": "*i64", "tokens": "*i64", "rows": "*i32", "out_tokens": "*i64",
             "count": "*i32", "root": "*i64", "n": "i32"}  # fmt: skip
    return [
        Configuration(f"verify_tree {n - 1} nodes {ids}", walk_kernel, types | {"parents": f"*{ids}"}, {"N": n}, warps(n))
        for n in ROWS for ids in ("i32", "i64")
    ]  # fmt: skip
