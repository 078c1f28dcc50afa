"""Fitting end to end on invented traces, and what a user can get wrong."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ecospec_runtime.acceptance import KINDS, TEMPERATURES, AcceptanceModel, LogisticWeights
from ecospec_runtime.errors import UserError
from ecospec_runtime.pool import pack_masks
from ecospec_runtime.predictor import Predictor, PredictorShapes
from ecospec_runtime.scoring import Scorer
from ecospec_train.evaluate import Evaluation, routing_table
from ecospec_train.fit import FitConfig, FitReport, fit, misses, train
from ecospec_train.predictor_data import NodeTables, PredictorData, split_prompts
from ecospec_train.predictor_model import PredictorModule, PredictorNetwork, acceptance_loss, recall, routing_loss
from ecospec_train.traces import Traces
from tests.train.synthetic import EXPERTS, HIDDEN, LAYERS, TOP_K, WIDTH, write_traces

MODEL = AcceptanceModel(best="head", temperature=0.5, logistic=LogisticWeights())
SHAPES = PredictorShapes(hidden=HIDDEN, state=WIDTH, layers=LAYERS, experts=EXPERTS, top_k=TOP_K)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty prompts of twelve positions at temperature 0."""
    return write_traces(tmp_path_factory.mktemp("traces"))


