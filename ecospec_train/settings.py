"""Settings of the stages, with their defaults: what a pipeline file may say, and what the commands' `--help` shows.

Importing this module is cheap.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ecospec_runtime.acceptance import TEMPERATURES
from ecospec_runtime.config import Config, PoolConfig
from ecospec_runtime.console import MOST_THREADS
from ecospec_runtime.errors import UserError

Count = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MIN_ROUNDS = 3  # of a profile
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(value: Any) -> int:
    """Bytes from an integer or from text like 500MB, 2GB, 1.5 GiB. Raises UserError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", str(value), re.IGNORECASE)
    if not match:
        raise UserError(f"--max-disk: '{value}' is not a size; write for example 500MB or 2GB")
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


def one_or_many(value: Any) -> Any:
    """A tuple of one where one is given."""
    return (value,) if isinstance(value, str | Path) else value


class HarvestConfig(Config):
    """Everything that decides the rows of a harvest, and where they go."""

    target: str
    drafter: str
    prompts: str
    out: Path
    max_positions: int | None = Field(None, ge=1)  # None: all prompts to their end
    max_new_tokens: int = Field(64, ge=1)  # of the target's own text, per prompt
    max_prompt_tokens: int = Field(1024, ge=1)  # longer prompts keep their end
    pool: PoolConfig = PoolConfig()
    stride: int = Field(1, ge=1)  # replay is exact at 1
    temperature: float = Field(0.0, ge=0.0, allow_inf_nan=False)
    seed: int = Field(0, ge=0, lt=2**62)  # prompt i draws with seed + i
    drafter_temperatures: tuple[Temperature, ...] = Field(TEMPERATURES, min_length=1)
    target_temperatures: tuple[Temperature, ...] = (1.0, 0.7)
    max_disk: Annotated[int, BeforeValidator(parse_size)] = 20 * 10**9
    resume: bool = False
    dtype: str = Field("float32", pattern="^(float32|bfloat16|auto|mxfp4)$")
    devices: int = Field(1, ge=1)
    device_map: str | dict[str, int | str] | None = None  # instead of one device; as --device-map

    @property
    def recorded_temperatures(self) -> tuple[float, ...]:
        """`target_temperatures`, and the trajectory's own, which acceptance is fitted for."""
        own = (self.temperature,) if self.temperature else ()
        return tuple(dict.fromkeys((*self.target_temperatures, *own)))


class FitConfig(Config):
    """Settings of `fit`; the defaults suit a quick fit on two cores."""

    traces: tuple[Path, ...] = Field(min_length=1)  # the first, and more of the same prompts at other temperatures
    out: Path
    width: int = Field(default=192, ge=8, le=8192)  # of the trunk; 512 for targets with thousands of experts in all
    epochs: int = Field(default=12, ge=1)
    max_seconds: float | None = Field(default=75.0, gt=0)  # training stops earlier; the schedule knows
    batch_positions: int = Field(default=32, ge=1)
    node_share: float = Field(default=0.5, gt=0, le=1)  # of the nodes with an unreached parent that an epoch sees
    unreached_weight: float = Field(default=0.1, ge=0, le=1)  # of those nodes in the acceptance loss
    lr: float = Field(default=4e-3, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.5, ge=0)
    heldout: float = Field(default=0.15, gt=0, lt=1)  # share of the prompts
    seed: int = Field(default=0, ge=0, lt=2**32)
    devices: int = Field(default=1, ge=1)
    accelerator: str = "auto"

    @field_validator("traces", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return one_or_many(value)


class ProfileConfig(Config):
    """Settings of `profile`."""

    target: str
    drafter: str
    out: Path
    predictor: Path | None = None  # to time prediction too; without one it counts as free
    dtype: str = "auto"
    device: str = "auto"  # cuda where there is one
    device_map: str | dict[str, int | str] | None = None  # instead of a device; as --device-map
    tp: int = Field(default=1, ge=1)  # processes of a torchrun that share the target
    threads: int | None = Field(default=None, ge=1, le=MOST_THREADS)  # None: as the process is set
    pool: PoolConfig = PoolConfig()
    # Rows of the timed passes: where speculation pays. 1 is a plain step.
    tokens: tuple[Count, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
    contexts: tuple[Count, ...] = Field(default=(48, 160, 384), min_length=1)  # cached tokens before them
    repeats: int = Field(default=9, ge=MIN_ROUNDS)
    max_seconds: float = Field(default=90.0, gt=0)  # timed passes stop then, after at least three rounds
    allow_busy: bool = False  # measure though other processes use the machine; the profile says so
    seed: int = Field(default=0, ge=0, lt=2**32)

    @model_validator(mode="after")
    def _plain_and_more(self) -> Self:
        if 1 not in self.tokens or len(set(self.tokens)) < 2:
            raise UserError(
                f"ProfileConfig: 'tokens' = {self.tokens}: give 1, a plain step, and at least one other number"
            )
        return self


class TuneConfig(Config):
    """Settings of `tune`."""

    traces: Path
    predictor: tuple[Path, ...] = Field(min_length=1)  # several are variants, of which the best is taken
    profile: Path
    out: Path
    trials: int = Field(default=80, ge=1)  # in all: those of other workers and of earlier runs included
    objectives: Literal["rate", "pareto"] = "rate"  # tokens per ms; or accepted length against experts read
    prune: bool = True  # with one objective, leave sampled trials that begin worse than half of the others
    storage: str | None = None  # see `storage.FORMS`; None: SQLite in `out`
    workers: int = Field(default=1, ge=1, le=256)  # processes of this run; other runs may share the storage
    positions: int = Field(default=2000, ge=1)  # most positions to tune on, and to confirm on
    confirm: float = Field(default=0.4, gt=0, lt=1)  # share of the prompts that is set aside for confirming
    margin: float = Field(default=0.02, ge=0)  # gain over `off` up to which it counts as noise
    seed: int = Field(default=0, ge=0, lt=2**32)
    confirm_live: int = Field(default=0, ge=0, le=16)  # so many of the best are decoded with before one is chosen
    target: str | None = None  # this and the next three: for `confirm_live` only
    drafter: str | None = None
    prompts: str | None = None  # those of the harvest, of which held-out ones are taken, or others
    live_prompts: int = Field(default=16, ge=2)  # at most so many

    @field_validator("predictor", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return one_or_many(value)


class ExportConfig(Config):
    """Settings of `export`."""

    predictor: tuple[Path, ...] = Field(min_length=1)  # of several variants, the one that the policies were tuned with
    policy: tuple[Path, ...]  # folders of `tune`, one per device
    out: Path
    target: str | None = None  # where the target lies, if not where the harvest found it
    drafter: str | None = None

    @field_validator("predictor", "policy", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return one_or_many(value)
