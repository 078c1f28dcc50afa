"""Replay against the engine itself: the same passes, the same sets, the same experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ecospec_runtime.acceptance import AcceptanceModel, LogisticWeights
from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.engine import Engine
from ecospec_runtime.policies import build_policy, parse_policy
from ecospec_runtime.pool import Pool
from ecospec_runtime.predictor import Prediction
from ecospec_runtime.scoring import Scorer
from ecospec_runtime.target import Target
from ecospec_runtime.verify import tree_mask
from ecospec_train.replay import ReplayRow, ReplayRows, pack_row, replay
from tests.train.invented import make_profile

SHAPE, LENGTH = PoolConfig(depth=3, beam=2, width=3), 24
PROMPTS = [[5, 9, 40, 3], [60, 61, 62]]


class FixedPredictor:
    """Arbitrary but fixed opinions about each token."""

    shapes = SimpleNamespace(layers=7, experts=12, top_k=2)
    acceptance = AcceptanceModel(best="head", temperature=1.0, logistic=LogisticWeights(bias=1.0))

    def predict(self, pool: Pool, embed: object) -> Prediction:
        tokens = np.concatenate(([pool.root_token], pool.tokens))[:, None, None]
        routing = np.sin(tokens * 3.7 + np.arange(84).reshape(1, 7, 12) ** 2)
        return Prediction(routing.astype(np.float32), np.concatenate(([0.0], pool.log_probs + 1.5)).astype(np.float32))


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir)


@pytest.fixture(scope="module")
def texts(target: Target) -> list[list[int]]:
    """Each prompt with the target's own greedy continuation, longer than any pool reaches."""
    engine, settings = Engine(target), GenerationConfig(max_new_tokens=LENGTH + 6, eos_token_id=())
    return [prompt + [token.id for token in engine.generate(prompt, settings)] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def drafter(texts: list[list[int]], stub_drafter: Callable[..., Any]) -> Any:
    """Mostly right first, sometimes second, sometimes never."""

    def propose(context: list[int], path: list[int]) -> list[int]:
        known = context + path
        ahead = [t[len(known) + 1] for t in texts if t[1 : len(known) + 1] == known and len(t) > len(known) + 1]
        right, mood = (ahead or [7])[0], sum(known) % 5
        wrong = [(right + shift) % 96 for shift in (1, 2, 3)]
        return wrong if mood == 0 else [wrong[0], right, wrong[1]] if mood < 3 else [right, *wrong[:2]]

    return stub_drafter(propose)


@pytest.fixture(scope="module")
def rows(target: Target, texts: list[list[int]], drafter: Any) -> ReplayRows:
    """What a harvest records at every position: the pool, and routing and argmax of one pass over all of it."""
    scorer = Scorer(FixedPredictor(), "head", 7, 12)  # type: ignore[arg-type]
    prompts = [
        [record(target, drafter, scorer, text[: len(prompt) + position]) for position in range(LENGTH)]
        for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    return ReplayRows(prompts, 7, SHAPE, "head", FixedPredictor.acceptance)


def record(target: Target, drafter: Any, scorer: Scorer, known: list[int]) -> ReplayRow:
    sequence, past = drafter.start(), len(known) - 1
    sequence.tokens = known[1:]
    pool = drafter.expand(sequence, known[-1], SHAPE, (1.0,))
    cache = target.new_cache()
    target.forward(torch.tensor(known[:-1]), torch.arange(past), None, cache, logits=False)
    mask = tree_mask((pool.parents + 1).tolist(), past)
    tokens = torch.tensor([known[-1], *pool.tokens.tolist()])
    depths = torch.tensor([0, *pool.depths.tolist()])
    output = target.forward(tokens, depths + past, mask, cache, routing=True)
    assert output.logits is not None
    assert output.routing is not None
    shard = SimpleNamespace(
        context=[past], pool=lambda row: pool, routing_of=lambda row: output.routing.numpy(),  # type: ignore[union-attr]
        next_tokens_of=lambda row: output.logits.argmax(-1).numpy(),  # type: ignore[union-attr]
    )  # fmt: skip
    return pack_row(shard, 0, scorer, lambda tokens: np.zeros((len(tokens), 1), np.float32))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["off", "confidence:budget=4,acceptance=raw", "confidence:budget=3,acceptance=logistic,depth=2",
     "ratio:budget=5,acceptance=head", "throughput:price=0.9,acceptance=head", "throughput:price=0.5,acceptance=raw,depth=2",
     "confidence:budget=6,acceptance=head,min_reach=0.2", "throughput:price=0.7,acceptance=raw,node_experts=1.2,min_reach=0.2", "throughput:price=0.9,acceptance=head,min_reach=0.12,pause=0",
     "ratio:budget=5,acceptance=raw,min_reach=0.55", "throughput:price=2.5,acceptance=logistic,min_reach=0.3,pause=2"],
)  # fmt: skip
def test_replay_equals_live_decoding(target: Target, drafter: Any, rows: ReplayRows, text: str) -> None:
    spec, profile = parse_policy(text), make_profile(per_expert_ms=0.02)
    scorer = Scorer(FixedPredictor(), spec.acceptance_kind("head"), 7, 12)  # type: ignore[arg-type]
    engine = Engine(target, drafter, scorer, build_policy(spec), profile, SHAPE, depth=spec.depth,
                    min_reach=spec.min_reach, record_routing=True)  # fmt: skip
    accepted = 0
    for prompt, recorded in zip(PROMPTS, rows.prompts, strict=True):
        result = replay(spec, replace(rows, prompts=[recorded]), profile)
        stream = engine.generate(prompt, GenerationConfig(max_new_tokens=LENGTH + 1, eos_token_id=()))
        assert len(list(stream)) == LENGTH + 1
        live = stream.statistics
        # The last token, if the replay stopped just before it, takes live decoding a plain pass more.
        assert live.passes == result.passes + (result.tokens == LENGTH)
        if result.tokens != LENGTH:
            assert live.drafts == result.drafts
        assert live.verified == round(result.nodes * result.passes)
        assert live.accepted == result.tokens - result.passes
        unions = [len(layer.unique()) for layers in live.recorded[: result.passes] for layer in layers]
        assert result.experts_per_layer == pytest.approx(np.mean(unions))
        accepted += live.accepted
    assert (accepted > 5) == (text != "off")
