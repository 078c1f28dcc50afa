"""`ecospec-train run NAME.yaml [key=value ...]`: all stages in order, from one file.

name: my-model
target: owner/model          # folder or hub id
drafter: owner/head          # or ngram, which needs no weights
prompts: prompts.jsonl
out: runs/my-model           # gets traces/ predictor/ profile.json policy/ bundle/
harvest: {max_positions: 20000}
harvest_sampled: {temperature: 0.7, max_positions: 5000}  # may be left out: traces-0.7/, of sampled text, for fit to learn from too
fit: {}                      # keys of a stage are the fields of its configuration class
profile: {}
tune: {trials: 60}
export: {}

A stage that is unchanged since it finished is skipped: `ecospec_train.stage_record`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from ecospec_runtime.config import Config
from ecospec_runtime.errors import UserError
from ecospec_train.stage_record import FOLDERS, begin, finish, why_stale
from ecospec_train.stages import RUNNERS, config_class

STAGES = ("harvest", "harvest_sampled", "fit", "profile", "tune", "export")
SAMPLED = 0.7  # temperature of `harvest_sampled` that does not say


class PipelineConfig(Config):
    """A pipeline file. What stages share stands once; a stage's own section may override it."""

    name: str
    target: str
    drafter: str
    prompts: str
    out: Path
    harvest: dict[str, Any] = Field(default_factory=dict)
    harvest_sampled: dict[str, Any] | None = None  # what differs from `harvest`
    fit: dict[str, Any] = Field(default_factory=dict)
    profile: dict[str, Any] = Field(default_factory=dict)
    tune: dict[str, Any] = Field(default_factory=dict)
    export: dict[str, Any] = Field(default_factory=dict)


class StageFailed(Exception):
    """A stage in another process ended with this exit code; it has told the user why."""

    def __init__(self, code: int):
        super().__init__(f"exit code {code}")
        self.code = code


@dataclass(frozen=True)
class Stage:
    """One step of a pipeline, ready to run."""

    name: str
    config: Config
    inputs: tuple[Path, ...]  # outputs of earlier stages
    output: Path

    @property
    def runner(self) -> str:
        """What runs it, of `stages.RUNNERS`."""
        return runner_of(self.name)


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> list[Stage]:
    """Read a pipeline file and apply `key=value` or `stage.key=value` overrides. Raises UserError naming key and file."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; see the folder pipelines/ for examples") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}: not valid YAML{where}; check its indentation and quotes") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a mapping of keys to values; see pipelines/quickstart.yaml")
    for text in overrides:
        apply_override(values, text)
    try:
        config = PipelineConfig.model_validate(
            {k: {} if v is None and k in STAGES and k != "harvest_sampled" else v for k, v in values.items()}
        )
        return plan(config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def apply_override(values: dict[str, Any], text: str) -> None:
    """Set one `key=value`, dots descend; the value is read as YAML. Raises UserError on anything else."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"override '{text}' is not key=value, as in harvest.max_positions=2000")
    *parents, last = key.strip().split(".")
    place: Any = values
    for part in parents:
        if place.get(part) is None:
            place[part] = {}
        place = place[part]
        if not isinstance(place, dict):
            raise UserError(f"override '{text}': '{part}' is a value, not a section")
    try:
        place[last] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"override '{text}': the value is not valid YAML; quote it") from None


def plan(config: PipelineConfig) -> list[Stage]:
    """All stages with their configurations validated before the first one runs."""
    out, sampled = config.out, config.harvest_sampled
    if sampled is not None:
        shared = {key: value for key, value in config.harvest.items() if key != "out"}
        sampled = shared | {"temperature": SAMPLED} | sampled
    traces, predictor, profile, policy = out / "traces", out / "predictor", out / "profile.json", out / "policy"
    models = {"target": config.target, "drafter": config.drafter}
    harvest = models | {"prompts": config.prompts, "out": traces, "resume": True}
    fitted_on = (
        [traces] if sampled is None else [traces, sampled.setdefault("out", f"{traces}-{sampled['temperature']}")]
    )
    defaults: dict[str, dict[str, Any]] = {
        "harvest": harvest,
        "harvest_sampled": harvest,
        "fit": {"traces": fitted_on, "out": predictor},
        "profile": models | {"out": profile, "predictor": predictor},
        "tune": {"traces": traces, "predictor": predictor, "profile": profile, "out": policy},
        "export": {"predictor": config.tune.get("predictor", predictor), "policy": policy, "out": out / "bundle"},
    }
    if config.tune.get("confirm_live"):  # decodes with what was profiled
        defaults["tune"] |= {"prompts": config.prompts} | {k: config.profile.get(k, models[k]) for k in models}
    stages = []
    for name in STAGES:
        own = sampled if name == "harvest_sampled" else getattr(config, name)
        if own is None:
            continue
        section = stage_config(name, defaults[name] | own)
        stages.append(Stage(name, section, paths_of(section), getattr(section, "out")))  # noqa: B009
    if sampled is not None:
        check_sampled(stages[0].config, stages[1].config)
    return stages


def check_sampled(harvest: Config, sampled: Config) -> None:
    """Raise UserError for a `harvest_sampled` whose traces `fit` would refuse beside those of `harvest`."""
    for key in ("temperature", "out"):
        if getattr(harvest, key) == getattr(sampled, key):
            raise UserError(f"section 'harvest_sampled': '{key}' is that of 'harvest'; give another, or leave it out")
    for key in ("target", "drafter", "prompts", "pool", "drafter_temperatures"):
        if getattr(harvest, key) != getattr(sampled, key):
            raise UserError(f"section 'harvest_sampled': '{key}' is not that of 'harvest'; leave it out")


def paths_of(section: Config) -> tuple[Path, ...]:
    """The outputs of earlier stages that a stage reads."""
    found: list[Path] = []
    for key in FOLDERS:
        value = getattr(section, key, None)
        found += value if isinstance(value, tuple) else [value] if value else []
    return tuple(found)


def runner_of(name: str) -> str:
    """`harvest_sampled` is a harvest."""
    return name.partition("_")[0]


def stage_config(name: str, values: Mapping[str, Any]) -> Config:
    """Validate a stage's section; a mistake names the section."""
    try:
        return config_class(runner_of(name)).model_validate(dict(values))
    except UserError as error:
        raise UserError(f"section '{name}': {error}") from None


def run_pipeline(stages: Sequence[Stage], announce: Callable[[str], None] = print, force: bool = False) -> None:
    """Run the stages in order, those that are unchanged since they last finished excepted (`force`: none)."""
    for number, stage in enumerate(stages, 1):
        reason = "forced" if force else why_stale(stage)
        if reason is None:
            announce(f"[{number}/{len(stages)}] {stage.name}: unchanged, skipped")
            continue
        announce(f"[{number}/{len(stages)}] {stage.name} -> {stage.output} ({reason})")
        record = begin(stage)
        if getattr(stage.config, "devices", 1) > 1:
            run_apart(stage)
        else:
            RUNNERS[stage.runner](stage.config)
        finish(stage, record)


def run_apart(stage: Stage) -> None:
    """Run a stage in a process of its own: Lightning starts its further ranks by repeating the command line.

    Raises StageFailed with the exit code of a stage that has said itself what is wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{stage.name}.json"
        path.write_text(stage.config.model_dump_json(), encoding="utf-8")
        process = subprocess.Popen([sys.executable, "-m", "ecospec_train.cli", "stage", stage.runner, str(path)])
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:  # the stage got it too, and is saving what it has
                continue
    if code:
        raise StageFailed(code if code > 0 else 128 - code)
