"""Checkpoint folders on disk: finding, checking, loading and fingerprinting them. Every fault is a one-line UserError."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from ecospec_runtime.config import is_hub_id
from ecospec_runtime.console import note
from ecospec_runtime.errors import UserError, first_line
from ecospec_runtime.mxfp4 import keeping_mxfp4
from ecospec_runtime.placement import Placement, check_placed, loading_arguments
from ecospec_runtime.quantization import FP8, GPT_OSS, MXFP4, dequantized, method_of, stays_mxfp4, stays_quantized
from ecospec_runtime.weights import SINGLE, StoredTensor, checkpoint_files, indexed_files, own_pages, read_folder

# mxfp4: as auto, and the experts stay as stored on any device
DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    MXFP4: "auto",
}
_WHOLE, _TOTAL = 4 << 20, 2 << 30  # bytes: a tensor up to this size is hashed whole; what is hashed in all, at most
_SLICE = 64 << 10
_HUB_FILES = ["*.json", "*.txt", "*.jinja", "*.model", "tokenizer*"]  # beside weights; subfolders hold other formats


def resolve_folder(source: str, role: str) -> Path:
    """Local folder of a checkpoint given as folder or hub id; raises UserError if it is missing or incomplete."""
    folder = Path(source)
    if not source.strip():
        raise UserError(f"{role}: the name is empty; pass a local folder or a hub id of the form owner/name")
    if not os.path.exists(folder):  # unlike Path.exists, not an error where the name is too long
        if not is_hub_id(source):
            raise UserError(f"{role} {source}: no such folder; pass a local folder or a hub id of the form owner/name")
        folder = _download(source, role)
    if not (folder / "config.json").is_file():
        raise UserError(f"{role} {source}: no config.json in this folder; pass the folder of a saved model")
    refuse_pointers(weight_files(folder), role)
    if not weight_files(folder):
        raise UserError(f"{role} {source}: no weights (*.safetensors or pytorch_model*.bin) beside config.json")
    return folder


def _download(source: str, role: str) -> Path:
    """Folder of a hub id in the hub's cache, downloaded where it is not there yet: safetensors, else PyTorch files."""
    try:
        for weights in ("*.safetensors", "pytorch_model*.bin"):
            folder = Path(snapshot_download(source, allow_patterns=[*_HUB_FILES, weights], ignore_patterns=["*/*"]))
            if weight_files(folder):
                break
    except (OSError, ValueError) as error:
        raise UserError(
            f"{role} {source}: no such local folder, and the hub does not give it ({first_line(error)}); check the id and the "
            "connection, and `hf auth login` for a gated model"
        ) from None
    return folder


def read_config(folder: Path, role: str) -> dict[str, Any]:
    """Parsed `config.json`; raises UserError if it is not a JSON object."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{role} {folder / 'config.json'}: not readable JSON ({first_line(error)})") from None
    if not isinstance(config, dict):
        raise UserError(f"{role} {folder / 'config.json'}: not a JSON object")
    return config


def weight_files(folder: Path) -> list[Path]:
    """Weight files of a folder in a fixed order: model.safetensors, else those of a whole index, else whatever lies there."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    files = sorted(folder.glob("*.safetensors"))
    indexed = [file for file in files if file.name in indexed_files(folder)]
    complete = indexed and len(indexed) == len(indexed_files(folder))
    return (indexed if complete else files) or sorted(folder.glob("pytorch_model*.bin"))


def refuse_pointers(files: list[Path], role: str) -> None:
    """Raise UserError for a file that stands for one that git LFS has not fetched."""
    for file in files:
        if file.stat().st_size < 1024 and file.read_bytes().startswith(b"version https://git-lfs"):
            raise UserError(f"{role} {file}: a git LFS pointer, not the weights; run `git lfs pull` in that folder")


