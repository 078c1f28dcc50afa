"""Tiny random models and their tokenizer, saved as targets and drafters are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

END = "<|endoftext|>"
TINY = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 64,
}  # fmt: skip


def tiny_tokenizer(vocabulary: int = 96) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character or newline, id 0 ends the text."""
    characters = ["Ċ", "Ġ", *(chr(c) for c in range(33, 126))][: vocabulary - 1]
    ids = {END: 0} | {character: i + 1 for i, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=END)


def beginning_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer, with a token of its own before every text."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, 0)]
    )
    return tokenizer


def save_model(folder: Path, model: PreTrainedModel, tokenizer: Any = None) -> Path:
    """Save a model with a tokenizer, by default the tiny one. Returns the folder."""
    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


def save_tiny_target(folder: Path, seed: int = 0, **changes: object) -> Path:
    """Save a random Qwen3-MoE in float32 with its tokenizer; `changes` go into its config. Returns the folder."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        **{**TINY, "norm_topk_prob": True, "max_position_embeddings": 2048, "tie_word_embeddings": False,
           "initializer_range": 0.25, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, **changes}
    )  # fmt: skip
    return save_model(folder, Qwen3MoeForCausalLM(config), tiny_tokenizer(config.vocab_size))


def save_tiny_drafter(folder: Path, seed: int = 1, draft_vocabulary: int = 48) -> Path:
    """Save a random EAGLE-3 head in the flat published layout, for a target of the `TINY` shape. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, heads, kv_heads, dim = (
        TINY[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    inner, vocabulary = TINY["intermediate_size"], TINY["vocab_size"]
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    kept = torch.randperm(vocabulary, generator=generator)[:draft_vocabulary].sort().values
    tensors = {
        "fc.weight": weight(hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": weight(heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": weight(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": weight(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": weight(hidden, heads * dim),
        "midlayer.mlp.gate_proj.weight": weight(inner, hidden),
        "midlayer.mlp.up_proj.weight": weight(inner, hidden),
        "midlayer.mlp.down_proj.weight": weight(hidden, inner),
        "midlayer.input_layernorm.weight": 1 + weight(hidden),
        "midlayer.hidden_norm.weight": 1 + weight(hidden),
        "midlayer.post_attention_layernorm.weight": 1 + weight(hidden),
        "norm.weight": 1 + weight(hidden),
        "lm_head.weight": weight(draft_vocabulary, hidden) * 5,
        "d2t": kept - torch.arange(draft_vocabulary),
        "t2d": torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, kept, True),
    }
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": hidden, "target_hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": dim, "vocab_size": vocabulary, "draft_vocab_size": draft_vocabulary,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0, "max_position_embeddings": 2048,
        "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
