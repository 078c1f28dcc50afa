"""Drafters: what proposes the candidate tree. `load_drafter` is the only door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ecospec_runtime.checkpoint import DTYPES, read_config, resolve_folder
from ecospec_runtime.drafters.base import Drafter
from ecospec_runtime.drafters.causal_lm import load_causal_lm
from ecospec_runtime.drafters.eagle3 import load_eagle3
from ecospec_runtime.drafters.mtp import has_mtp_layer, load_mtp
from ecospec_runtime.drafters.ngram import NgramDrafter, is_ngram, parse_ngram
from ecospec_runtime.errors import UserError

__all__ = ["Drafter", "load_drafter"]


def load_drafter(id_or_folder: str | Path, target: Any, dtype: str = "auto") -> Drafter:
    """Load the drafter in a local folder or hub id for a loaded target, or `ngram`, which is made from nothing.

    `dtype` is float32, bfloat16 or auto. Raises UserError if there is no such drafter or it cannot serve the target.
    """
    source = str(id_or_folder)
    if dtype not in DTYPES:
        raise UserError(f"dtype '{dtype}' is not supported; use one of {', '.join(DTYPES)}")
    dtype = "auto" if DTYPES[dtype] == "auto" else dtype  # what a target keeps is no matter here
    if is_ngram(source):
        return NgramDrafter(parse_ngram(source), target, source)
    folder = resolve_folder(source, "drafter")
    config = read_config(folder, "drafter")
    said = config.get("architectures") or []
    architectures = [said] if isinstance(said, str) else list(map(str, said)) if isinstance(said, list) else [str(said)]
    if any("Eagle3" in name for name in architectures) or config.get("speculators_model_type") == "eagle3":
        return load_eagle3(folder, source, target, dtype)
    if has_mtp_layer(folder, config, target):
        return load_mtp(folder, source, target, dtype)
    if any(name.endswith("ForCausalLM") for name in architectures):
        return load_causal_lm(folder, source, target, dtype)
    if any("NextN" in name or "MTP" in name for name in architectures):
        raise UserError(f"drafter {source}: no MTP layer in *.safetensors files here; other formats are not read")
    raise UserError(
        f"drafter {source}: architectures {architectures} in config.json is not a supported kind; use an EAGLE-3 head, a "
        "checkpoint with a multi-token-prediction layer, a causal language model with the target's tokenizer, or ngram"
    )
