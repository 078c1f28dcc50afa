"""Search the policy that pays most on one device: an Optuna study over exact replays of the traces.

The points of `search_space.yardsticks` are tried first, then Optuna searches. Tuning uses prompts that the predictor was not
fitted on, since it flatters itself on the others; part of them is set aside to confirm the choice (`choice`), by replay and,
if asked for, by decoding (`confirm`). `off` is the answer when nothing beats it by more than the noise.

The study lives in a storage that outlives the process (`storage`) and is named after its inputs: a further run continues it,
any number of workers may share it (`workers`), and one storage holds as many studies as there are targets and devices.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from ecospec_runtime.bundle import file_sha256
from ecospec_runtime.config import read_model
from ecospec_runtime.console import leads, note, write_json
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.policies import PolicySpec
from ecospec_runtime.predictor import MANIFEST_FILE, Predictor, same_drafter
from ecospec_train import search_space
from ecospec_train.choice import Inputs, Settings, TuneReport, conclude, trial_table
from ecospec_train.pareto import PLOT, plot_front
from ecospec_train.replay import ReplayRows, replay, replay_at_best_price
from ecospec_train.replay_rows import PromptRows, check_lineage
from ecospec_train.search_space import Space, suggest, yardsticks
from ecospec_train.settings import TuneConfig
from ecospec_train.steps import Steps
from ecospec_train.storage import MEMORY, default_storage, open_storage, shown
from ecospec_train.traces import Traces
from ecospec_train.workers import Work, finished, is_fixed

MIN_PROMPTS = 4  # fewer unseen prompts than this are not enough to tune and confirm on
SEED_STEP = 1_000_003  # between the trials' seeds of one `seed` and those of the next
FIRST_PART = 0.25  # of the positions, after which a trial may be pruned

OnTrial = Callable[[int, float, dict[str, Any]], None]  # number, tokens per ms, the replay's result


@dataclass(frozen=True)
class Study:
    """An open study and what its trials are replayed on."""

    study: optuna.Study
    storage: BaseStorage
    space: Space
    inputs: Inputs
    config: TuneConfig

    @property
    def points(self) -> list[dict[str, Any]]:
        """The points that are always tried."""
        return yardsticks(self.space)

    @property
    def work(self) -> Work:
        """What there is to do: `config.trials` trials, these points among them."""
        return Work(self.study, self.storage, self.points, max(self.config.trials, len(self.points)))


def tune(config: TuneConfig, on_trial: OnTrial | None = None) -> TuneReport:
    """Run or continue the study, confirm its best policy and write `out/policies/<slug>.json`. UserError for bad input.

    `on_trial` is called after every trial of this process, for experiment tracking.
    """
    check_live(config)
    study = prepare(config)
    with helpers(config):
        tuning = study.inputs.tuning()
        run_trials(study, tuning, on_trial)
    report = conclude(study.study, study.points, tuning, study.inputs, settings(config, study.inputs))
    write_json(config.out / "trials.json", trial_table(study.study))
    if config.objectives == "pareto":
        plot_front(study.study, config.out / PLOT)
    return report


def settings(config: TuneConfig, inputs: Inputs) -> Settings:
    """How to conclude: by replay, or by decoding as well."""
    if not config.confirm_live:
        return Settings(config.out, config.margin)
    from ecospec_train.confirm import live_settings, measure_live  # brings the models' libraries

    return Settings(
        config.out, config.margin, config.confirm_live, partial(measure_live, live_settings(config), inputs)
    )


def assist(config: TuneConfig) -> None:
    """Work on the study of another process, until all of its trials are finished."""
    study = prepare(config)
    run_trials(study, study.inputs.tuning(), None)


def check_live(config: TuneConfig) -> None:
    """Raise UserError, before hours of work, if decoding is asked for and something that it needs is not given."""
    for name in ("target", "drafter", "prompts"):
        if config.confirm_live and getattr(config, name) is None:
            raise UserError(f"--confirm-live decodes with the model: give --{name} too")


def prepare(config: TuneConfig) -> Study:
    """Read and check the inputs and open the study."""
    profile = load_profile(config.profile)
    predictors = load_predictors(config.predictor)
    traces = Traces(config.traces)
    profile.check_layers(traces.manifest.target.moe_layers)
    for folder, predictor in zip(config.predictor, predictors.values(), strict=True):
        same_drafter(profile.drafter, f"profile {config.profile}", predictor.manifest, folder)
        check_lineage(traces, predictor)
    prepare_folder(config.out)
    where = config.storage or default_storage(config.out)
    if config.workers > 1 and where in MEMORY:
        raise UserError(
            f"--workers {config.workers}: processes cannot share a storage in memory; give another --storage"
        )
    tuning, confirming = split_prompts(traces, list(predictors.values()), config)
    target = traces.manifest.target
    space = Space(traces.manifest.pool.depth, target.top_k, target.experts, tuple(predictors))
    storage = open_storage(where)
    study = open_study(storage, config, profile, traces, space)
    note(
        f"tune: study {study.study_name} in {shown(where)}, {len(finished(study))} trials finished; {len(tuning)} prompts to "
        f"tune on, {len(confirming)} to confirm on"
    )
    ids = {name: predictor_id(folder) for name, folder in zip(predictors, config.predictor, strict=True)}
    inputs = Inputs(traces, predictors, ids, profile, tuning, confirming, config.positions, config.out)
    return Study(study, storage, space, inputs, config)


def load_profile(path: Path) -> DeviceProfile:
    """Read a device profile; UserError names file and key."""
    return read_model(path, DeviceProfile, "run `ecospec-train profile` again")


def load_predictors(folders: Sequence[Path]) -> dict[str, Predictor]:
    """Predictors by name: that of their folder, or the whole path where two folders have one name."""
    names = [folder.name for folder in folders]
    labels = [folder.name if names.count(folder.name) == 1 else str(folder) for folder in folders]
    if len(set(labels)) < len(labels):
        raise UserError(f"--predictor {max(labels, key=labels.count)}: given twice; give each variant once")
    return {label: Predictor.from_folder(folder) for label, folder in zip(labels, folders, strict=True)}


def predictor_id(folder: Path) -> str:
    """Hash of a predictor's manifest, which holds the hashes of its files: what a policy says it was tuned with."""
    return file_sha256(folder / MANIFEST_FILE)


