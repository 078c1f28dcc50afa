"""What `tune` tries: the points that are always tried, and the space that Optuna samples.

A parameter more is a line in `suggest`, and one in `yardsticks` if a value of it should always be tried. Parameters of one
policy carry its name, so that Optuna keeps them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import optuna

from ecospec_runtime.acceptance import AcceptanceKind
from ecospec_runtime.policies import PolicySpec

BUDGETS = (2, 3, 4, 6, 8, 12, 24)  # of the `confidence` yardsticks
SEARCHED = ("confidence", "ratio", "prefix", "utility", "throughput")
MIN_REACHES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
PAUSES = (4, 16)  # never 0: what was tuned must rest on text it was not tuned for
START_UP = 20  # trials before the sampler learns from them


class Space(NamedTuple):
    """What bounds the search."""

    depth: int  # levels of the recorded pools
    top_k: int
    experts: int
    predictors: Sequence[str] = ("",)  # names of the variants; one needs none


class Choice(NamedTuple):
    """A point of the space."""

    spec: PolicySpec
    scale: float  # of the price that is found for `throughput`
    predictor: str


def yardsticks(space: Space) -> list[dict[str, Any]]:
    """Points that are always tried: as published, with one temperature, and the other rules."""
    published = [{"policy": "confidence", "acceptance": "raw", "confidence.budget": m} for m in BUDGETS]
    points: list[dict[str, Any]] = [
        {"policy": "confidence", "acceptance": "temperature", "confidence.budget": m} for m in BUDGETS
    ]
    for kind in get_args(AcceptanceKind):
        points.append({"policy": "ratio", "acceptance": kind, "ratio.budget": 4, "ratio.epsilon": 1.0, "buffer": False})
    points += [{"policy": "prefix", "acceptance": kind, "prefix.overlap": 0.3} for kind in ("raw", "temperature")]
    points += [{"policy": "utility", "acceptance": "raw", "utility.overlap": overlap} for overlap in (0.3, 0.7)]
    own = {"policy": "throughput", "throughput.scale": 1.0, "throughput.pause": 4}
    predicting = own | {"throughput.predicts": True, "buffer": False}
    points += [predicting | {"acceptance": kind} for kind in get_args(AcceptanceKind)]
    points += [predicting | {"acceptance": "head", "min_reach": reach} for reach in (0.05, 0.1, 0.2)]
    flat = own | {"throughput.predicts": False, "acceptance": "temperature", "node_experts": 0.5 * space.top_k}
    points += [flat | {"min_reach": reach} for reach in (0.005, 0.01, 0.02, 0.05, 0.1)]
    points += [
        flat | {"acceptance": kind, "min_reach": reach} for kind in ("logistic", "head") for reach in (0.01, 0.05)
    ]
    if len(space.predictors) == 1:
        points = published + points
    else:
        points = [p | {"predictor": space.predictors[0]} for p in published] + [
            p | {"predictor": name} for name in space.predictors for p in points
        ]
    return [{"depth": space.depth, "min_reach": 0.0} | point for point in points]


def is_published(point: dict[str, Any], kind: str, points: Sequence[dict[str, Any]]) -> bool:
    """Whether a point is one of the fixed-budget `confidence` yardsticks among `points` with this acceptance model."""
    return point in points and (point["policy"], point["acceptance"]) == ("confidence", kind)


def suggest(trial: optuna.Trial, space: Space) -> Choice:
    """A policy out of the space."""
    name = trial.suggest_categorical("policy", SEARCHED)
    kind = trial.suggest_categorical("acceptance", get_args(AcceptanceKind))
    predictor = space.predictors[0]
    if len(space.predictors) > 1:
        predictor = trial.suggest_categorical("predictor", list(space.predictors))
    cut: dict[str, Any] = {
        "depth": trial.suggest_int("depth", 1, space.depth),
        "min_reach": trial.suggest_categorical("min_reach", MIN_REACHES),
    }
    parameters, scale = parameters_of(name, trial, space)
    return Choice(PolicySpec(name=name, parameters=parameters, acceptance=kind, **cut), scale, predictor)


def parameters_of(name: str, trial: optuna.Trial, space: Space) -> tuple[dict[str, Any], float]:
    """A policy's own parameters, and the scale of its price."""
    parameters: dict[str, Any] = {}
    scale = 1.0
    if name == "confidence":
        return {"budget": trial.suggest_int("confidence.budget", 1, 32, log=True)}, scale
    if name in ("prefix", "utility"):
        return {"overlap": trial.suggest_float(f"{name}.overlap", 0.0, 1.0)}, scale
    if name == "ratio":
        parameters["budget"] = trial.suggest_int("ratio.budget", 1, 32, log=True)
        parameters["epsilon"] = trial.suggest_float("ratio.epsilon", 0.05, 20.0, log=True)
    else:
        scale = trial.suggest_float("throughput.scale", 0.7, 1.4, log=True)
        parameters["pause"] = trial.suggest_categorical("throughput.pause", PAUSES)
        if not trial.suggest_categorical("throughput.predicts", (True, False)):
            parameters["node_experts"] = trial.suggest_float("node_experts", 0.25 * space.top_k, space.top_k)
            return parameters, scale
    if trial.suggest_categorical("buffer", (False, True)):
        parameters["capacity"] = trial.suggest_int("capacity", space.top_k, space.experts, log=True)
        parameters["penalty"] = trial.suggest_float("penalty", 0.1, 10.0, log=True)
    return parameters, scale
