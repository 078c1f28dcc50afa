"""The reference head's training sees what drafting will see; the yardsticks of its report are sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3MoeForCausalLM

from ecospec_runtime.config import PoolConfig
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.drafters.eagle3 import rope_tables
from ecospec_runtime.pool import Pool
from ecospec_runtime.statistics import loop_share
from ecospec_runtime.target import Target
from pipelines.reference import head as reference
from pipelines.reference.corpus import prompts
from pipelines.reference.ngram import KneserNey, perplexity, unigram
from pipelines.reference.report import accepted_depth, balance
from pipelines.reference.unlikelihood import continue_greedily, third_time


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir, dtype="float32")


@pytest.fixture
def folder(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh reference head for the tiny target, with every weight random, saved in the published layout."""
    monkeypatch.setattr(reference, "DRAFT_VOCABULARY", 40)
    monkeypatch.setattr(reference, "INTERMEDIATE", 48)
    assert isinstance(target.model, Qwen3MoeForCausalLM)
    ids = torch.arange(40) * 2 + 3
    head = reference.new_head(target.model, ids)
    generator = torch.Generator().manual_seed(5)
    for p in head.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator)
    reference.save_head(head, ids, tmp_path / "head")
    return tmp_path / "head"


def test_saved_head_loads_with_the_right_layers_and_map(folder: Path, target: Target) -> None:
    drafter: Any = load_drafter(folder, target)
    assert drafter.aux_layers == (2, 3, 4)
    assert isinstance(target.model, Qwen3MoeForCausalLM)
    again, ids = reference.load_head(folder, target.model)
    assert ids.tolist() == list(range(3, 83, 2))
    assert again.config.aux_layers == (2, 3, 4)


def test_a_head_that_shares_the_targets_embedding_goes_on_sharing_it(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "DRAFT_VOCABULARY", 40)
    head = reference.new_head(target.model, torch.arange(40), own_embedding=False)
    reference.save_head(head, torch.arange(40), tmp_path)
    again, _ = reference.load_head(tmp_path, target.model)
    assert not hasattr(again, "embed_tokens")
    module = reference.HeadModule(target.model, again, torch.arange(40), minutes=1, lr=1e-3, steps=2, share=1.0)
    losses = module.losses(torch.randint(1, 96, (2, 16)))
    assert len(losses) == 3 and all(loss.isfinite() for loss, _ in losses)


def test_unrolled_steps_are_what_drafting_computes(folder: Path, target: Target) -> None:
    """Up to the 16 bits of mantissa that states keep in products with bf16 matrices on processors with AVX512-BF16."""
    drafter: Any = load_drafter(folder, target)
    generator = torch.Generator().manual_seed(6)
    ids, start, steps = torch.randint(1, 96, (24,), generator=generator), 9, 4
    features = torch.randn(24, 96, generator=generator)
    sequence = drafter.start()
    drafter.extend(sequence, ids[1:], features[:-1])
    pool = drafter.expand_many(sequence, [start], PoolConfig(depth=steps + 1, beam=1, width=1))[0]
    ids[start + 2 : start + 2 + len(pool)] = torch.from_numpy(pool.tokens)  # the text goes on as the drafter proposes
    head, _ = reference.load_head(folder, target.model)  # type: ignore[arg-type]
    with torch.no_grad():
        embed = head.embed_tokens(ids)
        unroll = reference.Unroll(head.weights(), embed[None], features[None], rope_tables(head.config, 64))
        first = unroll.first()[0]
        torch.testing.assert_close(first[: start + 1], sequence.states[: start + 1], rtol=1e-4, atol=5e-4)
        unroll.choose(torch.tensor([2, start]))
        for k in range(1, steps + 1):
            state = unroll.step(k)[0, 1]
            torch.testing.assert_close(state, torch.from_numpy(pool.states[1 + k]), rtol=1e-4, atol=5e-4)


