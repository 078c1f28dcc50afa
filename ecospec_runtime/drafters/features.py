"""The target's last hidden state, kept row by row for drafters that have no state of their own to show the predictor.

Legend of shapes: m rows, H hidden size of the target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ecospec_runtime.pool import Floats

_ROOM = 512  # rows of a new buffer


class HiddenRows:
    """Rows `[m, H]` of one sequence, in the target's dtype; the buffer doubles."""

    def __init__(self, width: int):
        self._width, self._length = width, 0
        self._rows: Tensor | None = None

    def __len__(self) -> int:
        return self._length

    def append(self, features_mH: Tensor) -> None:
        """Add rows; ValueError if they have another width."""
        count, width = features_mH.shape
        if width != self._width:
            raise ValueError(f"features are {width} wide, the target's hidden states are {self._width}")
        if self._rows is None:
            self._rows = features_mH.new_empty(_ROOM, width)
        end = self._length + count
        if end > len(self._rows):
            larger = self._rows.new_empty(max(end, 2 * len(self._rows)), width)
            larger[: self._length] = self._rows[: self._length]
            self._rows = larger
        self._rows[self._length : end] = features_mH
        self._length = end

    def shown(self, row: int) -> Floats:
        """Row `row` as the states `[1, H]` of a pool."""
        assert self._rows is not None
        with torch.inference_mode():
            return self._rows[row : row + 1].float().numpy(force=True)
