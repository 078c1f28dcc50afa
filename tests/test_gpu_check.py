"""`make gpu-check`: without a GPU, interpreted, and what it does with stages that fail."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from ecospec_kernels import dispatch
from pipelines.benchmark import gpu_check, gpu_report, gpu_stages
from pipelines.benchmark.gpu_stages import Run
from tests.ops.cases import under_interpreter
from tests.test_layout import ROOT

# What a machine with torch, triton, transformers and onnxruntime may lack.
MISSING = ("lightning", "datasets", "optuna", "mlflow", "onnx", "onnxscript", "pyarrow", "scipy", "matplotlib", "numba", "psutil", "sqlalchemy", "accelerate")  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is one")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "finds no GPU" in error


@under_interpreter
def test_interpreted_it_runs_the_small_cases(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_check.main(["--interpret", "--only", "verify_tree"]) == 0
    assert "3 cases, 0 failed" in capsys.readouterr().out
    module = import_module("ecospec_kernels.verify_tree.fused")
    right = module.verify_tree
    monkeypatch.setattr(module, "verify_tree", lambda *a: right(*a)._replace(number=right(*a).number + 1))
    assert gpu_check.main(["--interpret", "--only", "verify_tree"]) == 1
    assert "3 cases, 3 failed" in capsys.readouterr().out
    assert gpu_check.main(["--interpret", "--only", "no such case"]) == 1


def test_a_stage_that_dies_or_hangs_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it had handed over."""
    monkeypatch.setattr(gpu_check, "GRACE", 0.5)
    result = tmp_path / "a-stage.json"
    save = f"open({str(result)!r}, 'w').write('{{\"failed\": [], \"cases\": [1]}}'); "
    found = gpu_check.run_apart(
        "a stage", 20.0, tmp_path, [sys.executable, "-c", save + "raise SystemExit('device lost')"]
    )
    assert found["cases"] == [1] and found["failed"] == ["ended with code 1: device lost"]
    found = gpu_check.run_apart("a stage", 0.5, tmp_path, [sys.executable, "-c", "import time; time.sleep(60)"])
    assert found["failed"] == ["stopped after 1 s"] and found["cases"] == [1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stage would run")
def test_a_failed_stage_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parent is told that there is a GPU, its stage's process finds none."""
    machine = {"device": "a GPU", "capability": "", "memory_gib": 1, "processors": 1, "driver": "", "runtime": "", "versions": {}, "commit": None}  # fmt: skip
    monkeypatch.setattr(gpu_check, "device_facts", lambda: machine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PYTHONPATH", ".:kernels")
    assert gpu_check.main(["--only", "correct verify_tree", "--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "a-gpu.json").read_text())
    [stage] = report["stages"]
    assert (
        stage["stage"] == "correct verify_tree"
        and "ended with code 2" in stage["failed"][0]
        and "finds no GPU" in stage["failed"][0]
    )
    assert "1 failures" in capsys.readouterr().out


def test_a_stage_that_raises_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(run: Run) -> None:
        run.keep(rows=[1])
        raise RuntimeError("CUDA error:\n an illegal memory access")

    monkeypatch.setattr(gpu_stages, "stages", lambda: [gpu_stages.Stage("bad", 5.0, body)])
    gpu_check.run_here("bad", 5.0, "cpu", tmp_path / "bad.json")
    found = json.loads((tmp_path / "bad.json").read_text())
    assert found == {"failed": ["RuntimeError: CUDA error: an illegal memory access"], "rows": [1]}


@under_interpreter
def test_running_out_of_time_is_a_failure() -> None:
    run = Run("cpu", time.monotonic() - 1, lambda found: None)
    gpu_stages.correct(run, ["verify_tree"])
    assert run.found["failed"] == ["out of time: 3 of 3 cases not run"]


def test_no_training_extra_is_imported() -> None:
    modules = ["bench.registry", "bench.measure", "ecospec_train.passes", "pipelines.benchmark.gpu_check", "pipelines.benchmark.gpu_report",
               "pipelines.benchmark.gpu_stages", "pipelines.reference.widen", "ecospec_runtime.engine", "ecospec_runtime.drafters.eagle3"]  # fmt: skip
    code = (
        "import importlib, importlib.util, sys\n"
        f"blocked = {MISSING!r}\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in blocked:\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, p=None: None if n.split('.')[0] in blocked else real(n, p)\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        "from pipelines.benchmark.gpu_stages import Run, _costed\n"
        "run = Run('cuda', 0.0, lambda found: None)\n"
        "assert _costed(run, None) == () and 'is not installed' in run.found['profile'], run.found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ".:kernels", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts twice as wide are enough; CPU kernels would have to be compiled."""
    monkeypatch.setattr(gpu_stages, "FACTOR", 2)
    monkeypatch.setattr(dispatch, "ENABLED", False)


def test_decoding(narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU: every policy, compared with `off`; a text that differs in float32 is a failure."""
    run = Run("cpu", time.monotonic() + 100, lambda found: None)
    gpu_stages.decode(run, count=1, tokens=6, policies=("off", "confidence:budget=2"))
    found = run.found
    assert (
        found["failed"] == []
        and found["exact"]
        and [row["label"] for row in found["rows"]] == ["off", "confidence:budget=2"]
    )
    assert found["calls"] and "| off |" in gpu_report._decode(found)


def test_stepping(narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, without a graph; a step that gives another text in float32 is a failure."""
    run = Run("cpu", time.monotonic() + 100, lambda found: None)
    gpu_stages.step(run, budgets=(0, 3), tokens=5)
    assert run.found["failed"] == [] and all(row["same_text"] for row in run.found["rows"][:2])
    assert [(row["dtype"], row["rows"]) for row in run.found["rows"]] == [
        (d, n) for d in ("float32", "bfloat16") for n in (1, 4)
    ]
    assert "| float32 | 3 | 4 |" in gpu_report._step(run.found)
    right = gpu_stages._stepped
    monkeypatch.setattr(gpu_stages, "_stepped", lambda *a: right(*a) | {"same_text": False})
    gpu_stages.step(run, budgets=(0,), tokens=2)
    assert run.found["failed"] == ["float32: a step with 0 nodes gives another text than the engine"]


def test_the_report(tmp_path: Path) -> None:
    """Failures show in the table of stages and in that of times."""
    work: dict[str, Any] = {"op": "expert_mlp", "model": "m", "shape": "1 row", "failed": None}
    good = work | {"ms": 0.1234, "eager_ms": 0.2, "bytes_per_second": 3e12, "of_ceiling": 0.7, "baselines": {
        "grouped_mm": {"ms": 0.2468, "captured": True}, "batched_mm": {"error": "out of memory"}}}  # fmt: skip
    stages = [
        {"stage": "correct a", "seconds": 1.0, "failed": ["stopped after 75 s"]},
        {"stage": "times a", "seconds": 2.0, "failed": ["wrong"], "copy_bytes_per_second": 4.2e12, "rows": [good, work | {"failed": "off | by 3"}]},
    ]  # fmt: skip
    machine = {"device": "NVIDIA H200", "capability": "9.0", "memory_gib": 139.8, "processors": 132, "driver": "580", "runtime": "13.0", "versions": {"torch": "2.11"}, "commit": None}  # fmt: skip
    path = gpu_report.write({"machine": machine, "started": "now", "seconds": 3.0, "stages": stages}, tmp_path / "gpu")
    text = path.read_text()
    assert path.name == "nvidia-h200.md" and json.loads(path.with_suffix(".json").read_text())["machine"] == machine
    assert "| correct a | 1.0 | 0 | stopped after 75 s |" in text and "**FAILED**: off / by 3" in text
    assert (
        "| 0.123 | 0.2 | 3000 | 0.70 | grouped_mm 0.247 (2.00); batched_mm: out of memory |" in text
        and "4200 GB/s" in text
    )
    for table in text.split("\n\n"):
        assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) <= 1
