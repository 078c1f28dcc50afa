"""A chain of candidates whose length is set by measured utility: tokens per step over what the step costs.

Source: Cascade, "Utility-Driven Speculative Decoding for Mixture-of-Experts" (arXiv 2506.20675). The utility of a chain of
length K is U = (tokens per step) / (time of a step / time of a plain step), the speed-up itself. Short tests find the K of
highest utility, which is then kept for longer; where even that stays below 1 speculation is off, each time for twice as long.

Tokens are those that the target really accepted. Time is the device profile's in place of a clock, so that a replay decides as
the engine does: drafting as it was, and for each node a share of a token's experts (`overlap`), for no expert's identity is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field

from ecospec_runtime.config import Config
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.gate import Outlook, Resting, repaying
from ecospec_runtime.policies.base import flat_node_ms, reach_probabilities
from ecospec_runtime.pool import Candidates

FIRST = 2  # length of the first chain
BACK_OFF = 16  # pauses grow up to this many times the first, or until they repay the test that failed


class UtilityPolicy(Config):
    """Verifies the chain of likeliest children; a `UtilityGate` sets how deep it is drafted. Defaults are Cascade's."""

    overlap: float = Field(default=0.3, ge=0.0, le=1.0)  # share of a node's experts that the pass reads anyway
    budget: int | None = Field(default=None, ge=1)  # longest chain; None: as deep as the pool
    trial: int = Field(default=4, ge=1)  # steps for which a length is tried
    trials: int = Field(default=4, ge=1)  # most lengths tried in a test
    hold: int = Field(default=16, ge=1)  # steps for which the best length is kept
    pause: int = Field(default=16, ge=1)  # plain steps where none pays, before the next test

    name: ClassVar[str] = "utility"
    drafts: ClassVar[bool] = True
    needs_routing: ClassVar[bool] = False
    needs_profile: ClassVar[bool] = True

    def select(self, candidates: Candidates, profile: DeviceProfile, context: int) -> list[int]:
        """See `Policy.select`."""
        parents = candidates.pool.parents.tolist()
        values = reach_probabilities(candidates, parents)
        likeliest: dict[int, int] = {}  # child by parent
        for node, parent in enumerate(parents):
            if parent not in likeliest or values[node] > values[likeliest[parent]]:
                likeliest[parent] = node
        chain = [-1]
        while chain[-1] in likeliest:
            chain.append(likeliest[chain[-1]])
        return chain[1:][: self.budget]

    def gate(self, depth: int) -> UtilityGate:
        """See `Pausing`."""
        return UtilityGate(self, depth)

    def outlook(
        self, candidates: Candidates | None, chosen: list[int], profile: DeviceProfile, draft_ms: float
    ) -> Outlook:
        """See `Pausing`. Time counts at the rate of plain decoding."""
        extra_ms, tokens = draft_ms, 0.0
        if candidates is not None and chosen:
            values = reach_probabilities(candidates, candidates.pool.parents.tolist())
            tokens = sum(values[node] for node in chosen)
            extra_ms += profile.plain_saving_ms + len(chosen) * flat_node_ms(profile, self.overlap)
        return Outlook(tokens, extra_ms / profile.plain_ms)

    def parameters(self) -> dict[str, Any]:
        """See `Policy.parameters`."""
        return self.model_dump()


@dataclass
class UtilityGate(Resting):
    """Test and set: climbs to the length of highest utility, a few steps each, and keeps it for a while. See `gate.Gate`."""

    policy: UtilityPolicy
    longest: int
    depth: int | None = None
    off: int = 0  # plain steps of the last pause; 0: the last test found a length that pays
    holding: bool = False  # keeping a length; else testing it
    steps: int = 0  # so far with this length, and in them ...
    tokens: float = 0.0  # ... tokens of target and drafter, and
    cost: float = 0.0  # ... time, in plain steps
    tried: dict[int, float] = field(default_factory=dict)  # utility by length, of this test
    lost: float = 0.0  # by this test, in tokens

    def __post_init__(self) -> None:
        self.depth = min(FIRST, self.longest)

    def verified(self, accepted: int) -> None:
        """See `gate.Gate`."""
        assert self.outlook is not None
        self.tokens += 1 + accepted
        self.cost += 1.0 + self.outlook.cost
        self.steps += 1
        if self.steps < (self.policy.hold if self.holding else self.policy.trial):
            return
        if self.holding:
            self.holding = False
        else:
            assert self.depth is not None
            self.tried[self.depth] = self.tokens / self.cost
            self.lost += self.cost - self.tokens
            self.depth = self._next_length() or self._conclude()
        self.steps, self.tokens, self.cost = 0, 0.0, 0.0

    def _next_length(self) -> int | None:
        """An untried neighbour of the best length so far, the longer one first if that pays; None: the test is over."""
        best = max(self.tried, key=self.tried.__getitem__)
        if len(self.tried) == self.policy.trials or self.tried.get(1, 1.0) < 1.0:
            return None
        neighbours = (best + 1, best - 1) if self.tried[best] >= 1.0 else (best - 1, best + 1)
        return next((k for k in neighbours if 1 <= k <= self.longest and k not in self.tried), None)

    def _conclude(self) -> int:
        """The best length of the test, to be kept, or to start from after a pause."""
        best = max(self.tried, key=self.tried.__getitem__)
        self.holding = self.tried[best] >= 1.0
        if self.holding:
            self.off = 0
        else:
            longest = max(BACK_OFF * self.policy.pause, repaying(self.lost))
            self.wait = self.off = min(2 * self.off, longest) if self.off else self.policy.pause
        self.tried, self.lost = {}, 0.0
        return best
