"""The sweep of policies by replay: simulated devices and routing are what they say, curves are compared at one length."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.policies import parse_policy
from ecospec_runtime.predictor import Predictor, PredictorManifest, PredictorShapes
from ecospec_train import tune
from ecospec_train.replay import load_rows, replay
from ecospec_train.replay_rows import as_mask
from ecospec_train.search_space import yardsticks
from ecospec_train.traces import MANIFEST, Traces
from pipelines.benchmark import equal_length, pruning, simulated, sweep
from pipelines.benchmark.equal_length import Curve, at_length, saved
from pipelines.benchmark.run_folder import open_run
from tests.train.invented import NearlyRightPredictor, make_profile
from tests.train.synthetic import EXPERTS, HIDDEN, LAYERS, TOP_K, WIDTH, write_traces

READS = LAYERS * TOP_K
WARM = {"plain_saving_ms": 0.1, "per_context_ms": 0.002}


class Session:
    """In place of a network: experts by the token's embedding, acceptance by the drafter's probability."""

    weights = np.random.default_rng(0).normal(size=(HIDDEN, LAYERS * EXPERTS)).astype(np.float32)

    def run(self, names: list[str], inputs: dict[str, np.ndarray], options: object = None) -> list[np.ndarray]:
        return [(inputs["embedding"] @ self.weights).reshape(-1, LAYERS, EXPERTS), 1.5 * inputs["scalars"][:, 0] + 1.0]


def invented_predictor(*_: object, **__: object) -> Predictor:
    known = NearlyRightPredictor()
    manifest = PredictorManifest(
        shapes=PredictorShapes(hidden=HIDDEN, state=WIDTH, layers=LAYERS, experts=EXPERTS, top_k=TOP_K), temperature=0.0,
        target=known.manifest.target, drafter=known.manifest.drafter, traces="", heldout_prompts=[], files={}, config={}, versions={},
    )  # fmt: skip
    return Predictor(Session(), manifest, known.acceptance)  # type: ignore[arg-type]


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `make quickstart` leaves, of the invented target; its traces say that experts are in order of weight."""
    folder = tmp_path / "run"
    (folder / "predictor").mkdir(parents=True)
    (folder / "predictor" / "manifest.json").write_text("{}")
    write_traces(folder / "traces", prompts=6, positions=8)
    manifest = json.loads((folder / "traces" / MANIFEST).read_text())
    (folder / "traces" / MANIFEST).write_text(json.dumps(manifest | {"routing_by_weight": True}))
    (folder / "profile.json").write_text(make_profile(**WARM).model_dump_json())
    monkeypatch.setattr(Predictor, "from_folder", invented_predictor)
    return folder


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_changed_profile_gives_the_share(share: float) -> None:
    profile = make_profile(**WARM)
    changed = simulated.with_expert_share(profile, READS, 40.0, share)
    plain_ms = changed.pass_ms(1, READS, 40)
    without = changed.model_copy(update={"per_expert_ms": 0.0, "plain_saving_ms": 0.0})
    assert 1.0 - without.pass_ms(1, READS, 40) / plain_ms == pytest.approx(share)
    assert changed.plain_ms == pytest.approx(plain_ms)
    assert simulated.own_share(changed, READS, 40.0) == pytest.approx(share)
    assert changed.plain_saving_ms / changed.per_expert_ms == pytest.approx(0.1 / profile.per_expert_ms)
    kept = set(DeviceProfile.model_fields) - {"per_expert_ms", "plain_saving_ms", "plain_ms", "expert_share"}
    assert changed.model_dump(include=kept) == profile.model_dump(include=kept)
    own = simulated.own_share(profile, READS, 40.0)
    same = simulated.with_expert_share(profile, READS, 40.0, own)
    assert same.per_expert_ms == pytest.approx(profile.per_expert_ms)


def test_off_is_charged_the_plain_step_of_the_changed_profile(tmp_path: Path) -> None:
    rows = load_rows(Traces(write_traces(tmp_path / "t", prompts=4)), None)
    context = simulated.mean_context(rows)
    changed = simulated.with_expert_share(make_profile(**WARM), READS, context, 0.6)
    assert replay(parse_policy("off"), rows, changed).tokens_per_ms == pytest.approx(1.0 / changed.plain_ms)


