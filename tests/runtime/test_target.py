"""The target adapter: tree passes equal chain passes, and every bad checkpoint is one clear line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from ecospec_runtime import checkpoint
from ecospec_runtime.checkpoint import fingerprint
from ecospec_runtime.errors import UserError
from ecospec_runtime.target import Target
from ecospec_runtime.verify import tree_mask


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir)


def chain_logits(target: Target, tokens: list[int]) -> torch.Tensor:
    """The model's own last-row logits for a text, without a cache."""
    with torch.inference_mode():
        return target.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float()


def test_tree_pass_and_commit_equal_plain_decoding(target: Target) -> None:
    """Each node sees its own path only, and what is committed continues exactly; other families: `test_families.py`."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(1, 96, (11,), generator=generator).tolist()
    cache = target.new_cache()
    target.forward(torch.tensor(prompt), torch.arange(11), None, cache, logits=False)
    tokens = torch.randint(1, 96, (8,), generator=generator).tolist()  # root and seven nodes
    parents = [0, 0, 1, 1, 2, 4, 6]
    paths = [[0]]
    for row, parent in enumerate(parents, start=1):
        paths.append([*paths[parent], row])
    depths = torch.tensor([len(path) - 1 for path in paths])
    output = target.forward(torch.tensor(tokens), depths + 11, tree_mask(parents, 11), cache, routing=True)
    assert output.logits is not None
    assert output.routing is not None
    assert output.routing.shape == (8, target.moe_layers, 2)
    for row, path in enumerate(paths):
        expected = chain_logits(target, prompt + [tokens[i] for i in path])
        torch.testing.assert_close(output.logits[row], expected, atol=2e-4, rtol=1e-4)

    kept = paths[7]
    assert kept == [0, 1, 4, 6, 7]
    target.commit(cache, 11, kept)
    assert len(cache) == 16
    text = prompt + [tokens[i] for i in kept]
    for position, token in enumerate((5, 17, 40), start=16):
        text.append(token)
        plain = target.forward(torch.tensor([token]), torch.tensor([position]), None, cache)
        assert plain.logits is not None
        torch.testing.assert_close(plain.logits[0], chain_logits(target, text), atol=2e-4, rtol=1e-4)


def test_captured_layers_and_routing_are_the_models_own(target: Target) -> None:
    ids = torch.arange(1, 13)
    output = target.forward(ids, torch.arange(12), None, target.new_cache(), aux_layers=(0, 3, 7), routing=True)
    with torch.inference_mode():
        own = target.model(input_ids=ids[None], output_hidden_states=True, output_router_logits=True)
    assert output.aux is not None
    assert output.routing is not None
    torch.testing.assert_close(output.aux[:, :32], own.hidden_states[0][0])
    torch.testing.assert_close(output.aux[:, 32:64], own.hidden_states[3][0])
    torch.testing.assert_close(output.hidden, own.hidden_states[7][0])
    with torch.inference_mode():
        torch.testing.assert_close(target.model.model.norm(output.aux[:, 64:]), output.hidden)
    chosen = torch.stack([logits.topk(2).indices for logits in own.router_logits], dim=1)
    assert torch.equal(output.routing.sort(-1).values, chosen.sort(-1).values)


def test_hooks_leave_when_no_longer_asked_for(tiny_target_dir: Path) -> None:
    target = Target.from_pretrained(tiny_target_dir)
    one = torch.tensor([3])
    target.forward(one, torch.tensor([0]), None, target.new_cache(), aux_layers=(1,), routing=True)
    plain = target.forward(one, torch.tensor([0]), None, target.new_cache())
    assert plain.aux is None
    assert plain.routing is None
    hooks = [m._forward_pre_hooks for m in target.model.modules()] + [m._forward_hooks for m in target._layers]
    assert not any(hooks)
    assert len(target.model.model._forward_hooks) == 1  # the one that keeps the final hidden states


def test_commit_of_a_prefix_drops_the_rest(target: Target) -> None:
    cache = target.new_cache()
    target.forward(torch.arange(1, 7), torch.arange(6), None, cache)
    first = cache.inner.layers[0].keys.clone()
    target.commit(cache, 2, [0, 1])
    assert len(cache) == 4
    assert torch.equal(cache.inner.layers[0].keys, first[:, :, :4])


def test_cache_grows_past_its_first_buffer(target: Target) -> None:
    ids = torch.randint(1, 96, (700,), generator=torch.Generator().manual_seed(2))
    cache = target.new_cache()
    for start in range(0, 700, 175):
        part = target.forward(ids[start : start + 175], torch.arange(start, start + 175), None, cache, last_only=True)
    assert part.logits is not None
    assert part.logits.shape == (1, 96)
    torch.testing.assert_close(part.logits[0], chain_logits(target, ids.tolist()), atol=2e-4, rtol=1e-4)


def test_description(target: Target, tiny_target_dir: Path) -> None:
    assert (target.moe_layers, target.experts, target.top_k) == (7, 12, 2)
    assert (target.hidden_size, target.vocab_size, target.layers) == (32, 96, 7)
    assert target.architecture == "Qwen3MoeForCausalLM"
    assert target.eos_token_ids() == (0,)
    assert target.embed([1, 2]).shape == (2, 32)
    ids = np.array([1, 2, 1])
    assert (target.embed_host(ids) == target.embed([1, 2, 1]).float().numpy()).all()
    target._embedding_table = None  # as for a large vocabulary
    assert (target.embed_host(ids) == target.embed([1, 2, 1]).float().numpy()).all()
    assert target.fingerprint == fingerprint(tiny_target_dir)


def test_fingerprint_follows_weights_and_widening(tiny_target_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target_dir, tmp_path / "copy"))
    assert fingerprint(folder) == fingerprint(tiny_target_dir)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(folder) != fingerprint(tiny_target_dir)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"ecospec_widened_from": "abc"}))
    assert fingerprint(folder) == "abc"


def test_nan_names_its_layer(tiny_target_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target_dir, tmp_path / "nan"))
    weights = load_file(folder / "model.safetensors")
    name = next(key for key in weights if "layers.4." in key and "o_proj" in key)
    weights[name][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="layer 4"):
        Target.from_pretrained(folder)


def _edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _drop_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop(next(key for key in weights if "layers.2." in key and "q_proj" in key))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights"),
        (_truncate, "damaged weight file"),
        (_drop_weight, "1 weights are missing.*layers.2"),
        (lambda f: _edit_config(f, model_type="nonsense"), "cannot load it"),
        (lambda f: _edit_config(f, moe_intermediate_size=24), r"experts.down_proj has shape \[.*config.json asks for"),
        (lambda f: _edit_config(f, num_experts_per_tok=100), "num_experts_per_tok 100, the model has"),
        (lambda f: _edit_config(f, hidden_size="big"), "hidden_size"),
        (lambda f: _edit_config(f, draft_vocab_size=48), "this is a draft head"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
    ],
)
def test_damaged_folder_is_one_clear_line(tiny_target_dir: Path, tmp_path: Path, damage: Any, message: str) -> None:
    folder = Path(shutil.copytree(tiny_target_dir, tmp_path / "target"))
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        Target.from_pretrained(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_hub_id_takes_the_whole_checkpoint(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    """From a cache laid out as the hub's client lays it out; the id of another model is one clear line."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--moe"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    shutil.copytree(tiny_target_dir, repository / "snapshots" / "c0ffee")
    assert Target.from_pretrained("someone/moe").fingerprint == target.fingerprint
    with pytest.raises(UserError, match=r"someone/else.*hub does not give it") as caught:
        Target.from_pretrained("someone/else")
    assert "\n" not in str(caught.value)


