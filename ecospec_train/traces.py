"""Traces: what a drafter proposed and what the target then did, at every position of the target's own text.

A folder of Parquet shards, `manifest.json` and `embedding.safetensors`. One row per position; the rows of a prompt are contiguous,
in order, and never split across shards. `datasets.load_dataset("parquet", data_files=DIR + "/shard-*.parquet")` reads it too.

Legend of shapes: R rows, n nodes of a row, N nodes of a shard, P = N + R tokens verified (root first in each row), s states of a
row, S states of a shard, F feature rows of a shard (S, or R where a row's states share one), d feature width, t drafter temperatures, T target temperatures, L MoE layers, K top-k, H hidden size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file

from ecospec_runtime.config import PoolConfig
from ecospec_runtime.errors import UserError, first_line
from ecospec_runtime.pool import Features, Floats, Ints, Pool

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
EMBEDDING = "embedding.safetensors"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TargetRecord(_Record):
    """The target the traces were taken from."""

    id: str
    architecture: str
    fingerprint: str  # sha256 over the weights
    moe_layers: int
    experts: int
    top_k: int
    vocab_size: int
    hidden_size: int


class DrafterRecord(_Record):
    """The drafter that proposed the pools."""

    id: str
    kind: str
    fingerprint: str
    width: int  # of `states`
    features: Features = "drafter_state"  # what `states` holds; a target's hidden state is held once per row


class ShardRecord(_Record):
    """One Parquet file."""

    file: str
    rows: int
    bytes: int
    sha256: str
    prompt_ids: list[int]


class TraceManifest(_Record):
    """`manifest.json`: where the rows come from, and what is needed to read them."""

    schema_version: int = SCHEMA_VERSION
    complete: bool = False  # False: the harvest was stopped; `--resume` finishes it
    target: TargetRecord
    drafter: DrafterRecord
    pool: PoolConfig
    drafter_temperatures: tuple[float, ...]
    target_temperatures: tuple[float, ...]
    temperature: float  # of the trajectory and of `next_tokens`; 0 is the argmax
    seed: int  # prompt i draws as the engine does with seed + i
    stride: int
    max_positions: int | None
    max_new_tokens: int
    max_prompt_tokens: int
    dtype: str
    devices: int
    prompts_sha256: str
    shards: list[ShardRecord] = []
    embedding_sha256: str = ""
    seconds: dict[str, float] = {}  # by phase, of the first rank, in the run that finished
    versions: dict[str, str]
    command: list[str]
    end_tokens: tuple[int, ...] = ()  # that end a text; traces of older releases do not say
    routing_by_weight: bool = False  # a token's experts in falling weight; older traces have the router's order

    @property
    def rows(self) -> int:
        """Rows of all shards."""
        return sum(shard.rows for shard in self.shards)


def trace_schema(experts: int) -> pa.Schema:
    """Columns of a shard. Node columns have n entries, verified ones n + 1 (root first); `states` is [s, d] or [1, d], `log_normalizers`
    [s, t], `routing` [n + 1, L, K] and `logsumexp` [n + 1, T], each flattened."""
    i16, i32, f32 = pa.list_(pa.int16()), pa.list_(pa.int32()), pa.list_(pa.float32())
    return pa.schema(
        [
            ("prompt_id", pa.int32()),
            ("position", pa.int32()),  # of the root within the generated text
            ("context", pa.int32()),  # cached tokens before the root
            ("root_token", pa.int32()),
            ("tokens", i32),
            ("parents", i16),
            ("depths", i16),
            ("ranks", i16),
            ("log_probs", f32),
            ("state_rows", i16),
            ("entropies", f32),
            ("states", pa.list_(pa.float16())),
            ("log_normalizers", f32),
            ("routing", pa.list_(pa.uint8() if experts <= 256 else pa.uint16())),
            ("next_tokens", i32),  # what the verification rule emits after root and nodes
            ("argmax", i32),
            ("token_logits", f32),  # the target's raw logit of the node's token, at its parent
            ("logsumexp", f32),  # of the target's logits / T
        ]
    )


def bytes_per_position(
    pool: PoolConfig,
    layers: int,
    top_k: int,
    experts: int,
    width: int,
    drafter_temperatures: int,
    target_temperatures: int,
    features: Features = "drafter_state",
) -> int:
    """Upper bound of a row's size before compression: full pool, every beam expanded. `width` is that of `features`."""
    nodes, states = pool.pool_size, 2 + min(pool.beam, pool.width) * (pool.depth - 1)
    per_node = 4 + 4 * 2 + 4 + 4  # tokens; parents, depths, ranks, state_rows; log_probs; token_logits
    per_pass = layers * top_k * (1 if experts <= 256 else 2) + 4 + 4 + 4 * target_temperatures
    feature_rows = 1 if features == "target_hidden" else states
    per_state = 4 + 4 * drafter_temperatures
    offsets = 14 * 4
    return 4 * 4 + offsets + nodes * per_node + (nodes + 1) * per_pass + states * per_state + feature_rows * 2 * width