def load_model(folder: Path, source: str, dtype: str, placement: Placement = Placement()) -> Any:
    """Load a causal language model, attention sdpa or eager; raises UserError naming what is wrong.

    Nothing but the weights and one conversion at a time is in memory; see `ecospec_runtime.weights`.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype '{dtype}' is not supported; use one of {', '.join(DTYPES)}")
    settings = read_config(folder, "target")
    if "draft_vocab_size" in settings:
        raise UserError(f"target {source}: this is a draft head; the target is the model that it drafts for")
    try:
        with _silent(), own_pages():
            model, info = _load(folder, source, dtype, placement, settings)
            if placement.single is not None and placement.tp == 1 and not getattr(model, "is_quantized", False):
                model = model.to(placement.single)
    except UserError:
        raise
    except SafetensorError as error:
        raise UserError(f"target {source}: damaged weight file ({error}); copy or download it again") from None
    except Exception as error:  # transformers and the hub's strict configurations have families of their own
        raise UserError(f"target {source}: transformers cannot load it ({first_line(error)})") from None
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"target {source}: {len(missing)} weights are missing from its files, first {missing[0]}")
    for name, saved, expected in sorted(info["mismatched_keys"]):
        raise UserError(
            f"target {source}: {name} has shape {list(saved)}, config.json asks for {list(expected)}; config and weights "
            "are not of one model"
        )
    if model.config._attn_implementation not in ("sdpa", "eager"):
        model.set_attn_implementation("eager")
    check_placed(model, placement, source)
    return model


def _load(folder: Path, source: str, dtype: str, placement: Placement, settings: dict[str, Any]) -> tuple[Any, Any]:
    """The model and transformers' loading info."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    arguments: dict[str, Any] = {
        "output_loading_info": True, "ignore_mismatched_sizes": True, **loading_arguments(placement)
    }  # fmt: skip
    method = method_of(settings)
    files = checkpoint_files(folder, source)
    native = stays_quantized(method, dtype, placement.single)
    if native and method not in {
        *AUTO_QUANTIZATION_CONFIG_MAPPING,
        "bitsandbytes",
    }:  # transformers would load its numbers as they are
        raise UserError(f"target {source}: config.json: quant_method '{method}' is not one that transformers knows")
    if method in (FP8, MXFP4) and not native and not files:
        raise UserError(f"target {source}: {method} weights are read from model.safetensors files, there are none")
    if dtype == MXFP4 and (method != MXFP4 or config.model_type != GPT_OSS):
        raise UserError(
            f"target {source}: --dtype mxfp4 is for GPT-OSS checkpoints in MXFP4, and this is not one; use auto, float32 or bfloat16"
        )
    if native or not files or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=DTYPES[dtype], **arguments)
        return loaded[0], loaded[1]
    tensors = read_folder(files)
    kept = plain_dtype(config, tensors, dtype)
    packed = stays_mxfp4(method, config.model_type, dtype, kept, placement.single)
    stored = dequantized(tensors, settings, f"target {source}", kept, packed)
    kind, config = _model_class(config)
    if packed:
        kind = keeping_mxfp4(kind)
    elif method is not None:
        _announce(source, str(method), tensors, stored, kept)
    if (folder / "generation_config.json").is_file():
        arguments["generation_config"] = GenerationConfig.from_pretrained(folder)
    with _one_by_one():
        return kind.from_pretrained(None, config=config, state_dict=stored, dtype=kept, **arguments)


def _model_class(config: Any) -> tuple[Any, Any]:
    """The architecture's class and the configuration it takes, without one of quantisation."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if isinstance(kind, tuple):
        named = {one.__name__: one for one in kind}
        kind = next((named[name] for name in config.architectures or () if name in named), kind[0])
    if kind.config_class is not type(config):
        config = config.get_text_config()
    for holder in (config, config.get_text_config()):
        if hasattr(holder, "quantization_config"):
            del holder.quantization_config
    return kind, config


def plain_dtype(config: Any, tensors: Mapping[str, StoredTensor], dtype: str) -> torch.dtype:
    """The dtype that `--dtype` means: for auto the configuration's, else that of the first weight, else bfloat16."""
    asked = DTYPES[dtype]
    if isinstance(asked, torch.dtype):
        return asked
    named = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if named is not None:
        return getattr(torch, named) if isinstance(named, str) else named  # type: ignore[no-any-return]
    plain = (t.dtype for t in tensors.values() if t.dtype in (torch.float32, torch.bfloat16, torch.float16))
    return next(plain, torch.bfloat16)


def _announce(
    source: str, method: str, tensors: Mapping[str, Any], stored: Mapping[str, Any], dtype: torch.dtype
) -> None:
    """One note: what dequantising costs in memory."""
    disk = sum(tensor.nbytes for tensor in tensors.values())
    memory = sum(torch.Size(tensor.shape).numel() for tensor in stored.values()) * dtype.itemsize
    note(
        f"target {source}: its {method.upper()} weights are dequantised to {str(dtype).removeprefix('torch.')}, "
        f"{memory / 1e9:.2f} GB in memory for {disk / 1e9:.2f} GB on disk"
    )


@contextmanager
def _one_by_one() -> Iterator[None]:
    """transformers reads weights when it converts them, not all at once ahead in threads of its own."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _silent() -> Iterator[None]:
    """Without the reports of transformers about weights that do not fit: what matters of them is raised."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def fingerprint(folder: Path) -> str:
    """sha256 over names, types, shapes and bytes of all weights; of the base weights if the folder says it was widened.

    Of tensors above 4 MiB (less where that would come to more than 2 GiB), evenly spread slices of 64 KiB enter, so that a
    model of any size takes seconds.
    """
    base = read_config(folder, "checkpoint").get("ecospec_widened_from")
    if isinstance(base, str) and base:
        return base
    digest = hashlib.sha256()
    paths = weight_files(folder)
    if paths[0].suffix != ".safetensors":
        for path in paths:
            with path.open("rb") as file:
                while part := file.read(_WHOLE):
                    digest.update(part)
        return digest.hexdigest()
    tensors = read_folder(paths)
    whole = _WHOLE
    if sum(min(tensor.nbytes, _WHOLE) for tensor in tensors.values()) > _TOTAL:
        whole = min(_WHOLE, _TOTAL // len(tensors))
    size = min(_SLICE, whole // 2)
    for name in sorted(tensors):
        _hash_tensor(digest, tensors[name], size, whole // size)
    return digest.hexdigest()


def _hash_tensor(digest: Any, tensor: StoredTensor, size: int, slices: int) -> None:
    """Of a tensor larger than `slices` times `size` bytes, that many slices."""
    digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
    if tensor.nbytes <= slices * size:
        digest.update(tensor.data(0, tensor.nbytes))
        return
    for i in range(slices):
        start = i * (tensor.nbytes - size) // (slices - 1)
        digest.update(tensor.data(start, size))
