"""The draft head's ops: the CPU kernels against their references, on odd shapes and poisoned buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("numba")

from ecospec_kernels import dispatch
from ecospec_kernels.draft_layer import cpu, reference
from ecospec_kernels.draft_propose import cpu as propose_cpu
from ecospec_kernels.draft_propose import reference as propose_reference
from ecospec_kernels.draft_rows import cpu as rows_cpu
from ecospec_kernels.draft_rows import reference as rows_reference
from ecospec_kernels.draft_rows.reference import RowWeights
from ecospec_kernels.draft_tree import cpu as tree_cpu
from ecospec_kernels.draft_tree import reference as tree_reference
from ecospec_kernels.draft_tree.reference import Shape, TreeWeights

# hidden, heads, kv heads, head dim, MLP, committed, recent, rows, matrices in bf16, normed residual, biases and output norm
SHAPES = [
    (64, 4, 2, 16, 96, 37, 4, 4, True, False, False),
    (64, 4, 2, 16, 96, 37, 20, 4, False, False, True),
    (32, 4, 2, 8, 64, 3, 5, 2, False, True, False),
    (32, 4, 2, 8, 64, 0, 5, 5, False, False, False),
    (40, 6, 2, 16, 72, 9, 17, 3, True, False, True),
    (64, 2, 1, 32, 80, 7, 8, 1, True, True, True),
    (64, 2, 1, 8, 24, 7, 8, 3, True, False, False),  # the MLP and the heads narrower than the state
]


def weights(
    hidden: int, heads: int, kv: int, dim: int, inner: int, bf16: bool, normed: bool, extras: bool = False
) -> reference.LayerWeights:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(
            torch.bfloat16 if bf16 else torch.float32
        )

    norms = [1 + 0.3 * torch.randn(hidden, generator=generator) for _ in range(4)]
    biases = [torch.randn(n, generator=generator) for n in ((heads + 2 * kv) * dim, hidden)]
    return reference.LayerWeights(
        matrix((heads + 2 * kv) * dim, 2 * hidden), matrix(hidden, heads * dim), matrix(2 * inner, hidden),
        matrix(hidden, inner), norms[0], norms[1], norms[2], heads, kv, dim, 1e-6, normed,
        *((*biases, norms[3]) if extras else ()),
    )  # fmt: skip


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every workspace is exactly as long as asked for, full of NaN, and nothing is written behind it."""
    rooms = []

    def workspace(count: int) -> int:
        room = np.full(count + 64, np.nan, np.float32)
        room[count:] = 7.0
        rooms.append((room, count))
        return room.ctypes.data

    for module in (cpu, propose_cpu, rows_cpu, tree_cpu):
        monkeypatch.setattr(module, "workspace", workspace)
    yield
    assert rooms
    assert all((room[count:] == 7.0).all() for room, count in rooms)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_matches_its_reference(shape: tuple[int, ...]) -> None:
    hidden, heads, kv, dim, inner, past, recent, n, bf16, normed, extras = shape
    w = weights(hidden, heads, kv, dim, inner, bool(bf16), bool(normed), bool(extras))
    generator = torch.Generator().manual_seed(1)
    embed, h = torch.randn(2, n, hidden, generator=generator)
    angles = torch.randn(n, 1, dim // 2, generator=generator)
    rope = (angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1))
    keys, values = torch.randn(2, kv, past + 3, dim, generator=generator)
    keys[:, past:] = values[:, past:] = torch.nan  # rows that are not committed
    seen = torch.rand(n, recent, generator=generator) > 0.5
    seen[:, recent - n :] |= torch.eye(n, dtype=torch.bool)
    results = []
    for module in (reference, cpu):
        near = torch.randn(2, kv, recent, dim, generator=torch.Generator().manual_seed(2))
        with torch.inference_mode():
            out = module.draft_layer(w, embed, h, rope, keys[:, :past], values[:, :past], near[0], near[1], seen)
        results.append((out, near))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(("vocabulary", "hidden", "bf16"), [(2048, 64, True), (61, 40, False), (9, 32, True)])
