"""`draft_tree`: the candidate tree below one root, grown level by level on a draft head's own states.

The best `width` of all children stay at each level and the best `beam` of those expand, so that a tree cut at a depth, or at
a reach, is the tree that would have been grown to there. Legend of shapes: b nodes that a level expands, w width, n nodes, s
states, H state width, t temperatures, G key-value heads, P committed rows, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ecospec_kernels.draft_layer.reference import LayerWeights, Rope
from ecospec_kernels.draft_layer.reference import draft_layer as reference_layer
from ecospec_kernels.draft_propose.reference import Proposals
from ecospec_kernels.draft_propose.reference import draft_propose as reference_propose

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
# (level, states [n, H]) -> their w best draft tokens and statistics. Level 0: the state before the root's, and the root's.
Propose = Callable[[int, Tensor], Proposals]
# (level, draft ids [b], states [b, H] that proposed them, seen bool [b, all expanded so far]) -> states [b, H].
# `seen`: which of the nodes expanded so far, these last, a node may look at: its path and itself.
Step = Callable[[int, Ints, Tensor, NDArray[np.bool_]], Tensor]


class Shape(NamedTuple):
    """Size of a tree; nodes whose reach under the drafter's probability is below `min_reach` are left out, not expanded."""

    depth: int
    beam: int
    width: int
    min_reach: float = 0.0


class Tree(NamedTuple):
    """A candidate tree on the host. Parents come before children, siblings in falling order of probability."""

    tokens: Ints  # [n] target-vocabulary ids
    parents: Ints  # [n] -1 for a child of the root
    depths: Ints  # [n] from 1
    ranks: Ints  # [n] place among the proposals of the same parent
    log_probs: Floats  # [n] given the parent
    state_rows: Ints  # [n] row of `states` that proposed the node
    states: Floats  # [s, H] the state before the root's, the root's, then one per expanded node
    entropies: Floats  # [s] nats
    log_normalizers: Floats  # [s, t], see `Proposals`
    levels: int  # that were grown; the last may have kept no node


@dataclass(frozen=True)
class TreeWeights:
    """What a head drafts with; `embedding` maps target ids to rows, `target_ids` draft ids to target ids."""

    layer: LayerWeights
    final_norm_H: Tensor | None  # before the output matrix; None: states are normed already
    lm_head_VH: Tensor
    embedding: Tensor  # [target vocabulary, H]
    target_ids: Ints  # [V]


