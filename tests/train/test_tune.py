"""The tuner: picks what pays, says when nothing does, continues where it stopped, refuses what does not belong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from ecospec_runtime.bundle import DevicePolicy
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.policies import PolicySpec, build_policy, parse_policy
from ecospec_runtime.predictor import Predictor
from ecospec_train.replay import load_rows, replay
from ecospec_train.traces import Traces
from ecospec_train.tune import (
    TuneConfig,
    fingerprint,
    load_profile,
    log_gain,
    settled,
    simplest,
    split_prompts,
    tune,
    yardsticks,
)  # fmt: skip
from tests.train.invented import NearlyRightPredictor, make_profile
from tests.train.synthetic import SHAPE, TOP_K, write_traces

CHEAP = {
    "per_expert_ms": 0.05,
    "draft_level_ms": 0.002,
    "draft_fixed_ms": 0.003,
    "predict_ms": 0.002,
    "select_ms": 0.001,
}
DEAR = {"per_expert_ms": 2.0, "draft_level_ms": 1.0, "draft_fixed_ms": 60.0}


@pytest.fixture(scope="module")
def traces_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_traces(tmp_path_factory.mktemp("tune") / "traces", prompts=20, positions=10)


@pytest.fixture
def config(traces_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuneConfig:
    monkeypatch.setattr(Predictor, "from_folder", lambda *_: NearlyRightPredictor())
    monkeypatch.setattr("ecospec_train.tune.BUDGETS", (2, 6))  # fewer yardsticks, faster tests
    predictor = tmp_path / "predictor"
    predictor.mkdir()
    (predictor / "manifest.json").write_text("{}")
    write_profile(tmp_path / "profile.json", **CHEAP)
    return TuneConfig(traces=traces_dir, predictor=predictor, profile=tmp_path / "profile.json", out=tmp_path / "out",
                      trials=20, storage="sqlite://")  # fmt: skip


def write_profile(path: Path, **values: float) -> DeviceProfile:
    profile = make_profile(**values)
    path.write_text(profile.model_dump_json())
    return profile


def test_what_pays_is_chosen_and_stored(config: TuneConfig) -> None:
    logged: list[tuple[int, float, dict[str, Any]]] = []
    report = tune(config, on_trial=lambda *entry: logged.append(entry))
    stored = DevicePolicy.model_validate(json.loads(report.file.read_text()))
    assert report.file == config.out / "policies" / f"{stored.profile.slug}.json"
    assert stored.policy != "off"
    assert report.speedup_vs_off > 1.05
    assert report.speedup_vs_confidence >= 1.0
    assert build_policy(PolicySpec(name=stored.policy, parameters=stored.parameters)).drafts
    assert parse_policy(report.policy).name == stored.policy

    confirming = split_prompts(Traces(config.traces), NearlyRightPredictor(), config)[1]  # type: ignore[arg-type]
    rows = load_rows(Traces(config.traces), NearlyRightPredictor(), confirming)  # type: ignore[arg-type]
    again = replay(parse_policy(report.policy), rows, stored.profile)
    off = replay(parse_policy("off"), rows, stored.profile)
    assert report.speedup_vs_off == pytest.approx(again.tokens_per_ms / off.tokens_per_ms)

    table = json.loads((config.out / "trials.json").read_text())
    assert len(table) == len(logged) == report.trials == max(config.trials, len(yardsticks(SHAPE.depth, TOP_K)))
    assert [row["tokens_per_ms"] for row in table] == sorted((entry[1] for entry in logged), reverse=True)
    tried = [row["parameters"] for row in table]
    assert all(point in tried for point in yardsticks(SHAPE.depth, TOP_K))


def test_off_is_chosen_and_explained_when_nothing_pays(config: TuneConfig, capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(config.profile, **DEAR)
    report = tune(config.model_copy(update={"trials": 1}))
    assert json.loads(report.file.read_text())["policy"] == report.policy == "off"
    assert report.speedup_vs_off == 1.0
    said = [line for line in capsys.readouterr().err.splitlines() if "does not pay" in line]
    assert len(said) == 1
    assert report.reason in said[0]


def test_a_gain_within_the_noise_is_no_gain(config: TuneConfig) -> None:
    report = tune(config.model_copy(update={"trials": 1, "margin": 5.0}))
    assert report.policy == "off"
    assert report.results["best"]["tokens_per_ms"] > report.results["off"]["tokens_per_ms"]


def test_a_buffer_must_earn_its_cost() -> None:
    def trial(value: float, buffer: bool) -> optuna.trial.FrozenTrial:
        choice = optuna.distributions.CategoricalDistribution((False, True))
        return optuna.trial.create_trial(value=value, params={"buffer": buffer}, distributions={"buffer": choice})

    close, far = [trial(1.002, True), trial(1.0, False)], [trial(1.1, True), trial(1.0, False)]
    assert simplest(close) is close[1]
    assert simplest(far) is far[0]


def test_a_second_run_continues_the_study(config: TuneConfig) -> None:
    config, count = config.model_copy(update={"storage": None}), len(yardsticks(SHAPE.depth, TOP_K))
    first = tune(config.model_copy(update={"trials": count}))
    second = tune(config.model_copy(update={"trials": count + 3}))
    third = tune(config.model_copy(update={"trials": count + 3}))
    assert (first.trials, second.trials, third.trials) == (count, count + 3, count + 3)
    assert third == second
    points = [
        json.dumps(row["parameters"], sort_keys=True) for row in json.loads((config.out / "trials.json").read_text())
    ]
    assert len(set(points)) >= count


def test_yardsticks_of_a_killed_run_are_tried_again(config: TuneConfig) -> None:
    tune(config.model_copy(update={"trials": 1, "storage": None}))
    study = optuna.load_study(study_name="ecospec", storage=f"sqlite:///{config.out}/study.db")
    point = yardsticks(SHAPE.depth, TOP_K)[0]
    victim = next(t for t in study.trials if t.params == point)
    other = optuna.create_study(study_name="ecospec", storage=f"sqlite:///{config.out}/other.db", direction="maximize")
    other.set_user_attr("inputs", study.user_attrs["inputs"])
    other.add_trials([t for t in study.trials if t.number != victim.number])
    other.enqueue_trial(point)
    other.ask()  # a worker that died: its trial stays open
    report = tune(config.model_copy(update={"trials": 1, "storage": f"sqlite:///{config.out}/other.db"}))
    assert report.trials == len(yardsticks(SHAPE.depth, TOP_K))


def test_tuning_uses_prompts_that_the_fit_held_out(config: TuneConfig) -> None:
    traces, predictor = Traces(config.traces), NearlyRightPredictor()
    predictor.manifest.traces, predictor.manifest.heldout_prompts = fingerprint(traces), [3, 5, 7, 11, 13]
    tuning, confirming = split_prompts(traces, predictor, config)  # type: ignore[arg-type]
    assert tuning | confirming == {3, 5, 7, 11, 13}
    assert (len(tuning), len(confirming)) == (3, 2)
    predictor.manifest.traces = "other traces"
    assert len(set.union(*split_prompts(traces, predictor, config))) == 20  # type: ignore[arg-type]


def test_mistakes_are_one_clear_line(config: TuneConfig, tmp_path: Path) -> None:
    config = config.model_copy(update={"storage": None, "trials": 1})
    tune(config)
    write_profile(config.profile, **DEAR)
    with pytest.raises(UserError, match="another --out"):
        tune(config)
    with pytest.raises(UserError, match="ecospec-train profile"):
        tune(config.model_copy(update={"profile": tmp_path / "none.json"}))
    config.profile.write_text('{"device": 3')
    with pytest.raises(UserError, match=r"profile\.json"):
        tune(config)
    write_profile(config.profile, **CHEAP)
    sound = json.loads(config.profile.read_text())
    for key, value in {"plain_ms": float("inf"), "per_token_ms": float("nan"), "per_expert_ms": -1, "threads": 0,
                       "slug": "../evil", "schema_version": 7}.items():  # fmt: skip
        config.profile.write_text(json.dumps(sound | {key: value}))
        with pytest.raises(UserError, match=rf"profile\.json: {key}"):
            tune(config)
    config.profile.write_text(json.dumps(sound))
    with pytest.raises(UserError, match="'seed'"):
        TuneConfig(**(config.model_dump() | {"seed": -1}))
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "study.db").write_bytes(b"no database " * 99)
    with pytest.raises(UserError, match=r"cannot be opened.*remove that file"):
        tune(config.model_copy(update={"out": damaged}))
    with pytest.raises(UserError, match="cannot be opened"):
        tune(config.model_copy(update={"storage": "sqlite:////nowhere/study.db", "out": tmp_path / "new"}))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out"):
        tune(config.model_copy(update={"out": tmp_path / "file"}))


def test_the_search_must_beat_what_needed_none_by_more_than_chance(config: TuneConfig) -> None:
    rows = load_rows(Traces(config.traces), NearlyRightPredictor())  # type: ignore[arg-type]
    profile = load_profile(config.profile)
    one, other = (parse_policy(f"confidence:budget={m}") for m in (2, 8))
    gained, error = log_gain(one, other, rows, profile)
    rates = [replay(spec, rows, profile).tokens_per_ms for spec in (one, other)]
    assert gained == pytest.approx(np.log(rates[0] / rates[1]))
    assert 0.0 < error < 1.0
    assert log_gain(one, one, rows, profile) == (0.0, 0.0)
    alone = replace(rows, prompts=rows.prompts[:1])
    assert log_gain(one, other, alone, profile)[1] == 0.0

    def trial(policy: str, value: float, params: dict[str, Any]) -> optuna.trial.FrozenTrial:
        kinds = {k: optuna.distributions.CategoricalDistribution((v,)) for k, v in params.items()}
        return optuna.trial.create_trial(value=value, params=params, distributions=kinds,
                                         user_attrs={"result": {"policy": policy}})  # fmt: skip

    plain = trial("confidence:budget=2", 1.0, yardsticks(SHAPE.depth, TOP_K)[0])
    for policy, found in (("confidence:budget=2,depth=3", False), ("throughput:pause=0,acceptance=head", True)):
        searched = trial(policy, 1.01, {"policy": policy})
        searched.number = 1
        assert (settled([searched, plain], rows, profile, TOP_K) is searched) == found
