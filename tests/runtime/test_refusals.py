"""Hostile and unlucky checkpoints: each fault is one line that names the file or key and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ecospec_runtime.checkpoint import resolve_folder, weight_files
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.errors import UserError
from ecospec_runtime.target import Target


@pytest.fixture
def folder(tiny_target_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target to be damaged."""
    return Path(shutil.copytree(tiny_target_dir, tmp_path / "target"))


@pytest.fixture
def head(tiny_drafter_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny head to be damaged."""
    return Path(shutil.copytree(tiny_drafter_dir, tmp_path / "head"))


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir)


def change(folder: Path, **settings: Any) -> None:
    """Settings of a folder's config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def refused(load: Callable[[], object]) -> str:
    with pytest.raises(UserError) as error:
        load()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", [{"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "longrope"}])
def test_rotary_embeddings_that_depend_on_the_length(folder: Path, kind: dict[str, Any]) -> None:
    """A draft may cross the length at which they change, and its rejected keys would stay rotated otherwise."""
    if kind["rope_type"] == "longrope":
        kind |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 48}
    change(folder, rope_parameters={"rope_theta": 10000.0, **kind})
    assert kind["rope_type"] in refused(lambda: Target.from_pretrained(folder))


def test_no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert "tokenizer" in refused(lambda: Target.from_pretrained(folder))


def test_nan_in_the_output_matrix(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head" in refused(lambda: run(Target.from_pretrained(folder)))


def run(target: Target) -> None:
    target.forward(torch.tensor([1, 2]), torch.arange(2), None, target.new_cache())


def test_end_tokens_are_those_of_generate(folder: Path) -> None:
    """The tokenizer's own does not count; nonsense is named."""
    (folder / "generation_config.json").unlink()
    change(folder, eos_token_id=None)
    assert Target.from_pretrained(folder).eos_token_ids() == ()
    change(folder, eos_token_id=[3, 5])
    assert Target.from_pretrained(folder).eos_token_ids() == (3, 5)


def test_a_model_of_custom_code_asks_nothing(folder: Path) -> None:
    change(
        folder, model_type="unknown_kind", auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    )
    assert "cannot load it" in refused(lambda: Target.from_pretrained(folder))


def test_git_lfs_pointers(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "git lfs pull" in refused(lambda: Target.from_pretrained(folder))


@pytest.mark.parametrize("name", ["", " ", "x" * 5000, "/" + "y" * 300])
def test_names_that_are_no_folder(name: str) -> None:
    refused(lambda: resolve_folder(name, "target"))


def test_files_that_an_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "old.safetensors"):
        (tmp_path / name).touch()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]
    (tmp_path / "model-2.safetensors").unlink()  # a stale index, as beside an exported layer
    assert [path.name for path in weight_files(tmp_path)] == ["model-1.safetensors", "old.safetensors"]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0"), ({"num_attention_heads": -4}, "num_attention_heads is -4"),
        ({"head_dim": 7}, "do not work out"), ({"num_key_value_heads": 3}, "do not work out"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"), ({"max_position_embeddings": 10**12}, "max_position"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"), ({"rope_theta": -5.0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor"), ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
    ],
)  # fmt: skip
def test_heads_that_cannot_be(head: Path, target: Target, settings: dict[str, Any], word: str) -> None:
    change(head, **settings)
    message = refused(lambda: load_drafter(head, target))
    assert word in message and str(head) in message


@pytest.mark.parametrize("said", [5, [1], {"a": 1}])
def test_odd_architectures(head: Path, target: Target, said: object) -> None:
    change(head, architectures=said)
    assert "not a supported kind" in refused(lambda: load_drafter(head, target))


def test_one_architecture_need_not_be_a_list(head: Path, target: Target) -> None:
    change(head, architectures="LlamaForCausalLMEagle3")
    assert load_drafter(head, target).kind == "eagle3"


def test_a_head_narrower_than_its_heads(head: Path, target: Target) -> None:
    """3 heads of 8 beside a hidden size of 32, as GLM-4.5 has 96 of 128 beside 5120."""
    tensors = load_file(head / "model.safetensors")
    attention = "midlayer.self_attn."
    for name, rows in (("q", 24), ("k", 8), ("v", 8)):
        tensors[f"{attention}{name}_proj.weight"] = tensors[f"{attention}{name}_proj.weight"][:rows].contiguous()
    tensors[f"{attention}o_proj.weight"] = tensors[f"{attention}o_proj.weight"][:, :24].contiguous()
    save_file(tensors, head / "model.safetensors")
    change(head, num_attention_heads=3, num_key_value_heads=1)
    drafter = load_drafter(head, target)
    sequence = drafter.start()
    drafter.extend(sequence, torch.tensor([1, 2]), torch.zeros(2, 3 * target.hidden_size))


def test_bin_files(head: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved on a GPU: read on any machine. Text in its place: one line."""
    tensors = load_file(head / "model.safetensors")
    (head / "model.safetensors").unlink()
    torch.save(tensors, head / "pytorch_model.bin")
    asked: dict[str, Any] = {}
    really = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: asked.update(k) or really(*a, **k))
    assert load_drafter(head, target).kind == "eagle3"
    assert asked["map_location"] == "cpu" and asked["weights_only"] is True
    for content in (b"hello", b"<html>", b""):
        (head / "pytorch_model.bin").write_bytes(content)
        message = refused(lambda: load_drafter(head, target))
        assert "pytorch_model.bin" in message and "weights_only" not in message


def test_quantised_heads(head: Path, target: Target) -> None:
    tensors = load_file(head / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, head / "model.safetensors")
    assert "fc.weight is quantised" in refused(lambda: load_drafter(head, target))
