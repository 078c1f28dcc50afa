"""Puts EcoSpec's kernels into a loaded target, through transformers' own seams and module classes.

Every model: the experts function "ecospec", which reads each touched expert once. On a CPU its weights move to huge
pages. A bfloat16 model there also gets few-row linear layers, routers, norms and attention (DeepSeek's without expanding
its latents): a pass then costs what its weights cost to read, and a token's result does not depend on the tokens verified
beside it. Where Triton runs, a model gets attention besides experts. float32 keeps torch's own operations, so that its tokens
stay those of `generate`, unless `ECOSPEC_KERNELS=fused` asks for the Triton kernels.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations import moe
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ecospec_kernels import dispatch
from ecospec_kernels.expert_mlp.reference import Fp8, Gate, module_experts
from ecospec_kernels.group_router.reference import Rule
from ecospec_kernels.pages import use_huge_pages
from ecospec_runtime.cache import TargetCache
from ecospec_runtime.console import note
from ecospec_runtime.placement import one_piece

NAME, SINKS = "ecospec", "ecospec_sinks"
LATENT = ("DeepseekV3Attention", "Glm4MoeLiteAttention", "YoutuAttention")  # whose forward is the same


def gate_of(module: Any) -> Gate | None:
    """How an experts module joins gate and up, if the `expert_mlp` op can: found by trying, so that no variant is guessed."""
    if not getattr(module, "has_gate", True) or getattr(module, "has_post_expert_norm", False):
        return None
    gates = [Gate(interleaved=not getattr(module, "is_concatenated", True))]
    limit, alpha = (getattr(module, name, None) for name in ("limit", "alpha"))
    alpha = getattr(module, "swiglu_alpha", None) if alpha is None else alpha
    if limit is not None:
        gates.append(gates[0]._replace(limit=limit))
        if alpha is not None:
            gates.append(gates[1]._replace(alpha=alpha, shift=1.0))
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    x *= torch.logspace(-1, 4, 8, dtype=torch.float32)[:, None]  # beyond any clamp
    own = module._apply_gate(x)
    return next((g for g in gates if torch.allclose(own, g.apply(x), rtol=1e-4, atol=1e-4)), None)


def expert_weights(module: Any) -> tuple[Tensor | None, ...]:
    """gate_up [E, 2M, D], down [E, D, M] and their biases or None, as the `expert_mlp` op wants them."""
    parameters = module._parameters
    matrices = parameters["gate_up_proj"], parameters["down_proj"]
    if getattr(module, "is_transposed", False):
        matrices = matrices[0].mT, matrices[1].mT
    return *matrices, parameters.get("gate_up_proj_bias"), parameters.get("down_proj_bias")


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts function for transformers' registry: [n, D], [n, K], [n, K] -> [n, D]."""
    if "_ecospec_gate" not in self.__dict__:
        self._ecospec_gate = gate_of(self)
    if self._ecospec_gate is not None:
        gate_up, down, *biases = expert_weights(self)
        rest = gate_up, down, self._ecospec_gate, *biases
        out = dispatch.fast_experts(hidden_states, top_k_index, top_k_weights, *rest)
        if out is not None:
            return out
    return module_experts(self, hidden_states, top_k_index, top_k_weights)


def fp8_weights(module: Any) -> tuple[Fp8, Fp8] | None:
    """gate_up and down of transformers' `FP8Experts` (float8_e4m3fn, `_scale_inv`), if they are what the op's `Fp8` means.

    Gates and ups were quantised apart: their scales are those of one matrix only where no block reaches from one to the other.
    """
    parameters, block = module._parameters, getattr(module, "block_size", None)
    names = [name for name in ("gate_up_proj", "down_proj") if f"{name}_scale_inv" in parameters]
    if len(names) < 2 or block is None or module.activation_scheme != "dynamic":
        return None
    gate_up, down = (Fp8(parameters[n], parameters[f"{n}_scale_inv"], (block[0], block[1])) for n in names)
    fits = not gate_up.invalid() and not down.invalid() and down.shape[-1] % block[0] == 0
    return (gate_up, down) if fits else None


