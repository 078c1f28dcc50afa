"""The comparison of policies: tuned alike on prompts that nothing has seen, nothing lost, figures that say what was measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ecospec_runtime import bench
from ecospec_runtime.acceptance import AcceptanceModel, LogisticWeights
from ecospec_runtime.bench import Sample
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.errors import UserError
from ecospec_runtime.policies import parse_policy
from ecospec_runtime.pool import Pool
from ecospec_runtime.predictor import Prediction, Predictor
from ecospec_runtime.prompts import fingerprint_prompts, read_prompts
from ecospec_train import harvest as harvest_module
from ecospec_train.harvest import HarvestConfig, harvest
from ecospec_train.replay import load_rows, replay
from ecospec_train.traces import Traces
from ecospec_train.tune import load_profile
from pipelines.benchmark import policies, policies_report, policies_tuning
from pipelines.benchmark.contest import ENTRIES, OURS, Entry, tune_entry
from pipelines.benchmark.policies_tuning import ORACLE, Settings, bound, prepare
from tests.bundles import tiny_profile

TEXTS = ["def f(x):", "x = 1", "import os", "for i in", "class A", "while", "return x", "print("]
HELDOUT = [1, 2, 4, 6, 7]
NAMES = ["off", *(entry.name for entry in ENTRIES)]


class Opinions:
    """Stands for the run's predictor: arbitrary but fixed opinions about each token."""

    acceptance = AcceptanceModel(best="head", temperature=0.7, logistic=LogisticWeights(bias=1.0))

    def __init__(self, traces: Path):
        manifest = Traces(traces).manifest
        target = manifest.target
        self.shapes = SimpleNamespace(layers=target.moe_layers, experts=target.experts, top_k=target.top_k)
        self.manifest = SimpleNamespace(
            target=target.model_dump(), drafter=manifest.drafter.model_dump(), traces=Traces(traces).fingerprint,
            heldout_prompts=HELDOUT, fitted_on=lambda found: found == self.manifest.traces,
        )  # fmt: skip

    def predict(self, pool: Pool, embed: object, routing: bool = True) -> Prediction:
        """Of every token the same, whatever the context."""
        layers, experts = self.shapes.layers, self.shapes.experts
        tokens = np.concatenate(([pool.root_token], pool.tokens))[:, None, None]
        routing = np.sin(tokens * 3.7 + np.arange(layers * experts).reshape(1, layers, experts) ** 2)
        return Prediction(routing.astype(np.float32), np.concatenate(([0.0], pool.log_probs + 1.5)).astype(np.float32))


def opinions(run: Path) -> Any:
    """The predictor of a run."""
    return Opinions(run / "traces")


@pytest.fixture(scope="module")
def fresh(tiny_target_dir: Path, tiny_drafter_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `make quickstart` leaves it, of the tiny models."""
    run = tmp_path_factory.mktemp("run")
    shutil.copytree(tiny_target_dir, run / "target")
    (run / "predictor").mkdir()
    (run / "predictor/manifest.json").write_text("{}")
    (run / "profile.json").write_text(tiny_profile().model_dump_json())
    for name, texts in (("harvest", TEXTS), ("bench", ["import re", "y = f("])):
        (run / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    harvest(HarvestConfig(
        target=str(tiny_target_dir), drafter=str(tiny_drafter_dir), prompts=str(run / "harvest.jsonl"), out=run / "traces",
        max_new_tokens=6, pool=PoolConfig(depth=3, beam=2, width=4),
    ))  # fmt: skip
    return run


@pytest.fixture(autouse=True)
def _opinions(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Predictor, "from_folder", lambda *_: opinions(fresh))


Command = Callable[..., list[str]]


@pytest.fixture(scope="module")
def command(tiny_drafter_dir: Path) -> Command:
    def make(run: Path, *further: str) -> list[str]:
        return ["--run", str(run), "--drafter", str(tiny_drafter_dir), "--out", str(run / "out/policies.md"), "--trials", "2",
                "--tokens", "5", *further]  # fmt: skip

    return make


@pytest.fixture(scope="module")
def finished(fresh: Path, command: Command) -> Path:
    """The same folder after a comparison at two temperatures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Predictor, "from_folder", lambda *_: opinions(fresh))
        patch.setattr(bench, "WARM_UP_TOKENS", 1)
        policies.main(command(fresh))
    return fresh


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def tables_of(run: Path) -> list[dict[str, Any]]:
    tables: list[dict[str, Any]] = json.loads((run / "out/policies.json").read_text())["temperatures"]
    return tables