@pytest.fixture(scope="module")
def report(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> FitReport:
    """A fit on them."""
    out = tmp_path_factory.mktemp("fit")
    return fit(FitConfig(traces=traces, out=out, width=64, epochs=15, batch_positions=16, max_seconds=None))


def test_learns_routing_and_acceptance_of_prompts_it_has_not_seen(report: FitReport) -> None:
    saved = report.metrics["routing_misses_saved"]
    assert saved["token_table"]["reached"] > 0.3
    assert saved["token_table"]["rejected"] > 0.3
    assert saved["popularity"]["nodes"] > 0.5
    assert report.metrics["bars"]["acceptance_loss_vs_raw"] < 0.6
    losses = {kind: v["log_loss"] for kind, v in report.metrics["acceptance"].items()}
    assert set(losses) == set(KINDS)
    assert losses["temperature"] < losses["raw"]
    assert losses[report.metrics["best_acceptance"]] == min(losses.values())


def test_the_folder_is_complete_and_hashed(report: FitReport, traces: Path) -> None:
    predictor = Predictor.from_folder(report.predictor)
    manifest = predictor.manifest
    for name, digest in manifest.files.items():
        assert hashlib.sha256((report.predictor / name).read_bytes()).hexdigest() == digest
    assert set(manifest.files) == {"predictor.onnx", "predictor.safetensors", "acceptance.json", "metrics.json"}
    assert manifest.target["fingerprint"] == "t" * 64
    assert json.loads((report.predictor / "metrics.json").read_text()) == report.metrics
    assert predictor.acceptance.best == report.metrics["best_acceptance"]
    assert len(manifest.heldout_prompts) == 6


def test_the_reported_recall_is_what_decoding_gets(report: FitReport, traces: Path) -> None:
    """Recount recall and misses over the held-out pools with the runtime's own scorer."""
    predictor = Predictor.from_folder(report.predictor)
    scorer = Scorer(predictor, "head", LAYERS, EXPERTS)
    reader = Traces(traces)
    embed = reader.embedding()
    found, total = 0, 0
    for shard in reader.shards():
        for row in np.flatnonzero(np.isin(shard.prompt_id, predictor.manifest.heldout_prompts)).tolist():
            candidates = scorer.score(shard.pool(row), embed, True)
            true = pack_masks(shard.routing_of(row), EXPERTS)
            found += sum((a & b).bit_count() for a, b in zip(candidates.masks, true[1:], strict=True))
            total += len(candidates) * LAYERS * TOP_K
    assert found / total == pytest.approx(report.metrics["routing_recall"]["predictor"]["nodes"], abs=1e-3)


def test_labels_above_temperature_zero(tmp_path: Path) -> None:
    source = write_traces(tmp_path / "traces", prompts=16, positions=8, temperature=0.7)
    config = FitConfig(traces=source, out=tmp_path / "fit", width=32, epochs=4, batch_positions=16)
    losses = fit(config).metrics["acceptance"]
    assert all(np.isfinite(v["log_loss"]) for v in losses.values())
    assert Predictor.from_folder(tmp_path / "fit").manifest.temperature == 0.7


def trained(traces: Path, config: FitConfig) -> tuple[PredictorNetwork, int]:
    """A network trained without export and report, and the epochs it took."""
    torch.manual_seed(config.seed)
    net = PredictorNetwork(SHAPES, config.width)
    fit_prompts, heldout = split_prompts(list(range(40)), config.heldout, config.seed)
    data = PredictorData(
        [(NodeTables(Traces(traces)), MODEL)], fit_prompts, heldout, config.batch_positions, 0.5, 0.1, config.seed
    )
    return net, train(net, data, config, None)


def test_the_time_budget_ends_training(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, epochs = trained(traces, FitConfig(traces=traces, out=tmp_path, width=16, epochs=10_000, max_seconds=0.5))
    assert epochs < 10_000
    assert "fit: stopped by max_seconds=0.5 at step" in capsys.readouterr().err


def test_one_seed_gives_one_network(traces: Path, tmp_path: Path) -> None:
    config = FitConfig(traces=traces, out=tmp_path, width=16, epochs=1, max_seconds=None)
    (a, _), (b, _), (c, _) = (trained(traces, config.model_copy(update={"seed": seed})) for seed in (0, 0, 1))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.inputs.weight, c.inputs.weight)


def test_poisoned_states_are_a_users_error(tmp_path: Path) -> None:
    source = write_traces(tmp_path / "traces", prompts=6, positions=4, poison=True)
    with pytest.raises(UserError, match="not finite"):
        fit(FitConfig(traces=source, out=tmp_path / "fit", width=16, epochs=1))
    assert not (tmp_path / "fit" / "manifest.json").exists()


def test_sampled_text_has_an_acceptance_model_of_its_own(traces: Path, tmp_path: Path) -> None:
    """Fitted on prompts of the same part, better there than the greedy one, and no part of the greedy one's figures."""
    warm = write_traces(tmp_path / "warm", temperature=1.5, seed=0)
    settings = {"width": 32, "epochs": 4, "batch_positions": 16, "max_seconds": None}
    both = fit(FitConfig(traces=(traces, warm), out=tmp_path / "both", **settings))
    alone = fit(FitConfig(traces=traces, out=tmp_path / "alone", **settings))
    predictor, greedy = Predictor.from_folder(both.predictor), Predictor.from_folder(alone.predictor)
    assert [predictor.manifest.fitted_on(Traces(one).fingerprint) for one in (traces, warm)] == [True, True]
    assert not greedy.manifest.fitted_on(Traces(warm).fingerprint)
    assert predictor.manifest.heldout_prompts == greedy.manifest.heldout_prompts
    model = predictor.acceptance
    assert (model.logistic, model.temperature) == (greedy.acceptance.logistic, greedy.acceptance.temperature)
    assert list(model.sampled) == [1.5]
    losses = {kind: value["log_loss"] for kind, value in both.metrics["sampled"]["1.5"].items()}
    assert model.sampled[1.5].log_loss == losses
    tables, heldout = NodeTables(Traces(warm)), set(predictor.manifest.heldout_prompts)
    unadapted, whole = (
        Evaluation(greedy, table, TEMPERATURES, 1.5) for table in (None, routing_table(tables, set(), heldout, SHAPES))
    )
    for one in (unadapted, whole):
        one.run(tables, heldout)
    assert unadapted.acceptance() == whole.metrics()["acceptance"]
    assert not unadapted.recall.counts, "routing is judged on the first traces, whose tokens the table knows"
    for kind, value in unadapted.acceptance().items():
        assert losses[kind] < value["log_loss"] or kind in ("raw", "temperature"), kind
    assert both.metrics["fit"]["positions"] == 2 * alone.metrics["fit"]["positions"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"prompts_sha256": "q" * 64}, "other prompts"), ({"drafter_temperatures": (1.0,)}, "other drafter_temperatures"),
     ({"temperature": 0.0}, "temperature 0, as")],
)  # fmt: skip
def test_traces_that_do_not_belong_together_are_refused(
    traces: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    other = write_traces(tmp_path / "other", **({"temperature": 0.7} | changes))
    with pytest.raises(UserError, match=named):
        fit(FitConfig(traces=(traces, other), out=tmp_path / "fit"))


def test_sampled_traces_need_prompts_that_are_held_out(traces: Path, tmp_path: Path) -> None:
    few = write_traces(tmp_path / "few", prompts=2, temperature=0.7)
    with pytest.raises(UserError, match="few: holds none of the prompts that are held out"):
        fit(FitConfig(traces=(traces, few), out=tmp_path / "fit", width=16, epochs=1))


def test_one_prompt_is_too_few(tmp_path: Path) -> None:
    source = write_traces(tmp_path / "traces", prompts=1, positions=4)
    with pytest.raises(UserError, match="at least 2"):
        fit(FitConfig(traces=source, out=tmp_path / "fit"))


def test_no_traces_or_a_corrupt_shard_are_named(traces: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no traces"):
        fit(FitConfig(traces=tmp_path, out=tmp_path / "fit"))
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in traces.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    shard = sorted(copy.glob("shard-*"))[0]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.write_bytes(bytes(data))
    with pytest.raises(UserError, match=shard.name):
        fit(FitConfig(traces=copy, out=tmp_path / "fit"))


def test_a_folder_that_cannot_be_made_is_named(traces: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        fit(FitConfig(traces=traces, out=tmp_path / "file" / "fit"))


def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="epoch"):
        FitConfig.model_validate({"traces": tmp_path, "out": tmp_path, "epoch": 3})


def test_ctrl_c_leaves_no_manifest(traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "manifest.json").write_text("{}")  # of an earlier fit

    def interrupted(self: PredictorModule, *args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PredictorModule, "training_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(FitConfig(traces=traces, out=tmp_path, width=16, epochs=1))
    assert not (tmp_path / "manifest.json").exists()


def test_acceptance_loss_is_the_cross_entropy_with_none_of_these() -> None:
    logits = torch.tensor([1.0, -0.5, 2.0, 0.3, 9.0])
    group, label = torch.tensor([0, 0, 2, 2, 1]), torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])
    weight = torch.tensor([1.0, 1.0, 0.25, 0.25, 0.0])
    first = torch.cat([torch.zeros(1), logits[:2]]).log_softmax(0)[2]
    second = torch.cat([torch.zeros(1), logits[2:4]]).log_softmax(0)[0]
    torch.testing.assert_close(acceptance_loss(logits, group, label, weight, 5), -(first + 0.25 * second) / 1.25)


def test_soft_labels_leave_the_rest_to_none_of_these() -> None:
    logits, label = torch.tensor([1.0, -0.5]), torch.tensor([0.6, 0.1])
    log_p = torch.cat([torch.zeros(1), logits]).log_softmax(0)
    expected = -(0.3 * log_p[0] + 0.6 * log_p[1] + 0.1 * log_p[2])
    found = acceptance_loss(logits, torch.zeros(2, dtype=torch.long), label, torch.ones(2), 2)
    torch.testing.assert_close(found, expected)


def test_perfect_routing_logits_have_full_recall_and_least_loss() -> None:
    routing = torch.tensor([[[0, 2], [1, 3]]])
    perfect = torch.full((1, 2, 4), -20.0).scatter(-1, routing, 20.0)
    assert recall(perfect, routing) == 1
    assert recall(-perfect, routing) == 0
    assert routing_loss(perfect, routing) < 1e-6
    logits, used = torch.randn(1, 2, 4), torch.zeros(1, 2, 4).scatter(-1, routing, 1.0)
    expected = F.binary_cross_entropy_with_logits(logits, used, reduction="sum") / 4
    torch.testing.assert_close(routing_loss(logits, routing), expected)


def test_acceptance_starts_as_the_drafters_own_log_p(report: FitReport) -> None:
    net = PredictorNetwork(Predictor.from_folder(report.predictor).shapes, 16)
    scalars = torch.tensor([[-1.5, 2.0, 3.0, 0.5]])
    embedding, parent = torch.randn(2, 1, net.shapes.hidden)
    _, logit = net(embedding, parent, torch.randn(1, net.shapes.state), scalars)
    assert logit.item() == pytest.approx(-1.5)


def test_misses_name_the_bars_that_do_not_hold() -> None:
    good = {"misses_saved_vs_token_table": 0.4, "union_error": 0.02, "acceptance_loss_vs_raw": 0.5}
    assert misses({"bars": good}) == []
    assert len(misses({"bars": {**good, "union_error": 0.05, "acceptance_loss_vs_raw": 0.8}})) == 2
