"""The policy protocol and what all policies share: clean probabilities, expert cost under a finite buffer.

A new policy is one file in this folder plus its line in `policies/__init__.py`. Legend: n nodes of the pool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.gate import DraftGate, Gate, Outlook
from ecospec_runtime.pool import Candidates


class Policy(Protocol):
    """Turns candidates into a verification set. Deterministic; sees nothing of the target's draw."""

    @property
    def name(self) -> str:
        """Name in `POLICIES`."""
        ...

    @property
    def drafts(self) -> bool:
        """False: plain decoding, the drafter is not run."""
        ...

    @property
    def needs_routing(self) -> bool:
        """False: the engine may skip the routing half of the predictor."""
        ...

    def select(self, candidates: Candidates, profile: DeviceProfile, context: int) -> list[int]:
        """Indices of the chosen nodes, ascending and ancestor-closed; an empty list is a plain step.

        `context` is the number of cached tokens.
        """
        ...

    def parameters(self) -> dict[str, Any]:
        """The parameters that rebuild this policy: JSON-compatible."""
        ...


@runtime_checkable
class Pausing(Protocol):
    """What a policy adds if drafting shall stop where it does not pay."""

    def gate(self, depth: int) -> Gate:
        """The memory of a new engine, or replay, whose pools are at most `depth` levels deep."""
        ...

    def outlook(
        self, candidates: Candidates | None, chosen: list[int], profile: DeviceProfile, draft_ms: float
    ) -> Outlook:
        """What a step is expected to gain over a plain one, and what it costs; no candidates: the pool was empty."""
        ...


def gate_of(policy: Policy, depth: int) -> Gate:
    """A gate that knows nothing yet; `depth`: most levels of the pools."""
    return policy.gate(depth) if isinstance(policy, Pausing) else DraftGate(pause=0)


def deepest(policy: Policy) -> int | None:
    """Levels of the pool beyond which a policy cannot choose: a closed set of `budget` nodes is at most so deep."""
    budget: int | None = getattr(policy, "budget", None)
    return budget


def reach_probabilities(candidates: Candidates, parents: list[int]) -> list[float]:
    """V of each node, `[n]`, made safe: in [0, 1], never above the parent's.

    A NaN, infinite or negative value says nothing about the node and counts as 0. Because no child exceeds its parent,
    ordering by falling value (ties by index, parents first) is ancestor-closed.
    """
    values: list[float] = candidates.reach.tolist()
    for i, parent in enumerate(parents):
        value = values[i]
        if not 0.0 <= value < math.inf:  # NaN fails every comparison
            value = 0.0
        values[i] = min(value, values[parent] if parent >= 0 else 1.0)
    return values


def flat_node_ms(profile: DeviceProfile, overlap: float) -> float:
    """Time that a node takes of whose experts only a share is known: `overlap` of them are read for others anyway."""
    return profile.per_token_ms + (1.0 - overlap) * profile.expert_share * profile.plain_ms


def require_masks(candidates: Candidates, policy: str) -> list[int]:
    """Predicted expert sets, `[n]`; UserError when nothing was predicted, because cost would read as zero."""
    if len(candidates.masks) != len(candidates):
        raise UserError(
            f"policy '{policy}' weighs experts but no routing was predicted: load a predictor or use 'confidence'"
        )
    return candidates.masks


@dataclass(frozen=True)
class ExpertBuffer:
    """How many expert reads a set of (layer, expert) pairs costs: `profile.reads`, plus `penalty` per overflow.

    A layer that holds more than `capacity` experts overflows by the difference; each overflow costs `penalty` further
    reads (an expert evicted and read again); a very large `penalty` amounts to a ban.
    """

    profile: DeviceProfile
    capacity: int | None  # experts per layer; None: unlimited
    penalty: float
    experts: int

    def reads(self, union: int) -> float:
        """Reads for the bit set `union` (bit `layer * experts + expert`) without overflows."""
        return self.profile.reads(union, self.experts)

    def cost(self, union: int) -> float:
        """Reads for the bit set `union`."""
        reads = self.reads(union)
        if self.capacity is None or union.bit_count() <= self.capacity:
            return reads
        layer_bits = (1 << self.experts) - 1
        overflow = 0
        while union:
            overflow += max(0, (union & layer_bits).bit_count() - self.capacity)
            union >>= self.experts
        return reads + self.penalty * overflow if overflow else reads


def expert_buffer(
    profile: DeviceProfile, capacity: int | None, penalty: float, candidates: Candidates
) -> ExpertBuffer | None:  # fmt: skip
    """The buffer of a selection; None where a set costs as many reads as it has experts."""
    if capacity is None and not profile.layer_costs:
        return None
    return ExpertBuffer(profile, capacity, penalty, candidates.experts)