@dataclass(frozen=True)
class TraceRow:
    """One position on its way to a shard."""

    prompt_id: int
    position: int
    context: int
    pool: Pool
    routing: NDArray[np.integer[Any]]  # [n + 1, L, K]
    next_tokens: Ints  # [n + 1]
    argmax: Ints  # [n + 1]
    token_logits: Floats  # [n]
    logsumexp: Floats  # [n + 1, T]


@dataclass(frozen=True)
class TraceShard:
    """The rows of one shard as flat arrays, named as the columns. Row r owns nodes node_offsets[r]:node_offsets[r + 1], the
    verified tokens from node_offsets[r] + r on (root first), states state_offsets[r]:state_offsets[r + 1] and rows
    feature_offsets[r]:feature_offsets[r + 1] of `states`."""

    prompt_id: NDArray[np.int32]  # [R]
    position: NDArray[np.int32]  # [R]
    context: NDArray[np.int32]  # [R]
    root_token: NDArray[np.int32]  # [R]
    tokens: NDArray[np.int32]  # [N]
    parents: NDArray[np.int16]  # [N] within the row, -1 for a child of the root
    depths: NDArray[np.int16]  # [N]
    ranks: NDArray[np.int16]  # [N]
    log_probs: Floats  # [N]
    state_rows: NDArray[np.int16]  # [N] within the row's states
    entropies: Floats  # [S]
    states: NDArray[np.float16]  # [F, d]
    log_normalizers: Floats  # [S, t]
    routing: NDArray[np.unsignedinteger[Any]]  # [P, L, K]
    next_tokens: NDArray[np.int32]  # [P]
    argmax: NDArray[np.int32]  # [P]
    token_logits: Floats  # [N]
    logsumexp: Floats  # [P, T]
    node_offsets: Ints  # [R + 1]
    state_offsets: Ints  # [R + 1]
    feature_offsets: Ints  # [R + 1]
    temperatures: tuple[float, ...]  # of the drafter

    def __len__(self) -> int:
        return len(self.prompt_id)

    def nodes(self, row: int) -> slice:
        """The row's nodes."""
        return slice(int(self.node_offsets[row]), int(self.node_offsets[row + 1]))

    def verified(self, row: int) -> slice:
        """The row's verified tokens: root first, then the nodes."""
        return slice(int(self.node_offsets[row]) + row, int(self.node_offsets[row + 1]) + row + 1)

    def pool(self, row: int) -> Pool:
        """The drafter's pool at a row, as the drafter returned it (its states rounded to float16)."""
        nodes, states = self.nodes(row), slice(int(self.state_offsets[row]), int(self.state_offsets[row + 1]))
        features = slice(int(self.feature_offsets[row]), int(self.feature_offsets[row + 1]))
        return Pool(
            tokens=self.tokens[nodes].astype(np.int64),
            parents=self.parents[nodes].astype(np.int64),
            depths=self.depths[nodes].astype(np.int64),
            ranks=self.ranks[nodes].astype(np.int64),
            log_probs=self.log_probs[nodes],
            state_rows=self.state_rows[nodes].astype(np.int64),
            states=self.states[features].astype(np.float32),
            entropies=self.entropies[states],
            root_token=int(self.root_token[row]),
            temperatures=self.temperatures,
            log_normalizers=self.log_normalizers[states],
        )

    def routing_of(self, row: int) -> NDArray[np.unsignedinteger[Any]]:
        """Experts of the row's root and nodes: [n + 1, L, K]."""
        return self.routing[self.verified(row)]

    def next_tokens_of(self, row: int) -> NDArray[np.int32]:
        """What verification emits after the row's root and nodes: [n + 1]."""
        return self.next_tokens[self.verified(row)]


