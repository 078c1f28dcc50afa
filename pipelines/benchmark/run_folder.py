"""What `make quickstart` or `ecospec-train run` left in a folder, with its prompts divided as `tune` divides them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.predictor import Predictor, same_drafter
from ecospec_train.replay import ReplayRows, load_rows
from ecospec_train.search_space import Space
from ecospec_train.traces import Traces
from ecospec_train.tune import TuneConfig, load_profile, split_prompts


@dataclass(frozen=True)
class RunFolder:
    """Traces, predictor and profile of one run."""

    path: Path
    traces: Traces
    predictor: Predictor
    profile: DeviceProfile
    tuning: set[int]  # prompts
    confirming: set[int]  # prompts
    positions: int  # most of either half

    @property
    def layers(self) -> int:
        """MoE layers."""
        return self.traces.manifest.target.moe_layers

    @property
    def top_k(self) -> int:
        """Experts of a token in a layer."""
        return self.traces.manifest.target.top_k

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return self.traces.manifest.target.experts

    @property
    def space(self) -> Space:
        """What bounds a search of policies."""
        return Space(self.traces.manifest.pool.depth, self.top_k, self.experts)

    def halves(self, traces: Traces | None = None, predictor: Predictor | None = None) -> tuple[ReplayRows, ReplayRows]:
        """Scored positions of the tuning and of the confirming prompts, by default with the run's own traces and predictor."""
        sources = traces or self.traces, predictor or self.predictor
        tuning, confirming = (load_rows(*sources, half, self.positions) for half in (self.tuning, self.confirming))
        return tuning, confirming


def tune_config(path: Path, out: Path, seed: int, positions: int) -> TuneConfig:
    """How `tune` would be told of a run's files; UserError for one that is missing."""
    for name in ("traces", "predictor", "profile.json"):
        if not (path / name).exists():
            raise UserError(f"{path / name}: missing; --run wants a folder that `make quickstart` has finished")
    return TuneConfig(
        traces=path / "traces", predictor=(path / "predictor",), profile=path / "profile.json", out=out, seed=seed,
        positions=positions,
    )  # fmt: skip


def open_run(path: Path, positions: int, seed: int = 0) -> RunFolder:
    """Read a run folder. UserError for anything missing, damaged or of another model."""
    config = tune_config(path, path, seed, positions)
    traces, predictor, profile = (
        Traces(config.traces),
        Predictor.from_folder(config.predictor[0], threads=1),
        load_profile(config.profile),
    )
    same_drafter(profile.drafter, f"profile {config.profile}", predictor.manifest, config.predictor[0])
    tuning, confirming = split_prompts(traces, [predictor], config)
    return RunFolder(path, traces, predictor, profile, tuning, confirming, positions)