def grow(
    before_H: Tensor, root_H: Tensor, shape: Shape, propose: Propose, step: Step, target_ids: Ints
) -> Tree:  # fmt: skip
    """The tree of any drafter that maps (state, token) to the next state, from the root's state and the one before it."""
    states = [torch.stack((before_H, root_H))]
    proposals = [propose(0, states[0])]
    log_probs = reach = _host(proposals[0].log_probs)[1]
    ids = _host(proposals[0].ids)[1]
    width = len(ids)
    beam = min(shape.beam, width)
    orders = np.empty((shape.depth, width), np.int64)  # place of the parent in the level above * width + rank
    all_ids, all_log_probs = np.empty_like(orders), np.empty((shape.depth, width), np.float32)
    all_reach = np.empty_like(all_log_probs)
    orders[0], all_ids[0], all_log_probs[0], all_reach[0] = np.arange(width), ids, log_probs, reach
    least = log_reach(shape.min_reach)
    firsts = [1]  # of each level: the first row of `states` that proposed it
    paths, proposing = np.zeros((beam, 0), bool), root_H.expand(beam, -1)
    for level in range(1, shape.depth):
        expanding = int((reach[:beam] >= least).sum()) if shape.min_reach else beam
        if not expanding:
            break
        seen = np.concatenate((paths[:expanding], np.eye(expanding, dtype=bool)), axis=1)
        new = step(level, ids[:expanding], proposing[:expanding], seen)
        found = propose(level, new)
        firsts.append(sum(map(len, states)))
        states.append(new)
        proposals.append(found)
        offered = _host(found.log_probs)
        scores = (reach[:expanding, None] + offered).ravel()
        order = np.argsort(-scores, kind="stable")[:width]
        reach, ids = scores[order], _host(found.ids).ravel()[order]
        orders[level], all_ids[level], all_log_probs[level] = order, ids, offered.ravel()[order]
        all_reach[level] = reach
        parents = order[:beam] // width
        paths, proposing = seen[parents], new.index_select(0, torch.from_numpy(parents).to(new.device))
    levels = len(firsts)
    above, ranks = orders[:levels] // width, orders[:levels] % width
    depths = np.arange(1, levels + 1)[:, None] + np.zeros_like(above)
    parents, rows = above + (depths - 2) * width, above + np.array(firsts)[:, None]
    parents[0], rows[0] = -1, 1
    kept = all_reach[:levels] >= least if shape.min_reach else np.ones_like(above, bool)
    for level in range(1, levels):
        kept[level] &= kept[level - 1][above[level]]  # reach falls along a path, but for NaN
    places = np.cumsum(kept.ravel()) - 1
    parents = np.where(parents < 0, -1, places[parents])
    return Tree(
        target_ids[all_ids[:levels][kept]], parents[kept], depths[kept], ranks[kept], all_log_probs[:levels][kept],
        rows[kept], _joined(states), _joined([p.entropies for p in proposals]),
        _joined([p.log_normalizers for p in proposals]), levels,
    )  # fmt: skip


def draft_tree(
    w: TreeWeights, before_H: Tensor, root_H: Tensor, rope: Rope, keys_GPD: Tensor, values_GPD: Tensor, shape: Shape,
    temperatures: tuple[float, ...], noise_dV: Tensor | None = None,
) -> Tree:  # fmt: skip
    """The tree below a root that `keys_GPD` and `values_GPD` end with. `rope`: rotations of the levels from the second on.

    `noise_dV`, float32 `[1 + depth, V]`: what is added to the logits of the state before the root's, and of each level.
    """
    recent = keys_GPD.new_empty(2, keys_GPD.shape[0], shape.beam * shape.depth, keys_GPD.shape[2])

    def propose(level: int, states: Tensor) -> Proposals:
        width, noise = min(shape.width, len(w.target_ids)), noise_of(level, noise_dV)
        return reference_propose(states, w.final_norm_H, w.layer.eps, w.lm_head_VH, width, temperatures, noise)

    def step(level: int, ids_b: Ints, h_bH: Tensor, seen: NDArray[np.bool_]) -> Tensor:
        tokens = torch.from_numpy(w.target_ids[ids_b]).to(h_bH.device)
        embed, at = F.embedding(tokens, w.embedding).to(h_bH.dtype), slice(level - 1, level)
        keys, values = recent[:, :, : seen.shape[1]]
        mask = torch.from_numpy(seen).to(h_bH.device)
        return reference_layer(
            w.layer, embed, h_bH, (rope[0][at], rope[1][at]), keys_GPD, values_GPD, keys, values, mask
        )

    return grow(before_H, root_H, shape, propose, step, w.target_ids)


def noise_of(level: int, noise_dV: Tensor | None) -> Tensor | None:
    """The noise that a level's proposals take, see `Propose`: `[V]`, or `[2, V]` for level 0."""
    return noise_dV if noise_dV is None else noise_dV[1 + level] if level else noise_dV[:2]


def log_reach(min_reach: float) -> np.float32:
    """Least log reach of a tree's nodes."""
    return np.log(np.float32(min_reach)) if min_reach else np.float32(-np.inf)


def _host(values: Tensor) -> NDArray[np.generic]:
    return values.cpu().numpy()


def _joined(parts: list[Tensor]) -> Floats:
    """Concatenated float32 copy on the host."""
    return torch.cat(parts).float().cpu().numpy()
