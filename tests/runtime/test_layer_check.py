"""`doctor` on a draft head: measured acceptance, and a head that was saved with its layer ids one off."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from ecospec_runtime.cli import app
from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.doctor import PROMPTS, check_head
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.drafters.eagle3_layouts import IDS
from ecospec_runtime.engine import Engine
from ecospec_runtime.layer_check import DEPTH, Chains, better_neighbour, measure
from ecospec_runtime.target import Target
from tests.heads import edit_head

MODEL = Path(__file__).parents[2] / "pipelines" / "reference" / "model"  # trained: its head has real acceptance
Texts = tuple[list[list[int]], list[list[int]]]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_pretrained(MODEL / "target", dtype="float32")


@pytest.fixture(scope="module")
def texts(target: Target) -> Texts:
    """Doctor's prompts and what the target says after them."""
    prompts = [target.tokenizer(text)["input_ids"] for text in PROMPTS]
    config = GenerationConfig(max_new_tokens=32)
    return prompts, [[token.id for token in Engine(target).generate(ids, config)] for ids in prompts]


def head(out: Path, **settings: Any) -> Path:
    """The trained head with other settings."""

    def edit(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config |= settings

    return edit_head(MODEL / "drafter", out, edit)


def test_a_sound_head_passes_with_its_acceptance(target: Target, texts: Texts) -> None:
    finding = check_head(target, load_drafter(MODEL / "drafter", target), *texts)[0]
    assert finding.status == "ok"
    assert re.search(r"on layers \(2, 3, 4\) has [67]\d% of first tokens right and 1\.\d\d of 3", finding.message)


def test_a_few_tokens_are_no_measurement(target: Target, texts: Texts) -> None:
    finding = check_head(target, load_drafter(MODEL / "drafter", target), texts[0], [ids[:3] for ids in texts[1]])[0]
    assert finding.status == "ok"
    assert "too few positions to measure acceptance (6)" in finding.message


@pytest.mark.parametrize("ids", [[0, 1, 2], [2, 3, 4]])  # 1, 2, 3 are right; the second is what vLLM would write
def test_a_head_saved_one_layer_off_is_found_and_the_remedy_works(
    target: Target, texts: Texts, tmp_path: Path, ids: list[int]
) -> None:
    folder = head(tmp_path / "shifted", eagle_config={IDS: ids})
    finding = check_head(target, load_drafter(folder, target), *texts)[0]
    assert finding.status == "warn"
    assert "look one off" in finding.message
    assert f'"{IDS}": [2, 3, 4] at the top level' in finding.message
    repaired = head(tmp_path / "repaired", eagle_config={}, **{IDS: [2, 3, 4]})
    assert check_head(target, load_drafter(repaired, target), *texts)[0].status == "ok"


def test_what_a_chain_gets_right_is_what_the_target_says_next(target: Target, texts: Texts) -> None:
    """Against drafting token by token from the head's own sequence, over every position of one text."""
    drafter: Any = load_drafter(MODEL / "drafter", target)
    prompt, plain = texts[0][0], texts[1][0]
    own = measure(target, drafter, [(prompt, plain)])[0]
    tokens = [*prompt, *plain]
    out = target.forward(
        torch.tensor(tokens[:-1]), torch.arange(len(tokens) - 1), None, target.new_cache(), aux_layers=drafter.aux_layers
    )  # fmt: skip
    assert out.aux is not None
    expected = []
    for begin in range(len(prompt), len(tokens) - DEPTH + 1):  # the chain's first token stands at `begin`
        sequence = drafter.start()
        drafter.extend(sequence, tokens[1:begin], out.aux[: begin - 1])
        chain = drafter.expand(sequence, tokens[begin - 1], PoolConfig(depth=DEPTH, beam=1, width=1)).tokens.tolist()
        right = 0
        while right < DEPTH and chain[right] == tokens[begin + right]:
            right += 1
        expected.append(right)
    assert own.right.tolist() == expected
    assert 0 < own.mean < DEPTH


def test_neighbours_that_the_target_lacks_are_not_tried(target: Target, texts: Texts) -> None:
    drafter: Any = load_drafter(MODEL / "drafter", target)
    tried = {}
    for ids in ((0, 3, 4), (5, 6, 7), (0, 3, 7), (2, 2, 2)):
        drafter.aux_layers = ids
        tried[ids] = [chains.layers for chains in measure(target, drafter, [(texts[0][0], texts[1][0])])]
    assert tried == {
        (0, 3, 4): [(0, 3, 4), (1, 4, 5)],
        (5, 6, 7): [(5, 6, 7), (4, 5, 6)],
        (0, 3, 7): [(0, 3, 7)],
        (2, 2, 2): [(2, 2, 2), (3, 3, 3), (1, 1, 1)],
    }


def test_a_neighbour_must_be_clearly_better() -> None:
    def chains(right: list[int]) -> Chains:
        return Chains((1,), np.array(right))

    poor, good = chains([0, 1] * 20), chains([2, 3] * 20)
    assert better_neighbour([poor, good, poor]) is good
    assert better_neighbour([good, poor, good]) is None
    assert better_neighbour([chains([0, 1] * 5), chains([2, 3] * 5)]) is None  # too few
    assert better_neighbour([chains([2] * 100), chains([2] * 90 + [3] * 10)]) is None  # clear, but not worth a word
    noisy = chains([0, 3] * 10)
    assert better_neighbour([noisy, chains([3, 1] * 10)]) is None  # more, but by chance
    assert better_neighbour([chains([]), chains([])]) is None


def test_doctor_reports_on_the_head(tiny_target_dir: Path, tiny_drafter_dir: Path, tmp_path: Path) -> None:
    folder, out = edit_head(tiny_drafter_dir, tmp_path / "head", _doubled), tmp_path / "doctor.json"
    arguments = ("doctor", "--target", tiny_target_dir, "--drafter", folder, "--max-new-tokens", 7, "--json", out)
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    found = [f for f in json.loads(out.read_text())["findings"] if f["check"] == "draft head"]
    assert [f["status"] for f in found] == ["warn", "warn"]
    assert "(2, 3, 3) hold one twice" in found[0]["message"]
    assert "a head made for this target does far better" in found[1]["message"]


def _doubled(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config[IDS] = [2, 3, 3]
