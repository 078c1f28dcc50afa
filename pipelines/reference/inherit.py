"""Start weights of a small reference of another architecture, taken from the first reference.

Both have the same width, layers and tokenizer, so embedding, norms and experts carry over; the most used experts of a layer
and their strongest units stay. An expert of GPT-OSS computes what a SwiGLU expert does after a change of scale and bias;
its attention lacks the norms of queries and keys, whose mean effect goes into the weights. Latent attention keeps the values of
both key-value heads in its latent and their keys, side by side, in the rotated key that all heads share; every second
frequency is the teacher's. A shared expert starts at nothing. Source of the idea: Muralidharan et al., "Compact Language Models via Pruning and Knowledge
Distillation", arXiv 2407.14679.

Shapes: E experts, M units of an expert, H hidden size, N tokens, K top-k, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Measured:
    """What a layer of the teacher does on a few windows."""

    weight_E: Tensor  # mean routing weight of each expert over all tokens: how much of the layer it is
    query_rms: Tensor  # [query heads] mean root mean square of the queries before their norm
    key_rms: Tensor  # [key heads]
    input_rms: Tensor  # [] of what attention reads
    value_rms: Tensor  # [] of the values of all heads together


def measure(teacher: Any, windows_BT: Tensor) -> list[Measured]:
    """Expert use and sizes of queries and keys in every layer of a Qwen3-MoE."""
    found = [
        Measured(torch.zeros(layer.mlp.experts.num_experts), *(torch.zeros(0) for _ in range(4)))
        for layer in teacher.model.layers
    ]

    def routing(i: int) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            _, index_NK, weight_NK = args
            found[i].weight_E.index_add_(0, index_NK.flatten(), weight_NK.flatten())
            found[i].weight_E /= len(index_NK)

        return hook

    def size(i: int, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            setattr(found[i], name, args[0].pow(2).mean(-1).sqrt().flatten(0, 1).mean(0))

        return hook

    def values(i: int) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            found[i].value_rms = output.pow(2).mean(-1).sqrt().mean()

        return hook

    handles = []
    for i, layer in enumerate(teacher.model.layers):
        handles += [
            layer.mlp.experts.register_forward_pre_hook(routing(i)),
            layer.self_attn.q_norm.register_forward_pre_hook(size(i, "query_rms")),
            layer.self_attn.k_norm.register_forward_pre_hook(size(i, "key_rms")),
            layer.self_attn.q_proj.register_forward_pre_hook(size(i, "input_rms")),
            layer.self_attn.v_proj.register_forward_hook(values(i)),
        ]
    with torch.no_grad():
        teacher(input_ids=windows_BT)
    for handle in handles:
        handle.remove()
    return found


def strongest(gate_up_E2MH: Tensor, down_EHM: Tensor, units: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gate and up `[E, units, H]` and down `[E, H, units]` of each expert's units with the largest product of norms."""
    gate, up = gate_up_E2MH.chunk(2, dim=1)
    strength_EM = gate.norm(dim=2) * up.norm(dim=2) * down_EHM.norm(dim=1)
    kept = strength_EM.topk(units, dim=1).indices.sort(dim=1).values
    rows = kept[..., None].expand(-1, -1, gate.size(2))
    return gate.gather(1, rows), up.gather(1, rows), down_EHM.gather(2, rows.mT)


@torch.no_grad()
def inherit(student: Any, teacher: Any, windows_BT: Tensor) -> None:
    """Fill a fresh GPT-OSS or DeepSeek-V3 from a Qwen3-MoE of the same width and depth."""
    student.model.embed_tokens.weight.copy_(teacher.model.embed_tokens.weight)
    student.model.norm.weight.copy_(teacher.model.norm.weight)
    for new, old, seen in zip(student.model.layers, teacher.model.layers, measure(teacher, windows_BT), strict=True):
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(new, name).weight.copy_(getattr(old, name).weight)
        attention = _gpt_oss_attention if hasattr(new.self_attn, "sinks") else _latent_attention
        attention(new.self_attn, old.self_attn, seen)
        if hasattr(new.mlp, "router"):
            _gpt_oss_experts(new.mlp, old.mlp, seen)
        elif hasattr(new.mlp, "experts"):
            _deepseek_experts(new.mlp, old.mlp, seen)
        else:
            _dense(new.mlp, old.mlp, seen)


def _gpt_oss_attention(new: Any, old: Any, seen: Measured) -> None:
    for name, norm, rms in (("q_proj", old.q_norm, seen.query_rms), ("k_proj", old.k_norm, seen.key_rms)):
        scale_rows = (norm.weight / rms[:, None]).flatten()
        getattr(new, name).weight.copy_(getattr(old, name).weight * scale_rows[:, None])
    for name in ("v_proj", "o_proj"):
        getattr(new, name).weight.copy_(getattr(old, name).weight)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        nn.init.zeros_(getattr(new, name).bias)
    nn.init.zeros_(new.sinks)


