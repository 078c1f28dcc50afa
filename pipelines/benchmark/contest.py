"""The policies that are compared, and one search for each of them with the same number of trials, by replay.

`published` entries take the drafter's own probability, as their papers do; the others may choose among the same fitted
acceptance models. Used by the benchmarks of this folder that ask which policy is best.
"""

from __future__ import annotations

from dataclasses import dataclass

import optuna

from ecospec_runtime.acceptance import AcceptanceKind
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.policies import PolicySpec
from ecospec_train.replay import ReplayResult, ReplayRows, replay_at_best_price
from ecospec_train.search_space import MIN_REACHES, START_UP, Space, parameters_of, yardsticks

FITTED: tuple[AcceptanceKind, ...] = ("temperature", "logistic", "head")


@dataclass(frozen=True)
class Entry:
    """One policy of a comparison."""

    name: str
    policy: str  # a name of `POLICIES`
    kinds: tuple[AcceptanceKind, ...]  # acceptance models it may choose from

    @property
    def published(self) -> bool:
        """Whether it takes the drafter's own probability."""
        return self.kinds == ("raw",)


PEERS = ("confidence", "ratio", "prefix", "utility")
PUBLISHED = tuple(Entry(f"{name}, as published", name, ("raw",)) for name in PEERS)
SAME_ACCEPTANCE = tuple(Entry(name, name, FITTED) for name in PEERS)
OURS = Entry("throughput", "throughput", FITTED)
ENTRIES = (*PUBLISHED, *SAME_ACCEPTANCE, OURS)


def tune_entry(
    entry: Entry, rows: ReplayRows, profile: DeviceProfile, space: Space, trials: int, seed: int = 0, oracle: bool = False
) -> tuple[PolicySpec, ReplayResult]:  # fmt: skip
    """The best of `trials` points by replayed tokens per ms, and its replay. `oracle`: selection knows the true routing."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    best: tuple[PolicySpec, ReplayResult] | None = None

    def objective(trial: optuna.Trial) -> float:
        nonlocal best
        kind = entry.kinds[0] if len(entry.kinds) == 1 else trial.suggest_categorical("acceptance", entry.kinds)
        # As published, a tree is cut by its budget and its depth alone.
        reach = 0.0 if entry.published else trial.suggest_categorical("min_reach", MIN_REACHES)
        depth = trial.suggest_int("depth", 1, space.depth)
        parameters, scale = parameters_of(entry.policy, trial, space)
        spec = PolicySpec(name=entry.policy, parameters=parameters, acceptance=kind, depth=depth, min_reach=reach)
        start = best[1].tokens_per_ms if best else None
        found = replay_at_best_price(spec, rows, profile, start=start, scale=scale, oracle=oracle)
        if best is None or found[1].tokens_per_ms > best[1].tokens_per_ms:
            best = found
        return found[1].tokens_per_ms

    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(START_UP, trials // 2))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for point in yardsticks(space):  # those that `tune` always tries
        if (point["policy"], point["acceptance"] in entry.kinds) == (entry.policy, True):
            study.enqueue_trial(point)
    study.optimize(objective, n_trials=trials)
    assert best is not None
    return best
