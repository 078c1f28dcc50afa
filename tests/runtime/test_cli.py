"""`ecospec-runtime` as a user meets it: text on stdout, one line and exit code 2 for a mistake, 130 for Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from ecospec_runtime import doctor, engine
from ecospec_runtime.bundle import load_bundle
from ecospec_runtime.cli import app
from ecospec_runtime.console import write_json
from ecospec_runtime.target import Target
from tests.bundles import this_slug, write_bundle
from tests.models import save_tiny_drafter, save_tiny_target


def run(*arguments: Any) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(app, [str(a) for a in arguments])


def mistake(result: Result) -> str:
    """The one line of a user's mistake."""
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def test_generate_streams_the_text_and_writes_json(tiny_bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run("generate", "-b", tiny_bundle, "--prompt", "def f(", "--max-new-tokens", 12, "--json", out)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    entry = report["results"][0]
    assert result.stdout == entry["prompt"] + entry["text"] + "\n"
    assert report["policy"] == "throughput"
    target = Target.from_pretrained(load_bundle(tiny_bundle).manifest.target.id)
    ids = target.tokenizer("def f(", return_tensors="pt")["input_ids"]
    expected = target.model.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0)  # type: ignore[operator]
    assert entry["tokens"] == expected[0, ids.shape[1] :].tolist()
    assert entry["statistics"]["tokens"] == len(entry["tokens"])
    assert "tokens/s" in result.stderr


def test_one_seed_one_text_under_every_policy(tiny_bundle: Path) -> None:
    common = ("generate", "-b", tiny_bundle, "--prompt", "x = ", "--max-new-tokens", 16, "--temperature", 1.0)
    texts = {run(*common, "--seed", 3, "--policy", p).stdout for p in ("off", "confidence:budget=6", "ratio", "auto")}
    assert len(texts) == 1
    assert run(*common, "--seed", 4).stdout not in texts


