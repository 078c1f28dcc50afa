"""Tiny targets with MTP layers, saved as they are published, and those layers as transformers runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.modeling_layers import MtpLayer, MtpModel

from ecospec_runtime.config import PoolConfig
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.drafters.mtp import MtpDrafter
from ecospec_runtime.pool import Pool
from ecospec_runtime.target import Target
from tests.models import save_model

H, LAYERS, EXPERTS = 32, 3, 8
COMMON = {
    "vocab_size": 96, "hidden_size": H, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "n_shared_experts": 1, "n_routed_experts": EXPERTS,
    "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "max_position_embeddings": 2048, "initializer_range": 0.25, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": None,
}  # fmt: skip
MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
PREFIX = f"model.layers.{LAYERS}."
POOL = PoolConfig(depth=4, beam=3, width=5)
NODES = ("tokens", "parents", "depths", "ranks", "state_rows")


def randomise(module: nn.Module, seed: int) -> None:
    """Every tensor random: norms near 1, also the routers' bias."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            noise = torch.randn(value.shape, generator=generator) * 0.25
            value.copy_(1 + noise if "norm" in name else noise)


def split_experts(name: str, value: Tensor) -> dict[str, Tensor]:
    """Per-expert tensors of a fused one; others as they are."""
    stem, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        halves = {"gate_proj": value[:, : value.shape[1] // 2], "up_proj": value[:, value.shape[1] // 2 :]}
    elif last == "down_proj" and value.dim() == 3:
        halves = {"down_proj": value}
    else:
        return {name: value.clone()}
    return {f"{stem}.{e}.{key}.weight": part[e].clone() for key, part in halves.items() for e in range(len(value))}


def nextn_names(layer: MtpLayer, prefix: str, fused: bool = False) -> dict[str, Tensor]:
    """A layer as DeepSeek and GLM publish it."""
    tensors: dict[str, Tensor] = {}
    for name, value in layer.state_dict().items():
        name = prefix + name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        tensors |= {name: value.clone()} if fused else split_experts(name, value)
    return tensors


def qwen_names(layer: MtpLayer) -> dict[str, Tensor]:
    """A layer as Qwen3-Next publishes it."""
    names = {
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight", "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight", "post_norm.weight": "mtp.norm.weight",
    }  # fmt: skip
    tensors: dict[str, Tensor] = {}
    for name, value in layer.state_dict().items():
        tensors |= split_experts(names.get(name, name.replace("mtp_block.", "mtp.layers.0.")), value)
    return tensors


def save(folder: Path, model: Any, tensors: dict[str, Tensor]) -> Path:
    """Save a model with more tensors beside its own."""
    path = save_model(folder, model) / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
    return folder


def nextn_folder(folder: Path, target: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    """A layer exported to a folder of its own, as SGLang's tool does; a stale index may lie beside it."""
    folder.mkdir()
    config = json.loads((target / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "architectures": ["DeepseekV3ForCausalLMNextN"], **settings}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "gone.safetensors"}}')
    save_file(tensors, folder / "nextn_layer_parameters.safetensors")
    return folder


class Family:
    """A tiny target on disk with its MTP layer, and that layer as transformers runs it."""

    def __init__(self, folder: Path, model_class: Any, config: Any):
        torch.manual_seed(0)
        model = model_class(config)
        randomise(model, 3)
        self.mtp = MtpModel(model, 1).eval()
        randomise(self.mtp.layers[0], 5)
        self.folder = save(folder / "target", model, nextn_names(self.mtp.layers[0], PREFIX))
        self.target = Target.from_pretrained(self.folder, dtype="float32")
        drafter = load_drafter(self.folder, self.target)
        assert isinstance(drafter, MtpDrafter)
        self.drafter = drafter


def text(count: int = 24, seed: int = 7) -> Tensor:
    return torch.randint(1, 96, (count,), generator=torch.Generator().manual_seed(seed))


def told(drafter: Any, target: Any, tokens: Tensor) -> Any:
    """A sequence of the drafter's that has followed the target over `tokens`."""
    n = len(tokens) - 1
    output = target.forward(tokens[:n], torch.arange(n), None, target.new_cache(), aux_layers=drafter.aux_layers)
    sequence = drafter.start()
    drafter.extend(sequence, tokens[1:], output.aux)
    return sequence


@torch.no_grad()
def by_hand(mtp: Any, model: Any, tokens: Tensor, path: list[int]) -> Tensor:
    """Post-norm states of the last row and of a drafted path after it: `MtpModel`'s layer, all rows again each time."""
    ids, h = tokens[1:], model.get_decoder()(input_ids=tokens[None, :-1]).last_hidden_state[0]
    states = []
    for token in [*path, None]:
        positions = torch.arange(len(ids))[None] + 1
        embed = model.get_input_embeddings()(ids)[None]
        mask = torch.full((len(ids), len(ids)), torch.finfo(torch.float32).min).triu(1)[None, None]
        rotation = mtp.rotary_emb(embed, position_ids=positions)
        out = mtp.layers[0](embed, h[None], rotation, mask, positions, None)[0]
        states.append(out[-1])
        if token is not None:
            ids, h = torch.cat((ids, torch.tensor([token]))), torch.cat((h, out[-1:]))
    return torch.stack(states)


def path_to(pool: Pool, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, int(pool.tokens[node]))
        node = int(pool.parents[node])
    return path


def same(left: Pool, right: Pool, tolerance: float = 1e-4) -> None:
    """The same tree, up to rounding."""
    for name in NODES:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
    for name in ("states", "log_probs", "entropies", "log_normalizers"):
        np.testing.assert_allclose(getattr(left, name), getattr(right, name), atol=tolerance, err_msg=name)


def drafted(drafter: Any, target: Any, count: int = 24) -> Pool:
    tokens = text(count)
    return drafter.expand(told(drafter, target, tokens), int(tokens[-1]), POOL, (0.7,))


def deepseek_family(folder: Path, **settings: Any) -> Family:
    """DeepSeek-V3: MLA, a dense first layer, groups of experts, a shared expert."""
    config = DeepseekV3Config(**{**COMMON, **MLA, "num_key_value_heads": 4, **settings})
    return Family(folder, DeepseekV3ForCausalLM, config)


def glm_family(folder: Path) -> Family:
    """GLM-4-MoE: grouped-query attention with normed heads, half of each rotated."""
    config = Glm4MoeConfig(**COMMON, num_key_value_heads=2, head_dim=8, use_qk_norm=True)
    return Family(folder, Glm4MoeForCausalLM, config)
