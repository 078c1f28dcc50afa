"""Training rows against the traces they come from; split, blocks, baselines and calibration against first principles."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ecospec_runtime.acceptance import TEMPERATURES, AcceptanceModel, Calibration, LogisticWeights, logistic_logits
from ecospec_runtime.errors import UserError
from ecospec_runtime.predictor import Prediction, PredictorShapes
from ecospec_train.baselines import RoutingTable, hits, top_ids
from ecospec_train.calibrate import (
    AcceptanceRows,
    calibration_error,
    choose_share,
    fit_logistic,
    fit_temperature,
    log_loss,
)
from ecospec_train.evaluate import Evaluation, choose_shrinkage, routing_table
from ecospec_train.predictor_data import (
    BatchStream,
    NodeTable,
    NodeTables,
    PredictorData,
    make_batch,
    node_table,
    positions_of,
    split_prompts,
)
from ecospec_train.traces import Traces
from tests.train.synthetic import EXPERTS, HIDDEN, LAYERS, TOP_K, WIDTH, World, write_traces

MODEL = AcceptanceModel(best="head", temperature=0.5, logistic=LogisticWeights())
SHAPES = PredictorShapes(hidden=HIDDEN, state=WIDTH, layers=LAYERS, experts=EXPERTS, top_k=TOP_K)


@pytest.fixture(scope="module", params=[0.0, 0.7])
def traces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """Twenty prompts of six positions in several shards."""
    folder = tmp_path_factory.mktemp("traces")
    return Traces(write_traces(folder, prompts=20, positions=6, temperature=request.param, shard_rows=30))


def test_rows_are_what_the_pools_say(traces: Traces) -> None:
    shard = traces.shard(1)
    table = node_table(shard)
    for row in range(len(shard)):
        pool, base, end = shard.pool(row), int(table.offsets[row]), int(table.offsets[row + 1])
        assert table.tokens[base:end].tolist() == [pool.root_token, *pool.tokens]
        assert table.parents[base] == -1
        assert (table.parents[base + 1 : end] - base - 1).tolist() == pool.parents.tolist()
        rows = [0, *pool.state_rows.tolist()]
        assert (table.states[table.state_rows[base:end]] == pool.states[rows].astype(np.float16)).all()
        assert table.scalars[base].tolist() == [0, 0, 0, pool.entropies[0]]
        expected = np.stack([pool.log_probs, pool.ranks, pool.depths, pool.entropies[pool.state_rows]], -1)
        assert (table.scalars[base + 1 : end] == expected).all()
        assert (table.routing[base:end] == shard.routing_of(row)).all()
        follows, reached = shard.next_tokens_of(row), [True]
        for i, (token, parent) in enumerate(zip(pool.tokens.tolist(), pool.parents.tolist(), strict=True)):
            reached.append(reached[parent + 1] and token == follows[parent + 1])
            assert table.weight[base + 1 + i] == reached[parent + 1]
            assert table.label[base + 1 + i] == (token == follows[parent + 1])
        assert table.reached[base:end].tolist() == reached


def test_the_split_is_by_prompt_and_repeatable() -> None:
    fit, heldout = split_prompts([3, 1, 2, 9, 7], 0.4, seed=1)
    assert (len(fit), len(heldout)) == (3, 2)
    assert fit | heldout == {1, 2, 3, 7, 9}
    assert split_prompts([9, 7, 3, 2, 1], 0.4, seed=1) == (fit, heldout)
    assert split_prompts([1, 2], 0.01, seed=0)[1]
    with pytest.raises(UserError, match="1 prompt"):
        split_prompts([5, 5], 0.5, seed=0)


def rows_seen(stream: BatchStream) -> list[tuple[float, ...]]:
    """The scalars of every row an epoch yields, in some order."""
    return sorted(tuple(row) for batch in stream for row in batch.scalars.tolist())


def test_reading_block_by_block_gives_the_same_rows(traces: Traces) -> None:
    fit, heldout = split_prompts(list(range(20)), 0.2, 0)
    whole, blocks = NodeTables(traces), NodeTables(traces, block_bytes=1)
    assert (len(whole), len(blocks)) == (1, len(traces.manifest.shards))
    a = PredictorData([(whole, MODEL)], fit, heldout, 8, 1.0, 0.0, 0)
    b = PredictorData([(blocks, MODEL)], fit, heldout, 8, 1.0, 0.0, 0)
    assert rows_seen(a.fit_stream) == rows_seen(b.fit_stream)
    assert rows_seen(a.heldout_stream) == rows_seen(b.heldout_stream)
    assert a.fit_stream.positions + sum(a.heldout_stream.counts) == len(traces)
    assert blocks.only is None


def test_batches_keep_siblings_together_when_far_nodes_are_dropped(traces: Traces) -> None:
    tables = NodeTables(traces)
    stream = BatchStream(tables, set(range(20)), 16, 0.3, 0.25, seed=0)
    batches = list(stream)
    assert len(batches) == len(stream)
    full = tables[0]
    _, sizes = np.unique(full.parents[full.parents >= 0], return_counts=True)
    kept = sum(len(batch.label) for batch in batches) - len(traces)
    assert full.weight.sum() < kept < sizes.sum()
    whole = sum(float((batch.weight == 1).sum()) for batch in batches)
    assert whole == full.weight.sum()
    found = []
    for batch in batches:
        for group in batch.group.unique():
            weights = batch.weight[batch.group == group]
            assert weights.min() == weights.max()
            assert weights[0] in (0.0, 0.25, 1.0)
            if weights[0] > 0:
                found.append(len(weights))
    assert sum(found) == kept
    assert set(found) <= set(sizes.tolist())
    assert max(found) == sizes.max() > 1


def test_texts_of_several_temperatures_are_mixed(tmp_path: Path) -> None:
    """Every batch of each comes once, all through an epoch, with what its temperature adds to the logits."""
    cold, warm = (
        NodeTables(Traces(write_traces(tmp_path / str(t), prompts=20, temperature=t, seed=3))) for t in (0.0, 0.8)
    )
    model = AcceptanceModel(
        best="head", temperature=0.5, logistic=LogisticWeights(),
        sampled={0.8: Calibration(temperature=0.7, logistic=LogisticWeights(log_p=2.0, bias=0.25))},
    )  # fmt: skip
    sources = [(tables, model.at(tables.sampling)) for tables in (cold, warm)]
    stream = PredictorData(sources, set(range(20)), {20}, 8, 1.0, 0.1, seed=0).fit_stream
    batches = list(stream)
    assert len(batches) == len(stream) == sum(len(one) for one in stream.streams)
    assert stream.positions == 2 * 20 * 12
    warmed = [bool(batch.offset.any()) for batch in batches]
    assert sum(warmed) == len(stream.streams[1])
    assert sum(a != b for a, b in pairwise(warmed)) > 4, "not one after the other"
    for batch, is_warm in zip(batches, warmed, strict=True):
        expected = batch.scalars[:, 0] + 0.25 if is_warm else torch.zeros(len(batch.label))
        torch.testing.assert_close(batch.offset, expected)
    assert warmed != [bool(batch.offset.any()) for batch in stream], "another order in the next epoch"


def test_groups_are_the_children_of_one_parent(traces: Traces) -> None:
    tables = NodeTables(traces)
    table = tables[0]
    rows = table.rows_of(np.array([0, 4, 5]))
    batch = make_batch(table, rows, tables.embed)
    parents = table.parents[rows]
    same = batch.group[:, None] == batch.group[None]
    expected = (parents[:, None] == parents[None]) & (parents[:, None] >= 0) | np.eye(len(rows), dtype=bool)
    assert (same.numpy() == expected).all()
    embedding = torch.from_numpy(World().embedding.astype(np.float32))
    assert torch.equal(batch.embedding, embedding[table.tokens[rows]])
    assert torch.equal(batch.parent[parents < 0], torch.zeros(3, HIDDEN))
    assert torch.equal(batch.parent[parents >= 0], embedding[table.tokens[parents[parents >= 0]]])


def test_token_table_counts_and_backs_off_to_popularity() -> None:
    table = RoutingTable(np.array([5, 9]), layers=1, experts=4)
    table.add(np.array([5, 5, 5, 7, 7]), np.array([[[0]], [[0]], [[1]], [[3]], [[3]]], np.uint8))
    table.add(np.array([7]), np.array([[[3]]], np.uint8))
    assert table.popularity()[0] == pytest.approx([2 / 6, 1 / 6, 0, 3 / 6])
    scores = table.scores(np.array([5, 9]))
    assert top_ids(scores, 1).tolist() == [[[0]], [[3]]]
    assert scores[0, 0].argsort().tolist() == [2, 3, 1, 0]


def test_hits_count_the_true_experts_found() -> None:
    predicted = np.array([[[0, 1], [2, 3]], [[0, 1], [0, 1]]])
    assert hits(predicted, np.array([[[1, 0], [3, 0]], [[2, 3], [2, 0]]], np.uint8), 4).tolist() == [0.75, 0.25]


def test_the_logistic_recovers_its_weights() -> None:
    """Two siblings and "none of these", drawn by their softmax."""
    rng = np.random.default_rng(0)
    scalars = rng.normal(size=(50_000, 4)).astype(np.float32)
    truth = np.array([1.5, -0.7, 0.3, -1.0])
    odds = np.exp(scalars @ truth + 0.4).reshape(-1, 2)
    bounds = np.cumsum(odds, 1) / (1 + odds.sum(1, keepdims=True))
    drawn = (rng.random((25_000, 1)) > bounds).sum(1)
    label = (np.arange(2) == drawn[:, None]).astype(np.float32).ravel()
    groups = np.repeat(np.arange(25_000), 2)
    found = fit_logistic(AcceptanceRows(scalars, label, np.zeros((50_000, 0), np.float32), groups))
    assert found.vector() == pytest.approx(truth, abs=0.05)
    assert found.bias == pytest.approx(0.4, abs=0.05)


def test_the_temperature_of_the_labels_is_found() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4000, 6)) * 2
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    token = rng.integers(6, size=4000)
    normalizers = np.stack([np.log(np.exp(log_p / t).sum(-1)) for t in TEMPERATURES], -1)
    own = log_p[np.arange(4000), token]
    label = np.exp(own / 0.5 - normalizers[:, TEMPERATURES.index(0.5)])
    scalars = np.stack([own, own * 0, own * 0, own * 0], -1)
    rows = AcceptanceRows(scalars.astype(np.float32), label.astype(np.float32), normalizers.astype(np.float32),
                          np.arange(4000))  # fmt: skip
    assert fit_temperature(rows, TEMPERATURES) == 0.5
    assert fit_temperature(rows, ()) == 1.0


def test_prompts_for_routing_only_teach_no_acceptance(traces: Traces) -> None:
    tables = NodeTables(traces)
    prompts = set(range(20))
    for unlearned in (set[int](), {3, 4}, prompts):
        stream = BatchStream(tables, prompts, 16, 1.0, 0.1, seed=0, routing_only=unlearned)
        taught = sum(int((batch.weight > 0).sum()) for batch in stream)
        nodes = sum(int((t.parents[t.rows_of(positions_of(t, prompts - unlearned))] >= 0).sum()) for t in tables)
        assert taught == nodes


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 1.0, 1.0), (50.0, 0.0, 0.2)])
def test_the_head_keeps_what_helps_on_text_it_has_not_learned_from(noise: float, least: float, most: float,
                                                                   tmp_path: Path) -> None:  # fmt: skip
    """A correction that knows the labels stays whole; one that is noise goes."""
    tables = NodeTables(Traces(write_traces(tmp_path, prompts=6, positions=4)))
    prompts = set(range(6))
    rows = AcceptanceRows.collect(tables, prompts)
    weights = fit_logistic(rows)
    rng = np.random.default_rng(0)

    class Head:
        def cpu(self) -> Head:
            return self

        eval = cpu

        def __call__(self, *inputs: torch.Tensor) -> tuple[None, torch.Tensor]:
            plain = logistic_logits(inputs[3].numpy(), weights)
            told = 6 * rows.label - 3 if not noise else noise * rng.normal(size=len(plain))
            return None, torch.from_numpy((plain + told).astype(np.float32))

    model = AcceptanceModel(best="head", temperature=1.0, logistic=weights)
    share = choose_share(Head(), tables, model, prompts)  # type: ignore[arg-type]
    assert least <= share <= most
    assert choose_share(Head(), tables, model, set()) == 0.0  # type: ignore[arg-type]


def test_log_loss_and_calibration_error() -> None:
    p, label = np.array([0.9, 0.9, 0.1, 0.1], np.float32), np.array([1, 0, 0, 0], np.float32)
    assert log_loss(p, label) == pytest.approx(-(3 * np.log(0.9) + np.log(0.1)) / 4, rel=1e-5)
    assert calibration_error(p, label) == pytest.approx((0.8 + 0.2) / 4, rel=1e-5)
    assert np.isfinite(log_loss(np.array([0.0, 1.0], np.float32), np.array([1.0, 0.0], np.float32)))


class Oracle:
    """A predictor that knows a table's routing and labels; `wrong` shifts every expert id by that much."""

    shapes = SHAPES
    acceptance = AcceptanceModel(best="head", temperature=0.5, logistic=LogisticWeights())

    def __init__(self, table: NodeTable, wrong: int = 0):
        self.table, self.wrong, self.next = table, wrong, 0
        self.manifest = SimpleNamespace(shrinkage=0.0)

    def run(self, embedding: np.ndarray, *rest: np.ndarray) -> Prediction:
        """Rows are asked for in order."""
        rows = slice(self.next, self.next + len(embedding))
        self.next += len(embedding)
        logits = np.zeros((len(embedding), LAYERS, EXPERTS), np.float32)
        ids = (self.table.routing[rows].astype(np.int64) + self.wrong) % EXPERTS
        np.put_along_axis(logits, ids, 1.0, axis=-1)
        return Prediction(logits, np.where(self.table.label[rows] > 0.5, 12.0, -12.0).astype(np.float32))


