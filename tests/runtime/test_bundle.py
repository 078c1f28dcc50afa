"""Bundles: round trip, and one clear line for everything that can be wrong with one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ecospec_runtime.bundle import Bundle, check_drafter, check_target, load_bundle, vocabulary_sha256
from ecospec_runtime.engine import Engine
from ecospec_runtime.errors import UserError
from ecospec_runtime.machine import device_slug
from tests.bundles import METRICS, this_slug


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def test_round_trip(tiny_bundle: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    assert list(bundle.policies) == [this_slug()]
    assert bundle.policies[this_slug()].parameters == {"price": 0.15}
    assert bundle.manifest.metrics == METRICS
    assert bundle.manifest.target.vocabulary_sha256
    assert set(bundle.manifest.files) == {
        str(p.relative_to(tiny_bundle)) for p in tiny_bundle.rglob("*") if p.is_file() and p.name != "manifest.json"
    }
    assert bundle.predictor().shapes.experts == bundle.manifest.target.experts
    card = (tiny_bundle / "README.md").read_text()
    assert "1.30x" in card
    assert "1.10x" in card


def test_engine_follows_the_tuned_policy(tiny_bundle: Path) -> None:
    engine = Engine.from_bundle(tiny_bundle)
    assert engine.policy.name == "throughput"
    assert engine.policy.parameters()["price"] == 0.15
    assert engine.shape.depth == 3


def edit(bundle: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite the manifest."""
    path = bundle / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def flip_byte(path: Path) -> None:
    """Change one byte, keep the size."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


POLICY = f"policies/{this_slug()}.json"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda b: shutil.rmtree(b), r"no such bundle folder"),
    "no manifest": (lambda b: (b / "manifest.json").unlink(), r"manifest\.json: missing"),
    "truncated manifest": (
        lambda b: (b / "manifest.json").write_text((b / "manifest.json").read_text()[:300]),
        r"manifest\.json: not valid JSON at line",
    ),
    "binary manifest": (
        lambda b: (b / "manifest.json").write_bytes(b"\xff\xfe\x00"),
        r"manifest\.json: cannot be read",
    ),
    "newer schema": (lambda b: edit(b, lambda m: m.update(schema_version=9)), r"schema_version 9.*reads 1"),
    "unknown key": (lambda b: edit(b, lambda m: m.update(colour="red")), r"manifest\.json: key 'colour'"),
    "missing key": (lambda b: edit(b, lambda m: m.pop("drafter")), r"manifest\.json: key 'drafter'"),
    "wrong type": (lambda b: edit(b, lambda m: m["target"].update(experts="x")), r"key 'target\.experts'"),
    "bad pool": (lambda b: edit(b, lambda m: m["pool"].update(depth=0)), r"manifest\.json: PoolConfig: 'depth'"),
    "unlisted file": (lambda b: edit(b, lambda m: m["files"].pop("predictor.onnx")), r"does not list predictor\.onnx"),
    "missing predictor": (lambda b: (b / "predictor.onnx").unlink(), r"predictor\.onnx: missing"),
    "missing policy": (lambda b: (b / POLICY).unlink(), r"policies/.*json: missing"),
    "truncated predictor": (
        lambda b: (b / "predictor.onnx").write_bytes((b / "predictor.onnx").read_bytes()[:-9]),
        r"predictor\.onnx: \d+ bytes, the manifest says",
    ),
    "changed weights": (lambda b: flip_byte(b / "predictor.safetensors"), r"predictor\.safetensors: .*sha256"),
    "changed policy": (lambda b: flip_byte(b / POLICY), r"policies/.*sha256"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_line_that_names_the_file(name: str, copy: Path) -> None:
    damage, expected = DAMAGE[name]
    damage(copy)
    with pytest.raises(UserError, match=expected) as caught:
        load_bundle(copy)
    assert "\n" not in str(caught.value)


def fake(kind: str, bundle: Any, /, **changes: Any) -> Any:
    """Something with the attributes of the bundle's target or drafter, except for `changes`."""
    values = getattr(bundle.manifest, kind).model_dump() | changes
    return SimpleNamespace(**values)


class Tokenizer:
    """A vocabulary and nothing else."""

    def __init__(self, *tokens: str):
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        """Token -> id."""
        return {token: i for i, token in enumerate(self.tokens)}


def test_vocabulary_hash_sees_order_and_content() -> None:
    same = {vocabulary_sha256(Tokenizer("a", "b")) for _ in range(2)}
    assert len(same) == 1
    assert len({vocabulary_sha256(Tokenizer(*t)) for t in (("a", "b"), ("b", "a"), ("a",))}) == 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architecture": "MixtralForCausalLM"}, "architecture Qwen3MoeForCausalLM, this one has MixtralForCausalLM"),
        ({"experts": 16}, "experts per layer 12, this one has 16"),
        ({"top_k": 4}, "experts per token 2, this one has 4"),
        ({"moe_layers": 6}, "MoE layers 7, this one has 6"),
        ({"vocab_size": 100}, "vocabulary size 96, this one has 100"),
        ({"hidden_size": 64}, "hidden size 32, this one has 64"),
        ({"tokenizer": Tokenizer("a", "b")}, "another vocabulary"),
        ({"fingerprint": "f" * 64}, "weights are not those of the traces"),
    ],
)
def test_another_target_is_refused(changes: dict[str, Any], expected: str, tiny_bundle: Path) -> None:
    engine = Engine.from_bundle(tiny_bundle, policy="off")
    bundle = load_bundle(tiny_bundle)
    check_target(bundle, engine.target)
    with pytest.raises(UserError, match=expected) as caught:
        check_target(bundle, fake("target", bundle, **({"tokenizer": engine.target.tokenizer} | changes)))
    assert "--target" in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("kind", "mtp"), ("width", 7), ("fingerprint", "f" * 64)])
