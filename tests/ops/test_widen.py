"""A widened model computes what its base computes: same logits, same routing, more bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GptOssConfig, GptOssForCausalLM

from ecospec_runtime.checkpoint import fingerprint
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.errors import UserError
from ecospec_runtime.target import Target
from pipelines.reference import mtp
from pipelines.reference import widen as widening
from pipelines.reference.widen import copies, widen, widen_tensor
from tests.models import save_model

TOKENS = torch.tensor([5, 17, 3, 42, 8, 8, 77])


def outputs(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 logits and routing of one chain."""
    target = Target.from_pretrained(folder, dtype="float32")
    out = target.forward(TOKENS, torch.arange(len(TOKENS)), None, target.new_cache(), routing=True)
    assert out.logits is not None and out.routing is not None
    return out.logits, out.routing


@pytest.mark.parametrize("size", [{"factor": 1}, {"factor": 4}, {"width": 16 * 4 + 24}, {"width": 17}])
def test_same_output_and_routing(tiny_target_dir: Path, tmp_path: Path, size: dict[str, int]) -> None:
    """Sums are reordered, so logits agree to float32 rounding of sums of a few dozen terms; routing exactly."""
    wide = widen(tiny_target_dir, tmp_path / "wide", **size)
    logits, routing = outputs(wide)
    expected, expected_routing = outputs(tiny_target_dir)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(routing, expected_routing)
    config = json.loads((wide / "config.json").read_text())
    width = size.get("width", 16 * size.get("factor", 0))
    assert config["moe_intermediate_size"] == width
    assert config["ecospec_widened_factor"] == width / 16
    assert config["ecospec_widened_from"] == fingerprint(tiny_target_dir) == fingerprint(wide)


def test_gpt_oss(tmp_path: Path) -> None:
    """Transposed, interleaved, biased experts whose clamps are reached."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_local_experts=6, num_experts_per_tok=2, intermediate_size=16, swiglu_limit=0.5, initializer_range=0.4,
        max_position_embeddings=128, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    for name, p in model.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(p)
    save_model(tmp_path / "narrow", model)
    wide = widen(tmp_path / "narrow", tmp_path / "wide", width=16 * 4 + 8)
    logits, routing = outputs(wide)
    expected, expected_routing = outputs(tmp_path / "narrow")
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(routing, expected_routing)
    assert json.loads((wide / "config.json").read_text())["intermediate_size"] == 72


def test_widening_twice_keeps_the_base(tiny_target_dir: Path, tmp_path: Path) -> None:
    once = widen(tiny_target_dir, tmp_path / "once", factor=2)
    twice = widen(once, tmp_path / "twice", factor=2)
    config = json.loads((twice / "config.json").read_text())
    assert config["ecospec_widened_factor"] == 4
    assert fingerprint(twice) == fingerprint(tiny_target_dir)
    torch.testing.assert_close(outputs(twice)[0], outputs(tiny_target_dir)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("width", "units", "k"), [(16, 16, 1), (31, 16, 1), (32, 16, 2), (112, 16, 4), (64, 16, 4)])
def test_copies(width: int, units: int, k: int) -> None:
    assert copies(width, units) == k


def test_zero_units_are_zero_and_bf16_division_is_exact() -> None:
    down = torch.randn(2, 8, 6).to(torch.bfloat16)
    wide = widen_tensor("down_proj", down, 27)
    assert wide.shape == (2, 8, 27) and not wide[..., 24:].any()
    assert torch.equal(wide[..., :6] * 4, down)
    gate_up = torch.randn(2, 12, 8)
    gate, up = widen_tensor("gate_up_proj", gate_up, 27).chunk(2, 1)
    assert torch.equal(gate[:, 6:12], gate_up[:, :6]) and torch.equal(up[:, 18:24], gate_up[:, 6:])


@pytest.mark.parametrize(
    ("size", "word"), [({"factor": 3}, "power of two"), ({"width": 8}, "16 units"), ({}, "factor")]
)
def test_mistakes_are_one_line(tiny_target_dir: Path, tmp_path: Path, size: dict[str, int], word: str) -> None:
    with pytest.raises(UserError, match=word) as error:
        widen(tiny_target_dir, tmp_path / "wide", **size)
    assert "\n" not in str(error.value)


def test_deepseek(tmp_path: Path) -> None:
    """Its shared experts widen with the routed ones; the narrow multi-token-prediction layer drafts for both targets."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=1, intermediate_size=40,
        n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=2, n_group=4, topk_group=2, moe_intermediate_size=16,
        initializer_range=0.3, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config)
    save_model(tmp_path / "base", model)
    mtp.save_layer(mtp.new_layer(model), tmp_path / "base", 2, tmp_path / "narrow")
    wide = widen(tmp_path / "narrow", tmp_path / "wide", factor=2)
    logits, routing = outputs(wide)
    expected, expected_routing = outputs(tmp_path / "narrow")
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(routing, expected_routing)
    pools, fingerprints = [], []
    for folder in (tmp_path / "narrow", wide):
        target = Target.from_pretrained(folder, dtype="float32")
        drafter = load_drafter(tmp_path / "narrow", target)
        sequence = drafter.start()
        drafter.extend(sequence, TOKENS, torch.randn(len(TOKENS), 32, generator=torch.Generator().manual_seed(1)))
        pools.append(drafter.expand(sequence, int(TOKENS[-1]), PoolConfig(depth=3, beam=2, width=4)))
        fingerprints.append(drafter.fingerprint)
    assert pools[0].tokens.tolist() == pools[1].tokens.tolist()
    assert len(set(fingerprints)) == 1


def test_a_busy_machine_still_gets_a_width(
    tiny_target_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noise may make the rest of a step grow faster than the experts; only experts that get cheaper give nothing to go by."""
    monkeypatch.setattr(widening, "_measure", lambda *_: ([1.0, 2.0], [1.0, 2.5]))
    width, measured = widening.choose_width(tiny_target_dir, 0.5)
    assert width == measured["widths"][1] + round(0.5 * measured["widths"][0] / 16) * 16
    assert "machine seems busy" in capsys.readouterr().err
    monkeypatch.setattr(widening, "_measure", lambda *_: ([2.0, 1.9], [1.0, 1.0]))
    with pytest.raises(UserError, match="too busy"):
        widening.choose_width(tiny_target_dir, 0.5)
