"""The target's key-value cache: committed rows first, then the rows of the last pass until they are committed.

Legend of shapes: B batch (1), H key-value heads, R rows, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):
    """One layer's keys and values `[B, H, R, D]`: views of buffers that double, so a step does not copy the past."""

    keys: Tensor  # type: ignore[assignment]
    values: Tensor  # type: ignore[assignment]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the pass's rows; returns all rows, past ones first."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = (key_states[:, :, :0], value_states[:, :, :0])
            self.keys, self.values = self.buffers
        past = self.keys.shape[2]
        total = past + key_states.shape[2]
        if total > self.buffers[0].shape[2]:
            self.buffers = (_grown(self.keys, total), _grown(self.values, total))
        keys, values = self.buffers
        keys[:, :, past:total] = key_states
        values[:, :, past:total] = value_states
        self.keys, self.values = keys[:, :, :total], values[:, :, :total]
        return self.keys, self.values

    def keep(self, past: int, length: int, index: Tensor | None) -> None:
        """Cut to `length` rows; the ones from `past` on are taken from rows `index` if given."""
        if index is not None:
            index = index.to(self.keys.device)
            self.keys[:, :, past:length] = self.keys.index_select(2, index)
            self.values[:, :, past:length] = self.values.index_select(2, index)
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]


def _grown(rows_BHRD: Tensor, needed: int) -> Tensor:
    """A buffer with room for at least `needed` rows that begins with the given ones."""
    past = rows_BHRD.shape[2]
    shape = list(rows_BHRD.shape)
    shape[2] = max(256, 2 * past, needed + 64)
    buffer = rows_BHRD.new_zeros(shape)
    buffer[:, :, :past] = rows_BHRD
    return buffer


class TargetCache:
    """A `DynamicCache` built without a config, so that no layer rolls a window and any row can be kept or dropped.

    Committed row i holds position i: what is kept after a pass is a path, whose positions are consecutive.
    """

    def __init__(self) -> None:
        self.inner = DynamicCache()
        self.inner.layer_class_to_replicate = GrowingLayer

    def __len__(self) -> int:
        return int(self.inner.get_seq_length())

    def keep(self, past: int, kept: list[int]) -> None:
        """Keep rows `0..past-1` and `past + kept` (ascending) of every layer; drop the rest, in place."""
        length = past + len(kept)
        prefix = kept == list(range(len(kept)))
        if prefix and length == len(self):
            return
        index = None if prefix else torch.tensor(kept) + past
        for layer in self.inner.layers:
            assert isinstance(layer, GrowingLayer)
            layer.keep(past, length, index)
