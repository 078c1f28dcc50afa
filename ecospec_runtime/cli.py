"""`ecospec-runtime generate | bench | doctor | inspect | architectures`: a bundle in, text, figures and answers out."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ecospec_runtime.console import (
    MOST_THREADS,
    PLAIN_WIDTH,
    check_writable,
    console,
    handled,
    leads,
    naming_options,
    new_app,
    note,
    option_name,
    write_json,
)
from ecospec_runtime.errors import UserError

if TYPE_CHECKING:
    from ecospec_runtime.bench import Contestant, Plan
    from ecospec_runtime.bundle import Bundle
    from ecospec_runtime.config import GenerationConfig
    from ecospec_runtime.engine import Engine
    from ecospec_runtime.placement import Placement
    from ecospec_runtime.policies import PolicySpec

app = new_app("ecospec-runtime", "Speculative decoding of mixture-of-experts models with an EcoSpec bundle.")

BundleOption = Annotated[Path, typer.Option("--bundle", "-b", help="Folder that `ecospec-train export` wrote.")]
TargetOption = Annotated[str | None, typer.Option(help="Local folder or hub id; default: the one the bundle names.")]
DrafterOption = Annotated[
    str | None, typer.Option(help="Local folder, hub id or ngram[:min=1,max=4]; default: the one the bundle names.")
]
DtypeOption = Annotated[
    str, typer.Option(help="auto (as saved), float32, bfloat16, or mxfp4 (as auto, GPT-OSS's experts as stored).")
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu (default), cuda, cuda:1, ...")]
DeviceMapOption = Annotated[
    str | None,
    typer.Option(
        help="Spread the target over devices: auto, balanced, ..., or module names to devices, as JSON text or file."
    ),
]
TpOption = Annotated[int, typer.Option(min=1, help="Processes of a torchrun that share every layer.")]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        min=1, max=MOST_THREADS, help="CPU threads; default: torch's choice, or what a given bundle was tuned for."
    ),
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]


def main() -> None:
    """Entry point of the console script."""
    app()


def place(device: str | None, device_map: str | None, tp: int) -> Placement:
    """Where the target goes; every process but the first falls silent. Raises UserError."""
    from ecospec_runtime.placement import join, parse_placement

    join(tp)
    return parse_placement(device, device_map, tp)


def set_threads(threads: int | None) -> None:
    """Set the number of CPU threads, before anything is loaded."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