def prepare_folder(out: Path) -> None:
    """Create the output folder, or say in one line why not."""
    try:
        (out / "policies").mkdir(parents=True, exist_ok=True)
        probe = out / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); choose another --out") from None


def split_prompts(traces: Traces, predictors: Sequence[Predictor], config: TuneConfig) -> tuple[set[int], set[int]]:
    """Prompts to tune on and to confirm on: those that no fit on these traces has seen."""
    everything = {prompt for shard in traces.manifest.shards for prompt in shard.prompt_ids}
    prompts = set(everything)
    for predictor in predictors:
        if predictor.manifest.fitted_on(traces.fingerprint):
            prompts &= set(predictor.manifest.heldout_prompts)
    if len(prompts) < min(MIN_PROMPTS, len(everything)):
        note(f"tune: the fit held out only {len(prompts)} prompts; tuning on all of them, which flatters the result")
        prompts = everything
    if len(prompts) < 2:
        raise UserError(f"{config.traces}: {len(prompts)} prompt(s), at least 2 are needed; harvest more")
    order = np.random.default_rng(config.seed).permutation(sorted(prompts)).tolist()
    confirming = order[: min(len(order) - 1, max(1, round(config.confirm * len(order))))]
    return set(order) - set(confirming), set(confirming)


def open_study(
    storage: BaseStorage, config: TuneConfig, profile: DeviceProfile, traces: Traces, space: Space
) -> optuna.Study:  # fmt: skip
    """Create the study of these inputs, or continue it."""
    manifests = [(folder / MANIFEST_FILE).read_text(encoding="utf-8") for folder in config.predictor]
    inputs = json.dumps([
        traces.fingerprint, profile.model_dump(), manifests, config.positions, config.confirm, config.seed,
        config.objectives, space, yardsticks(space), search_space.SEARCHED, search_space.MIN_REACHES, search_space.PAUSES,
    ])  # fmt: skip
    name = f"ecospec-{hashlib.sha256(inputs.encode()).hexdigest()[:16]}"
    up, down = StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE
    directions = [up] if config.objectives == "rate" else [up, down]
    pruner = optuna.pruners.MedianPruner(n_startup_trials=len(yardsticks(space)))
    return optuna.create_study(
        storage=storage, study_name=name, directions=directions, load_if_exists=True, pruner=pruner
    )


