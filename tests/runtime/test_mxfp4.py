"""GPT-OSS's experts that stay MXFP4: the text and the routing of their dequantised twin, from a quarter of the bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ecospec_kernels import dispatch
from ecospec_runtime import quantization
from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.engine import Engine
from ecospec_runtime.errors import UserError
from ecospec_runtime.mxfp4 import Mxfp4Experts, dtype_name
from ecospec_runtime.policies import build_policy, parse_policy
from ecospec_runtime.scoring import Scorer
from ecospec_runtime.target import Target
from tests.conftest import StubDrafter
from tests.ops.cases import BF16, assert_near, random, routing, under_interpreter
from tests.oracles import mixed_drafter
from tests.quantized import GPT_OSS, save_plain, write_mxfp4
from tests.runtime.test_quantized import PROMPT, greedy
from tests.train.invented import make_profile

COUNT = 24
POLICIES = ("off", "confidence:budget=6", "utility:trial=1,hold=2", "throughput:pause=0,node_experts=2")
PROFILE = make_profile(fixed_ms=1.0, per_token_ms=0.05, per_expert_ms=0.01, plain_ms=1.2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> tuple[Path, Path]:
    """An MXFP4 checkpoint, otherwise float32, of the hidden size of the stub drafters; and its dequantised twin."""
    folder = tmp_path_factory.mktemp("mxfp4") / "gpt-oss"
    return write_mxfp4(save_plain(folder, "gpt_oss", tiny_target_dir, **GPT_OSS | {"hidden_size": 32}))


@pytest.fixture(scope="module")
def packed(folders: tuple[Path, Path]) -> Target:
    """Asked for, on a CPU."""
    return Target.from_pretrained(folders[0], "mxfp4")


@pytest.fixture(scope="module")
def in_bf16(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MXFP4 checkpoint as one whose other weights are bfloat16."""
    folder = tmp_path_factory.mktemp("bf16") / "gpt-oss"
    shutil.copytree(folders[0], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


def text_of(folder: Path) -> list[int]:
    """Prompt and greedy text of transformers' own model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    text = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=COUNT, pad_token_id=0)
    return text[0].tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_text_of_the_dequantised_twin(
    policy: str, packed: Target, folders: tuple[Path, Path]
) -> None:
    text = text_of(folders[1])
    drafter: Any = mixed_drafter([text], StubDrafter)
    drafter.aux_layers = (0, 1, 2)
    scorer = Scorer(None, "raw", packed.moe_layers, packed.experts)
    engine = Engine(
        packed, drafter, scorer, build_policy(parse_policy(policy)), PROFILE, PoolConfig(depth=4, beam=3, width=5)
    )
    stream = engine.generate(PROMPT, GenerationConfig(max_new_tokens=COUNT, eos_token_id=()))
    assert [token.id for token in stream] == text[len(PROMPT) :] and len(set(text)) > 10
    assert policy == "off" or stream.statistics.accepted > 3


def test_routing_is_that_of_the_dequantised_twin(packed: Target, folders: tuple[Path, Path]) -> None:
    tokens, chosen = greedy(packed)
    twin_tokens, twin_chosen = greedy(Target.from_pretrained(folders[1]))
    assert tokens == twin_tokens and torch.equal(chosen, twin_chosen)
    assert packed.knows_weights and chosen.unique().numel() == packed.experts


def test_memory_holds_what_the_file_holds(packed: Target, folders: tuple[Path, Path]) -> None:
    """Blocks and scales byte for byte, and nothing else as large as a matrix of experts."""
    stored = load_file(folders[0] / "model.safetensors")
    held = {**dict(packed.model.named_parameters()), **dict(packed.model.named_buffers())}
    assert stored.keys() <= held.keys()
    for name, tensor in stored.items():
        assert held[name].dtype == tensor.dtype and torch.equal(held[name], tensor), name
    names = [name for name in held if "experts" in name and "bias" not in name]
    assert len(names) == 12 and all(held[name].dtype == torch.uint8 for name in names)
    for module in packed.expert_modules:
        assert isinstance(module, Mxfp4Experts) and not module._buffers
        assert not any(isinstance(value, torch.Tensor) for value in vars(module).values())
    assert dtype_name(packed) == "mxfp4" and packed.dtype == torch.float32
    assert dtype_name(Target.from_pretrained(folders[1])) == "float32"


def test_a_saved_model_loads_again(packed: Target, folders: tuple[Path, Path], tmp_path: Path) -> None:
    packed.model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folders[0] / name, tmp_path)
    again = Target.from_pretrained(tmp_path)
    assert greedy(again)[0] == greedy(packed)[0]
    assert Target.from_pretrained(folders[0]).fingerprint == packed.fingerprint


def test_layers_on_disk(packed: Target, folders: tuple[Path, Path]) -> None:
    names = [*(f"model.{name}" for name in ("embed_tokens", "rotary_emb", "norm", "layers.0", "layers.2")), "lm_head"]
    target = Target.from_pretrained(
        folders[0], "mxfp4", device_map=dict.fromkeys(names, "cpu") | {"model.layers.1": "disk"}
    )
    parameters = dict(target.model.named_parameters())
    assert parameters["model.layers.1.mlp.experts.down_proj_blocks"].is_meta
    tokens, chosen = greedy(target)
    expected, expected_chosen = greedy(packed)
    assert tokens == expected and torch.equal(chosen, expected_chosen)


def test_what_stays_mxfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "computes_mxfp4", lambda device: device == "cuda:0")
    stays = quantization.stays_mxfp4
    assert stays("mxfp4", "gpt_oss", "auto", BF16, "cuda:0")
    assert not stays("mxfp4", "gpt_oss", "auto", BF16, "cpu")
    assert not stays("mxfp4", "gpt_oss", "auto", torch.float32, "cuda:0"), "the kernels want 16 bits"
    assert not stays("mxfp4", "gpt_oss", "bfloat16", BF16, "cuda:0")
    assert stays("mxfp4", "gpt_oss", "mxfp4", torch.float32, "cpu"), "asked for"
    assert not stays("mxfp4", "qwen3_moe", "mxfp4", BF16, "cuda:0") and not stays(
        "fp8", "gpt_oss", "mxfp4", BF16, "cuda:0"
    )


def test_only_what_is_mxfp4_can_stay_so(
    tiny_target_dir: Path, tiny_drafter_dir: Path, folders: tuple[Path, Path]
) -> None:
    for folder in (tiny_target_dir, folders[1]):
        with pytest.raises(
            UserError, match="--dtype mxfp4 is for GPT-OSS checkpoints in MXFP4, and this is not one; use"
        ):
            Target.from_pretrained(folder, "mxfp4")
    loaded: Any = load_drafter(tiny_drafter_dir, Target.from_pretrained(tiny_target_dir), "mxfp4")
    assert loaded.kind == "eagle3", "of a drafter it means auto"


def test_bfloat16_on_a_cpu_is_that_of_the_dequantised_experts_bit_for_bit(in_bf16: Path) -> None:
    pytest.importorskip("numba")
    tokens, hidden = torch.tensor(PROMPT), []
    for dtype in ("mxfp4", "bfloat16"):
        target = Target.from_pretrained(in_bf16, dtype)
        assert target.dtype == BF16 and dtype_name(target) == dtype
        hidden.append(target.forward(tokens, torch.arange(len(tokens)), None, target.new_cache()).hidden)
    assert torch.equal(*hidden)


@under_interpreter
@torch.no_grad()
def test_many_rows_go_through_the_triton_kernel_in_pieces(packed: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    module, rows = packed.expert_modules[0], dispatch.MAX_ROWS + 3
    routed = random(1, rows, 32, dtype=BF16), routing(2, rows, 6, 2), random(3, rows, 2, dtype=BF16).abs()
    expected = module(*routed)
    monkeypatch.setattr(dispatch, "runs_triton", lambda t: True)
    dispatch.CALLS.clear()
    assert_near(module(*routed), expected, 2**-16)
    assert dispatch.CALLS == {("expert_mlp", "fused"): 2}


@under_interpreter
def test_the_triton_kernels_give_the_same_tokens(in_bf16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they run, `auto` keeps what is stored; here all else stays with the CPU's kernels."""
    expected, _ = greedy(Target.from_pretrained(in_bf16), 6)
    monkeypatch.setattr(quantization, "computes_mxfp4", lambda device: True)
    target = Target.from_pretrained(in_bf16)
    assert dtype_name(target) == "mxfp4" and target.dtype == BF16
    takes = dispatch._fused
    monkeypatch.setattr(dispatch, "runs_triton", lambda t: True)
    monkeypatch.setattr(dispatch, "_fused", lambda op, *arguments: op == "expert_mlp" and takes(op, *arguments))
    dispatch.CALLS.clear()
    tokens, _ = greedy(target, 6)
    assert tokens == expected and len(set(tokens)) > 3
    assert {key: count for key, count in dispatch.CALLS.items() if key[0] == "expert_mlp"} == {
        ("expert_mlp", "fused"): 6 * target.moe_layers
    }
