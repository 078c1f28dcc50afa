"""What a finished study says: which policy to use, or none, and what it is worth on prompts that nothing has seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState
from pydantic import Field

from ecospec_runtime.bundle import DevicePolicy
from ecospec_runtime.config import Config
from ecospec_runtime.console import note, write_json
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.policies import PolicySpec, build_policy, parse_policy
from ecospec_runtime.predictor import Predictor
from ecospec_train.replay import ReplayResult, ReplayRows, load_rows, replay, replay_steps
from ecospec_train.search_space import is_published
from ecospec_train.traces import Traces
from ecospec_train.workers import Point, finished

AS_GOOD = 0.005  # relative difference in rate that a simpler policy may cost
OFF = PolicySpec(name="off")


class Measured(Config):
    """Speed of a policy over plain decoding, decoded: over prompts, paired."""

    policy: str  # text form
    speedup: float  # geometric mean of the prompts' ratios
    low: float  # of the 95 % confidence interval
    high: float
    median: float  # of the prompts' ratios
    tokens_per_second: float
    prompts: int


class TuneReport(Config):
    """What was chosen, and what it is worth on prompts that neither the fit nor the search has seen."""

    policy: str  # text form
    reason: str  # one line
    file: Path  # policies/<slug>.json
    trials: int  # finished ones, pruned ones among them
    pruned: int
    predictor: str  # name of the variant that the policy uses
    speedup_vs_off: float
    speedup_vs_confidence: float  # best fixed budget, the drafter's own probability
    results: dict[str, Any]  # replay results by name: chosen, off, confidence, ...
    live: dict[str, Measured] = Field(default_factory=dict)  # by name: off, confidence, best 1, ...


@dataclass(frozen=True)
class Candidate:
    """A policy, and the predictor that it was replayed with."""

    spec: PolicySpec
    predictor: str


@dataclass(frozen=True)
class Inputs:
    """What a study is made of."""

    traces: Traces
    predictors: Mapping[str, Predictor]  # by the name of the variant
    ids: Mapping[str, str]  # name -> hash, as `DevicePolicy.predictor` has it
    profile: DeviceProfile
    tuning_prompts: set[int]
    confirming_prompts: set[int]
    positions: int
    scratch: Path  # folder for scored positions

    def tuning(self) -> dict[str, ReplayRows]:
        """Positions to tune on, scored by every predictor."""
        return {name: self.load(name, self.tuning_prompts) for name in self.predictors}

    def load(self, name: str, prompts: set[int]) -> ReplayRows:
        """Positions of some prompts, scored by one predictor."""
        return load_rows(self.traces, self.predictors[name], prompts, self.positions, self.scratch)


Measure = Callable[[Mapping[str, Candidate]], dict[str, Measured]]  # by name, `off` among them


@dataclass(frozen=True)
class Settings:
    """How to conclude."""

    out: Path
    margin: float  # gain over `off` up to which it counts as noise
    live: int = 0  # how many of the best to decode with
    measure: Measure | None = None


def conclude(
    study: optuna.Study, points: Sequence[Point], tuning: Mapping[str, ReplayRows], inputs: Inputs, settings: Settings
) -> TuneReport:
    """Confirm the study's best policy on unseen prompts, decide between it and `off`, write the policy file."""
    ranked, first = ranked_trials(study), next(iter(inputs.predictors))
    best = candidate(settled(ranked, tuning, inputs.profile, points), first)
    rivals = {"off": Candidate(OFF, first)}
    for name, kind in (("confidence", "raw"), ("confidence_temperature", "temperature")):
        tried = [t for t in ranked if is_published(t.params, kind, points)]
        if not tried:
            raise UserError(f"no fixed budget with acceptance={kind} was finished; tune again with another --storage")
        rivals[name] = candidate(tried[0], first)
    rows = {c.predictor: inputs.load(c.predictor, inputs.confirming_prompts) for c in (best, *rivals.values())}

    def confirmed(one: Candidate, oracle: bool = False) -> ReplayResult:
        if one.predictor not in rows:
            rows[one.predictor] = inputs.load(one.predictor, inputs.confirming_prompts)
        return replay(one.spec, rows[one.predictor], inputs.profile, oracle=oracle)

    results = {name: confirmed(rival) for name, rival in rivals.items()}
    results |= {"best": confirmed(best), "oracle": confirmed(best, oracle=True)}
    live: dict[str, Measured] = {}
    if settings.measure is None:
        seen = gain(replay(best.spec, tuning[best.predictor], inputs.profile),
                    replay(OFF, tuning[first], inputs.profile))  # fmt: skip
        chosen, reason = by_replay(best, results, seen, inputs.profile, settings.margin)
    else:
        entrants = {"off": rivals["off"], "confidence": rivals["confidence"]} | top(best, ranked, first, settings.live)
        live = settings.measure(entrants)
        chosen, reason = by_decoding(entrants, live, inputs.profile)
    results["chosen"] = results["off"] if chosen.spec == OFF else confirmed(chosen)
    note(f"tune: {reason}")
    pruned = len(finished(study)) - len(ranked)
    report = TuneReport(
        policy=str(chosen.spec), reason=reason, file=settings.out / "policies" / f"{inputs.profile.slug}.json",
        trials=len(ranked) + pruned, pruned=pruned, predictor=chosen.predictor,
        speedup_vs_off=gain(results["chosen"], results["off"]),
        speedup_vs_confidence=gain(results["chosen"], results["confidence"]),
        results={name: result.to_dict() for name, result in results.items()}, live=live,
    )  # fmt: skip
    store(chosen, report, inputs, len(rows[first]), tuning[chosen.predictor])
    return report


