"""Harvest: rows say what target and drafter really do, survive any death of the process, and mistakes are named."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.errors import UserError
from ecospec_runtime.sampling import Sampler
from ecospec_runtime.target import Target
from ecospec_runtime.verify import tree_mask
from ecospec_train import harvest as harvest_module
from ecospec_train.harvest import HarvestConfig, harvest
from ecospec_train.recording import Recorder, follow_target
from ecospec_train.settings import parse_size
from ecospec_train.traces import Traces, TraceShard

POOL = PoolConfig(depth=3, beam=2, width=4)
TEXTS = ["def f(x):", "x = 1", "import os", "for i in", "class A", "while", "a b c", "return x + y", "print(", "z"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="module")
def options(tiny_target_dir: Path, tiny_drafter_dir: Path, prompts: Path) -> dict[str, Any]:
    return {
        "target": str(tiny_target_dir),
        "drafter": str(tiny_drafter_dir),
        "prompts": str(prompts),
        "max_new_tokens": 7,
        "pool": POOL,
    }


@pytest.fixture(scope="module")
def greedy(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed greedy harvest in shards of about 20 rows."""
    out = tmp_path_factory.mktemp("greedy") / "traces"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harvest_module, "SHARD_ROWS", 20)
        harvest(HarvestConfig(out=out, **options))
    return out


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir, dtype="float32")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """All rows, shard boundaries forgotten."""
    manifest = Traces(folder).manifest
    return [row for shard in manifest.shards for row in pq.read_table(folder / shard.file).to_pylist()]


