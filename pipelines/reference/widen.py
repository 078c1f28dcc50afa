"""Widening: give a small MoE the cost structure of a large one without changing what it computes.

    python -m pipelines.reference.widen --source DIR --out DIR2 --factor 8       each expert's units 8 times
    python -m pipelines.reference.widen --source DIR --out DIR2 --width 700      to this many units
    python -m pipelines.reference.widen --source DIR --out DIR2 --share 0.5      so that experts are half of a plain step here

Each expert's hidden units are repeated k times (k a power of two) and its down projection divided by k, which bf16 does
exactly: same output, routing and acceptance, k times the bytes to read. Units beyond that are zero: they are read like
any other and add exactly nothing. Whatever is measured on a widened model must say so.

Qwen-MoE, DeepSeek (its shared expert too, which is as wide as the routed ones) and GPT-OSS, whose experts are transposed,
interleave gate and up, and have biases. A multi-token-prediction layer is left out: the narrow folder's drafts for the widened
target, because it stands for one layer among sixty, not among seven.

Shapes: E experts, M units of an expert, W widened units, D hidden size.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ecospec_runtime.checkpoint import fingerprint, read_config, weight_files
from ecospec_runtime.console import note
from ecospec_runtime.errors import UserError

_EXPERT = re.compile(
    r"\.(?:shared_)?experts\.(?:\d+\.)?(gate_up_proj|gate_up_proj_bias|gate_proj|up_proj|down_proj)(?:\.weight)?$"
)
_INTERLEAVED = ("gpt_oss",)  # model types whose experts are transposed and interleaved
_LAYER = re.compile(r"\.layers\.(\d+)\.")
CONTEXT = 160  # cached tokens before the timed steps
FURTHEST = 1.3  # times the largest width measured: up to there a line through two of them is trusted
LEAST = 448  # units of an expert from which the experts of a reference outgrow a processor's caches


def copies(width: int, units: int) -> int:
    """Largest power of two k with k * units <= width."""
    return 1 << ((width // units).bit_length() - 1)


def _widen_units(weight: Tensor, dim: int, k: int, width: int) -> Tensor:
    """Repeat a matrix k times along `dim`, then zeros up to `width`."""
    repeated = torch.cat([weight] * k, dim)
    shape = list(repeated.shape)
    shape[dim] = width - shape[dim]
    return torch.cat([repeated, repeated.new_zeros(shape)], dim) if shape[dim] else repeated


def widen_tensor(kind: str, weight: Tensor, width: int, interleaved: bool = False) -> Tensor:
    """One expert tensor at the new width: `gate_up_proj [.., 2M, D]`, `gate_proj` and `up_proj [.., M, D]`,
    `down_proj [.., D, M]`; of `interleaved` experts `gate_up_proj [.., D, 2M]`, its bias `[.., 2M]`, `down_proj [.., M, D]`."""
    if interleaved and kind.startswith("gate_up_proj"):
        pairs = weight.unflatten(-1, (-1, 2))
        return _widen_units(pairs, -2, copies(width, pairs.size(-2)), width).flatten(-2)
    if kind == "down_proj":
        units = -2 if interleaved else -1
        k = copies(width, weight.size(units))
        return _widen_units(weight / k, units, k, width)
    if kind == "gate_up_proj":
        return torch.cat([widen_tensor("up_proj", half, width) for half in weight.chunk(2, -2)], -2)
    return _widen_units(weight, -2, copies(width, weight.size(-2)), width)


def _widened(name: str, kind: str, weight: Tensor, width: int, config: dict[str, Any]) -> Tensor:
    """A tensor of a model with this config at the new width of its experts; a shared expert is as wide as several."""
    several = int(config.get("n_shared_experts") or 1) if "shared_experts" in name else 1
    return widen_tensor(kind, weight, several * width, config.get("model_type") in _INTERLEAVED)


def _units_key(config: dict[str, Any]) -> str:
    """The key of a `config.json` that holds the units of an expert."""
    return "intermediate_size" if config.get("model_type") in _INTERLEAVED else "moe_intermediate_size"


def _by_layer(folder: Path) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Tensors of a folder, one decoder layer at a time, so that only one is in memory."""
    groups: dict[str, list[tuple[str, Path]]] = defaultdict(list)
    for path in weight_files(folder):
        if path.suffix != ".safetensors":
            raise UserError(f"{path}: widening reads *.safetensors; save the model in that format first")
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                layer = _LAYER.search(name)
                groups[f"{int(layer[1]):05d}" if layer else "rest"].append((name, path))
    for group in sorted(groups):
        tensors: dict[str, Tensor] = {}
        for path in sorted({p for _, p in groups[group]}):
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name, home in groups[group] if home == path}
        yield group, tensors


def _checked_config(folder: Path, width: int) -> dict[str, Any]:
    config = read_config(folder, "source")
    units = config.get(_units_key(config))
    if not isinstance(units, int):
        raise UserError(
            f"{folder / 'config.json'}: no {_units_key(config)}; widening knows Qwen-MoE, DeepSeek and GPT-OSS models"
        )
    if width < units:
        raise UserError(f"width {width} is less than the {units} units that {folder} has; ask for at least that many")
    return config


