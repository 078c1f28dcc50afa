"""Judge a predictor on held-out prompts through the very session that decoding will use.

Legend: N rows (roots and nodes), L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecospec_kernels.accept_tree.reference import at_temperature, raw, sibling_softmax
from ecospec_runtime import acceptance
from ecospec_runtime.acceptance import AcceptanceModel
from ecospec_runtime.pool import Floats, pack_masks, path_products
from ecospec_runtime.predictor import Predictor, PredictorShapes, predicted_masks, shrink
from ecospec_train.baselines import RoutingTable, distinct_tokens, hits, top_ids
from ecospec_train.calibrate import calibration_error, log_loss, number
from ecospec_train.predictor_data import NodeTable, NodeTables, network_inputs, positions_of

CHUNK_POSITIONS = 32
SET_SIZES = (4, 8)
SHRINKAGES = (0.0, 0.05, 0.1, 0.15, 0.2)
SHRINKAGE_POSITIONS = 256


def routing_table(tables: NodeTables, fit: set[int], heldout: set[int], shapes: PredictorShapes) -> RoutingTable:
    """Count the fit prompts' routing for the tokens of the held-out ones."""
    tokens = distinct_tokens(t.tokens[t.rows_of(positions_of(t, heldout))] for t in tables)
    counts = RoutingTable(tokens, shapes.layers, shapes.experts)
    for table in tables:
        rows = table.rows_of(positions_of(table, fit))
        counts.add(table.tokens[rows], table.routing[rows])
    return counts


class Tally:
    """Weighted means under names."""

    def __init__(self) -> None:
        self.sums: dict[Any, float] = defaultdict(float)
        self.counts: dict[Any, int] = defaultdict(int)

    def add(self, key: Any, values: NDArray[np.floating] | list[float]) -> None:
        """Add values to the mean of `key`."""
        self.sums[key] += float(np.sum(values, dtype=np.float64))
        self.counts[key] += len(values)

    def mean(self, key: Any) -> float:
        """The mean; NaN-free: 0 where nothing was added."""
        return self.sums[key] / self.counts[key] if self.counts[key] else 0.0


def acceptance_of(kind: acceptance.AcceptanceKind, table: NodeTable, rows: NDArray[np.int64], logits: Floats,
                  model: AcceptanceModel, drafter_temperatures: tuple[float, ...]) -> Floats:  # fmt: skip
    """Acceptance of node rows (no roots, siblings together) of a table under one kind."""
    log_p = table.scalars[rows, 0]
    groups = number(table.parents[rows])
    if kind == "temperature" and model.temperature in drafter_temperatures:
        normalizers = table.log_normalizers[table.state_rows[rows], drafter_temperatures.index(model.temperature)]
        return at_temperature(log_p, normalizers, model.temperature)
    if kind == "logistic":
        logits = acceptance.logistic_logits(table.scalars[rows], model.logistic)
        return sibling_softmax(logits, groups)
    if kind == "head":
        return sibling_softmax(acceptance.head_logits(logits, table.scalars[rows], model), groups)
    return raw(log_p)


def pools_of(table: NodeTable, rows: NDArray[np.int64]) -> list[tuple[int, int]]:
    """First and last row (excluded) of every position among rows that hold whole positions."""
    roots = np.flatnonzero(table.parents[rows] < 0).tolist()
    return list(zip(roots, [*roots[1:], len(rows)], strict=True))


def union_errors(
    table: NodeTable, rows: NDArray[np.int64], routing_logits_NLE: Floats, accepted_N: Floats
) -> dict[str, Floats]:
    """Relative error of the predicted number of distinct experts, per position, for typical verification sets.

    Sets: root and the 4 or 8 nodes of highest reach by `accepted_N`; root and the nodes truly reached (`path`).
    """
    predicted = predicted_masks(routing_logits_NLE, table.routing.shape[-1])
    true = pack_masks(table.routing[rows], routing_logits_NLE.shape[-1])
    errors: dict[str, list[float]] = defaultdict(list)
    for start, end in pools_of(table, rows):
        parents = table.parents[rows[start + 1 : end]] - rows[start] - 1
        order = np.argsort(-path_products(accepted_N[start + 1 : end], parents), kind="stable")
        sets = {str(size): order[:size] for size in SET_SIZES}
        sets["path"] = np.flatnonzero(table.reached[rows[start + 1 : end]])
        for name, chosen in sets.items():
            guess = truth = 0
            for i in [start, *(chosen + start + 1)]:
                guess |= predicted[i]
                truth |= true[i]
            errors[name].append(guess.bit_count() / truth.bit_count() - 1)
    return {name: np.array(values, np.float32) for name, values in errors.items()}


