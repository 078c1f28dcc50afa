"""MTP checkpoints: every published layout is the same layer, and what is refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.modeling_layers import MtpLayer

from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.drafters.mtp import load_mtp
from ecospec_runtime.errors import UserError
from ecospec_runtime.target import Target
from ecospec_runtime.weights import StoredTensor
from tests.models import tiny_tokenizer
from tests.mtp_layers import (
    EXPERTS,
    LAYERS,
    POOL,
    PREFIX,
    Family,
    H,
    by_hand,
    drafted,
    nextn_folder,
    nextn_names,
    path_to,
    qwen_names,
    randomise,
    same,
    save,
    text,
)  # fmt: skip


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("prefix", ["model.layers.0.", PREFIX])
def test_separate_folders_and_fused_experts_are_the_same_layer(
    deepseek: Family, tmp_path: Path, fused: bool, prefix: str
) -> None:
    tensors = nextn_names(deepseek.mtp.layers[0], prefix, fused)
    model = deepseek.target.model
    tensors[prefix + "embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
    tensors[prefix + "shared_head.head.weight"] = model.get_output_embeddings().weight.detach().clone()
    layers = LAYERS if prefix == PREFIX else 1  # older exports keep the layer's number
    folder = nextn_folder(tmp_path / "nextn", deepseek.folder, tensors, num_hidden_layers=layers)
    drafter = load_drafter(folder, deepseek.target)
    same(drafted(drafter, deepseek.target), drafted(deepseek.drafter, deepseek.target), 1e-6)
    assert drafter.kind == "mtp"
    assert drafter.fingerprint != deepseek.drafter.fingerprint == deepseek.target.fingerprint


def test_copies_in_the_targets_own_checkpoint_are_not_read(deepseek: Family, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(deepseek.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"{PREFIX}{name}.weight"] = torch.full((96, H), torch.nan)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target = Target.from_pretrained(folder, dtype="float32")
    same(drafted(load_drafter(folder, target), target), drafted(deepseek.drafter, deepseek.target), 1e-6)


@pytest.mark.parametrize("away", ["lm_head", "model.norm", "model.embed_tokens"])
def test_beside_a_target_that_is_offloaded(deepseek: Family, away: str) -> None:
    parts = [
        "model.embed_tokens",
        "model.rotary_emb",
        "model.norm",
        "lm_head",
        *(f"model.layers.{i}" for i in range(LAYERS)),
    ]
    target = Target.from_pretrained(
        deepseek.folder, dtype="float32", device_map={part: "disk" if part == away else "cpu" for part in parts}
    )
    same(drafted(load_drafter(deepseek.folder, target), target), drafted(deepseek.drafter, deepseek.target), 1e-6)


def test_only_the_layers_own_tensors_are_read(deepseek: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    really = StoredTensor._read

    def spy(self: StoredTensor, *args: Any) -> Tensor:
        read.append(self.name)
        return really(self, *args)

    monkeypatch.setattr(StoredTensor, "_read", spy)
    load_drafter(deepseek.folder, deepseek.target)
    assert set(read) == set(nextn_names(deepseek.mtp.layers[0], PREFIX))


def quantised(tensors: dict[str, Tensor], block: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Matrices of the decoder layer in FP8 blocks, and the values that those stand for."""
    stored, meant = dict(tensors), dict(tensors)
    for name, value in tensors.items():
        if value.dim() != 2 or not ("proj" in name and "eh_proj" not in name):
            continue
        rows, columns = value.shape
        padded = torch.zeros(-(-rows // block) * block, -(-columns // block) * block)
        padded[:rows, :columns] = value
        blocks = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block))
        scale = blocks.abs().amax((1, 3)) / 448
        low = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        meant[name] = (low.float() * scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns].contiguous()
        stored[name] = low.flatten(2).flatten(0, 1)[:rows, :columns].contiguous()
        stored[name + "_scale_inv"] = scale
    return stored, meant


