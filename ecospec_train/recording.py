"""From one prompt to its trace rows: follow the target, draft at every position, verify whole pools, many positions a pass.

Legend of shapes: n nodes of a pool, N tokens of prompt and trajectory, F drafter features, M rows of a verification pass, P cached
rows, V vocabulary, L MoE layers, K top-k, T target temperatures.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ecospec_runtime.cache import TargetCache
from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.drafters.base import Drafter
from ecospec_runtime.pool import Ints, Pool
from ecospec_runtime.sampling import Sampler
from ecospec_runtime.target import Target
from ecospec_train.traces import TraceRow

ROWS_PER_PASS = 768
ROWS_PER_CHUNK = 32
LOGITS_PER_PASS = 1 << 26  # at most 256 MB of float32 logits


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


@dataclass
class Trajectory:
    """A prompt with the target's own continuation."""

    tokens: list[int]  # [N]; the last one has not been through the target
    prompt_length: int
    ended: bool  # the last token is an end of sequence
    features: Tensor  # [N - 1, F] of every token but the last
    cache: TargetCache  # N - 1 rows

    @property
    def positions(self) -> int:
        """Generated tokens that can be a root: all but an end of sequence."""
        return len(self.tokens) - self.prompt_length - int(self.ended)


def follow_target(
    target: Target, prompt: list[int], new_tokens: int, sampler: Sampler, aux: tuple[int, ...]
) -> Trajectory:
    """Decode up to `new_tokens` tokens one by one, as the engine does without speculation, keeping cache and features."""
    cache, tokens, features = target.new_cache(), list(prompt), []
    ends, feed, ended = target.eos_token_ids(), prompt, False
    while not ended and len(tokens) < len(prompt) + new_tokens:
        past = len(cache)
        feed_n = torch.tensor(feed, device=target.device)
        positions_n = torch.arange(past, past + len(feed), device=target.device)
        output = target.forward(feed_n, positions_n, None, cache, aux_layers=aux, last_only=True)
        features.append(output.hidden[:, :0] if output.aux is None else output.aux)
        assert output.logits is not None
        feed = [sampler.choose(output.logits[-1].numpy(force=True), len(tokens), set())]
        tokens += feed
        ended = feed[0] in ends
    return Trajectory(tokens, len(prompt), ended, torch.cat(features), cache)


