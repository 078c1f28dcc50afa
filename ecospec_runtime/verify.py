"""From one pass's logits to the tokens it yields: the walk down the verification set.

At each node the next token is the target's own choice, and the child that carries it, if the set has one, is accepted.
A draft is thus never *tested*; the target's text cannot depend on it. Rows of a pass: 0 is the root, 1.. the chosen nodes.
Where Triton runs and a row's token is its argmax, or that of logits and noise, the walk is the device's, and one transfer
brings it to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ecospec_kernels import dispatch
from ecospec_runtime.sampling import Sampler, log_probability


@dataclass(frozen=True)
class Walk:
    """The outcome of a pass: one more token than accepted nodes."""

    rows: list[int]  # accepted rows of the pass, root first, ascending
    tokens: list[int]  # what the target chose at each of them
    logprobs: list[float]  # raw log-probabilities of `tokens`; empty unless asked for


def children_of(tokens: list[int], parents: list[int]) -> list[dict[int, int]]:
    """For each row of a pass, its children as {token: row}. `parents` are rows; the root has none and is left out."""
    children: list[dict[int, int]] = [{} for _ in range(len(tokens) + 1)]
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        children[parent].setdefault(token, i + 1)
    return children


def follow(
    logits_nV: Tensor, tokens: list[int], parents: list[int], sampler: Sampler, position: int, seen: set[int]
) -> Walk:  # fmt: skip
    """`walk` or, with the same outcome, `device_walk`. `tokens` of the nodes, and the row of each one's parent."""
    logprobs = sampler.config.logprobs
    if sampler.plain and not logprobs and dispatch.runs_triton(logits_nV):
        return device_walk(logits_nV, tokens, parents, sampler, position)
    return walk(logits_nV, children_of(tokens, parents), sampler, position, seen, logprobs)


@torch.inference_mode()
def device_walk(logits_nV: Tensor, tokens: list[int], parents: list[int], sampler: Sampler, position: int) -> Walk:
    """The walk of a `plain` sampler through the ops: the host waits for the device once."""
    positions = [position]
    for parent in parents:
        positions.append(positions[parent] + 1)
    rows_n = torch.tensor([positions, [-1, *tokens], [-1, *parents]], device=logits_nV.device)
    chosen_n = (
        dispatch.argmax_rows(logits_nV) if sampler.greedy else sampler.draws(logits_nV.device)(logits_nV, rows_n[0])
    )
    accepted = dispatch.verify_tree(chosen_n, rows_n[1, 1:], rows_n[2, 1:])
    rows, chosen = torch.stack((accepted.rows, accepted.tokens)).tolist()
    count = rows.index(-1) if rows[-1] < 0 else len(rows)
    return Walk(rows[:count], chosen[:count], [])


def walk(
    logits_nV: Tensor, children: list[dict[int, int]], sampler: Sampler, position: int, seen: set[int], logprobs: bool
) -> Walk:
    """Walk from the root. `position` is the index of the first token chosen here, `seen` the ids before it.

    `seen` grows by the chosen tokens.
    """
    argmax = logits_nV.argmax(-1).tolist() if sampler.plain_argmax else None
    rows, row = [0], 0
    tokens: list[int] = []
    values: list[float] = []
    while True:
        logits_V = logits_nV[row].numpy(force=True) if argmax is None or logprobs else None
        if argmax is not None:
            token = argmax[row]
        else:
            assert logits_V is not None
            token = sampler.choose(logits_V, position + len(tokens), seen)
            seen.add(token)
        tokens.append(token)
        if logprobs:
            assert logits_V is not None
            values.append(log_probability(logits_V, token))
        following = children[row].get(token)
        if following is None:
            return Walk(rows, tokens, values)
        row = following
        rows.append(row)


def tree_mask(parents: list[int], past: int) -> Tensor:
    """Bool `[1 + n, past + 1 + n]`: each row sees the past, the root and its own ancestors. `parents` are rows."""
    n = len(parents) + 1
    mask = np.ones((n, past + n), np.bool_)
    own = mask[:, past:]
    own[:] = np.eye(n, dtype=np.bool_)
    for row, parent in enumerate(parents, start=1):
        own[row, : parent + 1] = own[parent, : parent + 1]
    return torch.from_numpy(mask)
