"""The passes that `profile` times: as the engine runs them, on rows of text that every installation has.

Legend: n rows of a pass, P cached tokens.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ecospec_runtime.config import GenerationConfig
from ecospec_runtime.drafters import Drafter
from ecospec_runtime.errors import UserError
from ecospec_runtime.placement import forward_parameters
from ecospec_runtime.sampling import Sampler
from ecospec_runtime.target import Target
from ecospec_runtime.verify import children_of, tree_mask, walk


@dataclass
class Rows:
    """What one pass verifies: `tokens` (root first) after `context` cached ones, and the row of each one's parent."""

    context: int
    tokens: list[int]
    parents: list[int]


def undisturbed(values: Any, axis: int | None = None) -> Any:
    """The lower quartile: what else goes on in a machine, or below a virtual one, only ever adds to a time."""
    found = np.percentile(values, 25, axis=axis)
    return float(found) if axis is None else found


def text_tokens(target: Target, count: int) -> list[int]:
    """`count` tokens of Python source that every installation has."""
    files = [Path(str(module.__file__)) for module in (textwrap, inspect, argparse)]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    tokens: list[int] = target.tokenizer.encode(text)
    if not tokens:
        raise UserError(f"target {target.source}: its tokenizer gives no tokens for plain text; check tokenizer files")
    return (tokens * (1 + count // len(tokens)))[:count]


def prefilled(target: Target, tokens: list[int]) -> Any:
    """A cache that holds `tokens`."""
    cache = target.new_cache()
    target.forward(torch.tensor(tokens, device=target.device), torch.arange(len(tokens), device=target.device), None,
                   cache, logits=False)  # fmt: skip
    return cache


def pass_inputs(target: Target, one: Rows) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens `[n]`, positions `[n]` and mask `[n, P + n]`, as the engine makes them."""
    depths = [0]
    for parent in one.parents:
        depths.append(depths[parent] + 1)
    mask = tree_mask(one.parents, one.context).to(target.device) if one.parents else None
    tokens = torch.tensor(one.tokens, device=target.device)
    return tokens, torch.tensor(depths, device=target.device) + one.context, mask


def expert_popularity(target: Target, tokens: list[int]) -> NDArray[np.float64]:
    """Share of the routing slots of each MoE layer that each expert gets on a text: `[L, E]`, none of them 0."""
    output = target.forward(torch.tensor(tokens, device=target.device), torch.arange(len(tokens), device=target.device), None,
                            target.new_cache(), routing=True, logits=False)  # fmt: skip
    counts = [torch.bincount(index.flatten().cpu(), minlength=target.experts) for index in output.routing_layers]
    popularity_LE: NDArray[np.float64] = torch.stack(counts).double().numpy() + 0.5
    return popularity_LE / popularity_LE.sum(axis=1, keepdims=True)


def spread_experts(n: int, top_k: int, union: int, order: Sequence[int]) -> list[list[int]]:
    """Experts `[n][top_k]` of n tokens, all of a row distinct, that are the first `union` of `order` together.

    `union` lies in top_k..min(n * top_k, len(order)).
    """
    shift = (union - top_k) / max(1, n - 1)
    return [[order[round(i * shift) + k] for k in range(top_k)] for i in range(n)]


@contextmanager
def forced_routing(target: Target, experts_LnK: Sequence[Sequence[Sequence[int]]]) -> Iterator[None]:
    """Passes within read these experts, layer by layer, whatever the routers chose; the routing weights stay theirs."""

    def force(index_nK: Sequence[Sequence[int]]) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            name = forward_parameters(module)[1]
            own = args[1] if len(args) > 1 else kwargs[name]
            forced = torch.tensor(index_nK, dtype=own.dtype, device=own.device)
            return ((args[0], forced, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {name: forced})

        return hook

    # In front of hooks that record routing, so that they see what is read.
    handles = [module.register_forward_pre_hook(force(index), prepend=True, with_kwargs=True)
               for module, index in zip(target.expert_modules, experts_LnK, strict=True)]  # fmt: skip
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class ExpertClock:
    """Times every expert module of the passes within, the device's work included; it slows the pass by that."""

    def __init__(self, target: Target):
        self.target = target
        self._devices = {p.device for p in target.model.parameters() if p.device.type == "cuda"}
        self._marks: list[float] = []
        self._handles: list[Any] = []

    def now(self) -> float:
        """Seconds, all devices having finished."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def __enter__(self) -> ExpertClock:
        # The modules' own time is the innermost: a hook registered last runs last before, and first after it.
        for module in self.target.expert_modules:
            self._handles.append(module.register_forward_pre_hook(self._mark))
            self._handles.append(module.register_forward_hook(self._mark, prepend=True))
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _mark(self, *_: Any) -> None:
        self._marks.append(self.now())

    def layers_ms(self) -> list[float]:
        """Milliseconds of each expert module in the last pass; call it after each pass."""
        found = [(end - start) * 1e3 for start, end in zip(self._marks[::2], self._marks[1::2], strict=True)]
        self._marks.clear()
        return found


def union_of(target: Target, one: Rows, cache: Any) -> int:
    """Distinct (layer, expert) pairs that the pass touches."""
    output = target.forward(*pass_inputs(target, one), cache, routing=True, logits=False)
    target.commit(cache, one.context, [])
    return sum(int(layer.unique().numel()) for layer in output.routing_layers)


def run_pass(target: Target, drafter: Drafter, one: Rows, cache: Any) -> float:
    """Milliseconds of one verification step of the engine; the cache is left as it was."""
    start = time.perf_counter()
    output = target.forward(*pass_inputs(target, one), cache, aux_layers=drafter.aux_layers)
    assert output.logits is not None
    children = children_of(one.tokens[1:], one.parents)
    outcome = walk(output.logits, children, Sampler(GenerationConfig()), one.context + 1, set(), False)
    target.commit(cache, one.context, outcome.rows)
    elapsed = time.perf_counter() - start
    target.commit(cache, one.context, [])
    return elapsed * 1e3


def plain_steps(target: Target, text: list[int], context: int, steps: int) -> tuple[float, float]:
    """Undisturbed ms that a plain step along `text` spends in expert modules, and that it takes, after `context` tokens."""
    cache = prefilled(target, text[:context])
    experts_ms, steps_ms = [], []
    sampler = Sampler(GenerationConfig())
    with ExpertClock(target) as clock:
        for i, token in enumerate(text[context : context + steps]):
            start = clock.now()
            output = target.forward(*pass_inputs(target, Rows(context + i, [token], [])), cache)
            assert output.logits is not None
            walk(output.logits, children_of([], []), sampler, context + i + 1, set(), False)
            steps_ms.append((clock.now() - start) * 1e3)
            experts_ms.append(sum(clock.layers_ms()))
    return undisturbed(experts_ms), undisturbed(steps_ms)