class Recorder:
    """Records prompts with one target and drafter."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        pool: PoolConfig,
        *,
        temperature: float,
        drafter_temperatures: tuple[float, ...],
        target_temperatures: tuple[float, ...],
    ) -> None:
        self._target, self._drafter, self._pool = target, drafter, pool
        self._temperature = temperature
        self._drafter_temperatures, self._target_temperatures = drafter_temperatures, target_temperatures
        rows = min(ROWS_PER_PASS, LOGITS_PER_PASS // target.vocab_size)
        self._batch = max(1, rows // (pool.pool_size + 1))
        self.clock = Clock()

    def record(self, prompt_id: int, prompt: list[int], new_tokens: int, stride: int, seed: int) -> list[TraceRow]:
        """Rows of one prompt at positions 0, stride, 2 * stride, ... of the target's continuation."""
        sampler = Sampler(GenerationConfig(temperature=self._temperature, seed=seed))
        with self.clock.phase("generate"):
            trajectory = follow_target(self._target, prompt, new_tokens, sampler, self._drafter.aux_layers)
        positions = list(range(0, trajectory.positions, stride))
        if not positions:
            return []
        with self.clock.phase("draft"):
            sequence = self._drafter.start()
            tokens = torch.tensor(trajectory.tokens[1:], device=self._target.device)
            self._drafter.extend(sequence, tokens, trajectory.features)
        rows: list[TraceRow] = []
        for start in range(0, len(positions), self._batch):
            batch = positions[start : start + self._batch]
            with self.clock.phase("draft"):
                roots = [trajectory.prompt_length + i - 1 for i in batch]  # drafter row j holds token j + 1
                pools = self._drafter.expand_many(sequence, roots, self._pool, self._drafter_temperatures, sampler)
            rows += self._verify(prompt_id, trajectory, batch, pools, sampler)
        return rows

    def _verify(
        self, prompt_id: int, trajectory: Trajectory, positions: list[int], pools: list[Pool], sampler: Sampler
    ) -> list[TraceRow]:
        """One pass over the whole pools of several positions; the cache is left as it was."""
        target, cache = self._target, trajectory.cache
        past, contexts = len(cache), [trajectory.prompt_length + i for i in positions]
        starts = np.cumsum([0, *(len(pool) + 1 for pool in pools)])
        tokens_M = np.concatenate([np.r_[pool.root_token, pool.tokens] for pool in pools])
        places_M = np.concatenate(
            [context + np.r_[0, pool.depths] for context, pool in zip(contexts, pools, strict=True)]
        )
        with self.clock.phase("mask"):
            mask = torch.from_numpy(flat_mask(pools, contexts, past)).to(target.device)
        with self.clock.phase("verify"):
            output = target.forward(
                torch.from_numpy(tokens_M).to(target.device),
                torch.from_numpy(places_M).to(target.device),
                mask,
                cache,
                routing=True,
            )
            assert output.logits is not None
            assert output.routing_by_weight is not None
            routing = output.routing_by_weight.numpy(force=True)
            target.commit(cache, past, [])
        with self.clock.phase("read"):
            argmax = output.logits.argmax(-1)
            parents_M = np.concatenate(
                [begin + np.r_[0, pool.parents + 1] for begin, pool in zip(starts, pools, strict=False)]
            )
            logits_of_tokens = output.logits[torch.from_numpy(parents_M), torch.from_numpy(tokens_M)].numpy(force=True)
            logsumexp = log_normalizers(output.logits, self._target_temperatures)
            chosen = self._choose(output.logits, argmax, places_M, sampler)
            rows = []
            for i, (position, context, pool) in enumerate(zip(positions, contexts, pools, strict=True)):
                own = slice(int(starts[i]), int(starts[i + 1]))
                rows.append(
                    TraceRow(
                        prompt_id=prompt_id,
                        position=position,
                        context=context,
                        pool=pool,
                        routing=routing[own],
                        next_tokens=chosen[own],
                        argmax=argmax[own].numpy(force=True),
                        token_logits=logits_of_tokens[own][1:],
                        logsumexp=logsumexp[own],
                    )
                )
        return rows

    @staticmethod
    def _choose(logits_MV: Tensor, argmax_M: Tensor, places_M: Ints, sampler: Sampler) -> Ints:
        """What the verification rule emits after each row: the token for the place after the row's own."""
        if sampler.plain_argmax:
            return argmax_M.numpy(force=True)
        rows = logits_MV.numpy(force=True)
        return np.array([sampler.choose(row, int(place) + 1, set()) for row, place in zip(rows, places_M, strict=True)])


def flat_mask(pools: list[Pool], contexts: list[int], past: int) -> np.ndarray:
    """Bool [M, past + M] for whole pools side by side: a row sees the cached rows before its own root, the root, its ancestors."""
    starts = np.cumsum([0, *(len(pool) + 1 for pool in pools)])
    mask = np.zeros((starts[-1], past + starts[-1]), bool)
    for begin, context, pool in zip(starts, contexts, pools, strict=False):
        own = np.eye(len(pool) + 1, dtype=bool)
        for node, parent in enumerate(pool.parents.tolist(), 1):
            own[node] |= own[parent + 1]
        rows = slice(begin, begin + len(own))
        mask[rows, :context] = True
        mask[rows, past + begin : past + begin + len(own)] = own
    return mask


def log_normalizers(logits_MV: Tensor, temperatures: tuple[float, ...]) -> np.ndarray:
    """logsumexp of logits / T for each temperature: [M, T]. A few rows at a time stay in the processor's cache."""
    out = np.zeros((len(logits_MV), len(temperatures)), np.float32)
    for start in range(0, len(logits_MV), ROWS_PER_CHUNK):
        rows = logits_MV[start : start + ROWS_PER_CHUNK]
        for column, t in enumerate(temperatures):
            values = torch.logsumexp(rows if t == 1.0 else rows / t, dim=-1)
            out[start : start + len(rows), column] = values.numpy(force=True)
    return out
