"""The n-gram drafter: settings, the index against a search of the whole text, and the contract of its pools."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_runtime.config import PoolConfig
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.drafters.ngram import RECENT, NgramConfig, NgramDrafter, NgramIndex, Noise, parse_ngram
from ecospec_runtime.errors import UserError
from ecospec_runtime.pool import Pool
from ecospec_train.replay_pools import Cut
from ecospec_train.replay_rows import along_paths, least_log_reach
from tests.pools import check_noise

VOCABULARY, HIDDEN = 7, 3
TARGET: Any = SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCABULARY, layers=5)
NODES = ("tokens", "parents", "depths", "ranks", "log_probs", "state_rows")

texts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=60)
orders = st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda pair: NgramConfig(min=pair[0], max=sum(pair)))
shapes = st.builds(PoolConfig, depth=st.integers(1, 4), beam=st.integers(1, 3), width=st.integers(1, 4),
                   min_reach=st.sampled_from([0.0, 0.05, 0.4]))  # fmt: skip


def told(config: NgramConfig, text: list[int]) -> tuple[NgramDrafter, Any]:
    """A drafter and a sequence that holds a text; row j's feature is [j, j, j]."""
    drafter = NgramDrafter(config, TARGET)
    sequence = drafter.start()
    drafter.extend(sequence, torch.tensor(text), torch.arange(len(text)).float()[:, None].expand(-1, HIDDEN))
    return drafter, sequence


def searched(config: NgramConfig, text: list[int], path: list[int]) -> np.ndarray:
    """The whole distribution [V] after text and path, by looking through the text for each context, shortest first."""
    p = np.full(VOCABULARY, 1 / VOCABULARY)
    known = text + path
    for n in range(config.min, min(config.max, len(known)) + 1):
        context = known[len(known) - n :]
        followers = [text[i + n] for i in range(len(text) - n) if text[i : i + n] == context][-RECENT:]
        if not followers:
            break
        counts = Counter(followers)
        p *= 0.5 * len(counts) / len(followers)
        for token, count in counts.items():
            p[token] += (count - 0.5) / len(followers)
    return p


@settings(deadline=None)
@given(texts, orders, st.lists(st.integers(0, VOCABULARY - 1), max_size=4))
def test_the_index_equals_a_search_of_the_text(text: list[int], config: NgramConfig, path: list[int]) -> None:
    index = NgramIndex(config, VOCABULARY)
    for token in text:
        index.read(token)
    found, expected = index.after(path), searched(config, text, path)
    whole = np.full(VOCABULARY, np.exp(found.log_other) if found.others else np.nan)
    whole[found.tokens] = np.exp(found.log_probs)
    np.testing.assert_allclose(whole, expected, rtol=1e-12)
    assert np.all(np.diff(found.log_probs) <= 0)
    assert found.entropy() == pytest.approx(-(expected * np.log(expected)).sum())
    assert found.log_normalizer(0.5) == pytest.approx(np.log((expected**2).sum()))


def test_a_long_text_counts_the_latest_occurrences_only() -> None:
    index = NgramIndex(NgramConfig(max=1), VOCABULARY)
    for token in [0, 1] * 50 + [0, 2] * RECENT + [0]:
        index.read(token)
    assert index.after([]).tokens == [2], "what followed further back is forgotten"


@settings(deadline=None)
@given(texts, orders)
def test_noise_moves_the_distribution_as_it_moves_logits(text: list[int], config: NgramConfig) -> None:
    values = np.random.default_rng(len(text)).gumbel(size=VOCABULARY).astype(np.float32)
    index = NgramIndex(config, VOCABULARY)
    for token in text:
        index.read(token)
    found = index.after([])
    noisy = found.with_noise(Noise(values, float(np.exp(values.astype(np.float64)).sum())))
    whole = searched(config, text, []) * np.exp(values.astype(np.float64))
    np.testing.assert_allclose(np.exp(noisy.log_probs), (whole / whole.sum())[noisy.tokens], rtol=1e-6)
    assert np.all(np.diff(noisy.log_probs) <= 0)
    assert sorted(noisy.tokens) == sorted(found.tokens)
    assert noisy.log_normalizer(1.0) == pytest.approx(0.0, abs=1e-9)
    assert found.with_noise(None) is found


