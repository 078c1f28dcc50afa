"""From a YAML file to a bundle that decodes, on the tiny models; pipeline files, overrides, tracking and its failures."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from ecospec_runtime.bundle import file_sha256, load_bundle
from ecospec_runtime.console import option_name
from ecospec_runtime.engine import Engine
from ecospec_runtime.errors import UserError
from ecospec_train import stages, tracking
from ecospec_train.cli import app
from ecospec_train.export import ExportConfig, export
from ecospec_train.pipeline import load_pipeline, run_pipeline
from ecospec_train.stages import config_class
from ecospec_train.traces import Traces
from tests.bundles import this_slug, tiny_profile, write_policy, write_predictor

PIPELINES = sorted((Path(__file__).parents[2] / "pipelines").glob("*.yaml"))


@pytest.mark.parametrize("path", PIPELINES, ids=lambda p: p.name)
def test_shipped_files_parse(path: Path) -> None:
    plan = load_pipeline(path)
    assert [stage.name for stage in plan] == ["harvest", "harvest_sampled", "fit", "profile", "tune", "export"]
    assert plan[-1].output == Path("runs") / path.stem / "bundle"


def test_sampled_text_is_a_stage_of_its_own_that_fit_reads(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path, tmp_path, tmp_path)
    names = [stage.name for stage in load_pipeline(path)]
    assert names == ["harvest", "harvest_sampled", "fit", "profile", "tune", "export"]
    assert load_pipeline(path)[1].runner == "harvest"
    greedy, sampled, fit, *_ = load_pipeline(path, ["harvest_sampled.temperature=0.5"])
    assert (sampled.output, sampled.config.temperature) == (tmp_path / "run/traces-0.5", 0.5)  # type: ignore[attr-defined]
    same = {"temperature", "out", "max_positions"}
    assert sampled.config.model_dump(exclude=same) == greedy.config.model_dump(exclude=same)
    assert fit.inputs == (greedy.output, sampled.output)
    assert len(load_pipeline(path, ["harvest_sampled=null"])) == 5
    assert load_pipeline(path, ["harvest.out=elsewhere"])[1].output == tmp_path / "run/traces-0.7"
    for override, said in (
        ("harvest_sampled.temperature=0", "'temperature' is that of 'harvest'"), ("harvest.temperature=0.7", "'temperature' is that of"),
        (f"harvest_sampled.out={tmp_path}/run/traces", "'out' is that of"), ("harvest_sampled.prompts=p", "'prompts' is not that of"),
        ("harvest_sampled.pool={depth: 2}", "'pool' is not that of"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"section 'harvest_sampled': {said}"):
            load_pipeline(path, [override])
    with pytest.raises(UserError, match=r"section 'harvest_sampled': .*temprature"):
        load_pipeline(path, ["harvest_sampled.temprature=1"])


def write_pipeline(folder: Path, target: Path, drafter: Path, **changes: Any) -> Path:
    """A pipeline over the tiny models that takes seconds."""
    prompts = folder / "prompts.jsonl"
    texts = [f"def f{i}(x):\n    return x + {i}" for i in range(12)]
    prompts.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    values: dict[str, Any] = {
        "name": "tiny", "target": str(target), "drafter": str(drafter), "prompts": str(prompts),
        "out": str(folder / "run"),
        "harvest": {"max_new_tokens": 8, "pool": {"depth": 3, "beam": 2, "width": 4}},
        "harvest_sampled": {"max_positions": 40},
        "fit": {"width": 16, "epochs": 1, "heldout": 0.4},
        "profile": {"tokens": [1, 2, 4, 8], "contexts": [16, 48], "repeats": 3, "allow_busy": True, "pool": {"depth": 3, "beam": 2, "width": 4}},
        "tune": {"trials": 1, "confirm_live": 1, "live_prompts": 3},
    }  # fmt: skip
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, tiny_drafter_dir: Path) -> Path:
    """A folder in which `ecospec-train run` has gone through all stages."""
    folder = tmp_path_factory.mktemp("pipeline")
    path = write_pipeline(folder, tiny_target_dir, tiny_drafter_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        result = CliRunner().invoke(app, ["run", str(path), "tune.positions=64"])
    assert result.exit_code == 0, result.output
    return folder


def test_run_leaves_a_bundle_that_decodes(finished: Path) -> None:
    bundle = load_bundle(finished / "run/bundle")
    assert bundle.manifest.pool.width == 4
    assert bundle.manifest.provenance.versions["torch"]
    tuned = next(iter(bundle.policies.values()))
    assert tuned.reason
    assert {"speedup_vs_off", "speedup_vs_confidence"} <= set(tuned.results)
    live = tuned.results["live"]
    assert set(live) == {"off", "confidence", "best 1"}
    assert live["off"]["speedup"] == live["off"]["low"] == live["off"]["high"] == 1.0
    assert all(one["low"] <= one["speedup"] <= one["high"] and 2 <= one["prompts"] <= 3 for one in live.values())
    fastest = max((live[name] for name in live if name != "off"), key=lambda one: one["speedup"])
    assert (tuned.policy == "off") == (fastest["low"] <= 1.0) == ("does not pay" in tuned.reason)
    assert "replay.png" in bundle.manifest.files
    assert "(replay.png)" in (bundle.folder / "README.md").read_text()
    texts = []
    for policy in ("off", "auto", "ratio"):
        stream = Engine.from_bundle(bundle, policy=policy).generate("def g(x):")
        texts.append([token.id for token in stream])
    assert texts[0] == texts[1] == texts[2]


def test_every_stage_is_a_run_with_lineage(finished: Path) -> None:
    import mlflow  # takes two seconds

    uri = f"sqlite:///{finished / 'mlruns/mlflow.db'}"
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(tracking.EXPERIMENT)
    assert experiment is not None
    found = sorted(client.search_runs([experiment.experiment_id]), key=lambda run: run.info.start_time)
    sampled = found.pop(1)  # the second harvest
    runs = {run.data.tags["stage"]: run for run in found}
    assert runs["fit"].data.tags["upstream.harvest.2"] == sampled.info.run_id
    assert (finished / "run/traces-0.7/tracking.json").is_file(), "a folder, for all that its name holds a dot"
    assert set(runs) == {"harvest", "fit", "profile", "tune", "export"}
    assert all(run.info.status == "FINISHED" for run in runs.values())
    ids = {stage: run.info.run_id for stage, run in runs.items()}
    assert runs["fit"].data.tags["upstream.harvest"] == ids["harvest"]
    lineage = {k: v for k, v in runs["tune"].data.tags.items() if k.startswith("upstream.")}
    assert lineage == {f"upstream.{name}": ids[name] for name in ("harvest", "fit", "profile")}
    assert runs["export"].data.tags["upstream.tune"] == ids["tune"]
    assert runs["harvest"].data.params["max_new_tokens"] == "8"
    assert runs["harvest"].data.metrics["positions"] == 96
    assert "heldout_error" in runs["profile"].data.metrics
    names = [model.name for model in client.search_registered_models()]
    assert names == ["ecospec-target-drafter"]
    version = client.get_latest_versions(names[0])[0]
    assert version.run_id == ids["fit"]
    assert {a.path for a in client.list_artifacts(ids["export"])} == {"bundle"}


def test_a_second_run_skips_everything_and_a_forced_one_takes_over_the_traces(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished)
    result = run("run", finished / "tiny.yaml", "tune.positions=64")
    assert [line for line in result.stderr.splitlines() if line.startswith("[")] == [
        f"[{i}/6] {name}: unchanged, skipped"
        for i, name in enumerate(("harvest", "harvest_sampled", "fit", "profile", "tune", "export"), 1)
    ]
    before = (finished / "run/traces/manifest.json").read_bytes()
    seen: list[str] = []
    run_pipeline(load_pipeline(finished / "tiny.yaml")[:1], seen.append, force=True)
    assert seen[0].endswith("(forced)")
    assert (finished / "run/traces/manifest.json").read_bytes() == before


def test_a_stage_of_several_processes_runs_apart(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Two ranks write the rows of one; a mistake in the other process is its one line and its exit code."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(finished / "mlruns/mlflow.db", tmp_path)  # creating one takes seconds
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    path = finished / "tiny.yaml"
    apart = load_pipeline(path, ("harvest.devices=2", f"out={tmp_path}/run"))[:1]
    run_pipeline(apart, lambda line: None)
    rows = {}
    for name, folder in (("one", finished / "run/traces"), ("two", tmp_path / "run/traces")):
        shards = Traces(folder).shards()
        rows[name] = sorted((int(p), int(q), int(t)) for s in shards for p, q, t in
                            zip(s.prompt_id, s.position, s.root_token, strict=True))  # fmt: skip
    assert rows["one"] == rows["two"]
    capfd.readouterr()
    result = run("run", path, "harvest.devices=2", "harvest.stride=2", f"out={tmp_path}/run")
    assert result.exit_code == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert "stride" in lines[0]


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "unknown key": ({"colour": 1}, (), r"tiny\.yaml: .*'colour'"),
    "unknown stage key": ({"fit": {"epoch": 1}}, (), r"tiny\.yaml: section 'fit': .*'epoch'.*epochs"),
    "wrong value": ({"harvest": {"stride": 0}}, (), r"tiny\.yaml: section 'harvest': .*'stride'"),
    "bad size": ({"harvest": {"max_disk": "lots"}}, (), r"tiny\.yaml: .*'lots'"),
    "section is a list": ({"tune": [1]}, (), r"tiny\.yaml: .*'tune'"),
    "unknown override": ({}, ("tune.trails=3",), r"tiny\.yaml: section 'tune': .*'trails'"),
    "override of a value": ({}, ("name.first=3",), r"override 'name\.first=3'"),
    "not an override": ({}, ("trials",), r"override 'trials' is not key=value"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_in_a_file_name_file_and_key(name: str, tmp_path: Path) -> None:
    changes, overrides, expected = BAD[name]
    path = write_pipeline(tmp_path, Path("t"), Path("d"), **changes)
    with pytest.raises(UserError, match=expected) as caught:
        load_pipeline(path, overrides)
    assert "\n" not in str(caught.value)


def test_broken_files(tmp_path: Path) -> None:
    for text, expected in (
        ("a: [1\nb: 2", "not valid YAML at line"),
        ("\udcff", "not valid YAML; check"),  # a byte that is not UTF-8
        ("- 1", "not a mapping"),
        ("name: x", "'target' is missing"),
        ("name: x\ncolour: 1", "'colour' is not supported"),  # a misspelt key is the likelier fault
    ):
        (tmp_path / "p.yaml").write_text(text, encoding="utf-8", errors="surrogateescape")
        with pytest.raises(UserError, match=expected):
            load_pipeline(tmp_path / "p.yaml")
    with pytest.raises(UserError, match="no such file"):
        load_pipeline(tmp_path / "q.yaml")


def test_live_confirmation_decodes_with_what_was_profiled(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path, Path("small"), Path("head"), profile={"target": "wide"})
    plan = {s.name: s.config for s in load_pipeline(path, ("tune.predictor=[p, q]",))}
    tune: Any = plan["tune"]
    assert (tune.target, tune.drafter) == ("wide", "head")
    assert tune.prompts == str(tmp_path / "prompts.jsonl")
    assert plan["export"].predictor == tune.predictor == (Path("p"), Path("q"))  # type: ignore[attr-defined]
    bare: Any = {s.name: s.config for s in load_pipeline(path, ("tune.confirm_live=0",))}["tune"]
    assert (bare.target, bare.prompts) == (None, None)


def test_overrides_reach_their_stage(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path, Path("t"), Path("d"))
    plan = {s.name: s.config for s in load_pipeline(path, ("fit.epochs=7", "harvest.pool.depth=5", "export.target=x"))}
    assert plan["fit"].epochs == 7  # type: ignore[attr-defined]
    assert plan["harvest"].pool.depth == 5  # type: ignore[attr-defined]
    assert plan["harvest"].pool.width == 4  # type: ignore[attr-defined]
    assert plan["export"].target == "x"  # type: ignore[attr-defined]


def test_a_dead_tracking_server_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(tracking, "_warned", set())
    with tracking.track("fit", {}, tmp_path / "out") as run:
        run.log_metrics({"a": 1})
        run.log_artifact(tmp_path)
    assert capsys.readouterr().err.count("warning: MLflow tracking failed") == 1
    assert not (tmp_path / "out").exists()


def test_a_users_mistake_opens_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_start", lambda *_: pytest.fail("a run was opened"))
    with pytest.raises(UserError), tracking.track("fit", {}, tmp_path):
        raise UserError("no")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path, tiny_drafter_dir: Path) -> Path:
    """A predictor and a policy folder."""
    root = tmp_path_factory.mktemp("parts")
    write_predictor(root / "predictor", tiny_target_dir, tiny_drafter_dir)
    write_policy(root / "policy")
    return root


def test_export_refuses_what_does_not_belong(parts: Path, tmp_path: Path) -> None:
    predictor, policy = parts / "predictor", parts / "policy"
    with pytest.raises(UserError, match="is not a bundle"):
        export(ExportConfig(predictor=(predictor,), policy=(policy,), out=predictor / "predictor.onnx"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="is not a bundle"):
        export(ExportConfig(predictor=(predictor,), policy=(policy,), out=tmp_path / "mine"))
    assert (tmp_path / "mine/thesis.txt").exists()
    with pytest.raises(UserError, match="second policy for the device"):
        export(ExportConfig(predictor=(predictor,), policy=(policy, policy), out=tmp_path / "b"))
    with pytest.raises(UserError, match="holds no policies"):
        export(ExportConfig(predictor=(predictor,), policy=(tmp_path,), out=tmp_path / "b"))
    with pytest.raises(UserError, match="tokenizer cannot be read"):
        export(ExportConfig(predictor=(predictor,), policy=(policy,), out=tmp_path / "b", target=str(tmp_path)))
    broken = Path(shutil.copytree(predictor, tmp_path / "predictor"))
    (broken / "predictor.safetensors").unlink()
    with pytest.raises(UserError, match=r"predictor\.safetensors: missing"):
        export(ExportConfig(predictor=(broken,), policy=(policy,), out=tmp_path / "b"))
    assert not list(tmp_path.glob("*b*.tmp")), "nothing half-made stays behind"
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"policy": "zzz"}, "'zzz' is unknown"),
        ({"policy": "ratio", "parameters": {"foo": 1}}, "no parameter 'foo'"),
        ({"policy": "throughput", "parameters": {"price": float("nan")}}, "'price'"),
        ({"schema_version": 9}, "schema_version"),
        ({"profile": {"slug": "../../evil"}}, "slug"),
    ],
)
def test_export_refuses_a_policy_that_cannot_be_built(
    changes: dict[str, Any], expected: str, parts: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(parts / "policy", tmp_path / "policy"))
    (path,) = (folder / "policies").glob("*.json")
    values = json.loads(path.read_text())
    profile = values["profile"] | changes.pop("profile", {})
    path.write_text(json.dumps(values | {"profile": profile} | changes))
    with pytest.raises(UserError, match=rf"{path.name}: .*{expected}"):
        export(ExportConfig(predictor=(parts / "predictor",), policy=(folder,), out=tmp_path / "b"))
    assert {p.name for p in tmp_path.iterdir()} == {"policy"}, "nothing was written"


def test_a_full_disk_blames_the_bundle(parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, place: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(source))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(UserError, match="b: no space left"):
        export(ExportConfig(predictor=(parts / "predictor",), policy=(parts / "policy",), out=tmp_path / "b"))
    assert not list(tmp_path.iterdir())


def test_one_bundle_holds_policies_for_several_devices(parts: Path, tmp_path: Path) -> None:
    profile = tiny_profile().model_copy(update={"device": "GPU X", "slug": "gpu-x-float32-8t", "threads": 8})
    other = write_policy(tmp_path / "other", policy="ratio", parameters={"budget": 4}, profile=profile)
    bundle = export(
        ExportConfig(predictor=(parts / "predictor",), policy=(parts / "policy", other), out=tmp_path / "b")
    )
    assert list(bundle.policies) == [this_slug(), "gpu-x-float32-8t"]
    assert all(slug in (tmp_path / "b/README.md").read_text() for slug in bundle.policies)
    assert bundle.policy_for("GPU X", "float32", 8).spec.name == "ratio"
    assert Engine.from_bundle(bundle).policy.name == "throughput"


def test_export_takes_the_predictor_that_the_policies_were_tuned_with(parts: Path, tmp_path: Path) -> None:
    first = parts / "predictor"
    second = Path(shutil.copytree(first, tmp_path / "second"))
    values = json.loads((second / "manifest.json").read_text())
    (second / "manifest.json").write_text(json.dumps(values | {"config": {"width": 7}}))
    policy = write_policy(tmp_path / "policy", predictor=file_sha256(second / "manifest.json"))
    bundle = export(ExportConfig(predictor=(first, second), policy=(policy,), out=tmp_path / "b"))
    assert bundle.manifest.predictor.config == {"width": 7}
    with pytest.raises(UserError, match=r"tuned with another predictor.*--predictor"):
        export(ExportConfig(predictor=(first,), policy=(policy,), out=tmp_path / "b"))
    profile = tiny_profile().model_copy(update={"slug": "gpu-x"})
    other = write_policy(tmp_path / "other", predictor=file_sha256(first / "manifest.json"), profile=profile)
    with pytest.raises(UserError, match="tuned with different predictors"):
        export(ExportConfig(predictor=(first, second), policy=(policy, other), out=tmp_path / "b"))


def test_export_replaces_an_older_bundle(parts: Path, tmp_path: Path) -> None:
    config = ExportConfig(predictor=parts / "predictor", policy=parts / "policy", out=tmp_path / "b")  # type: ignore[arg-type]
    export(config)
    (tmp_path / "b/policies/old.json").write_text("{}")
    assert "policies/old.json" not in export(config).manifest.files


def run(*arguments: Any) -> Result:
    """`ecospec-train` in this process."""
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("fit", "--traces", "nowhere", "--out", "o"), "nowhere: holds no traces"),
        (("fit", "--traces", "t", "--out", "o", "--set", "speed=3"), "'speed' is not supported"),
        (("fit", "--traces", "t", "--out", "o", "--set", "speed"), "not key=value"),
        (("harvest", "--target", "./x", "--drafter", "d", "--prompts", "p", "--out", "o", "--pool-size", "7"), "multiple"),
        (("harvest", "--target", "x", "--drafter", "d", "--prompts", "p", "--out", "o", "--pool-depth", "99"), "error: --pool-depth = 99: "),
        (("harvest", "--target", "x", "--drafter", "d", "--prompts", "p", "--out", "o", "--pool-size", "6000"), "error: --pool-size 6000: "),
        (("harvest", "--target", "./x", "--drafter", "d", "--prompts", "p.jsonl", "--out", "o"), "target ./x: no such"),
        (("harvest", "--target", "x/y", "--drafter", "d", "--prompts", "p", "--out", "o"), "p: no such prompt file"),
        (("harvest", "--target", "x", "--drafter", "d", "--prompts", "p", "--out", "o", "--max-disk", "9 apples"), "9 apples"),
        (("profile", "--target", "./x", "--drafter", "d", "--out", "."), "is a folder"),
        (("tune", "--traces", "t", "--predictor", "p", "--profile", "nowhere.json", "--out", "o"), "nowhere.json"),
        (("tune", "--traces", "t", "--predictor", "p", "--profile", "f", "--out", "o", "--confirm-live", "2"), "give --target"),
        (("export", "--predictor", "nowhere", "--policy", "p", "--out", "o"), "nowhere"),
        (("run", "nowhere.yaml"), "nowhere.yaml: no such file"),
        (("fit", "--traces", "t", "--out", "o", "--set", "seed=-1"), "error: --seed = -1: "),
        (("fit", "--traces", "t", "--out", "o", "--width", "10000000"), "error: --width = 10000000: "),
        (("fit", "--traces", "t", "--out", "o", "--lr", "inf"), "error: --lr = inf: "),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(arguments: tuple[str, ...], expected: str, tmp_path: Path,
                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"text": "a"}\n')
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert expected in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"], "a mistake leaves nothing behind"


@pytest.mark.parametrize("stage", ["harvest", "fit", "profile", "tune"])
def test_help_shows_the_defaults_that_the_settings_have(stage: str) -> None:
    shown, settings = " ".join(run(stage, "--help").stdout.split()), config_class(stage)
    for key, field in settings.model_fields.items():
        name = f" {option_name(key)} <"
        if name in shown and isinstance(field.default, int | float | str):
            value = "20GB" if key == "max_disk" else field.default
            assert re.search(rf"\[default: {value}[];]", re.split(" --[a-z-]+ ", shown.partition(name)[2])[0]), key


def test_settings_and_help_load_no_model_library() -> None:
    """Or every `--help` and every mistake in an option would wait seconds for torch."""
    code = "import sys, ecospec_train.cli; print(sorted({'torch', 'lightning', 'transformers', 'onnxruntime'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_version() -> None:
    assert run("--version").stdout == "ecospec 0.1.0\n"


def refused(result: Result, *words: str) -> None:
    """Exit code 2 and one line that holds all `words`, after which nothing comes."""
    assert result.exit_code == 2, result.output
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert all(word in last for word in words), last


def test_damaged_or_foreign_traces_stop_fit_and_tune(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    corrupt = shutil.copytree(finished / "run/traces", tmp_path / "corrupt")
    shard = next(corrupt.glob("*.parquet"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    refused(run("fit", "--traces", corrupt, "--out", "o"), shard.name, "corrupt")
    foreign = shutil.copytree(finished / "run/traces", tmp_path / "foreign")
    manifest = json.loads((foreign / "manifest.json").read_text())
    manifest["target"]["fingerprint"] = "0" * 64
    (foreign / "manifest.json").write_text(json.dumps(manifest))
    flags = ("--predictor", finished / "run/predictor", "--profile", finished / "run/profile.json", "--out", "o")
    refused(run("tune", "--traces", foreign, *flags), "foreign", "predictor was fitted for")


def test_no_room_and_no_permission_stop_harvest(
    finished: Path, tiny_target_dir: Path, tiny_drafter_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = (
        "harvest",
        "--target",
        tiny_target_dir,
        "--drafter",
        tiny_drafter_dir,
        "--prompts",
        finished / "prompts.jsonl",
    )
    refused(run(*flags, "--out", "small", "--max-disk", "1KB"), "--max-disk")
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).endswith("locked"))
    refused(run(*flags, "--out", "locked/traces"), "locked", "no permission")


def test_an_unknown_key_of_a_pipeline_stops_run(
    tiny_target_dir: Path, tiny_drafter_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(run("run", write_pipeline(tmp_path, tiny_target_dir, tiny_drafter_dir, fit={"speed": 3})), "speed")


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(config: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(stages.RUNNERS, "fit", interrupt)
    assert run("fit", "--traces", "t", "--out", "o").exit_code == 130


def test_a_drafter_without_a_folder_gives_a_name_that_the_registry_takes(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = Path(shutil.copytree(parts / "predictor", tmp_path / "predictor"))
    values = json.loads((predictor / "manifest.json").read_text())
    values["drafter"]["id"] = "ngram:min=1,max=3"
    (predictor / "manifest.json").write_text(json.dumps(values))
    assert stages.model_name(predictor) == "ecospec-target-ngram-min-1-max-3"
