"""Which stages of a pipeline run again: stand-ins for the stages write what they are told, the rest is real."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ecospec_train import pipeline, stage_record
from ecospec_train.export import ExportConfig
from ecospec_train.pipeline import Stage, load_pipeline, run_pipeline

STAGES = ["harvest", "fit", "profile", "tune", "export"]
FILES = {"harvest": "manifest.json", "fit": "predictor.onnx", "tune": "policies/cpu.json", "export": "manifest.json"}


class World:
    """A pipeline file, a tiny checkpoint, and stages that write one file each."""

    def __init__(self, folder: Path):
        self.folder, self.ran = folder, list[str]()
        self.content = dict.fromkeys(STAGES, "same")
        self.target = folder / "target"
        self.target.mkdir()
        (self.target / "config.json").write_text("{}")
        (self.target / "pytorch_model.bin").write_bytes(b"weights")
        (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
        self.write()

    def write(self, **sections: Any) -> None:
        """The pipeline file."""
        values = {"name": "x", "target": str(self.target), "drafter": "ngram", "prompts": "prompts.jsonl", "out": "run"}
        (self.folder / "p.yaml").write_text(json.dumps(values | sections))

    def runner(self, name: str) -> Any:
        """A stage that writes its output."""

        def run(config: Any) -> None:
            self.ran.append(name)
            path = config.out if name == "profile" else config.out / FILES[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.content[name])

        return run

    def run(self, *overrides: str, force: bool = False) -> tuple[list[str], list[str]]:
        """Stages that ran, and what was announced."""
        self.ran.clear()
        said: list[str] = []
        run_pipeline(load_pipeline(self.folder / "p.yaml", overrides), said.append, force)
        return list(self.ran), said


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    made = World(tmp_path)
    monkeypatch.setattr(pipeline, "RUNNERS", {name: made.runner(name) for name in STAGES})
    made.run()
    return made


def test_nothing_changed_nothing_runs(world: World) -> None:
    ran, said = world.run()
    assert ran == []
    assert said == [f"[{i}/5] {name}: unchanged, skipped" for i, name in enumerate(STAGES, 1)]
    assert world.run(force=True)[0] == STAGES
    assert world.run()[0] == []


def touched(path: Path, text: str) -> None:
    """Write `text`; the time of the last change moves on however coarse the clock is."""
    after = path.stat().st_mtime_ns + 10**9
    path.write_text(text)
    os.utime(path, ns=(after, after))


CHANGES: dict[str, tuple[str, str, list[str], str]] = {
    "prompts": ("prompts.jsonl", '{"prompt": "b"}\n', STAGES, "input prompts changed"),
    "weights": ("target/pytorch_model.bin", "WEIGHTS", STAGES, "input target weights changed"),
    "tokenizer": ("target/tokenizer.json", "{}", STAGES, "input target tokenizer.json is new"),
    "predictor": ("run/predictor/predictor.onnx", "other", STAGES[1:], "output predictor.onnx changed"),
    "bundle": ("run/bundle/manifest.json", "other", ["export"], "output manifest.json changed"),
    "profile by hand": ("run/profile.json", "other", STAGES[2:], "output . changed"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_runs_its_stage_and_those_that_read_it(world: World, name: str) -> None:
    path, text, expected, why = CHANGES[name]
    place = world.folder / path
    if not place.exists():
        place.touch()
    touched(place, text)
    ran, said = world.run()
    assert ran == expected
    assert f"({why})" in said[STAGES.index(expected[0])]
    assert world.run()[0] == []


def test_a_setting_runs_its_stage_and_those_after_it(world: World) -> None:
    ran, said = world.run("tune.trials=7")
    assert ran == ["tune", "export"]
    assert "(setting trials changed)" in said[3]
    assert world.run("tune.trials=7")[0] == []
    assert world.run()[0] == ["tune", "export"]


def test_a_release_runs_everything(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_record, "release", lambda: "99")
    assert world.run()[0] == STAGES


def test_another_machine_measures_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecospec_runtime.machine.device_name", lambda *_: "another processor")
    assert world.run()[0] == ["profile", "tune", "export"]


def test_what_was_rewritten_but_is_the_same_counts_as_unchanged(world: World) -> None:
    touched(world.folder / "prompts.jsonl", (world.folder / "prompts.jsonl").read_text())
    touched(world.target / "pytorch_model.bin", "weights")
    assert world.run()[0] == []


def test_a_copied_run_folder_holds_unless_a_file_was_damaged(world: World) -> None:
    shutil.copytree(world.folder / "run", world.folder / "copy", copy_function=shutil.copyfile)
    world.write(out="copy")
    assert world.run()[0] == []
    whole = world.folder / "copy/traces/manifest.json"
    touched(whole, "S" + whole.read_text()[1:])
    assert world.run()[0] == STAGES


def test_a_missing_output_is_made_again(world: World) -> None:
    shutil.rmtree(world.folder / "run/predictor")
    assert world.run()[0] == STAGES[1:]
    (world.folder / "run/policy/policies/cpu.json").unlink()
    assert world.run()[0] == ["tune", "export"]


def run_killed(world: World, monkeypatch: pytest.MonkeyPatch, stage: str, override: str) -> None:
    """Run the pipeline with a setting changed; it is killed in a stage."""

    def killed(config: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(pipeline.RUNNERS, stage, killed)
        with pytest.raises(KeyboardInterrupt):
            world.run(override)


def test_a_stage_killed_halfway_runs_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had an older record, and its output may be half new."""

    run_killed(world, monkeypatch, "fit", "fit.epochs=3")
    ran, said = world.run()
    assert ran == STAGES[1:], "with the old settings too: nobody knows what the folder holds"
    assert "not finished by `run` before" in said[1]


def test_a_stage_made_anew_invalidates_those_after_it_even_if_killed_in_between(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is the same byte for byte."""

    run_killed(world, monkeypatch, "tune", "profile.seed=1")
    assert world.run("profile.seed=1")[0] == ["tune", "export"]


def test_an_input_changed_while_the_stage_ran_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    write = world.runner("harvest")

    def slow(config: Any) -> None:
        touched(world.folder / "prompts.jsonl", '{"prompt": "edited"}\n')
        write(config)

    with monkeypatch.context() as patch:
        patch.setitem(pipeline.RUNNERS, "harvest", slow)
        world.run("harvest.seed=1")
    assert world.run("harvest.seed=1")[0] == STAGES


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 9}'])
def test_a_damaged_record_counts_as_none(world: World, text: str) -> None:
    (world.folder / "run/bundle.stage.json").write_text(text)
    assert world.run()[0] == ["export"]


def test_files_made_along_the_way_do_not_count(world: World) -> None:
    for name in ("policy/tracking.json", "policy/study.db", "policy/all.journal", "predictor/checkpoints/last.ckpt"):
        path = world.folder / "run" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("new")
    assert world.run()[0] == []


def test_two_policies_of_one_name_are_both_read(tmp_path: Path) -> None:
    folders = (tmp_path / "a/policy", tmp_path / "b/policy")
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "p.json").write_text("{}")
    config = ExportConfig(predictor=tmp_path / "none", policy=folders, out=tmp_path / "out")
    stage = Stage("export", config, pipeline.paths_of(config), config.out)
    assert set(stage_record.inputs(stage)) == {"policy 1/p.json", "policy 2/p.json"}
