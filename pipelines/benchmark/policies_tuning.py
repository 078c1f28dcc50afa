"""The part of the comparison of policies that replays: traces at each temperature, the searches, and what is kept of them.

Found policies are written to `RUN/policies-<T>.json` one by one, so that neither a killed search nor a failed decode loses them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field

from ecospec_runtime.checkpoint import fingerprint as weights_of
from ecospec_runtime.checkpoint import resolve_folder
from ecospec_runtime.config import Config, read_model
from ecospec_runtime.console import note, write_json
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.policies import PolicySpec, parse_policy
from ecospec_runtime.predictor import Predictor
from ecospec_runtime.prompts import fingerprint_prompts, read_prompts
from ecospec_train.harvest import HarvestConfig, harvest
from ecospec_train.replay import ReplayResult, ReplayRows, load_rows, replay
from ecospec_train.search_space import Space
from ecospec_train.steps import Steps
from ecospec_train.traces import MANIFEST, TraceManifest, Traces, read_manifest
from ecospec_train.tune import TuneConfig, predictor_id, split_prompts
from pipelines.benchmark.contest import ENTRIES, OURS, tune_entry

OFF = PolicySpec(name="off")
ORACLE = "oracle"  # `OURS` that knows the true routing, and pays nothing for it


class Settings(Config):
    """What is compared."""

    run: Path  # a folder that `make quickstart` left
    drafter: str
    source_target: str | None = None  # the target of the run's traces, to harvest with; None: where they say it is
    temperatures: tuple[float, ...] = Field(min_length=1)
    trials: int = Field(default=60, ge=1)  # of each policy and temperature
    tokens: int = Field(default=48, ge=2)  # of each decoded text
    repeats: int = Field(default=1, ge=1)
    positions: int = Field(default=2000, ge=1)  # most to tune on, and to confirm on
    count: int | None = Field(default=None, ge=2)  # decode with the first prompts only
    seed: int = Field(default=0, ge=0, lt=2**32)
    reuse: bool = False  # policies that an earlier run has found

    @property
    def profile_file(self) -> Path:
        """The device profile of the run."""
        return self.run / "profile.json"


class Found(Config):
    """`RUN/policies-<T>.json`."""

    made_with: dict[str, Any]
    results: dict[str, dict[str, Any]]  # by entry: the replay of the best policy on the prompts it was tuned on


@dataclass(frozen=True)
class Material:
    """What the searches of one temperature are given."""

    settings: Settings
    traces: Traces
    predictor: Predictor
    profile: DeviceProfile
    tuning: set[int]  # prompts
    confirming: set[int]

    @property
    def space(self) -> Space:
        """What bounds the searches."""
        target = self.traces.manifest.target
        return Space(self.traces.manifest.pool.depth, target.top_k, target.experts)

    @property
    def free(self) -> DeviceProfile:
        """A device that predicts in no time."""
        return self.profile.predicting_for_nothing()

    @property
    def file(self) -> Path:
        """Where found policies are kept."""
        return self.settings.run / f"policies-{self.traces.manifest.temperature:g}.json"

    @cached_property
    def made_with(self) -> dict[str, Any]:
        """What a search depends on."""
        chosen = {key: getattr(self.settings, key) for key in ("trials", "seed", "positions")}
        profile = hashlib.sha256(self.profile.model_dump_json().encode()).hexdigest()
        predictor = predictor_id(self.settings.run / "predictor")
        return chosen | {"profile": profile, "predictor": predictor, "traces": self.traces.fingerprint}

    @cached_property
    def tuning_rows(self) -> ReplayRows:
        """Scored positions to tune on: whole prompts of `tuning`, until there are enough."""
        return load_rows(self.traces, self.predictor, self.tuning, self.settings.positions)

    @cached_property
    def confirming_rows(self) -> ReplayRows:
        """The same of `confirming`."""
        return load_rows(self.traces, self.predictor, self.confirming, self.settings.positions)


def prepare(settings: Settings, predictor: Predictor, profile: DeviceProfile, temperature: float) -> Material:
    """Traces at a temperature, harvested if the run has none, with their prompts divided as `tune` does it."""
    traces = traces_at(settings, predictor, temperature)
    folder = settings.run / "predictor"
    config = TuneConfig(
        traces=traces.path, predictor=(folder,), profile=settings.profile_file, out=settings.run, seed=settings.seed
    )
    return Material(settings, traces, predictor, profile, *split_prompts(traces, [predictor], config))


def traces_at(settings: Settings, predictor: Predictor, temperature: float) -> Traces:
    """The run's own traces, those at another temperature that its fit had a part in, or those of its held-out prompts, harvested
    once. UserError."""
    own = Traces(settings.run / "traces")
    manifest = own.manifest
    if manifest.temperature == temperature:
        return own
    source = settings.source_target or manifest.target.id
    if weights_of(resolve_folder(source, "target")) != manifest.target.fingerprint:
        raise UserError(f"target {source}: not the one of {own.path}; name that with --source-target")
    out = settings.run / f"traces-{temperature:g}"
    if (out / MANIFEST).exists() and read_manifest(out).complete:
        found = Traces(out)
        if predictor.manifest.fitted_on(found.fingerprint):
            return found
    prompts = out.with_name(f"{out.name}.jsonl")
    write_heldout(settings.run / "harvest.jsonl", prompts, own, predictor)
    existed = out.exists()
    try:
        harvest(harvest_config(manifest, source, settings.drafter, prompts, out, temperature))
    except UserError as error:
        raise UserError(f"{error} (or remove {out})" if existed else str(error)) from None
    return Traces(out)


def harvest_config(
    manifest: TraceManifest, target: str, drafter: str, prompts: Path, out: Path, temperature: float
) -> HarvestConfig:  # fmt: skip
    """The settings of a harvest, at another temperature; one that was stopped goes on."""
    same = set(HarvestConfig.model_fields) & set(TraceManifest.model_fields) - {"target", "drafter"}
    other = {"target": target, "drafter": drafter, "prompts": str(prompts), "out": out, "temperature": temperature}
    return HarvestConfig(**(manifest.model_dump(include=same) | other | {"devices": 1, "resume": True}))


def write_heldout(source: Path, path: Path, traces: Traces, predictor: Predictor) -> None:
    """Write those of the harvest's prompts that the predictor's fit has not seen. UserError for other prompts or none."""
    prompts = read_prompts(source)
    if fingerprint_prompts(prompts) != traces.manifest.prompts_sha256:
        raise UserError(f"{source}: not the prompts that {traces.path} was harvested from")
    if not predictor.manifest.fitted_on(traces.fingerprint):
        raise UserError(f"{traces.path}: not what the predictor was fitted on, so nobody knows what it has seen")
    heldout = predictor.manifest.heldout_prompts
    if not heldout:
        raise UserError(f"{traces.path}: the fit held out no prompt; `ecospec-train fit --heldout 0.3` does")
    lines = [json.dumps({"prompt": prompts[i].text}) + "\n" for i in sorted(heldout)]
    path.write_text("".join(lines), encoding="utf-8")


def find(material: Material) -> Found:
    """The best policy of every entry, and the oracle's, by replay of the tuning prompts; each is kept as soon as found."""
    settings, results = material.settings, begun(material)
    temperature = material.traces.manifest.temperature
    missing = [entry for entry in ENTRIES if entry.name not in results]
    if not missing and ORACLE in results:
        note(f"policies: temperature {temperature:g} as {material.file} has it")
        return Found(made_with=material.made_with, results=results)
    rows = material.tuning_rows
    off = replay(OFF, rows, material.profile).tokens_per_ms
    note(f"policies: temperature {temperature:g}, {len(rows)} positions of {len(rows.prompts)} prompts to tune on")
    with Steps("policies: tuning", len(ENTRIES) + 1, len(results)) as steps:

        def keep(name: str, result: ReplayResult) -> None:
            results[name] = result.to_dict()
            write_json(material.file, Found(made_with=material.made_with, results=results).model_dump())
            steps.advance(f"{name} {result.tokens_per_ms / off:.3f}x plain decoding")

        for entry in missing:
            keep(
                entry.name, tune_entry(entry, rows, material.profile, material.space, settings.trials, settings.seed)[1]
            )
        keep(ORACLE, bound(material, rows, parse_policy(results[OURS.name]["policy"])))
    return Found(made_with=material.made_with, results=results)


