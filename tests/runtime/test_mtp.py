"""MTP drafting: against transformers' own `MtpModel` run by hand, in a tree, and with a target that decodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ecospec_kernels import dispatch
from ecospec_runtime import compute
from ecospec_runtime.acceptance import AcceptanceModel, LogisticWeights
from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.engine import Engine
from ecospec_runtime.policies import build_policy, parse_policy
from ecospec_runtime.pool import Pool
from ecospec_runtime.scoring import Scorer
from ecospec_runtime.target import Target
from tests.mtp_layers import EXPERTS, LAYERS, POOL, Family, H, by_hand, drafted, path_to, same, text, told
from tests.pools import check_noise
from tests.train.invented import make_profile

PROFILE = make_profile(fixed_ms=1.0, per_token_ms=0.05, per_expert_ms=0.01, plain_ms=1.2)


def test_a_pool_guesses_the_draw(deepseek: Family) -> None:
    check_noise(deepseek.drafter, told(deepseek.drafter, deepseek.target, text()), text().tolist()[1:])


@pytest.mark.parametrize("family", ["deepseek", "deepseek_full_rank", "glm"])
def test_a_chain_is_what_transformers_drafts(family: str, request: pytest.FixtureRequest) -> None:
    each: Family = request.getfixturevalue(family)
    tokens, steps = text(), 6
    path: list[int] = []
    logits = []
    for _ in range(steps):
        state = by_hand(each.mtp, each.target.model, tokens, path)[-1]
        logits.append(each.target.model.lm_head(state).detach())
        path.append(int(logits[-1].argmax()))
    sequence = told(each.drafter, each.target, tokens)
    pool = each.drafter.expand(sequence, int(tokens[-1]), PoolConfig(depth=steps, beam=1, width=1), (1.0, 0.5))
    assert pool.tokens.tolist() == path
    log_probs = torch.stack(logits).log_softmax(-1)
    np.testing.assert_allclose(pool.log_probs, log_probs.max(-1).values, atol=1e-4)
    np.testing.assert_allclose(pool.entropies[1:], -(log_probs.exp() * log_probs).sum(-1), atol=1e-4)
    np.testing.assert_allclose(pool.log_normalizers[1:, 1], (log_probs / 0.5).logsumexp(-1), atol=1e-4)


@pytest.mark.parametrize("family", ["deepseek", "deepseek_full_rank", "glm"])
def test_a_node_sees_the_text_and_its_own_path_only(family: str, request: pytest.FixtureRequest) -> None:
    each: Family = request.getfixturevalue(family)
    tokens = text()
    pool = drafted(each.drafter, each.target)
    assert len(pool) == POOL.pool_size
    assert pool.states.shape == (2 + POOL.beam * (POOL.depth - 1), each.drafter.width)
    before = by_hand(each.mtp, each.target.model, tokens[:-1], [])[-1]
    np.testing.assert_allclose(pool.states[0], before, atol=1e-4)
    for row in range(1, len(pool.states)):
        children = np.flatnonzero(pool.state_rows == row)
        if not len(children):
            continue  # expanded, but none of its children stayed
        parent = int(pool.parents[children[0]])
        state = by_hand(each.mtp, each.target.model, tokens, path_to(pool, parent))[-1]
        np.testing.assert_allclose(pool.states[row], state, atol=1e-4)
        log_probs = each.target.model.lm_head(state).log_softmax(-1).detach()
        np.testing.assert_allclose(pool.log_probs[children], log_probs[pool.tokens[children]], atol=1e-4)
        ranks = (-log_probs).argsort()[pool.ranks[children]]
        assert pool.tokens[children].tolist() == ranks.tolist()


@pytest.mark.parametrize("family", ["deepseek", "deepseek_full_rank", "glm"])
def test_deepseeks_layer_is_one_kernel(
    family: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call a level; the pool is that of transformers' own modules, which all other layers go through."""
    pytest.importorskip("numba")
    each: Family = request.getfixturevalue(family)
    sequence = told(each.drafter, each.target, text())
    dispatch.CALLS.clear()
    pool = each.drafter.expand(sequence, int(text()[-1]), POOL, (0.7,))
    assert dispatch.CALLS["mtp_layer", "cpu"] == (0 if family == "glm" else POOL.depth - 1)
    layer, kernels = each.drafter._module.layer, list(each.drafter._module.layer.modules())
    before = [type(module) for module in kernels]
    monkeypatch.setattr(each.drafter, "_direct", None)
    try:
        for module in kernels:
            if type(module).__module__ == compute.__name__:
                module.__class__ = type(module).__mro__[1]
        assert layer.mtp_block.self_attn.__class__.__module__.startswith("transformers.")
        plain = each.drafter.expand(told(each.drafter, each.target, text()), int(text()[-1]), POOL, (0.7,))
    finally:
        for module, kind in zip(kernels, before, strict=True):
            module.__class__ = kind
    same(pool, plain)