@cache
def _fp8_class(kind: Any) -> type:
    """`FP8Experts` that go through the op where its Triton kernel takes the call: activations stay 16-bit then."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        routed = hidden_states, top_k_index, top_k_weights
        matrices = fp8_weights(self)
        out = None if matrices is None else dispatch.fast_experts(*routed, *matrices, self._ecospec_gate)
        return kind.forward(self, *routed) if out is None else out

    return type(kind.__name__, (kind,), {"forward": forward})


def _fp8_experts(model: Any) -> None:
    """Let the FP8 experts of a model that stays quantised go through the op."""
    for module in model.modules():
        kind: Any = type(module)
        if kind.__module__ != __name__ and fp8_weights(module) is not None:
            module._ecospec_gate = gate_of(module)
            if module._ecospec_gate is not None:
                module.__class__ = _fp8_class(kind)


def _arrange(module: Any) -> None:
    """Lay transposed expert matrices out row by row, as the kernel reads them; shapes and values stay."""
    for name in ("gate_up_proj", "down_proj"):
        parameter = module._parameters[name]
        parameter.data = parameter.data.mT.contiguous().mT
        use_huge_pages(parameter.mT)


def begins(mask: Tensor, start: Tensor) -> Tensor:
    """`mask`, with a note that it hides every key before `start` [1] int64 from every row: attention then does not read them.

    Whoever makes a mask knows that; the note is lost, and all keys are read, where somebody makes another tensor of it.
    """
    mask.ecospec_start = start  # type: ignore[attr-defined]
    return mask


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
        scale = q.size(-1) ** -0.5 if scaling is None else scaling
        start = getattr(attention_mask, "ecospec_start", None)
        out = dispatch.fast_attention(q, k, v, mask, scale, None, start) if one_mask else None
        if out is not None:
            return out[None], None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


def sink_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    dropout: float = 0.0, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`attention_forward` for modules with a sink per head; whatever the kernel does not take goes to their own eager code."""
    if query.size(0) == 1 and (attention_mask is None or attention_mask.size(1) == 1):
        mask = attention_mask if attention_mask is None else attention_mask[0, 0]
        q, k, v = query[0], key[0], value[0]
        seen = mask is not None or query.size(2) == 1
        start = getattr(attention_mask, "ecospec_start", None)
        out = dispatch.fast_attention(q, k, v, mask, scaling, s_aux, start) if seen else None
        if out is not None:
            return out[None], None
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, s_aux=s_aux, **kwargs)  # type: ignore[no-any-return]


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


def _group_router_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The routers of DeepSeek-V3 and its kin, whose weights are float32."""
    logits = dispatch.linear(hidden_states.reshape(-1, self.hidden_dim).float(), self.weight.float())
    return logits, *dispatch.group_router(logits, self.e_score_correction_bias.float(), rule_of(self))


def rule_of(router: Any) -> Rule:
    """How one of these routers chooses."""
    return Rule(router.top_k, router.num_group, router.topk_group, router.norm_topk_prob, router.routed_scaling_factor)


def _latent_forward(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor | None,
    cache: Any = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Latent attention of one sequence's few rows, by the op; other calls go to the module's own code."""
    modules: dict[str, Any] = self._modules
    up, norm, n = modules["kv_b_proj"].weight, modules["kv_a_layernorm"], hidden_states.size(1)
    mask = attention_mask if attention_mask is None else attention_mask[0, 0]
    if hidden_states.size(0) == 1 and (n == 1 if mask is None else attention_mask.size(1) == 1):  # type: ignore[union-attr]
        rows = hidden_states[0]
        if self.q_lora_rank is None:
            q = modules["q_proj"](rows)
        else:
            q = modules["q_b_proj"](modules["q_a_layernorm"](modules["q_a_proj"](rows)))
        q, compressed = q.view(n, -1, self.qk_head_dim), modules["kv_a_proj_with_mqa"](rows)
        cos, sin = position_embeddings[0][0], position_embeddings[1][0]
        if dispatch.supports_latent(q, compressed, cos, up, mask):
            interleaved = bool(self.config.rope_interleave)
            latent, key = dispatch.latent_rows(
                q, compressed, norm.weight, norm.variance_epsilon, cos, sin, interleaved, supported=True
            )
            if cache is not None:
                latent, key = (part[0, 0] for part in cache.update(latent[None, None], key[None, None], self.layer_idx))
            out = dispatch.latent_attention(q, latent, key, up, mask, self.scaling, supported=True)
            return modules["o_proj"](out.view(1, n, -1)), None
    return super(type(self), self).forward(  # type: ignore[no-any-return]
        hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, cache=cache, **kwargs
    )


