"""Tiny checkpoints in the published quantised layouts, each beside a twin that holds the same weights dequantised."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NEVER_FP8 = re.compile(r"embed_tokens|lm_head|norm|mlp\.gate\.|bias")  # what DeepSeek-V3 leaves in bfloat16
COMMON = {
    "vocab_size": 96, "num_attention_heads": 4, "num_experts_per_tok": 2, "initializer_range": 0.15, "bos_token_id": 0,
    "eos_token_id": None, "pad_token_id": None, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {  # no projection is a multiple of 128 in both directions
    **COMMON, "hidden_size": 160, "num_hidden_layers": 3, "intermediate_size": 192, "num_key_value_heads": 4,
    "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 136,
    "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 136, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 40,
}  # fmt: skip
GPT_OSS = {
    **COMMON, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16,
    "num_local_experts": 6, "sliding_window": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def save_plain(folder: Path, model_type: str, tokenizer: Path, **settings: Any) -> Path:
    """A random float32 model with the tokenizer files of another folder."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return folder


def write_fp8(plain: Path, block: int = 128) -> tuple[Path, Path]:
    """(FP8 folder, dequantised twin) of a plain checkpoint, scales per block cut off at the edges."""
    stored: dict[str, torch.Tensor] = {}
    twin: dict[str, torch.Tensor] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if weight.ndim != 2 or NEVER_FP8.search(name):
            stored[name] = twin[name] = weight.bfloat16().to(torch.float32)
            continue
        rows, columns = weight.shape
        scale = torch.empty(-(-rows // block), -(-columns // block))
        codes, values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        for i in range(len(scale)):
            for j in range(scale.shape[1]):
                part = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
                scale[i, j] = weight[part].abs().max() / 448
                codes[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
                values[part] = codes[part].float() * scale[i, j]
        stored[name], stored[f"{name}_scale_inv"], twin[name] = codes, scale, values
    entry = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block], "activation_scheme": "dynamic"}
    return _write(plain, "fp8", stored, entry), _write(plain, "twin", twin, None)


def write_mxfp4(plain: Path) -> tuple[Path, Path]:
    """(MXFP4 folder, dequantised twin) of a plain GPT-OSS checkpoint; only the experts' matrices are quantised."""
    stored: dict[str, torch.Tensor] = {}
    twin: dict[str, torch.Tensor] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = twin[name] = weight.bfloat16().to(torch.float32)
            continue
        groups = weight.transpose(1, 2).unflatten(2, (-1, 32))  # [E, rows, groups, 32]
        exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
        ratio = groups / torch.exp2(exponent)[..., None]
        code = (ratio.abs()[..., None] - E2M1).abs().argmin(-1)
        values = E2M1[code] * ratio.sign() * torch.exp2(exponent)[..., None]
        code = code + 8 * (ratio < 0)
        stored[f"{name}_blocks"] = (code[..., 0::2] + 16 * code[..., 1::2]).to(torch.uint8)
        stored[f"{name}_scales"] = (exponent + 127).to(torch.uint8)
        twin[name] = values.flatten(2).transpose(1, 2).contiguous()
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    entry = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    return _write(plain, "mxfp4", stored, entry), _write(plain, "twin", twin, None)


def _write(plain: Path, name: str, tensors: dict[str, torch.Tensor], entry: dict[str, Any] | None) -> Path:
    folder = plain.with_name(f"{plain.name}-{name}")
    shutil.copytree(plain, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    if entry is not None:
        config["quantization_config"] = entry
    (folder / "config.json").write_text(json.dumps(config))
    return folder
