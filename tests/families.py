"""Tiny instances of the three seed families, with all that is special about them, for tests that need few layers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ecospec_runtime.architectures import Architecture, save

PROMPT = 9  # tokens
# The window is shorter than a tree is deep: positions of the pass's own keys matter.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "gpt_oss": {"sliding_window": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": {"num_key_value_heads": 4, "n_group": 4, "topk_group": 2},
}  # fmt: skip


def save_family(name: str, folder: Path) -> Path:
    """Save a random instance of two layers in float32. Returns the folder."""
    save(Architecture(name, "", {"num_hidden_layers": 2, **FAMILIES[name]}), folder)
    return folder


def greedy_text(folder: Path, tokens: int) -> list[int]:
    """A prompt of `PROMPT` tokens and what transformers' own model says after it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([random.Random(3).sample(range(1, 96), PROMPT)])
    text = model.generate(prompt, do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0)
    return text[0].tolist()
