"""Traces of an invented target whose routing and acceptance can be learned from what a predictor sees.

The target is a table: context c (one of four, fixed per prompt) and token x give next-token logits. The drafter's logits are
the target's, sharpened or flattened by an amount that only its state shows. Experts follow from token and context.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ecospec_runtime.acceptance import TEMPERATURES
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.pool import Pool
from ecospec_train.trace_writer import ShardWriter
from ecospec_train.traces import DrafterRecord, TargetRecord, TraceManifest, TraceRow

VOCABULARY, HIDDEN, WIDTH, LAYERS, EXPERTS, TOP_K, CONTEXTS = 48, 16, 24, 3, 12, 3, 4
SHAPE = PoolConfig(depth=3, beam=2, width=4)


class World:
    """Tables of the invented target and drafter."""

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.embedding = rng.normal(size=(VOCABULARY, HIDDEN)).astype(np.float16)
        self.contexts = rng.normal(size=(CONTEXTS, WIDTH)).astype(np.float32)
        self.states = rng.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
        self.logits = 2.0 * rng.normal(size=(CONTEXTS, VOCABULARY, VOCABULARY))
        sharpness = self.states @ rng.normal(size=WIDTH) / WIDTH**0.5
        noise = 3.0 * rng.normal(size=self.logits.shape) * (sharpness > 0.3)[None, :, None]
        self.drafts = (self.logits + noise) * 0.4
        by_token = rng.normal(size=(VOCABULARY, LAYERS, EXPERTS))
        by_context = rng.normal(size=(CONTEXTS, LAYERS, EXPERTS))
        scores = by_token[None] + by_context[:, None]
        self.routing = np.argsort(-scores, axis=-1)[..., :TOP_K].astype(np.uint8)  # [C, V, L, K]

    def state(self, context: int, token: int) -> np.ndarray:
        """Drafter state after a token."""
        return self.contexts[context] + self.states[token]

    def draft(self, context: int, token: int) -> np.ndarray:
        """Drafter log-probabilities after a token."""
        logits = self.drafts[context, token]
        return logits - np.log(np.exp(logits).sum())

    def pool(self, context: int, previous: int, root: int) -> Pool:
        """Beam-expanded pool in the order of the pool contract."""
        proposers = [previous, root]
        nodes: list[tuple[int, int, int, int, float, int]] = []  # token, parent, depth, rank, log p, state row
        total: dict[int, float] = {-1: 0.0}
        frontier = [(-1, 1)]  # node, row of its state
        for depth in range(1, SHAPE.depth + 1):
            children = []
            for node, row in frontier:
                log_p = self.draft(context, proposers[row])
                for rank, token in enumerate(np.argsort(-log_p)[: SHAPE.width].tolist()):
                    children.append((total[node] + log_p[token], (token, node, depth, rank, float(log_p[token]), row)))
            children.sort(key=lambda child: -child[0])
            first = len(nodes)
            for cumulative, child in children[: SHAPE.width]:
                total[len(nodes)] = cumulative
                nodes.append(child)
            frontier = []
            for node in range(first, min(first + SHAPE.beam, len(nodes))) if depth < SHAPE.depth else ():
                proposers.append(nodes[node][0])
                frontier.append((node, len(proposers) - 1))
        tokens, parents, depths, ranks, log_probs, state_rows = (
            np.array(column) for column in zip(*nodes, strict=True)
        )
        log_p_sV = np.stack([self.draft(context, token) for token in proposers])
        return Pool(
            tokens=tokens, parents=parents, depths=depths, ranks=ranks, log_probs=log_probs.astype(np.float32),
            state_rows=state_rows, states=np.stack([self.state(context, token) for token in proposers]),
            entropies=-(np.exp(log_p_sV) * log_p_sV).sum(-1).astype(np.float32), root_token=root,
            temperatures=TEMPERATURES,
            log_normalizers=np.stack([np.log(np.exp(log_p_sV / t).sum(-1)) for t in TEMPERATURES], -1).astype(np.float32),
        )  # fmt: skip

    def row(self, prompt: int, position: int, previous: int, root: int, temperature: float,
            rng: np.random.Generator) -> TraceRow:  # fmt: skip
        """One position: the pool and what the target does on root and nodes."""
        context = prompt % CONTEXTS
        pool = self.pool(context, previous, root)
        tokens = np.concatenate(([root], pool.tokens))
        logits = self.logits[context, tokens]
        argmax = logits.argmax(-1)
        scaled = logits / (temperature or 1.0)
        logsumexp = np.log(np.exp(scaled).sum(-1))
        drawn = (scaled + rng.gumbel(size=scaled.shape)).argmax(-1) if temperature else argmax
        return TraceRow(prompt, position, position + 5, pool, self.routing[context, tokens], drawn, argmax,
                        logits[pool.parents + 1, pool.tokens].astype(np.float32),
                        logsumexp[:, None].astype(np.float32))  # fmt: skip


def write_traces(folder: Path, prompts: int = 40, positions: int = 12, temperature: float = 0.0, seed: int = 0,
                 shard_rows: int = 100, poison: bool = False, **changes: Any) -> Path:  # fmt: skip
    """Write a traces folder; `poison` puts NaN into every drafter state, `changes` are to its manifest. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    world, rng = World(seed), np.random.default_rng(seed)
    writer = ShardWriter(folder, EXPERTS, shard_rows=shard_rows)
    for prompt in range(prompts):
        previous, root = rng.integers(VOCABULARY, size=2).tolist()
        rows = []
        for position in range(positions):
            row = world.row(prompt, position, previous, root, temperature, rng)
            if poison:
                row.pool.states[:] = np.nan
            rows.append(row)
            token = int(rng.integers(VOCABULARY)) if rng.random() < 0.1 else int(row.next_tokens[0])
            previous, root = root, token
        writer.add(prompt, rows)
    writer.flush()
    save_file({"ids": np.arange(VOCABULARY), "table": world.embedding}, folder / "embedding.safetensors")
    manifest = TraceManifest(
        complete=True,
        target=TargetRecord(id="invented", architecture="InventedMoe", fingerprint="t" * 64, moe_layers=LAYERS,
                            experts=EXPERTS, top_k=TOP_K, vocab_size=VOCABULARY, hidden_size=HIDDEN),
        drafter=DrafterRecord(id="invented", kind="eagle3", fingerprint="d" * 64, width=WIDTH), pool=SHAPE,
        drafter_temperatures=TEMPERATURES, target_temperatures=(temperature or 1.0,), temperature=temperature, seed=seed,
        stride=1, max_positions=None, max_new_tokens=positions, max_prompt_tokens=8, dtype="float32", devices=1,
        prompts_sha256="p" * 64, shards=writer.shards, versions={}, command=[],
        embedding_sha256=hashlib.sha256((folder / "embedding.safetensors").read_bytes()).hexdigest(),
    )  # fmt: skip
    (folder / "manifest.json").write_text(manifest.model_copy(update=changes).model_dump_json())
    return folder