def run_trials(study: Study, rows: dict[str, ReplayRows], on_trial: OnTrial | None) -> None:
    """Bring the study to its number of trials, together with other workers."""
    config, profile, work = study.config, study.inputs.profile, study.work
    before = finished(study.study)
    off = replay(PolicySpec(name="off"), next(iter(rows.values())), profile).tokens_per_ms
    best = max([off, *(t.user_attrs["result"]["tokens_per_ms"] for t in before if "result" in t.user_attrs)])
    first = {name: beginning(some) for name, some in rows.items()}

    def objective(trial: optuna.Trial) -> float | tuple[float, float]:
        nonlocal best
        # Workers, and a run that continues, must not draw the same points: every trial has a seed of its own.
        study.study.sampler = optuna.samplers.TPESampler(
            seed=(config.seed * SEED_STEP + trial.number) % 2**32, n_startup_trials=search_space.START_UP
        )
        spec, scale, name = suggest(trial, study.space)
        if config.prune and config.objectives == "rate":
            trial.report(replay(priced(spec, best * scale), first[name], profile).tokens_per_ms, step=1)
            if trial.should_prune() and not is_fixed(trial):
                raise optuna.TrialPruned
        _, result = replay_at_best_price(spec, rows[name], profile, start=best, scale=scale)
        trial.set_user_attr("result", result.to_dict())
        best = max(best, result.tokens_per_ms)
        return result.tokens_per_ms if config.objectives == "rate" else (result.accept_length, result.experts_per_layer)

    with Steps("tune", work.total, len(before)) as steps:

        def after(trial: FrozenTrial, done: int) -> None:
            steps.advance(f"best {best / off:.3f}x plain decoding", done)
            result = trial.user_attrs.get("result")
            if on_trial is not None and result is not None:
                on_trial(trial.number, result["tokens_per_ms"], result)

        work.run(objective, after)


def beginning(rows: ReplayRows) -> ReplayRows:
    """The first prompts, up to `FIRST_PART` of the positions."""
    kept: list[PromptRows] = []
    count = 0
    for prompt in rows.prompts:
        if kept and count >= FIRST_PART * len(rows):
            break
        kept.append(prompt)
        count += len(prompt)
    return replace(rows, prompts=kept)


def priced(spec: PolicySpec, price: float) -> PolicySpec:
    """A policy with a first guess of its price, if it has one."""
    if spec.name != "throughput":
        return spec
    return spec.model_copy(update={"parameters": {**spec.parameters, "price": price}})


@contextmanager
def helpers(config: TuneConfig) -> Iterator[None]:
    """The other processes of `--workers`, which end when everything is finished; silent, like ranks that do not lead."""
    if config.workers == 1 or not leads():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tune.json"
        path.write_text(config.model_dump_json(), encoding="utf-8")
        path.chmod(0o600)  # a storage's URL may hold a password
        command = [sys.executable, "-m", "ecospec_train.cli", "assist", str(path)]
        started = [subprocess.Popen(command, env=os.environ | {"RANK": str(i)}) for i in range(1, config.workers)]
        try:
            yield
            for process in started:
                if process.wait() != 0:
                    note(f"tune: warning: a worker ended with exit code {process.returncode}; the others did its work")
        finally:
            for process in started:
                process.terminate()
                process.wait()