def judged(traces: Traces, wrong: int) -> dict:
    """Evaluation of the oracle on all prompts, baselines fitted on half."""
    tables = NodeTables(traces)
    table = routing_table(tables, set(range(10)), set(range(20)), SHAPES)
    evaluation = Evaluation(Oracle(tables[0], wrong), table, traces.manifest.drafter_temperatures, 0.0)  # type: ignore[arg-type]
    evaluation.run(tables, set(range(20)))
    return evaluation.metrics()


def test_an_oracle_is_judged_perfect(traces: Traces) -> None:
    metrics = judged(traces, wrong=0)
    assert metrics["routing_recall"]["predictor"] == {"nodes": 1, "reached": 1, "rejected": 1, "roots": 1}
    assert all(v == {"error": 0, "bias": 0} for v in metrics["union"].values())
    assert all(v == 1 for v in metrics["routing_misses_saved"]["token_table"].values())
    assert metrics["heldout"]["positions"] == len(traces)
    if traces.manifest.temperature == 0:
        assert metrics["acceptance"]["head"]["log_loss"] < 1e-3
    assert metrics["acceptance"]["raw"]["log_loss"] > 0.1


def test_a_shifted_oracle_keeps_the_union_but_misses_experts(traces: Traces) -> None:
    metrics = judged(traces, wrong=1)
    assert metrics["routing_recall"]["predictor"]["nodes"] < 0.6
    assert all(v["error"] == 0 for v in metrics["union"].values())


