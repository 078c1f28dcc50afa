"""Fit the acceptance models that need no network: one temperature, a logistic in log p, rank, depth and entropy, and what
sampling makes of any of them.

Legend: M nodes whose parent is reached, t drafter temperatures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ecospec_runtime import acceptance
from ecospec_runtime.acceptance import PROBABILITY_FLOOR, TEMPERATURES, LogisticWeights, SamplingCorrection
from ecospec_runtime.pool import Floats
from ecospec_train.predictor_data import NodeTables, positions_of

BINS = 15


@dataclass(frozen=True)
class AcceptanceRows:
    """Nodes whose parent is truly reached: what acceptance is fitted and judged on."""

    scalars: Floats  # [M, 4]
    label: Floats  # [M]
    log_normalizers: Floats  # [M, t]

    @classmethod
    def collect(cls, tables: NodeTables, prompts: set[int]) -> AcceptanceRows:
        """The rows of the given prompts."""
        parts = []
        for table in tables:
            rows = table.rows_of(positions_of(table, prompts))
            rows = rows[table.weight[rows] > 0]
            parts.append((table.scalars[rows], table.label[rows], table.log_normalizers[table.state_rows[rows]]))
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def log_loss(estimate: Floats, label: Floats, weight: Floats | None = None) -> float:
    """Mean binary cross-entropy in nats; labels may be probabilities."""
    p = np.clip(estimate.astype(np.float64), PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
    losses = -(label * np.log(p) + (1 - label) * np.log1p(-p))
    return float(np.average(losses, weights=weight)) if len(p) else 0.0


def calibration_error(estimate: Floats, label: Floats) -> float:
    """Expected calibration error over equal-width bins."""
    index = np.minimum((estimate * BINS).astype(int), BINS - 1)
    gap = np.bincount(index, estimate.astype(np.float64) - label, BINS)
    return float(np.abs(gap).sum() / max(1, len(estimate)))


def fit_temperature(rows: AcceptanceRows, drafter_temperatures: tuple[float, ...]) -> float:
    """The grid temperature of least log loss, among those the traces hold normalizers for; 1.0 if there are none."""
    losses = {}
    for column, tau in enumerate(drafter_temperatures):
        if tau in TEMPERATURES:
            estimate = acceptance.at_temperature(rows.scalars[:, 0], rows.log_normalizers[:, column], tau)
            losses[tau] = log_loss(estimate, rows.label)
    return min(losses, key=losses.__getitem__) if losses else 1.0


def fit_sampling(estimate: Floats, sampled: Floats, weight: Floats, temperature: float) -> SamplingCorrection:
    """How acceptance at the traces' temperature, `estimate` `[M]`, turns into `sampled` `[M]`, that at `temperature`."""
    p = torch.from_numpy(np.clip(estimate.astype(np.float64), PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR))
    logit, label, scale = (p / (1 - p)).log(), torch.from_numpy(sampled).double(), torch.from_numpy(weight).double()
    values = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([values], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        losses = F.binary_cross_entropy_with_logits(values[0] * logit + values[1], label, reduction="none")
        total = (losses * scale).sum() / scale.sum().clamp(min=1e-9)
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    slope, bias = values.detach().tolist()
    return SamplingCorrection(temperature=temperature, slope=max(0.0, slope), bias=bias)


def fit_logistic(rows: AcceptanceRows) -> LogisticWeights:
    """Logistic regression by L-BFGS on standardised scalars, folded back to plain ones."""
    x = torch.from_numpy(rows.scalars).double()
    label = torch.from_numpy(rows.label).double()
    mean, std = x.mean(0), x.std(0, correction=0).clamp(min=1e-6)
    x = (x - mean) / std
    weights = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(x @ weights[:4] + weights[4], label) + 1e-6 * weights.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    slope = weights.detach()[:4] / std
    bias = float(weights.detach()[4] - (slope * mean).sum())
    return LogisticWeights(**dict(zip(("log_p", "rank", "depth", "entropy"), slope.tolist(), strict=True)), bias=bias)