def store(chosen: Candidate, report: TuneReport, inputs: Inputs, positions: int, rows: ReplayRows) -> None:
    """Write the policy file."""
    spec = chosen.spec
    kind = spec.acceptance_kind(rows.best)
    policy = build_policy(spec)
    predicts = policy.needs_routing or (policy.drafts and kind != "raw")
    results = {"replay": report.results, "speedup_vs_off": report.speedup_vs_off,
               "speedup_vs_confidence": report.speedup_vs_confidence, "positions": positions}  # fmt: skip
    if report.live:
        results["live"] = {name: measured.model_dump() for name, measured in report.live.items()}
    stored = DevicePolicy(
        policy=spec.name, parameters=policy.parameters(), acceptance=kind, depth=spec.depth, min_reach=spec.min_reach,
        predictor=inputs.ids[chosen.predictor] if predicts else "", reason=report.reason, profile=inputs.profile,
        results=results,
    )  # fmt: skip
    write_json(report.file, stored.model_dump(mode="json"))


def by_replay(
    best: Candidate, results: Mapping[str, ReplayResult], seen: float, profile: DeviceProfile, margin: float
) -> tuple[Candidate, str]:
    """The best policy, or `off` unless it gains more than the noise both where it was tuned (`seen`) and elsewhere."""
    spec, unseen = best.spec, gain(results["best"], results["off"])
    if min(seen, unseen) <= 1.0 + margin:
        reason = (f"speculation does not pay on {profile.device}: the best policy ({spec}) replays at {seen:.3f}x plain decoding "
                  f"where it was tuned and {unseen:.3f}x elsewhere, so plain decoding is used")  # fmt: skip
        return Candidate(OFF, best.predictor), reason
    against = gain(results["best"], results["confidence"])
    reason = (f"{spec.name} replays at {unseen:.3f}x plain decoding and {against:.3f}x the best fixed budget "
              f"({results['confidence'].policy})")  # fmt: skip
    if against < 1.0:
        reason += "; it was faster where it was tuned: harvest more prompts, or let --confirm-live decide"
    return best, reason


def by_decoding(
    entrants: Mapping[str, Candidate], live: Mapping[str, Measured], profile: DeviceProfile
) -> tuple[Candidate, str]:
    """The fastest policy as decoded, or `off` unless all of its confidence interval is a gain."""
    name = max((name for name in live if name != "off"), key=lambda name: live[name].speedup)
    measured = live[name]
    said = (f"{measured.speedup:.3f}x plain decoding ({measured.low:.3f} to {measured.high:.3f} with 95 % confidence, "
            f"{measured.prompts} held-out prompts)")  # fmt: skip
    if measured.low <= 1.0:
        reason = (f"speculation does not pay on {profile.device}: the best policy ({measured.policy}) decodes at {said}, "
                  "so plain decoding is used")  # fmt: skip
        return entrants["off"], reason
    against = measured.speedup / live["confidence"].speedup
    reason = f"{entrants[name].spec.name} decodes at {said} and {against:.3f}x the best fixed budget"
    return entrants[name], f"{reason} ({live['confidence'].policy})"


