"""A drafter that is sure of itself and wrong, made of a good one: a copy of its folder with other output weights.

Of an EAGLE-3 head the rows of the output matrix change places, so that it names other tokens than it means. A
multi-token-prediction layer shares the target's output matrix: there random channels of its last norm change sign. Both are
multiplied by `SHARPER`. Its drafts cost what the good one's cost.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from ecospec_runtime.checkpoint import resolve_folder, weight_files
from ecospec_runtime.drafters.ngram import is_ngram
from ecospec_runtime.errors import UserError
from ecospec_runtime.weights import SINGLE, read_folder

SHARPER = 4.0
HEAD, NORM = "lm_head.weight", "shared_head.norm.weight"


def write_liar(drafter: str, out: Path, seed: int = 0) -> Path:
    """Write the liar that a drafter makes to a new folder; returns it. UserError for kinds without weights of these names."""
    known = f"drafter {drafter}: a liar is made of an EAGLE-3 head or a multi-token-prediction layer; give one of them"
    if is_ngram(drafter):
        raise UserError(known)
    folder = resolve_folder(drafter, "drafter")
    tensors = {name: tensor[...] for name, tensor in read_folder(weight_files(folder)).items()}
    name = next((n for end in (NORM, HEAD) for n in tensors if n.endswith(end)), None)
    if name is None:
        raise UserError(known)
    value, generator = tensors[name], torch.Generator().manual_seed(seed)
    if name.endswith(NORM):
        signs = torch.randint(2, value.shape, generator=generator) * 2 - 1
        tensors[name] = value * (signs * SHARPER).to(value.dtype)
    else:
        order = torch.randperm(len(value), generator=generator)
        moved = torch.empty_like(value)
        moved[order] = value[order.roll(1)]  # one cycle: no row stays
        tensors[name] = moved * SHARPER
    out.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.json"):
        if not path.name.endswith(".index.json"):
            shutil.copyfile(path, out / path.name)
    save_file(tensors, out / SINGLE, metadata={"format": "pt"})
    return out
