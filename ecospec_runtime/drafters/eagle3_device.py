"""An EAGLE-3 head that drafts within a `DeviceStep`: trees of fixed size, state and rows in buffers that never move.

The tree is `draft_tree`'s (no least reach): every level keeps `width` nodes and expands `beam` of them, so that
the pool always has `depth * width` nodes. Reach is the product of the drafter's probabilities (acceptance `raw`).

Legend of shapes: C rows of the buffers, S rows of room behind them for what is not committed, b nodes that a level expands,
w width, H hidden, G key-value heads, D head dim, R rows of a pass, N nodes, L MoE layers, W words of a set of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ecospec_kernels.draft_layer.reference import draft_layer, linear
from ecospec_kernels.draft_propose.reference import Proposals, draft_propose
from ecospec_kernels.draft_rows.reference import normed
from ecospec_kernels.draft_tree.reference import noise_of
from ecospec_kernels.verify_tree.reference import Accepted
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.device_step import BUCKETS, DevicePool, DeviceState

if TYPE_CHECKING:
    from ecospec_runtime.drafters.eagle3 import Eagle3Drafter
    from ecospec_runtime.sampling import Draws
    from ecospec_runtime.sequence import Prefilled


class Drafted(NamedTuple):
    """A tree on the device; see `Pool` for the fields."""

    tokens: Tensor  # [N] int64
    parents: Tensor  # [N] int64
    depths: Tensor  # [N] int64
    ranks: Tensor  # [N] int64
    log_probs: Tensor  # [N] float32
    reach: Tensor  # [N] float32, log of the product along the path
    state_rows: Tensor  # [N] int64 row of `states` that proposed the node
    states: Tensor  # [2 + (depth - 1) * b, H] that before the root's, the root's, then one per expanded node
    entropies: Tensor  # [2 + (depth - 1) * b] float32


# (root [1], tree) -> predicted experts of nodes [N, L, W] and root [L, W], int32: `DevicePredictor`.
Predict = Callable[[Tensor, Drafted], tuple[Tensor, Tensor]]


class DeviceEagle3:
    """The `Pools` of a head. One sequence; buffers for `state.cache.capacity` rows."""

    def __init__(
        self, drafter: Eagle3Drafter, read: Prefilled, state: DeviceState, shape: PoolConfig,
        predict: Predict | None = None, draws: Draws | None = None,
    ):  # fmt: skip
        """After the prompt of `state`, which the head reads here. Without `predict` no node needs an expert.

        `draws`: the step's own, whose tokens the tree then guesses. ValueError for a shape whose trees vary in size.
        """
        if shape.min_reach:
            raise ValueError(f"min_reach {shape.min_reach} makes trees of any size; a device grows trees of one size")
        self.aux_layers, self.predict, self.depth = drafter.aux_layers, predict, shape.depth
        self.rows, self.tree, self.draws = drafter._rows, drafter._tree, draws
        self.target_ids = torch.from_numpy(self.tree.target_ids).to(state.root.device)
        self.width = min(shape.width, len(self.target_ids))
        self.beam = min(shape.beam, self.width)
        self.capacity = capacity = state.cache.capacity
        sequence = drafter.start()
        if len(read.prompt) > 1:
            drafter.extend(sequence, read.prompt[1:], torch.cat(read.features))
        room = capacity + max(BUCKETS[-1], (self.depth - 1) * self.beam)
        (groups, _, dim), past = sequence.keys.shape, sequence.length
        dtype, device = sequence.keys.dtype, sequence.keys.device
        self.keys, self.values = (torch.zeros(groups, room, dim, dtype=dtype, device=device) for _ in range(2))
        self.keys[:, :past], self.values[:, :past] = sequence.keys[:, :past], sequence.values[:, :past]
        self.states = torch.zeros(2, sequence.states.shape[1], dtype=dtype, device=device)  # before the root's; its own
        if known := min(past, 2):
            self.states[2 - known :] = sequence.states[past - known : past]
        self.cos, self.sin = (table.clone() for table in drafter._rotation(0, capacity + self.depth))
        self.committed = torch.arange(capacity, device=state.root.device)
        state.registers.append(self.states)

    def propose(self, state: DeviceState) -> DevicePool:
        """See `Pools`."""
        tree = self.grow(state.past)
        if self.predict is None:
            masks = torch.zeros(len(tree.tokens), 1, 1, dtype=torch.int32, device=state.past.device)
            root_mask = masks[0]
        else:
            masks, root_mask = self.predict(state.root, tree)
        return DevicePool(tree.tokens, tree.parents, tree.reach.exp(), masks, root_mask)

    def grow(self, past: Tensor) -> Drafted:
        """The tree below the root, which is the last of `past` rows; see `draft_tree` for the rule."""
        width, beam, device = self.width, self.beam, past.device
        noise = None
        if self.draws is not None:  # of the root's own token, then of each level
            noise = self.draws.noise(past + torch.arange(1 + self.depth, device=device), self.target_ids)
        found = self._proposals(self.states, noise_of(0, noise))
        ids, reach = found.ids[1], found.log_probs[1]
        ones = torch.ones_like(ids)
        levels = [(ids, -ones, ones, torch.arange(width, device=device), reach, reach, ones)]
        states, entropies = [self.states], [found.entropies]
        proposing = self.states[1:].expand(beam, -1)
        paths = torch.zeros(beam, 0, dtype=torch.bool, device=device)
        for level in range(1, self.depth):
            seen = torch.cat((paths, torch.eye(beam, dtype=torch.bool, device=device)), dim=1)
            new = self._rows_of(self.target_ids[ids[:beam]], proposing, past, past + level - 1, seen)
            found = self._proposals(new, noise_of(level, noise))
            order = torch.sort(-(reach[:beam, None] + found.log_probs).flatten(), stable=True).indices[:width]
            above, log_probs = order // width, found.log_probs.flatten()[order]
            ids, reach = found.ids.flatten()[order], reach[above] + log_probs
            parents, rows = above + (level - 1) * width, above + 2 + (level - 1) * beam
            levels.append((ids, parents, ones * (level + 1), order % width, log_probs, reach, rows))
            states.append(new)
            entropies.append(found.entropies)
            paths, proposing = seen[above[:beam]], new[above[:beam]]
        ids, parents, depths, ranks, log_probs, reach, rows = (torch.cat(parts) for parts in zip(*levels, strict=True))
        tokens = self.target_ids[ids]
        return Drafted(tokens, parents, depths, ranks, log_probs, reach, rows, torch.cat(states), torch.cat(entropies))

    def extend(self, state: DeviceState, accepted: Accepted, features_RF: Tensor | None) -> None:
        """See `Pools`. Every row of the pass gets a row; those behind the accepted ones are written over later."""
        assert features_RF is not None
        features = features_RF[accepted.rows.clamp(min=0)].to(self.states.dtype)
        h = linear(normed(features, self.rows.feature_norms, self.rows.layer), self.rows.fc_HF)
        count = len(features)
        row = torch.arange(count, device=h.device)
        tokens = accepted.tokens.clamp(min=0)
        states = self._rows_of(tokens, h, state.past, state.past + row, row <= row[:, None])
        for buffer in (self.keys, self.values):
            buffer.index_copy_(1, state.past + row, buffer[:, self.capacity : self.capacity + count].clone())
        last = accepted.number - 1 + torch.arange(2, device=h.device)
        self.states.copy_(torch.cat((self.states[1:], states))[last])

    def _proposals(self, states: Tensor, noise: Tensor | None) -> Proposals:
        tree = self.tree
        return draft_propose(states, tree.final_norm_H, tree.layer.eps, tree.lm_head_VH, self.width, (), noise)

    def _rows_of(self, tokens: Tensor, h_nH: Tensor, past: Tensor, positions: Tensor, seen_nr: Tensor) -> Tensor:
        """States of rows behind the buffers' committed ones; `seen` as in `draft_layer`, of the r rows there."""
        embed = F.embedding(tokens, self.rows.embedding).to(h_nH.dtype)
        rope = self.cos[positions], self.sin[positions]
        seen = torch.cat(((self.committed < past).expand(len(seen_nr), -1), seen_nr), dim=1)
        recent = slice(0, self.capacity + seen_nr.shape[1])
        keys, values = self.keys[:, recent], self.values[:, recent]
        return draft_layer(self.rows.layer, embed, h_nH, rope, keys[:, :0], values[:, :0], keys, values, seen)
