"""`verify_tree`: the host's walk, in any tree; `argmax_rows`: torch's argmax, ties and NaN included."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from ecospec_kernels import dispatch
from ecospec_kernels.argmax_rows import fused as argmax_fused
from ecospec_kernels.argmax_rows import reference as argmax_reference
from ecospec_kernels.draw_rows import fused as draw_fused
from ecospec_kernels.select_nodes import reference as select_reference
from ecospec_kernels.verify_tree import fused, reference
from ecospec_kernels.verify_tree.reference import Accepted
from ecospec_runtime.config import GenerationConfig
from ecospec_runtime.sampling import Sampler
from ecospec_runtime.verify import Walk, children_of, walk
from tests.ops.cases import BF16, far_apart, poisoned, random

Case = tuple[Tensor, Tensor, Tensor]
VOCABULARY = 4


@st.composite
def passes(draw: st.DrawFn) -> Case:
    """Next tokens, node tokens and parent rows of a pass; siblings often carry the same token."""
    n = draw(st.integers(0, 12))
    ids = st.integers(0, VOCABULARY - 1)
    lists = (
        [draw(ids) for _ in range(n + 1)],
        [draw(ids) for _ in range(n)],
        [draw(st.integers(0, i)) for i in range(n)],
    )
    return tuple(torch.tensor(values, dtype=torch.int64) for values in lists)  # type: ignore[return-value]


def hosts_walk(following: Tensor, tokens: Tensor, parents: Tensor) -> Walk:
    """What the engine does with logits whose argmax these tokens are."""
    logits = torch.nn.functional.one_hot(following, int(following.max()) + 1).float()
    children = children_of(tokens.tolist(), parents.tolist())
    return walk(logits, children, Sampler(GenerationConfig(max_new_tokens=1)), 0, set(), False)


def assert_walk(got: Accepted, expected: Walk, size: int) -> None:
    count = len(expected.rows)
    assert got.number.tolist() == [count] and got.root.tolist() == expected.tokens[-1:]
    assert got.rows.tolist() == expected.rows + [-1] * (size - count)
    assert got.tokens.tolist() == expected.tokens + [-1] * (size - count)


@settings(max_examples=150, deadline=None)
@given(passes())
def test_the_walk_is_the_hosts(case: Case) -> None:
    assert_walk(reference.verify_tree(*case), hosts_walk(*case), len(case[0]))


@settings(max_examples=25, deadline=None)
@given(passes())
def test_the_kernel_walks_as_the_host(case: Case) -> None:
    assert_walk(poisoned(fused.verify_tree, *case), hosts_walk(*case), len(case[0]))


def chain(n: int, accepted: int) -> Case:
    """Every row proposes its own number; the first `accepted` are right."""
    following = torch.arange(1, n + 2)
    following[accepted] = 0
    return following, torch.arange(1, n + 1), torch.arange(n)


@pytest.mark.parametrize(("n", "accepted"), [(1, 0), (3, 3), (63, 20), (64, 0), (100, 7)])
def test_sizes(n: int, accepted: int) -> None:
    following, tokens, parents = chain(n, accepted)
    for op in (reference.verify_tree, fused.verify_tree):
        got = poisoned(op, following, tokens, parents.int())
        assert_walk(got, hosts_walk(following, tokens, parents), n + 1)
        assert int(got.number) == accepted + 1


def test_padding_is_never_accepted() -> None:
    following, tokens, parents = chain(5, 5)
    parents[3], parents[4] = -1, 5  # the last one claims to be its own parent
    for op in (reference.verify_tree, fused.verify_tree):
        got = op(following, tokens, parents)
        assert got.rows.tolist() == [0, 1, 2, 3, -1, -1] and got.root.tolist() == [4]


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 63, argmax_fused.PIECE + 5])
def test_argmax(dtype: torch.dtype, vocabulary: int) -> None:
    """Random rows (rounded, so that the largest logits tie) and odd ones, in rows further apart than they are long."""
    logits = random(1, 8, vocabulary + 3, scale=3.0).round().to(dtype)[:, :vocabulary]
    logits[1] = -math.inf
    logits[2] = -3.0
    logits[3, vocabulary // 2] = math.nan
    logits[4] = -logits[4].abs()
    logits[5, vocabulary // 3 :] = math.inf
    logits[6], logits[6, vocabulary // 2] = -0.0, 0.0
    logits[7], logits[7, -1:] = -math.inf, -1e4
    assert torch.equal(argmax_reference.argmax_rows(logits), logits.argmax(-1))
    assert torch.equal(poisoned(argmax_fused.argmax_rows, logits), logits.argmax(-1))


def test_logits_beyond_two_to_the_31st(tmp_path: Path) -> None:
    """Rows lie 2^31 numbers apart: an offset of 32 bits would miss the second. Of `draw_rows` too."""
    logits = random(1, 2, 40, dtype=BF16)
    far, keys = far_apart(tmp_path, logits, 1 << 31), (torch.tensor([5, 6]), torch.tensor([3]), torch.tensor([0.7]))
    assert torch.equal(argmax_fused.argmax_rows(far), logits.argmax(-1))
    assert torch.equal(draw_fused.draw_rows(far, *keys), draw_fused.draw_rows(logits, *keys))


def test_the_sign_of_a_nan_is_nothing() -> None:
    logits = torch.tensor([[1.0, math.nan, math.inf, math.nan]])
    logits[0, 1] = torch.copysign(logits[0, 1], torch.tensor(-1.0))
    assert argmax_fused.argmax_rows(logits).tolist() == [1]


def test_bad_arguments_are_refused_before_a_launch() -> None:
    following, tokens, parents = chain(3, 1)
    cases = [
        (r"tokens has shape \[2\], not \[3\]", (following, tokens[:2], parents)),
        ("parents is float32, not int32 or int64", (following, tokens, parents.float())),
        ("next tokens is int32, not int64", (following.int(), tokens, parents)),
        ("parents lies on meta", (following, tokens, parents.to("meta"))),
        (r"next tokens have shape \[\]", (following[0], tokens, parents)),
    ]
    for message, arguments in cases:
        for op in (reference, fused):
            with pytest.raises(ValueError, match=f"verify_tree: .*{message}"):
                op.verify_tree(*arguments)
    for logits in (torch.ones(3), torch.ones(3, 4).mT, torch.ones(3, 0), torch.ones(2, 3, dtype=torch.float64)):
        for op in (argmax_reference, argmax_fused):
            with pytest.raises(ValueError, match="argmax_rows: logits"):
                op.argmax_rows(logits)


def test_dispatch_knows_the_ops_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the Triton kernels where they run, through the references elsewhere, with one result."""
    keys, rule = torch.zeros(1, 4, 2), select_reference.ratio(1.0, 1)
    words = torch.ones(2, 1, 1, dtype=torch.int32)
    pool = torch.tensor([0.5, 0.4]), torch.tensor([-1, 0]), words, words[0], rule, 2
    for implementation in ("fused", "reference"):
        monkeypatch.setattr(dispatch, "runs_triton", lambda t, fused=implementation == "fused": fused)
        monkeypatch.setattr(dispatch, "CALLS", Counter())
        with torch.no_grad():
            selection = dispatch.select_nodes(*pool)
            following = dispatch.argmax_rows(torch.eye(3).roll(1, 1))
            accepted = dispatch.verify_tree(following, torch.tensor([1, 2]), selection.parent_rows)
            length = dispatch.commit_path(keys, keys.clone(), accepted.rows, accepted.number, torch.tensor([1]))
        assert length.tolist() == [4] and accepted.tokens.tolist() == [1, 2, 0]
        ops = ("select_nodes", "argmax_rows", "verify_tree", "commit_path")
        assert {(op, implementation): 1 for op in ops} == dispatch.CALLS


@pytest.mark.parametrize("parent", [2**32, -(2**32), 2**32 - 1, 2**63 - 1])
def test_parents_beyond_32_bits_are_no_others(parent: int) -> None:
    given = torch.tensor([5, 6, 7]), torch.tensor([5, 6]), torch.tensor([parent, 0])
    found, expected = fused.verify_tree(*given), reference.verify_tree(*given)
    assert found.rows.tolist() == expected.rows.tolist() == [0, -1, -1]
    assert found.number.tolist() == [1]
