"""Exact replay of recorded traces: what a policy would have accepted, and what that would have cost on a device.

Start at the first position of a prompt; choose a set from the pool recorded there; follow `next_tokens` from the root
through the set; jump ahead by what was emitted. Time is the device profile's, for the union of experts that root and set
really used. Scoring runs once, through the same code as live decoding, so that a policy chooses here what it would choose
there; each replay then only selects and walks.

Exact for policies that choose from the recorded pool or cut it, on traces with a pool at every position.
Legend: n nodes of a pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np

from ecospec_runtime.acceptance import AcceptanceKind, AcceptanceModel, acceptance
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.gate import DraftGate
from ecospec_runtime.policies import Policy, PolicySpec, build_policy
from ecospec_runtime.policies.base import Pausing, deepest
from ecospec_runtime.pool import Candidates, Floats, Ints, Pool, pack_masks, path_products
from ecospec_runtime.predictor import Embed, Predictor, same_drafter
from ecospec_runtime.scoring import Scorer
from ecospec_train.traces import Traces, TraceShard

MAX_PRICE_ROUNDS = 6
PRICE_TOLERANCE = 1e-3  # relative change of the rate at which the price counts as found


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """One position, reduced to what selection and verification look at."""

    context: int  # cached tokens before the root
    next_tokens: list[int]  # [n + 1] what verification emits after root and nodes
    used: list[int]  # [n + 1] experts that root and nodes really used, as bit sets
    tokens: list[int]  # [n]
    parents: list[int]  # [n]
    depths: Ints  # [n]
    log_reach: Floats  # [n] under the drafter's own probability
    logits: Floats  # [n] of acceptance kind `head`; empty without a predictor
    candidates: dict[AcceptanceKind, Candidates]


@dataclass(frozen=True)
class ReplayRows:
    """Positions to replay, prompt by prompt, in order."""

    prompts: list[list[ReplayRow]]
    layers: int
    pool: PoolConfig  # shape of the recorded pools
    best: AcceptanceKind  # the predictor's best kind; raw without a predictor
    model: AcceptanceModel | None = None
    temperature: float = 0.0  # of the traces' target

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.prompts)


@dataclass(frozen=True)
class ReplayResult:
    """What a policy achieves, in totals and per pass."""

    policy: str  # its text form
    tokens: int
    passes: int
    drafts: int  # passes for which the drafter ran
    ms: float
    draft_ms: float  # part of `ms` spent on drafting, prediction and selection
    tokens_per_ms: float
    accept_length: float  # tokens per pass
    nodes: float  # chosen per pass, the root not counted
    experts_per_layer: float  # really used per pass
    draft_share: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible form."""
        return asdict(self)


def load_rows(
    traces: Traces, predictor: Predictor | None, prompts: set[int] | None = None, max_positions: int | None = None
) -> ReplayRows:
    """Score and pack the rows of `prompts` (None: all), in the order of the traces, whole prompts up to `max_positions`.

    Without a predictor only acceptance `raw` and policies that need no routing can be replayed. UserError for traces
    with gaps between positions, or a predictor of another target.
    """
    manifest = traces.manifest
    if manifest.stride != 1:
        raise UserError(f"{traces.path}: replay needs a pool at every position; harvest with --stride 1")
    if predictor is not None and predictor.manifest.target["fingerprint"] != manifest.target.fingerprint:
        made, weights = (str(predictor.manifest.target[key]) for key in ("id", "fingerprint"))
        raise UserError(
            f"{traces.path}: traces of {manifest.target.id} (weights {manifest.target.fingerprint[:12]}), but the predictor was "
            f"fitted for {made} (weights {weights[:12]}); fit one on these traces"
        )
    if predictor is not None:
        same_drafter(manifest.drafter.fingerprint, f"traces {traces.path}", predictor.manifest, None)
    kind: AcceptanceKind = "raw" if predictor is None else "head"
    scorer = Scorer(predictor, kind, manifest.target.moe_layers, manifest.target.experts)
    embed = traces.embedding()
    kept: list[list[ReplayRow]] = []
    count = 0
    for shard, rows in prompts_of(traces):
        if max_positions is not None and count >= max_positions:
            break
        if prompts is None or int(shard.prompt_id[rows[0]]) in prompts:
            kept.append([pack_row(shard, row, scorer, embed, manifest.temperature) for row in rows])
            count += len(rows)
    if not kept:
        raise UserError(f"{traces.path}: no positions of the prompts asked for; harvest more")
    best = predictor.acceptance.best if predictor is not None else "raw"
    return ReplayRows(kept, manifest.target.moe_layers, manifest.pool, best, scorer.model, manifest.temperature)


