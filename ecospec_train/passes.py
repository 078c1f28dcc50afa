"""The passes that `profile` times: as the engine runs them, on rows of text that every installation has.

Legend: n rows of a pass, P cached tokens.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecospec_runtime.config import GenerationConfig
from ecospec_runtime.drafters import Drafter
from ecospec_runtime.errors import UserError
from ecospec_runtime.sampling import Sampler
from ecospec_runtime.target import Target
from ecospec_runtime.verify import children_of, tree_mask, walk


@dataclass
class Rows:
    """What one pass verifies: `tokens` (root first) after `context` cached ones, and the row of each one's parent."""

    context: int
    tokens: list[int]
    parents: list[int]


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
    """Median ms that a plain step along `text` spends in expert modules, and that it takes, after `context` tokens."""
    cache = prefilled(target, text[:context])
    devices = {p.device for p in target.model.parameters() if p.device.type == "cuda"}

    def now() -> float:
        for device in devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    marks: list[float] = []
    handles = [hook(lambda *_: marks.append(now())) for module in target.expert_modules
               for hook in (module.register_forward_pre_hook, module.register_forward_hook)]  # fmt: skip
    experts_ms, steps_ms = [], []
    sampler = Sampler(GenerationConfig())
    try:
        for i, token in enumerate(text[context : context + steps]):
            marks.clear()
            start = now()
            output = target.forward(*pass_inputs(target, Rows(context + i, [token], [])), cache)
            assert output.logits is not None
            walk(output.logits, children_of([], []), sampler, context + i + 1, set(), False)
            steps_ms.append((now() - start) * 1e3)
            experts_ms.append((sum(marks[1::2]) - sum(marks[::2])) * 1e3)
    finally:
        for handle in handles:
            handle.remove()
    return float(np.median(experts_ms)), float(np.median(steps_ms))
