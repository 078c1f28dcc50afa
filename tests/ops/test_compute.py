"""The kernels inside loaded models: same results as transformers' own code, and rows that do not disturb each other."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from ecospec_kernels import dispatch
from ecospec_runtime import compute
from ecospec_runtime.cache import TargetCache
from ecospec_runtime.target import Target

COMMON = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "initializer_range": 0.2, "pad_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip


def qwen(layers: int = 2) -> Any:
    """Plain SwiGLU experts: the kernel takes them."""
    config = Qwen3MoeConfig(
        **{**COMMON, "num_hidden_layers": layers},
        head_dim=16,
        num_experts=8,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    )
    return Qwen3MoeForCausalLM(config)


def olmoe() -> Any:
    """SwiGLU, another router."""
    return OlmoeForCausalLM(OlmoeConfig(**COMMON, num_experts=8, intermediate_size=24))


def gpt_oss() -> Any:
    """Transposed, interleaved, biased, clamped experts; attention sinks and a sliding window."""
    config = GptOssConfig(**COMMON, head_dim=16, num_local_experts=8, intermediate_size=24, sliding_window=8)
    config._attn_implementation = "eager"
    return GptOssForCausalLM(config)


def deepseek() -> Any:
    """Grouped, bias-corrected routing, shared experts, latent attention with two head dimensions."""
    config = DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4}, n_routed_experts=8, n_group=2, topk_group=1, moe_intermediate_size=24,
        intermediate_size=64, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def made(build: Any, dtype: torch.dtype) -> Any:
    """A random model in evaluation mode with spread-out routing, transformers' own experts."""
    torch.manual_seed(0)
    model = build().to(dtype).eval()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if "bias" in name or "Router" in type(module).__name__:
                parameter.data.normal_(0, 0.5)
    model.set_experts_implementation("eager")
    return model


@torch.inference_mode()
def logits(model: Any, ids: Tensor) -> Tensor:
    """Float logits of a chain [n, V]."""
    return model(input_ids=ids[None]).logits[0].float()


IDS = torch.tensor([5, 17, 3, 42, 8, 8, 77, 1, 30, 31])


@pytest.mark.parametrize("build", [qwen, olmoe, gpt_oss, deepseek])
def test_float32_models_keep_their_output(build: Any) -> None:
    """Only the order of sums over experts differs: float32 rounding."""
    model = made(build, torch.float32)
    expected = logits(model, IDS)
    compute.install(model)
    assert model.config._experts_implementation == "ecospec"
    assert not any(type(m).__module__ == compute.__name__ for m in model.modules()), "float32 keeps torch's operations"
    dispatch.CALLS.clear()
    torch.testing.assert_close(logits(model, IDS), expected, rtol=1e-4, atol=1e-4)
    if dispatch.ENABLED:
        assert dispatch.CALLS["expert_mlp", "cpu"] > 0


@pytest.mark.parametrize("build", [qwen, olmoe, gpt_oss, deepseek])
def test_bfloat16_models_keep_their_output(build: Any) -> None:
    """Roundings to bf16 happen at other places, so logits differ by some bf16 steps of their scale."""
    model = made(build, torch.bfloat16)
    expected = logits(model, IDS)
    exact = logits(made(build, torch.bfloat16).float(), IDS)
    compute.install(model)
    result = logits(model, IDS)
    scale = float(exact.abs().max())
    own_error, error = (float((x - exact).abs().median()) / scale for x in (expected, result))
    assert error < max(2 * own_error, 2**-8), (error, own_error)


@pytest.fixture
def decoder() -> Any:
    """A bf16 model with kernels."""
    pytest.importorskip("numba")
    model = made(lambda: qwen(4), torch.bfloat16)
    compute.install(model)
    return model


def test_everything_small_is_a_kernel(decoder: nn.Module) -> None:
    dispatch.CALLS.clear()
    logits(decoder, IDS[:1])
    assert dispatch.CALLS == {
        ("rms_norm", "cpu"): 4 * 4 + 1, ("few_row_linear", "cpu"): 4 * 5 + 1, ("expert_mlp", "cpu"): 4,
        ("tree_attention", "cpu"): 4,
    }  # fmt: skip


