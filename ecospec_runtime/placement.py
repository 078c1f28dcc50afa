"""Where a target's weights go: one device, an accelerate device map, or one shard on each process of a torchrun.

Both are transformers' own mechanisms; here stands what makes them safe to ask for. Under tensor parallelism every process
runs the same passes on the same tokens and drafts for itself; only the first one prints and writes.
"""

from __future__ import annotations

import atexit
import importlib.util
import inspect
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecospec_runtime.console import leads, note
from ecospec_runtime.errors import UserError
from ecospec_runtime.machine import check_device, device_name

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
DeviceMap = str | Mapping[str, int | str]
_OFFLOAD = ("cpu", "disk")


@dataclass(frozen=True)
class Placement:
    """`device_map` is a strategy of accelerate or a map from module names; else everything goes to `device`."""

    device: str = "cpu"
    device_map: str | dict[str, int | str] | None = None
    tp: int = 1  # processes that share every layer

    @property
    def single(self) -> str | None:
        """The one device of all weights, or None."""
        return self.device if self.device_map is None else None


def parse_placement(device: str | None = None, device_map: DeviceMap | None = None, tp: int = 1) -> Placement:
    """Check and normalise what a user asked for. `device_map` may be a strategy, a device, or a map, as JSON text or file.

    Raises UserError for contradictions, unusable devices, and a `tp` that is not the number of processes.
    """
    if device_map is not None and device is not None:
        raise UserError(f"--device {device} and --device-map exclude each other; give one of them")
    if tp != 1:
        return Placement(_tensor_parallel_device(tp, device, device_map), tp=tp)
    if device_map is None:
        check_device(device or "cpu")
        return Placement(device or "cpu")
    parsed = _parse_map(device_map) if isinstance(device_map, str) else dict(device_map)
    if isinstance(parsed, dict) and list(parsed) == [""] and parsed[""] in ("cpu", "cuda"):
        parsed = str(parsed[""])  # one device for everything is no map
    if isinstance(parsed, str) and parsed not in STRATEGIES:
        if parsed.partition(":")[0] not in ("cpu", "cuda", "mps", "xpu", "meta"):
            raise UserError(
                f"--device-map {parsed}: give {', '.join(STRATEGIES)}, a device such as cuda:0, or a map from module names to "
                "devices as JSON text or file"
            )
        check_device(parsed)
        return Placement(parsed)
    _needs_accelerate("--device-map")
    if isinstance(parsed, dict):
        _check_map(parsed)
    return Placement(device_map=parsed)


def _parse_map(text: str) -> str | dict[str, int | str]:
    """A strategy or device as it stands; a map from JSON text or from a file of it."""
    where, source = "--device-map", text.strip()
    if not source.startswith("{"):
        if not (source.endswith(".json") or os.sep in source or Path(source).is_file()):
            return source
        where = source
        try:
            source = Path(where).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(
                f"--device-map {where}: cannot be read ({type(error).__name__}); give a JSON file"
            ) from None
    try:
        parsed = json.loads(source)
    except ValueError as error:
        raise UserError(f'{where}: not JSON ({error}); write for example {{"": "cpu"}}') from None
    if not isinstance(parsed, dict):
        raise UserError(f"{where}: not a JSON object from module names to devices")
    return parsed


def _check_map(parsed: dict[str, int | str]) -> None:
    if not parsed:
        raise UserError('--device-map: an empty map places nothing; {"": "cpu"} places everything')
    for name, value in parsed.items():
        number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not number and not isinstance(value, str):
            raise UserError(
                f"--device-map: '{name}': {value!r} is not a device; give cpu, disk, cuda:0 or a GPU's number"
            )
        if value not in _OFFLOAD:
            check_device(f"cuda:{value}" if number else str(value))


def _command() -> str:
    """The module whose command line is running."""
    return (
        "ecospec_train.cli"
        if "ecospec-train" in sys.argv[0] or "ecospec_train" in sys.argv[0]
        else "ecospec_runtime.cli"
    )


def _needs_accelerate(option: str) -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise UserError(f"{option} needs the Python package accelerate; install it with: pip install accelerate")


