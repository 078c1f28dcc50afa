"""Settings of the runtime. Every mistake in them is a one-line `UserError` that names the key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, model_validator

from ecospec_runtime.errors import SettingError, UserError

M = TypeVar("M", bound=BaseModel)

# Keys of transformers' GenerationConfig that would change the target's distribution, or mean a different search.
_REFUSED = {
    "do_sample": "use temperature: 0 is greedy, above 0 samples",
    "num_beams": "only one sequence is decoded at a time, without beams",
    "max_length": "use max_new_tokens",
    "stop": "use stop_strings",
}


class Config(BaseModel):
    """Pydantic model that refuses unknown keys and reports every mistake as a `SettingError` naming the key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="wrap")
    @classmethod
    def _one_line(cls, data: Any, handler: ValidatorFunctionWrapHandler) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")  # a misspelt key goes first
            key = ".".join(str(part) for part in first["loc"]) or cls.__name__
            if first["type"] == "extra_forbidden":
                remedy = _REFUSED.get(key, "supported keys: " + ", ".join(cls.model_fields))
                raise SettingError(cls.__name__, key, f"is not supported; {remedy}") from None
            if first["type"] == "missing":
                raise SettingError(cls.__name__, key, "is missing; it has no default") from None
            raise SettingError(cls.__name__, key, f"= {first['input']!r}: {first['msg']}") from None


def read_model(path: Path, model: type[M], remedy: str) -> M:
    """Read a JSON file as a pydantic model. UserError names the file, the key and the remedy."""
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    except UserError as error:  # a nested `Config` names its own key
        raise UserError(f"{path}: {error}; {remedy}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "file"
        raise UserError(f"{path}: {key}: {first['msg']}; {remedy}") from error


def is_hub_id(source: str) -> bool:
    """Whether something that does not exist here may be an `owner/name` of a hub, rather than a path."""
    return source.count("/") == 1 and not source.startswith((".", "/", "~"))


class PoolConfig(Config):
    """Shape of the candidate tree: the best `width` nodes of each of `depth` levels; the best `beam` of a level expand.

    Nodes whose reach under the drafter's own probability is below `min_reach` are left out, and expansion ends with the
    first level that keeps none. Reach falls along a path, so this is what a full pool holds from `min_reach` up.
    """

    depth: int = Field(default=6, ge=1, le=64)
    beam: int = Field(default=4, ge=1, le=256)
    width: int = Field(default=8, ge=1, le=256)
    min_reach: float = Field(default=0.0, ge=0.0, lt=1.0)

    @property
    def pool_size(self) -> int:
        """Largest number of nodes a pool can hold."""
        return self.width * self.depth

    def cut(self, depth: int | None, min_reach: float | None = None) -> PoolConfig:
        """The same shape, at most `depth` levels deep, without nodes below `min_reach`; None leaves it as it is."""
        update = {"depth": self.depth if depth is None else max(1, min(depth, self.depth)),
                  "min_reach": max(self.min_reach, min_reach or 0.0)}  # fmt: skip
        return self.model_copy(update=update)


class GenerationConfig(Config):
    """How to decode. Names follow transformers; the processing order is penalty, temperature, top-k, top-p, min-p."""

    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)  # 0: argmax
    top_k: int = Field(default=0, ge=0)  # 0: off
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**63)
    stop_strings: tuple[str, ...] = ()
    eos_token_id: int | tuple[int, ...] | None = None  # None: what the target's own configuration says; (): never stop
    logprobs: bool = False  # fill Token.logprob: the target's raw log-probability

    @model_validator(mode="after")
    def _no_empty_stop(self) -> Self:
        if "" in self.stop_strings:
            raise SettingError("GenerationConfig", "stop_strings", "holds an empty string; remove it")
        return self

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> GenerationConfig:
        """Build from parsed flags, YAML or JSON; raises UserError on anything unsupported."""
        return cls.model_validate(dict(values))
