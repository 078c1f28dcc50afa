"""Search the policy that pays most on one device: an Optuna study over exact replays of the traces.

The fixed-budget `confidence` policies, `ratio`, `utility` and `throughput` are tried first, then Optuna
searches. Tuning uses prompts that the predictor was not fitted on, since it flatters itself on the others; part of them
is set aside to confirm the choice. `off` is the answer when nothing beats it by more than the noise.

The study lives in a storage that outlives the process: a second run continues it, and counts the trials already there.
(A killed trial stays open in the storage and is not counted; parallel workers may share the storage.)
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState
from pydantic import Field

from ecospec_runtime.acceptance import AcceptanceKind
from ecospec_runtime.bundle import DevicePolicy
from ecospec_runtime.config import Config, read_model
from ecospec_runtime.console import note, write_json
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError, first_line
from ecospec_runtime.policies import PolicySpec, build_policy, parse_policy
from ecospec_runtime.predictor import Predictor, same_drafter
from ecospec_train.replay import ReplayResult, ReplayRows, load_rows, replay, replay_at_best_price
from ecospec_train.steps import Steps
from ecospec_train.traces import TargetRecord, Traces

STUDY = "ecospec"
BUDGETS = (2, 3, 4, 6, 8, 12, 24)  # of the `confidence` yardsticks
SEARCHED = ("confidence", "ratio", "utility", "throughput")
MIN_REACHES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
PAUSES = (0, 4)
AS_GOOD = 0.005  # relative difference in rate that a simpler policy may cost
MIN_PROMPTS = 4  # fewer unseen prompts than this are not enough to tune and confirm on

OnTrial = Callable[[int, float, dict[str, Any]], None]  # number, tokens per ms, the replay's result


class TuneConfig(Config):
    """Settings of `tune`."""

    traces: Path
    predictor: Path
    profile: Path
    out: Path
    trials: int = Field(default=80, ge=1)  # in all, those of earlier runs of the same study included
    storage: str | None = None  # Optuna storage URL; None: SQLite in `out`
    positions: int = Field(default=2000, ge=1)  # most positions to tune on, and to confirm on
    confirm: float = Field(default=0.4, gt=0, lt=1)  # share of the prompts that is set aside for confirming
    margin: float = Field(default=0.02, ge=0)  # gain over `off` up to which it counts as noise
    seed: int = Field(default=0, ge=0, lt=2**32)


class TuneReport(Config):
    """What was chosen, and what it is worth on prompts that neither the fit nor the search has seen."""

    policy: str  # text form
    reason: str  # one line
    file: Path  # policies/<slug>.json
    trials: int
    speedup_vs_off: float
    speedup_vs_confidence: float  # best fixed budget, the drafter's own probability
    results: dict[str, Any]  # replay results by name: chosen, off, confidence, ...


def tune(config: TuneConfig, on_trial: OnTrial | None = None) -> TuneReport:
    """Run or continue the study, confirm its best policy and write `out/policies/<slug>.json`. UserError for bad input.

    `on_trial` is called after every trial, for experiment tracking.
    """
    profile = load_profile(config.profile)
    predictor = Predictor.from_folder(config.predictor)
    traces = Traces(config.traces)
    same_drafter(profile.drafter, f"profile {config.profile}", predictor.manifest, config.predictor)
    prepare_folder(config.out)
    tuning_prompts, confirming_prompts = split_prompts(traces, predictor, config)
    study = open_study(config, profile, traces)
    note(
        f"tune: scoring the pools of {len(tuning_prompts)} prompts to tune on, {len(confirming_prompts)} to confirm on"
    )
    tuning = load_rows(traces, predictor, tuning_prompts, config.positions, config.out)
    run_trials(study, tuning, profile, traces.manifest.target, config, on_trial)
    confirming = load_rows(traces, predictor, confirming_prompts, config.positions, config.out)
    report = conclude(study, tuning, confirming, profile, traces.manifest.target, config)
    write_json(config.out / "trials.json", trial_table(study))
    return report


def load_profile(path: Path) -> DeviceProfile:
    """Read a device profile; UserError names file and key."""
    return read_model(path, DeviceProfile, "run `ecospec-train profile` again")


def prepare_folder(out: Path) -> None:
    """Create the output folder, or say in one line why not."""
    try:
        (out / "policies").mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); choose another --out") from None


def split_prompts(traces: Traces, predictor: Predictor, config: TuneConfig) -> tuple[set[int], set[int]]:
    """Prompts to tune on and to confirm on: those the fit held out, if the predictor comes from these traces."""
    everything = {prompt for shard in traces.manifest.shards for prompt in shard.prompt_ids}
    prompts = everything
    if predictor.manifest.traces == fingerprint(traces):
        prompts = everything & set(predictor.manifest.heldout_prompts)
        if len(prompts) < MIN_PROMPTS:
            note(
                f"tune: the fit held out only {len(prompts)} prompts; tuning on all of them, which flatters the result"
            )
            prompts = everything
    if len(prompts) < 2:
        raise UserError(f"{config.traces}: {len(prompts)} prompt(s), at least 2 are needed; harvest more")
    order = np.random.default_rng(config.seed).permutation(sorted(prompts)).tolist()
    confirming = order[: min(len(order) - 1, max(1, round(config.confirm * len(order))))]
    return set(order) - set(confirming), set(confirming)


def fingerprint(traces: Traces) -> str:
    """Hash over the shards' hashes, as `fit` records it."""
    return hashlib.sha256("".join(shard.sha256 for shard in traces.manifest.shards).encode()).hexdigest()


