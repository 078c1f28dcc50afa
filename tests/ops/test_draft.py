"""`draft_layer` and `draft_propose`: the CPU kernels against their references, on odd shapes and poisoned buffers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from ecospec_kernels import dispatch
from ecospec_kernels.draft_layer import cpu, reference
from ecospec_kernels.draft_propose import cpu as propose_cpu
from ecospec_kernels.draft_propose import reference as propose_reference

# hidden, heads, kv heads, head dim, MLP, committed, recent, rows, matrices in bf16, normed residual
SHAPES = [
    (64, 4, 2, 16, 96, 37, 4, 4, True, False),
    (64, 4, 2, 16, 96, 37, 20, 4, False, False),
    (32, 4, 2, 8, 64, 3, 5, 2, False, True),
    (32, 4, 2, 8, 64, 0, 5, 5, False, False),
    (40, 6, 2, 16, 72, 9, 17, 3, True, False),
    (64, 2, 1, 32, 80, 7, 8, 1, True, True),
]


def weights(hidden: int, heads: int, kv: int, dim: int, inner: int, bf16: bool, normed: bool) -> reference.LayerWeights:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(
            torch.bfloat16 if bf16 else torch.float32
        )

    norms = [1 + 0.3 * torch.randn(hidden, generator=generator) for _ in range(3)]
    return reference.LayerWeights(
        matrix((heads + 2 * kv) * dim, 2 * hidden), matrix(hidden, heads * dim), matrix(2 * inner, hidden),
        matrix(hidden, inner), norms[0], norms[1], norms[2], heads, kv, dim, 1e-6, normed,
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_matches_its_reference(shape: tuple[int, ...]) -> None:
    hidden, heads, kv, dim, inner, past, recent, n, bf16, normed = shape
    w = weights(hidden, heads, kv, dim, inner, bool(bf16), bool(normed))
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


@pytest.mark.parametrize(("vocabulary", "hidden", "bf16"), [(2048, 64, True), (61, 40, False), (9, 32, True)])
def test_proposals_match_their_reference(vocabulary: int, hidden: int, bf16: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    states, norm = torch.randn(5, hidden, generator=generator), 1 + 0.3 * torch.randn(hidden, generator=generator)
    head = torch.randn(vocabulary, hidden, generator=generator).to(torch.bfloat16 if bf16 else torch.float32)
    results = []
    for module in (propose_reference, propose_cpu):
        with torch.inference_mode():
            results.append(module.draft_propose(states, norm, 1e-6, head, 8, (0.3, 1.0, 1.25)))
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


def test_gradients_go_to_the_reference() -> None:
    w = weights(32, 4, 2, 8, 64, False, False)
    assert dispatch.supports_draft((w.qkv, w.out, w.gate_up, w.down), 8, w.input_norm)
    before = dispatch.CALLS["draft_layer", "reference"]
    x = torch.randn(1, 32)
    rope = (torch.ones(1, 1, 8), torch.zeros(1, 1, 8))
    cache = [torch.zeros(2, 0, 8), torch.zeros(2, 0, 8), torch.zeros(2, 1, 8), torch.zeros(2, 1, 8)]
    dispatch.draft_layer(w, x, x, rope, *cache, torch.ones(1, 1, dtype=torch.bool), supported=True)
    assert dispatch.CALLS["draft_layer", "reference"] == before + 1