@app.command()
@handled
def generate(
    bundle: BundleOption,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompts: Annotated[str | None, typer.Option(help="JSONL file or hub data set instead of --prompt.")] = None,
    policy: Annotated[
        str, typer.Option(help="auto, or off, confidence:budget=4, prefix, utility, ratio, throughput, ...")
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Exactly this many, unless the text ends first.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: off.")] = 0,
    seed: Annotated[int, typer.Option(help="One seed gives one text under every policy.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    tp: TpOption = 1,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Continue prompts: text streams to stdout, one line of figures to stderr."""
    if (prompt is None) == (prompts is None):
        raise UserError("give either --prompt TEXT or --prompts FILE")
    check_writable(json_file)
    from ecospec_runtime.bundle import load_bundle
    from ecospec_runtime.prompts import Prompt, read_prompts

    config = generation(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
                        stop_strings=tuple(stop or ()))  # fmt: skip
    split_policies(policy)
    loaded = load_bundle(bundle)
    if prompts is not None:
        read_prompts(prompts, limit=1)
    from ecospec_runtime.engine import Engine  # slow: after what is cheap to refuse

    engine = Engine.from_bundle(loaded, target, drafter, policy, dtype, place(device, device_map, tp), threads)
    if policy == "auto" and engine.policy.name == "off":
        note(f"speculation is off: {engine.reason or 'it does not pay on this device'}")
    rows = [Prompt(prompt)] if prompt is not None else read_prompts(str(prompts), engine.target.tokenizer)
    results = []
    for i, row in enumerate(rows):
        if len(rows) > 1:
            sys.stdout.write(f"{'' if i == 0 else chr(10)}--- prompt {i + 1} of {len(rows)}\n")
        settings = config.model_copy(update={"seed": seed + i})
        results.append(stream_one(engine, row.text, row.encode(engine.target.tokenizer), settings))
    report = {"target": engine.target.source, "policy": engine.policy.name, "parameters": engine.policy.parameters(),
              "reason": engine.reason, "config": config.model_dump(mode="json"), "results": results}  # fmt: skip
    write_json(json_file, report)


def generation(**values: Any) -> GenerationConfig:
    """The settings of a decode from a command's options. Raises UserError naming the option."""
    from ecospec_runtime.config import GenerationConfig

    options = {key: option_name(key) for key in values} | {"stop_strings": "--stop"}
    with naming_options("GenerationConfig", options):
        return GenerationConfig.from_mapping(values)


def stream_one(engine: Engine, text: str, ids: list[int], config: GenerationConfig) -> dict[str, Any]:
    """Print prompt and continuation as it comes; returns the JSON entry."""
    stream = engine.generate(ids, config)
    sys.stdout.write(text)
    tokens = []
    for token in stream:
        tokens.append(token)
        sys.stdout.write(token.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    s = stream.statistics
    note(
        f"{s.tokens} tokens in {s.seconds:.2f} s ({s.tokens_per_second:.1f} tokens/s), {s.accept_length:.2f} tokens a "
        f"pass, policy {engine.policy.name}, prefill {s.prefill_seconds:.2f} s"
    )
    return {"prompt": text, "text": "".join(t.text for t in tokens), "tokens": [t.id for t in tokens],
            "reason": stream.reason, "statistics": s.summary()}  # fmt: skip


@app.command()
@handled
def bench(
    bundle: BundleOption,
    prompts: Annotated[str, typer.Option(help="JSONL file or hub data set.")],
    policies: Annotated[
        str, typer.Option(help="Comma-separated; auto is the tuned one.")
    ] = "off,confidence,ratio,auto",
    target: TargetOption = None,
    drafter: DrafterOption = None,
    count: Annotated[int | None, typer.Option(min=1, help="Use only the first prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts keep their end.")] = 512,
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated; default 0.")] = None,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: off.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Times per prompt; the median counts.")] = 1,
    screen: Annotated[
        int, typer.Option(min=0, help="After so many prompts drop clearly slower confidence policies; 0: never.")
    ] = 0,
    seed: Annotated[int, typer.Option()] = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    tp: TpOption = 1,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for plots and a Markdown table (needs matplotlib).")
    ] = None,
) -> None:
    """Measure policies side by side, by turns of a few tokens on every prompt, in one process."""
    check_writable(json_file)
    from ecospec_runtime import bench_report
    from ecospec_runtime.bundle import load_bundle
    from ecospec_runtime.prompts import fingerprint_prompts, read_prompts

    if plots is not None:
        bench_report.check_plots(plots)
    temperatures = tuple(temperature or (0.0,))
    for one in temperatures:
        generation(max_new_tokens=max_new_tokens, temperature=one, top_p=top_p, top_k=top_k, seed=seed)
    named = split_policies(policies)
    loaded = load_bundle(bundle)
    read_prompts(prompts, limit=1)
    if tp > 1 and screen:
        raise UserError("--screen drops policies by the clock, which processes may read differently; not with --tp")
    from ecospec_runtime.bench import METHOD, Plan, measure, summarize  # slow: after what is cheap to refuse
    from ecospec_runtime.engine import Engine
    from ecospec_runtime.machine import describe
    from ecospec_runtime.mxfp4 import dtype_name

    base = Engine.from_bundle(loaded, target, drafter, "off", dtype, place(device, device_map, tp), threads)
    base.record_routing = True
    rows = read_prompts(prompts, base.target.tokenizer, count)
    plan = Plan([r.encode(base.target.tokenizer, max_prompt_tokens) for r in rows], temperatures,
                max_new_tokens, repeats, seed, {"top_p": top_p, "top_k": top_k}, screen)  # fmt: skip
    entrants = contestants(loaded, base, named)
    started = time.perf_counter()
    samples = run_with_progress(measure, entrants, plan)
    report = {
        "schema_version": 1, "machine": describe(base.target.device), "target": base.target.source, "dtype": dtype_name(base.target),
        "bundle": str(bundle), "prompts": {"source": prompts, "count": len(rows), "sha256": fingerprint_prompts(rows)},
        "max_new_tokens": max_new_tokens, "repeats": repeats, "screen": screen, "seed": seed, "top_p": top_p, "top_k": top_k,
        "method": METHOD, "command": sys.argv, "seconds": time.perf_counter() - started,
        "profile": base.profile.model_dump() if base.profile else None, "runs": summarize(entrants, plan, samples),
    }  # fmt: skip
    write_json(json_file, report)
    out = console()
    out.print(bench_report.table(report, narrow=out.width < PLAIN_WIDTH))
    if plots is not None and leads():
        bench_report.plots(report, plots)


def split_policies(text: str) -> list[PolicySpec | None]:
    """A comma-separated list of policies, checked before anything is loaded; None is `auto`. Raises UserError."""
    from ecospec_runtime.policies import parse_policy

    entries = [entry.strip() for entry in re.split(r",(?![^,:]*=)", text)]
    named = [None if entry == "auto" else parse_policy(entry) for entry in entries if entry]
    if not named:
        raise UserError("no policy named; give e.g. --policies off,confidence:budget=4,auto")
    return named


def contestants(bundle: Bundle, base: Engine, named: list[PolicySpec | None]) -> list[Contestant]:
    """Engines for the named policies; None is the bundle's own for this device. Raises UserError."""
    import torch

    from ecospec_runtime.bench import Contestant
    from ecospec_runtime.mxfp4 import dtype_name

    predictor = base.scorer.predictor
    best = predictor.acceptance.best if predictor else "raw"
    found: dict[str, Contestant] = {}
    for entry in named:
        spec, label = entry, str(entry)
        if spec is None:
            picked = bundle.policy_for(base.target.hardware, dtype_name(base.target), torch.get_num_threads())
            if picked.warning:
                note(f"warning: {picked.warning}")
            spec = picked.spec
            label = f"{spec.name} (tuned)"
        found.setdefault(label, Contestant(label, spec, spec.acceptance_kind(best), base.with_policy(spec)))
    return list(found.values())


def run_with_progress(measure: Any, entrants: list[Contestant], plan: Plan) -> Any:
    """Call `measure` under a progress bar on stderr; off a terminal, a line every tenth of the way."""
    total = len(entrants) * len(plan.prompts) * len(plan.temperatures) * plan.repeats
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("bench", total=total)
            return measure(entrants, plan, lambda: progress.advance(task))
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if done * 10 // total > (done - 1) * 10 // total:
            note(f"bench: {done}/{total} generations")

    return measure(entrants, plan, tick)


@app.command()
@handled
def inspect(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.")],
    json_file: JsonOption = None,
) -> None:
    """Check every hash of a bundle and show what is in it."""
    from ecospec_runtime.bundle import load_bundle
    from ecospec_runtime.inspection import summary

    loaded = load_bundle(bundle)
    write_json(json_file, {"bundle": str(bundle), "manifest": loaded.manifest.model_dump(mode="json"),
                           "policies": {k: p.model_dump(mode="json") for k, p in loaded.policies.items()}})  # fmt: skip
    console().print(summary(loaded))


@app.command()
@handled
def architectures(
    names: Annotated[list[str] | None, typer.Argument(help="Model types to try, e.g. gpt_oss; default: all.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the table as Markdown to this file.")] = None,
) -> None:
    """Try every architecture that transformers has on a tiny random instance; print which work and why others do not."""
    from ecospec_runtime.architectures import report

    report(names, out)


@app.command()
@handled
def doctor(
    bundle: Annotated[Path | None, typer.Option("--bundle", "-b", help="Bundle folder.")] = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    prompts: Annotated[
        str | None, typer.Option(help="Prompts to compare on, at most 64; default: eight built-in ones.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 32,
    dtype: Annotated[str, typer.Option(help="float32 (exact comparison), bfloat16, auto or mxfp4.")] = "float32",
    device: DeviceOption = None,
    device_map: DeviceMapOption = None,
    tp: TpOption = 1,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Check an installation: versions, bundle, and that speculation changes no token. Exit code 1 if something is wrong."""
    if bundle is None and (target is None or drafter is None):
        raise UserError("give --bundle B, or --target T and --drafter D")
    check_writable(json_file)
    from ecospec_runtime.doctor import examine

    set_threads(threads)
    findings = examine(bundle, target, drafter, prompts, max_new_tokens, dtype, place(device, device_map, tp), threads)
    out = console()
    for finding in findings:
        out.print(f"{finding.status:>5}  {finding.check}: {finding.message}", markup=False, soft_wrap=True)
    write_json(json_file, {"findings": [vars(f) for f in findings], "ok": all(f.status != "FAIL" for f in findings)})
    if any(f.status == "FAIL" for f in findings):
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