def test_a_device_on_which_experts_are_free_is_refused() -> None:
    with pytest.raises(UserError, match="experts take no time"):
        simulated.with_expert_share(make_profile(plain_saving_ms=5.0), READS, 0.0, 0.5)


def test_only_experts_cost_on_the_device_of_the_paper() -> None:
    profile = simulated.experts_only(make_profile(**WARM), READS)
    assert profile.pass_ms(7, 23, 100) == 23.0
    assert profile.draft_ms(6, 20, 48) == 0.0


def test_sparser_routing_is_the_heaviest_part_of_the_routing(run_folder: Path) -> None:
    run = open_run(run_folder, 100)
    sparser = simulated.SparserTraces(run.traces, 2), simulated.sparser_predictor(run.predictor, 2)
    (dense, _), (cut, _) = run.halves(), run.halves(*sparser)
    whole = dense.prompts[0].shard.verified(), cut.prompts[0].shard.verified()
    assert len(whole[0]) == len(whole[1])
    for field, count in (("used", 2 * LAYERS), ("predicted", 2 * LAYERS)):
        for more, fewer in zip(*(part[field] for part in whole), strict=True):
            assert as_mask(fewer) & ~as_mask(more) == 0
            assert as_mask(fewer).bit_count() == count
    np.testing.assert_array_equal(sparser[0].shard(0).routing, run.traces.shard(0).routing[..., :2])
    assert sparser[0].manifest.target.top_k == 2
    hits = sum((as_mask(token["used"]) & as_mask(token["predicted"])).bit_count() for token in whole[0])
    assert 0 < hits < len(whole[0]) * READS
    assert simulated.routing_recall(dense) == pytest.approx(hits / len(whole[0]) / READS)


def test_routing_in_the_routers_own_order_is_not_cut(run_folder: Path) -> None:
    traces = Traces(run_folder / "traces")
    traces.manifest = traces.manifest.model_copy(update={"routing_by_weight": False})
    with pytest.raises(UserError, match="harvest again"):
        simulated.SparserTraces(traces, 2)
    target = traces.manifest.target.model_copy(update={"architecture": "Qwen3MoeForCausalLM"})
    assert simulated.by_weight(traces.manifest.model_copy(update={"target": target}))


def curve(points: list[tuple[float, float]]) -> Curve:
    """One prompt's curve of (tokens per pass, experts per layer), out of 10 passes through two layers."""
    totals = [[[10 * length, 10, 20 * experts, 0]] for length, experts in points]
    return Curve("c", [float(i) for i in range(len(points))], np.array(totals), layers=2)


def test_curves_are_compared_at_one_length() -> None:
    rival, own = curve([(1.0, 4.0), (2.0, 8.0), (3.0, 16.0)]), curve([(1.0, 4.0), (2.9, 9.0), (2.1, 7.0)])
    assert at_length(*rival.points(), 2.25) == pytest.approx(10.0)
    assert at_length(*own.points(), 2.5) == pytest.approx(8.0)  # whatever order the points are in
    assert np.isnan(at_length(*rival.points(), 3.1))
    value = saved(own, rival, 2.5)
    assert value is not None and value == pytest.approx((1.0 - 8.0 / 12.0,) * 3)  # one prompt: no spread
    assert saved(own, rival, 2.95) is None


def test_curves_and_ceilings_of_a_run(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_length, "BUDGETS", range(1, 6))
    monkeypatch.setattr(equal_length, "PRICES", (0.1, 0.5, 1.0))
    monkeypatch.setattr(equal_length, "FEW_PRICES", (0.01, 0.1, 0.5, 1.0))
    monkeypatch.setattr(equal_length, "DRAWS", 5)
    run = open_run(run_folder, 100)
    rows = run.halves()[1]
    found = {c.name: c for c in equal_length.curves(run, rows)}
    for name, budget in ((equal_length.RIVALS[0], 3), (equal_length.RIVALS[2], 5)):
        kind = "raw" if "published" in name else rows.best
        direct = replay(parse_policy(f"{name.split(',')[0]}:budget={budget},acceptance={kind}"), rows, run.profile)
        point = found[name].to_dict()["points"][budget]
        assert point["accept_length"] == pytest.approx(direct.accept_length)
        assert point["experts_per_layer"] == pytest.approx(direct.experts_per_layer)
    assert all(c.to_dict()["points"][0]["experts_per_layer"] == TOP_K for c in found.values())  # plain decoding
    best = found["exact optimum, true routing and acceptance"].to_dict()["points"]
    assert all(p["nodes"] == pytest.approx(p["accept_length"] - 1.0) for p in best)  # all that it verifies is accepted
    top = best[1]  # nearly free experts: all that could be accepted is
    assert top["accept_length"] == pytest.approx(max(c.points()[0].max() for c in found.values()))
    shared = equal_length.sharing(rows)
    assert max(shared["root"], shared["parent"]) <= shared["others"] <= 1.0