class Traces:
    """A folder of traces, read shard by shard. Raises UserError for anything missing, damaged or foreign."""

    def __init__(self, path: str | Path, expect_target: str | None = None, expect_drafter: str | None = None) -> None:
        """`expect_target`, `expect_drafter`: weight fingerprints the traces must have been taken with."""
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        if not self.manifest.complete:
            raise UserError(f"{self.path}: the harvest did not finish; run it again with --resume")
        for name, expected, record in (
            ("target", expect_target, self.manifest.target),
            ("drafter", expect_drafter, self.manifest.drafter),
        ):
            if expected is not None and expected != record.fingerprint:
                raise UserError(
                    f"{self.path}: traces of another {name} ({record.id}, weights {record.fingerprint[:12]}, not "
                    f"{expected[:12]}); harvest again with this {name}"
                )
        for shard in self.manifest.shards:
            if not (self.path / shard.file).is_file():
                raise UserError(f"{self.path / shard.file}: shard is missing; restore it or harvest again")

    def __len__(self) -> int:
        return self.manifest.rows

    @property
    def fingerprint(self) -> str:
        """Hash over the shards' hashes."""
        return hashlib.sha256("".join(shard.sha256 for shard in self.manifest.shards).encode()).hexdigest()

    def shards(self) -> Iterator[TraceShard]:
        """Every shard in turn, its hash checked; memory holds one at a time."""
        for index in range(len(self.manifest.shards)):
            yield self.shard(index)

    def shard(self, index: int) -> TraceShard:
        """One shard of the manifest's list, its hash checked."""
        record, target = self.manifest.shards[index], self.manifest.target
        table = self._load(record)
        try:
            shard = _to_shard(table, self.manifest)
            sound = shard.routing.max(initial=0) < target.experts and shard.tokens.max(initial=0) < target.vocab_size
        except ValueError:  # cannot be cut into rows of these sizes
            sound = False
        if not sound:
            raise self._contradiction(record.file)
        return shard

    def _contradiction(self, file: str) -> UserError:
        target = self.manifest.target
        return UserError(
            f"{self.path / MANIFEST}: says {target.moe_layers} MoE layers of {target.experts} experts, top-k {target.top_k}, and "
            f"{target.vocab_size} tokens, which is not what {file} holds; restore it or harvest again"
        )

    def embedding(self) -> Callable[[Sequence[int] | NDArray[Any]], Floats]:
        """The target's input embedding of the traces' tokens: a callable from token ids [n] to rows [n, H]."""
        path = self.path / EMBEDDING
        try:
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != self.manifest.embedding_sha256:
                raise UserError(f"{path}: corrupt (its sha256 is not the manifest's); restore it or harvest again")
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({error}); restore it or harvest again") from None
        if tensors["ids"].max(initial=0) >= self.manifest.target.vocab_size:
            raise self._contradiction(EMBEDDING)
        place = np.full(self.manifest.target.vocab_size, -1, np.int64)
        place[tensors["ids"]] = np.arange(len(tensors["ids"]))
        table_uH = tensors["table"]

        def embed(tokens: Sequence[int] | NDArray[Any]) -> Floats:
            rows = place[np.asarray(tokens, np.int64)]
            if (rows < 0).any():
                raise UserError(
                    f"{path}: holds no row for token {np.asarray(tokens)[rows < 0][0]}; it is not in these traces"
                )
            return table_uH[rows].astype(np.float32)

        return embed

    def _load(self, record: ShardRecord) -> pa.Table:
        path = self.path / record.file
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); restore it or harvest again") from None
        if len(data) != record.bytes:
            raise UserError(
                f"{path}: truncated or changed ({len(data)} bytes, {record.bytes} expected); restore it or harvest again"
            )
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise UserError(f"{path}: corrupt (its sha256 is not the manifest's); restore it or harvest again")
        return pq.read_table(pa.BufferReader(data), schema=trace_schema(self.manifest.target.experts))


def read_manifest(folder: Path) -> TraceManifest:
    """Read and check `manifest.json`; raises UserError naming what is wrong."""
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{folder}: holds no traces ({MANIFEST} is missing); run `ecospec-train harvest` first"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)}); restore it or harvest again") from None
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(f"{path}: schema_version is {version}, this release reads {SCHEMA_VERSION}; harvest again")
    try:
        return TraceManifest.model_validate(raw)
    except UserError as error:  # a nested configuration names its own key
        raise UserError(f"{path}: {error}; harvest again") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: key '{'.'.join(map(str, first['loc']))}': {first['msg']}; harvest again") from None


def _to_shard(table: pa.Table, manifest: TraceManifest) -> TraceShard:
    def flat(name: str) -> NDArray[Any]:
        return table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)

    def offsets(name: str) -> Ints:
        return table.column(name).combine_chunks().offsets.to_numpy().astype(np.int64)

    target, nodes = manifest.target, offsets("tokens")
    scalars = {name: table.column(name).to_numpy() for name in ("prompt_id", "position", "context", "root_token")}
    names = (
        "tokens",
        "parents",
        "depths",
        "ranks",
        "log_probs",
        "state_rows",
        "entropies",
        "next_tokens",
        "argmax",
        "token_logits",
    )
    states, verified = len(flat("entropies")), int(nodes[-1]) + len(nodes) - 1
    shared = manifest.drafter.features == "target_hidden"
    feature_offsets = np.arange(len(nodes)) if shared else offsets("entropies")
    return TraceShard(
        **scalars,
        **{name: flat(name) for name in names},
        states=flat("states").reshape(int(feature_offsets[-1]), manifest.drafter.width),
        log_normalizers=flat("log_normalizers").reshape(states, len(manifest.drafter_temperatures)),
        routing=flat("routing").reshape(verified, target.moe_layers, target.top_k),
        logsumexp=flat("logsumexp").reshape(verified, len(manifest.target_temperatures)),
        node_offsets=nodes,
        state_offsets=offsets("entropies"),
        feature_offsets=feature_offsets,
        temperatures=manifest.drafter_temperatures,
    )