def test_every_policy_is_tuned_on_some_prompts_and_confirmed_on_others(finished: Path, tiny_drafter_dir: Path) -> None:
    profile = load_profile(finished / "profile.json")
    for table, folder in zip(tables_of(finished), ("traces", "traces-0.7"), strict=True):
        traces, predictor = Traces(finished / folder), opinions(finished)
        settings = Settings(run=finished, drafter=str(tiny_drafter_dir), temperatures=(0.0,))
        material = prepare(settings, predictor, profile, table["temperature"])
        seen = {prompt for shard in traces.manifest.shards for prompt in shard.prompt_ids}
        allowed = set(HELDOUT) if folder == "traces" else seen
        assert material.tuning | material.confirming == allowed
        assert not material.tuning & material.confirming
        rows = {
            "tuning": load_rows(traces, predictor, material.tuning),
            "replay": load_rows(traces, predictor, material.confirming),
        }
        assert [row["name"] for row in table["rows"]] == [*NAMES, ORACLE]
        for row in table["rows"]:
            oracle = row["name"] == ORACLE
            device = material.free if oracle else profile
            for key in ("tuning", "replay") if row["name"] != "off" else ("replay",):
                again = replay(parse_policy(row["policy"]), rows[key], device, oracle)
                assert row[key]["tokens_per_ms"] == pytest.approx(again.tokens_per_ms)
        plain = table["rows"][0]["replay"]["tokens_per_ms"]
        assert [row["replayed_over_off"] * plain for row in table["rows"]] == pytest.approx(
            [row["replay"]["tokens_per_ms"] for row in table["rows"]]
        )


def test_positions_bound_the_prompts_that_are_told(finished: Path, tiny_drafter_dir: Path) -> None:
    settings = Settings(run=finished, drafter=str(tiny_drafter_dir), temperatures=(0.0,), positions=1)
    material = prepare(settings, opinions(finished), load_profile(finished / "profile.json"), 0.0)
    assert len(material.tuning_rows.prompts) == 1 < len(material.tuning)
    assert tables_of(finished)[0]["prompts"]["tuning"] == len(material.tuning)  # all of them where nothing was cut


def test_files_say_the_same(finished: Path) -> None:
    text = (finished / "out/policies.md").read_text()
    assert (finished / "out/policies.png").read_bytes().startswith(b"\x89PNG")
    assert "](policies.png)" in text
    for table in tables_of(finished):
        assert f"## Temperature {table['temperature']:g}" in text
        kept = json.loads((finished / f"policies-{table['temperature']:g}.json").read_text())["results"]
        for row in table["rows"]:
            if row["name"] != "off":
                assert parse_policy(kept[row["name"]]["policy"]) == parse_policy(row["policy"])
            assert policies_report.shown(row["policy"]) in text
            if "live" in row:
                assert row["live"]["identical_to_off"], "float32"
                assert policies_report.times(row["over_off"]) in text or row["name"] == "off"
        for bar in table["bars"]:
            assert f"| {bar['bar']} | {bar['wanted']} |" in text
            assert f"{bar['measured']}, {'reached' if bar['reached'] else '**not reached**'}" in text
    assert "Every text is that of `off`." in text


