"""The published layouts of MTP / NextN layers: which tensors of a folder are the layer's, and what they are called.

DeepSeek and GLM-4-MoE: `model.layers.{n}.*`, n the number of hidden layers in the target's own checkpoint, 0 (or still n)
in a separately exported NextN folder. Qwen3-Next: `mtp.*`. Experts one by one or fused, as saved or in FP8 blocks.
Only headers and the layer's own tensors are read. Every fault is a one-line UserError that names the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ecospec_runtime.checkpoint import weight_files
from ecospec_runtime.errors import UserError, first_line
from ecospec_runtime.quantization import Stored, dequantized
from ecospec_runtime.weights import StoredTensor, read_folder

SHARED = {"embed_tokens.weight": "embedding", "shared_head.head.weight": "output matrix"}  # with the target
_NEXTN = re.compile(r"model\.layers\.(\d+)\.(?:eh_proj|enorm|hnorm)\.weight")
_QWEN = {
    "eh_proj.weight": "mtp.fc.weight", "post_norm.weight": "mtp.norm.weight",
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight", "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
}  # fmt: skip
_IGNORED = "rotary_emb.inv_freq"  # says nothing that the settings do not
_PER_EXPERT = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}


def stored_tensors(folder: Path, config: dict[str, Any], where: str, dtype: torch.dtype) -> dict[str, Stored]:
    """The tensors of a folder's safetensors files by name, quantised ones to be read as `dtype`. Raises UserError."""
    found: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            try:
                found |= read_folder([path])
            except (SafetensorError, OSError) as error:
                line = first_line(error)
                raise UserError(f"{path}: damaged weight file ({line}); copy or download it again") from None
    return dequantized(found, config, where, dtype)


@dataclass(frozen=True)
class LayerNames:
    """The names of one MTP layer in a folder."""

    prefix: str  # what they begin with
    qwen: bool  # those of Qwen3-Next
    separate: bool  # exported to a folder of its own

    def owns(self, name: str) -> bool:
        """Whether a tensor of the folder should be one of the layer's."""
        rest = name.removeprefix(self.prefix)
        return rest != name and rest not in SHARED and not rest.endswith(_IGNORED)

    def theirs(self, name: str) -> str:
        """Name in the folder of a tensor of an `MtpLayer`."""
        block = name.removeprefix("mtp_block.")
        if self.qwen:
            return _QWEN.get(name, f"mtp.layers.0.{block}")
        return self.prefix + ("shared_head.norm.weight" if name == "post_norm.weight" else block)


def find_layer(names: set[str], config: dict[str, Any], source: str) -> LayerNames | None:
    """The MTP layer among a folder's tensor names, None if there is none. Raises UserError if there are several."""
    nextn = sorted({int(match[1]) for name in names if (match := _NEXTN.fullmatch(name))})
    chained = {name.split(".")[2] for name in names if name.startswith("mtp.layers.")}
    if len(nextn) > 1 or len(chained) > 1:
        raise UserError(f"{source}: {max(len(nextn), len(chained))} MTP layers in a chain; only one is supported")
    if nextn:
        layers = config.get("num_hidden_layers")
        if nextn[0] not in (0, layers):
            raise UserError(
                f"{source}: the MTP layer is called model.layers.{nextn[0]}, but num_hidden_layers in config.json is "
                f"{layers}; config and weights are not of one model"
            )
    elif not names.intersection(_QWEN.values()):
        return None
    separate = not any(name.startswith("model.embed_tokens.") for name in names)
    return LayerNames(f"model.layers.{nextn[0]}." if nextn else "mtp.", not nextn, separate)


class LayerReader:
    """Copies the tensors of one MTP layer out of a folder's files, one at a time."""

    def __init__(self, homes: dict[str, Stored], names: LayerNames, source: str):
        self.homes, self.names, self.source = homes, names, source

    def fill(self, values: dict[str, Tensor]) -> None:
        """Fill the tensors of an `MtpLayer`. Raises UserError on one that is missing, unknown, misshapen or not finite."""
        parts = {name: part for ours, value in values.items() for name, part in self._parts(ours, value)}
        missing = sorted(parts.keys() - self.homes.keys())
        if missing:
            raise UserError(
                f"{self.source}: tensor {missing[0]} is missing ({len(missing)} in all); the MTP layer is not complete"
            )
        unknown = sorted(name for name in self.homes if self.names.owns(name) and name not in parts)
        if unknown:
            raise UserError(
                f"{self.source}: tensor {unknown[0]} is not part of an MTP layer of this target ({len(unknown)} in all); "
                "this variant is not supported"
            )
        for name, part in parts.items():
            self._copy(name, part)

    def _parts(self, ours: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors in the files that make up one of the layer's, each with the part of `value` that it fills."""
        theirs = self.names.theirs(ours)
        kind = next((kind for kind in _PER_EXPERT if theirs.endswith(kind)), None)
        if kind is None or theirs in self.homes:
            yield theirs, value
            return
        for expert, rows in enumerate(value):
            for part, matrix in zip(rows.chunk(len(_PER_EXPERT[kind])), _PER_EXPERT[kind], strict=True):
                yield f"{theirs.rpartition('.')[0]}.{expert}.{matrix}.weight", part

    def _copy(self, name: str, part: Tensor) -> None:
        """Read one tensor into its place."""
        self._check_shape(name, list(part.shape))
        tensor = self.homes[name][...]
        if not tensor.isfinite().all():
            raise UserError(f"{self.source}: tensor {name} holds NaN or infinite values; copy or download it again")
        part.copy_(tensor)

    def _check_shape(self, name: str, expected: list[int]) -> None:
        shape = self.homes[name].get_shape()
        if shape != expected:
            raise UserError(f"{self.source}: tensor {name} has shape {shape}, config.json asks for {expected}")

    def check_shared(self, of_target: Callable[[str], Tensor]) -> None:
        """Raise UserError if a separate folder's embedding or output matrix is not the target's: its first rows are read."""
        for rest, what in SHARED.items():
            name = self.names.prefix + rest
            if name not in self.homes or not self.names.separate:
                continue
            ours = of_target(rest)
            self._check_shape(name, list(ours.shape))
            theirs = self.homes[name][:64]
            if not torch.equal(theirs.to(ours.dtype), ours[:64].cpu()):
                raise UserError(
                    f"{self.source}: {name} is not the target's {what}, which an MTP layer shares; this layer belongs to "
                    "another target"
                )