def test_another_drafter_is_refused(key: str, value: Any, tiny_bundle: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    check_drafter(bundle, fake("drafter", bundle))
    with pytest.raises(UserError, match=f"drafter of {key}"):
        check_drafter(bundle, fake("drafter", bundle, **{key: value}))


def test_threads_are_those_that_were_tuned_unless_given(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Quickstart tunes for one thread; decoding with its bundle must not need to be told so."""
    tuned, other = torch.get_num_threads(), torch.get_num_threads() + 1
    try:
        torch.set_num_threads(other)
        assert Engine.from_bundle(tiny_bundle).profile is not None
        assert torch.get_num_threads() == tuned
        assert warnings_in(capsys) == []
        engine = Engine.from_bundle(tiny_bundle, threads=other)
        assert (engine.policy.name, torch.get_num_threads()) == ("throughput", other)
        (line,) = warnings_in(capsys)
        assert f"-{other}t); using the one for {this_slug_of(tuned)}" in line
        Engine.from_bundle(tiny_bundle, policy="confidence", threads=other)
        assert warnings_in(capsys) == [], "this policy reads no profile"
    finally:
        torch.set_num_threads(tuned)


def warnings_in(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Warnings since the last look, without the progress bars of libraries."""
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]


def this_slug_of(threads: int) -> str:
    """The tiny target's slug on this machine with another number of threads."""
    return f"{this_slug().rsplit('-', 1)[0]}-{threads}t"


def several(bundle: Path) -> Bundle:
    """The bundle as it would be with policies for three devices, one of them this one."""
    loaded = load_bundle(bundle)
    (own,) = loaded.policies.values()
    policies = dict(loaded.policies)
    for device, dtype, threads, depth in (("Big CPU", "bfloat16", 8, 1), ("Big CPU", "float32", 64, 2)):
        profile = own.profile.model_copy(update={"device": device, "dtype": dtype, "threads": threads,
                                                 "slug": device_slug(device, dtype, threads)})  # fmt: skip
        policies[profile.slug] = own.model_copy(update={"profile": profile, "depth": depth})
    return replace(loaded, policies=policies)


@pytest.mark.parametrize(
    ("asked", "depth", "words"),
    [
        (("Big CPU", "bfloat16", 8), 1, ""),
        (("Big CPU", "float32", 64), 2, ""),
        (("Big CPU", "bfloat16", 16), 1, r"\(big-bfloat16-16t\); using the one for big-bfloat16-8t"),
        (("Big CPU", "float32", 1), 2, "using the one for big-float32-64t"),
        (
            ("GPU X", "float32", 8),
            None,
            r"\(gpu-x-float32-8t\), only for: .*big-bfloat16-8t.*decoding without.*--policy",
        ),
    ],
)
def test_the_policy_of_the_device_is_taken_else_the_nearest_with_a_warning(
    tiny_bundle: Path, asked: tuple[str, str, int], depth: int | None, words: str
) -> None:
    picked = several(tiny_bundle).policy_for(*asked)
    assert picked.spec.depth == depth
    assert (picked.spec.name == "off") == (depth is None) == (picked.profile is None)
    assert bool(picked.warning) == bool(words)
    assert re.search(words, picked.warning)


def test_a_policy_tuned_with_other_versions_is_used_with_a_warning(tiny_bundle: Path) -> None:
    bundle = several(tiny_bundle)
    assert not bundle.policy_for("Big CPU", "bfloat16", 8).warning
    tuned = bundle.policies["big-bfloat16-8t"]
    for name, said in (("torch", "torch 1.0, now 2"), ("lightning", "")):  # Lightning decides no speed
        profile = tuned.profile.model_copy(update={"versions": tuned.profile.versions | {name: "1.0"}})
        old = replace(bundle, policies={"big-bfloat16-8t": tuned.model_copy(update={"profile": profile})})
        picked = old.policy_for("Big CPU", "bfloat16", 8)
        assert picked.spec == tuned.spec
        assert (said in picked.warning, bool(picked.warning)) == (True, bool(said))


def test_on_an_unknown_device_it_decodes_plainly_and_says_so(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = several(tiny_bundle)
    strange = replace(bundle, policies={k: p for k, p in bundle.policies.items() if k != this_slug()})
    engine = Engine.from_bundle(strange)
    assert engine.policy.name == "off"
    assert this_slug() in engine.reason
    assert len(warnings_in(capsys)) == 1
    with pytest.raises(UserError, match="'throughput' needs a device profile"):
        Engine.from_bundle(strange, policy="throughput")
