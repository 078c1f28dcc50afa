"""Which policy is best: each tuned by replay with the same number of trials, then decoded with, side by side.

    python -m pipelines.benchmark.policies --run runs/quickstart --drafter pipelines/reference/model/drafter \\
        --out docs/policies/qwen3-moe.md [--temperature 0 --temperature 0.7] [--trials 60] [--tokens 48] [--reuse]

`--run` is a folder that `make quickstart` left. Tuning replays harvest prompts that the predictor's fit held out, at every
temperature; some of them are kept back to confirm on. Decoding takes the run's bench prompts, that nothing has seen, policies
by turns of a few tokens on every prompt. Writes Markdown, and beside it JSON and a plot. Two temperatures take about 10 minutes for the
small references on 2 cores that nothing else uses, about 20 for that of DeepSeek-V3. Found policies stay in `RUN/policies-<T>.json`;
after a failure `--reuse` goes on with them. A drafter in the target's checkpoint is that of the small target: widening leaves it out.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from ecospec_runtime.bench import METHOD, Contestant, Plan, Sample, measure, summarize
from ecospec_runtime.config import read_model
from ecospec_runtime.console import check_writable, handled, note, write_json
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.engine import Engine
from ecospec_runtime.errors import UserError
from ecospec_runtime.machine import describe
from ecospec_runtime.policies import PolicySpec
from ecospec_runtime.predictor import Predictor
from ecospec_runtime.prompts import read_prompts
from ecospec_runtime.scoring import Scorer
from ecospec_train.confirm import LiveSettings, load_models
from ecospec_train.quiet import OtherLoad
from ecospec_train.replay_rows import check_lineage
from ecospec_train.steps import Steps
from ecospec_train.traces import Traces
from pipelines.benchmark.policies_report import bars, figures, markdown, plot
from pipelines.benchmark.policies_tuning import OFF, Found, Material, Settings, confirm, find, prepare, specs_of


def compare(settings: Settings) -> dict[str, Any]:
    """Tune, confirm, decode; what is wrong with the models is said before the minutes of tuning. UserError."""
    started = time.perf_counter()
    profile = read_model(settings.profile_file, DeviceProfile, "`make quickstart` writes one")
    predictor = Predictor.from_folder(settings.run / "predictor", profile.threads)
    engine = load_engine(settings, predictor, profile)
    prompts = bench_prompts(settings, engine)
    tuned: list[tuple[Material, Found]] = []
    for temperature in settings.temperatures:
        material = prepare(settings, predictor, profile, temperature)
        tuned.append((material, find(material)))
    tables = []
    for material, found in tuned:
        replayed = confirm(material, found)
        temperature = material.traces.manifest.temperature
        decoded, samples, others = decode(settings, engine, prompts, specs_of(found), temperature)
        rows = figures(decoded, samples, found.results, replayed)
        confirming = material.confirming_rows
        divided = {
            "tuning": len(material.tuning_rows.prompts),
            "confirming": len(confirming.prompts),
            "positions": len(confirming),
        }
        tables.append({"temperature": temperature, "prompts": divided, "made_with": found.made_with,
                       "other_load": others, "rows": rows, "bars": bars(rows, profile)})  # fmt: skip
    return {
        "schema_version": 1, "machine": describe(engine.target.device), "target": engine.target.source,
        "architecture": engine.target.architecture, "drafter": settings.drafter, "dtype": profile.dtype,
        "profile": profile.model_dump(), "prompts": len(prompts), "settings": settings.model_dump(mode="json"),
        "method": METHOD, "seconds": time.perf_counter() - started, "temperatures": tables,
    }  # fmt: skip


def load_engine(settings: Settings, predictor: Predictor, profile: DeviceProfile) -> Engine:
    """The run's widened target with its drafter. UserError if it, or this machine, is not that of traces and profile."""
    traces = Traces(settings.run / "traces")
    check_lineage(traces, predictor)
    live = LiveSettings(target=str(settings.run / "target"), drafter=settings.drafter, prompts="", count=0,
                        profile=settings.profile_file)  # fmt: skip
    target, drafter = load_models(live, profile, traces.manifest)
    scorer = Scorer(predictor, "raw", target.moe_layers, target.experts)
    return Engine(target, drafter, scorer, None, profile, traces.manifest.pool, record_routing=True)