def glm_lite() -> Any:
    """Latent attention like DeepSeek-V3's, queries of full rank."""
    config = Glm4MoeLiteConfig(
        **{**COMMON, "num_key_value_heads": 4, "num_hidden_layers": 3}, n_routed_experts=8, n_group=1, topk_group=1, moe_intermediate_size=24,
        intermediate_size=64, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        head_dim=16,
    )  # fmt: skip
    return Glm4MoeLiteForCausalLM(config)


@torch.inference_mode()
def masked_logits(model: Any, ids: Tensor) -> Tensor:
    """`logits` under a mask, as passes over trees have one."""
    mask = torch.full((len(ids), len(ids)), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16).triu(1)
    return model(input_ids=ids[None], attention_mask=mask[None, None]).logits[0].float()  # type: ignore[no-any-return]


@pytest.mark.parametrize("build", [deepseek, glm_lite])
def test_latent_attention_and_grouped_routers_are_kernels(build: Any) -> None:
    """Few rows go through them and give what the modules' own code gives; a longer pass keeps that code."""
    pytest.importorskip("numba")
    model, own = (made(build, torch.bfloat16) for _ in range(2))
    compute.install(model)
    layers, sparse = model.config.num_hidden_layers, len([m for m in model.modules() if hasattr(m, "topk_group")])
    for ids in (IDS, torch.arange(1, 80)):
        dispatch.CALLS.clear()
        result = masked_logits(model, ids)
        few = len(ids) <= dispatch.MAX_ROWS
        assert dispatch.CALLS["latent_attention", "cpu"] == (layers if few else 0)
        assert dispatch.CALLS["group_router", "cpu"] == sparse > 0
        expected = masked_logits(own, ids)
        assert float((result - expected).norm() / expected.norm()) < 0.05


def test_latent_attention_of_another_kind_stays() -> None:
    """A class of the same name that computes something else is found out."""

    class DeepseekV3Attention(modeling_deepseek_v3.DeepseekV3Attention):
        def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = super().expand_kv(kv_nope, k_rot)
            return keys.flip(-1), values

    model = made(deepseek, torch.bfloat16)
    model.model.layers[0].self_attn.__class__ = DeepseekV3Attention
    compute.install(model)
    assert type(model.model.layers[0].self_attn) is DeepseekV3Attention
    assert type(model.model.layers[1].self_attn).__module__ == compute.__name__


@torch.inference_mode()
@pytest.mark.parametrize("build", [lambda: qwen(4), deepseek, glm_lite], ids=["qwen", "deepseek", "glm_lite"])
def test_a_verified_token_is_the_decoded_token(build: Any) -> None:
    """A tree pass gives each node bit for bit the logits that plain decoding gives along the node's path."""
    pytest.importorskip("numba")
    decoder = made(build, torch.bfloat16)
    compute.install(decoder)
    parents, tokens = [-1, 0, 0, 1, 2, 2, 3], [9, 4, 50, 11, 4, 60, 2]
    past, n = len(IDS), len(parents)
    cache_name = "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"

    def path(i: int) -> list[int]:
        return [*(path(parents[i]) if parents[i] >= 0 else []), i]

    def run(cache: TargetCache, token_ids: list[int], positions: list[int], mask: Tensor | None) -> Tensor:
        additive = (
            None if mask is None else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf).bfloat16()[None, None]
        )
        out = decoder(
            input_ids=torch.tensor([token_ids]), position_ids=torch.tensor([positions]), attention_mask=additive,
            use_cache=True, **{cache_name: cache.inner},
        )  # fmt: skip
        return out.logits[0]

    def prefilled() -> TargetCache:
        cache = TargetCache()
        decoder(input_ids=IDS[None], use_cache=True, **{cache_name: cache.inner})
        return cache

    mask = torch.zeros(n, past + n, dtype=torch.bool)
    mask[:, :past] = True
    for i in range(n):
        mask[i, [past + j for j in path(i)]] = True
    tree = run(prefilled(), tokens, [past + len(path(i)) - 1 for i in range(n)], mask)
    for leaf in (4, 5, 6):
        cache = prefilled()
        for step, i in enumerate(path(leaf)):
            alone = run(cache, [tokens[i]], [past + step], None)
            assert torch.equal(alone[0], tree[i])