def test_the_first_state_is_the_targets_after_its_final_norm(deepseek: Family) -> None:
    tokens = text()
    output = deepseek.target.forward(
        tokens, torch.arange(len(tokens)), None, deepseek.target.new_cache(), aux_layers=deepseek.drafter.aux_layers
    )
    assert output.aux is not None
    torch.testing.assert_close(deepseek.drafter._norm(output.aux), output.hidden)


def test_pools_of_many_roots_are_those_of_each_alone(deepseek: Family) -> None:
    """In any order, and the sequence itself is left as it was."""
    tokens = text()
    sequence = told(deepseek.drafter, deepseek.target, tokens)
    roots = [5, 17, 9, 22, 0]
    pools = deepseek.drafter.expand_many(sequence, roots, POOL, (0.7,))
    for root, pool in zip(roots, pools, strict=True):
        alone = told(deepseek.drafter, deepseek.target, tokens[: root + 2])
        same(pool, deepseek.drafter.expand(alone, int(tokens[root + 1]), POOL, (0.7,)))
    assert len(sequence.cache) == sequence.length == 23
    same(drafted(deepseek.drafter, deepseek.target), deepseek.drafter.expand(sequence, int(tokens[-1]), POOL, (0.7,)))


def test_catching_up_in_pieces_with_trees_between_equals_one_extension(deepseek: Family) -> None:
    tokens = text(700)  # more than the first buffers and one pass hold
    n, target, drafter = 699, deepseek.target, deepseek.drafter
    aux = target.forward(
        tokens[:n], torch.arange(n), None, target.new_cache(), aux_layers=drafter.aux_layers, logits=False
    ).aux
    assert aux is not None
    sequence, done = drafter.start(), 0
    for piece in (1, 2, 5, 300, 1, 290, 100):
        end = done + piece
        drafter.extend(sequence, tokens[done + 1 : end + 1], aux[done:end])
        pool = drafter.expand(sequence, int(tokens[end]), POOL)
        done = end
    assert done == n
    whole = drafter.start()
    drafter.extend(whole, tokens[1:], aux)
    same(pool, drafter.expand(whole, int(tokens[-1]), POOL))


def test_a_smaller_pool_is_a_part_of_the_larger(deepseek: Family) -> None:
    tokens = text()
    sequence = told(deepseek.drafter, deepseek.target, tokens)
    full = deepseek.drafter.expand(sequence, int(tokens[-1]), POOL)
    cut = deepseek.drafter.expand(sequence, int(tokens[-1]), POOL.cut(2))
    assert cut.tokens.tolist() == full.tokens[full.depths <= 2].tolist()
    reach = np.exp(full.log_probs[full.depths == 1][2]) * 0.99
    narrow = deepseek.drafter.expand(sequence, int(tokens[-1]), POOL.cut(None, float(reach)))
    assert (narrow.depths == 1).sum() >= 3
    assert len(narrow) < len(full)


def test_misuse_is_an_error(deepseek: Family) -> None:
    drafter = deepseek.drafter
    sequence = told(drafter, deepseek.target, text())
    with pytest.raises(ValueError, match="last row"):
        drafter.expand(sequence, int(text()[-1]) + 1, POOL)
    with pytest.raises(ValueError, match="roots"):
        drafter.expand_many(sequence, [23], POOL)
    with pytest.raises(ValueError, match="feature rows"):
        drafter.extend(drafter.start(), torch.tensor([1, 2]), torch.zeros(3, H))
    with pytest.raises(ValueError, match="64 wide"):
        drafter.extend(drafter.start(), torch.tensor([1]), torch.zeros(1, 64))


