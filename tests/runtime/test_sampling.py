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

from ecospec_kernels import dispatch
from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.errors import UserError
from ecospec_runtime.sampling import Sampler, log_probability

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


def test_noise_is_gumbel_and_keyed() -> None:
    def gumbels(seed: int, position: int, count: int) -> Any:
        return dispatch.noise(seed, position, count, 1.0)

    draws = np.array([[gumbels(seed, position, 50) for position in range(40)] for seed in range(30)], np.float64)
    counts, _ = np.histogram(np.exp(-np.exp(-draws)), bins=60, range=(0, 1))  # uniform, if these are Gumbel
    assert counts.sum() == draws.size
    assert ((counts - 1000) ** 2 / 1000).sum() < 98.3  # 59 degrees of freedom, p = 0.001
    for axis in range(3):  # neighbours in seed, position and token
        one, other = np.moveaxis(draws, axis, 0)[:-1].ravel(), np.moveaxis(draws, axis, 0)[1:].ravel()
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.02
    assert (gumbels(3, 5, 9) == gumbels(3, 5, 90)[:9]).all()
    assert (gumbels(3, 5, 9) != gumbels(5, 3, 9)).all()
    assert np.isfinite(gumbels(2**63 - 1, 2**40, 5)).all()


@pytest.mark.parametrize("settings", SETTINGS)
def test_draws_follow_the_distribution(settings: dict[str, Any]) -> None:
    """2,000 positions of one text with the same logits."""
    logits = np.random.default_rng(1).normal(size=6) * 1.5
    sampler = Sampler(GenerationConfig(seed=4, **settings))
    expected = sampler.probabilities(logits, {2}) * 2000
    drawn = np.bincount([sampler.choose(logits, position, {2}) for position in range(2000)], minlength=6)
    assert not drawn[expected == 0].any()
    likely = expected > 5
    assert ((drawn - expected)[likely] ** 2 / expected[likely]).sum() < 20.5  # 5 degrees of freedom, p = 0.001


def test_a_draw_is_the_argmax_of_logits_with_the_drafters_noise() -> None:
    """Whatever a drafter asked for before, and for how many tokens."""
    logits = np.random.default_rng(2).normal(size=200).astype(np.float32)
    sampler = Sampler(GenerationConfig(temperature=0.6, seed=8))
    for position in range(60):
        part = sampler.noise(position, 90)
        drawn = sampler.choose(logits, position, set())
        noise = sampler.noise(position, 200)
        assert drawn == (logits + noise).argmax() == Sampler(sampler.config).choose(logits, position, set())
        np.testing.assert_array_equal(part, noise[:90])
    assert not Sampler(GenerationConfig()).noise(3, 5).any()


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