def prompts_of(traces: Traces) -> Iterator[tuple[TraceShard, range]]:
    """Every prompt of the traces: its shard, and its rows there."""
    for shard in traces.shards():
        starts = np.flatnonzero(np.diff(shard.prompt_id, prepend=shard.prompt_id[:1] - 1))
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(shard)], strict=True):
            yield shard, range(start, end)


def pack_row(shard: TraceShard, row: int, scorer: Scorer, embed: Embed, temperature: float = 0.0) -> ReplayRow:
    """Score one row by every kind of acceptance model there is and drop what selection does not read.

    `temperature` is the one that the target of the traces was sampled at.
    """
    pool = shard.pool(row)
    if np.any(np.diff(pool.depths) < 0):
        raise UserError(f"row {row} of a shard: its pool is not level by level; harvest again")
    prediction = None if scorer.predictor is None else scorer.predictor.predict(pool, embed)
    scored = scorer.judge(pool, prediction, needs_routing=prediction is not None, temperature=temperature)
    slim = replace(pool, states=np.zeros((0, 0), np.float32))
    candidates: dict[AcceptanceKind, Candidates] = {}
    for kind in get_args(AcceptanceKind) if prediction is not None else ("raw",):
        accepted = scored.acceptance
        if kind != scorer.kind:
            accepted = acceptance(pool, kind, scorer.model, temperature=temperature)
        candidates[kind] = with_acceptance(replace(scored, pool=slim), accepted)
    return ReplayRow(
        context=int(shard.context[row]), next_tokens=shard.next_tokens_of(row).tolist(),
        used=pack_masks(shard.routing_of(row), scorer.experts), tokens=pool.tokens.tolist(),
        parents=pool.parents.tolist(), depths=pool.depths, log_reach=log_reach(pool), candidates=candidates,
        logits=np.zeros(0, np.float32) if prediction is None else prediction.acceptance_logits[1:],
    )  # fmt: skip


def with_acceptance(candidates: Candidates, accepted: Floats) -> Candidates:
    """The candidates under another estimate of acceptance `[n]`."""
    return replace(candidates, acceptance=accepted, reach=path_products(accepted, candidates.pool.parents))


def log_reach(pool: Pool) -> Floats:
    """Sum of the drafter's log p along each node's path, added up as drafters do it."""
    reach = pool.log_probs.copy()
    for i, parent in enumerate(pool.parents.tolist()):
        if parent >= 0:
            reach[i] += reach[parent]
    return reach


def kept_nodes(row: ReplayRow, shape: PoolConfig) -> tuple[Ints | None, int, int]:
    """Nodes of a row's pool that drafting in this shape would have given (None: all); what it would have paid for: levels and
    expanded nodes.

    `PoolConfig` says what is kept. A level is paid for while the one above it keeps a node.
    """
    within = row.depths <= shape.depth
    if shape.min_reach:
        within &= row.log_reach >= np.log(np.float32(shape.min_reach))
        for i, parent in enumerate(row.parents):
            if parent >= 0 and not within[parent]:
                within[i] = False
    nodes = np.flatnonzero(within)
    at_depth = np.bincount(row.depths[nodes], minlength=2)
    levels = min(shape.depth, len(at_depth) if at_depth[1] else 1)
    expanded = int(np.minimum(at_depth[1:levels], shape.beam).sum())
    return (None if len(nodes) == len(row.depths) else nodes), levels, expanded


def take(candidates: Candidates, nodes: Ints) -> Candidates:
    """The pool of some nodes, given in rising order and closed."""
    pool = candidates.pool
    places = np.full(len(pool) + 1, -1)  # the last entry serves the root, parent -1
    places[nodes] = np.arange(len(nodes))
    columns = ("tokens", "depths", "ranks", "log_probs", "state_rows")
    smaller = replace(
        pool, parents=places[pool.parents[nodes]], **{name: getattr(pool, name)[nodes] for name in columns}
    )
    return replace(
        candidates, pool=smaller, acceptance=candidates.acceptance[nodes], reach=candidates.reach[nodes],
        masks=[candidates.masks[node] for node in nodes.tolist()] if candidates.masks else [],
    )  # fmt: skip


