"""The three seed models and their drafters at their published sizes, on the `meta` device: shapes and counts, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer

from ecospec_runtime.config import PoolConfig
from ecospec_runtime.drafters.eagle3 import Eagle3Head
from ecospec_runtime.drafters.eagle3_config import check_fit, read_head_config
from ecospec_runtime.drafters.mtp import _layer_config
from ecospec_runtime.predictor import PredictorShapes
from ecospec_runtime.target import Target
from ecospec_train.predictor_model import PredictorNetwork
from ecospec_train.traces import bytes_per_position

# Values of the published config.json files.
SEEDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536, "norm_topk_prob": True,
    },
    "gpt_oss": {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
        "num_experts_per_tok": 4, "sliding_window": 128,
    },
    "deepseek_v3": {},  # the defaults of transformers are DeepSeek-V3's
}  # fmt: skip
# billions of parameters, MoE layers, experts, top-k, windows
EXPECTED = {
    "qwen3_moe": (235.1, 94, 128, 8, ""), "gpt_oss": (116.8, 36, 128, 4, "some"), "deepseek_v3": (671.0, 58, 256, 8, ""),
}  # fmt: skip
# millions of parameters of a predictor of width 512, kilobytes of a recorded position with the default pool
COSTS = {"qwen3_moe": (12.9, 220), "gpt_oss": (7.1, 136), "deepseek_v3": (19.1, 341)}


class MetaTarget(Target):
    """A target without weights: nothing can be run."""

    def _probe(self) -> int:
        return int(self.config.num_experts_per_tok)


@pytest.fixture(scope="module", params=SEEDS)
def target(request: pytest.FixtureRequest) -> Target:
    config = AutoConfig.for_model(request.param, **SEEDS[request.param])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return MetaTarget(model, None, request.param, Path())


def test_targets(target: Target) -> None:
    billions, layers, experts, top_k, windows = EXPECTED[target.source]
    assert sum(p.numel() for p in target.model.parameters()) / 1e9 == pytest.approx(billions, rel=0.002)
    assert (target.moe_layers, target.experts, target.top_k, target._windows) == (layers, experts, top_k, windows)


@pytest.mark.parametrize("target", ["qwen3_moe", "gpt_oss"], indirect=True)
def test_eagle3_heads(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One decoder layer over three captured ones; the default layers are inside every seed model."""
    heads = {"qwen3_moe": (64, 4, 128), "gpt_oss": (64, 8, 64)}[target.source]
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": target.hidden_size, "num_hidden_layers": 1,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": heads[2], "intermediate_size": 12288,
        "vocab_size": target.vocab_size, "draft_vocab_size": 32000, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = read_head_config(tmp_path, target, {})
    check_fit(config, target, "head")
    assert config.aux_layers == (2, target.layers // 2, target.layers - 3)
    with torch.device("meta"):
        head = Eagle3Head(config)
    weights = dict(head.named_parameters())
    assert weights["fc.weight"].shape == (target.hidden_size, 3 * target.hidden_size)
    assert weights["lm_head.weight"].shape == (32000, target.hidden_size)


@pytest.mark.parametrize("target", ["deepseek_v3"], indirect=True)
def test_mtp_layer(target: Target) -> None:
    """11.6 billion parameters, with all experts (13.5 with the copies of embedding and head in the published files)."""
    decoder = target.model.get_decoder()
    config = _layer_config(target.config, decoder, "drafter")
    with torch.device("meta"):
        layer = MtpLayer(config, type(decoder.layers[-1]), type(decoder.norm), 0)
    assert sum(p.numel() for p in layer.parameters()) / 1e9 == pytest.approx(11.61, rel=0.002)
    assert layer.eh_proj.weight.shape == (7168, 2 * 7168)
    published = decoder.layers[-1].state_dict()
    assert {k: v.shape for k, v in layer.mtp_block.state_dict().items()} == {k: v.shape for k, v in published.items()}
    assert target.config.num_hidden_layers == 61, "the target's own settings are left alone"


def test_predictor_and_traces(target: Target) -> None:
    """A predictor of 7 to 19 million parameters; a recorded position of 140 to 340 kilobytes before compression."""
    shapes = PredictorShapes(
        hidden=target.hidden_size, state=target.hidden_size, layers=target.moe_layers, experts=target.experts,
        top_k=target.top_k,
    )  # fmt: skip
    with torch.device("meta"):
        network = PredictorNetwork(shapes, 512)
    row = bytes_per_position(
        PoolConfig(), target.moe_layers, target.top_k, target.experts, target.hidden_size, drafter_temperatures=8,
        target_temperatures=2,
    )  # fmt: skip
    millions = sum(p.numel() for p in network.parameters()) / 1e6
    assert (millions, row / 1e3) == pytest.approx(COSTS[target.source], rel=0.01)
