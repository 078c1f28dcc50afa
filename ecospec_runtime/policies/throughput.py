"""The set that buys the most tokens for the time it takes: maximise sum V - price * T over closed sets.

Source: this project's own rule. T is the profiled pass time, the price is a long-run rate in tokens per ms
(found by replay, `ecospec_train.tune`). Drafting and prediction are already paid for when a set is chosen and are no
part of T here; whether they are worth it is for `outlook` and the `DraftGate` to say.

With unlimited capacity the objective is supermodular: a node is worth more, never less, once the set has grown. So
- a leaf that does not pay even in the company of the whole pool is in no optimal set: peeling such leaves leaves an
  upper bound;
- a path that pays now is in some optimal set whatever else is chosen: taking every such path gives a lower bound.
Mostly the two meet, which proves the set optimal. Between them, paths may pay only together: there the path that covers
the largest share of its own cost is taken on credit, the sweep goes on, and the best set met on the way is kept. (The
exact optimum is a minimum cut; tests compare with it.) Legend: n nodes of the pool.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from ecospec_runtime.config import Config
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.gate import DraftGate, Outlook
from ecospec_runtime.policies.base import ExpertBuffer, expert_buffer, reach_probabilities, require_masks
from ecospec_runtime.pool import Candidates

CREDIT = 6  # paths in a row taken though they do not pay, before giving up
SEEDS = 4  # first paths on credit that are tried while the set is still empty


class ThroughputPolicy(Config):
    """Maximises sum of V - price * (pass time) over closed sets of at most `budget` nodes.

    `capacity` and `penalty`: see `ExpertBuffer`; with a capacity the search is the same but no longer near-exact.
    """

    price: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)  # tokens per ms; None: plain decoding's
    budget: int | None = Field(default=None, ge=1)  # nodes besides the root; None: as many as pay
    capacity: int | None = Field(default=None, ge=1)  # experts per layer; None: unlimited
    penalty: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)  # expert reads per overflow
    # Experts per layer that every node is charged in place of a prediction; None: what is predicted for it. A prediction
    # takes time of its own, which it must earn back.
    node_experts: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    # Experts per layer that a node adds on average, for the gate, where `node_experts` is what a further one should be charged:
    # the first nodes of a pass share least. None: the same.
    gate_experts: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    pause: int = Field(default=4, ge=0)  # plain steps once drafting no longer pays, before it is tried again; 0: never

    name: ClassVar[str] = "throughput"
    drafts: ClassVar[bool] = True
    needs_profile: ClassVar[bool] = True

    @model_validator(mode="after")
    def _one_charge(self) -> Self:
        if self.node_experts is not None and self.capacity is not None:
            raise UserError("throughput: 'capacity' needs predicted experts; leave out 'capacity' or 'node_experts'")
        if self.gate_experts is not None and self.node_experts is None:
            raise UserError("throughput: 'gate_experts' is for 'node_experts'; predicted experts need none")
        return self

    @property
    def needs_routing(self) -> bool:
        """See `Policy`."""
        return self.node_experts is None

    def select(self, candidates: Candidates, profile: DeviceProfile, context: int) -> list[int]:
        """See `Policy.select`."""
        parents = candidates.pool.parents.tolist()
        masks = require_masks(candidates, self.name) if self.needs_routing else [0] * len(candidates)
        price = self.tokens_per_ms(profile)
        token_cost = price * self.token_ms(profile, candidates.layers)
        worth = [value - token_cost for value in reach_probabilities(candidates, parents)]
        buffer = expert_buffer(profile, self.capacity, self.penalty, candidates)
        search = _Search(parents, worth, masks, candidates.root_mask, price * profile.per_expert_ms, buffer)
        chosen = search.run(self.budget)
        tokens, extra_ms = self._expected(candidates, chosen, profile)
        return chosen if tokens > price * extra_ms else []

    def tokens_per_ms(self, profile: DeviceProfile) -> float:
        """The price of time."""
        return 1.0 / profile.plain_ms if self.price is None else self.price

    def token_ms(self, profile: DeviceProfile, layers: int) -> float:
        """Time that a node takes apart from the experts predicted for it."""
        return profile.per_token_ms + profile.per_expert_ms * layers * (self.node_experts or 0.0)

    def gate(self, depth: int) -> DraftGate:
        """See `Pausing`."""
        return DraftGate(self.pause)

    def outlook(
        self, candidates: Candidates | None, chosen: list[int], profile: DeviceProfile, draft_ms: float
    ) -> Outlook:
        """See `Pausing`. Time counts at the rate of plain decoding, whatever the price: that is what a rest would give."""
        tokens, extra_ms = (0.0, 0.0) if candidates is None else self._expected(candidates, chosen, profile)
        if candidates is not None and self.gate_experts is not None and self.node_experts is not None:
            experts = candidates.layers * len(chosen) * (self.gate_experts - self.node_experts)
            extra_ms += profile.per_expert_ms * experts
        return Outlook(tokens, (draft_ms + extra_ms) / profile.plain_ms)

    def _expected(self, candidates: Candidates, chosen: list[int], profile: DeviceProfile) -> tuple[float, float]:
        """Draft tokens expected to be accepted, and the ms that their pass takes beyond a plain step."""
        if not chosen:
            return 0.0, 0.0
        values = reach_probabilities(candidates, candidates.pool.parents.tolist())
        experts = 0.0
        if self.needs_routing:
            union = 0
            for node in chosen:
                union |= candidates.masks[node]
            experts = profile.reads(union & ~candidates.root_mask, candidates.experts)
        extra_ms = self.token_ms(profile, candidates.layers) * len(chosen) + profile.per_expert_ms * experts
        return sum(values[node] for node in chosen), profile.plain_saving_ms + extra_ms

    def parameters(self) -> dict[str, Any]:
        """See `Policy.parameters`."""
        return self.model_dump()


class _Search:
    """One selection. A set is a list of flags by node; `covered` is its experts, `value` its sum of worth minus cost."""

    def __init__(
        self,
        parents: list[int],
        worth: list[float],
        masks: list[int],
        root_mask: int,
        expert_cost: float,
        buffer: ExpertBuffer | None,
    ) -> None:
        self.parents, self.worth, self.masks = parents, worth, masks
        self.root_mask, self.expert_cost, self.buffer = root_mask, expert_cost, buffer
        self.nodes: list[int] = []  # what may be chosen: the upper bound, ascending
        self.paths = [0] * len(parents)  # experts of the whole path from the root

    def run(self, budget: int | None) -> list[int]:
        """The best closed set found, ascending; at most `budget` nodes."""
        # Worth falls along a path: a node that does not pay for its own token ends its branch.
        self.nodes = self._drop_leaves([i for i, worth in enumerate(self.worth) if worth > 0.0])
        for i in self.nodes:
            parent = self.parents[i]
            self.paths[i] = self.masks[i] if parent < 0 else self.masks[i] | self.paths[parent]
        flags = [False] * len(self.parents)
        covered, value, pending = self._sweep(flags, self.root_mask, 0.0)
        best_value, best = value, flags
        for _, seed in sorted(pending, reverse=True)[:SEEDS]:
            trial_value, trial = self._on_credit(seed, flags.copy(), covered, value)
            if trial_value > best_value:
                best_value, best = trial_value, trial
            if any(best):
                break
        chosen = [i for i in self.nodes if best[i]]
        return self._drop_leaves(chosen, budget) if pending or budget is not None else chosen

    def _marginals(self, masks: list[int], covered: int) -> list[float]:
        """Cost of what each of `masks` holds beyond `covered`."""
        cost, buffer = self.expert_cost, self.buffer
        if buffer is None:
            uncovered = ~covered
            return [cost * (mask & uncovered).bit_count() for mask in masks]
        paid = buffer.cost(covered)
        return [cost * (buffer.cost(mask | covered) - paid) for mask in masks]

    def _sweep(self, flags: list[bool], covered: int, value: float) -> tuple[int, float, list[tuple[float, int]]]:
        """Take paths that pay until none does. Returns covered, value and (share of its cost that it pays, node)."""
        parents, worth, paths = self.parents, self.worth, self.paths
        rest = [0.0] * len(parents)  # worth of the part of the path that is not in the set
        pending: list[tuple[float, int]] = []
        grew = True
        while grew:
            grew, pending = False, []
            left = [i for i in self.nodes if not flags[i]]
            for i, cost in zip(left, self._marginals([paths[i] for i in left], covered), strict=True):
                parent = parents[i]
                attached = parent < 0 or flags[parent]
                gain = rest[i] = worth[i] if attached else worth[i] + rest[parent]
                if gain <= cost:
                    pending.append((gain / cost, i))
                    continue
                covered, value = self._add(i, gain, flags, covered, value)
                grew = True
                if not attached or self.buffer is not None:
                    break  # what was computed for the others is stale (a cost that only fell may stay)
        return covered, value, pending

    def _add(self, node: int, gain: float, flags: list[bool], covered: int, value: float) -> tuple[int, float]:
        """Put the node's path, worth `gain` beyond what is in the set, into the set: new covered and value."""
        path = self.paths[node]
        value += gain - self._marginals([path], covered)[0]
        while node >= 0 and not flags[node]:
            flags[node] = True
            node = self.parents[node]
        return covered | path, value

    def _on_credit(self, node: int, flags: list[bool], covered: int, value: float) -> tuple[float, list[bool]]:
        """Take `node`'s path, then whichever pays most of its cost, sweeping between: the best value and set met."""
        best_value, best = value, flags.copy()
        failures = 0
        while failures < CREDIT:
            gain, step = 0.0, node
            while step >= 0 and not flags[step]:
                gain += self.worth[step]
                step = self.parents[step]
            covered, value = self._add(node, gain, flags, covered, value)
            covered, value, pending = self._sweep(flags, covered, value)
            failures += 1
            if value > best_value:
                best_value, best, failures = value, flags.copy(), 0
            if not pending:
                break
            node = max(pending)[1]
        return best_value, best

    def _drop_leaves(self, chosen: list[int], budget: int | None = None) -> list[int]:
        """Take out leaves worth no more than the experts that serve them alone, then the least worthy over `budget`."""
        cost, parents, masks = self.expert_cost, self.parents, self.masks
        reads = int.bit_count if self.buffer is None else self.buffer.reads
        while True:
            once = twice = self.root_mask
            for i in chosen:
                twice |= once & masks[i]
                once |= masks[i]
            alone = once & ~twice
            inner = {parents[i] for i in chosen}
            own = {i: masks[i] & alone for i in chosen if i not in inner}
            gains = [(self.worth[i] - cost * reads(mask), i) for i, mask in own.items()]
            dropped = {i for gain, i in gains if gain <= 0.0}
            if not dropped and budget is not None and len(chosen) > budget:
                dropped = {min(gains)[1]}
            if not dropped:
                return chosen
            chosen = [i for i in chosen if i not in dropped]
