"""Each architecture of the table works or is refused as the docs say, and the check at load can tell right from wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from ecospec_runtime import architectures, selfcheck
from ecospec_runtime.architectures import ARCHITECTURES, Architecture, attempt, markdown, save
from ecospec_runtime.cli import app
from ecospec_runtime.errors import UserError
from ecospec_runtime.target import Target

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
SAME_VERSION = f"transformers {transformers.__version__}:" in PAGE
WORK = {"qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v2", "mixtral", "olmoe", "qwen2_moe", "glm4_moe", "granitemoe",
        "ernie4_5_moe", "minimax_m2"}  # fmt: skip
REFUSED = {"qwen3_next": "linear_attention", "llama4_text": "registry", "llama4": "registry", "jamba": "linear_attention",
           "qwen3_vl_moe": "images and text"}  # fmt: skip


@pytest.mark.parametrize("entry", ARCHITECTURES, ids=lambda entry: entry.model_type)
def test_architecture_does_what_the_page_says(entry: Architecture) -> None:
    """Loaded and decoded through trees with rejections, or refused at load by name; `attempt` raises where texts differ."""
    if entry.model_type not in CONFIG_MAPPING:
        pytest.skip("not in this release of transformers")
    result = attempt(entry)
    if entry.model_type in WORK:
        assert result.works, result.why
    if entry.model_type in REFUSED:
        assert not result.works
        assert REFUSED[entry.model_type] in result.why
    if SAME_VERSION:
        row = markdown([result]).splitlines()[-1]
        assert row in PAGE.splitlines(), "run: ecospec-runtime architectures --out docs/architectures.md"


def test_page_has_the_rows_of_the_table() -> None:
    listed = [line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| ") and "`" in line]
    assert listed == [entry.model_type for entry in ARCHITECTURES]


def test_command_prints_and_writes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        app(["architectures", "olmoe", "--out", str(tmp_path / "a.md")])
    assert caught.value.code == 0
    assert "OlmoeForCausalLM" in capsys.readouterr().out
    assert "| OlmoeForCausalLM | `olmoe` | works |" in (tmp_path / "a.md").read_text()


def test_unknown_name_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        app(["architectures", "olmo"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A GPT-OSS with alternating windows that are longer than what the check runs."""
    folder = tmp_path_factory.mktemp("windowed")
    save(Architecture("gpt_oss", "", {"sliding_window": 64}), folder)
    return Target.from_pretrained(folder, request.param)


def _siblings_too(parents: list[int], past: int) -> torch.Tensor:
    """A causal mask over all rows, as of attention that ignores the tree."""
    return torch.ones(len(parents) + 1, past + len(parents) + 1, dtype=torch.bool).tril(past)


def _wrong_windows(monkeypatch: pytest.MonkeyPatch, target: Target, kind: str) -> None:
    monkeypatch.setattr(target, "_windows", kind)


def _nothing_taken_back(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    """A state that keeps rejected rows: as many rows as should be kept, but the first ones."""
    commit = target.commit
    monkeypatch.setattr(target, "commit", lambda cache, past, kept: commit(cache, past, list(range(len(kept)))))


@pytest.mark.parametrize(
    "damage",
    [
        lambda patch, target: patch.setattr(selfcheck, "tree_mask", _siblings_too),
        lambda patch, target: _wrong_windows(patch, target, ""),
        lambda patch, target: _wrong_windows(patch, target, "all"),
        _nothing_taken_back,
    ],
    ids=["mask ignored", "window unknown", "windows everywhere", "state kept"],
)
def test_check_at_load_refuses_what_computes_differently(
    windowed: Target, monkeypatch: pytest.MonkeyPatch, damage: Any
) -> None:
    assert len(selfcheck.check(windowed)) == windowed.moe_layers
    assert windowed.config.sliding_window == 64, "the check must put the window back"
    damage(monkeypatch, windowed)
    with pytest.raises(UserError, match=r"GptOssForCausalLM computes other hidden states in a tree pass") as caught:
        selfcheck.check(windowed)
    assert "\n" not in str(caught.value)


def test_a_pass_that_fails_is_a_refusal_by_name(windowed: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such state\nin this cache")

    monkeypatch.setattr(windowed, "model", fail)
    with pytest.raises(UserError, match=r"GptOssForCausalLM does not take EcoSpec's cache.*no such state\)") as caught:
        selfcheck.check(windowed)
    assert "\n" not in str(caught.value)


def test_proof_of_an_architecture_can_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wrong mask, and routing that is not the router's, are told."""
    save(Architecture("olmoe"), tmp_path)
    target = Target.from_pretrained(tmp_path)
    architectures.prove(target)
    forward = Target.forward
    with monkeypatch.context() as patch:
        patch.setattr(architectures, "tree_mask", _siblings_too)
        with pytest.raises(AssertionError, match="is not transformers'"):
            architectures.prove(target)

    def shifted(self: Target, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.routing_layers = [(layer + 1) % 8 for layer in output.routing_layers]
        return output

    monkeypatch.setattr(Target, "forward", shifted)
    with pytest.raises(AssertionError, match="routing is not what the router chose"):
        architectures.prove(target)
