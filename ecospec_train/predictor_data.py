"""Training rows for the predictor out of traces, shard by shard: memory holds a bounded cache, never the whole harvest.

Every row of a batch is a root or a pool node. Prompts, not rows, are divided into fit and held-out.

Legend: R positions of a shard, N rows (roots and nodes), H target width, d feature width, L MoE layers, K top-k, s states,
f feature rows, G sibling groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ecospec_kernels.predict_pool.inputs import clean_scalars
from ecospec_runtime.acceptance import AcceptanceModel, head_logits
from ecospec_runtime.errors import UserError
from ecospec_runtime.pool import Floats, Ints
from ecospec_runtime.predictor import Embed
from ecospec_train.traces import Traces, TraceShard

BLOCK_BYTES = 512 << 20


@dataclass
class Batch:
    """Rows of several positions. Sibling groups are numbered within the batch; a root is a group of weight 0."""

    embedding: Tensor  # [N, H]
    parent: Tensor  # [N, H] embedding of the parent's token, zeros for roots
    state: Tensor  # [N, d]
    scalars: Tensor  # [N, 4]
    routing: Tensor  # [N, L, K] int64
    group: Tensor  # [N]
    label: Tensor  # [N] 1 where the target takes the node after its parent
    weight: Tensor  # [N] of the acceptance loss: 1 if the node's parent is truly reached, less if not
    offset: Tensor  # [N] that the text's sampling temperature adds to the network's acceptance logits
    groups: int  # G

    def to(self, device: torch.device, **kwargs: object) -> Batch:
        """The batch on another device; Lightning calls it."""
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "groups"}
        return Batch(**moved, groups=self.groups)


@dataclass(frozen=True)
class NodeTable:
    """One shard as flat rows: for each position its root, then its nodes."""

    offsets: Ints  # [R + 1] rows of position r: offsets[r] .. offsets[r + 1]
    prompt_ids: Ints  # [R]
    tokens: Ints  # [N]
    parents: Ints  # [N] row of the parent; -1 for a root
    state_rows: Ints  # [N] row of `log_normalizers`: the state that proposed it
    feature_rows: Ints  # [N] row of `states`
    states: NDArray[np.float16]  # [f, d]
    scalars: Floats  # [N, 4] log_prob, rank, depth, entropy
    routing: NDArray[np.unsignedinteger]  # [N, L, K]
    label: Floats  # [N] 1 where the target takes the node after its parent, whether or not it gets there; 0 for roots
    reached: NDArray[np.bool_]  # [N] on the target's own trajectory
    weight: Floats  # [N] 1 for nodes whose parent is reached
    log_normalizers: Floats  # [s, t]

    def rows_of(self, positions: Ints) -> Ints:
        """Rows of the given positions, one after the other."""
        starts, counts = self.offsets[positions], np.diff(self.offsets)[positions]
        ends = np.cumsum(counts)
        return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)


def node_table(shard: TraceShard) -> NodeTable:
    """Flatten a trace shard; see `NodeTable`."""
    positions, nodes = len(shard.prompt_id), len(shard.tokens)
    sizes = np.diff(shard.node_offsets)
    offsets = shard.node_offsets + np.arange(positions + 1)
    roots = offsets[:-1]
    is_node = np.ones(nodes + positions, bool)
    is_node[roots] = False
    of = np.repeat(np.arange(positions), sizes)  # position of each node

    def spread(node_values: NDArray[np.integer[Any]], root_values: NDArray[np.integer[Any]] | int) -> Ints:
        out = np.zeros(nodes + positions, np.int64)
        out[is_node] = node_values
        out[roots] = root_values
        return out

    states = shard.state_offsets[:-1]
    parents = spread(shard.parents + 1 + roots[of], -1)
    state_rows = spread(shard.state_rows + states[of], states)
    first, last = shard.feature_offsets[:-1], shard.feature_offsets[1:] - 1
    shared = (first == last)[of]  # one row of features for all nodes of a position
    feature_rows = spread(first[of] + np.where(shared, 0, shard.state_rows), first)
    tokens = spread(shard.tokens, shard.root_token)
    scalars = np.zeros((nodes + positions, 4), np.float32)
    scalars[is_node, 0], scalars[is_node, 1], scalars[is_node, 2] = shard.log_probs, shard.ranks, shard.depths
    scalars[:, 3] = shard.entropies[state_rows]
    follows = np.zeros(nodes + positions, bool)
    follows[is_node] = shard.tokens == shard.next_tokens[parents[is_node]]
    reached = ~is_node
    for depth in range(1, int(shard.depths.max(initial=0)) + 1):
        level = np.flatnonzero(is_node & (scalars[:, 2] == depth))
        reached[level] = reached[parents[level]] & follows[level]
    return NodeTable(
        offsets=offsets, prompt_ids=shard.prompt_id.astype(np.int64), tokens=tokens, parents=parents, state_rows=state_rows,
        feature_rows=feature_rows,
        states=shard.states, scalars=clean_scalars(scalars), routing=shard.routing, label=follows.astype(np.float32), reached=reached,
        weight=np.where(is_node, reached[parents], False).astype(np.float32),
        log_normalizers=shard.log_normalizers,
    )  # fmt: skip


def split_prompts(prompt_ids: list[int], fraction: float, seed: int) -> tuple[set[int], set[int]]:
    """Fit and held-out prompt ids: a seeded choice that depends on the ids alone. UserError with fewer than two."""
    ids = np.unique(prompt_ids)
    if len(ids) < 2:
        raise UserError(f"traces hold {len(ids)} prompt(s); at least 2 are needed, one of them held out: harvest more")
    count = min(len(ids) - 1, max(1, round(fraction * len(ids))))
    heldout = set(np.random.default_rng(seed).permutation(ids)[:count].tolist())
    return set(ids.tolist()) - heldout, heldout


def concatenate(tables: list[NodeTable]) -> NodeTable:
    """Several tables as one."""
    rows = np.cumsum([0, *(len(t.tokens) for t in tables)])
    states = np.cumsum([0, *(len(t.log_normalizers) for t in tables)])
    features = np.cumsum([0, *(len(t.states) for t in tables)])
    merged = {f.name: np.concatenate([getattr(t, f.name) for t in tables]) for f in fields(NodeTable)}
    merged["offsets"] = np.concatenate([*(t.offsets[:-1] + n for t, n in zip(tables, rows, strict=False)), rows[-1:]])
    merged["parents"] = np.concatenate(
        [np.where(t.parents < 0, -1, t.parents + n) for t, n in zip(tables, rows, strict=False)]
    )
    merged["state_rows"] = np.concatenate([t.state_rows + n for t, n in zip(tables, states, strict=False)])
    merged["feature_rows"] = np.concatenate([t.feature_rows + n for t, n in zip(tables, features, strict=False)])
    return NodeTable(**merged)


class NodeTables:
    """The shards of a traces folder, gathered at random into blocks of `block_bytes` (as stored on disk).

    Batches mix the prompts of a block. A harvest of one block stays in memory; a larger one is read block by block.
    """

    def __init__(self, traces: Traces, block_bytes: int = BLOCK_BYTES, seed: int = 0):
        self.traces = traces
        self.sampling = traces.manifest.temperature
        self.embed: Embed = traces.embedding()
        self.blocks: list[list[int]] = []
        filled = block_bytes
        for index in np.random.default_rng(seed).permutation(len(traces.manifest.shards)).tolist():
            if filled >= block_bytes:
                self.blocks.append([])
                filled = 0
            self.blocks[-1].append(index)
            filled += traces.manifest.shards[index].bytes
        self.only: NodeTable | None = None

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, block: int) -> NodeTable:
        if self.only is not None:
            return self.only
        table = concatenate([node_table(self.traces.shard(i)) for i in sorted(self.blocks[block])])
        if len(self.blocks) == 1:
            self.only = table
        return table

    def __iter__(self) -> Iterator[NodeTable]:
        return (self[i] for i in range(len(self)))


def positions_of(table: NodeTable, prompts: set[int]) -> Ints:
    """Positions of a table that belong to the given prompts."""
    return np.flatnonzero(np.isin(table.prompt_ids, list(prompts)))


def network_inputs(table: NodeTable, rows: Ints, embed: Embed) -> dict[str, Floats]:
    """What the network reads of some rows: see `ecospec_runtime.predictor`."""
    parents = table.parents[rows]
    parent = embed(table.tokens[np.maximum(parents, 0)])
    parent[parents < 0] = 0.0
    return {"embedding": embed(table.tokens[rows]), "parent": parent,
            "state": table.states[table.feature_rows[rows]].astype(np.float32), "scalars": table.scalars[rows]}  # fmt: skip


def make_batch(
    table: NodeTable, rows: Ints, embed: Embed, unreached_weight: float = 0.0, model: AcceptanceModel | None = None
) -> Batch:  # fmt: skip
    """Collect rows of a table, siblings always together. Nodes with an unreached parent weigh `unreached_weight`; `model` is of
    the text's temperature."""
    parents = table.parents[rows]
    weight = np.where(parents < 0, 0.0, np.maximum(table.weight[rows], unreached_weight)).astype(np.float32)
    nothing = np.zeros(len(rows), np.float32)
    offset = nothing if model is None else head_logits(nothing, table.scalars[rows], model)
    _, group = np.unique(np.where(parents >= 0, parents, -1 - np.arange(len(rows))), return_inverse=True)
    return Batch(
        **{name: torch.from_numpy(value) for name, value in network_inputs(table, rows, embed).items()},
        routing=torch.from_numpy(table.routing[rows].astype(np.int64)),
        group=torch.from_numpy(group), label=torch.from_numpy(table.label[rows]),
        weight=torch.from_numpy(weight), offset=torch.from_numpy(offset), groups=len(rows),
    )  # fmt: skip


