"""CASES 3: speculative sampling keeps the target's distribution, whoever drafts and whatever is predicted.

Vocabulary of 8. One long text is drawn; with p_t the target's exact processed distribution at step t (one plain pass over
the finished text, transformers' own processors), the excess counts sum_t (onehot(x_t) - p_t) are asymptotically normal
with covariance sum_t (diag(p_t) - p_t p_t^T), which gives a chi-square statistic.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ecospec_runtime.acceptance import AcceptanceModel, Calibration, LogisticWeights
from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.engine import Engine
from ecospec_runtime.policies import build_policy, parse_policy
from ecospec_runtime.pool import Pool
from ecospec_runtime.scoring import Scorer
from ecospec_runtime.target import Target
from tests.oracles import chi_square, exact_distributions
from tests.train.invented import make_profile

MODEL = AcceptanceModel(
    best="head", temperature=1.0, logistic=LogisticWeights(),
    sampled={0.7: Calibration(temperature=1.0, logistic=LogisticWeights(log_p=1.5), head_share=0.8)},
)  # fmt: skip
VOCABULARY, TOKENS = 8, 700
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "cool": {"temperature": 0.7},
    "nucleus": {"temperature": 1.0, "top_p": 0.9},
    "top-k": {"temperature": 1.0, "top_k": 3},
}


@pytest.fixture(scope="module")
def target(save_target: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = save_target(
        tmp_path_factory.mktemp("eight"), seed=2, vocab_size=VOCABULARY, num_hidden_layers=3, initializer_range=0.15
    )
    return Target.from_pretrained(folder)


def lying_predictor() -> Any:
    """Sure of itself and wrong about everything; now and then it returns NaN."""
    rng = np.random.default_rng(0)

    def predict(pool: Pool, embed: Any, routing: bool = True) -> Any:
        logits = np.where(pool.ranks == pool.ranks.max(), 20.0, -20.0)  # praises the worst candidates
        logits[rng.random(len(pool)) < 0.1] = np.nan
        routing = rng.standard_normal((len(pool) + 1, 3, 12)) * 100
        return SimpleNamespace(
            routing_logits=routing.astype(np.float32),
            acceptance_logits=np.concatenate([[0.0], logits]).astype(np.float32),
        )

    shapes = SimpleNamespace(layers=3, experts=12, top_k=2)
    return SimpleNamespace(shapes=shapes, predict=predict, acceptance=MODEL)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_text_follows_the_targets_distribution(target: Target, stub_drafter: Any, name: str) -> None:
    """An adversarial drafter insists on the same three tokens; the predictor praises the worst of them."""
    settings, prompt = SETTINGS[name], [1, 5, 3, 2]
    drafter = stub_drafter(lambda context, path: [7, 0, 4], confidence=0.99)
    profile = make_profile(fixed_ms=1.0, per_token_ms=0.01, per_expert_ms=0.001, plain_ms=1.2)
    scorer = Scorer(lying_predictor(), "head", target.moe_layers, target.experts)
    policy = build_policy(parse_policy("ratio:budget=6" if name in ("plain", "top-k") else "throughput:pause=0"))
    engine = Engine(target, drafter, scorer, policy, profile, PoolConfig(depth=3, beam=2, width=3))
    config = GenerationConfig(max_new_tokens=TOKENS, eos_token_id=(), seed=11, **settings)
    stream = engine.generate(prompt, config)
    text = [token.id for token in stream]
    assert stream.statistics.accepted > 20, "the drafts must matter for the test to mean anything"

    distributions = exact_distributions(target, prompt, text, settings)
    assert np.all(distributions[np.arange(TOKENS), text] > 0)
    assert chi_square(text, distributions) > 1e-3
    # The test must be able to fail: another temperature is told apart.
    other = exact_distributions(target, prompt, text, {"temperature": 2.5})
    assert chi_square(text, other) < 1e-3