def replay(spec: PolicySpec, rows: ReplayRows, profile: DeviceProfile, oracle: bool = False) -> ReplayResult:
    """Replay a policy over all rows. `oracle`: selection sees the experts really used, the ceiling of any predictor.

    UserError if the policy or its acceptance model needs a predictor and `rows` were scored without one.
    """
    policy, kind = build_policy(spec), spec.acceptance_kind(rows.best)
    if kind not in rows.prompts[0][0].candidates:
        raise UserError(f"policy '{spec}': acceptance={kind} needs a predictor; give one, or use acceptance=raw")
    step = Step(policy, kind, rows.pool.cut(spec.depth, spec.min_reach).cut(deepest(policy)), profile, oracle, rows)
    tokens = passes = drafts = nodes = experts = 0
    ms = draft_ms = 0.0
    for prompt in rows.prompts:
        gate = DraftGate(policy.pause if isinstance(policy, Pausing) else 0)
        position = 0
        while position < len(prompt):
            row = prompt[position]
            chosen: list[int] = []
            drafting = 0.0
            if policy.drafts and gate.passes():
                chosen, drafting = step(row, gate)
                drafts += 1
            union = row.used[0]
            for node in chosen:
                union |= row.used[node + 1]
            emitted = 1 + accepted(row, chosen)
            ms += profile.pass_ms(1 + len(chosen), union.bit_count(), row.context) + drafting
            draft_ms += drafting
            position += emitted
            tokens, passes, nodes = tokens + emitted, passes + 1, nodes + len(chosen)
            experts += union.bit_count()
    return ReplayResult(
        policy=str(spec), tokens=tokens, passes=passes, drafts=drafts, ms=ms, draft_ms=draft_ms, tokens_per_ms=tokens / ms,
        accept_length=tokens / passes, nodes=nodes / passes, experts_per_layer=experts / passes / rows.layers,
        draft_share=draft_ms / ms,
    )  # fmt: skip


@dataclass(frozen=True)
class Step:
    """The drafting half of one step: what is chosen at a row, and the ms that drafting, prediction and selection take."""

    policy: Policy
    kind: AcceptanceKind
    shape: PoolConfig
    profile: DeviceProfile
    oracle: bool
    rows: ReplayRows

    def __call__(self, row: ReplayRow, gate: DraftGate) -> tuple[list[int], float]:
        """Nodes of the row's recorded pool, and the time; the gate learns what the step gains."""
        kept, levels, expanded = kept_nodes(row, self.shape)
        size = len(row.depths) if kept is None else len(kept)
        drafting = self.profile.draft_ms(levels, expanded, size, self.policy.needs_routing or self.kind == "head")
        candidates, chosen = None, []
        if size:
            candidates = row.candidates[self.kind]
            if self.oracle:
                candidates = replace(candidates, masks=row.used[1:], root_mask=row.used[0])
            if kept is not None:
                candidates = take(candidates, kept)
                if self.kind != "raw":  # siblings share a softmax: those left out are out of it
                    logits = row.logits[kept] if self.kind == "head" else None
                    accepted = acceptance(candidates.pool, self.kind, self.rows.model, logits, self.rows.temperature)
                    candidates = with_acceptance(candidates, accepted)
            chosen = self.policy.select(candidates, self.profile, row.context)
        if isinstance(self.policy, Pausing):
            gate.record(self.policy.gain(candidates, chosen, self.profile, drafting))
        return (chosen if kept is None else kept[chosen].tolist()), drafting


def accepted(row: ReplayRow, chosen: list[int]) -> int:
    """How many of the `chosen` nodes (ascending) verification accepts."""
    at, count = -1, 0
    for node in chosen:
        if row.parents[node] == at and row.tokens[node] == row.next_tokens[at + 1]:
            at, count = node, count + 1
    return count


def replay_at_best_price(
    spec: PolicySpec, rows: ReplayRows, profile: DeviceProfile, start: float | None = None, scale: float = 1.0
) -> tuple[PolicySpec, ReplayResult]:
    """Find the price of `throughput` by Dinkelbach's iteration on totals: the next price is the rate just achieved.

    `start` is a first price in tokens per ms (None: plain decoding's rate). `scale` times the rate is the price; 1 is
    right for calibrated probabilities, more for optimistic ones. Returns the spec with the price that did best, and its
    result. Policies without a price are replayed as they are.
    """
    if spec.name != "throughput":
        return spec, replay(spec, rows, profile)
    price = scale * (start or 1.0 / profile.plain_ms)
    best: tuple[PolicySpec, ReplayResult] | None = None
    for _ in range(MAX_PRICE_ROUNDS):
        priced = spec.model_copy(update={"parameters": {**spec.parameters, "price": price}})
        result = replay(priced, rows, profile)
        if best is None or result.tokens_per_ms > best[1].tokens_per_ms:
            best = priced, result
        change = abs(scale * result.tokens_per_ms / price - 1.0)
        price = scale * result.tokens_per_ms
        if change < PRICE_TOLERANCE:
            break
    assert best is not None
    return best
