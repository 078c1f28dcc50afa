"""Fit the acceptance models that need no network: one temperature, and a logistic in log p, rank, depth and entropy; and how
far the head may go beyond the logistic.

Legend: M nodes whose parent is reached, t drafter temperatures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ecospec_kernels.accept_tree.reference import at_temperature, sibling_softmax
from ecospec_runtime import acceptance
from ecospec_runtime.acceptance import PROBABILITY_FLOOR, TEMPERATURES, AcceptanceModel, Calibration, LogisticWeights
from ecospec_runtime.pool import Floats, Ints
from ecospec_train.predictor_data import NodeTables, network_inputs, positions_of
from ecospec_train.predictor_model import PredictorNetwork, acceptance_loss
from ecospec_train.reliability import BINS

SHARES = tuple(i / 10 for i in range(11))  # of the head's correction
CHUNK = 4096  # rows of one run of the network


@dataclass(frozen=True)
class AcceptanceRows:
    """Nodes whose parent is truly reached: what acceptance is fitted and judged on."""

    scalars: Floats  # [M, 4]
    label: Floats  # [M]
    log_normalizers: Floats  # [M, t]
    groups: Ints  # [M] siblings have one number, from 0

    @classmethod
    def collect(cls, tables: NodeTables, prompts: set[int]) -> AcceptanceRows:
        """The rows of the given prompts."""
        parts = []
        count = 0
        for table in tables:
            rows = table.rows_of(positions_of(table, prompts))
            rows = rows[table.weight[rows] > 0]
            groups = count + number(table.parents[rows])
            count = int(groups.max(initial=count - 1)) + 1
            parts.append(
                (table.scalars[rows], table.label[rows], table.log_normalizers[table.state_rows[rows]], groups)
            )
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def number(parents: Ints) -> Ints:
    """The sibling group of each node, numbered from 0."""
    return np.unique(parents, return_inverse=True)[1]


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
            estimate = at_temperature(rows.scalars[:, 0], rows.log_normalizers[:, column], tau)
            losses[tau] = log_loss(estimate, rows.label)
    return min(losses, key=losses.__getitem__) if losses else 1.0


def fit_linear(
    features: Floats, label: Floats, weight: Floats, groups: Ints, start: tuple[float, ...], ridge: float = 0.0
) -> list[float]:  # fmt: skip
    """Weights of `features` `[M, f]` whose sum is the logit of least `acceptance_loss`, by L-BFGS from `start`."""
    x, y, scale = (torch.from_numpy(values).double() for values in (features, label, weight))
    group, count = torch.from_numpy(groups), int(groups.max(initial=-1)) + 1
    weights = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = acceptance_loss(x @ weights, group, y, scale, count) + ridge * weights.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach().tolist()  # type: ignore[no-any-return]


def fit_logistic(rows: AcceptanceRows) -> LogisticWeights:
    """Multinomial logistic regression, siblings against "none", on standardised scalars, folded back to plain ones."""
    mean, std = rows.scalars.mean(0, dtype=np.float64), np.maximum(rows.scalars.std(0, dtype=np.float64), 1e-6)
    x = np.column_stack([(rows.scalars - mean) / std, np.ones(len(rows.label))])
    *scaled, bias = fit_linear(x, rows.label, np.ones_like(rows.label), rows.groups, (0.0,) * 5, ridge=1e-6)
    slopes = np.array(scaled) / std
    names = dict(zip(("log_p", "rank", "depth", "entropy"), slopes.tolist(), strict=True))
    return LogisticWeights(**names, bias=bias - float((slopes * mean).sum()))


def calibrate(rows: AcceptanceRows, drafter_temperatures: tuple[float, ...]) -> Calibration:
    """Temperature and logistic of least log loss on nodes of one sampling temperature."""
    return Calibration(temperature=fit_temperature(rows, drafter_temperatures), logistic=fit_logistic(rows))


def choose_share(
    network: PredictorNetwork, tables: NodeTables, model: AcceptanceModel, prompts: set[int]
) -> float:  # fmt: skip
    """How much of the head's correction to the logistic helps on `prompts` it has not learned from: one of `SHARES`.

    0 where there are none. So the head is no worse than the logistic on text like theirs. `model` is of the sampling temperature
    of the traces.
    """
    rows = AcceptanceRows.collect(tables, prompts)
    if not len(rows.label):
        return 0.0
    plain = acceptance.logistic_logits(rows.scalars, model.logistic)
    further = acceptance.head_logits(network_logits(network, tables, prompts), rows.scalars, model) - plain
    losses = [
        log_loss(sibling_softmax(plain + np.float32(share) * further, rows.groups), rows.label) for share in SHARES
    ]
    return SHARES[int(np.argmin(losses))]


def network_logits(network: PredictorNetwork, tables: NodeTables, prompts: set[int]) -> Floats:
    """Acceptance logits `[M]` of the rows that `AcceptanceRows.collect` takes."""
    network = network.cpu().eval()
    parts = []
    for table in tables:
        rows = table.rows_of(positions_of(table, prompts))
        rows = rows[table.weight[rows] > 0]
        for start in range(0, len(rows), CHUNK):
            inputs = network_inputs(table, rows[start : start + CHUNK], tables.embed)
            with torch.inference_mode():
                parts.append(network(*(torch.from_numpy(value) for value in inputs.values()))[1].numpy())
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
