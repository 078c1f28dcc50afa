"""Quantised checkpoints: which stay quantised, and how the others are read in full precision, tensor by tensor.

The rule: FP8 block-scaled weights stay FP8 with `--dtype auto` on a CUDA device that computes in FP8 (capability 8.9 or
later, package `kernels` installed). GPT-OSS's MXFP4 experts stay MXFP4 with `--dtype auto` where the Triton kernels run and
the other weights are of 16 bits, and with `--dtype mxfp4` everywhere: the experts of `mxfp4.py`, since transformers' native
layer routes inside its own kernel, where no routing can be read. On every other device, or with `--dtype float32` or
`bfloat16`, both are dequantised. Every other method is transformers' own affair.

Formats: DeepSeek-V3's FP8 (`X.weight` float8_e4m3fn with `X.weight_scale_inv`, one scale per block of 128 x 128, the
last blocks cut off at the edge) and the OCP Microscaling specification's MXFP4 in GPT-OSS's layout (`X_blocks` uint8
[E, R, G, 16], low nibble first, `X_scales` uint8 [E, R, G], 2**(s - 127) per group of 32) for `X` [E, 32 G, R].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ecospec_kernels import dispatch
from ecospec_kernels.expert_mlp.reference import GROUP, Mxfp4, exponents
from ecospec_runtime.errors import UserError
from ecospec_runtime.weights import StoredTensor, own_memory

FP8, MXFP4 = "fp8", "mxfp4"
GPT_OSS = "gpt_oss"
FP8_CAPABILITY = (8, 9)
REMEDY = "the file is damaged or was not written in this layout; copy or download it again"
_SCALE, _SCALES = "_scale_inv", "_scales"


def method_of(config: Mapping[str, Any]) -> str | None:
    """`quant_method` of a parsed config.json, lower case; None for plain weights."""
    entry = _settings(config)
    if entry is None:
        return None
    old = "bitsandbytes" if entry.get("load_in_4bit") or entry.get("load_in_8bit") else "(none named)"
    return str(entry.get("quant_method", old)).lower()


def stays_quantized(method: str | None, dtype: str, device: str | None) -> bool:
    """Whether transformers' own quantised layers are used on `device` (None: several); see the module docstring."""
    if method is None or method == MXFP4:
        return False
    if method != FP8:
        return True
    return dtype == "auto" and computes_fp8(device)


def stays_mxfp4(method: str | None, model_type: str, dtype: str, kept: torch.dtype, device: str | None) -> bool:
    """Whether experts stay MXFP4 on `device` (None: several) beside other weights of dtype `kept`; see the module docstring."""
    if method != MXFP4 or model_type != GPT_OSS:
        return False
    return dtype == MXFP4 or (dtype == "auto" and kept.itemsize == 2 and computes_mxfp4(device))


def computes_mxfp4(device: str | None) -> bool:
    """Whether the Triton kernels run on `device`; None stands for all CUDA devices of this machine."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return dispatch.runs_triton(torch.empty(0, device=device))


def computes_fp8(device: str | None) -> bool:
    """Whether transformers has FP8 kernels for `device`; None stands for all CUDA devices of this machine."""
    from transformers.utils import is_kernels_available

    if device is not None and torch.device(device).type != "cuda":
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_CAPABILITY and is_kernels_available()


@dataclass(frozen=True)
class Fp8Weight:
    """An FP8 weight [..., R, C] with its scales, read as `dtype`. Slices like a `StoredTensor`."""

    weight: StoredTensor
    scale: StoredTensor
    block: tuple[int, int]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.shape

    def get_shape(self) -> list[int]:
        """Shape, as transformers asks for it."""
        return list(self.shape)

    def check(self, where: str) -> None:
        """Raise UserError unless there is one scale for each block."""
        rows, columns = self.shape[-2:]
        grid = (math.ceil(rows / self.block[0]), math.ceil(columns / self.block[1]))
        expected = (*self.shape[:-2], *grid)
        whole = grid == (1, 1) and math.prod(self.scale.shape) == math.prod(
            expected
        )  # a scale per weight, of any shape
        if self.scale.shape != expected and not whole:
            raise UserError(
                f"{where}: {self.scale} has shape {list(self.scale.shape)}, {list(expected)} is one scale per "
                f"{self.block[0]} x {self.block[1]} block of {self.weight.name} {list(self.shape)}; {REMEDY}"
            )

    def __getitem__(self, index: Any) -> Tensor:
        scale = scale_values(self.scale)
        rows, columns = self.shape[-2:]
        out = own_memory(self.shape, self.dtype)
        matrices, flat = out.view(-1, rows, columns), self.weight.reshaped(-1, rows, columns)
        grids = scale.reshape(len(matrices), math.ceil(rows / self.block[0]), -1)
        for m, grid in enumerate(grids):
            values = flat.rows(m, m + 1)[0]
            for i, row in enumerate(grid):
                part = slice(i * self.block[0], (i + 1) * self.block[0])
                matrices[m, part] = values[part].float() * row.repeat_interleave(self.block[1])[:columns]
        return out if index is Ellipsis else out[index].clone()


def scale_values(stored: StoredTensor) -> Tensor:
    """FP8 block scales in float32; bytes are exponents (E8M0). Raises UserError for NaN, Inf or zero."""
    scale = stored[...]
    scale = exponents(scale) if scale.dtype == torch.uint8 else scale.float()
    bad = ~torch.isfinite(scale) | (scale == 0)
    if bad.any():
        where = torch.nonzero(bad)[0].tolist()
        raise UserError(f"{stored.path}: {stored.name} {where} is {scale[bad][0].item()}, not a scale; {REMEDY}")
    return scale


@dataclass(frozen=True)
class Mxfp4Weight:
    """MXFP4 experts of one layer, read as `dtype` [E, 32 G, R]. Slices like a `StoredTensor`."""

    blocks: StoredTensor  # uint8 [E, R, G, 16]
    scales: StoredTensor  # uint8 [E, R, G]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantised weight."""
        experts, rows, groups, _ = self.blocks.shape
        return experts, groups * GROUP, rows

    def get_shape(self) -> list[int]:
        """Shape, as transformers asks for it."""
        return list(self.shape)

    def check(self, where: str) -> None:
        """Raise UserError unless blocks and scales fit each other."""
        for part in (self.blocks, self.scales):
            if part.dtype != torch.uint8:
                raise UserError(f"{where}: {part} is {part.dtype}, MXFP4 is stored as uint8; {REMEDY}")
        shape = self.blocks.shape
        if len(shape) != 4 or shape[-1] != GROUP // 2 or self.scales.shape != shape[:-1]:
            raise UserError(
                f"{where}: {self.scales} has shape {list(self.scales.shape)}, {self.blocks.name} {list(shape)}; "
                f"MXFP4 is blocks [experts, rows, groups, 16] and scales [experts, rows, groups]; {REMEDY}"
            )

    def __getitem__(self, index: Any) -> Tensor:
        out = own_memory(self.shape, self.dtype)
        scales = Mxfp4Scales(**vars(self.scales))[...]
        for e in range(len(out)):
            out[e] = Mxfp4(self.blocks.rows(e, e + 1), scales[e : e + 1]).dequantized(0).T
        return out if index is Ellipsis else out[index].clone()