def test_only_the_files_of_one_format_are_downloaded(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors where the repository has them, else PyTorch files, never both and nothing from subfolders."""
    asked: list[str] = []

    def download(source: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns[-1])
        assert ignore_patterns == ["*/*"]
        folder = tmp_path / "snapshot"
        shutil.copytree(tiny_target_dir, folder, dirs_exist_ok=True)
        weights = folder / "model.safetensors"
        if pickled:
            weights.unlink()
            if "bin" in allow_patterns[-1]:
                (folder / "pytorch_model.bin").touch()
        return str(folder)

    monkeypatch.setattr(checkpoint, "snapshot_download", download)
    pickled = False
    assert checkpoint.weight_files(checkpoint.resolve_folder("a/b", "target"))[0].suffix == ".safetensors"
    assert asked == ["*.safetensors"]
    pickled = True
    assert checkpoint.weight_files(checkpoint.resolve_folder("a/b", "target"))[0].suffix == ".bin"
    assert asked[1:] == ["*.safetensors", "pytorch_model*.bin"]


def test_missing_folder_dense_model_and_dtype_are_refused(tiny_target_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        Target.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(UserError, match="float16"):
        Target.from_pretrained(tiny_target_dir, dtype="float16")
    dense = tmp_path / "dense"
    config = LlamaConfig(
        vocab_size=96, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(dense)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_target_dir / name, dense)
    with pytest.raises(UserError, match=r"LlamaForCausalLM.*mixture-of-experts"):
        Target.from_pretrained(dense)