@torch.inference_mode()
def test_a_windowed_layer_does_not_read_before_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-OSS: the target's mask says where the window of a pass begins, and keys before it may hold anything."""
    pytest.importorskip("numba")
    model = made(gpt_oss, torch.bfloat16)
    compute.install(model)
    plain = [layer == "full_attention" for layer in model.config.layer_types]
    target = SimpleNamespace(dtype=torch.bfloat16, _windows="some", config=model.config)
    past, positions = len(IDS), torch.tensor([10, 11, 12, 11])
    mask = torch.ones(4, past + 4, dtype=torch.bool)
    mask[:, past:] = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]])
    masks = Target.masks(target, mask, positions, torch.cat((torch.arange(past), positions)))  # type: ignore[arg-type]
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    fast, starts = dispatch.fast_attention, []

    def noted(*arguments: Any) -> Any:
        starts.append(arguments[6])
        return fast(*arguments)

    def run(spoil: bool) -> Tensor:
        cache = TargetCache()
        model(input_ids=IDS[None], use_cache=True, **{cache_name: cache.inner})
        for layer, full in zip(cache.inner.layers, plain, strict=True):
            if spoil and not full:
                layer.keys[:, :, :3], layer.values[:, :, :3] = torch.nan, torch.nan  # type: ignore[index]
        monkeypatch.setattr(dispatch, "fast_attention", noted)
        rows = {"input_ids": IDS[None, :4], "position_ids": positions[None], "attention_mask": masks}
        return model(**rows, use_cache=True, **{cache_name: cache.inner}).logits[0]

    expected = run(False)
    assert [start is None for start in starts] == plain and not all(plain)
    assert all(int(start) == 10 - 8 + 1 for start in starts if start is not None)
    assert torch.equal(run(True), expected) and expected.isfinite().all()


def test_install_twice_and_copies(decoder: Any) -> None:
    expected = logits(decoder, IDS)
    compute.install(decoder)
    assert torch.equal(logits(decoder, IDS), expected)
    twin = copy.deepcopy(decoder)
    twin.lm_head.weight.data.zero_()
    assert not logits(twin, IDS).any() and torch.equal(logits(decoder, IDS), expected)


def test_a_norm_of_another_kind_stays() -> None:
    """A class that only looks like an RMS norm (weight + 1, as in Gemma) is found out and left alone."""

    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, dtype=torch.bfloat16))
            self.variance_epsilon = 1e-6

        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight.float())).to(
                x.dtype
            )

    model = made(qwen, torch.bfloat16)
    model.model.norm = OddRMSNorm()
    compute.install(model)
    assert type(model.model.norm) is OddRMSNorm
    assert type(model.model.layers[0].input_layernorm).__module__ == compute.__name__


def test_expert_parallel_sentinels_and_old_releases() -> None:
    """Ids of `num_experts` add nothing; attributes that older transformers lack have defaults."""
    model = made(gpt_oss, torch.float32)
    module = model.model.layers[0].mlp.experts
    hidden, weight = torch.randn(3, 32), torch.rand(3, 2)
    index = torch.tensor([[0, 8], [8, 8], [3, 8]])
    with torch.no_grad():
        result = compute.experts_forward(module, hidden, index, weight)
        one = compute.experts_forward(
            module, hidden, torch.tensor([[0, 0], [1, 1], [3, 3]]), weight * torch.tensor([1, 0])
        )
        assert not result[1].any()
        torch.testing.assert_close(result[[0, 2]], one[[0, 2]])
        plain = made(qwen, torch.float32).model.layers[0].mlp.experts
        expected = compute.experts_forward(plain, hidden, index.clamp(max=7), weight)
        for name in ("has_post_expert_norm", "is_concatenated", "is_transposed", "has_bias", "has_gate"):
            delattr(plain, name)
        torch.testing.assert_close(compute.experts_forward(plain, hidden, index.clamp(max=7), weight), expected)