def _tensor_parallel_device(tp: int, device: str | None, device_map: DeviceMap | None) -> str:
    """The device of this process's shard."""
    if device_map is not None:
        raise UserError("--tp and --device-map exclude each other; give one of them")
    if tp < 1:
        raise UserError(f"--tp {tp}: give the number of processes that share the target, 1 or more")
    if processes() != tp:
        raise UserError(
            f"--tp {tp} needs {tp} processes, here {'is' if processes() == 1 else 'are'} {processes()}; start with: "
            f"torchrun --nproc-per-node {tp} -m {_command()} ... --tp {tp}"
        )
    _needs_accelerate("--tp")
    kind = torch.device(device or "cpu").type
    if torch.cuda.is_available() != (kind == "cuda"):  # transformers shards onto the accelerator wherever there is one
        remedy = "give --device cuda" if torch.cuda.is_available() else "give --device cpu"
        raise UserError(
            f"--tp {tp}: transformers shards on {'GPUs' if torch.cuda.is_available() else 'the CPU'} here; {remedy}"
        )
    place = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if kind == "cuda" else "cpu"
    check_device(place)
    return place


def processes() -> int:
    """Processes of this torchrun; 1 outside one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(tp: int) -> None:
    """For a command line: refuse processes that would only repeat one another, and silence all but the first's stdout."""
    if tp == 1 and processes() > 1:
        raise UserError(
            f"torchrun started {processes()} processes, --tp is 1; give --tp {processes()} or run without torchrun"
        )
    if not leads():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def agreed(value: bool) -> bool:
    """The first process's `value` on every process that shares the target: for decisions that depend on a clock."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    answer = [value]
    torch.distributed.broadcast_object_list(answer, src=0)
    return answer[0]


def loading_arguments(placement: Placement) -> dict[str, Any]:
    """What `from_pretrained` takes for this placement."""
    if placement.tp > 1:
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=placement.tp)}
    if placement.device_map is None:
        return {}
    folder = tempfile.mkdtemp(prefix="ecospec-offload-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"device_map": placement.device_map, "offload_folder": folder}


def check_placed(model: Any, placement: Placement, source: str) -> None:
    """Raise UserError for a map that names no module, weights that were never loaded, and expert parallelism."""
    modules = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    if isinstance(placement.device_map, dict):
        for name in placement.device_map:
            if name not in modules:
                raise UserError(
                    f"--device-map: '{name}' is no module of target {source}; names look like model.layers.0"
                )
    if "disk" in (getattr(model, "hf_device_map", None) or {}).values():
        note(
            f"target {source}: some layers are read from disk in every pass, from {tempfile.gettempdir()} (see TMPDIR)"
        )
    for name, module in model.named_modules():
        stored = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta and stored is None:
                raise UserError(
                    f"target {source}: {name}.{key} was not loaded; check --device-map and the weight files"
                )
    if placement.tp > 1 and any(getattr(module, "_is_expert_parallel", False) for module in model.modules()):
        raise UserError(
            f"target {source}: its plan is expert parallel, where expert ids are local; only tensor parallelism is supported"
        )


def one_piece(model: Any) -> bool:
    """Whether every weight lies whole on one device and no hook moves it, so that modules may be given other forwards."""
    spread = getattr(model, "hf_device_map", None) or {}
    sharded = any(type(p).__name__ == "DTensor" for p in model.parameters())
    return not sharded and len(set(map(str, spread.values()))) <= 1 and "disk" not in spread.values()


def input_device(model: Any) -> torch.device:
    """Device that token ids go to: the embedding's, or the one it is brought to for computing."""
    embedding = model.get_input_embeddings()
    place = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    if place is None:
        return embedding.weight.device  # type: ignore[no-any-return]
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)


def hardware(model: Any) -> str:
    """Name of what the model computes on, as profiles and policies carry it: `H200`, `H200 x8`, `EPYC + disk`."""
    spread = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    shards = next((p.device_mesh.size() for p in model.parameters() if type(p).__name__ == "DTensor"), 1)
    devices = max(shards, len(spread - set(_OFFLOAD)))
    offloaded = [place for place in _OFFLOAD if place in spread and len(spread) > 1]
    return " + ".join([device_name(input_device(model)) + (f" x{devices}" if devices > 1 else ""), *offloaded])


def whole_weight(module: nn.Module) -> Tensor:
    """A module's `weight` in one piece: gathered from its shards (on every process), fetched from where it is offloaded."""
    weight: Any = module.weight
    if type(weight).__name__ == "DTensor":
        return weight.full_tensor()  # type: ignore[no-any-return]
    if weight.is_meta:
        return module._hf_hook.weights_map["weight"]  # type: ignore[no-any-return, union-attr, index]
    return weight  # type: ignore[no-any-return]


def forward_parameters(module: nn.Module) -> list[str]:
    """Parameter names of a module's own forward, also where a hook has wrapped it in `(*args, **kwargs)`."""
    return list(inspect.signature(type(module).forward).parameters)[1:]
