"""Measure policies against each other: all decode a prompt by turns of a few tokens, in one process, in rotating order.

Speed is decode tokens over decode seconds, prefill left out. A prompt's seconds are the median of its repeats; a policy's
`tokens_per_second` is the sum of its tokens over the sum of those seconds, its spread the quartiles over prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ecospec_runtime.config import GenerationConfig
from ecospec_runtime.statistics import first_divergence, loop_share

if TYPE_CHECKING:
    from ecospec_runtime.engine import Engine
    from ecospec_runtime.policies import PolicySpec
    from ecospec_runtime.sequence import Prefilled

METHOD = (
    "decode tokens / decode seconds, prefill excluded; per prompt the median of the repeats; policies decode each "
    "prompt by turns of a few tokens in one process, in rotating order, after a warm-up; tokens_per_second is the ratio of sums over prompts, quartiles "
    "are over prompts; ratios are over the prompts that both policies ran; speedup_vs_confidence is against the fastest `confidence` with acceptance raw of the same temperature"
)
PER_PASS = (
    "accept_length",
    "experts_per_layer",
    "nodes",
    "drafted",
    "draft_ms",
    "predict_ms",
    "select_ms",
    "verify_ms",
)
WARM_UP_TOKENS = 12
TURN = 8  # tokens that a policy decodes before it is the next one's turn: a machine that slows down slows all of them
SCREEN_KEEP = 3  # `confidence` policies of an acceptance model that go on after the screening


@dataclass(frozen=True)
class Contestant:
    """One policy ready to decode. `label` is unique in a run."""

    label: str
    spec: PolicySpec
    acceptance: str
    engine: Engine


@dataclass(frozen=True)
class Sample:
    """One generation: its tokens, decode seconds, passes, and means per pass of `PER_PASS`."""

    tokens: list[int]
    seconds: float
    passes: int
    means: Mapping[str, float]


@dataclass(frozen=True)
class Plan:
    """What every contestant does."""

    prompts: Sequence[list[int]]
    temperatures: Sequence[float] = (0.0,)
    max_new_tokens: int = 64
    repeats: int = 1
    seed: int = 0
    sampling: Mapping[str, Any] | None = None  # further GenerationConfig keys
    screen: int = 0  # after this many prompts only the fastest fixed-budget `confidence` policies go on; 0: all do

    def config(self, prompt: int, temperature: float, tokens: int | None = None) -> GenerationConfig:
        """Settings of one generation; prompt i draws with seed + i."""
        return GenerationConfig.from_mapping(
            {"max_new_tokens": tokens or self.max_new_tokens, "temperature": temperature, "seed": self.seed + prompt}
            | dict(self.sampling or {})
        )


Samples = dict[tuple[str, float], list[list[Sample]]]  # (label, temperature) -> [prompt][repeat]


def measure(contestants: Sequence[Contestant], plan: Plan, tick: Callable[[], None] = lambda: None) -> Samples:
    """Run every contestant on every prompt, temperature and repeat; `tick` is called after each generation.

    A prompt is read once for all contestants, which must share their models.
    """
    reader = next((c.engine for c in contestants if c.engine.policy.drafts), contestants[0].engine)
    first = reader.prefilled(plan.prompts[0])
    for contestant in contestants:
        for temperature in plan.temperatures:
            list(run([contestant], first, plan.config(0, temperature, WARM_UP_TOKENS)))
    samples: Samples = {(c.label, t): [[] for _ in plan.prompts] for c in contestants for t in plan.temperatures}
    dropped: set[tuple[str, float]] = set()
    turn = 0
    for repeat in range(plan.repeats):
        for i, prompt in enumerate(plan.prompts):
            read = reader.prefilled(prompt)
            for temperature in plan.temperatures:
                shift = (turn + repeat) % len(contestants)
                order = [*contestants[shift:], *contestants[:shift]]
                still = [c for c in order if (c.label, temperature) not in dropped]
                for _ in range(len(order) - len(still)):
                    tick()
                for contestant, sample in run(still, read, plan.config(i, temperature)):
                    samples[contestant.label, temperature][i].append(sample)
                    tick()
                turn += 1
                if repeat == 0 and i + 1 == plan.screen:
                    dropped |= {(label, temperature) for label in slower(contestants, temperature, samples)}
    return samples


def slower(contestants: Sequence[Contestant], temperature: float, samples: Samples) -> set[str]:
    """Labels of `confidence` policies that need not go on: per acceptance model, all but the fastest."""
    out: set[str] = set()
    fixed = [c for c in contestants if c.spec.name == "confidence" and not c.label.endswith("(tuned)")]
    for kind in {c.acceptance for c in fixed}:
        # The median over prompts: one slow moment of the machine must not end a policy.
        rates = {
            c.label: median(rate([r]) for r in samples[c.label, temperature] if r)
            for c in fixed
            if c.acceptance == kind
        }
        out |= set(sorted(rates, key=rates.__getitem__, reverse=True)[SCREEN_KEEP:])
    return out


def rate(samples: list[list[Sample]], prompts: set[int] | None = None) -> float:
    """Tokens per second over the prompts that were run (and are in `prompts`), a prompt's seconds being their median."""
    chosen = [r for i, r in enumerate(samples) if r and (prompts is None or i in prompts)]
    seconds = sum(median(s.seconds for s in repeats) for repeats in chosen)
    return sum(len(repeats[0].tokens) for repeats in chosen) / max(seconds, 1e-9)


