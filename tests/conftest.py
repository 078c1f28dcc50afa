"""Shared fixtures: the tiny target and its EAGLE-3 head, and drafters with known behaviour."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = os.environ.get("TRITON_INTERPRET", "1")  # read when Triton is first imported

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton, whose functions remember it

from ecospec_runtime.config import PoolConfig
from ecospec_runtime.pool import Pool
from ecospec_runtime.sampling import Sampler
from tests.models import TINY, save_tiny_drafter, save_tiny_target

torch.set_num_threads(1)  # the models are tiny: a second thread only waits, and waits badly when cores are shared


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen3-MoE: vocabulary 96, hidden 32, 7 layers, 12 experts, top-2, float32."""
    return save_tiny_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_drafter_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random EAGLE-3 head for `tiny_target_dir`: draft vocabulary 48 with an offset map."""
    return save_tiny_drafter(tmp_path_factory.mktemp("tiny") / "drafter")


class StubSequence:
    """What a stub drafter was told: every token but the prompt's first."""

    def __init__(self) -> None:
        self.tokens: list[int] = []


class StubDrafter:
    """A drafter whose proposals come from a function `propose(context, path) -> tokens`, best first.

    `context` is every token it was told, root last; `path` the tokens from the root to the node that is expanded.
    Checks on the way that the engine feeds it every row exactly once.
    """

    kind = "stub"
    features = "drafter_state"
    width = 4
    aux_layers = (0, 2, 3)
    fingerprint = "stub"

    def __init__(self, propose: Callable[[list[int], list[int]], list[int]], confidence: float = 0.6):
        self.propose, self.confidence = propose, confidence
        self.expansions = 0

    def check(self, target: Any) -> None:
        """Fits every target."""

    def start(self) -> StubSequence:
        """An empty sequence."""
        return StubSequence()

    def extend(self, sequence: StubSequence, tokens: torch.Tensor, features: torch.Tensor) -> None:
        """Rows known from the target."""
        assert features.shape == (len(tokens), 3 * TINY["hidden_size"]), "one feature row per token"
        sequence.tokens += tokens.tolist()

    def expand(
        self, sequence: StubSequence, root_token: int, config: PoolConfig, temperatures: tuple[float, ...] = (),
        sampler: Sampler | None = None,
    ) -> Pool:  # fmt: skip
        """A pool by the same beam rule as a real drafter's; it does not guess draws."""
        assert sequence.tokens[-1] == root_token, "the root's row must have been given before expanding"
        self.expansions += 1
        nodes: list[tuple[int, int, int, int, float, int]] = []  # token, parent, depth, rank, log_prob, state row
        paths: dict[int, list[int]] = {-1: []}
        reach = {-1: 0.0}
        level, states, levels = [-1], 1, 1
        least = np.log(np.float32(config.min_reach)) if config.min_reach else -np.inf
        for depth in range(1, config.depth + 1):
            if not level:
                break
            children = []
            for parent in sorted(level, key=lambda i: -reach[i])[: config.beam]:
                for rank, token in enumerate(self.propose(sequence.tokens, paths[parent])[: config.width]):
                    log_prob = math.log(self.confidence) + rank * math.log(1 - self.confidence)
                    children.append((reach[parent] + log_prob, token, parent, rank, log_prob, states))
                states += 1
            children.sort(key=lambda child: -child[0])
            children = [child for child in children if np.float32(child[0]) >= least]
            level, levels = [], depth
            for total, token, parent, rank, log_prob, row in children[: config.width]:
                index = len(nodes)
                nodes.append((token, parent, depth, rank, log_prob, row))
                paths[index], reach[index] = [*paths[parent], token], total
                level.append(index)
        columns = list(zip(*nodes, strict=True)) if nodes else [()] * 6
        integers = [np.array(column, np.int64) for column in columns]
        return Pool(
            tokens=integers[0], parents=integers[1], depths=integers[2], ranks=integers[3],
            log_probs=np.array(columns[4], np.float32), state_rows=integers[5],
            states=np.zeros((states, self.width), np.float32), entropies=np.ones(states, np.float32),
            root_token=root_token, temperatures=tuple(temperatures), levels=levels,
            log_normalizers=np.zeros((states, len(temperatures)), np.float32),
        )  # fmt: skip

    def expand_many(
        self, sequence: StubSequence, roots: list[int], config: PoolConfig, temperatures: tuple[float, ...] = (),
        sampler: Sampler | None = None,
    ) -> list[Pool]:  # fmt: skip
        """One pool per row, as it would have been with that row the last."""
        pools = []
        for root in roots:
            known = StubSequence()
            known.tokens = sequence.tokens[: root + 1]
            pools.append(self.expand(known, known.tokens[-1], config, temperatures))
        return pools


def oracle_drafter(texts: list[list[int]], right: bool = True, vocabulary: int = 96) -> StubDrafter:
    """Knows the full texts (prompt + continuation): proposes the right token first, or never."""

    def propose(context: list[int], path: list[int]) -> list[int]:
        known = context + path
        following = next(
            (t[len(known) + 1] for t in texts if t[1 : len(known) + 1] == known and len(t) > len(known) + 1), 0
        )
        return [(following + shift) % vocabulary for shift in ((0, 1, 2) if right else (1, 2, 3))]

    return StubDrafter(propose, confidence=0.6 if right else 0.99)


def random_drafter(seed: int = 0, vocabulary: int = 96) -> StubDrafter:
    """Proposes distinct random tokens."""
    rng = random.Random(seed)
    return StubDrafter(lambda context, path: rng.sample(range(vocabulary), min(6, vocabulary)))


@pytest.fixture(scope="session")
def stub_drafter() -> type[StubDrafter]:
    """The class of drafters that propose by a function."""
    return StubDrafter


@pytest.fixture(scope="session")
def drafters() -> Callable[[str, list[list[int]]], StubDrafter]:
    """Factory of drafters by kind: `oracle` (always right about the given texts), `adversary` (never), `random`."""

    def make(kind: str, texts: list[list[int]]) -> StubDrafter:
        return random_drafter() if kind == "random" else oracle_drafter(texts, right=kind == "oracle")

    return make


@pytest.fixture(scope="session")
def save_target() -> Callable[..., Path]:
    """`save_tiny_target`: save a random target with changes to its config."""
    return save_tiny_target