def open_study(config: TuneConfig, profile: DeviceProfile, traces: Traces) -> optuna.Study:
    """Create the study or continue it; UserError if it was made for other inputs or cannot be opened."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    url = config.storage or f"sqlite:///{config.out.resolve() / 'study.db'}"
    inputs = json.dumps([fingerprint(traces), profile.model_dump(), (config.predictor / "manifest.json").read_text(),
                         config.positions, config.confirm, config.seed, SEARCHED, MIN_REACHES, PAUSES])  # fmt: skip
    digest = hashlib.sha256(inputs.encode()).hexdigest()
    try:
        study = optuna.create_study(storage=url, study_name=STUDY, direction="maximize", load_if_exists=True)
        # Seeded by what is already there: a continued study must not draw the same points again.
        study.sampler = optuna.samplers.TPESampler(seed=config.seed + len(study.trials), n_startup_trials=20)
    except Exception as error:  # storage drivers raise families of their own
        remedy = "check --storage" if config.storage else "remove that file if it is damaged, or use another --out"
        raise UserError(f"storage {url}: cannot be opened ({first_line(error)}); {remedy}") from None
    known = study.user_attrs.get("inputs")
    if known not in (None, digest):
        raise UserError(
            f"storage {url}: holds trials of other traces, predictor, profile or search space; use another --out or --storage"
        )
    study.set_user_attr("inputs", digest)
    return study


def yardsticks(depth: int, top_k: int) -> list[dict[str, Any]]:
    """Points that are always tried: as published, with one temperature, and the other rules."""
    points: list[dict[str, Any]] = []
    for kind in ("raw", "temperature"):
        points += [{"policy": "confidence", "acceptance": kind, "confidence.budget": m} for m in BUDGETS]
    for kind in get_args(AcceptanceKind):
        points.append({"policy": "ratio", "acceptance": kind, "ratio.budget": 4, "ratio.epsilon": 1.0, "buffer": False})
    points += [{"policy": "utility", "acceptance": "raw", "utility.overlap": overlap} for overlap in (0.3, 0.7)]
    own = {"policy": "throughput", "throughput.scale": 1.0, "throughput.pause": 4}
    predicting = own | {"throughput.predicts": True, "buffer": False}
    points += [predicting | {"acceptance": kind} for kind in get_args(AcceptanceKind)]
    points += [predicting | {"acceptance": "head", "min_reach": reach} for reach in (0.05, 0.1, 0.2)]
    flat = own | {"throughput.predicts": False, "acceptance": "temperature", "node_experts": 0.5 * top_k}
    points += [flat | {"min_reach": reach} for reach in (0.005, 0.01, 0.02, 0.05, 0.1)]
    return [{"depth": depth, "min_reach": 0.0} | point for point in points]


def suggest(trial: optuna.Trial, depth: int, target: TargetRecord) -> tuple[PolicySpec, float]:
    """A policy out of the search space, and the scale of its price."""
    name = trial.suggest_categorical("policy", SEARCHED)
    kind = trial.suggest_categorical("acceptance", get_args(AcceptanceKind))
    cut: dict[str, Any] = {
        "depth": trial.suggest_int("depth", 1, depth),
        "min_reach": trial.suggest_categorical("min_reach", MIN_REACHES),
    }
    parameters: dict[str, Any] = {}
    scale = 1.0
    if name == "confidence":
        parameters["budget"] = trial.suggest_int("confidence.budget", 1, 32, log=True)
        return PolicySpec(name=name, parameters=parameters, acceptance=kind, **cut), scale
    if name == "utility":
        parameters["overlap"] = trial.suggest_float("utility.overlap", 0.0, 1.0)
        return PolicySpec(name=name, parameters=parameters, acceptance=kind, **cut), scale
    if name == "ratio":
        parameters["budget"] = trial.suggest_int("ratio.budget", 1, 32, log=True)
        parameters["epsilon"] = trial.suggest_float("ratio.epsilon", 0.05, 20.0, log=True)
    else:
        scale = trial.suggest_float("throughput.scale", 0.7, 1.4, log=True)
        parameters["pause"] = trial.suggest_categorical("throughput.pause", PAUSES)
        if not trial.suggest_categorical("throughput.predicts", (True, False)):
            parameters["node_experts"] = trial.suggest_float("node_experts", 0.25 * target.top_k, target.top_k)
            return PolicySpec(name=name, parameters=parameters, acceptance=kind, **cut), scale
    if trial.suggest_categorical("buffer", (False, True)):
        parameters["capacity"] = trial.suggest_int("capacity", target.top_k, target.experts, log=True)
        parameters["penalty"] = trial.suggest_float("penalty", 0.1, 10.0, log=True)
    return PolicySpec(name=name, parameters=parameters, acceptance=kind, **cut), scale


def run_trials(
    study: optuna.Study, rows: ReplayRows, profile: DeviceProfile, target: TargetRecord, config: TuneConfig,
    on_trial: OnTrial | None,
) -> None:  # fmt: skip
    """Bring the study to `config.trials` finished trials, the yardsticks among them."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    tried = [t.params for t in finished] + [t.system_attrs.get("fixed_params") for t in waiting]
    missing = [point for point in yardsticks(rows.pool.depth, target.top_k) if point not in tried]
    for point in missing:
        study.enqueue_trial(point)
    remaining = max(config.trials - len(finished), len(missing) + len(waiting))
    off = replay(PolicySpec(name="off"), rows, profile).tokens_per_ms
    best = max([off, *(t.value for t in finished if t.value is not None)])

    def objective(trial: optuna.Trial) -> float:
        nonlocal best
        spec, scale = suggest(trial, rows.pool.depth, target)
        _, result = replay_at_best_price(spec, rows, profile, start=best, scale=scale)
        trial.set_user_attr("result", result.to_dict())
        best = max(best, result.tokens_per_ms)
        return result.tokens_per_ms

    with Steps("tune", len(finished) + remaining, len(finished)) as steps:

        def after(study: optuna.Study, trial: FrozenTrial) -> None:
            steps.advance(f"best {best / off:.3f}x plain decoding")
            if on_trial is not None and trial.value is not None:
                on_trial(trial.number, trial.value, trial.user_attrs["result"])

        study.optimize(objective, n_trials=remaining, callbacks=[after])