def test_a_pool_guesses_the_draw() -> None:
    text = [5, 1, 5, 2, 5, 3, 5, 4, 5]
    check_noise(*told(NgramConfig(max=1), text), text)


@settings(deadline=None)
@given(texts, orders, shapes)
def test_pools_keep_the_contract(text: list[int], config: NgramConfig, shape: PoolConfig) -> None:
    drafter, sequence = told(config, text)
    pool = drafter.expand(sequence, text[-1], shape, (0.5, 1.0))
    assert pool.root_token == text[-1]
    assert pool.states.tolist() == [[len(text) - 1.0] * HIDDEN], "the feature of the root's row, once"
    assert len(pool.entropies) == len(pool.log_normalizers) == pool.expanded + 2
    np.testing.assert_allclose(pool.log_normalizers[:, 1], 0.0, atol=1e-6)
    paths: list[list[int]] = []
    for i, parent in enumerate(pool.parents.tolist()):
        assert parent < i
        assert pool.depths[i] == (pool.depths[parent] + 1 if parent >= 0 else 1) <= shape.depth
        paths.append([*(paths[parent] if parent >= 0 else []), int(pool.tokens[i])])
        expected = searched(config, text, paths[i][:-1])
        assert pool.log_probs[i] == pytest.approx(np.log(expected[paths[i][-1]]), abs=1e-5)
        entropy = -(expected * np.log(expected)).sum()
        assert pool.entropies[pool.state_rows[i]] == pytest.approx(entropy, abs=1e-5)
    assert len({tuple(path) for path in paths}) == len(paths), "one node for each continuation"
    check_siblings(pool)
    reach = along_paths(pool.log_probs, pool.parents, pool.depths, np.add)
    if shape.min_reach:
        assert np.all(reach >= np.log(np.float32(shape.min_reach)))
    for depth in range(1, shape.depth + 1):
        level = np.flatnonzero(pool.depths == depth)
        assert len(level) <= shape.width
        assert np.all(np.diff(level) == 1), "level by level"
        assert np.all(np.diff(reach[level]) <= 0), "the best of a level first"
        assert set(pool.parents[level]) <= {-1, *np.flatnonzero(pool.depths == depth - 1)[: shape.beam]}


def check_siblings(pool: Pool) -> None:
    """Siblings fall in probability, are ranked without gaps and leave room for what they are not."""
    for parent in {-1, *pool.parents.tolist()}:
        siblings = np.flatnonzero(pool.parents == parent)
        assert pool.ranks[siblings].tolist() == list(range(len(siblings)))
        assert np.all(np.diff(pool.log_probs[siblings]) <= 0)
        assert len(set(pool.state_rows[siblings])) <= 1
        total = np.exp(pool.log_probs[siblings]).sum()
        assert total < 1 or len(siblings) == VOCABULARY


@settings(deadline=None)
@given(texts, orders, shapes, st.randoms(use_true_random=False))
def test_many_pools_are_those_of_their_moments(
    text: list[int], config: NgramConfig, shape: PoolConfig, random: Any
) -> None:
    drafter, whole = told(config, text)
    roots = [random.randrange(len(text)) for _ in range(4)]
    live = drafter.start()
    for row, token in enumerate(text):
        drafter.extend(live, torch.tensor([token]), torch.full((1, HIDDEN), float(row)))
        now = drafter.expand(live, token, shape, (0.7,))
        for root, then in zip(roots, drafter.expand_many(whole, roots, shape, (0.7,)), strict=True):
            if root == row:
                assert now.levels == then.levels
                for name in (*NODES, "states", "entropies", "log_normalizers"):
                    np.testing.assert_array_equal(getattr(now, name), getattr(then, name))


