"""Exact replay of recorded traces: what a policy would have accepted, and what that would have cost on a device.

Start at the first position of a prompt; choose a set from the pool recorded there; follow `next_tokens` from the root
through the set; jump ahead by what was emitted. Time is the device profile's, for the union of experts that root and set
really used. `replay_steps` gives these steps one by one, as the engine records its own; `replay` sums them.

Exact for policies that choose from the recorded pool or cut it, on traces with a pool at every position: in float32 the steps
are those of an engine that decodes the prompts one after the other, each with its text's first token. What it has seen of drafting
carries over from prompt to prompt: one gate for the whole replay. Legend: n chosen nodes of a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ecospec_runtime.acceptance import AcceptanceKind
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.gate import Gate
from ecospec_runtime.policies import Policy, PolicySpec, build_policy
from ecospec_runtime.policies.base import Pausing, deepest, gate_of
from ecospec_runtime.scoring import network_for
from ecospec_runtime.statistics import PassRecord
from ecospec_train.replay_pools import CutPools
from ecospec_train.replay_rows import PackedShard, ReplayRows, as_mask, load_rows

__all__ = [
    "ReplayResult", "ReplayRows", "ReplayStep", "load_rows", "replay", "replay_at_best_price", "replay_steps",
]  # fmt: skip

MAX_PRICE_ROUNDS = 6
PRICE_TOLERANCE = 1e-3  # relative change of the rate at which the price counts as found


class ReplayStep(NamedTuple):
    """One pass of a replay."""

    prompt: int  # index into `ReplayRows.prompts`
    record: PassRecord
    ms: float
    draft_ms: float  # part of `ms` spent on drafting, prediction and selection


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


def replay(spec: PolicySpec, rows: ReplayRows, profile: DeviceProfile, oracle: bool = False) -> ReplayResult:
    """Replay a policy over all rows. `oracle`: selection sees the experts really used, the ceiling of any predictor.

    UserError if the policy or its acceptance model needs a predictor and `rows` were scored without one.
    """
    tokens = passes = drafts = nodes = experts = 0
    ms = draft_ms = 0.0
    for _, record, step_ms, step_draft_ms in replay_steps(spec, rows, profile, oracle):
        tokens += len(record.emitted)
        passes += 1
        drafts += record.drafted
        nodes += len(record.tokens)
        experts += record.union
        ms += step_ms
        draft_ms += step_draft_ms
    return ReplayResult(
        policy=str(spec), tokens=tokens, passes=passes, drafts=drafts, ms=ms, draft_ms=draft_ms, tokens_per_ms=tokens / ms,
        accept_length=tokens / passes, nodes=nodes / passes, experts_per_layer=experts / passes / rows.layers,
        draft_share=draft_ms / ms,
    )  # fmt: skip


def replay_steps(
    spec: PolicySpec, rows: ReplayRows, profile: DeviceProfile, oracle: bool = False, max_new_tokens: int | None = None
) -> Iterator[ReplayStep]:
    """The passes of a replay, prompt by prompt. Each prompt starts with the text's first token as the root.

    A text goes on to its last recorded position, and its last pass as far as that one gets, but never past an end token.
    With `max_new_tokens` it also ends as a decode of so many tokens does, the root not counted (at most the prompt's rows).
    """
    policy, kind = build_policy(spec), spec.acceptance_kind(rows.best)
    if kind not in rows.prompts[0].shard.kinds:
        raise UserError(f"policy '{spec}': acceptance={kind} needs a predictor; give one, or use acceptance=raw")
    shape = rows.pool.cut(spec.depth, spec.min_reach).cut(deepest(policy))
    gate = gate_of(policy, shape.depth)
    chooser = Chooser(policy, policy if isinstance(policy, Pausing) else None, kind, profile, oracle)
    numbered = enumerate(rows.prompts)
    for shard, group in groupby(numbered, key=lambda entry: entry[1].shard):
        prompts = list(group)
        first = min(prompt.first for _, prompt in prompts)
        last = max(prompt.first + len(prompt) for _, prompt in prompts)

        @cache
        def cut(depth: int | None, shard: PackedShard = shard, first: int = first, last: int = last) -> CutPools:
            return CutPools(shard, first, last, rows, shape.cut(depth), kind)

        for number, prompt in prompts:
            span = range(prompt.first - first, prompt.first - first + len(prompt))
            for record, union, draft_ms in follow(cut, span, chooser, gate, rows.end_tokens, max_new_tokens):
                reads = profile.reads(union, shard.experts)
                pass_ms = profile.pass_ms(1 + len(record.tokens), reads, record.context)
                yield ReplayStep(number, record, pass_ms + draft_ms, draft_ms)


def follow(
    cut: Callable[[int | None], CutPools], span: range, chooser: Chooser, gate: Gate, ends: tuple[int, ...],
    max_new_tokens: int | None,
) -> Iterator[tuple[PassRecord, int, float]]:  # fmt: skip
    """The passes over one prompt's rows `span`, each with the experts it reads and its ms of drafting. `cut` gives the pools of so many levels."""
    position = 0
    while position < len(span):
        row = span[position]
        room = None if max_new_tokens is None else max_new_tokens - position
        if room == 0:
            return
        chosen: list[int] = []
        draft_ms = 0.0
        drafted = chooser.policy.drafts and room != 1 and gate.passes()
        pools = cut(gate.depth)
        if drafted:
            chosen, draft_ms = chooser(pools, row, gate)
        record, union = verify(pools, row, chosen, drafted, ends, room)
        if drafted:
            gate.verified(record.accepted)
        yield record, union, draft_ms
        position += len(record.emitted)


@dataclass(frozen=True)
class Chooser:
    """The drafting half of a step: what is chosen at a row, and the ms that drafting, prediction and selection take."""

    policy: Policy
    pausing: Pausing | None  # the same, if it has drafting stop where it does not pay
    kind: AcceptanceKind
    profile: DeviceProfile
    oracle: bool

    def __call__(self, pools: CutPools, row: int, gate: Gate) -> tuple[list[int], float]:
        """Nodes of the row's cut pool, and the time; the gate learns what the step promises."""
        policy, profile, size = self.policy, self.profile, pools.size(row)
        network = network_for(self.kind, policy.needs_routing)
        draft_ms = profile.draft_ms(pools.levels[row], pools.expanded[row], size, network)
        candidates, chosen = None, []
        if size:
            masks = ("used" if self.oracle else "predicted") if policy.needs_routing else None
            candidates = pools.candidates(row, masks)
            chosen = policy.select(candidates, profile, pools.contexts[row])
        if self.pausing is not None:
            gate.record(self.pausing.outlook(candidates, chosen, profile, draft_ms))
        return chosen, draft_ms


def verify(
    pools: CutPools, row: int, chosen: list[int], drafted: bool, ends: tuple[int, ...], room: int | None
) -> tuple[PassRecord, int]:  # fmt: skip
    """What a pass over the row's root and `chosen` nodes (ascending) comes to, see `ecospec_runtime.verify.walk`, and its
    experts, a bit set."""
    verified = pools.verified(row, chosen)
    next_tokens: list[int] = verified["next_token"].tolist()
    tokens, nodes_above = pools.tree(row, chosen) if chosen else ([], [])
    row_of = {-1: 0} | {node: i for i, node in enumerate(chosen, start=1)}
    parents = [row_of[node] for node in nodes_above]
    at, emitted = 0, [next_tokens[0]]
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        if parent == at and token == next_tokens[at]:
            at = i
            emitted.append(next_tokens[i])
    accepted = len(emitted) - 1
    end = next((i for i, token in enumerate(emitted, start=1) if token in ends), None)
    union = as_mask(np.bitwise_or.reduce(verified["used"], axis=0))
    record = PassRecord(
        context=pools.contexts[row], drafted=drafted, tokens=tuple(tokens), parents=tuple(parents), accepted=accepted,
        emitted=tuple(emitted[:end][:room]), union=union.bit_count(),
    )  # fmt: skip
    return record, union


def replay_at_best_price(
    spec: PolicySpec, rows: ReplayRows, profile: DeviceProfile, start: float | None = None, scale: float = 1.0,
    oracle: bool = False,
) -> tuple[PolicySpec, ReplayResult]:  # fmt: skip
    """Find the price of `throughput` by Dinkelbach's iteration on totals: the next price is the rate just achieved.

    `start` is a first price in tokens per ms (None: plain decoding's rate). `scale` times the rate is the price; 1 is
    right for calibrated probabilities, more for optimistic ones. Where nodes are charged alike (`node_experts`), the gate is
    told what they really added in the replay before: losses that it does not see it cannot stop. Returns the spec with the
    price that did best, and its result. Policies without a price are replayed as they are. `oracle`: see `replay`.
    """
    if spec.name != "throughput":
        return spec, replay(spec, rows, profile, oracle)
    price = scale * (start or 1.0 / profile.plain_ms)
    best: tuple[PolicySpec, ReplayResult] | None = None
    flat, gate = "node_experts" in spec.parameters, spec.parameters.get("gate_experts")
    for _ in range(MAX_PRICE_ROUNDS):
        told = {} if gate is None else {"gate_experts": gate}
        priced = spec.model_copy(update={"parameters": {**spec.parameters, "price": price, **told}})
        result = replay(priced, rows, profile, oracle)
        untold = flat and gate is None and result.nodes > 0
        if untold:
            gate = max(0.0, (result.experts_per_layer - rows.top_k) / result.nodes)
        elif best is None or result.tokens_per_ms > best[1].tokens_per_ms:
            best = priced, result
        change = abs(scale * result.tokens_per_ms / price - 1.0)
        price = scale * result.tokens_per_ms
        if change < PRICE_TOLERANCE and not untold:
            break
    assert best is not None
    return best
