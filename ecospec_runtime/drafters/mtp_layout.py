"""The published layouts of MTP / NextN layers: which tensors of a folder are the layer's, and what they are called.

DeepSeek and GLM-4-MoE: `model.layers.{n}.*`, n the number of hidden layers in the target's own checkpoint, 0 (or still n)
in a separately exported NextN folder. Qwen3-Next: `mtp.*`. Experts one by one or fused, as saved or in FP8 blocks.
Only headers and the layer's own tensors are read. Every fault is a one-line UserError that names the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ecospec_runtime.checkpoint import weight_files
from ecospec_runtime.errors import UserError, first_line

SHARED = {"embed_tokens.weight": "embedding", "shared_head.head.weight": "output matrix"}  # with the target
_NEXTN = re.compile(r"model\.layers\.(\d+)\.(?:eh_proj|enorm|hnorm)\.weight")
_QWEN = {
    "eh_proj.weight": "mtp.fc.weight", "post_norm.weight": "mtp.norm.weight",
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight", "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
}  # fmt: skip
_SCALE = "_scale_inv"  # suffix of the scales of an FP8 tensor: [ceil(rows / block), ceil(columns / block)]
_IGNORED = "rotary_emb.inv_freq"  # says nothing that the settings do not
_PER_EXPERT = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}


@contextmanager
def open_weights(folder: Path) -> Iterator[dict[str, Any]]:
    """Open handle of every tensor name in a folder's safetensors files. Raises UserError naming a damaged file."""
    with ExitStack() as stack:
        homes: dict[str, Any] = {}
        for path in weight_files(folder):
            if path.suffix != ".safetensors":
                continue
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                line = first_line(error)
                raise UserError(f"{path}: damaged weight file ({line}); copy or download it again") from None
            homes |= dict.fromkeys(file.keys(), file)
        yield homes


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
    """Copies the tensors of one MTP layer out of open files, one at a time."""

    def __init__(self, homes: dict[str, Any], names: LayerNames, source: str, block: tuple[int, int]):
        """`block`: rows and columns that share one scale in FP8 tensors."""
        self.homes, self.names, self.source, self.block = homes, names, source, block

    def fill(self, values: dict[str, Tensor]) -> None:
        """Fill the tensors of an `MtpLayer`. Raises UserError on one that is missing, unknown, misshapen or not finite."""
        parts = {name: part for ours, value in values.items() for name, part in self._parts(ours, value)}
        missing = sorted(parts.keys() - self.homes.keys())
        if missing:
            raise UserError(
                f"{self.source}: tensor {missing[0]} is missing ({len(missing)} in all); the MTP layer is not complete"
            )
        known = parts.keys() | {name + _SCALE for name in parts if self._quantised(name)}
        unknown = sorted(name for name in self.homes if self.names.owns(name) and name not in known)
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

    def _quantised(self, name: str) -> bool:
        return str(self.homes[name].get_slice(name).get_dtype()).startswith("F8")

    def _copy(self, name: str, part: Tensor) -> None:
        """Read one tensor into its place."""
        self._check_shape(name, list(part.shape))
        tensor = self.homes[name].get_tensor(name)
        if self._quantised(name):
            tensor = self._dequantised(name, tensor)
        if not tensor.isfinite().all():
            raise UserError(f"{self.source}: tensor {name} holds NaN or infinite values; copy or download it again")
        part.copy_(tensor)

    def _dequantised(self, name: str, tensor: Tensor) -> Tensor:
        """float32 values of an FP8 tensor with one scale per block of the last two dimensions."""
        scale = name + _SCALE
        rows, columns = tensor.shape[-2:]
        if scale not in self.homes:
            raise UserError(
                f"{self.source}: tensor {scale} is missing; the FP8 tensor {name} cannot be read without it"
            )
        blocks = [ceil(rows / self.block[0]), ceil(columns / self.block[1])]
        self._check_shape(scale, [*tensor.shape[:-2], *blocks])
        scales: Tensor = self.homes[scale].get_tensor(scale).float()
        for dim, size in zip((-2, -1), self.block, strict=True):
            scales = scales.repeat_interleave(size, dim)
        return tensor.float() * scales[..., :rows, :columns]

    def _check_shape(self, name: str, expected: list[int]) -> None:
        shape = list(self.homes[name].get_slice(name).get_shape())
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
            theirs = self.homes[name].get_slice(name)[:64]
            if not torch.equal(theirs.to(ours.dtype), ours[:64].cpu()):
                raise UserError(
                    f"{self.source}: {name} is not the target's {what}, which an MTP layer shares; this layer belongs to "
                    "another target"
                )
