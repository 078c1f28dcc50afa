"""What `predict_pool` reads of a candidate tree. Numpy only: `ecospec_runtime.acceptance` reads the same, and commands that show
their settings import it.

Legend of shapes: N rows (root and nodes), n = N - 1 nodes, s states, d width of a state.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
SCALARS = 4  # of a row: log p, rank, depth, entropy
SCALAR_UNIT = 4.0  # divisor that brings them near unit size
LOG_P_FLOOR = -20.0  # nats; a drafter may report -inf for a token it rules out


class Tree(Protocol):
    """What the network reads of a candidate tree, such as `ecospec_runtime.pool.Pool`."""

    @property
    def parents(self) -> NDArray[np.int64]:
        """[n], -1 for a child of the root."""

    @property
    def state_rows(self) -> NDArray[np.int64]:
        """[n], the state that proposed the node."""

    @property
    def log_probs(self) -> NDArray[np.float32]:
        """[n]"""

    @property
    def ranks(self) -> NDArray[np.int64]:
        """[n]"""

    @property
    def depths(self) -> NDArray[np.int64]:
        """[n]"""

    @property
    def states(self) -> NDArray[np.float32]:
        """[s, d], row 0 before the root; or [1, d], which all rows share."""

    @property
    def entropies(self) -> NDArray[np.float32]:
        """[s]"""


def scalars_of(tree: Tree) -> Floats:
    """log p, rank, depth and entropy of every row [N, 4]; what is not finite becomes 0, or LOG_P_FLOOR."""
    n = len(tree.parents)
    out = np.zeros((n + 1, SCALARS), np.float32)
    out[1:, 0], out[1:, 1], out[1:, 2] = tree.log_probs, tree.ranks, tree.depths
    out[0, 3] = tree.entropies[0] if len(tree.entropies) else 0.0
    out[1:, 3] = tree.entropies[tree.state_rows]
    return clean_scalars(out)


def clean_scalars(scalars_N4: Floats) -> Floats:
    """Make scalars finite, in place: see `scalars_of`."""
    if not np.isfinite(scalars_N4).all():
        np.nan_to_num(scalars_N4, copy=False, nan=0.0, posinf=0.0, neginf=LOG_P_FLOOR)
    np.maximum(scalars_N4[:, 0], LOG_P_FLOOR, out=scalars_N4[:, 0])
    return scalars_N4
