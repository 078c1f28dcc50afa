"""What a drafter hands to selection: the candidate tree of one step, and what is predicted about it.

Host-side numpy, because selection is host-side. Legend of shapes: n nodes, s proposing states, d width of the features,
L MoE layers, E experts, K top-k, t temperatures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

# What the predictor reads beside each node: the drafter's own state that proposed it; or the target's last hidden state, the
# output of its last layer where it chose the root, which root and nodes share.
Features = Literal["drafter_state", "target_hidden"]


@dataclass(frozen=True)
class Pool:
    """The candidate tree of one step. Parents come before children, siblings in falling order of draft probability."""

    tokens: Ints  # [n] target-vocabulary ids
    parents: Ints  # [n] index of the parent node, -1 for a child of the root
    depths: Ints  # [n] 1 for a child of the root
    ranks: Ints  # [n] place among the drafter's proposals of the same parent, 0 first
    log_probs: Floats  # [n] the drafter's log p(token | parent) at temperature 1
    state_rows: Ints  # [n] the state that proposed the node: its parent's own
    # [s, d] row 0: the state that preceded the root; row 1: the root's; then one per expanded node. Or [1, d], what all of
    # them share: see `Features` and `features_of`.
    states: Floats
    entropies: Floats  # [s] nats, entropy of the drafter's distribution at each state
    root_token: int
    temperatures: tuple[float, ...] = ()  # drafter temperatures asked for
    log_normalizers: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    # [s, t] log sum_j exp(log_prob_j / temperature): log p at a temperature is log_prob / temperature - normalizer
    levels: int = 1  # that were expanded for it, and paid; the last may have kept no node

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def expanded(self) -> int:
        """Nodes that were expanded: the states but the root's and the one before it."""
        return len(self.entropies) - 2

    def features_of(self, rows: Ints) -> Floats:
        """What the predictor reads at the given states: rows of `states` `[len(rows), d]`, or the one that all share."""
        return self.states[np.zeros_like(rows) if len(self.states) == 1 else rows]


@dataclass(frozen=True)
class Candidates:
    """A pool with what the acceptance model and the predictor say of it: the input of every policy.

    Expert sets are Python integers used as bit sets over `layers * experts` bits, bit `layer * experts + expert`:
    union is `|`, a marginal count is `(mask & ~covered).bit_count()`.
    """

    pool: Pool
    acceptance: Floats  # [n] probability that the node is accepted, given that its parent was
    reach: Floats  # [n] V(v): product of `acceptance` along the path from the root
    masks: list[int]  # [n] predicted experts of each node; empty if nothing was predicted
    root_mask: int  # predicted experts of the root
    layers: int
    experts: int

    def __len__(self) -> int:
        return len(self.pool)


def path_products(acceptance: Floats, parents: Ints) -> Floats:
    """Product of `acceptance` over each node's path: `[n]`, parents before children."""
    reach = np.empty_like(acceptance)
    for i, parent in enumerate(parents.tolist()):
        reach[i] = acceptance[i] * (reach[parent] if parent >= 0 else 1.0)
    return reach


def pack_masks(routing_NLK: NDArray[np.integer], experts: int) -> list[int]:
    """Turn expert ids `[N, L, K]` into one bit-set integer per row; bit `layer * experts + expert`."""
    rows, layers, _ = routing_NLK.shape
    bits = np.zeros((rows, layers, experts), np.uint8)
    np.put_along_axis(bits, routing_NLK.astype(np.int64), 1, axis=2)
    packed = np.packbits(bits.reshape(rows, layers * experts), axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


def is_closed(chosen: list[int], parents: Ints) -> bool:
    """Whether every chosen node's parent is chosen or the root."""
    members = set(chosen)
    return len(members) == len(chosen) and all(parents[i] < 0 or int(parents[i]) in members for i in chosen)
