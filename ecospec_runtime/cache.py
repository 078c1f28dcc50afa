"""The target's key-value cache: committed rows first, then the rows of the last pass until they are committed.

Legend of shapes: B batch (1), H key-value heads, R rows, D head dimension, C 2 where keys and values share a buffer.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from ecospec_kernels import dispatch


class GrowingLayer(DynamicLayer):
    """One layer's keys and values `[B, H, R, D]`: views of buffers that double, so a step does not copy the past."""

    keys: Tensor  # type: ignore[assignment]
    values: Tensor  # type: ignore[assignment]
    buffers: list[Tensor]  # one [2, B, H, R, D] if keys and values have one shape, else two [1, B, H, R, D]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the pass's rows; returns all rows, past ones first."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            self._grow(key_states.shape[2])
        past, new = self.keys.shape[2], key_states.shape[2]
        if past + new > self.buffers[0].shape[3]:
            self._grow(past + new)
        keys, values = self.buffers[0][0], self.buffers[-1][-1]
        keys.narrow(2, past, new).copy_(key_states)
        values.narrow(2, past, new).copy_(value_states)
        self.keys, self.values = keys.narrow(2, 0, past + new), values.narrow(2, 0, past + new)
        return self.keys, self.values

    def keep(self, start: int, path: Tensor | None, length: int) -> None:
        """Cut to `length` rows. `path`, int32 on the layer's device: how many of them to move, `start`, and where from behind it."""
        if path is not None:
            count, past, rows = path[:1], path[1:2], path[2:]
            if not dispatch.fast_commit(self.buffers[0][0][0], self.buffers[-1][-1][0], rows, count, past):
                for buffer in self.buffers:
                    buffer.narrow(3, start, len(rows)).copy_(buffer.index_select(3, start + rows))
        self.keys, self.values = self.keys.narrow(2, 0, length), self.values.narrow(2, 0, length)

    def _grow(self, needed: int) -> None:
        """Move to buffers with room for at least `needed` rows."""
        past = self.keys.shape[2]
        room = max(256, 2 * past, needed + 64)
        parts = [self.keys, self.values]
        shapes = [(*part.shape[:2], room, part.shape[3]) for part in parts]
        if shapes[0] == shapes[1]:
            self.buffers = [self.keys.new_zeros(2, *shapes[0])]
        else:
            self.buffers = [part.new_zeros(1, *shape) for part, shape in zip(parts, shapes, strict=True)]
        self.buffers[0][0][:, :, :past] = self.keys
        self.buffers[-1][-1][:, :, :past] = self.values


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
        still = next((i for i, row in enumerate(kept) if row != i), len(kept))  # rows that stay where they are
        if still == len(kept) and length == len(self):
            return
        moved = [row - still for row in kept[still:]]
        path = torch.tensor([len(moved), past + still, *moved], dtype=torch.int32) if moved else None
        for layer in self.inner.layers:
            assert isinstance(layer, GrowingLayer)
            if path is not None:
                path = path.to(layer.keys.device)  # a transfer only where the device changes
            layer.keep(past + still, path, length)


class FixedLayer(CacheLayerMixin):
    """One layer of a `FixedCache`: keys `[1, H, R, D]` and values in buffers that never move."""

    keys: Tensor  # type: ignore[assignment]
    values: Tensor  # type: ignore[assignment]

    def __init__(self, cache: FixedCache, grown: Any):
        super().__init__()
        self.cache, self.is_initialized = cache, True
        self.keys, self.values = self._room(grown.keys), self._room(grown.values)

    def _room(self, past: Tensor) -> Tensor:
        buffer = torch.zeros(*past.shape[:2], self.cache.capacity, past.shape[3], dtype=past.dtype, device=past.device)
        buffer[:, :, : past.shape[2]] = past
        return buffer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The buffers are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the pass's rows where the cache says; returns the rows that the pass may look at, used or not."""
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            buffer.index_copy_(2, self.cache.rows, new)
        return self.keys.narrow(2, 0, self.cache.span), self.values.narrow(2, 0, self.cache.span)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """What a mask of transformers' own would cover; a pass brings its own."""
        return self.cache.span, 0

    def get_seq_length(self) -> int:
        """0: how many rows are committed only the device knows; a pass brings its positions."""
        return 0

    def get_max_length(self) -> int:
        """Rows of the buffers."""
        return self.cache.capacity


class FixedCache:
    """A copy of a cache for passes of fixed shape: a CUDA graph that was captured with its buffers can be replayed.

    `rows` [n] int64 on the device: where a pass writes its rows; `span`: how many rows, from the first, it may look at.
    """

    def __init__(self, grown: TargetCache, capacity: int):
        """ValueError if the cache has no layers yet, or more rows than `capacity`."""
        if not grown.inner.layers or len(grown) > capacity:
            raise ValueError(
                f"a cache of {len(grown)} rows and {len(grown.inner.layers)} layers does not fit {capacity} rows"
            )
        self.capacity = self.span = capacity
        self.rows = torch.zeros(0, dtype=torch.int64)
        self.layers = [FixedLayer(self, layer) for layer in grown.inner.layers]
        self.inner = Cache(layers=[*self.layers])


def cache_argument(module: Any) -> str:
    """What a module's forward calls its cache: `cache` in new transformers releases, `past_key_values` in older ones, "" if
    it takes none. A wrong name would be swallowed by `**kwargs`."""
    names = inspect.signature(type(module).forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), "")