def test_prompts_file_and_stop_string(tiny_bundle: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.json"
    prompts.write_text('{"prompt": "abc"}\n{"turns": ["def g():", "again"]}\n')
    first = run("generate", "-b", tiny_bundle, "--prompts", prompts, "--max-new-tokens", 10, "--json", out)
    assert first.exit_code == 0, first.output
    texts = [entry["text"] for entry in json.loads(out.read_text())["results"]]
    stop = texts[0][3]
    run("generate", "-b", tiny_bundle, "--prompts", prompts, "--max-new-tokens", 10, "--stop", stop, "--json", out)
    assert json.loads(out.read_text())["results"][0]["text"] == texts[0][: texts[0].index(stop)]


def test_a_policy_that_is_off_says_why(tiny_target_dir: Path, tiny_drafter_dir: Path, tiny_bundle: Path,
                                       tmp_path: Path) -> None:  # fmt: skip
    shutil.copytree(tiny_bundle.parent / "predictor", tmp_path / "predictor")
    reason = "no policy beats plain decoding in replay (best 0.91x)"
    bundle = write_bundle(tmp_path, tiny_target_dir, tiny_drafter_dir, policy="off", parameters={}, acceptance=None,
                          depth=None, reason=reason)  # fmt: skip
    result = run("generate", "-b", bundle, "--prompt", "a", "--max-new-tokens", 3)
    assert result.exit_code == 0, result.output
    assert f"speculation is off: {reason}" in result.stderr
    assert (
        reason in run("inspect", bundle).stdout.replace("\n", " ") or reason.split()[0] in run("inspect", bundle).stdout
    )


def test_inspect_shows_what_is_inside(tiny_bundle: Path, tmp_path: Path) -> None:
    result = run("inspect", tiny_bundle, "--json", tmp_path / "i.json")
    assert result.exit_code == 0
    for text in ("Qwen3MoeForCausalLM", "12 experts", "eagle3", "throughput", "union error"):
        assert text in result.stdout
    assert json.loads((tmp_path / "i.json").read_text())["policies"].keys() == {this_slug()}


@pytest.fixture(scope="session")
def strange_targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets that the tiny bundle was not made for."""
    root = tmp_path_factory.mktemp("strange")
    save_tiny_target(root / "experts", num_experts=16)
    save_tiny_target(root / "vocabulary", vocab_size=95)
    save_tiny_target(root / "weights", seed=5)
    save_tiny_drafter(root / "drafter", seed=9)
    return root


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("experts", "experts per layer 12, this one has 16"),
        ("vocabulary", "vocabulary size 96, this one has 95"),
        ("weights", "weights are not those"),
        ("nowhere", "no such"),
    ],
)
def test_wrong_target(name: str, expected: str, tiny_bundle: Path, strange_targets: Path) -> None:
    line = mistake(run("generate", "-b", tiny_bundle, "--target", strange_targets / name, "--prompt", "a"))
    assert expected in line


def test_wrong_drafter(tiny_bundle: Path, strange_targets: Path) -> None:
    line = mistake(run("generate", "-b", tiny_bundle, "--drafter", strange_targets / "drafter", "--prompt", "a"))
    assert "drafter of fingerprint" in line


def test_damaged_bundle(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "b"))
    (bundle / "predictor.onnx").write_bytes(b"short")
    for command in (("generate", "--prompt", "a", "-b"), ("inspect",), ("doctor", "-b")):
        assert "predictor.onnx" in mistake(run(*command, bundle))


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "no prompt": (("generate",), "--prompt"),
    "two prompts": (("generate", "--prompt", "a", "--prompts", "b"), "either --prompt"),
    "no tokens": (("generate", "--prompt", "a", "--max-new-tokens", "0"), "error: --max-new-tokens = 0: "),
    "cold": (("generate", "--prompt", "a", "--temperature", "-1"), "error: --temperature = -1.0: "),
    "top-p": (("generate", "--prompt", "a", "--top-p", "1.5"), "error: --top-p = 1.5: "),
    "empty stop": (("generate", "--prompt", "a", "--stop", ""), "error: --stop holds an empty string"),
    "dtype": (("generate", "--prompt", "a", "--dtype", "int3"), "int3"),
    "policy": (("generate", "--prompt", "a", "--policy", "magic"), "'magic' is unknown"),
    "parameter": (("generate", "--prompt", "a", "--policy", "ratio:speed=3"), "'speed'"),
    "device": (("generate", "--prompt", "a", "--device", "foo"), "device 'foo' cannot be used here"),
    "meta device": (("generate", "--prompt", "a", "--device", "meta"), "device 'meta' cannot be used here"),
    "half a pair": (("generate", "--prompt", "a\ud800"), "not valid text at character 2"),
    "missing prompts": (("generate", "--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
    "missing folder": (("generate", "--prompts", "nowhere"), "nowhere: no such prompt file"),
    "bench cold": (("bench", "--prompts", "GOOD", "--temperature", "nan"), "error: --temperature = nan: "),
    "empty prompts": (("generate", "--prompts", "EMPTY"), "empty.jsonl: no usable prompt"),
    "malformed prompts": (("generate", "--prompts", "BROKEN"), "broken.jsonl, line 3"),
    "bench prompts": (("bench", "--prompts", "BROKEN"), "broken.jsonl, line 3"),
    "bench policies": (("bench", "--prompts", "GOOD", "--policies", "off,,fast"), "'fast' is unknown"),
    "bench none": (("bench", "--prompts", "GOOD", "--policies", ","), "--policies"),
    "json is a folder": (("generate", "--prompt", "a", "--json", "FOLDER"), "is a folder"),
    "json below a file": (("generate", "--prompt", "a", "--json", "GOOD/x.json"), "good.jsonl"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line(name: str, tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "good.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n{"prompt": \n')
    places = {"EMPTY": "empty.jsonl", "GOOD": "good.jsonl", "BROKEN": "broken.jsonl", "FOLDER": "."}
    arguments, expected = BAD[name]
    for word, file in places.items():
        arguments = tuple(a.replace(word, str(tmp_path / file)) if a.startswith(word) else a for a in arguments)
    assert expected in mistake(run(arguments[0], "--bundle", tiny_bundle, *arguments[1:]))


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_the_bundle_is_looked_for_first(command: str) -> None:
    assert "nowhere: no such bundle" in mistake(run(command, "--bundle", "nowhere", "--prompts", "owner/prompts"))


def test_a_command_that_is_refused_makes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    common = ("bench", "--bundle", "nowhere", "--prompts", "owner/prompts")
    new = tmp_path / "new"
    assert "nowhere" in mistake(run(*common, "--json", new / "folder" / "x.json", "--plots", new / "plots"))
    for option, place in (("--json", "file/x.json"), ("--plots", "file"), ("--plots", "file/x"), ("--plots", "link")):
        assert "not a folder to write to" in mistake(run(*common, option, tmp_path / place))
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


def test_version() -> None:
    assert run("--version").stdout == "ecospec 0.1.0\n"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("generate",),
        ("generate", "--nonsense"),
        ("bench", "--count", "x"),
        ("fly",),
    ],
)
def test_usage_errors_exit_with_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_absurd_thread_counts_never_reach_openmp() -> None:
    result = run("generate", "--bundle", "b", "--prompt", "a", "--threads", "1000000")
    assert result.exit_code == 2
    assert "1024" in result.output + result.stderr


def test_json_to_a_pipe_leaves_it_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json(pipe, {"a": 1})
    assert json.loads(os.read(reader, 100)) == {"a": 1}
    os.close(reader)
    assert pipe.is_fifo()


def test_ctrl_c_is_130(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.Engine, "step", interrupt)
    result = run("generate", "-b", tiny_bundle, "--prompt", "a")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_doctor_passes_a_sound_installation(tiny_bundle: Path, tmp_path: Path) -> None:
    result = run("doctor", "-b", tiny_bundle, "--max-new-tokens", 6, "--json", tmp_path / "d.json")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "d.json").read_text())["ok"] is True
    assert "equals transformers' generate() on 8 prompts" in result.stdout
    assert result.stdout.count("same tokens as plain decoding on 8 prompts") == 3


def test_doctor_needs_no_bundle(tiny_target_dir: Path, tiny_drafter_dir: Path) -> None:
    result = run("doctor", "--target", tiny_target_dir, "--drafter", tiny_drafter_dir, "--max-new-tokens", 8)
    assert result.exit_code == 0, result.output
    assert "--target" in mistake(run("doctor", "--target", tiny_target_dir))


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Three prompts instead of the doctor's eight."""
    path = tmp_path / "three.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in doctor.PROMPTS[:3]))
    return path


def test_doctor_fails_when_the_cache_keeps_the_wrong_rows(
    tiny_bundle: Path, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Target.commit

    def wrong(self: Target, cache: Any, past: int, kept: list[int]) -> None:
        after_load = past > 12  # the check at load would refuse it
        commit(self, cache, past, list(range(len(kept))) if after_load else kept)

    monkeypatch.setattr(Target, "commit", wrong)
    result = run("doctor", "-b", tiny_bundle, "--prompts", three, "--max-new-tokens", 16)
    assert result.exit_code == 1, result.output
    assert "FAIL" in result.stdout
    assert "differs from plain decoding" in result.stdout


def test_doctor_fails_when_plain_decoding_is_wrong(
    tiny_bundle: Path, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Target.forward

    def wrong(self: Target, tokens: torch.Tensor, positions: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return forward(self, tokens, positions + 1, *rest, **options) if len(tokens) == 1 else forward(
            self, tokens, positions, *rest, **options)  # fmt: skip

    monkeypatch.setattr(Target, "forward", wrong)
    result = run("doctor", "-b", tiny_bundle, "--prompts", three, "--max-new-tokens", 8)
    assert result.exit_code == 1, result.output
    assert "differs from transformers' generate()" in result.stdout


def test_doctor_calls_old_libraries_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "versions", lambda: {"torch": "2.11.0+cu128", "transformers": "5.16.2"})
    torch_found, transformers_found = doctor.check_versions()
    assert torch_found.status == "ok"
    assert transformers_found.status == "FAIL"
    assert "pip install -U transformers" in transformers_found.message