@pytest.mark.parametrize(("normed", "noisy"), [(False, 0), (True, 1), (True, 5)])
def test_proposals_match_their_reference(vocabulary: int, hidden: int, bf16: bool, normed: bool, noisy: int) -> None:
    generator = torch.Generator().manual_seed(3)
    states, norm = torch.randn(5, hidden, generator=generator), 1 + 0.3 * torch.randn(hidden, generator=generator)
    norm = None if normed else norm
    head = torch.randn(vocabulary, hidden, generator=generator).to(torch.bfloat16 if bf16 else torch.float32)
    noise = 5 * torch.randn(noisy, vocabulary, generator=generator).squeeze(0) if noisy else None
    results = []
    for module in (propose_reference, propose_cpu):
        with torch.inference_mode():
            results.append(module.draft_propose(states, norm, 1e-6, head, 8, (0.3, 1.0, 1.25), noise))
    torch.testing.assert_close(results[1].ids, results[0].ids)
    for name in ("log_probs", "entropies", "log_normalizers"):
        torch.testing.assert_close(getattr(results[1], name), getattr(results[0], name), rtol=1e-4, atol=2e-5)


def test_equal_logits_are_proposed_in_the_order_of_their_ids() -> None:
    result = propose_cpu.draft_propose(torch.ones(1, 32), torch.ones(32), 1e-6, torch.zeros(50, 32), 4, ())
    assert result.ids.tolist() == [[0, 1, 2, 3]]
    assert float(result.entropies[0]) == pytest.approx(float(torch.tensor(50.0).log()), abs=1e-5)


def test_a_row_does_not_depend_on_its_company_nor_on_where_its_past_is_kept() -> None:
    w = weights(64, 4, 2, 16, 96, True, False)
    generator = torch.Generator().manual_seed(4)
    n = 11
    embed, h = torch.randn(2, n, 64, generator=generator)
    angles = torch.arange(n)[:, None, None] * torch.rand(8, generator=generator)
    rope = (angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1))
    with torch.inference_mode():
        keys, values = torch.zeros(2, 2, n, 16)
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        together = cpu.draft_layer(w, embed, h, rope, keys[:, :0], values[:, :0], keys, values, causal)
        keys, values = torch.zeros(2, 2, n, 16)
        for i in range(n):
            at = slice(i, i + 1)
            alone = cpu.draft_layer(
                w, embed[at], h[at], (rope[0][at], rope[1][at]), keys[:, :i], values[:, :i], keys[:, at], values[:, at],
                torch.ones(1, 1, dtype=torch.bool),
            )  # fmt: skip
            assert torch.equal(alone[0], together[i])


def head(vocabulary: int, embedding_bf16: bool, **shape: int | bool) -> TreeWeights:
    sizes: dict[str, int | bool] = {
        "hidden": 64,
        "heads": 4,
        "kv": 2,
        "dim": 16,
        "inner": 96,
        "bf16": True,
        "normed": False,
        "extras": False,
    }
    w = weights(**(sizes | shape))  # type: ignore[arg-type]
    hidden, generator = w.down.shape[0], torch.Generator().manual_seed(5)
    lm_head = 4 * torch.randn(vocabulary, hidden, generator=generator) * hidden**-0.5
    embedding = torch.randn(vocabulary + 70, hidden, generator=generator)
    ids = np.random.default_rng(0).permutation(vocabulary + 70)[:vocabulary]
    norm = 1 + 0.3 * torch.randn(hidden, generator=generator)
    return TreeWeights(
        w, norm if w.output_norm is None else None, lm_head.to(w.qkv.dtype),
        embedding.to(torch.bfloat16 if embedding_bf16 else torch.float32), ids,
    )  # fmt: skip