def conclude(
    study: optuna.Study, tuning: ReplayRows, confirming: ReplayRows, profile: DeviceProfile, target: TargetRecord,
    config: TuneConfig,
) -> TuneReport:  # fmt: skip
    """Confirm the study's best policy on unseen prompts, decide between it and `off`, write the policy file."""
    ranked = ranked_trials(study)
    spec = spec_of(settled(ranked, tuning, profile, target.top_k))
    off = PolicySpec(name="off")
    rivals = {"off": off}
    for name, kind in (("confidence", "raw"), ("confidence_temperature", "temperature")):
        fixed = [t for t in ranked if is_yardstick(t, kind, tuning.pool.depth)]
        rivals[name] = spec_of(fixed[0])
    results = {name: replay(rival, confirming, profile) for name, rival in rivals.items()}
    results["best"] = replay(spec, confirming, profile)
    results["oracle"] = replay(spec, confirming, profile, oracle=True)
    seen = gain(replay(spec, tuning, profile), replay(off, tuning, profile))
    unseen = gain(results["best"], results["off"])
    if min(seen, unseen) <= 1.0 + config.margin:
        reason = (f"speculation does not pay on {profile.device}: the best policy ({spec}) replays at {seen:.3f}x plain decoding "
                  f"where it was tuned and {unseen:.3f}x elsewhere, so plain decoding is used")  # fmt: skip
        spec, results["chosen"] = off, results["off"]
    else:
        results["chosen"] = results["best"]
        reason = (f"{spec.name} replays at {unseen:.3f}x plain decoding and {gain(results['best'], results['confidence']):.3f}x "
                  f"the best fixed budget ({results['confidence'].policy})")  # fmt: skip
    note(f"tune: {reason}")
    report = TuneReport(
        policy=str(spec), reason=reason, file=config.out / "policies" / f"{profile.slug}.json", trials=len(ranked),
        speedup_vs_off=gain(results["chosen"], results["off"]),
        speedup_vs_confidence=gain(results["chosen"], results["confidence"]),
        results={name: result.to_dict() for name, result in results.items()},
    )  # fmt: skip
    stored = DevicePolicy(
        policy=spec.name, parameters=build_policy(spec).parameters(), acceptance=spec.acceptance_kind(tuning.best),
        depth=spec.depth, min_reach=spec.min_reach, reason=reason, profile=profile,
        results={"replay": report.results, "speedup_vs_off": report.speedup_vs_off,
                 "speedup_vs_confidence": report.speedup_vs_confidence, "positions": len(confirming)},
    )  # fmt: skip
    write_json(report.file, stored.model_dump(mode="json"))
    return report


