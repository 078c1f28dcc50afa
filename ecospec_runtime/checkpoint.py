"""Checkpoint folders on disk: finding, checking, loading and fingerprinting them. Every fault is a one-line UserError."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ecospec_runtime.errors import UserError, first_line

DTYPES: dict[str, torch.dtype | str] = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16}
_WHOLE = 4 << 20  # bytes: a tensor up to this size is hashed whole
_SLICE, _SLICES = 64 << 10, 64
_HUB_FILES = ["*.json", "*.txt", "*.jinja", "*.model", "tokenizer*"]  # beside weights; subfolders hold other formats


def resolve_folder(source: str, role: str) -> Path:
    """Local folder of a checkpoint given as folder or hub id; raises UserError if it is missing or incomplete."""
    folder = Path(source)
    if not folder.exists():
        if source.startswith((".", "/", "~")) or source.count("/") != 1:
            raise UserError(f"{role} {source}: no such folder; pass a local folder or a hub id of the form owner/name")
        folder = _download(source, role)
    if not (folder / "config.json").is_file():
        raise UserError(f"{role} {source}: no config.json in this folder; pass the folder of a saved model")
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
    except (OSError, ValueError) as error:
        raise UserError(f"{role} {folder / 'config.json'}: not readable JSON ({error})") from None
    if not isinstance(config, dict):
        raise UserError(f"{role} {folder / 'config.json'}: not a JSON object")
    return config


def weight_files(folder: Path) -> list[Path]:
    """Weight files of a folder, safetensors preferred, in a fixed order."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def load_model(folder: Path, source: str, dtype: str) -> Any:
    """Load a causal language model on the CPU, attention sdpa or eager; raises UserError naming what is wrong."""
    if dtype not in DTYPES:
        raise UserError(f"dtype '{dtype}' is not supported; use one of {', '.join(DTYPES)}")
    if "draft_vocab_size" in read_config(folder, "target"):
        raise UserError(f"target {source}: this is a draft head; the target is the model that it drafts for")
    try:
        with _silent():
            config = AutoConfig.from_pretrained(folder)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=DTYPES[dtype], output_loading_info=True, ignore_mismatched_sizes=True
            )
        model, info = loaded
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
    return model


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

    Of tensors above 4 MiB, 64 evenly spread slices of 64 KiB enter, so that a model of any size takes seconds.
    """
    base = read_config(folder, "checkpoint").get("ecospec_widened_from")
    if isinstance(base, str) and base:
        return base
    digest = hashlib.sha256()
    paths = weight_files(folder)
    if paths[0].suffix != ".safetensors":
        for path in paths:
            digest.update(path.read_bytes())
        return digest.hexdigest()
    with ExitStack() as stack:
        homes: dict[str, Any] = {}
        for path in paths:
            file = stack.enter_context(safe_open(path, framework="pt"))
            homes.update(dict.fromkeys(file.keys(), file))
        for name in sorted(homes):
            _hash_tensor(digest, name, homes[name].get_tensor(name))
    return digest.hexdigest()


def _hash_tensor(digest: Any, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    data = tensor.contiguous().flatten().view(torch.uint8).numpy() if tensor.numel() else b""
    if len(data) <= _WHOLE:
        digest.update(data)
        return
    for i in range(_SLICES):
        start = i * (len(data) - _SLICE) // (_SLICES - 1)
        digest.update(data[start : start + _SLICE])
