"""What a target must prove when it is loaded, on two dozen tokens: that tree passes are right for its architecture.

Masks, positions, cache and hooks follow conventions that most architectures of transformers share and some break without
an error: windows or chunks of attention kept in other fields, states that a rejected token cannot be taken out of,
attention that ignores a given mask. So a text is run in pieces through our cache (a prompt in two chunks, a tree of six
branches of which the *last* is kept, a few more tokens) and the final hidden states are compared with the model's own
plain pass over the same text. Windows and chunks are shortened meanwhile, so that they matter on so few tokens.

In float32 the two differ by rounding alone, and any row beyond `CLOSE` refuses the target. In narrower types experts flip
between pass shapes, which may move single rows by as much as a wrong mask does. There only what a flip does not explain
refuses: every row of the kept branch, every row after it, or more than half of all rows, beyond `FAR`. The tree is wide,
so that a branch that saw its siblings would be far off. A good target is thus not refused for its rounding (random
instances in bfloat16: at most 9 %, a wrong mask at least 32 %); `ecospec-runtime doctor` is the finer judge. Five passes
of at most fourteen rows: milliseconds on small models, seconds on the largest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ecospec_runtime.errors import UserError, first_line
from ecospec_runtime.verify import tree_mask

if TYPE_CHECKING:
    from ecospec_runtime.target import Target

CLOSE, FAR = 1e-3, 0.3  # largest relative error of a row's hidden state in float32; in narrower types, see above
WINDOW = 4  # tokens, while checking
CHUNKS = (4, 3)  # prompt tokens of the two prefill passes
PARENTS = [0, 0, 0, 0, 0, 0, 1, 6]  # rows of six children of the root, then a child of the first and one of the last
KEPT = [0, 6, 8]  # the last child's branch; six rows of other branches lie before it
TAIL = 3  # tokens of a last pass, after the branch


def check(target: Target) -> list[Tensor]:
    """Raises UserError unless tree passes through our cache give the model's own hidden states.

    Returns the routing `[n, K]` of each MoE layer in the first pass. A text that fails is tried once more with other tokens:
    two experts that nearly tie may change places with the shape of a pass.
    """
    try:
        routing, worst = _compare(target, 0)
        if not worst <= _limit(target):
            worst = min(worst, _compare(target, 1)[1])
    except torch.OutOfMemoryError:
        raise UserError(
            f"target {target.source}: out of memory on {target.device} in the check at load; free memory, or spread the target "
            "with --device-map auto"
        ) from None
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        raise UserError(
            f"target {target.source}: {target.architecture} does not take EcoSpec's cache and masks "
            f"({type(error).__name__}: {first_line(error)}); it is not supported"
        ) from error
    if not worst <= _limit(target):
        raise UserError(
            f"target {target.source}: {target.architecture} computes other hidden states in a tree pass than in a plain one "
            f"(by {worst:.0%}): it attends or keeps state in a way that EcoSpec does not know; it is not supported"
        )
    return routing


def _limit(target: Target) -> float:
    return CLOSE if target.dtype == torch.float32 else FAR


def _compare(target: Target, shift: int) -> tuple[list[Tensor], float]:
    """Routing of the first pass, and how far off the rows that count are, on the `shift`th text."""
    with short_windows(target.config), torch.inference_mode():
        routing, ours, tokens = _through_our_cache(target, shift)
        target.model(input_ids=tokens[None], use_cache=False, logits_to_keep=1)
        plain = target.take_hidden()
    if plain.shape != ours.shape:
        raise ValueError(f"final hidden states of shape {list(plain.shape)} for {len(tokens)} tokens")
    error_n = (ours - plain).float().norm(dim=-1) / plain.float().norm(dim=-1)
    if target.dtype == torch.float32:
        return routing, float(error_n.max())
    branch, after = error_n[1 - len(KEPT) - TAIL : -TAIL], error_n[-TAIL:]
    return routing, float(max(error_n.median(), branch.min(), after.min()))


def _through_our_cache(target: Target, shift: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Run the text in pieces; returns the first pass's routing, hidden states `[n, H]` of the kept rows, token ids `[n]`."""
    device = target.device
    past, count = sum(CHUNKS), sum(CHUNKS) + 1 + len(PARENTS) + TAIL
    spread = target.vocab_size // (count + 1)  # over the vocabulary: few special tokens
    every = torch.arange(1, count + 1, device=device) * spread + shift * max(1, spread // 2)
    cache = target.new_cache()
    first = target.forward(every[: CHUNKS[0]], _positions(0, CHUNKS[0], device), None, cache, routing=True)
    second = target.forward(every[CHUNKS[0] : past], _positions(CHUNKS[0], past, device), None, cache)
    depths = [0]
    for parent in PARENTS:
        depths.append(depths[parent] + 1)
    rows = past + len(depths)
    tree = target.forward(
        every[past:rows], torch.tensor(depths, device=device) + past, tree_mask(PARENTS, past).to(device), cache
    )
    target.commit(cache, past, KEPT)
    length = past + len(KEPT)
    last = target.forward(every[rows:], _positions(length, length + TAIL, device), None, cache)
    hidden = torch.cat([first.hidden, second.hidden, tree.hidden[KEPT], last.hidden])
    return first.routing_layers, hidden, torch.cat([every[:past], every[past:rows][KEPT], every[rows:]])


def _positions(start: int, end: int, device: Any) -> Tensor:
    return torch.arange(start, end, device=device)


@contextmanager
def short_windows(config: Any) -> Iterator[None]:
    """Set every attention window and chunk of a configuration to `WINDOW` tokens."""
    saved: dict[str, int] = {}
    for name, value in list(vars(config).items()):
        number = type(value) is int and value > 0
        if number and re.search(r"window|chunk_size", name) and name != "max_window_layers":
            saved[name] = value
    try:
        for name in saved:
            setattr(config, name, WINDOW)
        yield
    finally:
        for name, value in saved.items():
            setattr(config, name, value)
