"""Everything that a machine with a GPU can show, in five minutes: correctness, times, a captured step, a decode.

    make gpu-check [PYTHON_GPU=python3] [ARGS="--out DIR"]
    PYTHONPATH=.:kernels python3 -m pipelines.benchmark.gpu_check --out docs/gpu
    PYTHONPATH=.:kernels python3 -m pipelines.benchmark.gpu_check --interpret      no GPU: the correctness cases, interpreted

Wants torch 2.11, triton 3.6, transformers 5.17, onnxruntime or later and what they bring; no network, no installation. Every stage has
its seconds and a process of its own: one that fails, hangs or loses the device is recorded with its message, and the others still
run. Writes `<device>.json` and `<device>.md`. Exit code 1 if anything failed or was not reached, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300.0  # for everything
BESIDE = 8  # stages at a time, of those that may run beside each other
GRACE = 15.0  # seconds for a stage to start and to end by itself
TAIL = 500  # characters of a dead stage's last words


def device_facts() -> dict[str, Any]:
    """The device and its driver, and the versions of what matters."""
    import torch

    from ecospec_runtime.machine import git_commit, versions

    properties = torch.cuda.get_device_properties(0)
    query = [
        "nvidia-smi",
        "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit",
        "--format=csv,noheader",
    ]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.splitlines()[:1]
    except (OSError, subprocess.TimeoutExpired):
        driver = []
    return {
        "device": properties.name, "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "memory_gib": round(properties.total_memory / 2**30, 1), "processors": properties.multi_processor_count,
        "driver": driver[0] if driver else "unknown", "runtime": torch.version.cuda or torch.version.hip,
        "versions": versions(), "commit": git_commit(),
    }  # fmt: skip


def run_here(name: str, seconds: float, device: str, result: Path) -> None:
    """The body of one stage, whose findings go to a file."""
    from pipelines.benchmark.gpu_stages import Run, stages

    stage = next(stage for stage in stages() if stage.name == name)
    run = Run(device, time.monotonic() + seconds, lambda found: _write(result, found))
    run.save(run.found)
    try:
        stage.body(run)
    except Exception as error:  # the stage's result, whatever it is
        run.fail(f"{type(error).__name__}: {' '.join(str(error).split())[:TAIL]}")
    run.save(run.found)


def _write(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all: the process may be killed at any time."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content), encoding="utf-8")
    new.replace(path)


def run_apart(name: str, seconds: float, folder: Path, command: Sequence[str] | None = None) -> dict[str, Any]:
    """A stage in a process of its own: what it found, `seconds` and `failed`, which says so if it died or was stopped."""
    result = folder / f"{name.replace(' ', '-')}.json"
    default = [
        sys.executable,
        "-m",
        "pipelines.benchmark.gpu_check",
        "--stage",
        name,
        "--seconds",
        str(seconds),
        "--result",
        str(result),
    ]
    started, why = time.monotonic(), None
    try:
        done = subprocess.run(command or default, cwd=ROOT, capture_output=True, text=True, timeout=seconds + GRACE)
        if done.returncode:
            why = f"ended with code {done.returncode}: {' '.join((done.stderr or done.stdout).split())[-TAIL:]}"
    except subprocess.TimeoutExpired:
        why = f"stopped after {seconds + GRACE:.0f} s"
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {"failed": []}
    found["failed"] += [why] if why else []
    return {"stage": name, "seconds": round(time.monotonic() - started, 1), **found}


def check(only: str = "") -> dict[str, Any]:
    """Run every stage whose name contains `only`; the report."""
    from pipelines.benchmark.gpu_stages import Stage, stages

    started = time.monotonic()
    todo = [stage for stage in stages() if only in stage.name]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(BESIDE) as pool:

        def run(stage: Stage) -> dict[str, Any]:
            left = SECONDS - GRACE - (time.monotonic() - started)
            if left <= 0:
                return {"stage": stage.name, "seconds": 0.0, "failed": [f"not reached within {SECONDS:.0f} s"]}
            return run_apart(stage.name, min(stage.seconds, left), Path(folder))

        found = [_told(one) for one in pool.map(run, [stage for stage in todo if stage.beside])]
        found += [_told(run(stage)) for stage in todo if not stage.beside]
    return {
        "machine": device_facts(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - started, 1),
        "stages": found,
    }


def _told(found: dict[str, Any]) -> dict[str, Any]:
    """Says how a stage went."""
    print(f"{found['stage']}: {'; '.join(found['failed']) or 'fine'} ({found['seconds']} s)", flush=True)
    return found


def interpreted(only: str = "") -> int:
    """The correctness cases on the CPU, by Triton's interpreter, in this process; the exit code."""
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from bench import registry
    from bench.measure import correctness

    cases = [case for case in registry.chosen() if only in case.name]
    failed = 0
    for case in cases:
        why = correctness(case, "cpu")["failed"]
        failed += why is not None
        print(f"{case.name}: {why or 'fine'}", flush=True)
    print(f"{len(cases)} cases, {failed} failed")
    return 1 if failed or not cases else 0


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs/gpu", help="folder for the JSON and the table (docs/gpu)"
    )
    parser.add_argument("--only", default="", help="stages (or, interpreted, cases) whose name contains this")
    parser.add_argument("--interpret", action="store_true", help="correctness on the CPU, by Triton's interpreter")
    for name in ("--stage", "--result", "--seconds"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.interpret:
        return interpreted(args.only)
    import torch

    if not torch.cuda.is_available():
        print(
            f"gpu-check: torch {torch.__version__} finds no GPU here; --interpret runs the correctness cases on the CPU",
            file=sys.stderr,
        )
        return 2
    if args.stage:
        run_here(args.stage, float(args.seconds), "cuda", Path(args.result))
        return 0
    from pipelines.benchmark.gpu_report import write

    report = check(args.only)
    failed = [f"{stage['stage']}: {why}" for stage in report["stages"] for why in stage["failed"]]
    print(f"{write(report, args.out)}: {len(failed)} failures in {report['seconds']} s")
    return 1 if failed or not report["stages"] else 0


if __name__ == "__main__":
    sys.exit(main())