def direct_pass(target: Target, before: list[int], shard: TraceShard, r: int) -> tuple[Any, Any]:
    """Logits and routing of one position's pool, verified alone after a plain prefill of `before`."""
    pool, cache = shard.pool(r), target.new_cache()
    target.forward(torch.tensor(before), torch.arange(len(before)), None, cache, logits=False)
    tokens = torch.tensor([pool.root_token, *pool.tokens])
    positions = torch.tensor([len(before), *(len(before) + pool.depths)])
    mask = tree_mask((pool.parents + 1).tolist(), len(before))
    output = target.forward(tokens, positions, mask, cache, routing=True)
    assert output.logits is not None
    assert output.routing is not None
    return output.logits, output.routing.numpy()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_are_what_single_passes_say(
    options: dict[str, Any], greedy: Path, target: Target, tmp_path: Path, temperature: float
) -> None:
    out = greedy
    if temperature:
        out = tmp_path / "sampled"
        harvest(HarvestConfig(out=out, **options, temperature=temperature, seed=5, max_positions=20))
    traces, checked = Traces(out, expect_target=target.fingerprint), 0
    drafter = load_drafter(options["drafter"], target, "float32")
    for shard in traces.shards():
        for r in range(0, len(shard), 1 if temperature else 3):
            prompt_id, position = int(shard.prompt_id[r]), int(shard.position[r])
            prompt = target.tokenizer(TEXTS[prompt_id])["input_ids"]
            before = prompt + shard.root_token[r - position : r].tolist()
            assert shard.context[r] == len(before)
            logits, routing = direct_pass(target, before, shard, r)
            np.testing.assert_array_equal(shard.routing_of(r), routing)
            np.testing.assert_array_equal(shard.argmax[shard.verified(r)], logits.argmax(-1))
            recorded = (1.0, 0.7, temperature) if temperature else (1.0, 0.7)  # its own is fitted for
            for t, column in zip(recorded, shard.logsumexp[shard.verified(r)].T, strict=True):
                np.testing.assert_allclose(column, (logits / t).logsumexp(-1), rtol=1e-4, atol=1e-4)
            pool = shard.pool(r)
            np.testing.assert_allclose(
                shard.token_logits[shard.nodes(r)], logits[pool.parents + 1, pool.tokens], rtol=1e-4, atol=1e-4
            )
            sampler = Sampler(GenerationConfig(temperature=temperature, seed=5 + prompt_id))
            places = len(before) + 1 + np.r_[0, pool.depths]
            chosen = [sampler.choose(row.numpy(), int(p), set()) for row, p in zip(logits, places, strict=True)]
            assert shard.next_tokens_of(r).tolist() == chosen
            if r + 1 < len(shard) and shard.prompt_id[r + 1] == prompt_id:
                assert chosen[0] == shard.root_token[r + 1]
            live = live_pool(target, drafter, [*before, pool.root_token], sampler)
            np.testing.assert_array_equal(pool.tokens, live.tokens)
            np.testing.assert_array_equal(pool.parents, live.parents)
            np.testing.assert_allclose(pool.log_probs, live.log_probs, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(pool.states, live.states, rtol=2e-3, atol=2e-3)
            checked += 1
    assert checked >= 20


def live_pool(target: Target, drafter: Any, tokens: list[int], sampler: Sampler) -> Any:
    """The pool a drafter that has followed the text so far grows below its last token."""
    features = target.forward(
        torch.tensor(tokens[:-1]),
        torch.arange(len(tokens) - 1),
        None,
        target.new_cache(),
        aux_layers=drafter.aux_layers,
    ).aux
    sequence = drafter.start()
    drafter.extend(sequence, torch.tensor(tokens[1:]), features)
    return drafter.expand(sequence, tokens[-1], POOL, (), sampler)


def test_trajectory_is_the_targets_own_text(greedy: Path, target: Target) -> None:
    texts: dict[int, list[int]] = {}
    for shard in Traces(greedy).shards():
        for prompt_id, position, token in zip(shard.prompt_id, shard.position, shard.root_token, strict=True):
            text = texts.setdefault(int(prompt_id), [])
            assert position == len(text)  # contiguous, in order
            text.append(int(token))
    for prompt_id, text in texts.items():
        prompt = target.tokenizer(TEXTS[prompt_id], return_tensors="pt")
        own = target.model.generate(**prompt, do_sample=False, max_new_tokens=7)[
            0, prompt["input_ids"].shape[1] :
        ].tolist()
        assert text == [token for token in own if token != 0]


def test_end_of_sequence_ends_a_text_and_is_no_root(target: Target, tiny_drafter_dir: Path) -> None:
    prompt, sampler = target.tokenizer("def f(x):")["input_ids"], Sampler(GenerationConfig())
    text = follow_target(target, prompt, 7, sampler, ()).tokens[len(prompt) :]
    recorder = Recorder(
        target,
        load_drafter(tiny_drafter_dir, target, "float32"),
        POOL,
        temperature=0.0,
        drafter_temperatures=(),
        target_temperatures=(),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "eos_token_ids", lambda: (text[3],))
        kept = text[: text.index(text[3])]
        rows = recorder.record(0, prompt, 7, 1, 0)
        assert [row.pool.root_token for row in rows] == kept
        patch.setattr(target, "eos_token_ids", lambda: (text[0],))
        assert recorder.record(0, prompt, 7, 1, 0) == []


def test_stride_keeps_every_nth_position(options: dict[str, Any], greedy: Path, tmp_path: Path) -> None:
    harvest(HarvestConfig(out=tmp_path / "t", **options, stride=3, max_positions=8))
    every = {(row["prompt_id"], row["position"]): row for row in rows_of(greedy)}
    strided = rows_of(tmp_path / "t")
    assert [(row["prompt_id"], row["position"]) for row in strided] == [
        (0, 0), (0, 3), (0, 6), (1, 0), (1, 3), (1, 6), (2, 0), (2, 3),
    ]  # fmt: skip
    for row in strided:
        other = every[row["prompt_id"], row["position"]]
        assert (row["tokens"], row["routing"], row["argmax"]) == (other["tokens"], other["routing"], other["argmax"])


def test_manifest_and_embedding(greedy: Path, target: Target) -> None:
    traces = Traces(greedy)
    manifest = traces.manifest
    assert manifest.complete
    assert manifest.pool == POOL
    assert manifest.routing_by_weight
    assert (manifest.target.moe_layers, manifest.target.experts, manifest.target.top_k) == (7, 12, 2)
    assert {"generate", "draft", "verify", "write"} <= set(manifest.seconds)
    assert not list(greedy.glob("progress-*")) + list(greedy.glob(".*"))
    tokens = [t for row in rows_of(greedy) for t in [row["root_token"], *row["tokens"]]]
    np.testing.assert_allclose(traces.embedding()(tokens), target.embed(tokens).numpy(), rtol=1e-3, atol=1e-3)


SCRIPT = """
import sys
from ecospec_train import harvest as h
h.SHARD_ROWS = 20
h.harvest(h.HarvestConfig.model_validate_json(sys.argv[1]))
"""


def start(config: HarvestConfig, **environment: str) -> subprocess.Popen[str]:
    """A harvest in a process of its own, in shards of about 20 rows."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, config.model_dump_json()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("layers", ["disk", "cpu"])
def test_an_offloaded_target_gives_the_same_rows(
    layers: str, options: dict[str, Any], greedy: Path, tmp_path: Path
) -> None:
    """Nothing in between moves the target: not the trainer before its work, nor after it, when embeddings are read."""
    offload = {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers": layers,
        "model.norm": "cpu",
        "lm_head": "disk",
    }
    harvest(HarvestConfig(out=tmp_path / "traces", **options, device_map=offload))
    same = ("prompt_id", "position", "root_token", "tokens", "parents", "routing", "next_tokens")  # the rest is rounded
    for one, other in zip(rows_of(tmp_path / "traces"), rows_of(greedy), strict=True):
        assert [one[name] for name in same] == [other[name] for name in same]


def test_kill_and_resume_give_the_same_rows(
    options: dict[str, Any], greedy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harvest_module, "SHARD_ROWS", 20)
    out = tmp_path / "t"
    config = HarvestConfig(out=out, **options)
    process = start(config)
    deadline = time.monotonic() + 120
    while not list(out.glob("shard-*.parquet")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, process.stdout.read() if process.stdout else ""
    assert list(out.glob("shard-*.parquet"))
    with pytest.raises(UserError, match=r"did not finish.*--resume"):
        Traces(out)
    with pytest.raises(UserError, match="not empty; add --resume"):
        harvest(config)
    (out / ".shard-00-00009.parquet.tmp").write_bytes(b"half a shard")
    harvest(config.model_copy(update={"resume": True}))
    assert rows_of(out) == rows_of(greedy)
    assert not list(out.glob(".*"))


def test_interrupt_keeps_finished_prompts(
    options: dict[str, Any],
    greedy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, real = tmp_path / "t", Recorder.record
    options = {**options, "max_positions": 45}  # ends within the seventh prompt
    harvest(HarvestConfig(out=tmp_path / "undisturbed", **options))
    expected = rows_of(tmp_path / "undisturbed")
    assert len(expected) == 45
    capsys.readouterr()

    def interrupted(self: Recorder, prompt_id: int, *args: Any) -> Any:
        if prompt_id == 4:
            raise KeyboardInterrupt
        return real(self, prompt_id, *args)

    monkeypatch.setattr(Recorder, "record", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        harvest(HarvestConfig(out=out, **options))
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.undo()
    kept = sum(row["prompt_id"] < 4 for row in expected)
    assert f"{kept} positions are kept" in capsys.readouterr().out
    harvest(HarvestConfig(out=out, **options, resume=True))
    assert rows_of(out) == expected
    before = (out / "manifest.json").read_bytes()
    harvest(HarvestConfig(out=out, **options, resume=True))
    assert (out / "manifest.json").read_bytes() == before


def perturbed(folder: Path, copy: Path) -> Path:
    """A copy of a model folder with one weight changed."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    name = max(tensors, key=lambda key: tensors[key].numel())
    tensors[name].view(-1)[0] += 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"--resume with another seed \(0 before, 1 now\)"),
        ({"temperature": 0.7}, "another temperature"),
        ({"pool": PoolConfig(depth=2, beam=2, width=4)}, "another pool"),
        ({"max_positions": 5}, "another max_positions"),
        ({"prompts": "other"}, "another prompts_sha256"),
        ({"target": "other"}, "another target fingerprint"),
        ({"drafter": "other"}, "another drafter fingerprint"),
    ],
)
def test_resume_refuses_another_harvest(
    options: dict[str, Any], greedy: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    if "prompts" in change:
        change = {"prompts": str(tmp_path / "p.jsonl")}
        (tmp_path / "p.jsonl").write_text('{"text": "other"}\n')
    for name in {"target", "drafter"} & set(change):
        change = {name: str(perturbed(Path(options[name]), tmp_path / name))}
    before = sorted((p.name, p.stat().st_mtime_ns) for p in greedy.iterdir())
    with pytest.raises(UserError, match=message):
        harvest(HarvestConfig(**{**options, "out": greedy, "resume": True, **change}))
    assert sorted((p.name, p.stat().st_mtime_ns) for p in greedy.iterdir()) == before


def test_harvest_larger_than_max_disk_is_refused_before_it_starts(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"--max-disk: the harvest may need .* more than 50 kB; raise it, or lower"):
        harvest(HarvestConfig(out=tmp_path / "t", **options, max_disk="50KB"))
    assert "at most 70 positions x" in capsys.readouterr().out
    assert not (tmp_path / "t").exists()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(UserError, match="only 1 kB are free on this disk"):
        harvest(HarvestConfig(out=tmp_path / "t", **options))


def test_estimate_bounds_the_folder(options: dict[str, Any], greedy: Path) -> None:
    written = sum(path.stat().st_size for path in greedy.iterdir())
    harvest_module.check_disk(HarvestConfig(out=greedy, **options, max_disk=10**9), Traces(greedy).manifest, len(TEXTS))
    with pytest.raises(UserError, match="--max-disk"):
        harvest_module.check_disk(
            HarvestConfig(out=greedy, **options, max_disk=written), Traces(greedy).manifest, len(TEXTS)
        )


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("1.5 MiB", 1572864), ("300", 300), (7, 7), ("5k", 5000)]
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_size(text) == size