class BatchStream(IterableDataset[Batch]):
    """Batches of `batch_positions` positions: blocks in random order, positions shuffled within. Ranks share each block.

    `node_share` < 1 keeps that share of the sibling groups whose parent is not reached; roots and groups of a reached
    parent stay. No `seed`: everything, in order. Acceptance is not learned from the prompts of `routing_only`. `model`: see
    `make_batch`.
    """

    def __init__(
        self, tables: NodeTables, prompts: set[int], batch_positions: int, node_share: float = 1.0,
        unreached_weight: float = 0.0, seed: int | None = None, routing_only: set[int] | None = None,
        model: AcceptanceModel | None = None,
    ):  # fmt: skip
        self.model = model
        self.tables, self.prompts, self.batch_positions = tables, prompts, batch_positions
        self.routing_only = routing_only or set()
        self.node_share, self.unreached_weight, self.seed, self.epoch = node_share, unreached_weight, seed, 0
        self.counts = [len(positions_of(table, prompts)) for table in tables]

    def rank(self) -> tuple[int, int]:
        """This process's rank and the number of processes."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    def __len__(self) -> int:
        _, world = self.rank()
        return sum(-(-(count // world) // self.batch_positions) for count in self.counts)

    def __iter__(self) -> Iterator[Batch]:
        rank, world = self.rank()
        rng = np.random.default_rng((self.seed, self.epoch)) if self.seed is not None else None
        self.epoch += 1
        blocks = rng.permutation(len(self.tables)).tolist() if rng else range(len(self.tables))
        for block in blocks:
            table = self.tables[block]
            positions = positions_of(table, self.prompts)
            learned = np.ones(len(table.parents), np.float32)
            learned[table.rows_of(positions_of(table, self.routing_only))] = 0.0
            positions = rng.permutation(positions) if rng else positions
            positions = positions[: len(positions) // world * world][rank::world]
            kept = (table.weight > 0) | (table.parents < 0)
            if rng and self.node_share < 1:
                kept |= (rng.random(len(table.parents), dtype=np.float32) < self.node_share)[table.parents]
            else:
                kept[:] = True
            for start in range(0, len(positions), self.batch_positions):
                rows = table.rows_of(positions[start : start + self.batch_positions])
                rows = rows[kept[rows]]
                batch = make_batch(table, rows, self.tables.embed, self.unreached_weight, self.model)
                batch.weight *= torch.from_numpy(learned[rows])
                yield batch


class MixedStream(IterableDataset[Batch]):
    """The batches of several streams in random order."""

    def __init__(self, streams: list[BatchStream], seed: int):
        self.streams, self.seed, self.epoch = streams, seed, 0

    def __len__(self) -> int:
        return sum(map(len, self.streams))

    @property
    def positions(self) -> int:
        """Of all streams."""
        return sum(sum(stream.counts) for stream in self.streams)

    def __iter__(self) -> Iterator[Batch]:
        order = np.repeat(np.arange(len(self.streams)), [len(stream) for stream in self.streams])
        turns = np.random.default_rng((self.seed, self.epoch)).permutation(order)
        self.epoch += 1
        batches = [iter(stream) for stream in self.streams]
        for turn in turns:
            yield from islice(batches[turn], 1)


class PredictorData(L.LightningDataModule):
    """Fit stream over the traces of several sampling temperatures, each with the acceptance model of its own; held-out stream
    over the first."""

    def __init__(
        self, sources: list[tuple[NodeTables, AcceptanceModel]], fit: set[int], heldout: set[int], batch_positions: int,
        node_share: float, unreached_weight: float, seed: int, routing_only: set[int] | None = None,
    ):  # fmt: skip
        super().__init__()
        settings = batch_positions, node_share, unreached_weight, seed, routing_only
        self.fit_stream = MixedStream([BatchStream(tables, fit, *settings, model) for tables, model in sources], seed)
        self.heldout_stream = BatchStream(sources[0][0], heldout, batch_positions)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Shuffled batches of the fit prompts."""
        return DataLoader(self.fit_stream, batch_size=None)

    def val_dataloader(self) -> DataLoader[Batch]:
        """All nodes of the held-out prompts, in order."""
        return DataLoader(self.heldout_stream, batch_size=None)
