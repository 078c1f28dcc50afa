"""FP8 and MXFP4 checkpoints decode as their dequantised weights do; what is wrong in one is named in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations import finegrained_fp8, moe

from ecospec_runtime import quantization
from ecospec_runtime.compute import NAME, install
from ecospec_runtime.errors import UserError
from ecospec_runtime.target import Target
from tests.quantized import DEEPSEEK, GPT_OSS, save_plain, write_fp8, write_mxfp4

PROMPT = [5, 17, 3, 44, 9, 9, 61, 2, 30]
TOKENS = 16


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("quantized") / "deepseek"
    return write_fp8(save_plain(folder, "deepseek_v3", tiny_target_dir, **DEEPSEEK))


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("quantized") / "gpt-oss"
    return write_mxfp4(save_plain(folder, "gpt_oss", tiny_target_dir, **GPT_OSS))


@pytest.fixture(params=["fp8", "mxfp4"])
def pair(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A quantised folder and its dequantised twin."""
    found: tuple[Path, Path] = request.getfixturevalue(request.param)
    return found


def greedy(target: Target, steps: int = TOKENS) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens after the prompt, and the routing of every row on the way."""
    cache, feed, tokens, routing = target.new_cache(), list(PROMPT), [], []
    for _ in range(steps):
        positions = torch.arange(len(cache), len(cache) + len(feed))
        output = target.forward(torch.tensor(feed), positions, None, cache, routing=True, last_only=True)
        assert output.logits is not None and output.routing is not None
        feed = [int(output.logits[-1].argmax())]
        tokens += feed
        routing.append(output.routing)
    return tokens, torch.cat(routing)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_decodes_as_its_dequantised_weights(pair: tuple[Path, Path], dtype: str) -> None:
    quantized, twin = (Target.from_pretrained(folder, dtype) for folder in pair)
    state, expected = quantized.model.state_dict(), twin.model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert state[name].dtype == value.dtype and torch.equal(state[name], value), name
    tokens, routing = greedy(quantized)
    twin_tokens, twin_routing = greedy(twin)
    assert tokens == twin_tokens and torch.equal(routing, twin_routing)
    assert len(set(tokens)) > 3, "a text that says something"
    if dtype == "float32":
        model = AutoModelForCausalLM.from_pretrained(pair[1], dtype=torch.float32, attn_implementation="eager").eval()
        reference = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)
        assert tokens == reference[0, len(PROMPT) :].tolist()


def test_one_note_says_what_it_costs(mxfp4: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    Target.from_pretrained(mxfp4[0])
    lines = [line for line in capsys.readouterr().err.splitlines() if "MXFP4" in line]
    assert len(lines) == 1 and "dequantised to float32" in lines[0] and "GB in memory" in lines[0]
    Target.from_pretrained(mxfp4[1])
    assert "dequantised" not in capsys.readouterr().err


def damaged(folder: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint whose tensors went through `change`."""
    copy = tmp_path / "damaged"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


WEIGHT = "model.layers.1.mlp.experts.3.down_proj.weight"
BLOCKS = "model.layers.1.mlp.experts.down_proj"


def test_faults_of_fp8_scales_name_the_tensor(fp8: tuple[Path, Path], tmp_path: Path) -> None:
    scale = f"{WEIGHT}_scale_inv"  # of [160, 136]: a grid of 2 x 2
    wide = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    changes: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
        (lambda t: t.pop(scale), rf"{WEIGHT} is quantised, and its scales {scale} are missing"),
        (lambda t: t[scale].__setitem__((1, 0), float("nan")), rf"{scale} \[1, 0\] is nan"),
        (lambda t: t[scale].__setitem__((0, 1), float("inf")), rf"{scale} \[0, 1\] is inf"),
        (lambda t: t.update({scale: t[scale][:1].clone()}), rf"{scale} has shape \[1, 2\], \[2, 2\] is one scale per"),
        (lambda t: t.update({wide: t[wide][:, :1].T.contiguous()}), rf"{wide} has shape \[1, 2\], \[2, 2\]"),
        (
            lambda t: t.update({WEIGHT: t[WEIGHT].bfloat16()}),
            rf"{scale} is a scale, but its weight is not stored as FP8",
        ),
    ]
    for i, (change, message) in enumerate(changes):
        with pytest.raises(UserError, match=message):
            Target.from_pretrained(damaged(fp8[0], tmp_path / str(i), change))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["auto", "mxfp4"])
