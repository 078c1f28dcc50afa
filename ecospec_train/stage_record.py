"""Whether a pipeline's stage must run: what it was made from, recorded beside its output once it has finished.

`runs/my-model/traces` gets `runs/my-model/traces.stage.json`. A stage is unchanged while its settings, the release and every
file that it reads and wrote are what the record says. A file that was not written since (same size and time) counts as
unchanged; else its content decides, so that a copied run folder still holds. Of a local model's weights the content is
`checkpoint.fingerprint`; a hub id counts by its name. A profile also belongs to its machine, threads and library versions.

The record is removed before a stage runs and written when it has finished: killed halfway, a stage runs again.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ecospec_runtime.bundle import file_sha256
from ecospec_runtime.console import write_json

if TYPE_CHECKING:
    from ecospec_train.pipeline import Stage

SCHEMA_VERSION: Literal[1] = 1
MODELS = ("target", "drafter")
FOLDERS = ("traces", "predictor", "profile", "policy")  # outputs of earlier stages
NO_MATTER = (
    "out",
    "storage",
    "workers",
)  # where something lies, and who works on it (a storage's URL may hold a password)
# Made along the way, read by no later stage: MLflow's run id, Lightning's checkpoints, the tuner's storage.
BESIDE = ("tracking.json", "checkpoints", "study.db*", "*.journal", "*.journal.lock")


class Mark(BaseModel):
    """How one thing was found: `stamp` changes whenever it is written, `digest` when its content does."""

    model_config = ConfigDict(extra="forbid")

    stamp: str
    digest: str


class StageRecord(BaseModel):
    """`<output>.stage.json`."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = SCHEMA_VERSION
    id: str  # of this making: stages after it hold it, so that they run when it was made anew
    release: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    inputs: dict[str, Mark]
    outputs: dict[str, Mark]


@dataclass(frozen=True)
class Thing:
    """A file, or weights, as they are now; the digest is computed only if the stamp does not settle it."""

    stamp: str
    digest: Callable[[], str]

    def mark(self) -> Mark:
        """For the record."""
        return Mark(stamp=self.stamp, digest=self.digest())

    def same(self, mark: Mark) -> bool:
        """Whether the content is what it was."""
        return self.stamp == mark.stamp or self.digest() == mark.digest


def record_path(output: Path) -> Path:
    """Where the record of a stage lies: beside its output, since a bundle holds nothing but what its manifest lists."""
    return output.with_name(output.name + ".stage.json")


def read_record(output: Path) -> StageRecord | None:
    """The record of the stage that wrote `output`; None without a usable one."""
    try:
        return StageRecord.model_validate_json(record_path(output).read_bytes())
    except (OSError, ValidationError):
        return None


def begin(stage: Stage) -> StageRecord:
    """Take in what a stage is about to read and remove its old record. Raises UserError for damaged weights."""
    record_path(stage.output).unlink(missing_ok=True)
    return StageRecord(
        id=uuid.uuid4().hex, release=release(), settings=settings(stage), environment=environment(stage),
        inputs=marks(inputs(stage)), outputs={},
    )  # fmt: skip


def finish(stage: Stage, begun: StageRecord) -> None:
    """Write the record of a stage that has finished."""
    complete = begun.model_copy(update={"outputs": marks(files_of(stage.output))})
    write_json(record_path(stage.output), complete.model_dump(mode="json"))


def why_stale(stage: Stage) -> str | None:
    """In a few words, why a stage must run; None if nothing has changed since it did."""
    record = read_record(stage.output)
    if not stage.output.exists():
        return "no output yet"
    if record is None:
        return "not finished by `run` before"
    if record.release != release():
        return f"made by release {record.release}"
    now = settings(stage)
    for key in sorted({*record.settings, *now}):
        if key not in record.settings or key not in now or record.settings[key] != now[key]:
            return f"setting {key} changed"
    around = environment(stage)
    other = [key for key in sorted({*record.environment, *around}) if record.environment.get(key) != around.get(key)]
    if other:
        return "measured with other " + " and ".join(other)
    changed = difference(record.inputs, inputs(stage))
    if changed is not None:
        return f"input {changed}"
    changed = difference(record.outputs, files_of(stage.output))
    return None if changed is None else f"output {changed}"


