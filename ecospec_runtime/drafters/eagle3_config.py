"""Published EAGLE-3 heads: settings, vocabulary map and weight files, with every fault refused by name.

A folder holds `config.json` beside `model.safetensors` or `pytorch_model.bin`, in one of the layouts of `eagle3_layouts`.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ecospec_runtime.checkpoint import read_config, weight_files
from ecospec_runtime.drafters.eagle3_layouts import (
    doubts,
    entering_layers,
    flag,
    flat_settings,
    flat_tensors,
    norm_flag,
    refuse_unsupported,
    rope,
)
from ecospec_runtime.drafters.vocabulary import check_vocabulary
from ecospec_runtime.errors import UserError, first_line


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
    norm_output: bool = False  # the normed state feeds on, not the plain one
    qkv_bias: bool = False
    out_bias: bool = False
    own_embedding: bool = False
    notes: tuple[str, ...] = ()  # what loads and may still be wrong, one line each

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


def read_head_config(folder: Path, target: Any, tensors: dict[str, Tensor]) -> HeadConfig:
    """Parse `config.json` of either layout for the target; optional parts follow from the tensors present. Raises UserError."""
    where = str(folder / "config.json")
    config = read_config(folder, "drafter")
    try:
        c = flat_settings(config, where)
        refuse_unsupported(c, tensors, where)
        hidden, heads = int(c["hidden_size"]), int(c["num_attention_heads"])
        ids = entering_layers(c, str(target.config.model_type), target.config.num_hidden_layers, where)
        biased = "midlayer.self_attn.q_proj.bias" in tensors
        head = HeadConfig(
            hidden_size=hidden,
            target_hidden_size=int(c.get("target_hidden_size") or hidden),
            heads=heads,
            kv_heads=int(c.get("num_key_value_heads") or heads),
            head_dim=int(c.get("head_dim") or hidden // heads),
            intermediate_size=int(c["intermediate_size"]),
            vocab_size=int(c["vocab_size"]),
            draft_vocab_size=int(c.get("draft_vocab_size") or c["vocab_size"]),
            aux_layers=ids,
            rope=rope(c),
            max_positions=int(c.get("max_position_embeddings") or 4096),
            eps=float(c.get("rms_norm_eps") or 1e-6),
            norm_before_residual=bool(flag(c, "norm_before_residual", where)),
            norm_before_fc=norm_flag(c, "norm_before_fc", "input_norm.weight" in tensors, where),
            fc_norm=norm_flag(c, "fc_norm", "fc_norm.0.weight" in tensors, where),
            norm_output=bool(flag(c, "norm_output", where)),
            qkv_bias=biased,
            out_bias="midlayer.self_attn.o_proj.bias" in tensors,
            own_embedding="embed_tokens.weight" in tensors,
            notes=tuple(doubts(config, c, ids, biased, target)),
        )
        head.rotary()
    except KeyError as error:
        raise UserError(f"{where}: key {error} is missing; this is not a complete EAGLE-3 config") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{where}: unreadable value ({first_line(error)})") from None
    if head.norm_before_fc and head.fc_norm:
        raise UserError(
            f"{where}: norm_before_fc and fc_norm exclude each other; keep the one the head was trained with"
        )
    return head


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


def check_tokenizer(folder: Path, target: Any, where: str) -> None:
    """Raise UserError if the folder carries a tokenizer that is not the target's; most heads carry none."""
    try:
        own = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    except Exception:  # none there, or unreadable: the head does not need it
        return
    check_vocabulary(own, target, where)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's weight files under the flat layout's names. Raises UserError."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            loaded = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            line = first_line(error)
            raise UserError(f"{path}: damaged or unsafe weight file ({line}); copy or download it again") from None
        if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
            raise UserError(f"{path}: not a dictionary of tensors; save the head's state_dict")
        tensors |= loaded
    return flat_tensors(tensors, str(folder))


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