def _routed(output: Any) -> Any:
    """A router's output with its weights by expert: routers need not sort."""
    logits, weights, index = output
    return logits, torch.zeros(logits.shape).scatter(-1, index, weights.float())


def _attended(output: Any) -> Any:
    """An attention module's output without what only some of its functions return."""
    return output[0]


def _few_rows(module: Any) -> dict[str, Any]:
    """Arguments for an attention module: three rows after nine others."""
    shown = torch.ones(3, 12, dtype=torch.bool).tril(9)
    angles = torch.arange(9, 12)[:, None] * torch.linspace(0.1, 1.0, module.qk_rope_head_dim // 2)
    cache, dtype, generator = TargetCache(), module.o_proj.weight.dtype, torch.Generator().manual_seed(1)
    latent, key = (
        torch.randn(1, 1, 9, width, generator=generator).to(dtype)
        for width in (module.kv_lora_rank, module.qk_rope_head_dim)
    )
    cache.inner.update(latent, key, module.layer_idx)
    mask = torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min)
    tables = (table.repeat(1, 2)[None].to(dtype) for table in (angles.cos(), angles.sin()))
    return {"position_embeddings": tuple(tables), "attention_mask": mask[None, None], "cache": cache.inner}


def _same(left: Any, right: Any) -> bool:
    """Whether two outputs agree within a few bf16 roundings, measured on the whole of each."""
    if isinstance(left, tuple) or isinstance(right, tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(_same, left, right))
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool((left.float() - right.float()).norm() <= 0.02 * left.float().norm())


def _swap(module: nn.Module, forward: Any, width: int, known: dict[type, type | None], view: Any = lambda output: output,
          more: Any = lambda module: {}) -> None:  # fmt: skip
    """Give `module` this forward if it computes what its own does, tried once per class on random rows.

    `view`: what counts of an output; `more`: further arguments.
    """
    kind = type(module)
    if kind not in known:
        x = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0)).to(next(module.parameters()).dtype)
        changed = type(kind.__name__, (kind,), {"forward": forward})
        try:
            expected = view(module(x, **more(module)))
            module.__class__ = changed
            known[kind] = changed if _same(expected, view(module(x, **more(module)))) else None
        except (TypeError, AttributeError, RuntimeError):
            known[kind] = None
        module.__class__ = kind
    if replacement := known[kind]:
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
    """Replace `sdpa` attention, and eager attention with sinks, by the "ecospec" ones; other choices stay."""
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        for name, function, like in ((NAME, attention_forward, "sdpa"), (SINKS, sink_attention_forward, "eager")):
            ALL_ATTENTION_FUNCTIONS.register(name, function)
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[like])
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)
    elif model.config._attn_implementation == "eager" and any(hasattr(m, "sinks") for m in model.modules()):
        model.set_attn_implementation(SINKS)


@torch.no_grad()
def install(model: Any, device: str | torch.device | None = None, exact: bool = True) -> None:
    """Install the kernels that fit this model on `device` (default: where it is); safe to call twice.

    `exact` False, for a drafter: float32 need not keep torch's operations.

    Layers that stay quantised keep their own functions, but for FP8 experts where Triton runs. A model that is sharded or
    offloaded gets the experts function only.
    """
    if getattr(model, "is_quantized", False):
        _fp8_experts(model)
        return
    if hasattr(moe, "ALL_EXPERTS_FUNCTIONS"):
        _experts(model)
    place = torch.device(device) if device is not None else next(model.parameters()).device
    if not one_piece(model):
        return
    if dispatch.runs_triton(torch.empty(0, device=place)):
        if model.dtype != torch.float32 or dispatch.OVERRIDE == "fused":
            _attention(model)
        return
    if place.type != "cpu" or not dispatch.ENABLED:
        return
    if sys.stderr.isatty() and dispatch.compiles_first():
        note("compiling the CPU kernels: once, up to a minute")
    for parameter in model.parameters():
        use_huge_pages(parameter)
    for module in model.modules():
        if getattr(module, "is_transposed", False) and "gate_up_proj" in module._parameters:
            _arrange(module)
    if exact and model.dtype != torch.bfloat16:
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
        elif type(module).__name__.endswith("TopkRouter") and hasattr(module, "e_score_correction_bias"):
            _swap(module, _group_router_forward, module.weight.size(-1), classes, _routed)
        elif type(module).__name__ in LATENT:
            _swap(module, _latent_forward, module.kv_a_proj_with_mqa.in_features, classes, _attended, _few_rows)
