"""Acceptance models: values against first principles, and every kind of garbage a predictor or drafter may return."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_kernels.accept_tree.reference import sibling_softmax
from ecospec_kernels.predict_pool.inputs import scalars_of
from ecospec_runtime.acceptance import (
    KINDS,
    TEMPERATURES,
    AcceptanceModel,
    Calibration,
    LogisticWeights,
    acceptance,
    logistic_logits,
)
from ecospec_runtime.errors import UserError
from ecospec_runtime.pool import Pool

MODEL = AcceptanceModel(best="head", temperature=0.5, logistic=LogisticWeights(log_p=2.0, rank=-0.5, bias=0.25))
CONDITIONED = MODEL.model_copy(
    update={
        "sampled": {
            0.8: Calibration(
                temperature=0.7, logistic=LogisticWeights(log_p=1.0, entropy=0.5, bias=0.75), head_share=0.5
            )
        }
    }
)
ODD = st.floats(width=32, allow_nan=True, allow_infinity=True)


def small_pool(log_probs: list[float] | None = None) -> Pool:
    """Root with children 0 and 1; node 0 with children 2 and 3. Two drafter distributions over eight tokens."""
    logits = np.random.default_rng(0).normal(size=(3, 8)) * 2
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    tokens, rows = np.array([3, 5, 1, 2]), np.array([1, 1, 2, 2])
    found = log_p[rows, tokens] if log_probs is None else np.array(log_probs)
    return Pool(
        tokens=tokens, parents=np.array([-1, -1, 0, 0]), depths=np.array([1, 1, 2, 2]), ranks=np.array([0, 1, 0, 1]),
        log_probs=found.astype(np.float32), state_rows=rows, states=np.zeros((3, 4), np.float32),
        entropies=np.array([0.5, 1.0, 2.0], np.float32), root_token=0, temperatures=TEMPERATURES,
        log_normalizers=np.stack([np.log(np.exp(log_p / t).sum(-1)) for t in TEMPERATURES], -1).astype(np.float32),
    )  # fmt: skip


def test_raw_is_the_drafters_probability() -> None:
    pool = small_pool([-0.5, -np.inf, np.nan, 0.3])
    assert acceptance(pool, "raw", None) == pytest.approx([np.exp(-0.5), 0.0, 0.0, 1.0])


def test_temperature_is_the_softmax_of_the_drafters_logits_at_tau() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 8)) * 2
    expected = np.exp(logits / 0.5) / np.exp(logits / 0.5).sum(-1, keepdims=True)
    pool = small_pool()
    assert acceptance(pool, "temperature", MODEL) == pytest.approx(expected[pool.state_rows, pool.tokens], rel=1e-4)


def test_logistic_is_linear_in_log_p_rank_depth_and_entropy_and_shared_by_siblings() -> None:
    weights = LogisticWeights(log_p=1.0, rank=2.0, depth=-1.0, entropy=0.5, bias=0.1)
    pool = small_pool()
    scalars = np.stack([pool.log_probs, pool.ranks, pool.depths, pool.entropies[pool.state_rows]], 1)
    odds = np.exp(scalars @ [1.0, 2.0, -1.0, 0.5] + 0.1)
    model = MODEL.model_copy(update={"logistic": weights})
    shared = np.repeat([odds[:2].sum(), odds[2:].sum()], 2)
    assert acceptance(pool, "logistic", model) == pytest.approx(odds / (1 + shared), rel=1e-5)


def test_each_sampling_temperature_has_its_own_temperature_and_logistic() -> None:
    """Between fitted ones the logistic is interpolated; beyond them, and for tau, the nearest serves."""
    assert MODEL.at(0.8) is MODEL, "fitted at one temperature only: it serves at all"
    assert CONDITIONED.at(0.0).logistic == MODEL.logistic
    between = CONDITIONED.at(0.2).logistic
    assert between.vector() == pytest.approx([1.75, -0.375, 0.0, 0.125])
    assert between.bias == pytest.approx(0.375)
    assert CONDITIONED.at(3.0).logistic == CONDITIONED.at(0.8).logistic == CONDITIONED.sampled[0.8].logistic
    assert CONDITIONED.at(0.2).head_share == pytest.approx(0.875)
    assert [CONDITIONED.at(t).temperature for t in (0.0, 0.3, 0.5, 2.0)] == [0.5, 0.5, 0.7, 0.7]
    assert AcceptanceModel.model_validate_json(CONDITIONED.model_dump_json()) == CONDITIONED


def test_the_head_corrects_the_logistic_of_the_temperature() -> None:
    """What the network adds to the one it was trained on it adds to the other, or the share of it that helps there."""
    pool, correction = small_pool(), np.array([0.3, -0.2, 0.0, 1.0], np.float32)
    network = logistic_logits(scalars_of(pool)[1:], MODEL.logistic) + correction
    for sampling, weights, share in ((0.0, MODEL.logistic, 1.0), (0.8, CONDITIONED.sampled[0.8].logistic, 0.5)):
        expected = sibling_softmax(logistic_logits(scalars_of(pool)[1:], weights) + share * correction, pool.parents)
        found = acceptance(pool, "head", CONDITIONED.at(sampling), network)
        assert found == pytest.approx(expected, rel=1e-5)


def test_siblings_share_a_softmax_with_none_of_these() -> None:
    found = sibling_softmax(np.array([1.0, 2.0, -1.0], np.float32), np.array([-1, -1, 0]))
    e = np.exp([1.0, 2.0, -1.0])
    assert found == pytest.approx([e[0] / (1 + e[0] + e[1]), e[1] / (1 + e[0] + e[1]), e[2] / (1 + e[2])])


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=4, max_size=4))
def test_siblings_sum_to_at_most_one(logits: list[float]) -> None:
    found = acceptance(small_pool(), "head", MODEL, np.array(logits, np.float32))
    assert found[:2].sum() <= 1 + 1e-6
    assert found[2:].sum() <= 1 + 1e-6


def test_an_unknown_estimate_falls_back_to_the_drafter_and_spares_its_siblings() -> None:
    pool = small_pool()
    logits = np.array([np.nan, 2.0, np.inf, -np.inf], np.float32)
    own = np.exp(pool.log_probs)
    found = acceptance(pool, "head", MODEL, logits)
    assert found == pytest.approx([own[0], np.exp(2) / (1 + np.exp(2)), own[2], own[3]])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(KINDS), st.lists(ODD, min_size=8, max_size=8), st.sampled_from([0.0, 0.5]))
def test_garbage_never_leaves_the_unit_interval(kind: str, values: list[float], sampling: float) -> None:
    pool = small_pool(values[4:])
    found = acceptance(pool, kind, CONDITIONED.at(sampling), np.array(values[:4], np.float32))  # type: ignore[arg-type]
    assert found.dtype == np.float32
    assert ((found >= 0) & (found <= 1)).all()


def test_an_empty_pool_has_no_acceptance() -> None:
    none = np.zeros(0, np.int64)
    pool = Pool(
        none, none, none, none, np.zeros(0, np.float32), none, np.zeros((1, 4), np.float32), np.zeros(1, np.float32), 0
    )
    assert acceptance(pool, "raw", None).shape == (0,)
    assert acceptance(pool, "head", MODEL, np.zeros(0, np.float32)).shape == (0,)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "acceptance.json"),
        ("{", "acceptance.json"),
        ('{"best": "raw", "temperature": -1, "logistic": {}}', "temperature"),
        ('{"best": "magic", "temperature": 1, "logistic": {}}', "best"),
        ('{"best": "raw", "temperature": 1, "logistic": {"log_p": NaN}}', "logistic.log_p"),
        ('{"best": "raw", "temperature": 1, "logistic": {}, "extra": 1}', "extra"),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path: Path, text: str | None, named: str) -> None:
    if text is not None:
        (tmp_path / "acceptance.json").write_text(text)
    with pytest.raises(UserError, match=named) as caught:
        AcceptanceModel.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_file_reads_back(tmp_path: Path) -> None:
    (tmp_path / "acceptance.json").write_text(MODEL.model_dump_json())
    assert AcceptanceModel.load(tmp_path) == MODEL


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    for version in (2, 4):
        text = f'{{"schema_version": {version}, "best": "raw", "temperature": 1, "logistic": {{}}}}'
        (tmp_path / "acceptance.json").write_text(text)
        with pytest.raises(UserError, match=r"schema_version.*fit"):
            AcceptanceModel.load(tmp_path)
