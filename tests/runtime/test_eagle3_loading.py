"""EAGLE-3 checkpoints: what loads, what is refused by name, and which target layers each format means (CASES 6, 7, 10)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ecospec_runtime.config import PoolConfig
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.drafters.eagle3_layouts import entering_layers
from ecospec_runtime.errors import UserError
from ecospec_runtime.target import Target
from tests.heads import Edit, edit_head


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir, dtype="float32")


@pytest.fixture
def edited(tiny_drafter_dir: Path, tmp_path: Path) -> Callable[[Edit], Path]:
    """Returns a function that applies an edit to the tensors and config of a copy of the tiny head."""
    return lambda edit: edit_head(tiny_drafter_dir, tmp_path / "head", edit)


def draft(folder: Path, target: Target) -> Any:
    """A small pool after a fixed prefix."""
    drafter: Any = load_drafter(folder, target)
    sequence = drafter.start()
    features = torch.randn(5, 96, generator=torch.Generator().manual_seed(3))
    drafter.extend(sequence, torch.tensor([7, 8, 9, 10, 11]), features)
    return drafter.expand(sequence, 11, PoolConfig(depth=3, beam=2, width=4))


def test_proposals_are_target_ids_through_the_offset_map(tiny_drafter_dir: Path, target: Target) -> None:
    tensors = load_file(tiny_drafter_dir / "model.safetensors")
    kept = tensors["t2d"].nonzero().flatten()
    assert not torch.equal(kept, torch.arange(48))  # otherwise dropping the map would go unnoticed
    pool = draft(tiny_drafter_dir, target)
    state = torch.from_numpy(pool.states[1])
    normed = state * (state.square().mean() + 1e-6).rsqrt() * tensors["norm.weight"]
    best = (tensors["lm_head.weight"] @ normed).argsort(descending=True)[:4]
    assert pool.tokens[:4].tolist() == kept[best].tolist()


def test_bin_files_load_like_safetensors(
    edited: Callable[[Edit], Path], tiny_drafter_dir: Path, target: Target
) -> None:
    folder = edited(lambda tensors, config: None)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert draft(folder, target).tokens.tolist() == draft(tiny_drafter_dir, target).tokens.tolist()


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_bin_files_cannot_run_code(edited: Callable[[Edit], Path], tmp_path: Path, target: Target) -> None:
    folder = edited(lambda tensors, config: None)
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": print}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        load_drafter(folder, target)
    trace = tmp_path / "ran"
    torch.save({"fc.weight": Hostile(str(trace))}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: not a file of tensors, or one that runs code"):
        load_drafter(folder, target)
    assert not trace.exists()
    torch.save([torch.zeros(2)], folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="not a dictionary of tensors"):
        load_drafter(folder, target)


def test_no_map_is_needed_for_the_full_vocabulary(edited: Callable[[Edit], Path], target: Target) -> None:
    def edit(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        del tensors["d2t"], tensors["t2d"]
        tensors["lm_head.weight"] = torch.randn(96, 32)
        config["draft_vocab_size"] = 96

    pool = draft(edited(edit), target)
    assert set(pool.tokens.tolist()) <= set(range(96))


def _without(name: str) -> Edit:
    return lambda tensors, config: tensors.__delitem__(name)


def _not_a_number(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors["fc.weight"][0, 0] = torch.nan


def _setting(**values: Any) -> Edit:
    return lambda tensors, config: config.update(values)


def _norms(**values: Any) -> Edit:
    def edit(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["input_norm.weight"] = torch.ones(96)
        config |= values

    return edit


def _tensor(name: str, *shape: int) -> Edit:
    return lambda tensors, config: tensors.__setitem__(name, torch.zeros(shape))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_without("t2d"), "t2d is missing"),
        (_without("fc.weight"), "fc.weight is missing"),
        (_without("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight is missing"),
        (_not_a_number, "fc.weight holds NaN"),
        (_setting(target_hidden_size=64), "hidden size 64, this one has 32"),
        (_setting(intermediate_size=80), r"down_proj.weight has shape \[32, 64\].*\[32, 80\]"),
        (_setting(hidden_act="gelu"), "gelu"),
        (_setting(norm_output="yes"), "norm_output is .'yes'."),
        (_setting(norm_before_fc=True), "input_norm.weight is missing"),
        (_setting(eagle_config={"norm_before_fc": True}), "input_norm.weight is missing"),
        (_setting(norm_before_fc=True, eagle_config={"norm_before_fc": False}), "one of them only"),
        (_norms(norm_before_fc=False), "norm_before_fc is false"),
        (_norms(fc_norm=True), "exclude each other"),
        (_setting(speculators_model_type="eagle3"), "transformer_layer_config is missing"),
        (_setting(layer_types=["sliding_attention"]), "sliding_attention"),
        (_setting(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (_setting(rope_parameters={"rope_type": "yarn"}), "'factor'"),
        (_setting(rope_scaling={"rope_type": "mrope", "mrope_section": [2, 1, 1]}), "'mrope'"),
        (_setting(eagle_aux_hidden_state_layer_ids=[2, 3, "4"]), "captured layers"),
        (_setting(rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic"),
        (_setting(architectures=["LlamaForCausalLM"]), "LlamaForCausalLM"),
        (_setting(hidden_size=None), "unreadable value"),
        (_setting(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state"),
        (_setting(eagle_aux_hidden_state_layer_ids=[2, 3, 40]), "captured layers"),
        (_tensor("midlayer.self_attn.q_proj.bias", 32), "k_proj.bias is missing"),
        (_tensor("midlayer.mlp.gate_proj.bias", 64), "gate_proj.bias is not part"),
        (_tensor("midlayer.self_attn.q_norm.weight", 8), "q_norm.weight is not part"),
        (_tensor("fc.bias", 32), "fc.bias is not part"),
        (_tensor("layers.0.hidden_norm.weight", 32), "twice"),
        (_tensor("layers.1.hidden_norm.weight", 32), "only EAGLE-3 heads of one layer"),
        (_tensor("d2t", 47), r"d2t has shape \[47\]"),
    ],
)
def test_faults_are_refused_by_name(edited: Callable[[Edit], Path], target: Target, edit: Edit, message: str) -> None:
    """In the flat layout; those that heads of either layout can have are in `test_eagle3_layouts.py`."""
    with pytest.raises(UserError, match=message) as caught:
        load_drafter(edited(edit), target)
    assert "\n" not in str(caught.value)
    assert "head" in str(caught.value)


def test_missing_config_key_is_named(edited: Callable[[Edit], Path], target: Target) -> None:
    with pytest.raises(UserError, match="intermediate_size"):
        load_drafter(edited(lambda tensors, config: config.__delitem__("intermediate_size")), target)


def test_missing_folder_and_damaged_file_are_named(
    edited: Callable[[Edit], Path], tmp_path: Path, target: Target
) -> None:
    with pytest.raises(UserError, match="nowhere"):
        load_drafter(tmp_path / "nowhere", target)
    folder = edited(lambda tensors, config: None)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"model\.safetensors: damaged"):
        load_drafter(folder, target)


def test_shared_embedding_must_fit(edited: Callable[[Edit], Path], target: Target) -> None:
    with pytest.raises(UserError, match="embed_tokens"):
        load_drafter(edited(_setting(hidden_size=64, target_hidden_size=32)), target)


@pytest.mark.parametrize(
    ("config", "kind", "layers", "expected"),
    [
        ({}, "qwen3_moe", 48, (2, 24, 45)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 23, 44]}}, "qwen3_moe", 48, (2, 24, 45)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}}, "deepseek_v3", 61, (2, 30, 58)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}}, "deepseek_v3", 61, (2, 30, 58)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}, "gpt_oss", 36, (2, 18, 33)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 36]}}, "gpt_oss", 36, (2, 18, 36)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 24, 45]}, "qwen3_moe", 48, (2, 24, 45)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 24, 45],
          "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 23, 44]}}, "qwen3_moe", 48, (2, 24, 45)),
    ],
)  # fmt: skip
def test_layer_ids_at_real_layer_counts(
    config: dict[str, Any], kind: str, layers: int, expected: tuple[int, ...]
) -> None:
    """`test_eagle3_layouts.py` has each format, on targets of 7 layers that are run."""
    assert entering_layers(config, kind, layers, "config.json") == expected


def test_contradicting_layer_ids_are_refused() -> None:
    config = {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    }
    with pytest.raises(UserError, match="top level"):
        entering_layers(config, "qwen3_moe", 7, "config.json")
