"""`ecospec-train harvest | fit | profile | tune | export | run`: from a target and a drafter to a bundle.

Flags fill the configuration class of a stage; what has no flag of its own is set with `--set key=value`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ecospec_runtime.cli import DeviceMapOption, set_threads
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.console import (
    MOST_THREADS,
    check_writable,
    handled,
    naming_options,
    new_app,
    note,
    option_name,
    write_json,
)
from ecospec_runtime.errors import UserError
from ecospec_train.settings import FitConfig, HarvestConfig, ProfileConfig, TuneConfig

app = new_app("ecospec-train", "Train and tune cost-aware speculative decoding for a mixture-of-experts model.")

TargetOption = Annotated[str, typer.Option(help="Local folder or hub id of the target.")]
DrafterOption = Annotated[str, typer.Option(help="Local folder or hub id of the drafter, or ngram[:min=1,max=4].")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Any other setting, key=value; may be repeated.")]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, max=MOST_THREADS, help="CPU threads; default: torch's choice.")
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]

HARVEST, FIT = HarvestConfig.model_construct(), FitConfig.model_construct()  # the options' defaults
PROFILE, TUNE = ProfileConfig.model_construct(), TuneConfig.model_construct()


def main() -> None:
    """Entry point of the console script."""
    app()


def run_stage(stage: str, flags: dict[str, Any], extra: Sequence[str] | None, json_file: Path | None) -> Any:
    """Validate flags and `--set` as the stage's configuration, run it, write its result. Raises UserError."""
    check_writable(json_file)
    from ecospec_train.pipeline import apply_override
    from ecospec_train.stages import RUNNERS, config_class

    values = {key: value for key, value in flags.items() if value is not None}
    for text in extra or ():
        apply_override(values, text)
    settings = config_class(stage)
    with naming_options(settings.__name__, {key: option_name(key) for key in flags}):
        config = settings.model_validate(values)
    result = RUNNERS[stage](config)
    write_json(json_file, as_json(result))
    return result


def as_json(result: Any) -> Any:
    """A stage's result as plain values: pydantic models and dataclasses alike."""
    if hasattr(result, "model_dump"):
        return result.model_dump(mode="json")
    if hasattr(result, "__dataclass_fields__"):
        return {name: as_json(getattr(result, name)) for name in result.__dataclass_fields__}
    if isinstance(result, dict):
        return {str(key): as_json(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [as_json(value) for value in result]
    return str(result) if isinstance(result, Path) else result


@app.command()
@handled
def harvest(
    target: TargetOption,
    drafter: DrafterOption,
    prompts: Annotated[str, typer.Option(help="JSONL file or hub data set.")],
    out: Annotated[Path, typer.Option(help="Folder for the traces.")],
    max_positions: Annotated[
        int | None, typer.Option(help="Stop after this many positions; default: all prompts to their end.")
    ] = HARVEST.max_positions,
    max_new_tokens: Annotated[int, typer.Option(help="Of the target's own text, per prompt.")] = HARVEST.max_new_tokens,
    pool_size: Annotated[
        int | None,
        typer.Option(min=1, help=f"Nodes of a pool; a multiple of its depth, default: {HARVEST.pool.width} times it."),
    ] = None,
    pool_depth: Annotated[int, typer.Option(min=1, help="Levels of a pool.")] = HARVEST.pool.depth,
    pool_beam: Annotated[int, typer.Option(min=1, help="Nodes of a level that are expanded.")] = HARVEST.pool.beam,
    stride: Annotated[
        int, typer.Option(help="Positions from one pool to the next; replay is exact at 1.")
    ] = HARVEST.stride,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature of the target's text.")
    ] = HARVEST.temperature,
    seed: Annotated[int, typer.Option(help="Of the trajectory, above temperature 0.")] = HARVEST.seed,
    max_disk: Annotated[
        str, typer.Option(help="Refuse to write more than this, e.g. 2GB.")
    ] = f"{HARVEST.max_disk / 10**9:g}GB",
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted harvest.")] = HARVEST.resume,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, auto or mxfp4.")] = HARVEST.dtype,
    devices: Annotated[
        int, typer.Option(min=1, help="Processes or GPUs, each with a copy of the target.")
    ] = HARVEST.devices,
    device_map: DeviceMapOption = None,
    threads: ThreadsOption = None,
    extra: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """Record what the drafter proposes and which experts the target then uses, at every position."""
    set_threads(threads)
    flags = {"target": target, "drafter": drafter, "prompts": prompts, "out": out, "max_positions": max_positions,
             "max_new_tokens": max_new_tokens, "pool": pool_shape(pool_size, pool_depth, pool_beam), "stride": stride,
             "temperature": temperature, "seed": seed, "max_disk": max_disk, "resume": resume, "dtype": dtype,
             "devices": devices, "device_map": device_map}  # fmt: skip
    manifest = run_stage("harvest", flags, extra, json_file)
    note(f"harvest: {manifest.rows} positions -> {out}")