def run(
    contestants: Sequence[Contestant], prompt: Prefilled, config: GenerationConfig
) -> Iterator[tuple[Contestant, Sample]]:  # fmt: skip
    """Let contestants generate by turns, each in a cache of its own; yields each with its figures as it ends."""
    streams = [(c, c.engine.generate(prompt.copy(), config), list[int]()) for c in contestants]
    while streams:
        for contestant, stream, tokens in tuple(streams):
            turn = [token.id for token in islice(stream, TURN)]
            tokens += turn
            if len(turn) == TURN:
                continue
            streams = [other for other in streams if other[0] is not contestant]
            means = {key: float(getattr(stream.statistics, key) or 0.0) for key in PER_PASS}
            yield contestant, Sample(tokens, stream.statistics.seconds, stream.statistics.passes, means)


def summarize(contestants: Sequence[Contestant], plan: Plan, samples: Samples) -> list[dict[str, Any]]:
    """The `runs` of the report: one row per policy and temperature."""
    rows = [row(c, t, samples[c.label, t]) for t in plan.temperatures for c in contestants]
    off = {c.label for c in contestants if c.spec.name == "off"}
    for current in rows:
        same = [r for r in rows if r["temperature"] == current["temperature"]]
        plain = next((r for r in same if r["label"] in off), None)
        published = [r for r in same if (r["policy"], r["acceptance"]) == ("confidence", "raw")]
        best = max(published, key=lambda r: (r["prompts"], r["tokens_per_second"]), default=None)
        current["speedup_vs_off"] = speedup(current, plain, samples)
        current["speedup_vs_confidence"] = speedup(current, best, samples)
        current |= _agreement(current, plain, samples)
    return rows


def row(contestant: Contestant, temperature: float, samples: list[list[Sample]]) -> dict[str, Any]:
    """Figures of one policy at one temperature; samples are `[prompt][repeat]`, empty for prompts it did not run."""
    ran = [repeats for repeats in samples if repeats]
    seconds = sum(median(s.seconds for s in repeats) for repeats in ran)
    tokens = sum(len(repeats[0].tokens) for repeats in ran)
    flat = [s for repeats in ran for s in repeats]
    passes = max(1, sum(s.passes for s in flat))
    means = {key: sum(s.means[key] * s.passes for s in flat) / passes for key in PER_PASS}
    loops = sum(loop_share(repeats[0].tokens) * len(repeats[0].tokens) for repeats in ran)
    return {
        "label": contestant.label, "policy": contestant.spec.name, "parameters": contestant.spec.parameters,
        "acceptance": contestant.acceptance, "depth": contestant.spec.depth, "temperature": temperature,
        "prompts": len(ran), "tokens": tokens, "seconds": seconds, "tokens_per_second": rate(ran),
        "tokens_per_second_quartiles": np.percentile([rate([r]) for r in ran], (25, 50, 75)).tolist(),
        "passes": sum(repeats[0].passes for repeats in ran), **means, "loop_share": loops / max(1, tokens),
    }  # fmt: skip


def speedup(current: dict[str, Any], base: dict[str, Any] | None, samples: Samples) -> float | None:
    """Ratio of tokens per second over the prompts that both ran; None without a base."""
    if base is None:
        return None
    mine, theirs = (samples[r["label"], r["temperature"]] for r in (current, base))
    common = {i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a and b}
    return rate(mine, common) / max(rate(theirs, common), 1e-9)


def _agreement(current: dict[str, Any], plain: dict[str, Any] | None, samples: Samples) -> dict[str, Any]:
    """Whether the text is that of `off`, on how many prompts it is not, and where it first departs."""
    if plain is None:
        return {"identical_to_off": None, "diverging_prompts": None, "first_divergence": None}
    mine = samples[current["label"], current["temperature"]]
    theirs = samples[plain["label"], plain["temperature"]]
    places = [first_divergence(b[0].tokens, a[0].tokens) for a, b in zip(mine, theirs, strict=True) if a and b]
    found = [p for p in places if p is not None]
    return {
        "identical_to_off": not found,
        "diverging_prompts": len(found),
        "first_divergence": min(found, default=None),
    }
