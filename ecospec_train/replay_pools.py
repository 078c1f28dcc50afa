"""The pools of packed rows as drafting in another shape would have given them, ready for selection.

Legend: R rows, N their recorded nodes, M those that are kept, n of these in one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ecospec_runtime.acceptance import AcceptanceKind, acceptance
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.pool import Candidates, Floats, Ints, Pool
from ecospec_train.replay_rows import Packed, PackedShard, ReplayRows, along_paths

NO_STATES = np.zeros((0, 0), np.float32)
NO_ENTROPIES = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Cut:
    """Which recorded nodes drafting in some shape would have given, and what it would have paid for."""

    nodes: Ints  # [M] places among the recorded nodes, ascending
    owners: Ints  # [M] their rows
    starts: Ints  # [R + 1] each row's first node among the M
    levels: Ints  # [R] that would have been expanded
    expanded: Ints  # [R] nodes that would have been expanded

    @classmethod
    def of(cls, firsts: Ints, depths: Ints, log_reach: Floats, shape: PoolConfig) -> Cut:
        """Cut pools of nodes with these depths and reaches (see `least_log_reach`) `[N]`; `firsts` `[R + 1]` says where each
        row's begin.

        `PoolConfig` says what is kept. A level is paid for while the one above it keeps a node.
        """
        within = depths <= shape.depth
        if shape.min_reach:
            within &= log_reach >= np.log(np.float32(shape.min_reach))
        nodes = np.flatnonzero(within)
        count = len(firsts) - 1
        owners = np.repeat(np.arange(count), np.diff(firsts))[nodes]
        starts = np.concatenate(([0], np.cumsum(np.bincount(owners, minlength=count))))
        places = owners * (shape.depth + 1) + depths[nodes]
        sizes = np.bincount(places, minlength=count * (shape.depth + 1)).reshape(count, -1)  # [R, depth + 1]
        deepest = np.count_nonzero(sizes[:, 1:], axis=1)
        levels = np.where(deepest > 0, np.minimum(deepest + 1, shape.depth), 1)
        expanded = np.minimum(sizes[:, 1 : shape.depth], shape.beam).sum(1)
        return cls(nodes, owners, starts, levels, expanded)


class CutPools:
    """Cut pools of consecutive rows of a shard, under one kind of acceptance. A row's nodes count from 0 in its cut pool."""

    def __init__(
        self, shard: PackedShard, first: int, last: int, rows: ReplayRows, shape: PoolConfig, kind: AcceptanceKind
    ):
        """Rows `first` to `last` - 1 of `shard`; they count from 0 in here. `rows` has the acceptance model."""
        table = shard.rows()[first : last + 1]
        self.contexts: list[int] = table["context"].tolist()
        self._firsts: Ints = table["first"] - table["first"][0]
        recorded = shard.nodes()[table["first"][0] : table["first"][-1]]
        self.cut = Cut.of(self._firsts, recorded["depth"], recorded["log_reach"], shape)
        self._nodes = recorded[self.cut.nodes]
        self._shard, self._verified = shard, shard.verified()
        self._roots: list[int] = (table["first"] + np.arange(first, first + len(table))).tolist()
        self._starts: list[int] = self.cut.starts.tolist()
        self.levels: list[int] = self.cut.levels.tolist()
        self.expanded: list[int] = self.cut.expanded.tolist()
        self._parents = self._parents_within()
        self._acceptance, self._reach = self._accepted(rows, kind, len(self._nodes) < len(recorded))

    def size(self, row: int) -> int:
        """Nodes of a row's cut pool."""
        return self._starts[row + 1] - self._starts[row]

    def candidates(self, row: int, masks: str | None) -> Candidates:
        """What selection sees of a row. `masks`: the experts that are `predicted` or really `used`, None for none."""
        span = slice(self._starts[row], self._starts[row + 1])
        nodes = self._nodes[span]
        sets: list[int] = [0]
        if masks == "used" or (masks == "predicted" and self._shard.predicted):
            sets = self._masks(row, masks)
        pool = Pool(
            tokens=nodes["token"].astype(np.int64), parents=self._parents[span], depths=nodes["depth"].astype(np.int64),
            ranks=nodes["rank"].astype(np.int64), log_probs=nodes["log_prob"],
            state_rows=nodes["state_row"].astype(np.int64), states=NO_STATES, entropies=NO_ENTROPIES, root_token=-1,
            log_normalizers=NO_STATES, levels=self.levels[row],
        )  # fmt: skip
        return Candidates(
            pool=pool, acceptance=self._acceptance[span], reach=self._reach[span], masks=sets[1:], root_mask=sets[0],
            layers=self._shard.layers, experts=self._shard.experts,
        )  # fmt: skip

    def tree(self, row: int, chosen: list[int]) -> tuple[list[int], list[int]]:
        """Tokens `[n]` and parents of the chosen nodes of a row, in its cut pool."""
        places = [self._starts[row] + node for node in chosen]
        return self._nodes["token"][places].tolist(), self._parents[places].tolist()

    def verified(self, row: int, chosen: list[int]) -> Packed:
        """What the target made of a row's root and `chosen` nodes: `[1 + n]` of the shard's `verified_type`."""
        return self._verified[[self._roots[row], *self._verified_places(row, chosen)]]  # type: ignore[no-any-return]

    def _verified_places(self, row: int, chosen: list[int] | slice) -> list[int]:
        recorded = self.cut.nodes[self._starts[row] : self._starts[row + 1]][chosen]
        places: list[int] = (recorded - self._firsts[row] + self._roots[row] + 1).tolist()
        return places

    def _masks(self, row: int, field: str) -> list[int]:
        """Expert sets of root and nodes."""
        experts: NDArray[np.uint8] = self._verified[field][[self._roots[row], *self._verified_places(row, slice(None))]]
        data, width = experts.tobytes(), experts.shape[1]
        return [int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width)]

    def _parents_within(self) -> Ints:
        """Each kept node's parent in its row's cut pool, -1 for a child of the root: [M]."""
        cut = self.cut
        places = np.zeros(int(self._firsts[-1]) + 1, np.int64)
        places[cut.nodes] = np.arange(len(cut.nodes)) - cut.starts[cut.owners]
        parents = self._nodes["parent"].astype(np.int64)
        return np.where(parents < 0, -1, places[parents + self._firsts[cut.owners]])

    def _accepted(self, rows: ReplayRows, kind: AcceptanceKind, smaller: bool) -> tuple[Floats, Floats]:
        """Acceptance and reach of every kept node: [M] each."""
        column = self._shard.kinds.index(kind)
        nodes, parents, cut, model = self._nodes, self._parents, self.cut, rows.model
        if kind == "raw" or not smaller or model is None:
            return nodes["acceptance"][:, column], nodes["reach"][:, column]
        # Siblings share a softmax: those left out are out of it. Families are told apart by their parent's place, or row.
        above = parents + cut.starts[cut.owners]
        pool = Pool(
            tokens=np.zeros(len(nodes), np.int64), parents=np.where(parents < 0, len(parents) + cut.owners, above),
            depths=nodes["depth"], ranks=nodes["rank"], log_probs=nodes["log_prob"], state_rows=np.arange(len(nodes)),
            states=NO_STATES, entropies=nodes["entropy"], root_token=-1, temperatures=(model.temperature,),
            log_normalizers=nodes["normalizer"][:, None],
        )  # fmt: skip
        accepted = acceptance(pool, kind, model, nodes["logit"])
        return accepted, along_paths(accepted, above, nodes["depth"], np.multiply)
