"""What a decode cost and what its text is worth as evidence: timings, unions, loops, divergence between two runs.

Legend of shapes: n tokens of a pass, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ecospec_runtime.target import Target


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass: what went in and what came out. The engine records it, replay foretells it."""

    context: int  # cached tokens before the root
    drafted: bool  # the drafter ran
    tokens: tuple[int, ...]  # [n - 1] of the draft nodes
    parents: tuple[int, ...]  # [n - 1] rows of their parents; row 0 is the root, then the nodes
    accepted: int  # draft nodes accepted, those past the end of the text too
    emitted: tuple[int, ...]  # up to the end of the text
    union: int = 0  # distinct (layer, expert) pairs that the pass touched


@dataclass
class Statistics:
    """Sums over one decode; per-pass figures are properties. Times exclude what the consumer does between tokens."""

    prompt_tokens: int = 0
    tokens: int = 0  # emitted
    passes: int = 0
    drafts: int = 0  # passes for which the drafter ran
    accepted: int = 0  # draft nodes accepted
    verified: int = 0  # draft nodes verified
    prefill_seconds: float = 0.0
    seconds: float = 0.0  # decoding, prefill excluded
    draft_seconds: float = 0.0
    predict_seconds: float = 0.0
    select_seconds: float = 0.0
    verify_seconds: float = 0.0
    recorded: list[list[Tensor]] = field(default_factory=list, repr=False)  # per pass, per layer: expert ids [n, K]
    seen: list[PassRecord] = field(default_factory=list, repr=False)  # with `recorded`; see `steps`

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of decoding; 0 before the first."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def accept_length(self) -> float:
        """Mean tokens that a pass yields: accepted nodes plus the one the target adds."""
        return 1 + self._per_pass(self.accepted)

    @property
    def nodes(self) -> float:
        """Mean draft nodes verified in a pass, the root not counted."""
        return self._per_pass(self.verified)

    @property
    def drafted(self) -> float:
        """Share of the passes for which the drafter ran."""
        return self._per_pass(self.drafts)

    @property
    def draft_ms(self) -> float:
        """Catching up and expanding, ms per pass."""
        return 1000 * self._per_pass(self.draft_seconds)

    @property
    def predict_ms(self) -> float:
        """Scoring the pool, ms per pass."""
        return 1000 * self._per_pass(self.predict_seconds)

    @property
    def select_ms(self) -> float:
        """Choosing the verification set, ms per pass."""
        return 1000 * self._per_pass(self.select_seconds)

    @property
    def verify_ms(self) -> float:
        """The target's pass, the walk and the commit, ms per pass."""
        return 1000 * self._per_pass(self.verify_seconds)

    @property
    def experts_per_layer(self) -> float | None:
        """Mean number of distinct experts that a pass touches in a layer; None unless routing was recorded."""
        if not self.recorded:
            return None
        counts = [[len(layer.unique()) for layer in layers] for layers in self.recorded]
        return float(np.mean(counts))

    @property
    def union(self) -> float | None:
        """Mean number of distinct (layer, expert) pairs of a pass; None unless routing was recorded."""
        mean = self.experts_per_layer
        return None if mean is None else mean * len(self.recorded[0])

    @property
    def steps(self) -> list[PassRecord]:
        """Every pass with its union; empty unless routing was recorded."""
        unions = [sum(len(layer.unique()) for layer in layers) for layers in self.recorded]
        return [replace(record, union=union) for record, union in zip(self.seen, unions, strict=True)]

    def summary(self) -> dict[str, Any]:
        """Sums and per-pass figures as one JSON-compatible object."""
        values = {key: value for key, value in vars(self).items() if key not in ("recorded", "seen")}
        names = ("tokens_per_second", "accept_length", "nodes", "draft_ms", "predict_ms", "select_ms", "verify_ms",
                 "experts_per_layer", "union")  # fmt: skip
        return values | {name: getattr(self, name) for name in names}

    def _per_pass(self, total: float) -> float:
        return total / self.passes if self.passes else 0.0


def loop_share(tokens: Sequence[int], longest: int = 16) -> float:
    """Share of tokens inside a repeat of period <= `longest` that is seen three times in a row; 0 for no tokens."""
    ids = np.asarray(tokens, dtype=np.int64)
    inside = np.zeros(len(ids), np.bool_)
    for period in range(1, min(longest, len(ids) // 3) + 1):
        same = np.concatenate([[False], ids[period:] == ids[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            if end - start >= 2 * period:
                inside[start : end + period] = True
    return float(inside.mean()) if len(ids) else 0.0


@dataclass(frozen=True)
class Divergence:
    """Where two runs part, and how close the call was."""

    index: int  # within the generated tokens
    reference: int
    other: int
    gap: float  # the target's logit of `reference` minus that of `other`, in one pass over the common prefix


def first_divergence(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which two runs differ (a missing one differs), or None if they are equal."""
    for i, (a, b) in enumerate(zip(reference, other, strict=False)):
        if a != b:
            return i
    return None if len(reference) == len(other) else min(len(reference), len(other))


def divergence(target: Target, prompt: list[int], reference: list[int], other: list[int]) -> Divergence | None:
    """The first divergence of two greedy runs with its logit gap; None if equal or if one is a prefix of the other.

    A gap near the rounding of the target's dtype means a tie that two pass shapes broke differently.
    """
    i = first_divergence(reference, other)
    if i is None or i >= min(len(reference), len(other)):
        return None
    ids = torch.tensor(prompt + reference[:i], device=target.device)
    positions = torch.arange(len(ids), device=target.device)
    logits = target.forward(ids, positions, None, target.new_cache(), last_only=True).logits
    assert logits is not None
    gap = logits[-1, reference[i]] - logits[-1, other[i]]
    return Divergence(i, reference[i], other[i], float(gap))


def transformers_greedy(target: Target, prompts: list[list[int]], tokens: int, ends: bool = True) -> list[list[int]]:
    """What transformers' own `generate(do_sample=False)` says after equally long prompts; `ends` False goes on past an end token."""
    inputs = torch.tensor(prompts, device=target.device)
    further = {} if ends else {"eos_token_id": None}
    out = target.model.generate(  # type: ignore[operator]
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, num_beams=1, max_new_tokens=tokens, pad_token_id=0,
        temperature=None, top_p=None, top_k=None, **further,
    )  # fmt: skip
    return out[:, inputs.shape[1] :].tolist()  # type: ignore[no-any-return]
