"""Harvest: run target and drafter over prompts and write traces, through Lightning's `Trainer.predict`.

Positions are decided by prompts and configuration alone, so a harvest that was killed and resumed holds the same rows as an
undisturbed one. Each rank takes every `devices`-th prompt and writes its own shards.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pyarrow.parquet as pq
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from safetensors.numpy import save
from torch.utils.data import DataLoader, IterableDataset

from ecospec_runtime.console import existing_part
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.drafters.base import Drafter
from ecospec_runtime.errors import UserError
from ecospec_runtime.machine import versions
from ecospec_runtime.prompts import Prompt, fingerprint_prompts, read_prompts
from ecospec_runtime.target import Target
from ecospec_train.progress import PositionProgress
from ecospec_train.recording import Recorder
from ecospec_train.settings import HarvestConfig
from ecospec_train.trace_writer import ShardWriter, read_progress, sha256_of, write_atomically
from ecospec_train.traces import (
    EMBEDDING,
    MANIFEST,
    DrafterRecord,
    TargetRecord,
    TraceManifest,
    TraceRow,
    bytes_per_position,
    read_manifest,
)

SHARD_ROWS = 256
SHARD_OVERHEAD = 32 * 1024  # Parquet's own metadata, and the manifest's entry
_NOT_COMPARED = {"complete", "shards", "embedding_sha256", "seconds", "versions", "command"}


def harvest(config: HarvestConfig) -> TraceManifest:
    """Write the traces of `config.prompts` to `config.out` and return their manifest.

    Raises UserError for anything the user can mend (a non-empty folder without `resume`, a resume that would mix two harvests,
    too little disk, bad prompts), and KeyboardInterrupt on Ctrl-C with every finished prompt written.
    """
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if config.device_map is not None and config.devices > 1:
        raise UserError("--device-map spreads one target, --devices makes copies of it; give one of them")
    existing = None
    if rank == 0:
        existing = check_folder(config)
        read_prompts(config.prompts, limit=1)  # a mistake in them shall not wait for the target
    device = None if config.device_map else f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    target = Target.from_pretrained(config.target, config.dtype, device, device_map=config.device_map)
    drafter = load_drafter(config.drafter, target, config.dtype)
    prompts = read_prompts(config.prompts, target.tokenizer)
    manifest = describe(config, target, drafter, prompts)
    if rank == 0:
        if existing is not None:
            refuse_other_harvest(existing, manifest, config.out)
            if existing.complete:
                print(f"harvest: {config.out} is complete ({existing.rows} positions)")
                return existing
        check_disk(config, manifest, len(prompts))
        config.out.mkdir(parents=True, exist_ok=True)
        write_atomically(config.out / MANIFEST, manifest.model_dump_json(indent=2).encode())
    callback = TraceCallback(config)
    run_trainer(HarvestModule(target, drafter, config, prompts, callback), callback, config)
    if rank == 0:
        manifest = finish(config, manifest, target, callback.seconds)
    return manifest


def check_folder(config: HarvestConfig) -> TraceManifest | None:
    """The manifest of the harvest to continue, if any; makes nothing. Raises UserError for a folder that holds anything else."""
    out = config.out
    try:
        place = existing_part(out)
        found = {path.name for path in out.iterdir()} - {f".{MANIFEST}.tmp"} if place == out.absolute() else set()
    except OSError as error:
        raise UserError(f"{out}: not a folder to write to ({error.strerror}); choose another --out") from None
    if not place.is_dir():
        raise UserError(f"{out}: not a folder to write to ({place} is a file); choose another --out")
    if not os.access(place, os.W_OK):
        raise UserError(f"{place}: no permission to write; choose another --out or change its permissions")
    if not found:
        return None
    try:
        existing = read_manifest(out)
    except UserError as error:
        raise UserError(f"{out}: not empty, and holds no harvest to resume ({error}); choose another --out") from None
    if not config.resume:
        raise UserError(f"{out}: not empty; add --resume to continue the harvest in it, or choose another --out")
    return existing


def describe(config: HarvestConfig, target: Target, drafter: Drafter, prompts: list[Prompt]) -> TraceManifest:
    """The manifest of this harvest, without shards."""
    return TraceManifest(
        target=TargetRecord(
            id=config.target,
            architecture=target.architecture,
            fingerprint=target.fingerprint,
            moe_layers=target.moe_layers,
            experts=target.experts,
            top_k=target.top_k,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
        ),
        drafter=DrafterRecord.model_validate(
            {"id": config.drafter} | {k: getattr(drafter, k) for k in ("kind", "fingerprint", "width", "features")}
        ),
        **config.model_dump(
            include=set(TraceManifest.model_fields)
            & set(HarvestConfig.model_fields) - {"target", "drafter", "target_temperatures"}
        ),
        target_temperatures=config.recorded_temperatures,
        end_tokens=target.eos_token_ids(),
        routing_by_weight=target.knows_weights,
        prompts_sha256=fingerprint_prompts(prompts),
        versions=versions(),
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
    )


def refuse_other_harvest(old: TraceManifest, new: TraceManifest, out: Path) -> None:
    """Raise UserError naming the first thing in which a resumed harvest would differ from the one begun."""

    def flat(manifest: TraceManifest) -> dict[str, Any]:
        values = json.loads(manifest.model_dump_json(exclude=_NOT_COMPARED))
        for name in ("target", "drafter"):
            values |= {f"{name} {key}": value for key, value in values.pop(name).items() if key != "id"}
        return values

    before, now = flat(old), flat(new)
    for key, value in before.items():
        if now[key] != value:
            raise UserError(
                f"{out}: --resume with another {key} ({value} before, {now[key]} now); use the same or another --out"
            )


def check_disk(config: HarvestConfig, manifest: TraceManifest, prompts: int) -> None:
    """Print the size of the harvest and raise UserError if it would pass `max_disk` or the free space."""
    target, pool = manifest.target, config.pool
    row = bytes_per_position(
        pool,
        target.moe_layers,
        target.top_k,
        target.experts,
        manifest.drafter.width,
        len(config.drafter_temperatures),
        len(config.recorded_temperatures),
        manifest.drafter.features,
    )
    positions = expected_positions(config, prompts)
    table = min(target.vocab_size, positions * (pool.pool_size + 1)) * (2 * target.hidden_size + 4)
    shards = (positions // SHARD_ROWS + config.devices) * SHARD_OVERHEAD
    total = positions * row + table + shards
    print(
        f"harvest: at most {positions:,} positions x {row:,} bytes = {_size(total)} with embeddings, before compression"
    )
    if total > config.max_disk:
        fitting = max(0, (config.max_disk - table - shards) // row)
        raise UserError(
            f"--max-disk: the harvest may need {_size(total)}, more than {_size(config.max_disk)}; raise it, or lower "
            f"--max-positions (about {fitting} fit), --pool-size or the number of prompts"
        )
    written = sum(path.stat().st_size for path in config.out.glob("*"))
    free = shutil.disk_usage(existing_part(config.out)).free
    if total - written > free:
        raise UserError(
            f"{config.out}: the harvest may need {_size(total - written)}, only {_size(free)} are free on this disk"
        )


def expected_positions(config: HarvestConfig, prompts: int) -> int:
    """Upper bound of the number of rows."""
    most = prompts * -(-config.max_new_tokens // config.stride)
    return most if config.max_positions is None else min(most, config.max_positions)


class PromptStream(IterableDataset[tuple[int, list[int]]]):
    """This rank's prompts as (prompt_id, tokens), from `first` on, while `module` wants more."""

    def __init__(self, module: HarvestModule, first: int, step: int) -> None:
        self._module, self._first, self._step = module, first, step

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        module = self._module
        for prompt_id in range(self._first, len(module.prompts), self._step):
            if module.remaining <= 0:
                return
            tokens = module.prompts[prompt_id].encode(module.target.tokenizer, module.config.max_prompt_tokens)
            if tokens:
                yield prompt_id, tokens


