"""The processed distribution is transformers' own, and draws depend on seed and position alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.errors import UserError
from ecospec_runtime.sampling import Sampler, log_probability, uniform

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 12, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 1.0, "top_p": 1e-6},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_distribution_is_transformers_own(settings: dict[str, Any]) -> None:
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0)) * 3
    seen = [3, 7, 7, 11, 49]
    chain = LogitsProcessorList([TemperatureLogitsWarper(settings["temperature"])])
    if "repetition_penalty" in settings:
        chain.insert(0, RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    if "top_k" in settings:
        chain.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        chain.append(TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        chain.append(MinPLogitsWarper(settings["min_p"]))
    sampler = Sampler(GenerationConfig(**settings))
    expected = chain(torch.tensor([seen] * 20), logits.clone()).softmax(-1).numpy()
    for row in range(20):
        np.testing.assert_allclose(sampler.probabilities(logits[row].numpy(), set(seen)), expected[row], atol=1e-6)


def test_greedy_honours_the_repetition_penalty() -> None:
    sampler = Sampler(GenerationConfig(repetition_penalty=2.0))
    assert not sampler.plain_argmax
    row = np.array([1.0, 3.0, 2.0, -1.0], np.float32)
    assert sampler.choose(row, 0, set()) == 1
    assert sampler.choose(row, 0, {1}) == 2
    assert Sampler(GenerationConfig()).plain_argmax


def test_uniform_is_uniform_and_keyed() -> None:
    draws = np.array([[uniform(seed, position) for position in range(500)] for seed in range(40)])
    assert draws.min() >= 0
    assert draws.max() < 1
    counts, _ = np.histogram(draws, bins=50, range=(0, 1))
    chi2 = ((counts - 400) ** 2 / 400).sum()
    assert chi2 < 85.4  # 49 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.02
    assert uniform(3, 5) == uniform(3, 5) != uniform(5, 3)


def test_log_probability_is_raw() -> None:
    row = torch.tensor([0.3, -2.0, 4.0])
    assert log_probability(row.numpy(), 1) == pytest.approx(row.log_softmax(-1)[1].item(), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, "'num_beams' is not supported.*beams"),
        ({"do_sample": True}, "'do_sample' is not supported.*temperature"),
        ({"typical_p": 0.9}, "'typical_p' is not supported; supported keys: max_new_tokens"),
        ({"max_new_tokens": 0}, "'max_new_tokens' = 0"),
        ({"temperature": -1}, "'temperature' = -1"),
        ({"temperature": float("inf")}, "'temperature'"),
        ({"top_p": 0}, "'top_p' = 0"),
        ({"stop_strings": [""]}, "'stop_strings' holds an empty string"),
    ],
)
def test_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        GenerationConfig.from_mapping(settings)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=message):
        GenerationConfig(**settings)


def test_pool_config() -> None:
    pool = PoolConfig(depth=5, beam=2, width=3)
    assert pool.pool_size == 15
    assert pool.cut(2).depth == 2
    assert pool.cut(None) == pool
    assert pool.cut(9) == pool
    assert pool.cut(None, 0.1).cut(2, 0.05) == PoolConfig(depth=2, beam=2, width=3, min_reach=0.1)
    with pytest.raises(UserError, match="'levels' is not supported"):
        PoolConfig(levels=3)  # type: ignore[call-arg]