def test_the_command_leaves_its_files(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BUDGETS", (1, 3)), ("PRICES", (0.2, 1.0)), ("FEW_PRICES", (0.2,)), ("DRAWS", 3)):
        monkeypatch.setattr(equal_length, name, value)
    monkeypatch.setattr(sweep, "SHARES", (0.5,))
    out = tmp_path / "docs" / "invented.md"
    sweep.main(["--run", str(run_folder), "--out", str(out), "--trials", "2", "--positions", "60"])
    result = json.loads(out.with_suffix(".json").read_text())
    (cell,) = result["expert_share"]
    assert [c["top_k"] for c in result["sparsity"]] == [1, 2, 3]
    assert {c["profile"]["expert_share"] for c in result["sparsity"]} == {0.5}
    assert result["sparsity"][0]["profile"]["per_expert_ms"] == pytest.approx(3 * cell["profile"]["per_expert_ms"])
    policies = cell["policies"]
    assert len(policies) == 1 + len(sweep.ENTRIES) + 1
    assert policies["off"]["over_off"] == 1.0
    assert policies["off"]["lead"] == pytest.approx(policies["throughput"]["over_off"])
    assert policies["ratio"]["lead"] * policies["ratio"]["over_off"] == pytest.approx(policies["off"]["lead"])
    text = out.read_text()
    assert "| 1/12: over `off` |" in text and "replay of recorded traces" in text
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_file_is_named_in_one_line(run_folder: Path, tmp_path: Path) -> None:
    (run_folder / "predictor" / "manifest.json").unlink()
    (run_folder / "predictor").rmdir()
    for main in (sweep.main, pruning.main):
        with pytest.raises(SystemExit, match=r"^error: .*predictor: missing;.*$") as caught:
            main(["--run", str(run_folder), "--out", str(tmp_path / "out.md")])
        assert "\n" not in str(caught.value)


def test_searches_with_and_without_pruning(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(tune, "yardsticks", lambda space: yardsticks(space)[:3])  # fewer, faster
    out = tmp_path / "pruning.md"
    pruning.main(
        [
            "--run",
            str(run_folder),
            "--out",
            str(out),
            "--trials",
            "14",
            "--seeds",
            "1",
            "--repeats",
            "1",
            "--positions",
            "30",
        ]
    )
    result = json.loads(out.with_suffix(".json").read_text())
    without, with_ = result["cells"]
    assert (without["prune"], with_["prune"]) == (False, True)
    assert without["trials"] == with_["trials"] == 14
    assert without["always_tried"] == 3
    assert without["pruned"] == 0 < with_["pruned"] <= 11
    assert result["time_saved"] == pytest.approx(1.0 - with_["seconds"] / without["seconds"])


@pytest.mark.parametrize(
    ("seconds", "rate", "said"), [(0.5, 1.0, "pays"), (0.5, 0.9, "does not"), (0.97, 1.0, "does not")]
)
def test_pruning_must_save_time_and_find_as_much(seconds: float, rate: float, said: str) -> None:
    cell = {"seed": 0, "trials": 9, "always_tried": 3, "pruned": 2, "policy": "off"}
    cells = [cell | {"prune": False, "seconds": 10.0, "best": 2.0}] * 2
    cells += [cell | {"prune": True, "seconds": 10.0 * seconds * x, "best": 2.0 * rate} for x in (0.5, 2.0)]
    assert pruning.fastest([*cells, cells[0] | {"seconds": 11.0}]) == [cells[0], cells[2]]
    result = {"command": "c", "repeats": 2, "device": "d", "cores": 2, "python": "3", "optuna": "5", "cells": cells}
    found = pruning.means(cells)
    assert found == pytest.approx({"time_saved": 1.0 - seconds, "rate_lost": 1.0 - rate})
    assert f"pruning {said}" in pruning.markdown(result | found)
