"""The linear cost of a verification pass, fitted to timed passes.

t = fixed + per_token * n + per_expert * union + per_context * context, every coefficient non-negative, relative errors
minimised. Legend: M measured passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Array = NDArray[np.float64]
FOLDS = 5
ALIKE = 1.5  # ratio of the dearest layer's experts to the cheapest layer's up to which all count as alike
FREE = 0.02  # of the dearest: experts that seem to cost less were not measured well enough to tell layers apart
GROUP = 1.25  # the same within a group of layers where they are not


@dataclass(frozen=True)
class PassCost:
    """Coefficients in ms, and how far they are off on passes that the fit has not seen."""

    fixed: float
    per_token: float
    per_expert: float
    per_context: float
    heldout_error: float  # mean relative error
    heldout_r2: float


def fit_pass_cost(tokens: Array, unions: Array, contexts: Array, milliseconds: Array, seed: int = 0) -> PassCost:
    """Fit passes `[M]` of `tokens` rows (root included) that touched `unions` experts after `contexts` cached tokens.

    The error is cross-validated over `FOLDS` random parts; the coefficients come from all passes.
    """
    features = np.stack([np.ones_like(tokens), tokens, unions, contexts], axis=1).astype(np.float64)
    fold = np.random.default_rng(seed).permutation(len(tokens)) % FOLDS
    predicted = np.zeros(len(tokens))
    for held in range(FOLDS):
        seen = fold != held
        predicted[~seen] = features[~seen] @ non_negative_fit(features[seen], milliseconds[seen])
    errors = predicted - milliseconds
    variance = float(((milliseconds - milliseconds.mean()) ** 2).sum())
    fixed, per_token, per_expert, per_context = non_negative_fit(features, milliseconds).tolist()
    error = float(np.abs(errors / milliseconds).mean())
    r2 = 1.0 - float((errors**2).sum()) / max(variance, 1e-12)
    return PassCost(fixed, per_token, per_expert, per_context, error, r2)


def layer_costs(tokens: Array, unions: Array, milliseconds_CL: Array) -> tuple[float, ...]:
    """What an expert of each MoE layer costs relative to their mean, in groups of like ones; empty if all are alike.

    From the times `[C, L]` of every layer's expert module in C passes of `tokens` rows that touched `unions` experts of each.
    """
    features = np.stack([np.ones_like(tokens), tokens, unions], axis=1)
    costs_L = np.array([non_negative_fit(features, layer)[2] for layer in milliseconds_CL.T])
    if costs_L.max() <= ALIKE * costs_L.min() or costs_L.min() <= FREE * costs_L.max():
        return ()
    grouped = np.zeros_like(costs_L)
    group: list[int] = []
    order = np.argsort(costs_L, kind="stable").tolist()
    for layer in order:
        if group and costs_L[layer] > GROUP * costs_L[group[0]]:
            group = []
        group.append(layer)
        grouped[group] = costs_L[group].mean()
    return tuple((grouped / grouped.mean()).tolist())


def non_negative_fit(features: Array, milliseconds: Array) -> Array:
    """Non-negative least squares on relative errors; columns are scaled to the same size first."""
    scaled = features / milliseconds[:, None]
    sizes = np.linalg.norm(scaled, axis=0)
    sizes[sizes == 0.0] = 1.0
    coefficients: Array = nnls(scaled / sizes, np.ones(len(milliseconds)))[0] / sizes
    return coefficients