def test_teacher_gives_the_layers_and_probabilities_that_drafting_meets(folder: Path, target: Target) -> None:
    assert isinstance(target.model, Qwen3MoeForCausalLM)
    head, ids = reference.load_head(folder, target.model)
    module = reference.HeadModule(target.model, head, ids, minutes=1, lr=1e-3, steps=2, share=1.0)
    window = torch.randint(1, 96, (2, 20), generator=torch.Generator().manual_seed(8))
    features, probabilities = module.teach(window)
    out = target.forward(window[0], torch.arange(20), None, target.new_cache(), aux_layers=(2, 3, 4))
    assert out.aux is not None
    assert out.logits is not None
    torch.testing.assert_close(features[0], out.aux.clone(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(probabilities[0], out.logits.softmax(-1)[:, ids], rtol=1e-4, atol=1e-5)
    results = module.losses(window)
    assert len(results) == 3
    assert all(torch.isfinite(loss) for loss, _ in results)
    results[0][0].backward()
    assert head.embed_tokens.weight.grad is not None, "the head's own embedding is what is trained"


@pytest.mark.parametrize("order", [1, 2, 3])
def test_ngram_probabilities_sum_to_one(order: int) -> None:
    rng = np.random.default_rng(0)
    model = KneserNey(rng.integers(0, 7, (5, 30)) % rng.integers(1, 8, (5, 1)), 8, order)
    contexts = rng.integers(0, 8, (20, order - 1))
    total = sum(
        model.probabilities(np.concatenate((contexts, np.full((20, 1), token)), axis=1))[:, 0] for token in range(8)
    )
    np.testing.assert_allclose(total, 1.0, atol=1e-9)


def test_ngram_learns_and_unigram_does_not() -> None:
    text = np.tile(np.arange(6), 50)[None]
    ngram = KneserNey(text, 6, 5).probabilities(text)
    assert perplexity(ngram) < 1.2
    assert perplexity(unigram(text, 6)[text]) == pytest.approx(6.0, rel=1e-3)
    with pytest.raises(ValueError, match="63 bits"):
        KneserNey(text, 1 << 16, 5)


def test_accepted_depth_follows_the_tree() -> None:
    ints, floats = np.array, np.zeros
    pool = Pool(
        tokens=ints([4, 5, 6, 7]), parents=ints([-1, -1, 1, 2]), depths=ints([1, 1, 2, 3]), ranks=ints([0, 1, 0, 0]),
        log_probs=floats(4, np.float32), state_rows=ints([1, 1, 2, 3]), states=floats((4, 2), np.float32),
        entropies=floats(4, np.float32), root_token=1,
    )  # fmt: skip
    assert [accepted_depth(pool, f) for f in ([5, 6, 7, 9], [4, 6, 7], [5, 7], [8])] == [3, 1, 1, 0]
    assert loop_share([1, 2] * 5) == 1.0
    assert balance(np.array([[2, 2], [4, 0]])) == [
        {"max_over_mean": 1.0, "entropy": 1.0}, {"max_over_mean": 2.0, "entropy": 0.0},
    ]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_what_is_said_a_third_time_is_in_a_loop(ids: list[int]) -> None:
    marks = third_time(torch.tensor([ids]), 16)[0].tolist()
    for i, marked in enumerate(marks):
        thrice = [p for p in range(1, 17) if i >= 2 * p and all(ids[j] == ids[j - p] for j in range(i - p, i + 1))]
        assert marked == bool(thrice)
    assert any(marks) or loop_share(ids) == 0.0


def test_greedy_continuation_is_generates_own(target: Target) -> None:
    assert isinstance(target.model, Qwen3MoeForCausalLM)
    prompts = torch.tensor([[5, 9, 40, 3], [60, 61, 62, 2]])
    expected = target.model.generate(prompts, do_sample=False, max_new_tokens=9, eos_token_id=None)
    assert continue_greedily(target.model, prompts, 9).tolist() == expected.tolist()


def test_prompts_leave_the_newline_to_the_target() -> None:
    rows = [row["prompt"] for row in prompts("bench", 8)]
    assert len(rows) == len(set(rows)) == 8
    assert all(len(row) > 150 and row == row.strip("\n") for row in rows)
    assert rows == [row["prompt"] for row in prompts("bench", 8)]