def test_fp8_blocks_are_the_values_they_stand_for(deepseek: Family, tmp_path: Path) -> None:
    """Blocks of 16: the layer's 24 rows are a block and a half."""
    stored, meant = quantised(nextn_names(deepseek.mtp.layers[0], "model.layers.0."), 16)
    assert stored["model.layers.0.self_attn.q_a_proj.weight_scale_inv"].shape == (2, 2)
    setting = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    low = load_drafter(nextn_folder(tmp_path / "low", deepseek.folder, stored, **setting), deepseek.target)
    exact = load_drafter(nextn_folder(tmp_path / "exact", deepseek.folder, meant), deepseek.target)
    same(drafted(low, deepseek.target), drafted(exact, deepseek.target), 1e-5)
    scales = {
        name: (125 + torch.arange(value.numel()) % 3).to(torch.uint8).view(value.shape)
        for name, value in stored.items()
        if name.endswith("_scale_inv")
    }
    as_float = {name: torch.exp2(value.float() - 127) for name, value in scales.items()}
    bytes_, floats = ({**stored, **scale} for scale in (scales, as_float))
    low = load_drafter(nextn_folder(tmp_path / "exponents", deepseek.folder, bytes_, **setting), deepseek.target)
    exact = load_drafter(nextn_folder(tmp_path / "floats", deepseek.folder, floats, **setting), deepseek.target)
    same(drafted(low, deepseek.target), drafted(exact, deepseek.target), 1e-5)
    del stored["model.layers.0.mlp.experts.2.up_proj.weight_scale_inv"]
    with pytest.raises(UserError, match=r"experts\.2\.up_proj\.weight_scale_inv are missing"):
        load_drafter(nextn_folder(tmp_path / "without", deepseek.folder, stored, **setting), deepseek.target)
    name = "model.layers.0.mlp.experts.2.up_proj.weight_scale_inv"
    stored[name] = torch.ones(1, 1)
    with pytest.raises(UserError, match=r"up_proj\.weight_scale_inv has shape \[1, 1\].*\[1, 2\]"):
        load_drafter(nextn_folder(tmp_path / "misshapen", deepseek.folder, stored, **setting), deepseek.target)


