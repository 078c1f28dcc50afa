"""Positions to replay: scored once, kept in files, read one shard at a time.

Scoring goes through the code of live decoding, so that a policy chooses in replay what it would choose there. What selection
and verification look at is packed into three arrays a shard, in a temporary folder that goes with the last reference to it;
memory holds those of one shard, however many there are.

Legend: R rows, N nodes of all these rows, P = R + N verified tokens (each row's root, then its nodes), K acceptance kinds,
B bytes of an expert set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from ecospec_runtime.acceptance import AcceptanceKind, AcceptanceModel, acceptance
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.errors import UserError
from ecospec_runtime.pool import Floats, Ints, pack_masks, path_products
from ecospec_runtime.predictor import Embed, Predictor, same_drafter
from ecospec_runtime.scoring import Scorer
from ecospec_train.traces import Traces, TraceShard

Packed = NDArray[Any]  # with named fields


@dataclass(frozen=True, eq=False)
class PackedShard:
    """The scored rows of one shard, in files."""

    folder: TemporaryDirectory[str]  # removed with the last shard that refers to it
    index: int  # of this shard there
    layers: int
    experts: int
    kinds: tuple[AcceptanceKind, ...]
    predicted: bool  # routing was predicted

    @property
    def node_type(self) -> np.dtype[Any]:
        """Fields of a node."""
        of_kinds = ("<f4", (len(self.kinds),))
        return np.dtype(
            [
                ("token", "<i4"),
                ("parent", "<i2"),  # within the row, -1 for a child of the root
                ("depth", "<i2"),
                ("rank", "<i2"),
                ("state_row", "<i2"),
                ("log_prob", "<f4"),
                ("log_reach", "<f4"),  # see `least_log_reach`
                ("entropy", "<f4"),  # of the state that proposed it
                ("normalizer", "<f4"),  # there, at the fitted temperature; 0 without a predictor
                ("logit", "<f4"),  # of acceptance kind `head`; 0 without a predictor
                ("acceptance", *of_kinds),
                ("reach", *of_kinds),
            ]
        )

    @property
    def verified_type(self) -> np.dtype[Any]:
        """Fields of a root or node as the target saw it."""
        experts = ("u1", (-(-self.layers * self.experts // 8),))  # B bytes, little end first
        return np.dtype([("next_token", "<i4"), ("used", *experts), ("predicted", *experts)])

    def rows(self) -> Packed:
        """[R + 1] `context`, and `first`: the row's first node; the last entry only ends the one before."""
        return np.load(self.path("rows"))  # type: ignore[no-any-return]

    def nodes(self) -> Packed:
        """[N] of `node_type`."""
        return np.load(self.path("nodes"))  # type: ignore[no-any-return]

    def verified(self) -> Packed:
        """[P] of `verified_type`, mapped: the largest, and only some of it is looked at."""
        return np.asarray(np.load(self.path("verified"), mmap_mode="r"))  # a plain array is quicker to index

    def path(self, name: str) -> Path:
        """File of one of the three arrays."""
        return Path(self.folder.name) / f"{self.index:05d}-{name}.npy"


@dataclass(frozen=True)
class PromptRows:
    """The rows of one prompt, in order."""

    shard: PackedShard
    first: int  # row of the shard
    count: int

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True)
class ReplayRows:
    """Positions to replay, prompt by prompt, in order."""

    prompts: list[PromptRows]
    layers: int
    pool: PoolConfig  # shape of the recorded pools
    best: AcceptanceKind  # the predictor's best kind; raw without a predictor
    model: AcceptanceModel | None = None
    end_tokens: tuple[int, ...] = ()  # that end a text; none: the traces do not say
    top_k: int = 1  # experts of a token in a layer

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.prompts)


