"""The most probable nodes, as many as give the most tokens per profiled time, whichever experts they need.

Source: EVICT (arXiv 2605.00342), which cuts a confidence-ordered tree where expected tokens over measured cost is largest and
takes no expert's identity into account.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from ecospec_runtime.config import Config
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.policies.base import flat_node_ms, reach_probabilities
from ecospec_runtime.pool import Candidates


class PrefixPolicy(Config):
    """Maximises (1 + sum of V) / (time of the pass) over prefixes of the nodes in falling order of V."""

    overlap: float = Field(default=0.3, ge=0.0, le=1.0)  # share of a node's experts that the pass reads anyway
    budget: int | None = Field(default=None, ge=1)  # nodes besides the root; None: as many as pay

    name: ClassVar[str] = "prefix"
    drafts: ClassVar[bool] = True
    needs_routing: ClassVar[bool] = False
    needs_profile: ClassVar[bool] = True

    def select(self, candidates: Candidates, profile: DeviceProfile, context: int) -> list[int]:
        """See `Policy.select`."""
        values = reach_probabilities(candidates, candidates.pool.parents.tolist())
        order = sorted(range(len(values)), key=values.__getitem__, reverse=True)[: self.budget]
        node_ms = flat_node_ms(profile, self.overlap)
        tokens, ms = 1.0, profile.plain_ms + profile.plain_saving_ms
        best, count = 1.0 / profile.plain_ms, 0
        for i, node in enumerate(order):
            tokens, ms = tokens + values[node], ms + node_ms
            if tokens / ms > best:
                best, count = tokens / ms, i + 1
        return sorted(order[:count])

    def parameters(self) -> dict[str, Any]:
        """See `Policy.parameters`."""
        return self.model_dump()