def test_qwen3_next_names(tmp_path: Path) -> None:
    """The target keeps recurrent states, so it stands here as what the drafter needs of it."""
    config = Qwen3NextConfig(
        vocab_size=96, hidden_size=H, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=EXPERTS,
        num_experts_per_tok=2, decoder_sparse_step=1, max_position_embeddings=256, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).eval()
    randomise(model, 3)
    one = Qwen3NextConfig(**{**config.to_dict(), "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    one._attn_implementation, one._experts_implementation = "sdpa", "eager"
    layer = MtpLayer(one, type(model.model.layers[-1]), type(model.model.norm), 0).eval()
    randomise(layer, 5)
    folder = save(tmp_path / "target", model, qwen_names(layer))
    target = SimpleNamespace(
        model=model,
        config=config,
        layers=4,
        hidden_size=H,
        dtype=torch.float32,
        folder=folder,
        source="stub",
        device=torch.device("cpu"),
    )
    drafter = load_mtp(folder, str(folder), target, "auto")
    tokens = text()
    features: list[Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda module, args, output: features.append(output[0]))
    model(input_ids=tokens[None, :-1])
    hook.remove()
    sequence = drafter.start()
    drafter.extend(sequence, tokens[1:], features[0].detach())
    pool = drafter.expand(sequence, int(tokens[-1]), POOL)
    mtp = SimpleNamespace(layers=[layer], rotary_emb=model.model.rotary_emb)
    for row in range(1, len(pool.states)):
        children = np.flatnonzero(pool.state_rows == row)
        if len(children):
            path = path_to(pool, int(pool.parents[children[0]]))
            np.testing.assert_allclose(pool.states[row], by_hand(mtp, model, tokens, path)[-1], atol=1e-4)


# --- faults --------------------------------------------------------------------------------------------------------------

Edit = Callable[[dict[str, Tensor], dict[str, Any]], None]
OWN = "model.layers.0."


def _without(name: str) -> Edit:
    return lambda tensors, config: tensors.__delitem__(OWN + name)


def _tensor(name: str, *shape: int) -> Edit:
    return lambda tensors, config: tensors.__setitem__(OWN + name, torch.zeros(shape))


def _nan(name: str) -> Edit:
    return lambda tensors, config: tensors[OWN + name].view(-1)[:1].fill_(torch.nan)


def _setting(**values: Any) -> Edit:
    return lambda tensors, config: config.update(values)


def _renamed(number: int) -> Edit:
    def edit(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.replace(OWN, f"model.layers.{number}.")] = tensors.pop(name)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_without("eh_proj.weight"), r"model\.layers\.0\.eh_proj\.weight is missing \(1 in all\)"),
        (_without("mlp.experts.3.up_proj.weight"), r"mlp\.experts\.3\.up_proj\.weight is missing"),
        (_without("mlp.gate.e_score_correction_bias"), "e_score_correction_bias is missing"),
        (_without("shared_head.norm.weight"), r"shared_head\.norm\.weight is missing"),
        (_tensor("mlp.experts.8.up_proj.weight", 16, 32), r"experts\.8\.up_proj\.weight is not part of"),
        (_tensor("mlp.experts.gate_up_proj", 8, 32, 32), r"experts\.0\.gate_proj\.weight is not part of"),
        (_tensor("self_attn.q_proj.weight", 64, 32), r"self_attn\.q_proj\.weight is not part of"),
        (_tensor("enorm.weight_scale_inv", 1, 1), r"enorm\.weight_scale_inv is a scale, but its weight"),
        (_tensor("eh_proj.weight", 32, 32), r"eh_proj\.weight has shape \[32, 32\].*\[32, 64\]"),
        (_tensor("mlp.experts.1.down_proj.weight", 32, 8), r"experts\.1\.down_proj\.weight has shape \[32, 8\]"),
        (_nan("hnorm.weight"), r"hnorm\.weight holds NaN"),
        (_nan("mlp.experts.5.gate_proj.weight"), r"experts\.5\.gate_proj\.weight holds NaN"),
        (_tensor("embed_tokens.weight", 96, H), r"embed_tokens\.weight is not the target's embedding"),
        (_tensor("shared_head.head.weight", 95, H), r"shared_head\.head\.weight has shape \[95, 32\]"),
        (_setting(hidden_size=64), "hidden_size 64, the target has 32"),
        (_setting(vocab_size=128), "vocab_size 128, the target has 96"),
        (_setting(routed_scaling_factor=2.5), "routed_scaling_factor 2.5, the target has 1.5"),
        (_setting(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "rope_theta 500000.0"),
        (_setting(model_type="nonsense"), "cannot read config.json"),
        (_renamed(7), r"called model\.layers\.7, but num_hidden_layers in config\.json is 1"),
        (lambda tensors, config: tensors.update({"model.layers.1.enorm.weight": torch.zeros(H)}), "2 MTP layers"),
    ],
)
def test_faults_are_refused_by_name(deepseek: Family, tmp_path: Path, edit: Edit, message: str) -> None:
    tensors = nextn_names(deepseek.mtp.layers[0], OWN)
    config: dict[str, Any] = {}
    edit(tensors, config)
    folder = nextn_folder(tmp_path / "layer", deepseek.folder, tensors, **config)
    with pytest.raises(UserError, match=message) as caught:
        load_drafter(folder, deepseek.target)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_target_without_its_layer_says_so(
    deepseek: Family, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deepseek.target.model.save_pretrained(tmp_path / "resaved")  # transformers leaves the layer out
    tiny_tokenizer().save_pretrained(tmp_path / "resaved")
    with pytest.raises(UserError, match=r"announces 1 MTP layer.*published checkpoint"):
        load_drafter(tmp_path / "resaved", Target.from_pretrained(tmp_path / "resaved"))
    with pytest.raises(UserError, match=r"this is the target itself.*hold no MTP layer"):
        load_drafter(tiny_target_dir, Target.from_pretrained(tiny_target_dir))
    other = Target.from_pretrained(tiny_target_dir)
    assert load_drafter(deepseek.folder, other).kind == "causal_lm"  # a model of another kind drafts as a whole
    with pytest.raises(UserError, match="model_type"):
        deepseek.drafter.check(other)
    monkeypatch.delattr("transformers.modeling_layers.MtpLayer")
    with pytest.raises(UserError, match=r"no MTP layers; install transformers 5\.17"):
        load_drafter(deepseek.folder, deepseek.target)


def test_damaged_files_and_unsuitable_layers_are_named(
    deepseek: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = nextn_folder(tmp_path / "cut", deepseek.folder, nextn_names(deepseek.mtp.layers[0], OWN))
    path = folder / "nextn_layer_parameters.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"nextn_layer_parameters\.safetensors: damaged"):
        load_drafter(folder, deepseek.target)
    monkeypatch.setattr(type(deepseek.target.config), "chain_hidden_post_norm", True, raising=False)
    with pytest.raises(UserError, match="deepseek_v3 is not supported"):
        load_drafter(deepseek.folder, deepseek.target)
