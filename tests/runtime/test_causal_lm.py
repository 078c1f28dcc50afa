"""The causal LM drafter: its trees against plain passes of the same model, its cache, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from ecospec_kernels import dispatch
from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.drafters.causal_lm import CHUNK, CausalLMDrafter, DraftModel
from ecospec_runtime.engine import Engine
from ecospec_runtime.errors import UserError
from ecospec_runtime.policies import build_policy, parse_policy
from ecospec_runtime.pool import Pool
from ecospec_runtime.target import Target
from tests.models import beginning_tokenizer, save_model, tiny_tokenizer
from tests.pools import check_noise

SHAPE = PoolConfig(depth=4, beam=3, width=5)
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "initializer_range": 0.4, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
TEXT = [5, 9, 40, 3, 60, 61, 9, 40, 7, 8, 9, 50, 51]  # row j of a sequence is token j + 1 of a text


def llama(vocabulary: int = 96, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": vocabulary, **changes}))


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("lm") / "llama", llama())


@pytest.fixture(scope="module")
def drafter(folder: Path, target: Target) -> Any:
    return load_drafter(folder, target)


def hidden(rows: int, start: int = 0) -> torch.Tensor:
    """Feature rows that can be told apart."""
    return torch.arange(start, start + rows).float()[:, None].expand(-1, 32)


def told(drafter: Any, tokens: list[int]) -> Any:
    sequence = drafter.start()
    drafter.extend(sequence, torch.tensor(tokens), hidden(len(tokens)))
    return sequence


def plain(drafter: Any, tokens: list[int]) -> torch.Tensor:
    """log p of the next token from a pass of the model alone, over the target's vocabulary."""
    with torch.inference_mode():
        logits = drafter.model.model(input_ids=torch.tensor([tokens])).logits[0, -1]
    return logits[:96].float().log_softmax(-1)


def check_tree(drafter: Any, pool: Pool, text: list[int], shape: PoolConfig) -> None:
    """Every node is among the best of a plain pass over text and path, with its log p, entropy and normalizers."""
    paths: list[list[int]] = []
    for i, parent in enumerate(pool.parents.tolist()):
        above = paths[parent] if parent >= 0 else []
        paths.append([*above, int(pool.tokens[i])])
        expected = plain(drafter, text + above)
        row = pool.state_rows[i]
        assert pool.tokens[i] == expected.topk(shape.width).indices[pool.ranks[i]]
        assert pool.log_probs[i] == pytest.approx(float(expected[pool.tokens[i]]), abs=1e-4)
        assert pool.entropies[row] == pytest.approx(float(-(expected.exp() * expected).sum()), abs=1e-4)
        assert pool.log_normalizers[row] == pytest.approx(
            [float((expected / t).logsumexp(-1)) for t in pool.temperatures], abs=1e-4
        )
    assert pool.depths.tolist() == [len(path) for path in paths]
    assert len(pool) == shape.pool_size


def test_a_tree_is_what_plain_passes_say(drafter: Any) -> None:
    sequence = told(drafter, TEXT)
    pool = drafter.expand(sequence, TEXT[-1], SHAPE, (0.7, 1.0))
    check_tree(drafter, pool, TEXT, SHAPE)
    assert pool.states.tolist() == [[len(TEXT) - 1.0] * 32]
    assert len(pool.entropies) == pool.expanded + 2 == 2 + 3 * 3
    before = plain(drafter, TEXT[:-1])
    assert pool.entropies[0] == pytest.approx(float(-(before.exp() * before).sum()), abs=1e-4)
    assert (len(sequence.cache), pool.levels, pool.root_token) == (len(TEXT), 4, TEXT[-1])


def test_a_pool_guesses_the_draw(drafter: Any) -> None:
    check_noise(drafter, told(drafter, TEXT), TEXT)


def test_the_target_as_its_own_drafter_guesses_every_draw(target: Target) -> None:
    """Logits and noise are the same on both sides, at every level; without the noise it guesses few at this temperature."""
    drafter = CausalLMDrafter(target, target, target.fingerprint)
    drafter._first = [TEXT[0]]  # the prompt's first token, which its tokenizer would put there
    config = GenerationConfig(max_new_tokens=40, temperature=2.0, seed=3, eos_token_id=())
    policy = build_policy(parse_policy("confidence:budget=4,acceptance=raw"))
    engine = Engine(target, drafter, policy=policy, pool=PoolConfig(depth=4, beam=1, width=1))
    stream = engine.generate(TEXT, config)
    text = [token.id for token in stream]
    assert text == [token.id for token in Engine(target).generate(TEXT, config)]
    assert (stream.statistics.passes, stream.statistics.accepted) == (8, 32)
    drafter.expand = lambda *arguments: CausalLMDrafter.expand(drafter, *arguments[:4])  # type: ignore[method-assign]
    stream = engine.generate(TEXT, config)
    assert [token.id for token in stream] == text
    assert stream.statistics.accepted < 10


