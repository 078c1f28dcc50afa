"""Growing candidate trees level by level, for any drafter that maps (state, token) to the next state.

The best `width` of all children stay at each level and the best `beam` of those expand, so that a pool cut at depth d, or
at a reach, is the pool that would have been grown to there. Choosing is host-side. Legend of shapes: b beam, w width, H state
width, s states of the pool, t temperatures.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ecospec_kernels.draft_propose.reference import Proposals
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.pool import Floats, Ints, Pool

Propose = Callable[[Tensor], Proposals]  # states [n, H] -> their w best draft tokens and statistics
# (level, draft ids [b], states [b, H] that proposed them, seen bool [b, level * b]) -> states [b, H].
# `seen`: which of the nodes expanded so far, level by level, a node may look at: its path and itself.
Step = Callable[[int, Ints, Tensor, NDArray[np.bool_]], Tensor]


def grow(
    before_H: Tensor, root_H: Tensor, root_token: int, config: PoolConfig, temperatures: tuple[float, ...],
    propose: Propose, step: Step, target_ids: Ints,
) -> Pool:  # fmt: skip
    """The pool below a root from the root's state and the state before it; `target_ids` translates draft ids."""
    states = [torch.stack((before_H, root_H))]
    first = propose(states[0])
    proposals = [first]
    log_probs = reach = _host(first.log_probs)[1]
    ids = _host(first.ids)[1]
    width = len(ids)
    beam = min(config.beam, width)
    orders = np.empty((config.depth, width), np.int64)  # place of the parent in the level above * width + rank
    all_ids, all_log_probs = np.empty_like(orders), np.empty((config.depth, width), np.float32)
    all_reach = np.empty_like(all_log_probs)
    orders[0], all_ids[0], all_log_probs[0], all_reach[0] = np.arange(width), ids, log_probs, reach
    least = np.log(np.float32(config.min_reach)) if config.min_reach else -np.inf
    levels = 1
    own = seen = np.eye(beam, dtype=bool)
    proposing = root_H.expand(beam, -1)
    for level in range(1, config.depth):
        if config.min_reach and not reach[0] >= least:
            break
        new = step(level, ids[:beam], proposing, seen)
        found = propose(new)
        states.append(new)
        proposals.append(found)
        offered = _host(found.log_probs)
        scores = (reach[:beam, None] + offered).ravel()
        order = np.argsort(-scores, kind="stable")[:width]
        reach, ids = scores[order], _host(found.ids).ravel()[order]
        orders[level], all_ids[level], all_log_probs[level] = order, ids, offered.ravel()[order]
        all_reach[level], levels = reach, level + 1
        parents = order[:beam] // width
        seen = np.concatenate((seen[parents], own), axis=1)
        proposing = new.index_select(0, torch.from_numpy(parents).to(new.device))
    above, ranks = orders[:levels] // width, orders[:levels] % width
    depths = np.arange(1, levels + 1)[:, None] + np.zeros_like(above)
    parents, rows = above + (depths - 2) * width, above + 2 + (depths - 2) * beam
    parents[0], rows[0] = -1, 1
    kept = all_reach[:levels] >= least if config.min_reach else np.ones_like(above, bool)
    for level in range(1, levels):
        kept[level] &= kept[level - 1][above[level]]  # reach falls along a path, but for NaN
    places = np.cumsum(kept.ravel()) - 1
    parents = np.where(parents < 0, -1, places[parents])
    return Pool(
        tokens=target_ids[all_ids[:levels][kept]], parents=parents[kept], depths=depths[kept], ranks=ranks[kept],
        log_probs=all_log_probs[:levels][kept], state_rows=rows[kept], states=_joined(states),
        entropies=_joined([p.entropies for p in proposals]), root_token=root_token, temperatures=temperatures,
        levels=levels, log_normalizers=_joined([p.log_normalizers for p in proposals]) if temperatures else np.zeros((0, 0), np.float32),
    )  # fmt: skip


def _host(values: Tensor) -> NDArray[np.generic]:
    return values.cpu().numpy()


def _joined(parts: list[Tensor]) -> Floats:
    """Concatenated float32 copy on the host."""
    return torch.cat(parts).float().cpu().numpy()
