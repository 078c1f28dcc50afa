"""The three seed families, with all that is special about them: routing, greedy equality, sampling, bfloat16.

Tiny random instances whose norms, biases, sinks and routing corrections are noise; windows of 8 tokens, prefill chunks of 16.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ecospec_kernels import dispatch
from ecospec_runtime import engine
from ecospec_runtime.acceptance import AcceptanceModel, Calibration, LogisticWeights
from ecospec_runtime.architectures import Architecture, chosen_by_routers, save
from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.engine import Engine
from ecospec_runtime.policies import build_policy, parse_policy
from ecospec_runtime.pool import Pool
from ecospec_runtime.scoring import Scorer
from ecospec_runtime.statistics import divergence, transformers_greedy
from ecospec_runtime.target import Target
from ecospec_runtime.verify import tree_mask
from tests.oracles import chi_square, exact_distributions, mixed_drafter
from tests.train.invented import make_profile

MODEL = AcceptanceModel(
    best="head", temperature=1.0, logistic=LogisticWeights(),
    sampled={0.7: Calibration(temperature=1.0, logistic=LogisticWeights(log_p=1.5), head_share=0.8)},
)  # fmt: skip
WINDOW, CHUNK, COUNT = 8, 16, 32
NEAR_TIE = 0.2  # of logits that spread over several units
LENGTHS = (1, 5, 20, 40)  # prompts below and above the window and the prefill chunk
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 3, "norm_topk_prob": True},
    "gpt_oss": {"num_hidden_layers": 3, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "deepseek_v3": {"num_hidden_layers": 3, "num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "n_routed_experts": 16, "num_local_experts": 16,
                    "num_experts_per_tok": 3, "routed_scaling_factor": 2.5},
}  # fmt: skip
POLICIES = ("off", "confidence:budget=6", "ratio:budget=4", "prefix", "throughput:pause=0")
PROFILE = make_profile(fixed_ms=1.0, per_token_ms=0.02, per_expert_ms=0.002, plain_ms=1.2)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of one family's tiny instance."""
    path = tmp_path_factory.mktemp(request.param)
    save(Architecture(request.param, "", FAMILIES[request.param]), path)
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.from_pretrained(folder)


@pytest.fixture(scope="module")
def texts(target: Target) -> list[list[int]]:
    """Prompts of every length with 32 tokens of transformers' own greedy continuation."""
    rng = random.Random(4)
    found = []
    for length in LENGTHS:
        prompt = [rng.randrange(1, 96) for _ in range(length)]
        found.append(prompt + transformers_greedy(target, [prompt], COUNT, ends=False)[0])
    return found


def liar(target: Target, seed: int = 0) -> Any:
    """Stands for a predictor that returns NaN, infinities, huge numbers and high praise for the worst candidates."""
    rng = np.random.default_rng(seed)

    def predict(pool: Pool, embed: Any, routing: bool = True) -> Any:
        routing = rng.standard_normal((len(pool) + 1, target.moe_layers, target.experts)).astype(np.float32) * 1e3
        praise = np.where(pool.ranks == pool.ranks.max(), 20.0, rng.standard_normal(len(pool)))
        for bad in (np.nan, np.inf, -np.inf):
            routing[rng.random(routing.shape) < 0.1] = bad
            praise[rng.random(len(pool)) < 0.1] = bad
        return SimpleNamespace(routing_logits=routing, acceptance_logits=np.r_[0.0, praise].astype(np.float32))

    shapes = SimpleNamespace(layers=target.moe_layers, experts=target.experts, top_k=target.top_k)
    return SimpleNamespace(shapes=shapes, predict=predict, acceptance=MODEL)


def decoder_for(target: Target, drafter: Any, policy: str) -> Engine:
    scorer = Scorer(liar(target), "head", target.moe_layers, target.experts)
    return Engine(
        target, drafter, scorer, build_policy(parse_policy(policy)), PROFILE, PoolConfig(depth=4, beam=3, width=5)
    )


