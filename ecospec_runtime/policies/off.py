"""No speculation: plain autoregressive decoding, the yardstick of every other policy."""

from __future__ import annotations

from typing import Any, ClassVar

from ecospec_runtime.config import Config
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.pool import Candidates


class OffPolicy(Config):
    """Never drafts."""

    name: ClassVar[str] = "off"
    drafts: ClassVar[bool] = False
    needs_routing: ClassVar[bool] = False

    def select(self, candidates: Candidates, profile: DeviceProfile, context: int) -> list[int]:
        """Always the empty set."""
        return []

    def parameters(self) -> dict[str, Any]:
        """None to set."""
        return {}