def tree_inputs(w: TreeWeights, past: int, depth: int, seed: int) -> tuple[Tensor, ...]:
    generator, layer = torch.Generator().manual_seed(seed), w.layer
    before, root = torch.randn(2, layer.down.shape[0], generator=generator)
    angles = torch.randn(max(depth - 1, 1), 1, layer.head_dim // 2, generator=generator)
    rope = (angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1))
    keys, values = torch.randn(2, layer.kv_heads, past + 3, layer.head_dim, generator=generator)
    keys[:, past:] = values[:, past:] = torch.nan  # rows that are not committed
    return before, root, rope, keys[:, :past], values[:, :past]  # type: ignore[return-value]


@pytest.mark.parametrize("shape", [Shape(1, 4, 8), Shape(6, 4, 8), Shape(4, 9, 3), Shape(3, 7, 9), Shape(5, 1, 1), Shape(3, 2, 30), Shape(7, 3, 5, 0.03),
                                   Shape(6, 4, 8, 0.6)])  # fmt: skip
@pytest.mark.parametrize(("vocabulary", "embedding_bf16", "bf16", "past"), [(61, True, True, 37), (9, False, False, 1)])
@pytest.mark.usefixtures("guarded")
def test_trees_match_their_reference(
    shape: Shape, vocabulary: int, embedding_bf16: bool, bf16: bool, past: int
) -> None:
    w = head(vocabulary, embedding_bf16, bf16=bf16, normed=not bf16, inner=24 if bf16 else 96, extras=bf16)
    generator = torch.Generator().manual_seed(9)
    for seed in range(6):
        inputs = tree_inputs(w, past, shape.depth, seed)
        with torch.inference_mode():
            noise = torch.randn(1 + shape.depth, vocabulary, generator=generator) * 30 if seed % 2 else None
            expected, tree = (m.draft_tree(w, *inputs, shape, (0.5, 1.25), noise) for m in (tree_reference, tree_cpu))
        assert tree.levels == expected.levels
        if noise is not None:
            bare = tree_reference.draft_tree(w, *inputs, shape, ())
            assert not np.allclose(tree.entropies[:2], bare.entropies[:2], atol=0)
        for name, left, right in zip(tree._fields, tree, expected, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-4, atol=3e-5, err_msg=name)


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.sampled_from([-np.inf, -2.0, -1.0, -0.5, np.nan]), min_size=1, max_size=12), st.integers(1, 12))
def test_the_best_children_are_the_first_of_a_stable_sort(values: list[float], width: int) -> None:
    scores = np.array(values, np.float32)
    chosen = np.full(min(width, len(values)), -1)
    tree_cpu._best_children(scores, len(chosen), chosen.ctypes.data)
    assert chosen.tolist() == np.argsort(-scores, kind="stable")[: len(chosen)].tolist()


def test_a_tree_survives_rows_that_are_not_numbers() -> None:
    w = head(61, True)
    before, root, *rest = tree_inputs(w, 5, 4, 0)
    with torch.inference_mode():
        tree = tree_cpu.draft_tree(w, before, root * torch.nan, *rest, Shape(4, 3, 5), ())  # type: ignore[arg-type]
    assert set(tree.tokens.tolist()) <= set(w.target_ids.tolist())
    assert all(p < i for i, p in enumerate(tree.parents.tolist()))


def row_weights(embedding_bf16: bool, **shape: int | bool) -> RowWeights:
    w = head(61, embedding_bf16, **shape)
    fc = torch.randn(w.layer.down.shape[0], 3 * 24, generator=torch.Generator().manual_seed(6)) * 0.1
    return RowWeights(w.layer, fc.to(w.layer.qkv.dtype), (), w.embedding)


def row_inputs(w: RowWeights, tokens: list[int], past: int, bf16: bool) -> tuple[Any, ...]:
    generator, m = torch.Generator().manual_seed(7), len(tokens)
    features = torch.randn(m, w.fc_HF.shape[1] + 5, generator=generator)[:, 5:]  # dense rows, but not a dense matrix
    angles = torch.randn(m, 1, w.layer.head_dim // 2, generator=generator)
    rope = (angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1))
    keys, values = torch.randn(2, w.layer.kv_heads, past + m + 3, w.layer.head_dim, generator=generator)
    keys[:, past:] = values[:, past:] = torch.nan
    states = torch.full((past + m + 3, w.layer.down.shape[0]), torch.nan)
    return tokens, features.to(torch.bfloat16 if bf16 else torch.float32), rope, keys, values, states, past


