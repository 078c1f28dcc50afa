"""References of other architectures: what they inherit, what they train with, what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from pipelines.reference import distill, mtp
from pipelines.reference.balance import BiasBalance
from pipelines.reference.inherit import inherit, strongest
from pipelines.reference.target import sorted_experts
from tests.models import TINY

SIZES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 12, "intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "deepseek_v3": {"n_routed_experts": 12, "moe_intermediate_size": 16, "num_key_value_heads": 4, "q_lora_rank": 32,
                    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 8, "n_group": 4,
                    "topk_group": 2, "first_k_dense_replace": 1, "intermediate_size": 40, "num_nextn_predict_layers": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def teacher() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**TINY, norm_topk_prob=True, tie_word_embeddings=True, initializer_range=0.2)
    return Qwen3MoeForCausalLM(config).eval()


def student(kind: str, **changes: Any) -> Any:
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        kind, vocab_size=96, hidden_size=32, num_hidden_layers=7, num_attention_heads=4, num_experts_per_tok=2,
        tie_word_embeddings=True, pad_token_id=0, **SIZES[kind] | changes,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
@torch.no_grad()
def test_experts_of_full_size_compute_what_the_teachers_do(teacher: Qwen3MoeForCausalLM, kind: str) -> None:
    model = student(kind)
    inherit(model, teacher, torch.randint(1, 96, (2, 24)))
    x, index, weight = torch.randn(9, 32) * 0.3, torch.randint(0, 12, (9, 2)), torch.rand(9, 2)
    expected = teacher.model.layers[3].mlp.experts(x, index, weight)
    found = model.model.layers[3].mlp.experts(x, index, weight)
    if kind == "deepseek_v3":  # what follows multiplies by it
        found = found * model.config.routed_scaling_factor
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.model.embed_tokens.weight, teacher.model.embed_tokens.weight)


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
@torch.no_grad()
def test_attention_does_about_what_the_teachers_does(kind: str) -> None:
    """All but the norms of queries, keys and latents, which become constants; with one key head every frequency is kept."""
    torch.manual_seed(0)
    sizes = {**TINY, "num_key_value_heads": 1, "head_dim": 32}  # wide heads: norms vary little
    teacher = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, tie_word_embeddings=True, initializer_range=0.2)).eval()
    changes = {"num_key_value_heads": 1, "head_dim": 32, "sliding_window": 64}
    if kind == "deepseek_v3":
        changes = {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    model = student(
        kind, **changes, max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    model.set_attn_implementation("eager")
    inherit(model, teacher, torch.randint(1, 96, (4, 32)))
    if kind == "gpt_oss":
        model.model.layers[1].self_attn.sinks.fill_(-1e4)
    outputs: dict[Any, torch.Tensor] = {}
    for one in (teacher, model):
        layer = one.model.layers[1].self_attn
        layer.register_forward_hook(lambda module, args, output, one=one: outputs.update({one: output[0]}))
        x = torch.nn.functional.rms_norm(torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(2)), (32,))
        rope = one.model.rotary_emb(x, torch.arange(24)[None])
        mask = torch.full((24, 24), -torch.inf).triu(1)[None, None]
        layer(x, position_embeddings=rope, attention_mask=mask)
    left, right = (value.flatten() for value in outputs.values())
    assert torch.corrcoef(torch.stack((left, right)))[0, 1] > 0.95


def test_the_strongest_units_stay() -> None:
    gate_up, down = torch.ones(1, 6, 4), torch.ones(1, 4, 3)
    gate_up[0, 1] = 0.1  # unit 1 has a weak gate
    gate, up, kept = strongest(gate_up, down * torch.tensor([1.0, 2.0, 3.0]), 2)
    assert gate.shape == up.shape == (1, 2, 4) and kept[0, 0].tolist() == [1.0, 3.0]


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
def test_experts_function_of_training(kind: str) -> None:
    model = student(kind)
    experts = model.model.layers[2].mlp.experts
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x, index, weight = torch.randn(9, 32), torch.randint(0, 12, (9, 2)), torch.rand(9, 2)
    torch.testing.assert_close(
        sorted_experts(experts, x, index, weight), experts(x, index, weight), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v3"])
def test_shipped_families_can_be_built(family: str) -> None:
    with torch.device("meta"):
        model = distill.new_student(Path(f"pipelines/reference/families/{family}.yaml"))
    extra = 1.2e6 if family == "deepseek-v3" else 1.5e6  # the drafter
    assert 2 * (sum(p.numel() for p in model.parameters()) + extra) < 20e6


def test_a_bias_moves_towards_balance() -> None:
    model = student("deepseek_v3")
    balance = BiasBalance(model)
    assert len(balance.routers) == 6
    router = balance.routers[0]
    router.weight.data.zero_()
    router.e_score_correction_bias[:] = torch.arange(12) / 100  # the last groups get everything
    model(input_ids=torch.randint(1, 96, (1, 8)))
    before = router.e_score_correction_bias.clone()
    balance.step()
    assert (router.e_score_correction_bias[-2:] < before[-2:]).all() and (
        router.e_score_correction_bias[:3] > before[:3]
    ).all()


def test_mtp_layer_learns_and_is_saved_under_published_names(tmp_path: Path) -> None:
    model = student("deepseek_v3")
    model.save_pretrained(tmp_path / "target")
    module = mtp.MtpModule(model, mtp.new_layer(model), minutes=1, lr=1e-3, steps=2, share=1.0)
    losses = module.losses(torch.randint(1, 96, (2, 16)))
    assert len(losses) == 3
    torch.stack([loss for loss, _ in losses]).sum().backward()
    assert all(p.grad is not None for name, p in module.head.named_parameters() if "experts" not in name)
    mtp.save_layer(module.head, tmp_path / "target", 7, tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    own = {name.removeprefix("model.layers.7.") for name in saved if name.startswith("model.layers.7.")}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "mlp.gate.weight",
            "mlp.gate.e_score_correction_bias", "mlp.experts.11.up_proj.weight", "self_attn.kv_b_proj.weight"} <= own  # fmt: skip
    assert not any("mtp_block" in name or "gate_up" in name for name in own)
    assert saved.keys() > load_file(tmp_path / "target" / "model.safetensors").keys()
    block = module.head.mtp_block.mlp.experts
    up = saved["model.layers.7.mlp.experts.5.up_proj.weight"]
    assert torch.equal(up, block.gate_up_proj[5, 16:].to(torch.bfloat16))


def test_unrolled_mtp_steps_see_their_own_chain_only() -> None:
    """A step computed for all chains at once equals the one of a single chain on a text cut at its start."""
    model = student("deepseek_v3")
    module = mtp.MtpModule(model, mtp.new_layer(model), minutes=1, lr=1e-3, steps=2, share=1.0)
    torch.manual_seed(3)
    ids, start = torch.randint(1, 96, (1, 20)), 6
    found: dict[str, list[torch.Tensor]] = {}
    for name, starts, text in (("many", torch.arange(3, 12), ids), ("one", torch.tensor([start]), ids[:, : start + 5])):
        module.chain_starts = lambda rows, starts=starts: starts  # type: ignore[method-assign, misc]
        states: list[torch.Tensor] = []
        step = module._step
        module._step = lambda *a, states=states, step=step: states.append(step(*a)) or states[-1]  # type: ignore[method-assign, misc]
        with torch.no_grad():
            module.losses(text)
        module._step = step  # type: ignore[method-assign]
        at = starts.tolist().index(start)
        found[name] = [state[0, at] for state in states[1:]]
    for many, one in zip(found["many"], found["one"], strict=True):
        torch.testing.assert_close(many, one, rtol=1e-4, atol=1e-5)