def test_sampled_traces_are_of_what_the_fit_held_out_and_made_once(
    finished: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy, sampled = (Traces(finished / name).manifest for name in ("traces", "traces-0.7"))
    prompts = read_prompts(finished / "harvest.jsonl")
    assert sampled.prompts_sha256 == fingerprint_prompts([prompts[i] for i in HELDOUT])
    assert sampled.temperature == 0.7
    for key in ("pool", "seed", "max_new_tokens", "max_prompt_tokens", "dtype", "drafter_temperatures"):
        assert getattr(sampled, key) == getattr(greedy, key)
    assert [getattr(sampled, key).fingerprint for key in ("target", "drafter")] == [
        getattr(greedy, key).fingerprint for key in ("target", "drafter")
    ]

    def never(*_: Any) -> None:
        raise AssertionError("harvested again")

    monkeypatch.setattr(harvest_module, "run_trainer", never)
    settings = Settings(run=finished, drafter=command(finished)[3], temperatures=(0.7,))
    again = policies_tuning.traces_at(settings, opinions(finished), 0.7)
    assert again.manifest == sampled


def test_sampled_traces_that_the_fit_had_a_part_in_are_taken_as_they_are(
    copy: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though they are of all prompts; those of a stopped harvest go on."""
    predictor = opinions(copy)
    settings = Settings(run=copy, drafter=command(copy)[3], temperatures=(0.7,))
    shutil.rmtree(copy / "traces-0.7")
    assert isinstance(predictor.manifest, SimpleNamespace)
    whole = Traces(shutil.copytree(copy / "traces", copy / "traces-0.7"))
    known = {whole.fingerprint}
    monkeypatch.setattr(predictor.manifest, "fitted_on", lambda traces: traces in known)
    assert policies_tuning.traces_at(settings, predictor, 0.7).fingerprint == whole.fingerprint
    manifest = copy / "traces-0.7/manifest.json"
    manifest.write_text(manifest.read_text().replace('"complete": true', '"complete": false'))
    started = []
    monkeypatch.setattr(policies_tuning, "harvest", lambda config: started.append(config.resume))
    with pytest.raises(UserError, match="did not finish"):
        policies_tuning.traces_at(settings, predictor, 0.7)
    assert started == [True]


def test_a_failed_decode_loses_no_search(
    copy: Path, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy / "policies-0.json"
    path.unlink()
    searched: list[tuple[str, int, int, bool]] = []

    def recorded(
        entry: Entry, rows: Any, profile: Any, space: Any, trials: int, seed: int = 0, oracle: bool = False
    ) -> Any:
        searched.append((entry.name, trials, seed, oracle))
        return tune_entry(entry, rows, profile, space, trials, seed, oracle)

    def broken(*_: Any) -> None:
        raise RuntimeError("the machine failed")

    monkeypatch.setattr(policies_tuning, "tune_entry", recorded)
    monkeypatch.setattr(policies, "measure", broken)
    once = command(copy, "--temperature", "0", "--reuse")
    with pytest.raises(RuntimeError, match="machine failed"):
        policies.main(once)
    assert searched == [*((entry.name, 2, 0, False) for entry in ENTRIES), (OURS.name, 2, 0, True)]
    kept = json.loads(path.read_text())
    assert list(kept["results"]) == [*NAMES[1:], ORACLE]

    searched.clear()
    with pytest.raises(RuntimeError, match="machine failed"):
        policies.main(once)
    assert searched == []
    for name in (OURS.name, ORACLE):  # as if killed before the last searches
        del kept["results"][name]
    path.write_text(json.dumps(kept))
    with pytest.raises(RuntimeError, match="machine failed"):
        policies.main(once)
    assert searched == [(OURS.name, 2, 0, False), (OURS.name, 2, 0, True)]

    capsys.readouterr()
    for further, said in (
        (["--seed", "1"], "another seed (0 before, 1 now)"),
        (["--trials", "3"], "another trials (2 before, 3"),
    ):
        with pytest.raises(SystemExit):
            policies.main([*once, *further])
        assert said in last_line(capsys)
    (copy / "profile.json").write_text(tiny_profile().model_copy(update={"fixed_ms": 6.0}).model_dump_json())
    with pytest.raises(SystemExit):
        policies.main(once)
    assert "another profile (" in last_line(capsys)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said of a mistake."""
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.startswith("error: ") for line in lines) == 1
    assert not any("Traceback" in line for line in lines)
    return lines[-1]


def test_the_oracle_is_no_worse_than_the_policy_that_it_bounds(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, predictor = load_profile(finished / "profile.json"), opinions(finished)
    settings = Settings(run=finished, drafter="", temperatures=(0.0,))
    material = prepare(settings, predictor, profile, 0.0)
    rows, ours = material.tuning_rows, parse_policy("throughput:price=0.1,acceptance=raw,pause=0")
    assert [material.free.predicting_ms(9, network) for network in ("whole", "acceptance")] == [0.0, 0.0]
    off = policies_tuning.OFF, replay(policies_tuning.OFF, rows, profile)
    monkeypatch.setattr(policies_tuning, "tune_entry", lambda *_, **__: off)
    best = bound(material, rows, ours)
    expected = max(replay(ours, rows, material.free, oracle=True), off[1], key=lambda result: result.tokens_per_ms)
    assert best == expected


def samples(seconds: list[float]) -> list[list[Sample]]:
    """Of 10 tokens each."""
    return [[Sample(list(range(10)), s, 5, {})] for s in seconds]


def report_rows(speeds: dict[str, float], of_oracle: float = 1.0, loops: float = 0.0) -> list[dict[str, Any]]:
    """Rows as `figures` makes them of policies so many times as fast as `off`, prompts differing tenfold."""
    off = np.array([1.0, 2.0, 10.0])
    timed = {name: samples((off / speeds.get(name, 1.0)).tolist()) for name in NAMES}
    rates = dict.fromkeys(NAMES, 1.0) | {ORACLE: 1.0 / of_oracle}
    replayed: Any = {
        name: SimpleNamespace(tokens_per_ms=rate, policy=name, to_dict=lambda rate=rate: {"tokens_per_ms": rate})
        for name, rate in rates.items()
    }
    decoded = [{"label": name, "loop_share": loops} for name in NAMES]
    return policies_report.figures(decoded, timed, {}, replayed)


def test_ratios_are_paired_and_point_the_right_way() -> None:
    rows = {row["name"]: row for row in report_rows({OURS.name: 1.5, "ratio": 0.75}, of_oracle=0.8)}
    ours, ratio = rows[OURS.name], rows["ratio"]
    assert [ours["over_off"][key] for key in ("ratio", "low", "high")] == pytest.approx([1.5] * 3)
    assert ratio["over_off"]["ratio"] == pytest.approx(0.75)
    assert ratio["throughput_over"]["ratio"] == pytest.approx(2.0)
    assert ratio["live"]["tokens_per_second_by_prompt"] == pytest.approx([7.5, 3.75, 0.75])
    assert rows[ORACLE]["replayed_over_off"] == pytest.approx(1.25)
    assert "live" not in rows[ORACLE]
    off, uneven = samples([1.0, 2.0, 10.0]), samples([1.0, 1.0, 10.0])
    found = policies_report.ratio(uneven, off)
    assert found["ratio"] == pytest.approx(2 ** (1 / 3))
    assert found["low"] < 1.0 < found["high"]


@pytest.mark.parametrize(
    ("rival", "least"),
    [("confidence, as published", 1.25), ("ratio, as published", 1.20), ("confidence", 1.06), ("ratio", 1.04), ("prefix", 1.03),
     ("utility", 1.03), ("off", 0.98)],
)  # fmt: skip
def test_a_bar_is_reached_or_not(rival: str, least: float) -> None:
    for factor, reached in ((1.001, True), (0.999, False)):
        speeds = {OURS.name: least * factor} if rival == "off" else {rival: 1 / (least * factor)}
        found = {bar["bar"]: bar for bar in policies_report.bars(report_rows(speeds), tiny_profile())}
        assert found[f"`throughput` over {rival}"]["reached"] == reached


def test_the_other_bars() -> None:
    def reached(share: float, **changes: float) -> list[bool]:
        profile = tiny_profile().model_copy(update={"expert_share": share})
        return [bar["reached"] for bar in policies_report.bars(report_rows({}, **changes), profile)[-3:]]

    assert reached(0.46, of_oracle=0.971, loops=0.09) == [True, True, True]
    assert reached(0.54, of_oracle=0.969, loops=0.11) == [False, False, True]
    assert reached(0.44) == reached(0.56) == [True, True, False]


def test_mistakes_are_one_clear_line(
    copy: Path, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*further: str, run: Path = copy) -> str:
        with pytest.raises(SystemExit) as stop:
            policies.main(command(run, *further))
        assert stop.value.code == 2
        return last_line(capsys)

    assert "profile.json: cannot be read" in said(run=tmp_path / "none")
    assert "'trials' = 0" in said("--trials", "0")
    assert "give it another ending" in said("--out", str(tmp_path / "out.json"))
    assert "not the drafter of the traces" in said("--drafter", "ngram")
    (copy / "bench.jsonl").write_text('{"prompt": "x"}\n')
    assert "bench.jsonl: one prompt" in said()
    (copy / "bench.jsonl").unlink()
    assert "bench.jsonl: no such prompt file" in said()
    (copy / "profile.json").write_text(tiny_profile("another-machine-float32-1t").model_dump_json())
    assert "measured on another-machine-float32-1t" in said()


def test_other_prompts_or_targets_are_not_harvested(
    copy: Path, command: Command, tiny_drafter_dir: Path, save_target: Callable[..., Path], tmp_path: Path
) -> None:
    predictor = opinions(copy)

    def refused(message: str, **changes: Any) -> None:
        settings = Settings(run=copy, drafter=str(tiny_drafter_dir), temperatures=(0.5,)).model_copy(update=changes)
        with pytest.raises(UserError, match=message):
            policies_tuning.traces_at(settings, predictor, 0.5)
        assert not (copy / "traces-0.5").exists()

    refused("--source-target", source_target=str(save_target(tmp_path / "other", seed=5)))
    predictor.manifest.heldout_prompts = []
    refused("held out no prompt")
    predictor.manifest.traces = "others"
    refused("not what the predictor was fitted on")
    (copy / "harvest.jsonl").write_text('{"prompt": "another"}\n')
    refused("not the prompts that")
