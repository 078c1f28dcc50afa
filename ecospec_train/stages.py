"""The five stages, each under an MLflow run of its own. Commands and pipelines both call these.

Importing this module is cheap; a stage's libraries load when it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecospec_runtime.console import leads
from ecospec_train import settings
from ecospec_train.tracking import lightning_logger, track

if TYPE_CHECKING:
    from ecospec_runtime.config import Config
    from ecospec_train.settings import ExportConfig, FitConfig, HarvestConfig, ProfileConfig, TuneConfig


def run_harvest(config: HarvestConfig) -> Any:
    """Traces of the target with its drafter; see `ecospec_train.harvest`."""
    from ecospec_train.harvest import harvest

    with track("harvest", config.model_dump(mode="json"), config.out) as run:
        manifest = harvest(config)
        run.log_metrics({"positions": manifest.rows, "shards": len(manifest.shards), "seconds": manifest.seconds})
        run.log_artifact(config.out / "manifest.json")
    return manifest


def run_fit(config: FitConfig) -> Any:
    """The predictor, registered as a model version; see `ecospec_train.fit`."""
    from ecospec_train.fit import fit

    with track("fit", config.model_dump(mode="json"), config.out, config.traces) as run:
        report = fit(config, logger=lightning_logger(run))
        run.log_metrics(report.metrics)
        for name in ("metrics.json", "acceptance.json", "manifest.json"):
            run.log_artifact(config.out / name)
        run.register_predictor(config.out / "predictor.onnx", model_name(report.predictor))
    return report


def model_name(predictor: Path) -> str:
    """Registered name of a predictor: one model per target and drafter."""
    from ecospec_runtime.predictor import load_manifest

    manifest = load_manifest(predictor)
    parts = [Path(str(side.get("id", ""))).name or "unknown" for side in (manifest.target, manifest.drafter)]
    return re.sub(r"[^\w.-]+", "-", "ecospec-" + "-".join(parts))  # the registry takes no colon


def run_profile(config: ProfileConfig) -> Any:
    """Cost of a pass on this machine; see `ecospec_train.profile`."""
    from ecospec_train.profile import profile

    if not leads():  # a process that shares the target: it measures along, the first one keeps the books
        return profile(config)
    inputs = [] if config.predictor is None else [config.predictor]
    with track("profile", config.model_dump(mode="json"), config.out, inputs) as run:
        result = profile(config)
        run.log_metrics(result.model_dump(mode="json"))
        run.log_artifact(config.out)
    return result


def run_tune(config: TuneConfig) -> Any:
    """The policy that pays most on a profile; see `ecospec_train.tune`."""
    from ecospec_train.storage import shown
    from ecospec_train.tune import tune

    inputs = [config.traces, *config.predictor, config.profile]
    parameters = config.model_dump(mode="json")
    if config.storage is not None:
        parameters["storage"] = shown(config.storage)
    with track("tune", parameters, config.out, inputs) as run:

        def on_trial(number: int, tokens_per_ms: float, result: dict[str, Any]) -> None:
            run.log_metrics({"trial": {"tokens_per_ms": tokens_per_ms} | result}, step=number)

        report = tune(config, on_trial)
        run.log_metrics(report.model_dump(mode="json"))
        for name in ("trials.json", "pareto.png"):
            run.log_artifact(config.out / name)
        run.log_artifact(report.file)
    return report


def run_export(config: ExportConfig) -> Any:
    """The bundle; see `ecospec_train.export`."""
    from ecospec_train.export import export

    inputs = [*config.predictor, *config.policy]
    with track("export", config.model_dump(mode="json"), config.out, inputs) as run:
        bundle = export(config)
        run.log_artifact(config.out)
    return bundle


def config_class(stage: str) -> type[Config]:
    """The configuration class of a stage."""
    found: type[Config] = getattr(settings, f"{stage.capitalize()}Config")
    return found


RUNNERS: dict[str, Callable[[Any], Any]] = {
    "harvest": run_harvest,
    "fit": run_fit,
    "profile": run_profile,
    "tune": run_tune,
    "export": run_export,
}