def pool_shape(size: int | None, depth: int, beam: int) -> dict[str, int]:
    """The pool section of a harvest; a pool of `size` nodes is `depth` levels of `size / depth`. Raises UserError."""
    shape = {"depth": depth, "beam": beam}
    if size is not None:
        if size % depth:
            raise UserError(f"--pool-size {size}: not a multiple of the pool's depth {depth}; also give --pool-depth")
        shape["width"] = size // depth
    options = {"depth": "--pool-depth", "beam": "--pool-beam", "width": f"--pool-size {size}: nodes of a level"}
    with naming_options("PoolConfig", options):
        PoolConfig.model_validate(shape)
    return shape


@app.command()
@handled
def fit(
    traces: Annotated[
        list[Path],
        typer.Option(help="Folder of a harvest; repeat it for harvests of the same prompts at other temperatures."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the predictor.")],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the traces.")] = FIT.epochs,
    width: Annotated[int, typer.Option(help="Of the predictor's trunk.")] = FIT.width,
    max_seconds: Annotated[float | None, typer.Option(help="Stop training after this long.")] = FIT.max_seconds,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = FIT.lr,
    seed: Annotated[int, typer.Option(help="Of weights, order and split.")] = FIT.seed,
    devices: Annotated[int, typer.Option(min=1, help="Processes or GPUs.")] = FIT.devices,
    threads: ThreadsOption = None,
    extra: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """Train the predictor of experts and acceptance on traces and export it to ONNX."""
    set_threads(threads)
    flags = {"traces": traces, "out": out, "epochs": epochs, "width": width, "max_seconds": max_seconds, "lr": lr,
             "seed": seed, "devices": devices}  # fmt: skip
    report = run_stage("fit", flags, extra, json_file)
    from ecospec_train.fit import misses

    for line in misses(report.metrics):
        note(f"fit: the predictor {line}")
    note(f"fit: {report.seconds:.0f} s -> {out}")


@app.command()
@handled
def profile(
    target: TargetOption,
    drafter: DrafterOption,
    out: Annotated[Path, typer.Option(help="JSON file for the device profile.")],
    predictor: Annotated[Path | None, typer.Option(help="Predictor folder, to time prediction as well.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, auto or mxfp4.")] = PROFILE.dtype,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = PROFILE.device,
    device_map: DeviceMapOption = None,
    tp: Annotated[int, typer.Option(min=1, help="Processes of a torchrun that share every layer.")] = PROFILE.tp,
    allow_busy: Annotated[
        bool, typer.Option("--allow-busy", help="Measure though other processes use the machine.")
    ] = PROFILE.allow_busy,
    threads: ThreadsOption = None,
    extra: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """Measure what a verification pass costs on this machine, as a function of tokens and experts."""
    set_threads(threads)
    from ecospec_runtime.placement import join

    join(tp)
    flags = {"target": target, "drafter": drafter, "out": out, "predictor": predictor, "dtype": dtype, "device": device,
             "device_map": device_map, "tp": tp, "allow_busy": allow_busy}  # fmt: skip
    result = run_stage("profile", flags, extra, json_file)
    note(
        f"profile: a plain step takes {result.plain_ms:.2f} ms, {result.expert_share:.0%} of it experts; the model is off by "
        f"{result.heldout_error:.1%} on passes it has not seen -> {out}"
    )


@app.command()
@handled
def tune(
    traces: Annotated[Path, typer.Option(help="Folder of a harvest.")],
    predictor: Annotated[list[Path], typer.Option(help="Folder of a fit; may be repeated, the best variant is used.")],
    profile: Annotated[Path, typer.Option(help="File of a profile.")],
    out: Annotated[Path, typer.Option(help="Folder for the policy.")],
    trials: Annotated[
        int, typer.Option(min=1, help="In all, over workers and earlier runs; some thirty points are always tried.")
    ] = TUNE.trials,
    objectives: Annotated[
        str, typer.Option(help="rate, or pareto: tokens per pass against experts read.")
    ] = TUNE.objectives,
    storage: Annotated[
        str | None,
        typer.Option(help="SQLite or PostgreSQL URL, or a file ending in .journal; default: SQLite in --out."),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes; further ones may use the same --storage.")
    ] = TUNE.workers,
    confirm_live: Annotated[
        int, typer.Option(min=0, help="Decode with so many of the best, and with off, before choosing.")
    ] = TUNE.confirm_live,
    target: Annotated[str | None, typer.Option(help="For --confirm-live: the target that was profiled.")] = None,
    drafter: Annotated[str | None, typer.Option(help="For --confirm-live.")] = None,
    prompts: Annotated[str | None, typer.Option(help="For --confirm-live: those of the harvest, or others.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sampled trials and of the prompts' split.")] = TUNE.seed,
    extra: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """Search the policy that pays most on this device, by exact replay of the traces."""
    flags = {"traces": traces, "predictor": predictor, "profile": profile, "out": out, "trials": trials,
             "objectives": objectives, "storage": storage, "workers": workers, "confirm_live": confirm_live,
             "target": target, "drafter": drafter, "prompts": prompts, "seed": seed}  # fmt: skip
    run_stage("tune", flags, extra, json_file)
    note(f"tune: -> {out}")


@app.command()
@handled
def export(
    predictor: Annotated[list[Path], typer.Option(help="Folder of a fit; of several, the one the policies use.")],
    policy: Annotated[list[Path], typer.Option(help="Folder of a tune; may be repeated, one per device.")],
    out: Annotated[Path, typer.Option(help="Folder for the bundle.")],
    target: Annotated[str | None, typer.Option(help="Where the target lies now, if it has moved.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Where the drafter lies now, if it has moved.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Put predictor, policies, profiles and provenance into one deployable folder."""
    flags = {"predictor": predictor, "policy": policy, "out": out, "target": target, "drafter": drafter}
    run_stage("export", flags, None, json_file)
    note(f"export: -> {out}")


@app.command()
@handled
def run(
    pipeline: Annotated[Path, typer.Argument(help="A file of the folder pipelines/.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. harvest.max_positions=2000.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Run unchanged stages too; finished traces and trials are still taken over.")
    ] = False,
    threads: ThreadsOption = None,
) -> None:
    """Run the stages of a pipeline file in order; one whose inputs and settings are unchanged is skipped."""
    set_threads(threads)
    from ecospec_train.pipeline import StageFailed, load_pipeline, run_pipeline

    try:
        run_pipeline(load_pipeline(pipeline, overrides or ()), note, force)
    except StageFailed as failure:
        raise typer.Exit(failure.code) from None


@app.command(hidden=True)
@handled
def stage(name: str, config: Path) -> None:
    """Run one stage from a configuration in JSON: how a pipeline starts a stage of several processes."""
    from ecospec_train.stages import RUNNERS, config_class

    RUNNERS[name](config_class(name).model_validate_json(config.read_text(encoding="utf-8")))


@app.command(hidden=True)
@handled
def assist(config: Path) -> None:
    """Work on the trials of another process, from its configuration in JSON: how `tune --workers` starts the others."""
    from ecospec_train.tune import assist as work

    work(TuneConfig.model_validate_json(config.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