def load_rows(
    traces: Traces,
    predictor: Predictor | None,
    prompts: set[int] | None = None,
    max_positions: int | None = None,
    folder: Path | None = None,
) -> ReplayRows:
    """Score and pack the rows of `prompts` (None: all), in the order of the traces, whole prompts up to `max_positions`.

    The packed rows take about as much disk as the traces, in a temporary folder inside `folder` (None: the system's).
    Without a predictor only acceptance `raw` and policies that need no routing can be replayed. UserError for traces
    with gaps between positions, or a predictor of another target.
    """
    manifest = traces.manifest
    check_lineage(traces, predictor)
    kind: AcceptanceKind = "raw" if predictor is None else "head"
    scorer = Scorer(predictor, kind, manifest.target.moe_layers, manifest.target.experts).at(manifest.temperature)
    embed = traces.embedding()
    kinds: tuple[AcceptanceKind, ...] = ("raw",) if predictor is None else get_args(AcceptanceKind)
    place = TemporaryDirectory(prefix="ecospec-replay-", dir=folder, ignore_cleanup_errors=True)
    kept: list[PromptRows] = []
    count = 0
    for shard in wanted_shards(traces, prompts):
        spans: list[range] = []
        for span in prompts_of(shard):
            asked = prompts is None or int(shard.prompt_id[span[0]]) in prompts
            if asked and (max_positions is None or count < max_positions):
                spans.append(span)
                count += len(span)
        if spans:
            packed = PackedShard(place, len(kept), scorer.layers, scorer.experts, kinds, predictor is not None)
            write_shard(packed, shard, [row for span in spans for row in span], scorer, embed)
            firsts = np.cumsum([0, *map(len, spans)]).tolist()
            kept += [PromptRows(packed, first, len(span)) for first, span in zip(firsts, spans, strict=False)]
        if max_positions is not None and count >= max_positions:
            break
    if not kept:
        raise UserError(f"{traces.path}: no positions of the prompts asked for; harvest more")
    best = predictor.acceptance.best if predictor is not None else "raw"
    return ReplayRows(
        kept, scorer.layers, manifest.pool, best, scorer.model, manifest.end_tokens, manifest.target.top_k
    )  # fmt: skip


def check_lineage(traces: Traces, predictor: Predictor | None) -> None:
    """Raise UserError for traces with gaps between positions, or a predictor of another target or drafter."""
    manifest = traces.manifest
    if manifest.stride != 1:
        raise UserError(f"{traces.path}: replay needs a pool at every position; harvest with --stride 1")
    if predictor is None:
        return
    if predictor.manifest.target["fingerprint"] != manifest.target.fingerprint:
        made, weights = (str(predictor.manifest.target[key]) for key in ("id", "fingerprint"))
        raise UserError(
            f"{traces.path}: traces of {manifest.target.id} (weights {manifest.target.fingerprint[:12]}), but the predictor was "
            f"fitted for {made} (weights {weights[:12]}); fit one on these traces"
        )
    same_drafter(manifest.drafter.fingerprint, f"traces {traces.path}", predictor.manifest, None)


def wanted_shards(traces: Traces, prompts: set[int] | None) -> Iterator[TraceShard]:
    """The shards that hold any of `prompts` (None: all), one in memory at a time."""
    for index, record in enumerate(traces.manifest.shards):
        if prompts is None or not prompts.isdisjoint(record.prompt_ids):
            yield traces.shard(index)


def prompts_of(shard: TraceShard) -> list[range]:
    """The rows of each prompt of a shard."""
    starts = np.flatnonzero(np.diff(shard.prompt_id, prepend=shard.prompt_id[:1] - 1)).tolist()
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(shard)], strict=True)]