class Scattered(Oracle):
    """An oracle that adds noise of its own to every row, so that unions come out too large."""

    def run(self, embedding: np.ndarray, *rest: np.ndarray) -> Prediction:
        """Noisy logits."""
        logits, accepted = super().run(embedding, *rest)
        noise = np.random.default_rng(self.next).normal(size=logits.shape)
        return Prediction((3 * logits + 1.5 * noise).astype(np.float32), accepted)


def test_shrinkage_is_chosen_by_the_union(traces: Traces) -> None:
    tables = NodeTables(traces)
    everything = set(range(20))
    assert choose_shrinkage(Oracle(tables[0]), tables, everything) == 0.0  # type: ignore[arg-type]
    noisy = Scattered(tables[0])
    share = choose_shrinkage(noisy, tables, everything)  # type: ignore[arg-type]
    assert share > 0
    table = routing_table(tables, set(range(10)), everything, SHAPES)
    errors = []
    for value in (0.0, share):
        noisy.next, noisy.manifest.shrinkage = 0, value
        evaluation = Evaluation(noisy, table, traces.manifest.drafter_temperatures, 0.0)  # type: ignore[arg-type]
        evaluation.run(tables, everything)
        errors.append(sum(v["error"] for v in evaluation.metrics()["union"].values()))
    assert errors[1] < errors[0]