def difference(before: Mapping[str, Mark], now: Mapping[str, Thing]) -> str | None:
    """The first thing that is not as it was, and how."""
    for name in sorted({*before, *now}):
        if name not in now:
            return f"{name} is missing"
        if name not in before:
            return f"{name} is new"
        if not now[name].same(before[name]):
            return f"{name} changed"
    return None


def marks(things: Mapping[str, Thing]) -> dict[str, Mark]:
    """All things as the record holds them."""
    return {name: thing.mark() for name, thing in things.items()}


def release() -> str:
    """The installed version of EcoSpec."""
    from ecospec_runtime.machine import versions

    return versions().get("ecospec", "unknown")


def settings(stage: Stage) -> dict[str, Any]:
    """The validated configuration, without the places whose content is compared."""
    return stage.config.model_dump(mode="json", exclude={*FOLDERS, *NO_MATTER})


def environment(stage: Stage) -> dict[str, Any]:
    """What a measurement depends on besides its inputs; empty for stages that measure nothing."""
    if stage.name != "profile" and not getattr(stage.config, "confirm_live", 0):
        return {}
    import torch

    from ecospec_runtime.machine import device_name, versions

    gpu = device_name("cuda") if torch.cuda.is_available() else None
    return {"devices": [device_name(), gpu], "threads": torch.get_num_threads(), "versions": versions()}


def inputs(stage: Stage) -> dict[str, Thing]:
    """Everything on disk that a stage reads, by name."""
    found: dict[str, Thing] = {}
    names = [path.name for path in stage.inputs]
    for i, path in enumerate(stage.inputs):
        label = path.name if names.count(path.name) == 1 else f"{path.name} {names[:i].count(path.name) + 1}"
        found |= {f"{label}/{name}".removesuffix("/."): thing for name, thing in files_of(path).items()}
        made = read_record(path)
        if made is not None:
            found[f"{label} as a whole"] = Thing(made.id, partial(str, made.id))
    for role in MODELS:
        source = getattr(stage.config, role, None)
        if source is not None and Path(source).is_dir():
            found |= {f"{role} {name}": thing for name, thing in model_files(Path(source)).items()}
    prompts = getattr(stage.config, "prompts", None)
    if prompts is not None and Path(prompts).is_file():
        found["prompts"] = file_thing(Path(prompts))
    return found


def files_of(path: Path) -> dict[str, Thing]:
    """The files of an output folder, or the one file; none if it is missing."""
    if path.is_file():
        return {".": file_thing(path)}
    names = {p.relative_to(path): p for p in sorted(path.rglob("*")) if p.is_file()}
    return {name.as_posix(): file_thing(p) for name, p in names.items() if not any(map(beside, name.parts))}


def beside(name: str) -> bool:
    """Whether a file or folder of this name is made along the way and read by no later stage."""
    return any(fnmatch(name, pattern) for pattern in BESIDE)


def file_thing(path: Path) -> Thing:
    """A file."""
    return Thing(stamp_of(path), partial(file_sha256, path))


def stamp_of(path: Path) -> str:
    """Size in bytes and time of the last change in ns."""
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def model_files(folder: Path) -> dict[str, Thing]:
    """A checkpoint: its weights as one thing, and the other files beside them (configuration, tokenizer)."""
    from ecospec_runtime.checkpoint import fingerprint, weight_files

    weights = weight_files(folder)
    other = [p for p in sorted(folder.iterdir()) if p.is_file() and p not in weights and p.suffix != ".md"]
    found = {path.name: file_thing(path) for path in other}
    if weights:
        stamps = json.dumps([[path.name, stamp_of(path)] for path in weights])
        found["weights"] = Thing(hashlib.sha256(stamps.encode()).hexdigest(), partial(fingerprint, folder))
    return found