def write_shard(
    packed: PackedShard, shard: TraceShard, rows: Sequence[int], scorer: Scorer, embed: Embed
) -> None:  # fmt: skip
    """Score `rows` of a shard by every kind of acceptance model there is and write what replay looks at."""
    sizes = [shard.nodes(row).stop - shard.nodes(row).start for row in rows]
    table = np.zeros(len(rows) + 1, [("context", "<i4"), ("first", "<i8")])
    table["context"][:-1] = shard.context[rows]
    table["first"][1:] = np.cumsum(sizes)
    nodes = np.zeros(table["first"][-1], packed.node_type)
    verified = np.zeros(len(nodes) + len(rows), packed.verified_type)
    for place, row in enumerate(rows):
        first, last = table["first"][place : place + 2].tolist()
        own, root_and_own = nodes[first:last], verified[first + place : last + place + 1]
        root_and_own["next_token"] = shard.next_tokens_of(row)
        root_and_own["used"] = as_bytes(pack_masks(shard.routing_of(row), scorer.experts), packed)
        score_row(packed, shard, row, scorer, embed, own, root_and_own)
    try:
        for name, values in (("rows", table), ("nodes", nodes), ("verified", verified)):
            np.save(packed.path(name), values)
    except OSError as error:
        folder = Path(packed.folder.name).parent
        raise UserError(
            f"{folder}: scored positions cannot be written ({error.strerror}); free some space there"
        ) from None


def score_row(
    packed: PackedShard,
    shard: TraceShard,
    row: int,
    scorer: Scorer,
    embed: Embed,
    nodes_n: Packed,
    verified_n: Packed,
) -> None:
    """Fill in the nodes of one row, and the experts predicted for its root and nodes."""
    pool = shard.pool(row)
    if np.any(np.diff(pool.depths) < 0):
        raise UserError(f"row {row} of a shard: its pool is not level by level; harvest again")
    for name in ("token", "parent", "depth", "rank", "log_prob", "state_row"):
        nodes_n[name] = getattr(pool, f"{name}s")
    nodes_n["entropy"] = pool.entropies[pool.state_rows]
    nodes_n["log_reach"] = least_log_reach(pool.log_probs, pool.parents, pool.depths)
    prediction = None if scorer.predictor is None else scorer.predictor.predict(pool, embed)
    scored = scorer.judge(pool, prediction, needs_routing=prediction is not None)
    for column, kind in enumerate(packed.kinds):
        accepted = scored.acceptance
        if kind != scorer.kind:
            accepted = acceptance(pool, kind, scorer.model)
        nodes_n["acceptance"][:, column] = accepted
        nodes_n["reach"][:, column] = path_products(accepted, pool.parents)
    if prediction is not None:
        nodes_n["logit"] = prediction.acceptance_logits[1:]
        assert scorer.model is not None
        nodes_n["normalizer"] = pool.log_normalizers[pool.state_rows, pool.temperatures.index(scorer.model.temperature)]
        verified_n["predicted"] = as_bytes([scored.root_mask, *scored.masks], packed)


def as_bytes(masks: list[int], packed: PackedShard) -> NDArray[np.uint8]:
    """Expert sets as [len(masks), B]."""
    width = packed.verified_type["used"].shape[0]
    return np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), np.uint8).reshape(-1, width)


def as_mask(experts_B: NDArray[np.uint8]) -> int:
    """One expert set out of its bytes."""
    return int.from_bytes(experts_B.tobytes(), "little")


def along_paths(values_n: Floats, parents_n: Ints, depths_n: Ints, combine: np.ufunc) -> Floats:
    """Accumulate `combine` from the root's child to each node; `parents_n` index the same array."""
    out = values_n.copy()
    for depth in range(2, int(depths_n.max(initial=0)) + 1):
        at = np.flatnonzero(depths_n == depth)
        out[at] = combine(out[parents_n[at]], values_n[at])
    return out


def least_log_reach(log_probs_n: Floats, parents_n: Ints, depths_n: Ints) -> Floats:
    """Log of each node's reach under the drafter's own probability, added up as drafters do it; or of an ancestor's, where that is
    less: what is cut from the pool takes its branch along."""
    reach = along_paths(log_probs_n, parents_n, depths_n, np.add)
    return along_paths(reach, parents_n, depths_n, np.minimum)
