"""The policy protocol. A new policy is one file in this folder plus its line in `policies/__init__.py`."""

from __future__ import annotations

from typing import Any, Protocol

from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.pool import Candidates


class Policy(Protocol):
    """Turns candidates into a verification set. Deterministic; sees nothing of the target's draw."""

    name: str
    drafts: bool  # False: plain decoding, the drafter is not run
    needs_routing: bool  # False: the engine may skip the routing half of the predictor

    def select(self, candidates: Candidates, profile: DeviceProfile, context: int) -> list[int]:
        """Indices of the chosen nodes, ascending and ancestor-closed; an empty list is a plain step.

        `context` is the number of cached tokens.
        """
        ...

    def parameters(self) -> dict[str, Any]:
        """The parameters that rebuild this policy: JSON-compatible."""
        ...