class HarvestModule(L.LightningModule):
    """Target and drafter as one predicting module: a prompt in, its trace rows out."""

    def __init__(
        self, target: Target, drafter: Drafter, config: HarvestConfig, prompts: list[Prompt], callback: TraceCallback
    ) -> None:
        super().__init__()
        self.target, self.config, self.prompts = target, config, prompts  # no submodule: Lightning would move it
        self.recorder = Recorder(
            target,
            drafter,
            config.pool,
            temperature=config.temperature,
            drafter_temperatures=config.drafter_temperatures,
            target_temperatures=config.recorded_temperatures,
        )
        self._callback = callback
        self.remaining = 0

    def predict_dataloader(self) -> DataLoader[tuple[int, list[int]]]:
        """This rank's prompts, after those its finished shards hold."""
        rank, world = self.global_rank, self.trainer.world_size
        writer = self._callback.open(self.target.experts, rank)
        most = self.config.max_positions
        share = most // world + (rank < most % world) if most is not None else sys.maxsize
        self.remaining = share - sum(shard.rows for shard in writer.shards)
        done = writer.shards[-1].prompt_ids[-1] if writer.shards else rank - world
        return DataLoader(PromptStream(self, done + world, world), batch_size=None)

    def predict_step(self, batch: tuple[int, list[int]], batch_idx: int) -> list[TraceRow]:
        """Rows of one prompt; fewer where the harvest ends within it."""
        prompt_id, tokens = batch
        config = self.config
        if self.remaining <= 0:
            return []
        new_tokens = min(config.max_new_tokens, self.remaining * config.stride)
        rows = self.recorder.record(prompt_id, tokens, new_tokens, config.stride, config.seed + prompt_id)
        self.remaining -= len(rows)
        return rows