@settings(deadline=None)
@given(texts, orders, st.integers(1, 4), st.sampled_from([0.0, 0.03, 0.2, 0.6]))
def test_a_cut_pool_is_the_one_that_would_have_grown(
    text: list[int], config: NgramConfig, depth: int, min_reach: float
) -> None:
    drafter, sequence = told(config, text)
    shape = PoolConfig(depth=4, beam=2, width=3)
    full, live = (drafter.expand(sequence, text[-1], s) for s in (shape, shape.cut(depth, min_reach)))
    reach = least_log_reach(full.log_probs, full.parents, full.depths)
    cut = Cut.of(np.array([0, len(full)]), full.depths, reach, shape.cut(depth, min_reach))
    assert (live.levels, live.expanded) == (cut.levels[0], cut.expanded[0])
    for name in ("tokens", "depths", "ranks", "log_probs"):
        np.testing.assert_array_equal(getattr(full, name)[cut.nodes], getattr(live, name))


def test_branches_come_from_different_occurrences() -> None:
    drafter, sequence = told(NgramConfig(), [0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 4, 5, 0, 1])
    pool = drafter.expand(sequence, 1, PoolConfig(depth=2, beam=2, width=3))
    assert pool.tokens[pool.depths == 1].tolist() == [2]
    assert pool.tokens[pool.depths == 2].tolist() == [4, 3], "the commoner continuation first"


def test_no_match_is_an_empty_pool() -> None:
    drafter, sequence = told(NgramConfig(), [0, 1, 2])
    pool = drafter.expand(sequence, 2, PoolConfig(), (1.0,))
    assert (len(pool), pool.levels, pool.expanded) == (0, 1, 0)
    assert pool.entropies == pytest.approx([np.log(VOCABULARY)] * 2)


def test_a_step_does_not_read_the_text_again() -> None:
    drafter, sequence = told(NgramConfig(), [1, 2, 3] * 200)
    drafter.expand(sequence, 3, PoolConfig())
    index = sequence.index
    reads: list[int] = []
    original, index.read = index.read, lambda token: (reads.append(token), original(token))[1]  # type: ignore[method-assign]
    drafter.extend(sequence, torch.tensor([1, 2]), torch.zeros(2, HIDDEN))
    drafter.expand(sequence, 2, PoolConfig())
    assert reads == [1, 2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("ngram", NgramConfig()), ("ngram:", NgramConfig()), ("ngram:max=6", NgramConfig(max=6)),
     ("ngram: min=2, max=3", NgramConfig(min=2, max=3))],
)  # fmt: skip
def test_settings_are_read(text: str, expected: NgramConfig) -> None:
    assert parse_ngram(text) == expected
    assert load_drafter(text, TARGET).fingerprint == NgramDrafter(expected, TARGET).fingerprint


@pytest.mark.parametrize(
    ("text", "expected"),
    [("ngram:size=3", "'size' is not supported; supported keys: min, max"), ("ngram:min=x", "'min' = 'x'"),
     ("ngram:min=0", "'min'"), ("ngram:min=5,max=3", "'min' = 5 is above 'max' = 3"), ("ngram:3", "'3' is not key=value"),
     ("ngram:min=", "is not key=value"), ("ngram:min=1,min=2", "given twice"), ("ngram:max=99", "'max'")],
)  # fmt: skip
def test_a_mistake_in_settings_is_one_line(text: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        load_drafter(text, TARGET)
    assert str(error.value).startswith(f"drafter {text}: ")
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_settings_enter_the_fingerprint() -> None:
    found = {NgramDrafter(parse_ngram(text), TARGET).fingerprint for text in ("ngram", "ngram:max=3", "ngram:min=2")}
    assert len(found) == 3


def test_wrong_rows_are_refused() -> None:
    drafter, sequence = told(NgramConfig(), [0, 1])
    with pytest.raises(ValueError, match="4 wide"):
        drafter.extend(sequence, torch.tensor([1]), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="2 tokens but 1"):
        drafter.extend(sequence, torch.tensor([1, 1]), torch.zeros(1, HIDDEN))
    with pytest.raises(ValueError, match="not the token of the last row"):
        drafter.expand(sequence, 0, PoolConfig())
    with pytest.raises(ValueError, match=r"roots must be in 0\.\.1"):
        drafter.expand_many(sequence, [2], PoolConfig())
