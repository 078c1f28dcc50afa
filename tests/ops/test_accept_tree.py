"""`accept_tree`: the CPU kernel against the reference, on every estimate and odd numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecospec_kernels.accept_tree import reference
from ecospec_kernels.accept_tree.reference import NONE

pytest.importorskip("numba")
from ecospec_kernels.accept_tree import cpu

FORMS = ("own", "weights", "logits", "both", "tempered")


class Tree(NamedTuple):
    """A candidate tree, as `ecospec_runtime.pool.Pool` has it."""

    parents: Any
    state_rows: Any
    log_probs: Any
    ranks: Any
    depths: Any
    entropies: Any


def draw(seed: int, n: int, odd: float) -> tuple[Tree, dict[str, tuple[Any, ...]]]:
    """A tree of n nodes, and the arguments of each form; a share `odd` of the numbers is not finite."""
    rng = np.random.default_rng(seed)

    def numbers(count: int, scale: float = 1.0) -> Any:
        values = (scale * rng.normal(size=count)).astype(np.float32)
        values[rng.random(count) < odd] = rng.choice([np.nan, np.inf, -np.inf, 1e30, -1e30])
        return values

    parents = rng.integers(-1, np.maximum(np.arange(n), 0))
    ranks, depths = rng.integers(0, 8, n), rng.integers(1, 7, n)
    tree = Tree(parents, parents + 1, -abs(numbers(n, 3.0)), ranks, depths, abs(numbers(n + 1)))
    weights, logits, normalizers = numbers(5), numbers(n, 4.0), numbers(n + 1)
    return tree, {
        "own": (), "weights": (weights,), "logits": (NONE, logits), "both": (weights, logits),
        "tempered": (NONE, NONE, 0.6, normalizers),
    }  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2, 7, 48]), st.sampled_from([0.0, 0.2]), st.sampled_from(FORMS)
)
def test_as_the_reference(seed: int, n: int, odd: float, form: str) -> None:
    tree, arguments = draw(seed, n, odd)
    with np.errstate(all="ignore"):
        expected = reference.accept_tree(tree, *arguments[form])
    found = cpu.accept_tree(tree, *arguments[form])
    assert found.dtype == expected.dtype == np.float32
    assert ((found >= 0) & (found <= 1)).all()
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-6)


def test_groups_may_have_any_number() -> None:
    """Replay judges the nodes of many pools at once: their roots' children are in groups beyond the nodes."""
    tree, arguments = draw(3, 9, 0.0)
    moved = tree._replace(parents=np.where(tree.parents < 0, 40, tree.parents))
    expected = cpu.accept_tree(tree, *arguments["logits"])
    np.testing.assert_array_equal(cpu.accept_tree(moved, *arguments["logits"]), expected)


@pytest.mark.parametrize("implementation", [cpu, reference])
@pytest.mark.parametrize("change", [{"parents": -2}, {"state_rows": 10**6}, {"state_rows": -1}])
def test_wrong_trees_are_refused(implementation: Any, change: dict[str, int]) -> None:
    tree, arguments = draw(1, 5, 0.0)
    for key, value in change.items():
        wrong = getattr(tree, key).copy()
        wrong[3] = value
        for form in ("weights", "tempered"):
            with pytest.raises(IndexError, match="not there"):
                implementation.accept_tree(tree._replace(**{key: wrong}), *arguments[form])
