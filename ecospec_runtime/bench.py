"""Measure policies against each other: interleaved prompt by prompt in one process, in rotating order.

Speed is decode tokens over decode seconds, prefill left out. A prompt's seconds are the median of its repeats; a policy's
`tokens_per_second` is the sum of its tokens over the sum of those seconds, its spread the quartiles over prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ecospec_runtime.config import GenerationConfig
from ecospec_runtime.statistics import first_divergence, loop_share

if TYPE_CHECKING:
    from ecospec_runtime.engine import Engine, Prefilled
    from ecospec_runtime.policies import PolicySpec

METHOD = (
    "decode tokens / decode seconds, prefill excluded; per prompt the median of the repeats; policies interleaved prompt by "
    "prompt in one process in rotating order after a warm-up; tokens_per_second is the ratio of sums over prompts, quartiles "
    "are over prompts; speedup_vs_confidence is against the fastest `confidence` with acceptance raw of the same temperature"
)
PER_PASS = ("accept_length", "experts_per_layer", "nodes", "draft_ms", "predict_ms", "select_ms", "verify_ms")
WARM_UP_TOKENS = 12


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
            run_once(contestant.engine, first, plan.config(0, temperature, WARM_UP_TOKENS))
    samples: Samples = {(c.label, t): [[] for _ in plan.prompts] for c in contestants for t in plan.temperatures}
    turn = 0
    for repeat in range(plan.repeats):
        for i, prompt in enumerate(plan.prompts):
            read = reader.prefilled(prompt)
            for temperature in plan.temperatures:
                shift = (turn + repeat) % len(contestants)
                for contestant in [*contestants[shift:], *contestants[:shift]]:
                    sample = run_once(contestant.engine, read, plan.config(i, temperature))
                    samples[contestant.label, temperature][i].append(sample)
                    tick()
                turn += 1
    return samples


def run_once(engine: Engine, prompt: Prefilled, config: GenerationConfig) -> Sample:
    """Generate once and keep what the report needs."""
    stream = engine.generate(prompt, config)
    tokens = [token.id for token in stream]
    statistics = stream.statistics
    return Sample(
        tokens=tokens, seconds=statistics.seconds, passes=statistics.passes,
        means={key: float(getattr(statistics, key) or 0.0) for key in PER_PASS},
    )  # fmt: skip


def summarize(contestants: Sequence[Contestant], plan: Plan, samples: Samples) -> list[dict[str, Any]]:
    """The `runs` of the report: one row per policy and temperature."""
    rows = [row(c, t, samples[c.label, t]) for t in plan.temperatures for c in contestants]
    off = {c.label for c in contestants if c.spec.name == "off"}
    for current in rows:
        same = [r for r in rows if r["temperature"] == current["temperature"]]
        plain = next((r for r in same if r["label"] in off), None)
        published = [r for r in same if r["policy"] == "confidence" and r["acceptance"] == "raw"]
        best = max(published, key=lambda r: r["tokens_per_second"], default=None)
        current["speedup_vs_off"] = _ratio(current, plain)
        current["speedup_vs_confidence"] = _ratio(current, best)
        current |= _agreement(current, plain, samples)
    return rows


def row(contestant: Contestant, temperature: float, samples: list[list[Sample]]) -> dict[str, Any]:
    """Figures of one policy at one temperature; samples are `[prompt][repeat]`."""
    seconds = [median(s.seconds for s in repeats) for repeats in samples]
    timed = [len(repeats[0].tokens) for repeats in samples]
    speeds = [n / s for n, s in zip(timed, seconds, strict=True) if s > 0] or [0.0]
    flat = [s for repeats in samples for s in repeats]
    passes = max(1, sum(s.passes for s in flat))
    means = {key: sum(s.means[key] * s.passes for s in flat) / passes for key in PER_PASS}
    loops = sum(loop_share(r[0].tokens) * len(r[0].tokens) for r in samples)
    quartiles = np.percentile(speeds, (25, 50, 75)).tolist()
    return {
        "label": contestant.label, "policy": contestant.spec.name, "parameters": contestant.spec.parameters,
        "acceptance": contestant.acceptance, "depth": contestant.spec.depth, "temperature": temperature,
        "tokens": sum(timed), "seconds": sum(seconds), "tokens_per_second": sum(timed) / max(sum(seconds), 1e-9),
        "tokens_per_second_quartiles": quartiles, "passes": sum(r[0].passes for r in samples), **means,
        "loop_share": loops / max(1, sum(len(r[0].tokens) for r in samples)),
    }  # fmt: skip


def _ratio(current: dict[str, Any], base: dict[str, Any] | None) -> float | None:
    if base is None or base["tokens_per_second"] == 0:
        return None
    return float(current["tokens_per_second"] / base["tokens_per_second"])


def _agreement(current: dict[str, Any], plain: dict[str, Any] | None, samples: Samples) -> dict[str, Any]:
    """Whether the text is that of `off`, on how many prompts it is not, and where it first departs."""
    if plain is None:
        return {"identical_to_off": None, "diverging_prompts": None, "first_divergence": None}
    mine = samples[current["label"], current["temperature"]]
    theirs = samples[plain["label"], plain["temperature"]]
    places = [first_divergence(b[0].tokens, a[0].tokens) for a, b in zip(mine, theirs, strict=True)]
    found = [p for p in places if p is not None]
    return {
        "identical_to_off": not found,
        "diverging_prompts": len(found),
        "first_divergence": min(found, default=None),
    }