def bound(material: Material, rows: ReplayRows, ours: PolicySpec) -> ReplayResult:
    """What `OURS` could reach: the better of a search of its own and of `ours`, with the true routing at no cost."""
    settings, free = material.settings, material.free
    _, searched = tune_entry(OURS, rows, free, material.space, settings.trials, settings.seed, oracle=True)
    return max(searched, replay(ours, rows, free, oracle=True), key=lambda result: result.tokens_per_ms)


def begun(material: Material) -> dict[str, dict[str, Any]]:
    """With `reuse`, what an earlier run has found. UserError if it was given something else."""
    path = material.file
    if not material.settings.reuse or not path.exists():
        return {}
    found = read_model(path, Found, "leave out --reuse to tune again")
    for key, now in material.made_with.items():
        before = found.made_with.get(key)
        if before != now:
            said = (str(value)[:12] for value in (before, now))
            raise UserError(
                f"{path}: tuned with another {key} ({' before, '.join(said)} now); leave out --reuse to tune again"
            )
    return found.results


def specs_of(found: Found) -> dict[str, PolicySpec]:
    """The policies to decode with, by entry; the oracle cannot be."""
    return {entry.name: parse_policy(found.results[entry.name]["policy"]) for entry in ENTRIES}


def confirm(material: Material, found: Found) -> dict[str, ReplayResult]:
    """Every policy, `off` and the oracle replayed on prompts that nothing was tuned on."""
    rows, profile = material.confirming_rows, material.profile
    results = {name: replay(spec, rows, profile) for name, spec in ({"off": OFF} | specs_of(found)).items()}
    ideal = parse_policy(found.results[ORACLE]["policy"])
    return results | {ORACLE: replay(ideal, rows, material.free, oracle=True)}