def same(left: Pool, right: Pool) -> None:
    for name in ("tokens", "parents", "depths", "ranks", "state_rows", "states"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
    for name in ("log_probs", "entropies", "log_normalizers"):
        np.testing.assert_allclose(getattr(left, name), getattr(right, name), atol=1e-4)
    assert (left.levels, left.root_token) == (right.levels, right.root_token)


def test_pools_do_not_depend_on_how_rows_came_or_on_later_ones(drafter: Any) -> None:
    """Rows one by one, with trees grown and rejected between, against all rows at once and pools of earlier roots."""
    live, pools = drafter.start(), []
    for row, token in enumerate(TEXT):
        drafter.extend(live, torch.tensor([token]), hidden(1, row))
        pools.append(drafter.expand(live, token, SHAPE, (1.0,)))
    whole = told(drafter, TEXT)
    for now, later in zip(pools, drafter.expand_many(whole, list(range(len(TEXT))), SHAPE, (1.0,)), strict=True):
        same(now, later)
    assert len(whole.cache) == len(live.cache) == len(TEXT)
    narrow = PoolConfig(depth=3, beam=1, width=2)  # one row a level: its mask counts too
    for now, root in zip(drafter.expand_many(whole, [2, 6], narrow), (2, 6), strict=True):
        check = told(drafter, TEXT[: root + 1])
        same(now, drafter.expand(check, TEXT[root], narrow))


def test_a_long_prompt_comes_in_chunks(drafter: Any) -> None:
    tokens = [(7 * i * i + i) % 90 + 1 for i in range(2 * CHUNK + 5)]
    pool = drafter.expand(told(drafter, tokens), tokens[-1], SHAPE, (1.0,))
    check_tree(drafter, pool, tokens, SHAPE)


@pytest.mark.parametrize("window", [{"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}])
def test_a_sliding_window_is_kept_in_trees(window: dict[str, Any], tmp_path: Path, target: Target) -> None:
    torch.manual_seed(4)
    model = Qwen2ForCausalLM(Qwen2Config(**{**SMALL, "vocab_size": 96, **window}))
    assert set(model.config.layer_types) == {"full_attention", "sliding_attention"}
    drafter = load_drafter(save_model(tmp_path / "qwen", model), target)
    check_tree(drafter, drafter.expand(told(drafter, TEXT), TEXT[-1], SHAPE, (1.0,)), TEXT, SHAPE)


def test_a_begin_of_text_token_stands_for_the_prompts_first(tmp_path: Path, target: Target) -> None:
    drafter = load_drafter(save_model(tmp_path / "llama", llama(), beginning_tokenizer()), target)
    first = drafter.expand(told(drafter, TEXT[:1]), TEXT[0], SHAPE, (1.0,))
    check_tree(drafter, first, [0, *TEXT[:1]], SHAPE)
    before = plain(drafter, [0])
    assert first.entropies[0] == pytest.approx(float(-(before.exp() * before).sum()), abs=1e-4)
    pools = drafter.expand_many(told(drafter, TEXT), [0, 3], SHAPE, (1.0,))
    same(pools[0], first)
    check_tree(drafter, pools[1], [0, *TEXT[:4]], SHAPE)


@pytest.mark.parametrize("rows", [128, 90])
def test_embeddings_may_be_padded_at_will(rows: int, tmp_path: Path, target: Target) -> None:
    """What lies beyond the target's vocabulary is never proposed; ids beyond the drafter's rows do not stop it."""
    model = llama(rows)
    with torch.no_grad():
        model.lm_head.weight[96:] = 10 * model.lm_head.weight[: max(0, rows - 96)]  # the padding would win
    drafter: Any = load_drafter(save_model(tmp_path / "padded", model), target)
    text = [*TEXT, 95]
    pool = drafter.expand(told(drafter, text), 95, SHAPE, (1.0,))
    assert pool.tokens.max() < min(rows, 96)
    check_tree(drafter, pool, [min(token, rows - 1) for token in text], SHAPE)


def test_a_pool_is_cut_by_reach_as_it_grows(drafter: Any) -> None:
    sequence = told(drafter, TEXT)
    full = drafter.expand(sequence, TEXT[-1], SHAPE)
    reach = full.log_probs.copy()
    for i, parent in enumerate(full.parents.tolist()):
        reach[i] += reach[parent] if parent >= 0 else 0
    least = float(np.exp(np.sort(reach)[-6]))
    cut = drafter.expand(sequence, TEXT[-1], SHAPE.cut(None, least * 0.999))
    assert sorted(cut.tokens.tolist()) == sorted(full.tokens[reach >= np.log(least * 0.999)].tolist())
    assert len(cut) == 6


def test_bfloat16_runs_through_the_kernels(drafter: Any, folder: Path, target: Target) -> None:
    """And every node of its tree is about as likely as in float32."""
    rounded: Any = load_drafter(folder, target, "bfloat16")
    assert rounded.model.dtype == torch.bfloat16
    calls = Counter(dispatch.CALLS)
    pool = rounded.expand(told(rounded, TEXT), TEXT[-1], SHAPE)
    if dispatch.ENABLED:
        assert set(dispatch.CALLS - calls) == {("few_row_linear", "cpu"), ("rms_norm", "cpu")}
    paths: dict[int, list[int]] = {-1: []}
    for i, (token, parent) in enumerate(zip(pool.tokens.tolist(), pool.parents.tolist(), strict=True)):
        exact = plain(drafter, TEXT + paths[parent])
        assert exact.std() > 1, "otherwise any log p would be close"
        assert pool.log_probs[i] == pytest.approx(float(exact[token]), abs=0.15)
        paths[i] = [*paths[parent], token]
    assert pool.states.dtype == np.float32


def test_what_a_bundle_compares(drafter: Any, target: Target, folder: Path) -> None:
    assert (drafter.kind, drafter.features, drafter.width, drafter.aux_layers) == (
        "causal_lm",
        "target_hidden",
        32,
        (7,),
    )
    assert drafter.fingerprint == load_drafter(folder, target).fingerprint


def refused(folder: Path, target: Target) -> str:
    with pytest.raises(UserError) as error:
        load_drafter(folder, target)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"drafter {folder}")
    return str(error.value)


def test_a_text_longer_than_the_model_reads_is_not_drafted_for(tmp_path: Path, target: Target) -> None:
    model = llama()
    model.config.max_position_embeddings = 12
    drafter = load_drafter(save_model(tmp_path / "short", model), target)
    features = torch.zeros(9, target.hidden_size)
    sequence = drafter.start()
    drafter.extend(sequence, torch.arange(1, 6), features[:5])
    assert len(drafter.expand(sequence, 5, PoolConfig(depth=3, beam=2, width=4)))
    drafter.extend(sequence, torch.arange(6, 12), features[:6])
    assert not len(drafter.expand(sequence, 11, PoolConfig(depth=3, beam=2, width=4)))
    drafter.extend(sequence, torch.arange(12, 20), features[:8])
    assert not len(drafter.expand(sequence, 19, PoolConfig(depth=3, beam=2, width=4), (0.5,)))


def test_another_tokenizer_is_refused_with_both_sizes(tmp_path: Path, target: Target) -> None:
    message = refused(save_model(tmp_path / "small", llama(), tiny_tokenizer(64)), target)
    assert "it has 64 tokens, the target's 96" in message
    swapped = tiny_tokenizer()
    text = json.loads(swapped.backend_tokenizer.to_str())
    vocabulary = text["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    swapped._tokenizer = type(swapped.backend_tokenizer).from_str(json.dumps(text))
    assert "2 ids name other tokens, first 67 ('b' here, 'a' there)" in refused(
        save_model(tmp_path / "swapped", llama(), swapped), target
    )


def mamba() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=16, num_hidden_layers=1, state_size=4))


def qwen3_next() -> PreTrainedModel:
    config = Qwen3NextConfig(
        **{**SMALL, "vocab_size": 96, "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
           "shared_expert_intermediate_size": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 1,
           "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


@pytest.mark.parametrize(("model", "name"), [(mamba, "MambaForCausalLM"), (qwen3_next, "Qwen3NextForCausalLM")])
def test_a_state_that_cannot_be_rolled_back_is_refused(
    model: Callable[[], PreTrainedModel], name: str, tmp_path: Path, target: Target
) -> None:
    assert name in refused(save_model(tmp_path / "model", model()), target)


def test_a_rejected_row_that_leaves_a_trace_is_noticed(
    folder: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftModel, "commit", lambda *_: None)
    assert "LlamaForCausalLM computes other hidden states" in refused(folder, target)


def test_other_architectures_are_refused(tmp_path: Path, target: Target, folder: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["T5ForConditionalGeneration"]}))
    assert "T5ForConditionalGeneration" in refused(tmp_path, target)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    assert "config and weights are not of one model" in refused(tmp_path, target)
