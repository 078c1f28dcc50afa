"""The most probable nodes, as many as the budget allows, whatever experts they need.

Source: the dynamic draft tree of EAGLE-2 (arXiv 2406.16858), kept by EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from ecospec_runtime.config import Config
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.policies.base import reach_probabilities
from ecospec_runtime.pool import Candidates


class ConfidencePolicy(Config):
    """Top-`budget` nodes by V(v), ties by index."""

    budget: int = Field(default=8, ge=1)  # nodes besides the root

    name: ClassVar[str] = "confidence"
    drafts: ClassVar[bool] = True
    needs_routing: ClassVar[bool] = False

    def select(self, candidates: Candidates, profile: DeviceProfile, context: int) -> list[int]:
        """See `Policy.select`."""
        values = reach_probabilities(candidates, candidates.pool.parents.tolist())
        order = sorted(range(len(values)), key=values.__getitem__, reverse=True)  # stable: ties keep index order
        return sorted(order[: self.budget])

    def parameters(self) -> dict[str, Any]:
        """See `Policy.parameters`."""
        return self.model_dump()