def bench_prompts(settings: Settings, engine: Engine) -> list[list[int]]:
    """Token ids of the run's bench prompts. UserError for fewer than two."""
    path, limit = settings.run / "bench.jsonl", Traces(settings.run / "traces").manifest.max_prompt_tokens
    encoded = [row.encode(engine.target.tokenizer, limit) for row in read_prompts(path, engine.target.tokenizer)]
    if len(encoded) < 2:
        raise UserError(f"{path}: one prompt, an interval needs two at least; add more")
    return encoded[: settings.count]


def decode(
    settings: Settings, engine: Engine, prompts: list[list[int]], specs: Mapping[str, PolicySpec], temperature: float
) -> tuple[list[dict[str, Any]], dict[str, list[list[Sample]]], float]:
    """Decode with `off` and all policies, interleaved: the bench's rows, the samples `[prompt][repeat]` by name, and the cores
    that other processes used meanwhile."""
    contestants = [
        Contestant(name, spec, str(spec.acceptance or "raw"), engine.with_policy(spec))
        for name, spec in ({"off": OFF} | dict(specs)).items()
    ]
    plan = Plan(prompts, (temperature,), settings.tokens, settings.repeats, settings.seed)
    note(f"policies: decoding {len(prompts)} prompts with {len(contestants)} policies at temperature {temperature:g}")
    others = OtherLoad()
    with Steps("policies: decoding", len(contestants) * len(prompts) * settings.repeats) as steps:
        samples = measure(contestants, plan, steps.advance)
    found = {name: of for (name, _), of in samples.items()}
    return summarize(contestants, plan, samples), found, others.cores()


def parse(arguments: list[str] | None) -> tuple[Settings, Path]:
    """The command line: settings, and the Markdown file to write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder that `make quickstart` left")
    parser.add_argument("--drafter", required=True, help="what the run's traces were drafted with")
    parser.add_argument("--out", type=Path, required=True, help="Markdown file; .json and .png are written beside it")
    parser.add_argument("--source-target", help="the target of the run's traces; default: where their manifest says")
    parser.add_argument("--temperature", type=float, action="append", help="may be repeated; default 0 and 0.7")
    parser.add_argument("--trials", type=int, default=60, help="of each policy and temperature")
    parser.add_argument("--tokens", type=int, default=48, help="of each decoded text")
    parser.add_argument("--repeats", type=int, default=1, help="of each decode, the median counts")
    parser.add_argument("--positions", type=int, default=2000, help="most to tune on, and to confirm on")
    parser.add_argument("--count", type=int, help="decode with the first bench prompts only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reuse", action="store_true", help="take the policies that an earlier run has found")
    given = vars(parser.parse_args(arguments))
    out = given.pop("out")
    given["temperatures"] = tuple(dict.fromkeys(given.pop("temperature") or (0.0, 0.7)))
    return Settings(**given), out


@handled
def run(arguments: list[str] | None) -> None:
    """Compare, and write Markdown, JSON and a plot."""
    settings, out = parse(arguments)
    paths = out, out.with_suffix(".json"), out.with_suffix(".png")
    if len(set(paths)) < len(paths):
        raise UserError(f"--out {out}: JSON and plot are written beside it; give it another ending, .md")
    for path in paths:
        check_writable(path)
    given = shlex.join(sys.argv[1:] if arguments is None else arguments)
    result = {"command": f"python -m pipelines.benchmark.policies {given}"} | compare(settings)
    write_json(paths[1], result)
    out.write_text(markdown(result, paths[2].name if plot(result, paths[2]) else None), encoding="utf-8")
    print(out)


def main(arguments: list[str] | None = None) -> None:
    """The command; a mistake of the user's is one line and exit code 2."""
    try:
        run(arguments)
    except typer.Exit as stop:
        raise SystemExit(stop.exit_code) from None


if __name__ == "__main__":
    main()
