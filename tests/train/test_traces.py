"""Traces: what is written comes back; what is damaged or foreign is refused by name."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ecospec_runtime.config import PoolConfig
from ecospec_runtime.errors import UserError
from ecospec_runtime.pool import Pool
from ecospec_train import trace_writer
from ecospec_train.trace_writer import ShardWriter, encode_rows, read_progress, write_atomically
from ecospec_train.traces import (
    EMBEDDING,
    DrafterRecord,
    TargetRecord,
    TraceManifest,
    TraceRow,
    Traces,
    TraceShard,
    bytes_per_position,
)  # fmt: skip

LAYERS, TOP_K, WIDTH, TEMPERATURES, TARGET_TEMPERATURES = 3, 2, 5, (0.5, 1.0), (1.0,)


def make_row(rng: np.random.Generator, prompt_id: int, position: int, nodes: int, experts: int = 12) -> TraceRow:
    """A row of random content with a valid tree."""
    parents = np.array([rng.integers(-1, i) if i else -1 for i in range(nodes)], np.int64)
    depths = np.zeros(nodes, np.int64)
    for i, parent in enumerate(parents):
        depths[i] = 1 if parent < 0 else depths[parent] + 1
    states = 2 + nodes // 2
    pool = Pool(
        tokens=rng.integers(0, 90, nodes),
        parents=parents,
        depths=depths,
        ranks=rng.integers(0, 8, nodes),
        log_probs=-rng.random(nodes).astype(np.float32),
        state_rows=rng.integers(0, states, nodes),
        states=rng.normal(size=(states, WIDTH)).astype(np.float16).astype(np.float32),
        entropies=rng.random(states).astype(np.float32),
        root_token=int(rng.integers(0, 90)),
        temperatures=TEMPERATURES,
        log_normalizers=rng.normal(size=(states, len(TEMPERATURES))).astype(np.float32),
    )
    return TraceRow(
        prompt_id=prompt_id,
        position=position,
        context=position + 7,
        pool=pool,
        routing=rng.integers(0, experts, (nodes + 1, LAYERS, TOP_K)),
        next_tokens=rng.integers(0, 90, nodes + 1),
        argmax=rng.integers(0, 90, nodes + 1),
        token_logits=rng.normal(size=nodes).astype(np.float32),
        logsumexp=rng.normal(size=(nodes + 1, len(TARGET_TEMPERATURES))).astype(np.float32),
    )


def save_traces(folder: Path, prompts: list[list[TraceRow]], experts: int = 12, shard_rows: int = 4) -> TraceManifest:
    """Write prompts through ShardWriter and close the folder with manifest and embedding."""
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(folder, experts, shard_rows=shard_rows)
    for prompt_id, rows in enumerate(prompts):
        writer.add(prompt_id, rows)
    writer.flush()
    ids = np.arange(90, dtype=np.int32)
    save_file({"ids": ids, "table": np.outer(ids, [1, 2]).astype(np.float16)}, folder / EMBEDDING)
    manifest = TraceManifest(
        complete=True,
        target=TargetRecord(
            id="t", architecture="A", fingerprint="f" * 64, moe_layers=LAYERS, experts=experts, top_k=TOP_K,
            vocab_size=96, hidden_size=2,
        ),
        drafter=DrafterRecord(id="d", kind="eagle3", fingerprint="e" * 64, width=WIDTH),
        pool=PoolConfig(depth=3, beam=2, width=4),
        drafter_temperatures=TEMPERATURES,
        target_temperatures=TARGET_TEMPERATURES,
        temperature=0.0, seed=0, stride=1, max_positions=None, max_new_tokens=8, max_prompt_tokens=8, dtype="float32",
        devices=1, prompts_sha256="", shards=writer.shards,
        embedding_sha256=trace_writer.sha256_of((folder / EMBEDDING).read_bytes()), versions={}, command=[],
    )  # fmt: skip
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    return manifest


def check_row(shard: TraceShard, r: int, row: TraceRow) -> None:
    """Every field of one row as it was written."""
    assert (shard.prompt_id[r], shard.position[r], shard.context[r]) == (row.prompt_id, row.position, row.context)
    pool = shard.pool(r)
    for name in Pool.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(pool, name), getattr(row.pool, name), err_msg=name)
    np.testing.assert_array_equal(shard.routing_of(r), row.routing)
    np.testing.assert_array_equal(shard.next_tokens_of(r), row.next_tokens)
    np.testing.assert_array_equal(shard.argmax[shard.verified(r)], row.argmax)
    np.testing.assert_array_equal(shard.logsumexp[shard.verified(r)], row.logsumexp)
    np.testing.assert_array_equal(shard.token_logits[shard.nodes(r)], row.token_logits)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=5),
    experts=st.sampled_from([12, 256, 257, 60000]),
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, seed: int, sizes: list[list[int]], experts: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = [[make_row(rng, p, i, n, experts) for i, n in enumerate(rows)] for p, rows in enumerate(sizes)]
    folder = tmp_path_factory.mktemp("traces")
    save_traces(folder, prompts, experts)
    traces = Traces(folder, expect_target="f" * 64, expect_drafter="e" * 64)
    expected = [row for rows in prompts for row in rows]
    assert len(traces) == len(expected)
    seen = iter(expected)
    prompts_of_shards = []
    for shard in traces.shards():
        prompts_of_shards.append(set(shard.prompt_id.tolist()))
        for r in range(len(shard)):
            check_row(shard, r, next(seen))
    assert sum(map(len, prompts_of_shards)) == len(set().union(*prompts_of_shards))  # no prompt in two shards
    assert next(seen, None) is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    save_traces(tmp_path / "traces", [[make_row(rng, p, i, 5) for i in range(3)] for p in range(4)])
    return tmp_path / "traces"


def test_datasets_reads_the_folder(folder: Path, tmp_path: Path) -> None:
    import datasets

    files = str(folder / "shard-*.parquet")
    loaded = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    streamed = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    assert loaded.num_rows == 12
    first = next(iter(Traces(folder).shards()))
    for row in (loaded[0], next(iter(streamed))):
        assert row["tokens"] == first.pool(0).tokens.tolist()
        assert row["routing"] == first.routing_of(0).reshape(-1).tolist()
        np.testing.assert_array_equal(np.array(row["states"], np.float32).reshape(-1, WIDTH), first.pool(0).states)


def test_states_beyond_float16_are_clipped() -> None:
    row = make_row(np.random.default_rng(0), 0, 0, 2)
    row.pool.states[0, 0] = 1e6
    assert encode_rows([row], 12).column("states")[0][0].as_py() == 65504.0


def test_embedding(folder: Path) -> None:
    embed = Traces(folder).embedding()
    np.testing.assert_array_equal(embed([3, 1]), np.array([[3, 6], [1, 2]], np.float32))
    assert embed([]).shape == (0, 2)
    with pytest.raises(UserError, match="no row for token 95"):
        embed([1, 95])


def _drop_shard(folder: Path) -> None:
    (folder / "shard-00-00001.parquet").unlink()


def _truncate(folder: Path) -> None:
    path = folder / "shard-00-00001.parquet"
    path.write_bytes(path.read_bytes()[:-9])


def _flip(folder: Path) -> None:
    path = folder / "shard-00-00001.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _edit_target(**changes: Any) -> Any:
    def edit(folder: Path) -> None:
        raw = json.loads((folder / "manifest.json").read_text())
        raw["target"] |= changes
        (folder / "manifest.json").write_text(json.dumps(raw))

    return edit


def _edit_manifest(**changes: Any) -> Any:
    def edit(folder: Path) -> None:
        raw = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**raw, **changes}))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop_shard, "shard-00-00001.parquet: shard is missing"),
        (_truncate, "shard-00-00001.parquet: truncated"),
        (_flip, "shard-00-00001.parquet: corrupt"),
        (_edit_manifest(schema_version=7), "manifest.json: schema_version is 7, this release reads 1"),
        (_edit_manifest(surprise=1), "key 'surprise'"),
        (_edit_manifest(complete=False), "did not finish.*--resume"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json: cannot be read"),
        (lambda f: (f / "manifest.json").write_text("[]"), "schema_version is None"),
        (lambda f: (f / "manifest.json").unlink(), "holds no traces"),
        (_edit_target(moe_layers=9), "says 9 MoE layers.*not what shard-00-00000.parquet holds"),
        (_edit_target(experts=1), "of 1 experts.*not what"),
        (_edit_target(vocab_size=1), "1 tokens, which is not what"),
        (_edit_manifest(pool={"depth": -1}), "manifest.json: PoolConfig: 'depth'"),
        (lambda f: (f / EMBEDDING).write_bytes(b"x"), "embedding.safetensors: corrupt"),
        (lambda f: (f / EMBEDDING).unlink(), "embedding.safetensors: cannot be read"),
    ],
)
def test_damage_is_one_clear_line(folder: Path, damage: Any, message: str) -> None:
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:  # noqa: PT012 each kind of damage shows at its own step
        traces = Traces(folder)
        traces.embedding()
        list(traces.shards())
    assert "\n" not in str(caught.value)


def test_foreign_target_and_drafter_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="traces of another target"):
        Traces(folder, expect_target="0" * 64)
    with pytest.raises(UserError, match="traces of another drafter"):
        Traces(folder, expect_drafter="0" * 64)


def test_bytes_per_position_bounds_what_is_written() -> None:
    rng = np.random.default_rng(0)
    pool = PoolConfig(depth=3, beam=2, width=4)  # at most 12 nodes and 2 + 4 states
    rows = [make_row(rng, 0, i, 8) for i in range(50)]  # 8 nodes, 6 states
    table = encode_rows(rows, 12)
    bound = bytes_per_position(pool, LAYERS, TOP_K, 12, WIDTH, len(TEMPERATURES), len(TARGET_TEMPERATURES))
    assert table.nbytes / 50 <= bound
    assert bound <= 2 * table.nbytes / 50


def test_a_killed_writer_leaves_whole_shards_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    rows = [[make_row(rng, p, i, 3) for i in range(4)] for p in range(3)]
    writer = ShardWriter(tmp_path, 12, shard_rows=4)
    writer.add(0, rows[0])
    real = trace_writer.write_atomically

    def die_before_listing(path: Path, data: bytes) -> None:
        if path.suffix == ".json":
            raise KeyboardInterrupt
        real(path, data)

    monkeypatch.setattr(trace_writer, "write_atomically", die_before_listing)
    with pytest.raises(KeyboardInterrupt):
        writer.add(1, rows[1])
    monkeypatch.undo()
    (tmp_path / ".shard-00-00002.parquet.tmp").write_bytes(b"half")
    assert len(list(tmp_path.glob("shard-*"))) == 2
    again = ShardWriter(tmp_path, 12, shard_rows=4)
    assert [s.prompt_ids for s in again.shards] == [[0]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["progress-00.json", "shard-00-00000.parquet"]


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_a_damaged_shard_and_those_after_it_are_written_again(tmp_path: Path, damage: str) -> None:
    rng = np.random.default_rng(0)
    writer = ShardWriter(tmp_path, 12, shard_rows=1)
    for prompt_id in range(3):
        writer.add(prompt_id, [make_row(rng, prompt_id, 0, 3)])
    path = tmp_path / writer.shards[1].file
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "truncated" else data[:40] + bytes([data[40] ^ 1]) + data[41:])
    assert [s.prompt_ids for s in ShardWriter(tmp_path, 12).shards] == [[0]]
    assert [p.name for p in tmp_path.glob("shard-*")] == ["shard-00-00000.parquet"]


def test_full_disk_is_the_users_to_fix_and_keeps_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    writer = ShardWriter(tmp_path, 12, shard_rows=1)
    writer.add(0, [make_row(rng, 0, 0, 3)])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"No space left on device.*free some space.*--resume"):
        writer.add(1, [make_row(rng, 1, 0, 3)])
    monkeypatch.undo()
    assert [s.prompt_ids for s in read_progress(tmp_path / "progress-00.json")] == [[0]]
    assert not list(tmp_path.glob(".*"))


def test_unwritable_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_atomically(tmp_path / "missing" / "file", b"")
