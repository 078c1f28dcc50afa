"""Growing candidate trees level by level, for any drafter that maps (state, token) to the next state.

The best `width` of all children stay at each level and the best `beam` of those expand, so that a pool cut at depth d
is the pool that would have been grown with depth d. Legend of shapes: R roots grown side by side, b beam, w width,
N = R*b rows of a level, H state width, V draft vocabulary, D levels, s states of one pool, t temperatures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ecospec_runtime.config import PoolConfig
from ecospec_runtime.pool import Pool

# (level, draft ids [N], states [N, H] that proposed them, ancestors bool [R, b, level * b]) -> states [N, H].
# `ancestors` says which of the expanded nodes so far, level by level, a node may see: its path and itself.
Step = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass
class _Levels:
    """What growing leaves behind: one entry per level, to be turned into pools at the end."""

    draft_ids: list[Tensor]  # [R, w]
    log_probs: list[Tensor]  # [R, w]
    orders: list[Tensor]  # [R, w] parent's place in the level above * w + rank
    states: list[Tensor]  # [R, 1 or b, H]
    distributions: list[Tensor]  # [R, 1 or b, V] log-probabilities at those states


def grow(
    previous_RH: Tensor, states_RH: Tensor, root_tokens: list[int], config: PoolConfig,
    temperatures: tuple[float, ...], logits: Callable[[Tensor], Tensor], step: Step, target_ids: Tensor,
) -> list[Pool]:  # fmt: skip
    """Grow one pool per root from the root's state and the state before it.

    `logits` maps states to draft-vocabulary logits, `step` runs the drafter on one level, `target_ids` [V] translates
    draft ids to target ids.
    """
    roots, vocabulary = states_RH.shape[0], target_ids.shape[0]
    width = min(config.width, vocabulary)
    beam = min(config.beam, width)
    heads = logits(torch.cat((previous_RH, states_RH))).log_softmax(-1).view(2, roots, 1, vocabulary)
    reach, ids = heads[1, :, 0].topk(width)
    first = torch.arange(width, device=ids.device).expand(roots, width)
    levels = _Levels([ids], [reach], [first], [previous_RH[:, None], states_RH[:, None]], [heads[0], heads[1]])
    offsets = torch.arange(0, roots * beam, beam, device=ids.device)[:, None]
    states = states_RH[:, None].expand(-1, beam, -1).flatten(0, 1)
    own = torch.eye(beam, dtype=torch.bool, device=ids.device).expand(roots, -1, -1)
    ancestors = own
    for level in range(1, config.depth):
        states = step(level, ids[:, :beam].flatten(), states, ancestors)
        distribution = logits(states).log_softmax(-1)
        top, top_ids = distribution.topk(width)
        log_probs = top.view(roots, beam * width)
        scores = (reach[:, :beam, None] + top.view(roots, beam, width)).view(roots, beam * width)
        reach, order = (part[:, :width] for part in scores.sort(dim=-1, descending=True, stable=True))
        ids = top_ids.view(roots, beam * width).gather(1, order)
        levels.draft_ids.append(ids)
        levels.log_probs.append(log_probs.gather(1, order))
        levels.orders.append(order)
        levels.states.append(states.view(roots, beam, -1))
        levels.distributions.append(distribution.view(roots, beam, vocabulary))
        if level + 1 < config.depth:
            parents = (order[:, :beam].div(width, rounding_mode="floor") + offsets).flatten()
            states = states.index_select(0, parents)
            seen = ancestors.flatten(0, 1).index_select(0, parents).view(roots, beam, -1)
            ancestors = torch.cat((seen, own), dim=-1)
    return _pools(levels, root_tokens, width, beam, temperatures, target_ids)


def _pools(
    levels: _Levels, root_tokens: list[int], width: int, beam: int, temperatures: tuple[float, ...], target_ids: Tensor
) -> list[Pool]:
    """Turn the recorded levels of R roots into R pools on the host."""
    depth = len(levels.orders)
    log_probs_RsV = torch.cat(levels.distributions, dim=1)
    entropies = _host(-(log_probs_RsV.exp() * log_probs_RsV).sum(-1))
    normalizers = [(log_probs_RsV / t).logsumexp(-1) for t in temperatures]
    normalizers_Rst = _host(torch.stack(normalizers, dim=-1)) if temperatures else None
    tokens = _host(target_ids[torch.cat(levels.draft_ids, dim=1)])
    log_probs = _host(torch.cat(levels.log_probs, dim=1))
    orders = _host(torch.cat(levels.orders, dim=1))
    states = _host(torch.cat(levels.states, dim=1))
    above, ranks = orders // width, orders % width
    depths = np.repeat(np.arange(1, depth + 1), width)
    parents = above + np.maximum(depths - 2, 0) * width
    parents[:, :width] = -1
    rows = above + 2 + np.maximum(depths - 2, 0) * beam
    rows[:, :width] = 1
    empty = np.zeros((0, 0), np.float32)
    return [
        Pool(
            tokens=tokens[r], parents=parents[r], depths=depths, ranks=ranks[r], log_probs=log_probs[r],
            state_rows=rows[r], states=states[r], entropies=entropies[r], root_token=root, temperatures=temperatures,
            log_normalizers=empty if normalizers_Rst is None else normalizers_Rst[r],
        )
        for r, root in enumerate(root_tokens)
    ]  # fmt: skip


def _host(values: Tensor) -> NDArray[np.generic]:
    """Numpy array on the host: int64 stays, every float becomes float32."""
    return (values.float() if values.is_floating_point() else values).cpu().numpy()