def gain(result: ReplayResult, rival: ReplayResult) -> float:
    """How many times faster."""
    return result.tokens_per_ms / rival.tokens_per_ms


def spec_of(trial: FrozenTrial) -> PolicySpec:
    """The policy that a trial replayed, with the price that was found for it."""
    return parse_policy(trial.user_attrs["result"]["policy"])


def ranked_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Finished trials, the fastest first; ties in the order they were tried."""
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return sorted(finished, key=lambda trial: -(trial.value or 0.0))


def simplest(ranked: list[FrozenTrial]) -> FrozenTrial:
    """The best trial, unless one without an expert buffer is as good: a buffer must earn the time it costs."""
    good = [t for t in ranked if (t.value or 0.0) >= (1.0 - AS_GOOD) * (ranked[0].value or 0.0)]
    return next((t for t in good if not t.params.get("buffer")), ranked[0])


def settled(ranked: list[FrozenTrial], rows: ReplayRows, profile: DeviceProfile, top_k: int) -> FrozenTrial:
    """The trial to use: the best one that was tried without searching, unless the search found a better one by more than one
    standard error over the prompts (the one-standard-error rule of Breiman et al., 1984): few prompts are soon fitted."""
    best, points = simplest(ranked), yardsticks(rows.pool.depth, top_k)
    plain = next(trial for trial in ranked if trial.params in points)
    if plain.number == best.number:
        return best
    gained, error = log_gain(spec_of(best), spec_of(plain), rows, profile)
    return best if gained > error else plain


def log_gain(spec: PolicySpec, rival: PolicySpec, rows: ReplayRows, profile: DeviceProfile) -> tuple[float, float]:
    """Logarithm of how many times faster a policy is than another, and its standard error over prompts (jackknife)."""
    single = [replace(rows, prompts=[prompt]) for prompt in rows.prompts]
    results = [[replay(s, prompt, profile) for prompt in single] for s in (spec, rival)]
    totals = np.array([[(r.tokens, r.ms) for r in side] for side in results])  # [2, prompts, 2]

    def gain_of(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        rates = np.log(sums[..., 0] / sums[..., 1])
        return rates[0] - rates[1]

    whole = totals.sum(1)
    count = totals.shape[1]
    without = gain_of(whole[:, None] - totals) if count > 1 else np.zeros(1)
    error = np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    return float(gain_of(whole)), float(error)


def is_yardstick(trial: FrozenTrial, kind: str, depth: int) -> bool:
    """Whether a trial is one of the fixed-budget `confidence` policies with this acceptance model."""
    points = [p for p in yardsticks(depth, 1) if p["policy"] == "confidence" and p["acceptance"] == kind]
    return trial.params in points


def trial_table(study: optuna.Study) -> list[dict[str, Any]]:
    """Every finished trial as a JSON-compatible row, the fastest first."""
    return [
        {"number": t.number, "tokens_per_ms": t.value, "parameters": t.params, "result": t.user_attrs["result"]}
        for t in ranked_trials(study)
    ]
