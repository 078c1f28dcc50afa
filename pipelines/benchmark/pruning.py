"""Whether pruning hopeless trials pays: the search of `ecospec-train tune` with and without, at the same number of trials.

    python -m pipelines.benchmark.pruning --run runs/quickstart --out docs/pruning.md [--trials 80] [--seeds 0 1 2]

Seconds are CPU time of the process, from the first trial to the last; loading is left out. Of repeated searches, which find the same,
the fastest counts. A seed also divides the prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState

from ecospec_runtime.errors import UserError
from ecospec_runtime.machine import device_name
from ecospec_train.choice import ranked_trials, rate_of
from ecospec_train.replay import ReplayRows
from ecospec_train.tune import TuneConfig, prepare, run_trials
from ecospec_train.workers import finished
from pipelines.benchmark.run_folder import tune_config

SAME = 0.005  # relative difference in the best rate that counts as none
WORTH = 0.05  # share of the time that must be saved: less is noise

HEAD_TEXT = """Searches of {trials} trials, {always_tried} of them always tried and never pruned; CPU seconds of one process, the least of {repeats}, on
{device} with {cores} cores (Python {python}, Optuna {optuna}). The rate is replayed tokens per ms on the tuning prompts. Pruning pays if it
saves {worth:.0%} of the time or more and finds the same rate."""
VERDICT_TEXT = """With pruning a search takes {time:.2f} times as long and its best rate is {rate:.4f} times as high (geometric means over
seeds): pruning {verdict}."""


def search(config: TuneConfig, tuning: dict[str, ReplayRows] | None) -> tuple[dict[str, Any], dict[str, ReplayRows]]:
    """Run one study in memory; what it found and took, and the positions it replayed, to be used again."""
    study = prepare(config)
    rows = tuning or study.inputs.tuning()
    start = time.process_time()
    run_trials(study, rows, None)
    seconds = time.process_time() - start
    trials = finished(study.study)
    best = ranked_trials(study.study)[0]
    found = {
        "trials": len(trials), "always_tried": len(study.points), "pruned": sum(t.state == TrialState.PRUNED for t in trials),
        "seconds": seconds, "best": rate_of(best), "policy": best.user_attrs["result"]["policy"],
    }  # fmt: skip
    return found, rows


def warm_up() -> None:
    """Have Optuna load what its sampler needs, which the first search would pay for."""
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=1))
    study.optimize(lambda trial: trial.suggest_float("x", 0.0, 1.0), n_trials=3)


def measure(run: Path, trials: int, seeds: list[int], positions: int, repeats: int) -> list[dict[str, Any]]:
    """With and without pruning for every seed; which of the two goes first alternates."""
    warm_up()
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for i, seed in enumerate(seeds):
            base = tune_config(run, Path(folder) / "out", seed, positions)
            rows = None
            for prune in (True, False) * repeats if i % 2 else (False, True) * repeats:
                config = base.model_copy(update={"trials": trials, "storage": "sqlite://", "prune": prune})
                found, rows = search(config, rows)
                cells.append({"seed": seed, "prune": prune} | found)
                print(f"seed {seed}, prune={prune}: {found['seconds']:.1f} s CPU, best {found['best']:.5f}", flush=True)
    return fastest(cells)


def fastest(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of searches that differ in nothing but the machine's mood the one that took the least time, by seed and pruning."""
    kept: dict[tuple[int, bool], dict[str, Any]] = {}
    for cell in sorted(cells, key=lambda cell: -cell["seconds"]):
        kept[cell["seed"], cell["prune"]] = cell
    return [kept[key] for key in sorted(kept)]


def markdown(result: dict[str, Any]) -> str:
    """The table, and what it says."""
    head = HEAD_TEXT.format(
        **result, worth=WORTH, **{key: result["cells"][0][key] for key in ("trials", "always_tried")}
    )
    lines = ["# Does pruning pay in `tune`", "", f"Made by `{result['command']}`.", "", head, "",
             "| seed | pruning | pruned | CPU seconds | best rate | best policy |", "|---|---|---|---|---|---|"]  # fmt: skip
    for cell in result["cells"]:
        lines.append(f"| {cell['seed']} | {'yes' if cell['prune'] else 'no'} | {cell['pruned']} | {cell['seconds']:.1f} "
                     f"| {cell['best']:.5f} | `{cell['policy']}` |")  # fmt: skip
    saved, lost = result["time_saved"], result["rate_lost"]
    verdict = "pays" if saved >= WORTH and lost < SAME else "does not pay"
    text = VERDICT_TEXT.format(time=1 - saved, rate=1 - lost, verdict=verdict)
    return "\n".join([*lines, "", text]) + "\n"


def means(cells: list[dict[str, Any]]) -> dict[str, float]:
    """Share of the time that pruning saves and of the best rate that it loses: geometric means over seeds."""
    logs = {
        key: [np.mean([np.log(cell[key]) for cell in cells if cell["prune"] is prune]) for prune in (True, False)]
        for key in ("seconds", "best")
    }
    ratio = {key: float(np.exp(with_ - without)) for key, (with_, without) in logs.items()}
    return {"time_saved": 1.0 - ratio["seconds"], "rate_lost": 1.0 - ratio["best"]}


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder with traces/, predictor/ and profile.json")
    parser.add_argument("--out", type=Path, required=True, help="Markdown file; JSON goes beside it")
    parser.add_argument("--trials", type=int, default=80, help="of every search")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--repeats", type=int, default=2, help="of every search; the fastest counts")
    parser.add_argument("--positions", type=int, default=2000, help="most positions to tune on")
    a = parser.parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        cells = measure(a.run, a.trials, a.seeds, a.positions, a.repeats)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    seeds = " ".join(map(str, a.seeds))
    command = f"python -m pipelines.benchmark.pruning --run {a.run} --out {a.out} --trials {a.trials} --repeats {a.repeats} --seeds {seeds}"
    result = {
        "command": command, "repeats": a.repeats, "device": device_name(), "cores": os.cpu_count(), "python": platform.python_version(),
        "optuna": optuna.__version__, "cells": cells, **means(cells),
    }  # fmt: skip
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    a.out.write_text(markdown(result), encoding="utf-8")
    print(a.out)


if __name__ == "__main__":
    main()
