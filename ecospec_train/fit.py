"""Train the predictor on traces, judge it on held-out prompts, export it: `ecospec-train fit`.

    report = fit(FitConfig(traces="runs/traces", out="runs/predictor"))

Writes `predictor.onnx`, `predictor.safetensors`, `acceptance.json`, `metrics.json`, `reliability.png` and, last,
`manifest.json`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import onnxruntime
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import Logger

from ecospec_runtime.acceptance import FILE as ACCEPTANCE_FILE
from ecospec_runtime.acceptance import AcceptanceModel
from ecospec_runtime.console import note
from ecospec_runtime.errors import UserError
from ecospec_runtime.predictor import (
    MANIFEST_FILE,
    METRICS_FILE,
    ONNX_FILE,
    WEIGHTS_FILE,
    Predictor,
    PredictorManifest,
    PredictorShapes,
    open_session,
)
from ecospec_train.calibrate import AcceptanceRows, calibrate, choose_share
from ecospec_train.evaluate import Evaluation, choose_shrinkage, routing_table
from ecospec_train.predictor_data import NodeTables, PredictorData, positions_of, split_prompts
from ecospec_train.predictor_export import export_network, sha256
from ecospec_train.predictor_model import PredictorModule, PredictorNetwork
from ecospec_train.reliability import RELIABILITY_PLOT, plot_reliability
from ecospec_train.settings import FitConfig
from ecospec_train.traces import TraceManifest, Traces

BLENDING = 0.15  # share of the fit prompts that the head does not learn from: they say how far it can be trusted


@dataclass(frozen=True)
class FitReport:
    """What `fit` reached and where it is."""

    predictor: Path
    metrics: dict[str, Any]
    seconds: float


class PlainProgress(Callback):
    """A line per epoch, for logs and pipes."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the losses so far."""
        fresh = (trainer.current_epoch + 1) % trainer.check_val_every_n_epoch == 0
        metrics = trainer.callback_metrics.items()
        values = {name: float(v) for name, v in metrics if fresh or not name.startswith("heldout")}
        text = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        if trainer.is_global_zero:
            print(f"fit: epoch {trainer.current_epoch + 1}/{trainer.max_epochs}  {text}", flush=True)


