"""Decode with the best few policies before one is chosen: replay says what should pay, this machine says what does.

Policies run interleaved and in rotating order on held-out prompts, through the bench's own loop. Each prompt gives a pair: the
same text by the policy and by `off`. The mean logarithm of the ratios has Student's t interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import stats

from ecospec_runtime.bench import Contestant, Plan, Sample, Samples, measure, rate
from ecospec_runtime.config import Config
from ecospec_runtime.console import note
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.drafters import Drafter, load_drafter
from ecospec_runtime.engine import Engine
from ecospec_runtime.errors import UserError
from ecospec_runtime.machine import device_name, device_slug
from ecospec_runtime.prompts import fingerprint_prompts, read_prompts
from ecospec_runtime.scoring import Scorer
from ecospec_runtime.target import Target
from ecospec_train.choice import Candidate, Inputs, Measured
from ecospec_train.steps import Steps
from ecospec_train.traces import TraceManifest

if TYPE_CHECKING:
    from ecospec_train.settings import TuneConfig

CONFIDENCE = 0.95


class LiveSettings(Config):
    """What decoding needs that replay does not."""

    target: str
    drafter: str
    prompts: str
    count: int  # of prompts
    profile: Path  # for messages


def live_settings(config: TuneConfig) -> LiveSettings:
    """Those of a tune."""
    return LiveSettings(
        target=str(config.target), drafter=str(config.drafter), prompts=str(config.prompts), count=config.live_prompts,
        profile=config.profile,
    )  # fmt: skip


def load_models(settings: LiveSettings, profile: DeviceProfile, manifest: TraceManifest) -> tuple[Target, Drafter]:
    """Target and drafter on the device of the profile, with its number of threads. UserError for another machine or model."""
    torch.set_num_threads(profile.threads)
    on_gpu = torch.cuda.is_available() and profile.device == device_name("cuda")
    target = Target.from_pretrained(settings.target, profile.dtype, "cuda" if on_gpu else "cpu")
    here = device_slug(target.hardware, profile.dtype, profile.threads)
    if here != profile.slug:
        raise UserError(
            f"{settings.profile}: measured on {profile.slug}, this is {here}; decode there, or tune here without decoding"
        )
    drafter = load_drafter(settings.drafter, target, profile.dtype)
    for role, found, recorded in (("target", target.fingerprint, manifest.target.fingerprint),
                                  ("drafter", drafter.fingerprint, manifest.drafter.fingerprint)):  # fmt: skip
        if found != recorded:
            raise UserError(
                f"{role} {getattr(settings, role)}: not the {role} of the traces ({recorded[:12]}); give that"
            )
    return target, drafter


def measure_live(settings: LiveSettings, inputs: Inputs, candidates: Mapping[str, Candidate]) -> dict[str, Measured]:
    """Decode with every candidate, `off` among them. Raises UserError for another machine, model or too few prompts."""
    profile, manifest = inputs.profile, inputs.traces.manifest
    target, drafter = load_models(settings, profile, manifest)
    engines = {
        name: Engine(target, drafter, Scorer(predictor, "raw", target.moe_layers, target.experts), None, profile,
                     manifest.pool)
        for name, predictor in inputs.predictors.items() if name in {c.predictor for c in candidates.values()}
    }  # fmt: skip
    contestants = [
        Contestant(name, one.spec, str(one.spec.acceptance), engines[one.predictor].with_policy(one.spec))
        for name, one in candidates.items()
    ]
    prompts = held_out(settings, inputs, target)
    plan = Plan(prompts, (manifest.temperature,), manifest.max_new_tokens)
    note(f"tune: decoding {len(prompts)} held-out prompts with {len(contestants)} policies")
    with Steps("tune: decoding", len(contestants) * len(prompts)) as steps:
        samples = measure(contestants, plan, steps.advance)
    return compare(candidates, samples, manifest.temperature)


def held_out(settings: LiveSettings, inputs: Inputs, target: Target) -> list[list[int]]:
    """Token ids of prompts that neither fit nor search has seen: of the traces' own, or of another file any."""
    manifest = inputs.traces.manifest
    rows = read_prompts(settings.prompts, target.tokenizer)
    if fingerprint_prompts(rows) == manifest.prompts_sha256:
        rows = [rows[i] for i in sorted(inputs.confirming_prompts)]
    encoded = [row.encode(target.tokenizer, manifest.max_prompt_tokens) for row in rows]
    kept = [ids for ids in encoded if ids][: settings.count]
    if len(kept) < 2:
        raise UserError(
            f"{settings.prompts}: {len(kept)} held-out prompt(s) to decode, at least 2 are needed; give more"
        )
    return kept


def compare(candidates: Mapping[str, Candidate], samples: Samples, temperature: float) -> dict[str, Measured]:
    """Every candidate against `off`, prompt by prompt."""
    off = samples["off", temperature]
    found = {}
    for name, one in candidates.items():
        logs = log_ratios(samples[name, temperature], off)
        mean, half = interval(logs)
        found[name] = Measured(
            policy=str(one.spec), speedup=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half),
            median=float(np.exp(np.median(logs))), tokens_per_second=rate(samples[name, temperature]), prompts=len(logs),
        )  # fmt: skip
    return found


def log_ratios(samples: list[list[Sample]], rivals: list[list[Sample]]) -> list[float]:
    """Of each prompt, the logarithm of how many times faster it was decoded. Both are `[prompt][repeat]`."""
    return [math.log(rate([mine]) / rate([theirs])) for mine, theirs in zip(samples, rivals, strict=True)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of Student's t interval; at least two values."""
    error = float(stats.sem(values))
    return float(np.mean(values)), float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1)) * error