def widen(source: Path, out: Path, factor: int | None = None, width: int | None = None) -> Path:
    """Write a widened copy of the transformers folder `source` to `out`; returns `out`.

    `factor` must be a power of two; `width` is the exact number of units per expert. The new config names the base
    weights (`ecospec_widened_from`, a fingerprint) and `ecospec_widened_factor` (W / M). Raises UserError.
    """
    saved = read_config(source, "source")
    key = _units_key(saved)
    units = saved.get(key) or 0
    if factor is not None:
        if factor < 1 or factor & (factor - 1):
            raise UserError(f"factor {factor} is not a power of two; only those divide bf16 weights exactly")
        width = factor * units
    if width is None:
        raise UserError("nothing to do: give a factor, a width or a share")
    config = _checked_config(source, width)
    if source.resolve() == out.resolve():
        raise UserError(f"{out}: source and output are the same folder; choose another output")
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("*.safetensors"), *out.glob("*.safetensors.index.json")):
        old.unlink()
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and "safetensors" not in path.name:
            shutil.copyfile(path, out / path.name)
    index: dict[str, str] = {}
    size = 0
    for group, tensors in _by_layer(source):
        file = f"model-{group}.safetensors"
        if group.isdigit() and int(group) >= saved["num_hidden_layers"]:
            continue
        for name in list(tensors):
            if match := _EXPERT.search(name):
                tensors[name] = _widened(name, match[1], tensors[name], width, saved)
        save_file({name: t.contiguous() for name, t in tensors.items()}, out / file, {"format": "pt"})
        size += sum(t.numel() * t.element_size() for t in tensors.values())
        index |= dict.fromkeys(tensors, file)
    if not any(_EXPERT.search(name) for name in index):
        raise UserError(
            f"{source}: no expert weights of a known layout; widening knows Qwen-MoE, DeepSeek and GPT-OSS models"
        )
    content = {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))
    config |= {
        key: width, "ecospec_widened_from": fingerprint(source),
        "ecospec_widened_factor": width / units * float(config.get("ecospec_widened_factor", 1)),
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=2))
    return out


def with_width(folder: Path, width: int, dtype: str = "bfloat16", device: str | None = None) -> Any:
    """The target of a folder with its experts widened in memory."""
    from ecospec_runtime.compute import install
    from ecospec_runtime.target import Target

    target = Target.from_pretrained(folder, dtype, device)
    config = read_config(folder, "source")
    for name, parameter in target.model.named_parameters():
        if match := _EXPERT.search(f".{name}"):
            parameter.data = _widened(name, match[1], parameter.data, width, config)
    install(target.model)  # again: it arranges the matrices that the kernels read
    return target


def _measure(
    folder: Path, widths: tuple[int, int], rounds: int, steps: int
) -> tuple[list[float], list[float]]:  # fmt: skip
    """Median ms of a plain step in expert modules, and in the rest, at each width: bf16, one thread, in turns."""
    from ecospec_train.passes import plain_steps, text_tokens

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        targets = [with_width(folder, width) for width in widths]
        text = text_tokens(targets[0], CONTEXT + (rounds + 1) * steps)
        measured: list[list[tuple[float, float]]] = [[], []]
        for round_ in range(rounds + 1):
            part = text[round_ * steps :]
            for target, kept in zip(targets, measured, strict=True):
                new = plain_steps(target, part, CONTEXT, steps)
                kept += [new] if round_ else []  # the first round warms up
    finally:
        torch.set_num_threads(threads)
    experts = [statistics.median(e for e, _ in kept) for kept in measured]
    return experts, [statistics.median(step - e for e, step in kept) for kept in measured]


def choose_width(folder: Path, share: float = 0.5, rounds: int = 4, steps: int = 48) -> tuple[int, dict[str, Any]]:
    """Width at which expert modules take `share` of a plain step on this machine (bf16, one thread), and what was measured.

    Both their time and the rest's are taken as linear in the width, through two that were measured: first two small ones, then,
    since wide experts leave the rest less of the caches, the larger of them and what those gave.
    """
    if not 0 < share < 0.9:
        raise UserError(f"share {share} is not between 0 and 0.9; experts can be at most most of a step")
    config = _checked_config(folder, 1 << 30)
    units: int = config[_units_key(config)]
    ratio = share / (1 - share)  # experts over rest
    small = max(8 * units, LEAST)
    widths, width = (small, 2 * small), 0
    while not width or width > FURTHEST * widths[1]:
        if width:
            widths = widths[1], width
        experts, rest = _measure(folder, widths, rounds, steps)
        apart = widths[1] - widths[0]
        per_unit, rest_per_unit = (experts[1] - experts[0]) / apart, max(0.0, (rest[1] - rest[0]) / apart)
        steepness = per_unit - ratio * rest_per_unit
        if steepness <= 0:
            found = f"at widths {widths} experts take {experts} ms and the rest {rest} ms"
            if per_unit <= 0:
                raise UserError(
                    f"{found}, as if width cost nothing: the machine is too busy; try again when it is idle"
                )
            note(f"widen: warning: {found}; the machine seems busy, and the share of experts may not be {share}")
            steepness = per_unit  # as if the rest did not grow
        width = round((widths[1] + (ratio * rest[1] - experts[1]) / steepness) / 16) * 16
    return max(units, width), {"widths": list(widths), "experts_ms": experts, "rest_ms": rest, "ms_per_unit": per_unit}


def main() -> None:
    """Command line entry; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--factor", type=int, help="a power of two")
    how.add_argument("--width", type=int, help="units per expert")
    how.add_argument("--share", type=float, help="share of a plain step that experts should take on this machine")
    args = parser.parse_args()
    try:
        width = args.width
        if args.share is not None:
            width, measured = choose_width(args.source, args.share)
            print(json.dumps(measured))
        widen(args.source, args.out, args.factor, width)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    config = read_config(args.out, "output")
    print(f"{config[_units_key(config)]} units per expert, {config['ecospec_widened_factor']:.2f} times -> {args.out}")


if __name__ == "__main__":
    main()