def _foreign_folder(path: Path) -> dict[str, Any]:
    (path / "t").mkdir()
    (path / "t" / "precious").write_text("x")
    return {"out": path / "t", "resume": True}


def _predictor_folder(path: Path) -> dict[str, Any]:
    (path / "t").mkdir()
    (path / "t" / "manifest.json").write_text('{"schema_version": 1}')
    return {"out": path / "t"}


def _file_as_folder(path: Path) -> dict[str, Any]:
    (path / "t").write_text("x")
    return {"out": path / "t"}


def _malformed(path: Path) -> dict[str, Any]:
    (path / "p.jsonl").write_text('{"text": "a"}\n{oops\n')
    return {"prompts": str(path / "p.jsonl")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_foreign_folder, "holds no harvest to resume"),
        (lambda path: _foreign_folder(path) | {"resume": False}, "holds no harvest to resume.*choose another --out$"),
        (_predictor_folder, "holds no harvest to resume"),
        (lambda path: {"target": str(path / "nowhere")}, "nowhere: no such folder"),
        (_file_as_folder, "not a folder to write to"),
        (_malformed, "p.jsonl, line 2: not valid JSON"),
        (lambda path: {"prompts": str(path / "none.jsonl")}, "no such prompt file"),
        (lambda path: {"max_disk": "lots"}, "--max-disk: 'lots' is not a size"),
        (lambda path: {"poolsize": 3}, "'poolsize' is not supported"),
        (lambda path: {"target_temperatures": (0.0,)}, "target_temperatures"),
    ],
)
def test_mistakes_are_one_clear_line(options: dict[str, Any], tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        harvest(HarvestConfig(**{"out": tmp_path / "new/out", **options, **change(tmp_path)}))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()