def choose_shrinkage(predictor: Predictor, tables: NodeTables, prompts: set[int]) -> float:
    """The share of `SHRINKAGES` with the least union error on up to `SHRINKAGE_POSITIONS` positions of the prompts."""
    totals = np.zeros(len(SHRINKAGES))
    left = SHRINKAGE_POSITIONS
    for table in tables:
        found = positions_of(table, prompts)
        positions = found[:: -(-len(found) // left)] if left and len(found) else found[:0]
        left -= len(positions)
        for start in range(0, len(positions), CHUNK_POSITIONS):
            rows = table.rows_of(positions[start : start + CHUNK_POSITIONS])
            routing_NLE, _ = predictor.run(*network_inputs(table, rows, tables.embed).values())
            accepted = raw(table.scalars[rows, 0])
            for i, share in enumerate(SHRINKAGES):
                logits = routing_NLE.copy()
                for first, last in pools_of(table, rows):
                    shrink(logits[first:last], share)
                errors = union_errors(table, rows, logits, accepted)
                totals[i] += sum(float(np.abs(values).sum()) for values in errors.values())
    return SHRINKAGES[int(totals.argmin())]


class Evaluation:
    """Accumulates routing, union and acceptance measures over chunks of held-out positions."""

    def __init__(self, predictor: Predictor, table: RoutingTable | None, drafter_temperatures: tuple[float, ...],
                 sampling: float):  # fmt: skip
        """`table` is of the tokens that will be judged; None: acceptance alone is. `sampling`: the text's temperature."""
        self.predictor, self.baseline, self.temperatures = predictor, table, drafter_temperatures
        self.model = predictor.acceptance.at(sampling)
        self.recall, self.union = Tally(), Tally()
        self.accepted: dict[str, list[Floats]] = {kind: [] for kind in acceptance.KINDS}
        self.labels: list[Floats] = []
        self.positions = self.nodes = 0

    def add(self, table: NodeTable, positions: NDArray[np.int64]) -> None:
        """Judge some positions of a table."""
        rows = table.rows_of(positions)
        routing_NLE, acceptance_N = self.predictor.run(*network_inputs(table, rows, self.embed).values())
        self.positions += len(positions)
        self.nodes += len(rows) - len(positions)
        head = self.add_acceptance(table, rows, acceptance_N)
        if self.baseline is None:
            return
        for start, end in pools_of(table, rows):
            shrink(routing_NLE[start:end], self.predictor.manifest.shrinkage)
        self.add_routing(table, rows, routing_NLE, self.baseline)
        for name, errors in union_errors(table, rows, routing_NLE, head).items():
            self.union.add((name, "error"), np.abs(errors))
            self.union.add((name, "bias"), errors)

    def run(self, tables: NodeTables, prompts: set[int]) -> None:
        """Judge all positions of the given prompts."""
        self.embed = tables.embed
        for table in tables:
            positions = positions_of(table, prompts)
            for start in range(0, len(positions), CHUNK_POSITIONS):
                self.add(table, positions[start : start + CHUNK_POSITIONS])

    def add_routing(
        self, table: NodeTable, rows: NDArray[np.int64], routing_logits_NLE: Floats, baseline: RoutingTable
    ) -> None:  # fmt: skip
        """Recall of predictor and baselines on roots, reached and rejected nodes."""
        shapes, routing, parents = self.predictor.shapes, table.routing[rows], table.parents[rows]
        popular = top_ids(baseline.popularity()[None], shapes.top_k)
        guesses = {
            "predictor": top_ids(routing_logits_NLE, shapes.top_k),
            "popularity": np.broadcast_to(popular, routing.shape),
            "token_table": top_ids(baseline.scores(table.tokens[rows]), shapes.top_k),
            "previous_token": table.routing[np.maximum(parents, 0)],
        }
        node, reached = parents >= 0, table.reached[rows]
        for name, guess in guesses.items():
            found = hits(guess, routing, shapes.experts)
            kinds = {"nodes": node, "reached": node & reached, "rejected": node & ~reached, "roots": ~node}
            for kind, where in kinds.items():
                if not (name == "previous_token" and kind == "roots"):
                    self.recall.add((name, kind), found[where])

    def add_acceptance(self, table: NodeTable, rows: NDArray[np.int64], logits_N: Floats) -> Floats:
        """Collect estimates where the parent is reached; returns the head's for all rows (1 for roots)."""
        node = table.parents[rows] >= 0
        judged = table.weight[rows][node] > 0
        self.labels.append(table.label[rows][node][judged])
        out = np.ones(len(rows), np.float32)
        for kind in acceptance.KINDS:
            values = acceptance_of(kind, table, rows[node], logits_N[node], self.model, self.temperatures)
            self.accepted[kind].append(values[judged])
            if kind == "head":
                out[node] = values
        return out

    def judged(self) -> tuple[dict[str, Floats], Floats]:
        """Estimates by kind `[M]` and labels `[M]` of the nodes whose parent is reached."""
        return {kind: np.concatenate(parts) for kind, parts in self.accepted.items()}, np.concatenate(self.labels)

    def acceptance(self) -> dict[str, dict[str, float]]:
        """Log loss and calibration error by kind."""
        judged, label = self.judged()
        return {k: {"log_loss": log_loss(v, label), "calibration_error": calibration_error(v, label)}
                for k, v in judged.items()}  # fmt: skip

    def metrics(self) -> dict[str, Any]:
        """The report: recall and misses, union error, acceptance."""
        names = ("predictor", "popularity", "token_table", "previous_token")
        kinds = ("nodes", "reached", "rejected", "roots")
        recall = {n: {k: self.recall.mean((n, k)) for k in kinds if (n, k) in self.recall.counts} for n in names}
        saved = {n: {k: 1 - (1 - recall["predictor"][k]) / max(1e-9, 1 - v) for k, v in recall[n].items()}
                 for n in names[1:]}  # fmt: skip
        sets = [*map(str, SET_SIZES), "path"]
        union = {s: {"error": self.union.mean((s, "error")), "bias": self.union.mean((s, "bias"))} for s in sets}
        judged_nodes = sum(map(len, self.labels))
        return {
            "heldout": {"positions": self.positions, "nodes": self.nodes, "acceptance_nodes": judged_nodes},
            "routing_recall": recall, "routing_misses_saved": saved, "union": union, "acceptance": self.acceptance(),
        }  # fmt: skip
