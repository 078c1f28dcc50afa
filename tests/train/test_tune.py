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
from ecospec_train import tune as tune_module
from ecospec_train.choice import log_gain, settled, simplest
from ecospec_train.replay import load_rows, replay
from ecospec_train.search_space import Space, yardsticks
from ecospec_train.storage import open_storage
from ecospec_train.traces import Traces
from ecospec_train.tune import TuneConfig, load_profile, split_prompts, tune
from ecospec_train.workers import finished, is_fixed, me
from tests.train.invented import NearlyRightPredictor, make_profile
from tests.train.synthetic import EXPERTS, SHAPE, TOP_K, write_traces

CHEAP = {
    "per_expert_ms": 0.05,
    "draft_level_ms": 0.002,
    "draft_fixed_ms": 0.003,
    "predict_ms": 0.002,
    "select_ms": 0.001,
}
SPACE = Space(SHAPE.depth, TOP_K, EXPERTS)
DEAR = {"per_expert_ms": 2.0, "draft_level_ms": 1.0, "draft_fixed_ms": 60.0}


@pytest.fixture(scope="module")
def traces_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_traces(tmp_path_factory.mktemp("tune") / "traces", prompts=20, positions=10)


@pytest.fixture
def config(traces_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuneConfig:
    monkeypatch.setattr(Predictor, "from_folder", lambda *_: NearlyRightPredictor())
    monkeypatch.setattr("ecospec_train.search_space.BUDGETS", (2, 6))  # fewer yardsticks, faster tests
    predictor = tmp_path / "predictor"
    predictor.mkdir()
    (predictor / "manifest.json").write_text("{}")
    write_profile(tmp_path / "profile.json", **CHEAP)
    return TuneConfig(traces=traces_dir, predictor=(predictor,), profile=tmp_path / "profile.json", out=tmp_path / "out",
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

    confirming = split_prompts(Traces(config.traces), [NearlyRightPredictor()], config)[1]  # type: ignore[list-item]
    rows = load_rows(Traces(config.traces), NearlyRightPredictor(), confirming)  # type: ignore[arg-type]
    again = replay(parse_policy(report.policy), rows, stored.profile)
    off = replay(parse_policy("off"), rows, stored.profile)
    assert report.speedup_vs_off == pytest.approx(again.tokens_per_ms / off.tokens_per_ms)

    table = json.loads((config.out / "trials.json").read_text())
    assert len(table) == len(logged) == report.trials == max(config.trials, len(yardsticks(SPACE)))
    assert [row["tokens_per_ms"] for row in table] == sorted((entry[1] for entry in logged), reverse=True)
    tried = [row["parameters"] for row in table]
    assert all(point in tried for point in yardsticks(SPACE))


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
        return optuna.trial.create_trial(value=value, params={"buffer": buffer}, distributions={"buffer": choice},
                                         user_attrs={"result": {"tokens_per_ms": value}})  # fmt: skip

    close, far = [trial(1.002, True), trial(1.0, False)], [trial(1.1, True), trial(1.0, False)]
    assert simplest(close) is close[1]
    assert simplest(far) is far[0]


def test_a_second_run_continues_the_study(config: TuneConfig) -> None:
    config, count = config.model_copy(update={"storage": None}), len(yardsticks(SPACE))
    first = tune(config.model_copy(update={"trials": count}))
    second = tune(config.model_copy(update={"trials": count + 3}))
    third = tune(config.model_copy(update={"trials": count + 3}))
    assert (first.trials, second.trials, third.trials) == (count, count + 3, count + 3)
    assert third == second
    points = [
        json.dumps(row["parameters"], sort_keys=True) for row in json.loads((config.out / "trials.json").read_text())
    ]
    assert len(set(points)) >= count


def study_of(config: TuneConfig) -> optuna.Study:
    """The only study of a tune's storage."""
    storage = open_storage(config.storage or f"sqlite:///{config.out}/study.db")
    (name,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage)


def test_yardsticks_of_a_killed_run_are_tried_again(config: TuneConfig, tmp_path: Path) -> None:
    """It died in its first trial, by another worker's account."""
    config = config.model_copy(update={"trials": 1, "storage": str(tmp_path / "a.journal")})
    prepared = tune_module.prepare(config)
    point = yardsticks(SPACE)[0]
    prepared.study.enqueue_trial(point, user_attrs={"key": "fixed 0"})
    prepared.study.ask().set_user_attr("owner", me() | {"started": 0.0})
    report = tune(config)
    assert report.trials == len(yardsticks(SPACE))
    assert sum(t.params == point for t in finished(study_of(config))) == 1


def test_a_changed_input_begins_a_study_of_its_own(config: TuneConfig) -> None:
    config = config.model_copy(update={"storage": None, "trials": 1})
    assert tune(config).policy != "off"
    write_profile(config.profile, **DEAR)
    report = tune(config)
    assert (report.policy, report.trials) == ("off", len(yardsticks(SPACE)))
    assert len(optuna.get_all_study_names(open_storage(f"sqlite:///{config.out}/study.db"))) == 2


def test_processes_share_the_trials(config: TuneConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--workers` starts the others with the command line; here the other process is a thread's worth of work before ours."""
    started: list[list[str]] = []

    class Process:
        returncode = 3

        def __init__(self, command: list[str], **_: Any):
            started.append(command)
            monkeypatch.setenv("RANK", "1")
            tune_module.assist(TuneConfig.model_validate_json(Path(command[-1]).read_text()))
            monkeypatch.setenv("RANK", "0")

        def wait(self) -> int:
            return self.returncode

        terminate = wait

    monkeypatch.setattr(tune_module.subprocess, "Popen", Process)
    logged: list[int] = []
    config = config.model_copy(update={"storage": None, "workers": 2, "trials": len(yardsticks(SPACE)) + 2})
    report = tune(config, on_trial=lambda number, *_: logged.append(number))
    assert len(started) == 1
    assert report.trials == config.trials
    assert logged == [], "all were finished by the other one"
    with pytest.raises(UserError, match=r"--workers 2: .*memory"):
        tune(config.model_copy(update={"storage": "sqlite://"}))


def test_pruning_spares_the_yardsticks_and_the_answer(config: TuneConfig) -> None:
    config = config.model_copy(update={"storage": None, "trials": len(yardsticks(SPACE)) + 12})
    pruned = tune(config)
    trials = finished(study_of(config))
    left = [t for t in trials if t.state == optuna.trial.TrialState.PRUNED]
    assert len(left) == pruned.pruned > 0
    assert not any(is_fixed(t) for t in left)
    assert len(json.loads((config.out / "trials.json").read_text())) == pruned.trials - pruned.pruned
    whole = tune(config.model_copy(update={"out": config.out / "whole", "prune": False}))
    assert whole.pruned == 0
    assert pruned.speedup_vs_off == pytest.approx(whole.speedup_vs_off, rel=0.02)


def test_two_objectives_leave_a_front(config: TuneConfig) -> None:
    report = tune(config.model_copy(update={"objectives": "pareto", "trials": len(yardsticks(SPACE)) + 5}))
    assert report.policy != "off", "the choice is by rate all the same"
    table = json.loads((config.out / "trials.json").read_text())
    assert len(table) == report.trials
    assert [row["tokens_per_ms"] for row in table] == sorted((row["tokens_per_ms"] for row in table), reverse=True)
    points = [(row["result"]["accept_length"], -row["result"]["experts_per_layer"]) for row in table]
    front = [not any(a >= x and b >= y and (a, b) != (x, y) for a, b in points) for x, y in points]
    assert [row["pareto"] for row in table] == front
    assert 0 < sum(front) < len(front)
    assert (config.out / "pareto.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="'objectives'"):
        TuneConfig(**(config.model_dump() | {"objectives": "both"}))


class NearlyWrongPredictor(NearlyRightPredictor):
    """Takes every acceptance for its opposite."""

    def predict(self, pool: Any, embed: object) -> Any:
        right = super().predict(pool, embed)
        return right._replace(acceptance_logits=-right.acceptance_logits)


def test_the_better_of_two_predictors_is_used_and_named(
    config: TuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = (tmp_path / "wrong", tmp_path / "right")
    for folder in folders:
        folder.mkdir()
        (folder / "manifest.json").write_text(json.dumps(folder.name))
    kinds = {"wrong": NearlyWrongPredictor, "right": NearlyRightPredictor}
    monkeypatch.setattr(Predictor, "from_folder", lambda folder: kinds.get(folder.name, NearlyRightPredictor)())

    def predicting(space: Space) -> list[dict[str, Any]]:
        return [point for point in yardsticks(space) if point["policy"] != "utility"]  # which needs no predictor

    monkeypatch.setattr(tune_module, "yardsticks", predicting)
    report = tune(config.model_copy(update={"predictor": folders, "trials": 1}))
    space = Space(SHAPE.depth, TOP_K, EXPERTS, ("wrong", "right"))
    assert report.trials == len(predicting(space)) > len(predicting(SPACE))
    assert report.predictor == "right"
    stored = DevicePolicy.model_validate(json.loads(report.file.read_text()))
    assert stored.predictor == tune_module.predictor_id(folders[1])
    assert report.speedup_vs_off == pytest.approx(tune(config.model_copy(update={"trials": 1})).speedup_vs_off)
    with pytest.raises(UserError, match="given twice"):
        tune(config.model_copy(update={"predictor": (folders[0], folders[0])}))


def test_tuning_uses_prompts_that_the_fit_held_out(config: TuneConfig) -> None:
    traces, predictor = Traces(config.traces), NearlyRightPredictor()
    predictor.manifest.traces, predictor.manifest.heldout_prompts = traces.fingerprint, [3, 5, 7, 11, 13]
    tuning, confirming = split_prompts(traces, [predictor], config)  # type: ignore[list-item]
    assert tuning | confirming == {3, 5, 7, 11, 13}
    assert (len(tuning), len(confirming)) == (3, 2)
    predictor.manifest.traces = "other traces"
    assert len(set.union(*split_prompts(traces, [predictor], config))) == 20  # type: ignore[list-item]


def test_mistakes_are_one_clear_line(config: TuneConfig, tmp_path: Path) -> None:
    config = config.model_copy(update={"storage": None, "trials": 1})
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
    with pytest.raises(UserError, match=r"cannot be opened.*remove the file"):
        tune(config.model_copy(update={"out": damaged}))
    with pytest.raises(UserError, match="cannot be opened"):
        tune(config.model_copy(update={"storage": "sqlite:////nowhere/study.db", "out": tmp_path / "new"}))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out"):
        tune(config.model_copy(update={"out": tmp_path / "file"}))


def test_the_search_must_beat_what_needed_none_by_more_than_chance(config: TuneConfig) -> None:
    rows = load_rows(Traces(config.traces), NearlyRightPredictor())  # type: ignore[arg-type]
    profile = load_profile(config.profile)
    resting = parse_policy("throughput:price=20,acceptance=raw")
    one, other = (parse_policy(f"confidence:budget={m}") for m in (2, 8))
    for spec, rival in ((resting, other), (one, other)):
        gained, error = log_gain(spec, rival, rows, profile)
        rates = [replay(s, rows, profile).tokens_per_ms for s in (spec, rival)]
        assert gained == pytest.approx(np.log(rates[0] / rates[1])), "a policy remembers the prompts before"
        assert 0.0 < error < 1.0
    assert log_gain(one, one, rows, profile) == (0.0, 0.0)
    alone = replace(rows, prompts=rows.prompts[:1])
    assert log_gain(one, other, alone, profile)[1] == 0.0

    def trial(policy: str, value: float, params: dict[str, Any]) -> optuna.trial.FrozenTrial:
        kinds = {k: optuna.distributions.CategoricalDistribution((v,)) for k, v in params.items()}
        return optuna.trial.create_trial(value=value, params=params, distributions=kinds,
                                         user_attrs={"result": {"policy": policy, "tokens_per_ms": value}})  # fmt: skip

    plain = trial("confidence:budget=2", 1.0, yardsticks(SPACE)[0])
    for policy, found in (("confidence:budget=2,depth=3", False), ("throughput:pause=0,acceptance=head", True)):
        searched = trial(policy, 1.01, {"policy": policy})
        searched.number = 1
        assert (settled([searched, plain], {"": rows}, profile, yardsticks(SPACE)) is searched) == found
