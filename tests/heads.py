"""EAGLE-3 heads for tests: copies of a flat head with an edit, or in the speculators layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Edit = Callable[[dict[str, Tensor], dict[str, Any]], None]
INNER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
         "vocab_size", "rms_norm_eps", "hidden_act", "rope_theta", "max_position_embeddings", "attention_bias",
         "tie_word_embeddings", "model_type")  # fmt: skip


def edit_head(folder: Path, out: Path, edit: Edit) -> Path:
    """A copy of a head whose tensors and config an edit has changed. Returns the new folder."""
    shutil.copytree(folder, out)
    tensors, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    edit(tensors, config)
    save_file({name: value.contiguous() for name, value in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    return out


def as_speculators(folder: Path, out: Path, embedding: Tensor, **top: Any) -> Path:
    """A flat head saved as vllm-project/speculators does; `top` changes top-level settings. Returns the new folder."""

    def edit(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
        tensors.setdefault("embed_tokens.weight", embedding.clone())
        said = dict(config)
        config.clear()
        config.update({
            "architectures": ["Eagle3DraftModel"],
            "draft_vocab_size": said["draft_vocab_size"],
            "dtype": "float32",
            "eagle_aux_hidden_state_layer_ids": None,
            "embed_requires_grad": False,
            "fc_norm": any(name.startswith(("fc_norm.", "aux_norm_")) for name in tensors),
            "has_no_defaults_at_init": False,
            "norm_before_fc": "input_norm.weight" in tensors,
            "norm_before_residual": said.get("norm_before_residual", False),
            "norm_output": said.get("norm_output", False),
            "speculators_config": {
                "algorithm": "eagle3", "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
                "verifier": {"architectures": ["Qwen3MoeForCausalLM"], "name_or_path": "somewhere/target"},
            },
            "speculators_model_type": "eagle3", "speculators_version": "0.5.0", "target_hidden_size": None,
            "tie_word_embeddings": False,
            "transformer_layer_config": {key: said[key] for key in INNER if key in said},
            **top,
        })  # fmt: skip

    return edit_head(folder, out, edit)


def norms(width: int, seed: int) -> Tensor:
    """A norm's weights that are not all alike."""
    return 1 + torch.rand(width, generator=torch.Generator().manual_seed(seed))


def biases(tensors: dict[str, Tensor], names: str) -> None:
    """Add attention biases to a head's tensors: `names` of q, k, v, o."""
    for seed, name in enumerate(names):
        weight = tensors[f"midlayer.self_attn.{name}_proj.weight"]
        generator = torch.Generator().manual_seed(20 + seed)
        tensors[f"midlayer.self_attn.{name}_proj.bias"] = torch.randn(len(weight), generator=generator)


def wider(tensors: dict[str, Tensor], config: dict[str, Any], hidden: int = 48) -> None:
    """Make a head's state wider than its target's, with an embedding of its own."""
    generator, old = torch.Generator().manual_seed(30), config["hidden_size"]
    for name, value in tensors.items():
        if name in ("d2t", "t2d"):
            continue
        shape = [hidden if n == old else 2 * hidden if n == 2 * old else n for n in value.shape]
        if name == "fc.weight":
            shape = [hidden, 3 * old]
        if "mlp" in name:  # as wide as 2 * old inside
            shape = [n if n == config["intermediate_size"] else hidden for n in value.shape]
        if "o_proj" in name:
            shape = [hidden, value.shape[1]]
        if "self_attn" in name and "o_proj" not in name:
            shape = [value.shape[0], 2 * hidden]
        tensors[name] = torch.randn(shape, generator=generator) * (0.2 if len(shape) == 2 else 0.1)
        if len(shape) == 1:
            tensors[name] += 1
    tensors["embed_tokens.weight"] = torch.randn(config["vocab_size"], hidden, generator=generator)
    config |= {"hidden_size": hidden, "target_hidden_size": old}
