"""Device maps and tensor parallelism change where weights lie and no token; nonsense is one clear line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ecospec_runtime import placement
from ecospec_runtime.cli import app
from ecospec_runtime.engine import Engine
from ecospec_runtime.errors import UserError
from ecospec_runtime.placement import Placement, hardware, one_piece, parse_placement, whole_weight
from ecospec_runtime.target import Target

PROMPT = "def main():"
OFFLOAD: dict[str, int | str] = {
    "model.embed_tokens": "cpu", "model.rotary_emb": "cpu", **{f"model.layers.{i}": "disk" if i in (1, 3, 6) else "cpu" for i in range(7)},
    "model.norm": "cpu", "lm_head": "disk",
}  # fmt: skip


def generate(bundle: Path, target: Target | Path, policy: str = "confidence:budget=4", **options: Any) -> list[int]:
    engine = Engine.from_bundle(bundle, target, None, policy, **options)
    from ecospec_runtime.config import GenerationConfig

    ids = engine.target.tokenizer(PROMPT)["input_ids"]
    return [token.id for token in engine.generate(ids, GenerationConfig(max_new_tokens=24))]


@pytest.fixture(scope="module")
def expected(tiny_bundle: Path, tiny_target_dir: Path) -> list[int]:
    return generate(tiny_bundle, tiny_target_dir)


def test_disk_offload_gives_the_same_tokens(tiny_bundle: Path, tiny_target_dir: Path, expected: list[int]) -> None:
    target = Target.from_pretrained(tiny_target_dir, device_map=OFFLOAD)
    offloaded = [name for name, parameter in target.model.named_parameters() if parameter.is_meta]
    assert any("layers.3.mlp.experts" in name for name in offloaded) and not any("layers.2" in n for n in offloaded)
    assert generate(tiny_bundle, target) == expected
    assert not one_piece(target.model) and target.hardware.endswith(" + cpu + disk")
    plain = Target.from_pretrained(tiny_target_dir)
    assert one_piece(plain.model) and "+" not in hardware(plain.model)
    assert torch.equal(whole_weight(target.model.lm_head), plain.model.lm_head.weight)


@pytest.mark.parametrize("device_map", ["auto", "cpu", '{"": "cpu"}'])
def test_maps_that_need_one_device(
    device_map: str, tiny_bundle: Path, tiny_target_dir: Path, expected: list[int]
) -> None:
    assert generate(tiny_bundle, tiny_target_dir, device=parse_placement(None, device_map)) == expected


def test_a_map_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text(json.dumps(OFFLOAD))
    assert parse_placement(None, str(file)) == Placement(device_map=dict(OFFLOAD))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cpu", "auto"), "--device cpu and --device-map exclude each other"),
        ((None, "somewhere"), "--device-map somewhere: give auto, balanced"),
        ((None, "meta"), "device 'meta' cannot be used here"),
        ((None, "nowhere.json"), "--device-map nowhere.json: cannot be read"),
        ((None, '{"model": '), "--device-map: not JSON"),
        ((None, "{}"), "an empty map places nothing"),
        ((None, {"": "cuda:77"}), "device 'cuda:77' cannot be used here"),
        ((None, {"": -1}), "'': -1 is not a device"),
        ((None, {"": "meta"}), "device 'meta' cannot be used here"),
        ((None, None, 2), "--tp 2 needs 2 processes, here is 1; start with: torchrun --nproc-per-node 2"),
        ((None, None, 0), "--tp 0: give the number of processes"),
        ((None, "auto", 2), "--tp and --device-map exclude each other"),
    ],
)
def test_nonsense_is_one_line(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_placement(*arguments)
    assert "\n" not in str(caught.value)


def test_a_map_that_does_not_fit_the_target(tiny_target_dir: Path) -> None:
    with pytest.raises(UserError, match=r"'model.layer.0' is no module of target .* names look like model.layers.0"):
        Target.from_pretrained(tiny_target_dir, device_map={"": "cpu", "model.layer.0": "disk"})
    with pytest.raises(UserError, match=r"transformers cannot load it|was not loaded"):
        Target.from_pretrained(tiny_target_dir, device_map={"model.layers": "cpu", "lm_head": "disk"})


def test_weights_left_on_meta_are_refused(tiny_target_dir: Path) -> None:
    model = Target.from_pretrained(tiny_target_dir).model
    model.model.norm.to("meta")
    with pytest.raises(UserError, match=r"model\.norm\.weight was not loaded"):
        placement.check_placed(model, Placement(), "x")


def test_expert_parallel_plans_are_refused(tiny_target_dir: Path) -> None:
    model = Target.from_pretrained(tiny_target_dir).model
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    with pytest.raises(UserError, match="expert parallel"):
        placement.check_placed(model, Placement(tp=2), "x")


def test_command_line_says_what_is_wrong(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["generate", "-b", str(tiny_bundle), "--prompt", "x", "--max-new-tokens", "1"]
    for options, message in [
        (["--device", "cpu", "--device-map", "auto"], "exclude each other"),
        (["--tp", "2"], "--tp 2 needs 2 processes"),
    ]:
        result = CliRunner().invoke(app, [*command, *options])
        assert result.exit_code == 2 and message in result.output and "Traceback" not in result.output
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2 and "torchrun started 2 processes, --tp is 1" in result.output


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one(tiny_bundle: Path, expected: list[int], tmp_path: Path) -> None:
    """Tensor parallelism over gloo: same text, printed and written once."""
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone",
               "-m", "ecospec_runtime.cli", "generate", "-b", str(tiny_bundle), "--prompt", PROMPT, "--max-new-tokens",
               "24", "--policy", "confidence:budget=4", "--tp", "2", "--threads", "1", "--json", str(out)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(out.read_text())["results"][0]["tokens"] == expected
    assert done.stdout.count(PROMPT) == 1 and done.stderr.count("tokens a pass") == 1