class Mxfp4Scales(StoredTensor):
    """Scales of MXFP4 experts, read as they are. Reading raises UserError for a NaN."""

    def __getitem__(self, index: Any) -> Tensor:
        scales = super().__getitem__(...)
        bad = scales.view(len(scales), -1).eq(255).any(1)
        if bad.any():
            raise UserError(f"{self.path}: {self.name} [{int(bad.int().argmax())}] holds the code 255, NaN; {REMEDY}")
        return scales if index is Ellipsis else scales[index].clone()


Stored = StoredTensor | Fp8Weight | Mxfp4Weight


def dequantized(
    tensors: Mapping[str, StoredTensor],
    config: Mapping[str, Any],
    where: str,
    dtype: torch.dtype,
    keep_mxfp4: bool = False,
) -> dict[str, Stored]:
    """The tensors of a checkpoint under their plain names: FP8 and MXFP4 ones are read as `dtype`, others as they are.

    With `keep_mxfp4` blocks and scales keep their names and bytes. `config` is the parsed config.json, `where` begins every message. Raises UserError, naming file and tensor, for scales that are missing or do not fit and weights that are stored twice.
    """
    block = _block_size(config, where)
    found: dict[str, Stored] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        if name.endswith("_blocks") and tensor.dtype == torch.uint8:
            plain = name.removesuffix("_blocks")
            weight = Mxfp4Weight(tensor, _companion(tensor, plain + _SCALES, tensors, where), dtype)
            weight.check(where)
            if plain in tensors:
                raise UserError(f"{where}: {tensors[plain]} and {name} are the same weights, stored twice; {REMEDY}")
            kept = {name: tensor, plain + _SCALES: Mxfp4Scales(**vars(weight.scales))}
            found |= kept if keep_mxfp4 else {plain: weight}
            used |= kept.keys()
        elif tensor.dtype == torch.float8_e4m3fn:
            if len(tensor.shape) < 2:
                raise UserError(
                    f"{where}: {tensor} is FP8 of shape {list(tensor.shape)}; only matrices are stored so. {REMEDY}"
                )
            scale = _companion(tensor, name + _SCALE, tensors, where)
            found[name] = fp8 = Fp8Weight(tensor, scale, block or (tensor.shape[-2], tensor.shape[-1]), dtype)
            fp8.check(where)
            used |= {name, name + _SCALE}
    rest = {name: tensor for name, tensor in tensors.items() if name not in used}
    for name in rest:
        if name.endswith(_SCALES) and name.removesuffix(_SCALES).endswith("_proj") and rest[name].dtype == torch.uint8:
            raise UserError(f"{where}: {rest[name]} holds scales of weights that are missing; {REMEDY}")
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) in rest:
            raise UserError(f"{where}: {rest[name]} is a scale, but its weight is not stored as FP8; {REMEDY}")
    return found | rest


def _companion(tensor: StoredTensor, name: str, tensors: Mapping[str, StoredTensor], where: str) -> StoredTensor:
    if name not in tensors:
        raise UserError(f"{where}: {tensor} is quantised, and its scales {name} are missing; {REMEDY}")
    return tensors[name]


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    inner = config.get("text_config")
    entry = config.get("quantization_config") or (isinstance(inner, Mapping) and inner.get("quantization_config"))
    return entry if isinstance(entry, Mapping) else None


def _block_size(config: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """`weight_block_size`; None means one scale per weight."""
    size = (_settings(config) or {}).get("weight_block_size")
    if size is None:
        return None
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise UserError(f"{where}: config.json: weight_block_size {size!r} is not two positive numbers")
    return size[0], size[1]