@pytest.mark.parametrize(("tokens", "past"), [([5], 0), ([7, 7, 130], 9), (list(range(64)), 40)])
@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.usefixtures("guarded")
def test_rows_match_their_reference(tokens: list[int], past: int, bf16: bool) -> None:
    w = row_weights(bf16, bf16=bf16, normed=bf16, extras=not bf16)
    filled = []
    for module in (rows_reference, rows_cpu):
        inputs = row_inputs(w, tokens, past, bf16)
        with torch.inference_mode():
            module.draft_rows(w, *inputs)
        filled.append(inputs[3:6])
    assert torch.isfinite(filled[1][2][past : past + len(tokens)]).all()
    torch.testing.assert_close(filled[1], filled[0], rtol=1e-4, atol=1e-5, equal_nan=True)


def test_rows_do_not_depend_on_how_they_are_split() -> None:
    w = row_weights(True)
    tokens, features, rope, *buffers, past = row_inputs(w, list(range(20)), 3, True)
    split = [b.clone() for b in buffers]
    with torch.inference_mode():
        rows_cpu.draft_rows(w, tokens, features, rope, *buffers, past)
        for at in (slice(0, 1), slice(1, 9), slice(9, 20)):
            part = (rope[0][at], rope[1][at])
            rows_cpu.draft_rows(w, tokens[at], features[at], part, *split, past + at.start)
    assert all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(buffers, split, strict=True))


def test_rows_of_odd_features_match_their_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Feature norms, half precision, columns apart, and a matrix so large that threads share it."""
    plain = row_weights(False)
    norms = tuple(1 + 0.3 * torch.randn(24, generator=torch.Generator().manual_seed(i)) for i in range(3))
    one = (torch.cat(norms),)
    for w, change in [(replace(plain, feature_norms=norms), "none"), (replace(plain, feature_norms=one), "half"), (plain, "strided"),
                      (plain, "half"), (plain, "threads")]:  # fmt: skip
        tokens, features, rope, *buffers, past = row_inputs(w, [3, 1, 4], 6, False)
        if change == "half":
            features = features.half()
        if change == "strided":
            features = features.T.contiguous().T
        if change == "threads":
            monkeypatch.setattr(rows_cpu, "SPLIT_BYTES", 1)
            monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        other = [b.clone() for b in buffers]
        with torch.inference_mode():
            rows_reference.draft_rows(w, tokens, features, rope, *buffers, past)
            rows_cpu.draft_rows(w, tokens, features, rope, *other, past)
        torch.testing.assert_close(other, buffers, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_what_the_kernels_do_not_take_goes_to_the_reference() -> None:
    w = row_weights(False, bf16=False)
    layer = w.layer
    matrices = (layer.qkv, layer.out, w.fc_HF)
    assert dispatch.supports_draft(matrices, 16, layer.input_norm, w.embedding)
    assert not dispatch.supports_draft(matrices, 16, layer.input_norm, w.embedding.half())
    assert not dispatch.supports_draft(matrices, 16, layer.input_norm, w.embedding.T)
    assert not dispatch.supports_draft((layer.qkv, layer.out.bfloat16()), 16, layer.input_norm, w.embedding)
    assert not dispatch.supports_draft(matrices, 16, layer.input_norm.bfloat16(), w.embedding)
    before = dispatch.CALLS["draft_rows", "reference"]
    dispatch.draft_rows(w, *row_inputs(w, [1, 2], 4, False), supported=True)  # gradients are on
    assert dispatch.CALLS["draft_rows", "reference"] == before + 1
    with torch.inference_mode(), pytest.raises(IndexError, match="token ids outside"):
        dispatch.draft_rows(w, *row_inputs(w, [1, 9999], 4, False), supported=True)