def _latent_attention(new: Any, old: Any, seen: Measured) -> None:
    """Needs q_lora_rank and v_head_dim as wide as the input and the teacher's heads, and a rotated key as wide as all keys."""
    heads, nope, width = new.num_heads, new.qk_nope_head_dim, old.head_dim
    groups = new.qk_rope_head_dim // width
    scale = {"q": old.q_norm.weight / seen.query_rms[:, None], "k": old.k_norm.weight / seen.key_rms[:, None]}
    q_hDX = (old.q_proj.weight * scale["q"].flatten()[:, None]).unflatten(0, (heads, width))
    k_gDX = (old.k_proj.weight * scale["k"].flatten()[:, None]).unflatten(0, (groups, width))

    def slots(group: int) -> Tensor:
        """Places of a head's dims among the rotated ones: pairs are neighbours there, halves apart in the teacher."""
        pair = groups * torch.arange(width // 2) + group
        return torch.cat((2 * pair, 2 * pair + 1))

    nn.init.eye_(new.q_a_proj.weight)
    query = new.q_b_proj.weight.unflatten(0, (heads, -1))  # a view
    query[:, nope:] = 0
    for head in range(heads):
        grown = (new.qk_head_dim / width) ** 0.5 * seen.input_rms  # the scale of scores is another; q_a is normed
        query[head, nope + slots(head * groups // heads)] = q_hDX[head] * grown
    latent = new.kv_lora_rank
    new.kv_a_proj_with_mqa.weight[:latent] = old.v_proj.weight
    for group in range(groups):
        new.kv_a_proj_with_mqa.weight[latent + slots(group)] = k_gDX[group]
    value = new.kv_b_proj.weight.unflatten(0, (heads, -1))
    value[:, nope:] = 0
    for head in range(heads):
        group = head * groups // heads
        value[head, nope:, group * width : (group + 1) * width] = torch.eye(width) * seen.value_rms
    new.o_proj.weight.copy_(old.o_proj.weight)


def _kept(old: Any, seen: Measured, experts: int, units: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The most used experts, ascending, and their strongest units: ids `[E]`, gate, up, down."""
    ids_E = seen.weight_E.topk(experts).indices.sort().values
    return ids_E, *strongest(old.experts.gate_up_proj[ids_E], old.experts.down_proj[ids_E], units)


def _gpt_oss_experts(new: Any, old: Any, seen: Measured) -> None:
    experts = new.experts
    ids_E, gate, up, down = _kept(old, seen, experts.num_experts, experts.intermediate_size)
    # (up + 1) * gate * sigmoid(alpha * gate) is silu(g) * u / alpha for gate = g / alpha and up = u - 1
    experts.gate_up_proj[..., ::2] = gate.mT / experts.alpha
    experts.gate_up_proj[..., 1::2] = up.mT
    experts.gate_up_proj_bias[..., ::2] = 0.0
    experts.gate_up_proj_bias[..., 1::2] = -1.0
    experts.down_proj.copy_(down.mT * experts.alpha)
    nn.init.zeros_(experts.down_proj_bias)
    new.router.weight.copy_(old.gate.weight[ids_E])
    nn.init.zeros_(new.router.bias)


def _deepseek_experts(new: Any, old: Any, seen: Measured) -> None:
    experts = new.experts
    ids_E, gate, up, down = _kept(old, seen, experts.num_experts, experts.intermediate_dim)
    experts.gate_up_proj.copy_(torch.cat((gate, up), dim=1))
    experts.down_proj.copy_(down / new.gate.routed_scaling_factor)
    new.gate.weight.copy_(old.gate.weight[ids_E])
    nn.init.zeros_(new.shared_experts.down_proj.weight)


def _dense(new: Any, old: Any, seen: Measured) -> None:
    """The strongest units of all experts, each as much of it as its expert is of the layer."""
    gate, up = old.experts.gate_up_proj.chunk(2, dim=1)
    down = old.experts.down_proj * seen.weight_E[:, None, None]
    strength = (gate.norm(dim=2) * up.norm(dim=2) * down.norm(dim=1)).flatten()
    kept = strength.topk(new.intermediate_size).indices
    new.gate_proj.weight.copy_(gate.flatten(0, 1)[kept])
    new.up_proj.weight.copy_(up.flatten(0, 1)[kept])
    new.down_proj.weight.copy_(down.transpose(1, 2).flatten(0, 1)[kept].T)