def guessing_predictor() -> Any:
    """Stands for a predictor: random experts, from states of the drafter's width."""
    rng = np.random.default_rng(0)

    def predict(pool: Pool, embed: Any, routing: bool = True) -> Any:
        assert pool.states.shape[1] == H
        n = len(pool) + 1
        logits = rng.standard_normal((n, LAYERS - 1, EXPERTS)).astype(np.float32)
        return SimpleNamespace(routing_logits=logits, acceptance_logits=np.zeros(n, np.float32))

    shapes = SimpleNamespace(layers=LAYERS - 1, experts=EXPERTS, top_k=2)
    learned = AcceptanceModel(best="raw", temperature=1.0, logistic=LogisticWeights())
    return SimpleNamespace(shapes=shapes, predict=predict, acceptance=learned)


@pytest.mark.parametrize("policy", ["confidence:budget=12", "ratio:budget=6", "throughput:pause=0"])
def test_greedy_text_is_that_of_generate(deepseek: Family, policy: str) -> None:
    target = deepseek.target
    predictor = None if policy.startswith("confidence") else guessing_predictor()
    engine = Engine(
        target, deepseek.drafter, Scorer(predictor, "raw", target.moe_layers, target.experts),
        build_policy(parse_policy(policy)), PROFILE, PoolConfig(depth=3, beam=2, width=8),
    )  # fmt: skip
    accepted = verified = 0
    for seed in (1, 2) if predictor is None else (1,):
        prompt = text(12, seed)
        expected = target.model.generate(
            prompt[None], attention_mask=torch.ones(1, 12), do_sample=False, max_new_tokens=60, eos_token_id=None,
            pad_token_id=0,
        )[0, 12:].tolist()  # fmt: skip
        stream = engine.generate(prompt.tolist(), GenerationConfig(max_new_tokens=60, eos_token_id=()))
        assert [token.id for token in stream] == expected
        accepted, verified = accepted + stream.statistics.accepted, verified + stream.statistics.verified
    assert verified > accepted > 0


def test_its_own_router_is_never_recorded(deepseek: Family) -> None:
    target, drafter, tokens = deepseek.target, deepseek.drafter, text()
    assert target.moe_layers == LAYERS - 1

    def routing() -> Tensor:
        cache = target.new_cache()
        target.forward(tokens[:8], torch.arange(8), None, cache, aux_layers=drafter.aux_layers, routing=True)
        if drafts:
            sequence = told(drafter, target, tokens)
            target.forward(tokens[:1], torch.arange(1), None, target.new_cache(), routing=True)  # hooks are armed
            drafter.expand(sequence, int(tokens[-1]), POOL)
            assert not target._routing
        output = target.forward(tokens[8:], torch.arange(8, 24), None, cache, routing=True)
        assert output.routing is not None
        return output.routing

    drafts = False
    plain = routing()
    drafts = True
    assert plain.shape == (16, LAYERS - 1, 2)
    assert torch.equal(plain, routing())
    experts = {id(module) for module in target.expert_modules}
    assert not experts & {id(module) for module in drafter._module.modules()}


def test_bfloat16_keeps_the_router_in_float32_and_drafts_much_the_same(deepseek: Family) -> None:
    target = Target.from_pretrained(deepseek.folder, dtype="bfloat16")
    drafter: Any = load_drafter(deepseek.folder, target)
    values = drafter._module.layer.state_dict()
    reference = target.model.model.layers[-1].state_dict()
    assert {name: values[f"mtp_block.{name}"].dtype for name in reference} == {k: v.dtype for k, v in reference.items()}
    assert values["eh_proj.weight"].dtype == torch.bfloat16
    exact: Any = load_drafter(deepseek.folder, target, "float32")  # of another type than the target
    for each in (drafter, exact):
        pairs = [(drafted(each, target, n).states[1], drafted(deepseek.drafter, deepseek.target, n).states[1])
                 for n in range(5, 14)]  # fmt: skip
        assert np.median([np.corrcoef(*pair)[0, 1] for pair in pairs]) > 0.999  # a router may flip now and then


def test_the_target_is_not_touched_by_the_drafters_settings(deepseek: Family) -> None:
    before = deepseek.target.config.to_dict()
    load_drafter(deepseek.folder, deepseek.target, "bfloat16")
    assert deepseek.target.config.to_dict() == before
    assert deepseek.target.config._attn_implementation == "sdpa"
