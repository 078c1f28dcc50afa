"""MLflow: one run per stage with parameters, metrics, artifacts and the run ids of the stages it was made from.

The only module that imports mlflow. Runs go to `sqlite:///mlruns/mlflow.db` under the current directory unless
MLFLOW_TRACKING_URI says otherwise. A stage leaves `tracking.json` beside its output, which the next stage turns into
lineage tags. Whatever goes wrong in here warns once and never stops a stage.
"""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ecospec_runtime.console import note
from ecospec_runtime.errors import UserError
from ecospec_runtime.machine import git_commit, versions

EXPERIMENT = "ecospec"
FILE = "tracking.json"
MAX_PARAM = 500  # characters; longer values are cut
_warned: set[str] = set()


def default_uri() -> str:
    """MLFLOW_TRACKING_URI, or the SQLite file under the current directory, whose folder is created."""
    chosen = os.environ.get("MLFLOW_TRACKING_URI")
    if chosen:
        return chosen
    folder = Path.cwd() / "mlruns"
    folder.mkdir(exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}"


def record_path(output: Path) -> Path:
    """Where the run id of a stage lies: inside its output folder, or beside its output file."""
    return output / FILE if output.is_dir() else output.with_suffix(".tracking.json")


class StageRun:
    """The handle a stage logs through. The run begins with the first thing logged, so a user's mistake costs nothing."""

    def __init__(self, stage: str, parameters: Mapping[str, Any], inputs: Sequence[Path]):
        self.stage, self.run_id = stage, ""
        self._parameters, self._inputs = parameters, inputs
        self._began = int(time.time() * 1000)
        self._failed = int(os.environ.get("LOCAL_RANK", "0")) > 0  # one run per stage, whatever its processes

    def begin(self) -> bool:
        """Open the run if that has not been tried yet; False when tracking does not work."""
        if not self.run_id and not self._failed:
            self.run_id = _attempt(lambda: _start(self.stage, self._parameters, self._inputs, self._began)) or ""
            self._failed = not self.run_id
        return not self._failed

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log every number in a nested mapping; nesting becomes `/`. `step` makes it a point of a curve."""
        flat = dict(_numbers(metrics))
        self._quietly(lambda mlflow: mlflow.log_metrics(flat, step=step))

    def log_artifact(self, path: Path) -> None:
        """Copy a file or a folder to the run."""
        if path.is_dir():
            self._quietly(lambda mlflow: mlflow.log_artifacts(str(path), artifact_path=path.name))
        elif path.is_file():
            self._quietly(lambda mlflow: mlflow.log_artifact(str(path)))

    def register_predictor(self, onnx_file: Path, name: str) -> None:
        """Log `predictor.onnx` as a model and register it as the next version of `name`."""

        def register(mlflow: Any) -> None:
            import onnx

            requirements = [f"{p}=={v}" for p, v in versions().items() if p in ("onnxruntime", "numpy")]
            mlflow.onnx.log_model(
                onnx.load(onnx_file), name="predictor", registered_model_name=name, pip_requirements=requirements
            )

        self._quietly(register)

    def _quietly(self, action: Callable[[Any], None]) -> None:
        if self.begin():
            _attempt(lambda: action(_mlflow()))


@contextmanager
def track(stage: str, parameters: Mapping[str, Any], output: Path, inputs: Sequence[Path] = ()) -> Iterator[StageRun]:
    """Run a stage under an MLflow run. `inputs` are outputs of earlier stages; their run ids become lineage tags."""
    run = StageRun(stage, parameters, inputs)
    status = "FAILED"
    try:
        yield run
        status = "FINISHED"
    except UserError:
        status = ""
        raise
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        if run.run_id or (status and run.begin()):
            _attempt(lambda: _mlflow().end_run(status or "FAILED"))
            if status == "FINISHED" and stage != "export":  # a bundle holds what its manifest lists and nothing else
                _attempt(lambda: _write_record(run, output))


def lightning_logger(run: StageRun) -> Any:
    """A Lightning logger that writes to the stage's run and, like everything here, never fails."""
    from lightning.pytorch.loggers.logger import Logger

    class StageLogger(Logger):
        """Training curves of a stage."""

        name, version = run.stage, "0"

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            """Parameters are logged by the stage."""

        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
            """Log a point of every curve."""
            run.log_metrics({"training": {key: float(value) for key, value in metrics.items()}}, step)

    return StageLogger()


def upstream_runs(inputs: Sequence[Path]) -> dict[str, str]:
    """Stage name -> run id of every input that carries a record; further inputs of a stage are numbered: harvest, harvest.2."""
    found: dict[str, str] = {}
    for path in inputs:
        record = record_path(path)
        if record.is_file():
            data = json.loads(record.read_text(encoding="utf-8"))
            name = str(data["stage"])
            before = sum(key.partition(".")[0] == name for key in found)
            found[f"{name}.{before + 1}" if before else name] = str(data["run_id"])
    return found


def _mlflow() -> Any:
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mlflow
        import mlflow.onnx
    for name in ("mlflow", "alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return mlflow


def _start(stage: str, parameters: Mapping[str, Any], inputs: Sequence[Path], began: int) -> str:
    mlflow = _mlflow()
    uri = default_uri()
    mlflow.set_tracking_uri(uri)
    if mlflow.get_experiment_by_name(EXPERIMENT) is None:
        local = uri.startswith("sqlite:///")
        place = (Path(uri.removeprefix("sqlite:///")).resolve().parent / "artifacts").as_uri() if local else None
        mlflow.create_experiment(EXPERIMENT, artifact_location=place)
    experiment = mlflow.set_experiment(EXPERIMENT)
    created = mlflow.MlflowClient().create_run(experiment.experiment_id, start_time=began, run_name=stage)
    run = mlflow.start_run(run_id=created.info.run_id)
    tags = {"stage": stage, "git_commit": git_commit() or "unknown"}
    tags |= {f"upstream.{name}": run_id for name, run_id in upstream_runs(inputs).items()}
    mlflow.set_tags(tags | {f"version.{name}": version for name, version in versions().items()})
    mlflow.log_params({key: str(value)[:MAX_PARAM] for key, value in _flatten(parameters)})
    return str(run.info.run_id)


def _write_record(run: StageRun, output: Path) -> None:
    path = record_path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"stage": run.stage, "run_id": run.run_id, "tracking_uri": default_uri()}, indent=2))


def _attempt(action: Callable[[], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return action()
    except Exception as error:  # a tracking server can fail in any way; the stage's work must survive all of them
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        if type(error).__name__ not in _warned:
            _warned.add(type(error).__name__)
            note(f"warning: MLflow tracking failed ({line}); the stage goes on without it")
        return None


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)
