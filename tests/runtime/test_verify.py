"""The walk follows the target's choices, and the mask shows each row its own path."""

from __future__ import annotations

import pytest
import torch

from ecospec_runtime.config import GenerationConfig
from ecospec_runtime.sampling import Sampler
from ecospec_runtime.statistics import Statistics, first_divergence, loop_share
from ecospec_runtime.verify import children_of, tree_mask, walk


def logits_for(choices: list[int]) -> torch.Tensor:
    """Rows whose argmax is given."""
    rows = torch.zeros(len(choices), 10)
    rows[range(len(choices)), choices] = 5.0
    return rows


def test_walk_accepts_the_longest_path_the_target_takes() -> None:
    # root(3 chosen) -> row 2 (token 3) -> row 3 (token 4) -> its choice 9 has no child
    children = children_of(tokens=[5, 3, 4, 7], parents=[0, 0, 2, 3])
    outcome = walk(logits_for([3, 0, 4, 9, 1]), children, Sampler(GenerationConfig()), 0, set(), logprobs=True)
    assert outcome.rows == [0, 2, 3]
    assert outcome.tokens == [3, 4, 9]
    expected = torch.tensor(5.0) - torch.logsumexp(torch.tensor([5.0] + [0.0] * 9), 0)
    assert outcome.logprobs == pytest.approx([expected.item()] * 3, abs=1e-5)


def test_walk_without_a_match_or_a_tree_yields_one_token() -> None:
    sampler = Sampler(GenerationConfig())
    assert walk(logits_for([3, 5]), children_of([5], [0]), sampler, 0, set(), False).tokens == [3]
    assert walk(logits_for([3]), children_of([], []), sampler, 0, set(), False).rows == [0]


def test_each_node_sees_the_penalty_of_its_own_path() -> None:
    """The penalty counts what was accepted on the way down, not what the other branches hold."""
    sampler = Sampler(GenerationConfig(repetition_penalty=10.0))
    logits = torch.zeros(3, 10)
    logits[0, 4] = 5.0
    logits[1, 4], logits[1, 6] = 5.0, 4.0
    seen: set[int] = set()
    outcome = walk(logits, children_of([4, 6], [0, 0]), sampler, 0, seen, False)
    assert outcome.tokens == [4, 6]
    assert seen == {4, 6}


def test_first_of_two_equal_siblings_wins() -> None:
    assert children_of([5, 5], [0, 0])[0] == {5: 1}


def test_tree_mask() -> None:
    mask = tree_mask([0, 1, 0], past=2)
    expected = [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 1]]
    assert mask.int().tolist() == expected
    assert tree_mask([], past=0).tolist() == [[True]]


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ([], 0.0),
        ([1, 2, 3, 4], 0.0),
        ([7, 7], 0.0),
        ([7, 7, 7], 1.0),
        ([1, 2, 1, 2, 1], 0.0),
        ([1, 2, 1, 2, 1, 2, 9, 8], 0.75),
        ([1, 2, 1, 2, 1, 2, 1, 5], 0.875),
        (list(range(16)) * 3, 1.0),
        (list(range(17)) * 3, 0.0),
        ([5, 5, 5, 1, 2, 3, 6, 6, 6, 6], 0.7),
    ],
)
def test_loop_share(tokens: list[int], share: float) -> None:
    assert loop_share(tokens) == pytest.approx(share)


def test_first_divergence_and_empty_statistics() -> None:
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 5, 3]) == 1
    assert first_divergence([1, 2], [1, 2, 3]) == 2
    summary = Statistics().summary()
    assert summary["tokens_per_second"] == 0.0
    assert summary["experts_per_layer"] is None