def train(network: PredictorNetwork, data: PredictorData, config: FitConfig, logger: Logger | None) -> int:
    """Train in place; returns the epochs begun. Ctrl-C leaves the last checkpoint in `out/checkpoints` and is raised."""
    steps = config.epochs * max(1, len(data.fit_stream))
    module = PredictorModule(network, steps, config.lr, config.weight_decay, config.max_seconds)
    terminal = sys.stderr.isatty()
    callbacks: list[Callback] = [ModelCheckpoint(config.out / "checkpoints", save_last=True, save_top_k=0)]
    if not terminal:
        callbacks.append(PlainProgress())
    with quiet_lightning():
        trainer = L.Trainer(
            max_epochs=config.epochs, accelerator=config.accelerator, devices=config.devices, logger=logger or False,
            callbacks=callbacks, enable_progress_bar=terminal, enable_model_summary=False, num_sanity_val_steps=0,
            gradient_clip_val=1.0, check_val_every_n_epoch=min(4, config.epochs), log_every_n_steps=20,
            default_root_dir=config.out, use_distributed_sampler=False,
        )  # fmt: skip
        try:
            trainer.fit(module, datamodule=data)
        except SystemExit:
            if trainer.interrupted:
                raise KeyboardInterrupt from None
            raise
    if trainer.interrupted:
        raise KeyboardInterrupt
    if config.max_seconds is not None and trainer.global_step < steps and trainer.is_global_zero:
        note(
            f"fit: stopped by max_seconds={config.max_seconds:g} at step {trainer.global_step} of {steps}; set more, or null for no limit"
        )
    return int(trainer.current_epoch)


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Without the notes on devices, tips and data loading that Lightning prints at every start."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def fit(config: FitConfig, logger: Logger | None = None) -> FitReport:
    """Train, export and judge a predictor. UserError for unusable traces, a folder that cannot be written, a NaN loss."""
    started = time.monotonic()
    traces = [Traces(path) for path in config.traces]
    check_together(traces)
    prepare_folder(config.out)
    torch.manual_seed(config.seed)
    tables = [NodeTables(one, seed=config.seed) for one in traces]
    prompts = [p for one in traces for shard in one.manifest.shards for p in shard.prompt_ids]
    fitted, heldout = split_prompts(prompts, config.heldout, config.seed)
    blending = split_prompts(list(fitted), BLENDING, config.seed)[1] if len(fitted) > 1 else set()
    rows = [AcceptanceRows.collect(table, fitted) for table in tables]
    model = calibrated(traces, rows)
    sources = [(table, model.at(table.sampling)) for table in tables]
    data = PredictorData(sources, fitted, heldout, config.batch_positions, config.node_share, config.unreached_weight,
                         config.seed, blending)  # fmt: skip
    if not len(data.fit_stream) or not len(data.heldout_stream):
        raise UserError(f"{config.traces[0]}: too few positions to fit on and to hold out; harvest more")
    for table in tables:
        if not any(len(positions_of(block, heldout)) for block in table):
            raise UserError(f"{table.traces.path}: holds none of the prompts that are held out; harvest more of them")
    manifest = describe(traces, sorted(heldout), config)
    network = PredictorNetwork(manifest.shapes, config.width)
    network.acceptance.start(model.logistic)
    epochs = train(network, data, config, logger)
    trained = time.monotonic() - started
    share, *others = (choose_share(network, table, own, blending) for table, own in sources)
    network.acceptance.keep(share)
    for calibration, other in zip(model.sampled.values(), others, strict=True):
        calibration.head_share = other / share if share else 1.0  # of what is kept
    export_network(network, config.out)
    predictor = Predictor(open_session(config.out / ONNX_FILE, torch.get_num_threads()), manifest, model)
    manifest.shrinkage = choose_shrinkage(predictor, tables[0], heldout)
    metrics = judge(predictor, tables, fitted, heldout, config.out)
    model = model.model_copy(update={"best": metrics["best_acceptance"], "log_loss": losses_of(metrics["acceptance"])})
    for sampling, calibration in model.sampled.items():
        calibration.log_loss = losses_of(metrics["sampled"][f"{sampling:g}"])
    metrics["fit"] = {"epochs": epochs, "prompts": len(fitted), "positions": data.fit_stream.positions,
                      "acceptance_nodes": sum(len(one.label) for one in rows), "head_share": share, "parameters": sum(p.numel() for p in network.parameters()),
                      "train_seconds": trained, "seconds": time.monotonic() - started}  # fmt: skip
    write_folder(config.out, model, metrics, manifest)
    return FitReport(config.out, metrics, time.monotonic() - started)


def check_together(traces: list[Traces]) -> None:
    """Raise UserError unless all traces are of one target, drafter and set of prompts, each at a temperature of its own."""
    first = traces[0].manifest

    def told(manifest: TraceManifest) -> dict[str, Any]:
        return {"target": manifest.target.fingerprint, "drafter": manifest.drafter.fingerprint, "pool": manifest.pool,
                "prompts": manifest.prompts_sha256, "drafter_temperatures": manifest.drafter_temperatures}  # fmt: skip

    seen = {f"{first.temperature:g}": traces[0].path}
    for one in traces[1:]:
        for name, value in told(one.manifest).items():
            if value != told(first)[name]:
                raise UserError(
                    f"{one.path}: harvested with other {name} than {traces[0].path}; use traces of the same"
                )
        temperature = f"{one.manifest.temperature:g}"
        if temperature in seen:
            raise UserError(f"{one.path}: temperature {temperature}, as {seen[temperature]}; give one of them")
        seen[temperature] = one.path


def calibrated(traces: list[Traces], rows: list[AcceptanceRows]) -> AcceptanceModel:
    """What needs no network, for the temperature of each of the traces. UserError where there is nothing to fit."""
    for one, found in zip(traces, rows, strict=True):
        if not len(found.label):
            raise UserError(
                f"{one.path}: the drafter proposed no candidates in these texts, there is nothing to fit; harvest more, or use "
                "another drafter"
            )
    temperatures = [one.manifest.temperature for one in traces]
    first, *further = (calibrate(found, traces[0].manifest.drafter_temperatures) for found in rows)
    sampled = dict(zip(temperatures[1:], further, strict=True))
    return AcceptanceModel(**dict(first), best="head", fitted_at=temperatures[0], sampled=sampled)


