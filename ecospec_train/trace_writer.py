"""Writing traces so that nothing is lost or doubled when the process dies: write, fsync, rename; then list the shard.

Each rank keeps the list of its finished shards in `progress-RR.json`, rewritten after every shard. A file that no list names is a
leftover of a killed run; `ShardWriter` removes its own. Shards from the first damaged one on are recorded again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ecospec_runtime.errors import UserError, first_line
from ecospec_train.traces import ShardRecord, TraceRow, trace_schema

_HALF_MAX = float(np.finfo(np.float16).max)


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside `path`, fsync, rename. Raises UserError when the disk is full or the folder cannot be written."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space" if full else "check the folder and its permissions"
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); {remedy}, then run again with --resume"
        ) from None


def sha256_of(data: bytes) -> str:
    """sha256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def encode_rows(rows: Sequence[TraceRow], experts: int) -> pa.Table:
    """The rows as one Arrow table of `trace_schema(experts)`. States beyond float16's range are clipped to it."""
    pools = [row.pool for row in rows]
    lists: dict[str, list[NDArray[Any]]] = {
        name: [getattr(pool, name) for pool in pools]
        for name in ("tokens", "parents", "depths", "ranks", "log_probs", "state_rows", "entropies", "log_normalizers")
    }
    lists["states"] = [np.clip(pool.states, -_HALF_MAX, _HALF_MAX) for pool in pools]
    for name in ("routing", "next_tokens", "argmax", "token_logits", "logsumexp"):
        lists[name] = [getattr(row, name) for row in rows]
    scalars = {name: [getattr(row, name) for row in rows] for name in ("prompt_id", "position", "context")}
    scalars["root_token"] = [pool.root_token for pool in pools]
    schema = trace_schema(experts)
    arrays = [
        pa.array(scalars[field.name], field.type)
        if field.name in scalars
        else _list_array(lists[field.name], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _list_array(values: list[NDArray[Any]], kind: pa.ListType) -> pa.ListArray:
    offsets = np.cumsum([0, *(value.size for value in values)])
    if offsets[-1] >= 2**31:
        raise UserError("a trace shard would pass 2^31 values; use a smaller pool")
    dtype = kind.value_type.to_pandas_dtype()
    flat = np.concatenate([value.reshape(-1).astype(dtype) for value in values]) if values else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat, kind.value_type))


class ShardWriter:
    """Gathers whole prompts and writes a shard once `shard_rows` rows are there. One per rank."""

    def __init__(self, folder: Path, experts: int, rank: int = 0, shard_rows: int = 256) -> None:
        """Continues after the intact shards that an earlier run of this rank finished; removes its other files."""
        self._folder, self._experts, self._rank, self._shard_rows = folder, experts, rank, shard_rows
        self._log = folder / f"progress-{rank:02d}.json"
        self.shards = list(takewhile(self._intact, read_progress(self._log)))
        self._pending: list[TraceRow] = []
        self._pending_prompts: list[int] = []
        listed = {shard.file for shard in self.shards}
        leftovers = [
            *folder.glob(f"shard-{rank:02d}-*.parquet"),
            *folder.glob(f".shard-{rank:02d}-*"),
            *folder.glob(f".{self._log.name}*"),
        ]
        for path in leftovers:
            if path.name not in listed:
                path.unlink()

    def _intact(self, shard: ShardRecord) -> bool:
        path = self._folder / shard.file
        return path.is_file() and path.stat().st_size == shard.bytes and sha256_of(path.read_bytes()) == shard.sha256

    def add(self, prompt_id: int, rows: Iterable[TraceRow]) -> None:
        """Take all rows of one prompt; prompts come in rising order. A prompt without rows is remembered as done."""
        self._pending.extend(rows)
        self._pending_prompts.append(prompt_id)
        if len(self._pending) >= self._shard_rows:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as a shard, then list it."""
        rows, prompt_ids = self._pending, self._pending_prompts
        self._pending, self._pending_prompts = [], []  # first: an interrupted flush must not be repeated in part
        if not rows:
            return
        buffer = pa.BufferOutputStream()
        pq.write_table(encode_rows(rows, self._experts), buffer, compression="zstd", use_dictionary=False)
        data = buffer.getvalue().to_pybytes()
        name = f"shard-{self._rank:02d}-{len(self.shards):05d}.parquet"
        write_atomically(self._folder / name, data)
        self.shards.append(
            ShardRecord(
                file=name,
                rows=len(rows),
                bytes=len(data),
                sha256=sha256_of(data),
                prompt_ids=prompt_ids,
            )
        )
        write_atomically(self._log, json.dumps([shard.model_dump() for shard in self.shards]).encode())


def read_progress(path: Path) -> list[ShardRecord]:
    """The finished shards a rank has listed; none if it has not started."""
    try:
        return [ShardRecord.model_validate(record) for record in json.loads(path.read_text())]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)}); harvest into another folder") from None