class TraceCallback(BasePredictionWriter):
    """Lightning's prediction writer: rows to shards, one `ShardWriter` per rank."""

    def __init__(self, config: HarvestConfig) -> None:
        super().__init__(write_interval="batch")
        self._config = config
        self._writer: ShardWriter | None = None
        self.seconds: dict[str, float] = {}
        self.written = 0  # rows of this rank

    def open(self, experts: int, rank: int) -> ShardWriter:
        """The rank's writer; it removes what a killed run left unfinished."""
        self._writer = ShardWriter(self._config.out, experts, rank, SHARD_ROWS)
        self.written = sum(shard.rows for shard in self._writer.shards)
        return self._writer

    def write_on_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, prediction: Any, batch_indices: Any, batch: Any, *_: Any
    ) -> None:
        """Hand a prompt's rows to the writer."""
        assert self._writer is not None
        assert isinstance(pl_module, HarvestModule)
        with pl_module.recorder.clock.phase("write"):
            self._writer.add(batch[0], prediction)
        self.written += len(prediction)

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the last, partial shard; wait for the other ranks."""
        assert self._writer is not None
        assert isinstance(pl_module, HarvestModule)
        with pl_module.recorder.clock.phase("write"):
            self._writer.flush()
        self.seconds = dict(pl_module.recorder.clock.seconds)
        trainer.strategy.barrier("harvest")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """On Ctrl-C the finished prompts are written."""
        if self._writer is not None and isinstance(exception, KeyboardInterrupt):
            self._writer.flush()
            print(
                f"harvest: {sum(s.rows for s in self._writer.shards)} positions are kept; --resume continues",
                flush=True,
            )


def run_trainer(module: HarvestModule, callback: TraceCallback, config: HarvestConfig) -> None:
    """`Trainer.predict`; Ctrl-C comes out as KeyboardInterrupt."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    handler = signal.getsignal(signal.SIGINT)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        trainer = L.Trainer(
            accelerator="gpu" if module.target.device.type == "cuda" else "cpu",
            devices=config.devices,
            strategy="ddp" if config.devices > 1 else "auto",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[
                callback,
                PositionProgress(expected_positions(config, len(module.prompts)), lambda: callback.written),
            ],
        )
        try:
            trainer.predict(module, return_predictions=False)
        except SystemExit:  # what Lightning makes of KeyboardInterrupt
            signal.signal(signal.SIGINT, handler)
            raise KeyboardInterrupt from None


def finish(config: HarvestConfig, manifest: TraceManifest, target: Target, seconds: dict[str, float]) -> TraceManifest:
    """Write the embedding rows of all tokens seen, then the final manifest; remove the ranks' lists."""
    logs = [config.out / f"progress-{rank:02d}.json" for rank in range(config.devices)]
    shards = [shard for log in logs for shard in read_progress(log)]
    seen = np.zeros(target.vocab_size, bool)
    for shard in shards:
        table = pq.read_table(config.out / shard.file, columns=["tokens", "root_token"])
        seen[table.column("root_token").to_numpy()] = True
        seen[table.column("tokens").combine_chunks().flatten().to_numpy()] = True
    ids = np.flatnonzero(seen)
    rows = target.embed(torch.from_numpy(ids)).to(torch.float16).numpy(force=True)
    data = save({"ids": ids.astype(np.int32), "table": rows})
    write_atomically(config.out / EMBEDDING, data)
    manifest = manifest.model_copy(
        update={"complete": True, "shards": shards, "embedding_sha256": sha256_of(data), "seconds": seconds}
    )
    if not shards:
        raise UserError(
            f"{config.prompts}: the target ended every text at once, there is nothing to record; use other prompts"
        )
    write_atomically(config.out / MANIFEST, manifest.model_dump_json(indent=2).encode())
    for log in logs:
        log.unlink(missing_ok=True)
    passes = seconds.get("generate", 0.0) + seconds.get("verify", 0.0)
    phases = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    print(f"harvest: {manifest.rows:,} positions, {_size(sum(s.bytes for s in shards) + len(data))} in {config.out}")
    if passes > 0:
        print(f"harvest: {phases}; {sum(seconds.values()) / passes:.2f} x the target passes alone")
    return manifest


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