def top(best: Candidate, ranked: Sequence[FrozenTrial], first: str, count: int) -> dict[str, Candidate]:
    """The policy that replay settles for and those that follow by rate, `count` different ones."""
    order = dict.fromkeys([(str(best.spec), best.predictor)])
    order |= dict.fromkeys((str(c.spec), c.predictor) for c in (candidate(trial, first) for trial in ranked))
    return {f"best {i}": Candidate(parse_policy(spec), name) for i, (spec, name) in enumerate(list(order)[:count], 1)}


def gain(result: ReplayResult, rival: ReplayResult) -> float:
    """How many times faster."""
    return result.tokens_per_ms / rival.tokens_per_ms


def rate_of(trial: FrozenTrial) -> float:
    """Replayed tokens per ms, whatever the study's objectives."""
    return float(trial.user_attrs["result"]["tokens_per_ms"])


def spec_of(trial: FrozenTrial) -> PolicySpec:
    """The policy that a trial replayed, with the price that was found for it."""
    return parse_policy(trial.user_attrs["result"]["policy"])


def candidate(trial: FrozenTrial, first: str) -> Candidate:
    """A trial's policy and predictor; `first` is the one of a study without variants."""
    return Candidate(spec_of(trial), trial.params.get("predictor", first))


def ranked_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Finished trials that were not pruned, the fastest first; ties in the order they were tried."""
    whole = [trial for trial in finished(study) if trial.state == TrialState.COMPLETE]
    return sorted(whole, key=lambda trial: -rate_of(trial))


def simplest(ranked: Sequence[FrozenTrial]) -> FrozenTrial:
    """The best trial, unless one without an expert buffer is as good: a buffer must earn the time it costs."""
    good = [t for t in ranked if rate_of(t) >= (1.0 - AS_GOOD) * rate_of(ranked[0])]
    return next((t for t in good if not t.params.get("buffer")), ranked[0])


def settled(
    ranked: Sequence[FrozenTrial], rows: Mapping[str, ReplayRows], profile: DeviceProfile, points: Sequence[Point]
) -> FrozenTrial:
    """The trial to use: the best one that was tried without searching, unless the search found a better one by more than one
    standard error over the prompts (the one-standard-error rule of Breiman et al., 1984): few prompts are soon fitted."""
    best, first = simplest(ranked), next(iter(rows))
    plain = next(trial for trial in ranked if trial.params in points)
    if plain.number == best.number:
        return best
    found, rival = candidate(best, first), candidate(plain, first)
    gained, error = log_gain(found.spec, rival.spec, rows[found.predictor], profile, rows[rival.predictor])
    return best if gained > error else plain


def log_gain(
    spec: PolicySpec, rival: PolicySpec, rows: ReplayRows, profile: DeviceProfile, rival_rows: ReplayRows | None = None
) -> tuple[float, float]:
    """Logarithm of how many times faster a policy is than another, and its standard error over prompts (jackknife).

    `rival_rows` are the same positions scored by another predictor, if the rival uses one.
    """
    sides = ((spec, rows), (rival, rival_rows or rows))
    totals = np.zeros((2, len(rows.prompts), 2))
    for total, (side, side_rows) in zip(totals, sides, strict=True):
        for step in replay_steps(side, side_rows, profile):
            total[step.prompt] += len(step.record.emitted), step.ms

    def gain_of(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        rates = np.log(sums[..., 0] / sums[..., 1])
        return rates[0] - rates[1]

    whole = totals.sum(1)
    count = totals.shape[1]
    without = gain_of(whole[:, None] - totals) if count > 1 else np.zeros(1)
    error = np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    return float(gain_of(whole)), float(error)


def trial_table(study: optuna.Study) -> list[dict[str, Any]]:
    """Every finished trial that was not pruned as a JSON-compatible row, the fastest first.

    `pareto`: on the front of accepted length against experts, if these were the objectives.
    """
    front = {trial.number for trial in study.best_trials} if len(study.directions) > 1 else None
    rows = []
    for trial in ranked_trials(study):
        row = {"number": trial.number, "tokens_per_ms": rate_of(trial), "parameters": trial.params,
               "result": trial.user_attrs["result"]}  # fmt: skip
        rows.append(row if front is None else row | {"pareto": trial.number in front})
    return rows
