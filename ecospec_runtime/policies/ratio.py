"""Frontier-greedy by probability per marginal expert, up to a fixed node budget.

Source: the selection rule of EcoSpec, "Less Experts, Faster Decoding" (arXiv 2607.12696):
S(t) = P(t) / (dCost(t | B) + epsilon), B the experts that the nodes chosen so far already need.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from ecospec_runtime.config import Config
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.policies.base import expert_buffer, reach_probabilities, require_masks
from ecospec_runtime.pool import Candidates


class RatioPolicy(Config):
    """Adds the frontier node with the largest V / (new experts per layer + epsilon) until `budget` nodes are chosen.

    New experts are averaged over the MoE layers, so `epsilon` (the price of a node that needs nothing new, in experts
    per layer) means the same for a model of any depth. `capacity` and `penalty`: see `ExpertBuffer`.
    """

    budget: int = Field(default=4, ge=1)  # nodes besides the root
    epsilon: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    capacity: int | None = Field(default=None, ge=1)  # experts per layer; None: unlimited
    penalty: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)  # expert reads per overflow

    name: ClassVar[str] = "ratio"
    drafts: ClassVar[bool] = True
    needs_routing: ClassVar[bool] = True

    def select(self, candidates: Candidates, profile: DeviceProfile, context: int) -> list[int]:
        """See `Policy.select`."""
        parents = candidates.pool.parents.tolist()
        values = reach_probabilities(candidates, parents)
        masks = require_masks(candidates, self.name)
        children: list[list[int]] = [[] for _ in range(len(values) + 1)]  # last entry: children of the root (parent -1)
        for i, parent in enumerate(parents):
            children[parent].append(i)

        buffer = expert_buffer(profile, self.capacity, self.penalty, candidates)
        covered = candidates.root_mask
        frontier = children[-1].copy()
        chosen: list[int] = []
        epsilon = self.epsilon * candidates.layers  # in experts of all layers, as the counts below
        while frontier and len(chosen) < self.budget:
            uncovered = ~covered
            if buffer is None:
                scores = [values[i] / ((masks[i] & uncovered).bit_count() + epsilon) for i in frontier]
            else:
                paid = buffer.cost(covered)
                scores = [values[i] / (buffer.cost(masks[i] | covered) - paid + epsilon) for i in frontier]
            node = frontier.pop(max(range(len(scores)), key=lambda k: (scores[k], -frontier[k])))
            chosen.append(node)
            covered |= masks[node]
            frontier.extend(children[node])
        return sorted(chosen)

    def parameters(self) -> dict[str, Any]:
        """See `Policy.parameters`."""
        return self.model_dump()