def test_routing_is_what_the_routers_chose(target: Target) -> None:
    """In a chain and in a tree: the ids of the router's own output, and those of its published rule on its input."""
    seen: list[torch.Tensor] = []
    routers = [m for m in target.model.modules() if type(m).__name__.endswith(("TopKRouter", "TopkRouter"))]
    assert len(routers) == target.moe_layers
    handles = [r.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, -2))) for r in routers]
    cache = target.new_cache()
    ids = torch.randint(1, 96, (20,), generator=torch.Generator().manual_seed(6))
    try:
        for start, parents in ((0, None), (12, [0, 0, 1, 1, 2, 4, 6])):
            rows = ids[start : start + (12 if parents is None else 8)]
            mask = None if parents is None else tree_mask(parents, start)
            seen.clear()
            with chosen_by_routers(target) as chosen:
                output = target.forward(rows, torch.arange(start, start + len(rows)), mask, cache, routing=True)
            assert output.routing is not None
            assert torch.equal(output.routing, torch.stack(chosen, dim=1))
            for layer, (router, hidden) in enumerate(zip(routers, seen, strict=True)):
                expected = RULES[target.config.model_type](router, hidden)
                assert [set(row) for row in output.routing[:, layer].tolist()] == [
                    set(row) for row in expected.tolist()
                ]
    finally:
        for handle in handles:
            handle.remove()


def test_experts_by_falling_weight_are_those_of_the_router(target: Target) -> None:
    """DeepSeek's router does not sort; what reads routing by weight must not depend on that."""
    weights: list[torch.Tensor] = []
    handles = [
        m.register_forward_pre_hook(lambda module, args, kwargs: weights.append([*args, *kwargs.values()][2]), with_kwargs=True)
        for m in target.expert_modules
    ]  # fmt: skip
    try:
        output = whole_pass(target, torch.randint(1, 96, (20,), generator=torch.Generator().manual_seed(6)).tolist())
    finally:
        for handle in handles:
            handle.remove()
    assert target.knows_weights
    assert output.routing is not None and output.routing_by_weight is not None
    assert torch.equal(output.routing.sort(-1).values, output.routing_by_weight.sort(-1).values)
    scores = torch.zeros(*output.routing.shape[:2], target.experts).scatter(-1, output.routing, torch.stack(weights, 1))
    falling = scores.gather(-1, output.routing_by_weight)
    assert (falling.diff(dim=-1) <= 0).all()
    if target.config.model_type == "deepseek_v3":
        assert (scores.gather(-1, output.routing).diff(dim=-1) > 0).any()


