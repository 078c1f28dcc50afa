"""`predict_pool` and `top_experts`: the CPU kernels against the reference, on odd sizes and odd numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ecospec_kernels.predict_pool import reference
from ecospec_kernels.predict_pool.reference import LAYERS, Weights

from .cases import random

pytest.importorskip("numba")
from ecospec_kernels.predict_pool import cpu

N_LAYERS, EXPERTS = 3, 13


class Tree(NamedTuple):
    """A candidate tree, as `ecospec_runtime.pool.Pool` has it."""

    parents: Any
    state_rows: Any
    log_probs: Any
    ranks: Any
    depths: Any
    states: Any
    entropies: Any


def network(hidden: int, wide: int, width: int, mixed: int = 16, inner: int = 32) -> Weights:
    shapes = (
        (width, 2 * hidden + wide + 4), (width, width), (N_LAYERS * EXPERTS, width),
        (mixed, hidden), (mixed, wide), (inner, mixed + 4), (1, 4), (1, inner),
    )  # fmt: skip
    tensors = {}
    for i, (name, shape) in enumerate(zip(LAYERS, shapes, strict=True)):
        tensors[f"{name}.weight"] = random(i, *shape, scale=shape[1] ** -0.5)
        tensors[f"{name}.bias"] = random(20 + i, shape[0])
    return Weights(tensors)


def numbers(seed: int, *shape: int, scale: float = 1.0) -> Any:
    return random(seed, *shape, scale=scale).numpy()


def tree(n: int, wide: int, shared: bool = False) -> Tree:
    """n nodes, each below an earlier one or the root."""
    parents, ranks = np.random.default_rng(n).integers(-1, np.arange(n)), np.arange(n) % 5
    states = numbers(2, 1 if shared else n + 2, wide, scale=3.0)
    return Tree(parents, parents + 2, -9 * abs(numbers(3, n)), ranks, ranks + 1, states, abs(numbers(4, n + 2)))


def near(w: Weights, embedding: Any, case: Tree, shrinkage: float) -> Any:
    """The kernel's answer, which is the reference's but for sums in another order."""
    found, expected = (m.predict_pool(w, embedding, case, shrinkage) for m in (cpu, reference))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    for module, (_, accepted) in ((cpu, found), (reference, expected)):
        none, alone = module.predict_pool(w, embedding, case, shrinkage, routing=False)
        assert none.shape == (len(embedding), 0)
        np.testing.assert_array_equal(alone, accepted)
    return found


@pytest.mark.parametrize("n", [0, 1, 2, 9, 63])
@pytest.mark.parametrize(("hidden", "wide", "width"), [(16, 24, 8), (30, 17, 37), (256, 256, 192)])
def test_as_the_reference(n: int, hidden: int, wide: int, width: int) -> None:
    """And nodes in a smaller tree get the same bits, without shrinkage."""
    w, embedding = network(hidden, wide, width), numbers(5, n + 1, hidden, scale=5.0)
    for shared in (False, True):
        case = tree(n, wide, shared)
        whole, _ = near(w, embedding, case, 0.0), near(w, embedding, case, 0.3)
        few = n // 2
        part = Tree(*(values[:few] for values in case[:5]), *case[5:])
        alone = cpu.predict_pool(w, embedding[: few + 1], part, 0.0)
        assert all(np.array_equal(a, b[: few + 1]) for a, b in zip(alone, whole, strict=True))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_odd_numbers(bad: float) -> None:
    """In scalars: made finite. In an embedding: rounded to the largest float16, or the rows that read it are unknown."""
    w, case, embedding = network(16, 24, 8), tree(6, 24), numbers(5, 7, 16)
    log_probs, entropies = case.log_probs.copy(), case.entropies.copy()
    log_probs[2] = entropies[1] = bad
    routing, _ = near(w, embedding, case._replace(log_probs=log_probs, entropies=entropies), 0.5)
    assert np.isfinite(routing).all()
    for place in (0, 4):
        odd = embedding.copy()
        odd[place, 3] = bad
        routing, _ = near(w, odd, case, 0.5)
        readers = {place, *(np.flatnonzero(case.parents == place - 1) + 1).tolist()}
        assert set(np.flatnonzero(np.isnan(routing).any(1)).tolist()) == (readers if np.isnan(bad) else set())


@pytest.mark.parametrize("implementation", [cpu, reference])
def test_wrong_trees_are_refused(implementation: Any) -> None:
    """Before an address is computed from them."""
    w, case, embedding = network(16, 24, 8), tree(6, 24), numbers(5, 7, 16)
    for key, last in (("parents", 6), ("parents", -2), ("parents", 10**9), ("state_rows", 8), ("state_rows", -1)):
        values = getattr(case, key).copy()
        values[-1] = last
        with pytest.raises(IndexError, match="not there"):
            implementation.predict_pool(w, embedding, case._replace(**{key: values}), 0.5)
    with pytest.raises(IndexError, match="not there"):
        implementation.predict_pool(w, embedding, case._replace(entropies=case.entropies[:2]), 0.5)
    for wrong, message in (
        ({"states": case.states[:, 1:]}, "states of 23"), ({"ranks": case.ranks[1:]}, r"ranks has shape \[5\], not \[6\]"),
        ({"states": case.states[:0]}, "rows of both"), ({"entropies": case.states}, "entropies"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^predict_pool: .*{message}"):
            implementation.predict_pool(w, embedding, case._replace(**wrong), 0.5)
    for rows in (embedding[1:], embedding[:, 1:], embedding[0]):
        with pytest.raises(ValueError, match=r"^predict_pool: "):
            implementation.predict_pool(w, rows, case, 0.5)


@pytest.mark.parametrize("part", ["weight", "bias"])
@pytest.mark.parametrize("number", range(len(LAYERS)))
def test_weights_that_do_not_fit_together_are_refused(number: int, part: str) -> None:
    """Also a bias of one number, which torch would add to every output."""
    w = network(16, 24, 8)
    tensors = {f"{n}.weight": t for n, t in zip(LAYERS, w.matrices, strict=True)}
    tensors |= {f"{n}.bias": t for n, t in zip(LAYERS, w.biases, strict=True)}
    Weights(tensors)
    key = f"{LAYERS[number]}.{part}"
    for wrong in (torch.tensor(1.0), torch.ones(1, 1), torch.cat([tensors[key]] * 2, -1)):
        with pytest.raises(ValueError, match=LAYERS[number] if part == "bias" else "predict_pool: "):
            Weights(tensors | {key: wrong})


def test_rounding_to_half() -> None:
    """Every class of float32: normal, too small, too large, ties, signs."""
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    edges = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    edges = edges[np.isfinite(edges)]
    between = (edges[:-1] + edges[1:]) / 2
    x = torch.from_numpy(np.concatenate([bits.view(np.float32), edges, between]))
    out = torch.empty_like(x)
    cpu._record(x.data_ptr(), len(x), out.data_ptr())
    torch.testing.assert_close(out, reference.recorded(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("rows", "layers", "experts", "top_k"), [(1, 1, 8, 8), (5, 3, 13, 4), (25, 7, 48, 1), (64, 2, 256, 8)]
)
def test_sets_of_experts(rows: int, layers: int, experts: int, top_k: int) -> None:
    """Ties (rounded logits) go to the lower expert; a layer with a number that is not finite gets what nobody else has."""
    logits = numbers(1, rows, layers, experts, scale=2.0).round()
    logits[rows // 2, :, 3] = np.nan
    logits[rows - 1, 0, 0], logits[0, -1, 5] = np.inf, -np.inf
    found = cpu.top_experts(logits, top_k)
    assert np.array_equal(found, reference.top_experts(logits, top_k))
    assert np.unpackbits(found).sum() == rows * layers * top_k
    assert np.array_equal(cpu.top_experts(logits, experts + 9), cpu.top_experts(logits, experts))  # there are no more
