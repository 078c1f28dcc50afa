"""The flat published layout of EAGLE-3 heads: settings, layer ids and weight files, with every fault refused by name.

Layout: `config.json` (flat) beside `model.safetensors` or `pytorch_model.bin`, as SafeAILab/EAGLE and SpecForge save it.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ecospec_runtime.checkpoint import read_config, weight_files
from ecospec_runtime.errors import UserError, first_line

_IGNORED = ("rotary_emb.inv_freq",)  # tensors that carry nothing the settings do not say


@dataclass(frozen=True)
class HeadConfig:
    """Settings of an EAGLE-3 head that decide its arithmetic."""

    hidden_size: int
    target_hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # of the target
    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # hidden states *entering* these target layers
    rope: dict[str, Any]  # rope_type, rope_theta and what the type needs
    max_positions: int
    eps: float = 1e-6
    norm_before_residual: bool = False  # the residual is the normed state
    norm_before_fc: bool = False  # `input_norm` over the concatenated features
    fc_norm: bool = False  # one norm per captured layer
    own_embedding: bool = False

    @property
    def groups(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    def rotary(self) -> tuple[Tensor, float]:
        """Inverse frequencies `[head_dim / 2]` and the factor on cosine and sine."""
        config = LlamaConfig(
            hidden_size=self.hidden_size, num_attention_heads=self.heads, head_dim=self.head_dim,
            max_position_embeddings=self.max_positions, rope_parameters=self.rope,
        )  # fmt: skip
        rotary = LlamaRotaryEmbedding(config)
        return rotary.inv_freq.float(), float(rotary.attention_scaling)


def entering_layers(config: dict[str, Any], target_type: str, layers: int, where: str) -> tuple[int, ...]:
    """Layer ids of a flat config as hidden states entering layers, for a target of `layers` layers.

    `eagle_config` ids mean layer *outputs* (SGLang, SpecForge), except for deepseek when the first id is not 1 and for
    gpt_oss when the largest equals the layer count; the top-level key is unshifted (vLLM). None given: 2, n//2, n-3.
    """
    nested = config.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise UserError(f"{where}: eagle_config.use_aux_hidden_state is false; only heads on captured layers work")
    outputs, plain = (part.get("eagle_aux_hidden_state_layer_ids") for part in (nested, config))
    found = [tuple(plain)] if plain else []
    if outputs:
        shifted = not (
            (target_type.startswith("deepseek") and outputs[0] != 1)
            or (target_type == "gpt_oss" and max(outputs) == layers)
        )
        found.append(tuple(i + shifted for i in outputs))
    if len(set(found)) > 1:
        raise UserError(
            f"{where}: eagle_aux_hidden_state_layer_ids says layers {found[0]} at the top level but {found[1]} in "
            "eagle_config (both as hidden states entering a layer); keep the one the head was trained with"
        )
    ids = found[0] if found else (2, layers // 2, layers - 3)
    if not all(0 <= i <= layers for i in ids):
        raise UserError(f"{where}: captured layers {ids} are not all in 0..{layers} of the target")
    return ids


def read_head_config(folder: Path, target: Any, tensors: dict[str, Tensor]) -> HeadConfig:
    """Parse `config.json` for the target; optional parts follow from the tensors present. Raises UserError."""
    where = str(folder / "config.json")
    config = read_config(folder, "drafter")
    _refuse_unsupported(config, where)
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        rope = {"rope_type": "default", "rope_theta": config.get("rope_theta") or 10000.0}
        given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        rope |= {("rope_type" if key == "type" else key): value for key, value in given.items()}
        return HeadConfig(
            hidden_size=hidden,
            target_hidden_size=int(config.get("target_hidden_size") or hidden),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            draft_vocab_size=int(config.get("draft_vocab_size") or config["vocab_size"]),
            aux_layers=entering_layers(config, str(target.config.model_type), target.config.num_hidden_layers, where),
            rope=rope,
            max_positions=int(config.get("max_position_embeddings") or 4096),
            eps=float(config.get("rms_norm_eps") or 1e-6),
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            norm_before_fc="input_norm.weight" in tensors,
            fc_norm="fc_norm.0.weight" in tensors,
            own_embedding="embed_tokens.weight" in tensors,
        )
    except KeyError as error:
        raise UserError(f"{where}: key {error} is missing; this is not a complete EAGLE-3 config") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: unreadable value ({error})") from None


def _refuse_unsupported(config: dict[str, Any], where: str) -> None:
    """Raise UserError on settings that would change the arithmetic in a way this loader does not know."""
    if config.get("speculators_model_type"):
        raise UserError(f"{where}: the speculators layout is not supported yet; convert the head to the flat layout")
    if config.get("num_hidden_layers", 1) != 1:
        raise UserError(f"{where}: num_hidden_layers is {config['num_hidden_layers']}; an EAGLE-3 head has 1")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: hidden_act '{config['hidden_act']}' is not supported; only silu")
    if config.get("norm_output"):
        raise UserError(f"{where}: norm_output true is not supported; only heads that feed their pre-norm state")
    for key in ("rope_scaling", "rope_parameters"):
        kind = (config.get(key) or {}).get("rope_type") or (config.get(key) or {}).get("type")
        if kind in ("dynamic", "longrope"):
            raise UserError(f"{where}: {key} of type '{kind}' is not supported")


def check_fit(config: HeadConfig, target: Any, where: str) -> None:
    """Raise UserError, naming both sizes, if the head was made for another hidden size or vocabulary."""
    if config.draft_vocab_size > target.vocab_size:
        raise UserError(
            f"{where}: draft vocabulary of {config.draft_vocab_size} tokens is larger than the target's "
            f"{target.vocab_size}; this head belongs to another target"
        )
    if config.vocab_size != target.vocab_size:
        raise UserError(
            f"{where}: made for a vocabulary of {config.vocab_size} tokens, the target has {target.vocab_size}; "
            "use a head trained for this target and tokenizer"
        )
    if config.target_hidden_size != target.hidden_size:
        raise UserError(
            f"{where}: made for a target of hidden size {config.target_hidden_size}, this one has {target.hidden_size}; "
            "use a head trained for this target"
        )
    if not config.own_embedding and config.hidden_size != target.hidden_size:
        raise UserError(
            f"{where}: no embed_tokens.weight, and the target's embedding ({target.hidden_size} wide) does not fit "
            f"hidden size {config.hidden_size}; use a checkpoint that carries its embedding"
        )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's weight files, older names of the feature norms translated. Raises UserError."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            loaded = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            line = first_line(error)
            raise UserError(f"{path}: damaged or unsafe weight file ({line}); copy or download it again") from None
        tensors |= loaded
    for i, old in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
        if f"{old}.weight" in tensors:
            tensors[f"fc_norm.{i}.weight"] = tensors.pop(f"{old}.weight")
    return {name: value for name, value in tensors.items() if not name.endswith(_IGNORED)}


def checked_map(config: HeadConfig, tensors: dict[str, Tensor], where: str) -> Tensor:
    """Target ids `[draft_vocab]` of the draft vocabulary; raises UserError unless nonzero(t2d) == arange + d2t."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    arange = torch.arange(config.draft_vocab_size)
    if d2t is None and t2d is None and config.draft_vocab_size == config.vocab_size:
        return arange
    for name, value, size in (("d2t", d2t, config.draft_vocab_size), ("t2d", t2d, config.vocab_size)):
        if value is None:
            raise UserError(
                f"{where}: tensor {name} is missing; a draft vocabulary of {config.draft_vocab_size} out of "
                f"{config.vocab_size} tokens cannot be read without it"
            )
        if value.shape != (size,):
            raise UserError(f"{where}: tensor {name} has shape {list(value.shape)}, expected [{size}]")
    assert d2t is not None
    assert t2d is not None
    kept = t2d.bool().nonzero().flatten()
    if kept.shape == arange.shape and torch.equal(kept, arange + d2t.long()):
        return kept
    if kept.shape == arange.shape and torch.equal(kept, d2t.long()):
        raise UserError(f"{where}: d2t holds absolute ids; the layout wants offsets: save d2t - arange(len(d2t))")
    raise UserError(
        f"{where}: d2t and t2d contradict each other (nonzero(t2d) must equal arange + d2t); re-export the head"
    )