@torch.inference_mode()
def _softmax_rule(router: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return (hidden @ router.weight.T).topk(2).indices  # type: ignore[operator]


@torch.inference_mode()
def _biased_rule(router: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    chosen = (hidden @ router.weight.T + router.bias).topk(2).indices  # type: ignore[operator]
    assert not torch.equal(chosen, _softmax_rule(router, hidden)), "the bias must matter"
    return chosen


@torch.inference_mode()
def _grouped_rule(router: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3: sigmoid plus correction; the two groups of four whose two best sum highest; three experts of those."""
    scores = (hidden @ router.weight.T).sigmoid()  # type: ignore[operator]
    corrected = scores + router.e_score_correction_bias
    groups = corrected.view(-1, 4, 4)
    best = groups.topk(2).values.sum(-1).topk(2).indices
    allowed = torch.zeros(len(hidden), 4, dtype=torch.bool).scatter_(1, best, True)
    chosen = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(1).topk(3).indices
    for other in (scores, corrected):
        assert not torch.equal(chosen.sort().values, other.topk(3).indices.sort().values), "bias and groups must matter"
    return chosen


RULES: dict[str, Any] = {"qwen3_moe": _softmax_rule, "gpt_oss": _biased_rule, "deepseek_v3": _grouped_rule}


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_text_is_transformers_own(
    target: Target, texts: list[list[int]], stub_drafter: Any, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 tokens a policy, 640 in all, four windows a prompt, with rejected tokens in every pass that verifies a draft."""
    monkeypatch.setattr(engine, "PREFILL_CHUNK", CHUNK)
    decoder = decoder_for(target, mixed_drafter(texts, stub_drafter), policy)
    accepted = rejected = 0
    for length, text in zip(LENGTHS, texts, strict=True):
        stream = decoder.generate(text[:length], GenerationConfig(max_new_tokens=COUNT, eos_token_id=()))
        assert [token.id for token in stream] == text[length:]
        accepted += stream.statistics.accepted
        rejected += stream.statistics.verified - stream.statistics.accepted
    assert (accepted > 16) == (policy != "off")
    assert (rejected > 16) == (policy != "off")


@pytest.mark.parametrize("kind", ["adversary", "oracle", "random"])
def test_greedy_text_for_other_drafters(target: Target, texts: list[list[int]], drafters: Any, kind: str) -> None:
    """Every token of every pass rejected, every pass's longest path accepted, and chance."""
    decoder = decoder_for(target, drafters(kind, texts), "confidence:budget=6")
    stream = decoder.generate(texts[2][:20], GenerationConfig(max_new_tokens=COUNT, eos_token_id=()))
    assert [token.id for token in stream] == texts[2][20:]
    if kind == "adversary":
        assert stream.statistics.accepted == 0
        assert stream.statistics.verified >= 6 * 28


# Sampling: see tests/runtime/test_distribution.py for the statistic, and for Qwen3-MoE under more settings.
SETTINGS: dict[str, dict[str, Any]] = {"plain": {"temperature": 1.0}, "nucleus": {"temperature": 1.0, "top_p": 0.9}}
SAMPLED = 300


@pytest.fixture(scope="module", params=["deepseek_v3", "gpt_oss"])
def eight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """One family with a vocabulary of 8 and two layers."""
    path = tmp_path_factory.mktemp("eight")
    changes = FAMILIES[request.param] | {"vocab_size": 8, "num_hidden_layers": 2, "initializer_range": 0.15}
    if "layer_types" in changes:
        changes["layer_types"] = changes["layer_types"][:2]
    save(Architecture(request.param, "", changes), path, seed=3)
    return Target.from_pretrained(path)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_sampled_text_follows_the_targets_distribution(eight: Target, stub_drafter: Any, name: str) -> None:
    """A drafter that is confidently wrong, a predictor that lies."""
    settings, prompt = SETTINGS[name], [1, 5, 3, 2]
    drafter = stub_drafter(lambda context, path: [7, 0, 4], confidence=0.99)
    drafter.aux_layers = (0, 1, 2)
    decoder = decoder_for(eight, drafter, "ratio:budget=6" if name == "plain" else "throughput:price=0.5,pause=0")
    config = GenerationConfig(max_new_tokens=SAMPLED, eos_token_id=(), seed=11, **settings)
    stream = decoder.generate(prompt, config)
    text = [token.id for token in stream]
    assert stream.statistics.accepted > 20, "the drafts must matter for the test to mean anything"
    assert chi_square(text, exact_distributions(eight, prompt, text, settings)) > 1e-3
    wrong = {"temperature": 1.0, "top_k": 5} if name == "plain" else {"temperature": 4.0}
    assert chi_square(text, exact_distributions(eight, prompt, text, wrong)) < 1e-3, (
        "another distribution must be told apart"
    )


def test_bfloat16_kernels_give_the_same_text_up_to_near_ties(
    folder: Path, target: Target, texts: list[list[int]], stub_drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU kernels against torch's own, plain and with drafts: texts part at near ties or flipped experts only."""
    if not dispatch.ENABLED:
        pytest.skip("no CPU kernels here")
    monkeypatch.setattr(engine, "PREFILL_CHUNK", CHUNK)
    fast = Target.from_pretrained(folder, "bfloat16")
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "ENABLED", False)
        plain = Target.from_pretrained(folder, "bfloat16")
        dispatch.CALLS.clear()
        references = [ids_of(Engine(plain), text[:length]) for length, text in zip(LENGTHS, texts, strict=True)]
        assert not [implementation for _, implementation in dispatch.CALLS if implementation == "cpu"]
        passes = [whole_pass(plain, text) for text in texts]
    for length, text, reference, without in zip(LENGTHS, texts, references, passes, strict=True):
        for decoder in (Engine(fast), decoder_for(fast, mixed_drafter(texts, stub_drafter), "confidence:budget=6")):
            found = divergence(fast, text[:length], reference, ids_of(decoder, text[:length]))
            if found is not None and abs(found.gap) > NEAR_TIE:
                shared = text[:length] + reference[: found.index]
                with monkeypatch.context() as patch:
                    patch.setattr(dispatch, "ENABLED", False)
                    own = whole_pass(plain, shared).routing
                assert not torch.equal(own.sort(-1).values, whole_pass(fast, shared).routing.sort(-1).values)
        exact = whole_pass(target, text).hidden
        errors = [float(((h.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).median())
                  for h in (without.hidden, whole_pass(fast, text).hidden)]  # fmt: skip
        assert errors[1] < max(1.5 * errors[0], 0.15)
    assert [implementation for _, implementation in dispatch.CALLS if implementation == "cpu"]


def ids_of(decoder: Engine, prompt: list[int]) -> list[int]:
    return [token.id for token in decoder.generate(prompt, GenerationConfig(max_new_tokens=16, eos_token_id=()))]


def whole_pass(target: Target, text: list[int]) -> Any:
    """One chain pass over a text, with routing."""
    return target.forward(torch.tensor(text), torch.arange(len(text)), None, target.new_cache(), routing=True)