def test_faults_of_mxfp4_scales_name_the_tensor(dtype: str, mxfp4: tuple[Path, Path], tmp_path: Path) -> None:
    """Whether they are dequantised or stay as they are."""
    scales = f"{BLOCKS}_scales"
    changes: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
        (lambda t: t.pop(scales), rf"{BLOCKS}_blocks is quantised, and its scales {scales} are missing"),
        (lambda t: t.pop(f"{BLOCKS}_blocks"), rf"{scales} holds scales of weights that are missing"),
        (
            lambda t: t.update({BLOCKS: torch.zeros(6, 2)}),
            rf"{BLOCKS} and {BLOCKS}_blocks are the same weights, stored twice",
        ),
        (lambda t: t[scales].__setitem__((2, 0, 0), 255), rf"{scales} \[2\] holds the code 255"),
        (lambda t: t.update({scales: t[scales].transpose(1, 2).contiguous()}), rf"{scales} has shape \[6, 3, 64\]"),
        (
            lambda t: t.update(
                {f"{BLOCKS}_{end}": t[f"{BLOCKS}_{end}"][:, :32].clone() for end in ("blocks", "scales")}
            ),
            r"down_proj\S* has shape \[6, .+\], config.json asks for \[6, ",
        ),
        (
            lambda t: [t.pop(f"{BLOCKS}_{end}") for end in ("blocks", "scales", "bias")],
            r"weights are missing .+down_proj",
        ),
    ]
    for i, (change, message) in enumerate(changes):
        with pytest.raises(UserError, match=message):
            Target.from_pretrained(damaged(mxfp4[0], tmp_path / str(i), change), dtype)  # type: ignore[arg-type]


def test_nan_weights_name_their_layer(fp8: tuple[Path, Path], tmp_path: Path) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.shared_experts.up_proj.weight"].view(torch.uint8)[0, 0] = 0x7F

    with pytest.raises(UserError, match="NaN or Inf in the hidden states leaving layer 2"):
        Target.from_pretrained(damaged(fp8[0], tmp_path, poison))


def test_bad_settings_are_one_line(fp8: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(fp8[0], folder)
    config = json.loads((folder / "config.json").read_text())
    for entry, message in [
        ({"weight_block_size": [64, 64]}, r"is one scale per 64 x 64 block"),
        ({"weight_block_size": "128"}, r"weight_block_size '128' is not two positive numbers"),
        ({"quant_method": "gptq", "bits": 4}, r"transformers cannot load it \(.+\)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"transformers cannot load it \(.+bitsandbytes"),
        ({"quant_method": "nonsense"}, r"quant_method 'nonsense' is not one that transformers knows"),
    ]:
        changed = config | {"quantization_config": config["quantization_config"] | entry}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match=message) as caught:
            Target.from_pretrained(folder)
        assert "\n" not in str(caught.value)


def test_what_stays_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "computes_fp8", lambda device: device == "cuda:0")
    stays = quantization.stays_quantized
    assert stays("fp8", "auto", "cuda:0")
    assert not stays("fp8", "bfloat16", "cuda:0") and not stays("fp8", "auto", "cpu")
    assert not stays("mxfp4", "auto", "cuda:0"), "its native layer hides the routing"
    assert stays("gptq", "bfloat16", "cpu"), "transformers' own affair"
    assert not stays(None, "auto", "cuda:0")


def test_native_fp8_experts_keep_their_own_functions(tiny_target_dir: Path) -> None:
    """As on a GPU, but for the matrix product: weights of more than a byte go through `F.linear` there."""
    plain = Target.from_pretrained(tiny_target_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir, dtype=torch.float32)
    kind = moe.use_experts_implementation(
        experts_class=finegrained_fp8.FP8Experts, experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    )
    for layer in model.model.layers:
        native = kind(model.config, block_size=(128, 128))
        native.gate_up_proj, native.down_proj = layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj
        layer.mlp.experts = native
    model.set_experts_implementation("eager")
    model.is_quantized = True
    install(model)
    assert model.config._experts_implementation != NAME
    target = Target(model, plain.tokenizer, "native", tiny_target_dir)
    tokens, routing = greedy(target)
    expected, expected_routing = greedy(plain)
    assert tokens == expected and torch.equal(routing, expected_routing)