def describe(traces: list[Traces], heldout: list[int], config: FitConfig) -> PredictorManifest:
    """The manifest of a predictor that is about to be fitted; its hashes come last."""
    source, target = traces[0].manifest, traces[0].manifest.target
    shapes = PredictorShapes(hidden=target.hidden_size, state=source.drafter.width, layers=target.moe_layers,
                             experts=target.experts, top_k=target.top_k)  # fmt: skip
    return PredictorManifest(
        shapes=shapes, target=target.model_dump(), drafter=source.drafter.model_dump(), pool=source.pool,
        temperature=source.temperature, traces=traces[0].fingerprint,
        further_traces=tuple(one.fingerprint for one in traces[1:]), heldout_prompts=heldout, files={},
        config=config.model_dump(mode="json"), versions=versions(),
    )  # fmt: skip


def judge(
    predictor: Predictor, tables: list[NodeTables], fitted: set[int], heldout: set[int], out: Path
) -> dict[str, Any]:  # fmt: skip
    """Held-out metrics, with the best acceptance kind and the figures of `bars`; of all but the first tables, acceptance alone.

    Plots how reliable each kind is into `out`, where there is matplotlib.
    """
    found: dict[str, Evaluation] = {}
    for table in tables:
        baseline = None if found else routing_table(table, fitted, heldout, predictor.shapes)
        evaluation = Evaluation(predictor, baseline, table.traces.manifest.drafter_temperatures, table.sampling)
        evaluation.run(table, heldout)
        found[f"{table.sampling:g}"] = evaluation
    plot_reliability({f"held-out text, T = {at}": one.judged() for at, one in found.items()}, out / RELIABILITY_PLOT)
    first, *further = found
    metrics = found[first].metrics()
    metrics["sampled"] = {at: found[at].acceptance() for at in further}
    losses = losses_of(metrics["acceptance"])
    metrics["best_acceptance"] = min(losses, key=losses.__getitem__)
    metrics["bars"] = bars(metrics)
    return metrics


def losses_of(accepted: dict[str, dict[str, float]]) -> dict[str, float]:
    """Log loss by kind."""
    return {kind: value["log_loss"] for kind, value in accepted.items()}


def bars(metrics: dict[str, Any]) -> dict[str, float]:
    """The figures that decide whether a predictor is good enough: see `misses`."""
    losses = losses_of(metrics["acceptance"])
    best = losses[metrics["best_acceptance"]]
    return {
        "misses_saved_vs_token_table": metrics["routing_misses_saved"]["token_table"]["nodes"],
        "union_error": max(value["error"] for value in metrics["union"].values()),
        "acceptance_loss_vs_raw": best / max(losses["raw"], 1e-9),
        "acceptance_loss_vs_logistic": best / max(losses["logistic"], 1e-9),
    }


def misses(metrics: dict[str, Any]) -> list[str]:
    """One line per bar that the predictor does not reach: 30 % fewer misses than the table, 4 % union error, 0.7x raw."""
    reached, found = metrics["bars"], []
    if reached["misses_saved_vs_token_table"] < 0.30:
        found.append(
            f"saves {reached['misses_saved_vs_token_table']:.0%} of the token table's routing misses (want 30 %)"
        )
    if reached["union_error"] > 0.04:
        found.append(f"predicted union is off by {reached['union_error']:.1%} (want at most 4 %)")
    if reached["acceptance_loss_vs_raw"] > 0.7:
        found.append(f"acceptance log loss is {reached['acceptance_loss_vs_raw']:.2f}x the drafter's own (want 0.7x)")
    return found


def prepare_folder(out: Path) -> None:
    """Create the folder and drop a manifest of an earlier fit, so that a stopped one is never taken for done."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / MANIFEST_FILE).unlink(missing_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); choose another --out") from error


def write_folder(out: Path, model: AcceptanceModel, metrics: dict[str, Any], manifest: PredictorManifest) -> None:
    """Write the JSON files, the manifest last and with the hashes of all others."""
    (out / ACCEPTANCE_FILE).write_text(model.model_dump_json(indent=2) + "\n")
    (out / METRICS_FILE).write_text(json.dumps(metrics, indent=2) + "\n")
    files = {name: sha256(out / name) for name in (ONNX_FILE, WEIGHTS_FILE, ACCEPTANCE_FILE, METRICS_FILE)}
    temporary = out / f".{MANIFEST_FILE}"
    temporary.write_text(manifest.model_copy(update={"files": files}).model_dump_json(indent=2) + "\n")
    os.replace(temporary, out / MANIFEST_FILE)


def versions() -> dict[str, str]:
    """Versions that may matter to whoever reproduces the fit."""
    return {"python": platform.python_version(), "torch": torch.__version__, "lightning": L.__version__,
            "onnxruntime": onnxruntime.__version__}  # fmt: skip
