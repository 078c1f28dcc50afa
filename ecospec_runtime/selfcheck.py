"""What a target must prove when it is loaded, on a dozen tokens: that tree passes are right for its architecture.

Masks, positions, cache and hooks follow conventions that most architectures of transformers share and some break without
an error: windows or chunks of attention kept in other fields, states that a rejected token cannot be taken out of,
attention that ignores a given mask. So a text is run in pieces through our cache (a prompt in two chunks, a tree of two
branches of which the *second* is kept, one more token) and the final hidden states are compared with the model's own
plain pass over the same text. Windows and chunks are shortened meanwhile, so that they matter on so few tokens.

In float32 the two differ by rounding alone, and any row beyond `CLOSE` refuses the target. In narrower types experts may
flip between pass shapes, which moves single rows by a tenth; a wrong mask moves most rows by more than half. There only
the median row decides, against `FAR`: the check never refuses a good target for its rounding, and `ecospec-runtime
doctor` remains the finer judge. Five passes of at most eleven rows; seconds on the largest models.
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

CLOSE, FAR = 1e-3, 0.3  # largest relative error of a row in float32; of the median row in narrower types
WINDOW = 4  # tokens, while checking
CHUNKS = (4, 3)  # prompt tokens of the two prefill passes
PARENTS = [0, 0, 1, 2]  # rows of root, a, b, child of a, child of b
KEPT = [0, 2, 4]


def check(target: Target) -> list[Tensor]:
    """Raises UserError unless tree passes through our cache give the model's own hidden states.

    Returns the routing `[n, K]` of each MoE layer in the first pass.
    """
    try:
        with short_windows(target.config), torch.inference_mode():
            routing, ours, tokens = _through_our_cache(target)
            target.model(input_ids=tokens[None], use_cache=False, logits_to_keep=1)
            plain = target.take_hidden()
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        raise UserError(
            f"target {target.source}: {target.architecture} does not take EcoSpec's cache and masks "
            f"({type(error).__name__}: {first_line(error)}); it is not supported"
        ) from error
    error_n = (ours - plain).float().norm(dim=-1) / plain.float().norm(dim=-1)
    exact = target.dtype == torch.float32
    worst = float(error_n.max() if exact else error_n.median())
    if not worst <= (CLOSE if exact else FAR):
        raise UserError(
            f"target {target.source}: {target.architecture} computes other hidden states in a tree pass than in a plain one "
            f"(by {worst:.0%}): it attends or keeps state in a way that EcoSpec does not know; it is not supported"
        )
    return routing


def _through_our_cache(target: Target) -> tuple[list[Tensor], Tensor, Tensor]:
    """Run the text in pieces; returns the first pass's routing, hidden states `[n, H]` of the kept rows, token ids `[n]`."""
    device = target.device
    past, count = sum(CHUNKS), sum(CHUNKS) + len(PARENTS) + 2
    every = torch.arange(1, count + 1, device=device) * (target.vocab_size // (count + 1))  # spread: few special tokens
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
    last = target.forward(every[rows:], _positions(length, length + 1, device), None, cache)
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
