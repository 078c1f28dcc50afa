"""Puts EcoSpec's kernels into a loaded target, through transformers' own seams and module classes.

Every model: the experts function "ecospec", which reads each touched expert once. On a CPU its weights move to huge
pages. A bfloat16 model there also gets few-row linear layers, routers, norms and attention: a pass then costs what its
weights cost to read, and a token's result does not depend on the tokens verified beside it. float32 keeps torch's own
operations, so that its tokens stay those of `generate`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations import moe
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ecospec_kernels import dispatch
from ecospec_kernels.expert_mlp.reference import module_experts
from ecospec_kernels.pages import use_huge_pages
from ecospec_runtime.console import note
from ecospec_runtime.placement import one_piece

NAME = "ecospec"


def plain_swiglu(module: Any) -> bool:
    """Whether an experts module is SwiGLU in the layout of the `expert_mlp` op."""
    flags = {"is_transposed": False, "is_concatenated": True, "has_bias": False, "has_gate": True,
             "has_post_expert_norm": False}  # fmt: skip
    return (
        all(getattr(module, name, default) == default for name, default in flags.items())
        and getattr(type(module), "_apply_gate", None) is moe._default_apply_gate
        and isinstance(module.act_fn, nn.SiLU | type(ACT2FN["silu"]))
    )


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts function for transformers' registry: [n, D], [n, K], [n, K] -> [n, D]."""
    plain = self.__dict__.get("_ecospec_plain")
    if plain is None:
        plain = self._ecospec_plain = plain_swiglu(self)
    if plain:
        parameters = self._parameters
        matrices = parameters["gate_up_proj"], parameters["down_proj"]
        if dispatch.supports_experts(hidden_states, top_k_index, top_k_weights, *matrices):
            return dispatch.cpu_experts(hidden_states, top_k_index, top_k_weights, *matrices)
    return module_experts(self, hidden_states, top_k_index, top_k_weights)


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention function for transformers' registry; whatever the kernel does not take goes to `sdpa`."""
    known = kwargs.get("softcap") is None and kwargs.get("s_aux") is None and kwargs.get("position_bias") is None
    if dropout == 0.0 and query.size(0) == 1 and known and (attention_mask is not None or query.size(2) == 1):
        mask = attention_mask if attention_mask is None else attention_mask[0, 0]
        q, k, v = query[0], key[0], value[0]
        one_mask = attention_mask is None or attention_mask.size(1) == 1
        if one_mask and dispatch.supports_attention(q, k, v, mask):
            scale = q.size(-1) ** -0.5 if scaling is None else scaling
            return dispatch.tree_attention(q, k, v, mask, scale)[None], None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


class FewRowLinear(nn.Linear):
    """`nn.Linear` whose passes over few rows go through the `few_row_linear` op."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., O]."""
        parameters = self._parameters  # skips the attribute lookup of nn.Module, which costs as much as a small product
        return dispatch.linear(input, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return dispatch.rms_norm(hidden_states, self._parameters["weight"], self.variance_epsilon)


def _top_k_router_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax, top-k, optional renormalisation: the routers of Qwen-MoE, OLMoE and their kin."""
    logits = dispatch.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    scores, index = torch.topk(F.softmax(logits, dtype=torch.float, dim=-1), self.top_k, dim=-1)
    if self.norm_topk_prob:
        scores /= scores.sum(dim=-1, keepdim=True)
    return logits, scores.to(logits.dtype), index


def _same(left: Any, right: Any) -> bool:
    """Whether two outputs agree within a few bf16 roundings."""
    if isinstance(left, tuple) or isinstance(right, tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(_same, left, right))
    return bool(left.shape == right.shape and left.dtype == right.dtype and torch.allclose(left, right, 0.02, 0.01))


def _swap(module: nn.Module, forward: Any, width: int, cache: dict[type, type | None]) -> None:
    """Give `module` this forward if it computes what its own does, tried once per class on random rows."""
    kind = type(module)
    if kind not in cache:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, 3, width, generator=generator).to(next(module.parameters()).dtype)
        try:
            equal = _same(module(x), forward(module, x))
        except (TypeError, AttributeError, RuntimeError):
            equal = False
        cache[kind] = type(kind.__name__, (kind,), {"forward": forward}) if equal else None
    if replacement := cache[kind]:
        module.__class__ = replacement


def _experts(model: Any) -> None:
    """Select the "ecospec" experts function where the architecture has the registry."""
    registry = moe.ALL_EXPERTS_FUNCTIONS
    if NAME not in registry:
        registry.register(NAME, experts_forward)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(NAME)
    else:
        model.config._experts_implementation = NAME


def _attention(model: Any) -> None:
    """Replace `sdpa` attention by the "ecospec" one; other choices (eager for attention sinks) stay."""
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


@torch.no_grad()
def install(model: Any, device: str | torch.device | None = None) -> None:
    """Install the kernels that fit this model on `device` (default: where it is); safe to call twice.

    Layers that stay quantised keep their own functions (transformers has a registry of its own for FP8 experts). A model
    that is sharded or offloaded gets the experts function only.
    """
    if getattr(model, "is_quantized", False):
        return
    if hasattr(moe, "ALL_EXPERTS_FUNCTIONS"):
        _experts(model)
    place = torch.device(device) if device is not None else next(model.parameters()).device
    if place.type != "cpu" or not dispatch.ENABLED or not one_piece(model):
        return
    if sys.stderr.isatty() and dispatch.compiles_first():
        note("compiling the CPU kernels: once, up to a minute")
    for parameter in model.parameters():
        use_huge_pages(parameter)
    if model.dtype != torch.bfloat16:
        return
    _attention(model)
    classes: dict[type, type | None] = {}
    for module in model.modules():
        if type(module).__module__ == __name__:
            continue  # installed before
        if type(module) is nn.Linear:
            module.__class__ = FewRowLinear
        elif type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            _swap(module, _norm_forward, module.weight.numel(), classes)
        elif type(module).__name__.endswith("TopKRouter") and hasattr(module, "norm_topk_prob"):
            _swap(module, _top_k_router_forward, module.weight.size(-1), classes)
