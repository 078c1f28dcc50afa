"""DeepSeek-V3's MTP layer as the weights of the `mtp_layer` op; every other layer runs as transformers' own modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecospec_kernels import dispatch
from ecospec_kernels.expert_mlp.reference import SWIGLU
from ecospec_kernels.mtp_layer.reference import MtpWeights
from ecospec_runtime import compute

_BLOCKS = (
    "DeepseekV3DecoderLayer",
    "Glm4MoeLiteDecoderLayer",
)  # norm, latent attention, norm, experts and a shared one


def direct_weights(layer: Any) -> MtpWeights | None:
    """The weights of an `MtpLayer` after `compute.install`, or None if a CPU kernel does not compute exactly this layer."""
    block = layer.mtp_block
    attention, mlp = block.self_attn, block.mlp
    installed = all(type(part).__module__ == compute.__name__ for part in (attention, getattr(mlp, "gate", None)))
    swapped = getattr(layer.config, "mtp_hidden_states_first", False)  # in the input of `eh_proj`
    if type(block).__name__ not in _BLOCKS or not installed or layer.post_norm is None or swapped:
        return None
    shared, experts = getattr(mlp, "shared_experts", None), mlp.experts
    biased = any(m.bias is not None for m in layer.modules() if isinstance(m, nn.Linear))
    some = torch.linspace(-4, 4, 9)
    if (
        shared is None
        or biased
        or not torch.equal(shared.act_fn(some), F.silu(some))
        or compute.gate_of(experts) != SWIGLU
    ):
        return None
    try:
        weights = _gathered(layer)
    except ValueError:  # shapes that the op does not know
        return None
    return weights if dispatch.supports_mtp(weights) else None


def _gathered(layer: Any) -> MtpWeights:
    attention, mlp, block = layer.mtp_block.self_attn, layer.mtp_block.mlp, layer.mtp_block
    experts, shared, low = mlp.experts, mlp.shared_experts, attention.q_lora_rank is not None
    return MtpWeights(
        embedding_norm=_exact(layer.enorm), hidden_norm=_exact(layer.hnorm), input_norm=_exact(block.input_layernorm),
        post_norm=_exact(block.post_attention_layernorm), output_norm=_exact(layer.post_norm),
        q_norm=_exact(attention.q_a_layernorm) if low else None, latent_norm=_exact(attention.kv_a_layernorm),
        project=layer.eh_proj.weight, q_down=attention.q_a_proj.weight if low else None,
        q_up=(attention.q_b_proj if low else attention.q_proj).weight, compress=attention.kv_a_proj_with_mqa.weight,
        up=attention.kv_b_proj.weight, out=attention.o_proj.weight, router=_exact(mlp.gate),
        router_bias=mlp.gate.e_score_correction_bias.float(), gate_up=experts.gate_up_proj, down=experts.down_proj,
        shared_gate=shared.gate_proj.weight, shared_up=shared.up_proj.weight, shared_down=shared.down_proj.weight,
        heads=attention.num_heads, scale=attention.scaling, interleaved=bool(attention.config.rope_interleave),
        eps=layer.enorm.variance_epsilon, latent_eps=attention.kv_a_layernorm.variance_epsilon,
        rule=compute.rule_of(mlp.gate),
    )  # fmt: skip


def _exact(module: Any) -> Tensor:
    return module.weight.detach().float()  # type: ignore[no-any-return]
