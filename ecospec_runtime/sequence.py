"""What belongs to one text: a batch is a list of these. See `engine`."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ecospec_runtime.cache import TargetCache
from ecospec_runtime.gate import DraftGate, Gate
from ecospec_runtime.sampling import Sampler
from ecospec_runtime.scoring import Scorer
from ecospec_runtime.statistics import Statistics
from ecospec_runtime.stopping import TextStream


@dataclass
class Sequence:
    """One text being decoded. The root is chosen but not yet cached; the cache holds everything before it."""

    prompt: list[int]
    sampler: Sampler
    text: TextStream
    cache: TargetCache
    root: int
    scorer: Scorer  # of its sampling temperature
    draft_state: Any = None  # the drafter's own sequence; None when nothing is drafted, or will be to the text's end
    behind_tokens: list[int] = field(default_factory=list)  # rows the drafter has not been given yet: tokens ...
    behind_features: list[Tensor] = field(default_factory=list)  # ... and features [m, F]
    seen: set[int] = field(default_factory=set)  # for the repetition penalty
    past: int = 0  # cached tokens
    gate: Gate = field(default_factory=lambda: DraftGate(pause=0))
    statistics: Statistics = field(default_factory=Statistics)


@dataclass
class Prefilled:
    """A prompt that the target has read, for several decodes after it, one at a time (see `Engine.generate`)."""

    prompt: list[int]
    cache: TargetCache
    features: list[Tensor]  # what a drafter needs of it, chunk by chunk

    def copy(self) -> Prefilled:
        """The same prompt with a cache of its own, for decodes that take turns."""
        with torch.inference_mode():
            return replace(self, cache=copy.deepcopy(self.cache))
