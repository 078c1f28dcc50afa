"""The engine's text is the target's own, whatever drafts, scores and selects; and it ends where it should.

The exactness contract: float32, temperature 0, 32 prompts x 128 tokens equal transformers' `generate(do_sample=False)`.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ecospec_runtime.acceptance import AcceptanceModel, Calibration, LogisticWeights
from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.engine import PREFILL_CHUNK, Engine
from ecospec_runtime.errors import UserError
from ecospec_runtime.gate import Outlook, Resting
from ecospec_runtime.policies import build_policy, parse_policy
from ecospec_runtime.policies.base import Policy
from ecospec_runtime.pool import Candidates, Pool
from ecospec_runtime.scoring import Scorer
from ecospec_runtime.statistics import divergence, transformers_greedy
from ecospec_runtime.target import Target
from tests.oracles import mixed_drafter
from tests.train.invented import make_profile

MODEL = AcceptanceModel(
    best="head", temperature=1.0, logistic=LogisticWeights(),
    sampled={0.7: Calibration(temperature=1.0, logistic=LogisticWeights(log_p=1.5), head_share=0.8)},
)  # fmt: skip
PROFILE = make_profile(fixed_ms=1.0, per_token_ms=0.05, per_expert_ms=0.01, plain_ms=1.2)
POLICIES = ("off", "confidence:budget=6", "ratio:budget=4", "prefix", "utility:trial=1,hold=2", "throughput:pause=0")


class RandomPolicy:
    """A random closed subset, now and then empty."""

    name, drafts, needs_routing = "random", True, False

    def __init__(self, seed: int = 0):
        self.rng = random.Random(seed)

    def select(self, candidates: Candidates, profile: Any, context: int) -> list[int]:
        chosen: set[int] = set()
        for node, parent in enumerate(candidates.pool.parents.tolist()):
            if (parent < 0 or parent in chosen) and self.rng.random() < 0.5:
                chosen.add(node)
        return sorted(chosen) if self.rng.random() < 0.8 else []

    def parameters(self) -> dict[str, Any]:
        return {}


class FixedPolicy(RandomPolicy):
    """Chooses by a function of the pool."""

    name = "fixed"

    def __init__(self, choose: Any):
        super().__init__()
        self.choose = choose

    def select(self, candidates: Candidates, profile: Any, context: int) -> list[int]:
        return self.choose(candidates.pool)


def lying_predictor(seed: int = 0, layers: int = 7) -> Any:
    """Stands for a predictor that returns NaN, infinities and huge numbers."""
    rng = np.random.default_rng(seed)

    def garbage(*shape: int) -> np.ndarray:
        values = rng.standard_normal(shape).astype(np.float32) * 1e4
        for bad in (np.nan, np.inf, -np.inf):
            values[rng.random(shape) < 0.2] = bad
        return values

    def predict(pool: Pool, embed: Any, routing: bool = True) -> Any:
        assert embed(pool.tokens).shape == (len(pool), 32)
        return SimpleNamespace(
            routing_logits=garbage(len(pool) + 1, layers, 12), acceptance_logits=garbage(len(pool) + 1)
        )

    shapes = SimpleNamespace(layers=layers, experts=12, top_k=2)
    return SimpleNamespace(shapes=shapes, predict=predict, acceptance=MODEL)


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(1, 96) for _ in range(12)] for _ in range(32)]


def greedy_texts(target: Target, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Prompt and `count` greedy tokens each, by transformers' own `generate`."""
    following = transformers_greedy(target, prompts, count, ends=False)
    return [prompt + text for prompt, text in zip(prompts, following, strict=True)]


@pytest.fixture(scope="module")
def texts(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy texts of the first four prompts."""
    return greedy_texts(target, prompts[:4], 60)


def engine_for(target: Target, drafter: Any, policy: str | Policy, predictor: Any = None) -> Engine:
    kind = "head" if predictor is not None else "raw"
    scorer = Scorer(predictor, kind, target.moe_layers, target.experts)
    built = build_policy(parse_policy(policy)) if isinstance(policy, str) else policy
    return Engine(target, drafter, scorer, built, PROFILE, PoolConfig(depth=4, beam=3, width=5))


def ids_of(engine: Engine, prompt: list[int], **settings: Any) -> list[int]:
    settings = {"eos_token_id": (), **settings}
    return [token.id for token in engine.generate(prompt, GenerationConfig(**settings))]


@pytest.fixture(scope="module")
def shallow(save_target: Any, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target of two layers, for speed: the second reads keys of the first, so that a wrong context shows."""
    return Target.from_pretrained(save_target(tmp_path_factory.mktemp("shallow"), seed=5, num_hidden_layers=2))


@pytest.fixture(scope="module")
def contract(shallow: Target, prompts: list[list[int]]) -> list[list[int]]:
    """32 greedy texts of 128 tokens."""
    return greedy_texts(shallow, prompts, 128)


def shallow_engine(target: Target, drafter: Any, policy: str | Policy) -> Engine:
    """An engine for the target of two layers, whose predictor lies."""
    drafter.aux_layers = (0, 1, 2)
    return engine_for(target, drafter, policy, lying_predictor(layers=2))


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "count"), [(p, 8 if p.startswith(("prefix", "utility")) else 32) for p in POLICIES])
def test_greedy_text_is_transformers_own(
    shallow: Target, contract: list[list[int]], stub_drafter: Any, policy: str, count: int
) -> None:
    engine = shallow_engine(shallow, mixed_drafter(contract, stub_drafter), policy)
    accepted = 0
    for text in contract[:count]:
        stream = engine.generate(text[:12], GenerationConfig(max_new_tokens=128, eos_token_id=()))
        assert [token.id for token in stream] == text[12:]
        accepted += stream.statistics.accepted
    assert (accepted > 3 * count) == (policy != "off")


@pytest.mark.parametrize("policy", ["random", "everything", "nothing"])
@pytest.mark.parametrize("kind", ["oracle", "adversary", "random"])
def test_greedy_text_for_any_drafter_and_selection(
    target: Target, prompts: list[list[int]], texts: list[list[int]], drafters: Any, policy: str, kind: str
) -> None:
    selections = {
        "random": RandomPolicy(),
        "everything": FixedPolicy(lambda pool: list(range(len(pool)))),
        "nothing": FixedPolicy(lambda pool: []),
    }
    engine = engine_for(target, drafters(kind, texts), selections[policy])
    for prompt, text in zip(prompts[:3], texts[:3], strict=True):
        stream = engine.generate(prompt, GenerationConfig(max_new_tokens=40, eos_token_id=()))
        assert [token.id for token in stream] == text[12:52]
        if policy == "everything":
            expected = {"oracle": 8, "adversary": 40}.get(kind)
            assert expected is None or stream.statistics.passes == expected


def test_real_drafter(target: Target, tiny_drafter_dir: Path, prompts: list[list[int]], texts: list[list[int]]) -> None:
    from ecospec_runtime.drafters import load_drafter

    drafter = load_drafter(str(tiny_drafter_dir), target, "float32")
    engine = engine_for(target, drafter, "confidence:budget=8")
    for prompt, text in zip(prompts[:4], texts, strict=True):
        assert prompt + ids_of(engine, prompt, max_new_tokens=48) == text[:60]


def test_prompts_of_one_token_and_of_many_chunks(target: Target, drafters: Any) -> None:
    rng = random.Random(5)
    for length in (1, 2, PREFILL_CHUNK, PREFILL_CHUNK + 1, PREFILL_CHUNK + 2):
        prompt = [rng.randrange(1, 96) for _ in range(length)]
        plain = ids_of(Engine(target), prompt, max_new_tokens=12)
        own = target.model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0
        )
        assert prompt + plain == own[0].tolist()
        drafting = engine_for(target, drafters("oracle", [prompt + plain]), "confidence:budget=4")
        assert ids_of(drafting, prompt, max_new_tokens=12) == plain


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_p": 0.9},
    {"temperature": 1.0, "seed": 5, "top_k": 3, "repetition_penalty": 1.3},
    {"temperature": 0.0, "repetition_penalty": 1.5},
]


@pytest.mark.parametrize("settings", SAMPLING)
def test_same_seed_same_text_under_every_policy(
    shallow: Target, prompts: list[list[int]], drafters: Any, settings: dict[str, Any]
) -> None:
    settings = settings | {"max_new_tokens": 32}
    reference = [ids_of(Engine(shallow), prompt, **settings) for prompt in prompts[:2]]
    full = [prompt + text for prompt, text in zip(prompts, reference, strict=False)]
    for kind in ("oracle", "adversary"):
        for policy in (*POLICIES[1:], RandomPolicy(1)):
            engine = shallow_engine(shallow, drafters(kind, full), policy)
            assert [ids_of(engine, prompt, **settings) for prompt in prompts[:2]] == reference
    if "seed" in settings:
        other = ids_of(Engine(shallow), prompts[0], **settings | {"seed": 99})
        assert other != reference[0]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7])
def test_exactly_as_many_tokens_as_asked(
    target: Target, prompts: list[list[int]], texts: list[list[int]], drafters: Any, count: int
) -> None:
    """CASES 5: a drafter that is always right must not add one."""
    engine = engine_for(target, drafters("oracle", texts), "confidence:budget=8")
    stream = engine.generate(prompts[0], GenerationConfig(max_new_tokens=count, eos_token_id=()))
    assert [token.id for token in stream] == texts[0][12 : 12 + count]
    assert (stream.reason, stream.statistics.tokens) == ("length", count)


def test_nothing_after_the_end_token(
    target: Target, prompts: list[list[int]], texts: list[list[int]], drafters: Any
) -> None:
    """CASES 4: ids, text and log-probabilities end there, also in the middle of an accepted path."""
    engine = engine_for(target, drafters("oracle", texts), "confidence:budget=8")
    text = texts[1][12:]
    for end in (text[1], text[2], text[3]):
        config = GenerationConfig(max_new_tokens=60, eos_token_id=(0, end), logprobs=True)
        stream = engine.generate(prompts[1], config)
        tokens = list(stream)
        assert [token.id for token in tokens] == text[: text.index(end) + 1]
        assert tokens[-1].text == ""
        assert all(token.logprob is not None and token.logprob <= 0 for token in tokens)
        assert stream.reason == "eos"


def test_nothing_from_a_stop_string_on(
    target: Target, prompts: list[list[int]], texts: list[list[int]], drafters: Any
) -> None:
    """CASES 4, for text."""
    engine = engine_for(target, drafters("oracle", texts), "confidence:budget=8")
    whole = target.tokenizer.decode(texts[2][12:72])
    for start, length in ((1, 1), (5, 2), (7, 3)):
        stop = whole[start : start + length]
        stream = engine.generate(prompts[2], GenerationConfig(max_new_tokens=60, eos_token_id=(), stop_strings=(stop,)))
        tokens = list(stream)
        expected = whole[: whole.index(stop)]
        assert "".join(token.text for token in tokens) == expected
        assert [token.id for token in tokens] == texts[2][12 : 12 + len(expected)]
        assert (stream.reason, stream.statistics.tokens) == ("stop", len(tokens))


def test_log_probabilities_are_the_targets(
    target: Target, prompts: list[list[int]], texts: list[list[int]], drafters: Any
) -> None:
    engine = engine_for(target, drafters("oracle", texts), "confidence:budget=5")
    tokens = list(engine.generate(prompts[3], GenerationConfig(max_new_tokens=20, eos_token_id=(), logprobs=True)))
    with torch.inference_mode():
        logits = target.model(torch.tensor([texts[3][:32]])).logits[0, 11:31].log_softmax(-1)
    expected = logits[range(20), texts[3][12:32]].tolist()
    assert [token.logprob for token in tokens] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "choose",
    [
        lambda pool: [int(np.flatnonzero(pool.parents >= 0)[0])],  # a child without its parent
        lambda pool: [0, 0],
        lambda pool: [-1],
        lambda pool: [len(pool)],
    ],
)
def test_invalid_tree_names_the_policy(target: Target, prompts: list[list[int]], drafters: Any, choose: Any) -> None:
    """CASES 2: an invalid set is refused, never decoded."""
    engine = engine_for(target, drafters("random", []), FixedPolicy(choose))
    with pytest.raises(ValueError, match="'fixed' chose an invalid tree"):
        ids_of(engine, prompts[0], max_new_tokens=8)


def test_paused_drafter_catches_up(
    target: Target, prompts: list[list[int]], texts: list[list[int]], drafters: Any
) -> None:
    """While drafting does not pay it rests; the stub checks that no row is lost when it is tried again."""

    class Rests(Resting):
        depth = None

        def verified(self, accepted: int) -> None:
            self.wait = 12

    policy = FixedPolicy(lambda pool: [])
    policy.gate, policy.outlook = lambda depth: Rests(), lambda *_: Outlook(0.0, 0.1)  # type: ignore[attr-defined]
    drafter = drafters("oracle", texts)
    stream = engine_for(target, drafter, policy).generate(
        prompts[0], GenerationConfig(max_new_tokens=30, eos_token_id=())
    )
    assert [token.id for token in stream] == texts[0][12:42]
    assert drafter.expansions == stream.statistics.drafts == 3, "at steps 0, 13 and 26"


@pytest.mark.parametrize("wait", [0, 9, 18, 19, 40])
def test_a_text_that_will_not_be_drafted_is_not_followed(
    target: Target, prompts: list[list[int]], texts: list[list[int]], drafters: Any, wait: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A drafter's rows and the hidden states it reads cost time: none of either once drafting rests beyond the text's end."""
    drafter = drafters("oracle", texts)
    engine = engine_for(target, drafter, "confidence:budget=3")
    read = engine.prefilled(prompts[0])
    engine._gates[0.0] = gate = Resting(wait=wait)  # type: ignore[abstract]
    gate.depth, gate.verified = None, lambda accepted: None  # type: ignore[attr-defined]
    asked = []
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda *a, **k: asked.append(k["aux_layers"]) or forward(*a, **k))
    for prompt in (prompts[0], read):
        gate.wait, drafter.expansions = wait, 0
        asked.clear()
        stream = engine.generate(prompt, GenerationConfig(max_new_tokens=20, eos_token_id=()))
        assert [token.id for token in stream] == texts[0][12:32]
        followed = wait < 19  # the last token of 20 needs no draft
        assert bool(drafter.expansions) == followed
        assert set(asked) == {engine._aux if followed else ()}
        assert gate.wait == max(0, wait - 19), "plain steps count all the same"


def test_statistics(target: Target, prompts: list[list[int]], texts: list[list[int]], drafters: Any) -> None:
    scorer = Scorer(None, "raw", 7, 12)
    policy = build_policy(parse_policy("confidence:budget=3"))
    engine = Engine(
        target, drafters("oracle", texts), scorer, policy, PROFILE, PoolConfig(depth=3), record_routing=True
    )
    stream = engine.generate(prompts[0], GenerationConfig(max_new_tokens=32, eos_token_id=()))
    assert len(list(stream)) == 32
    statistics = stream.statistics
    assert (statistics.tokens, statistics.prompt_tokens) == (32, 12)
    assert statistics.accept_length == pytest.approx(1 + statistics.accepted / statistics.passes)
    assert 2 <= statistics.experts_per_layer <= 8  # type: ignore[operator]
    assert statistics.union == pytest.approx(7 * statistics.experts_per_layer)  # type: ignore[operator]
    parts = (
        statistics.draft_seconds + statistics.predict_seconds + statistics.select_seconds + statistics.verify_seconds
    )
    assert 0 < parts <= statistics.seconds
    assert math.isclose(statistics.summary()["nodes"], statistics.verified / statistics.passes)
    plain = Engine(target, record_routing=True).generate(prompts[0], GenerationConfig(max_new_tokens=4))
    list(plain)
    assert plain.statistics.experts_per_layer == 2.0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "prompt is empty"), ([3, 96], "outside 0..95"), ([1] * 2049, "2049 tokens, this target takes 2048")],
)
def test_bad_prompts(target: Target, prompt: list[int], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "tokenizer", SimpleNamespace(bos_token_id=None))
    with pytest.raises(UserError, match=message):
        Engine(target).generate(prompt)


def test_what_a_policy_needs_is_named(target: Target, drafters: Any) -> None:
    with pytest.raises(UserError, match="'confidence' needs a drafter"):
        engine_for(target, None, "confidence")
    with pytest.raises(UserError, match="'ratio' needs a predictor"):
        engine_for(target, drafters("random", []), "ratio")
    scorer, policy = Scorer(lying_predictor(), "head", 7, 12), build_policy(parse_policy("throughput:price=1"))
    with pytest.raises(UserError, match="'throughput' needs a device profile"):
        Engine(target, drafters("random", []), scorer, policy)


def test_divergence_names_place_and_gap(target: Target, prompts: list[list[int]], texts: list[list[int]]) -> None:
    text = texts[0][12:30]
    assert divergence(target, prompts[0], text, text) is None
    assert divergence(target, prompts[0], text, text[:5]) is None
    other = [*text[:7], (text[7] + 1) % 96, *text[8:]]
    found = divergence(target, prompts[0], text, other)
    assert found is not None
    assert (found.index, found.reference, found.other) == (7, text[7], other[7])
    with torch.inference_mode():
        logits = target.model(torch.tensor([prompts[0] + text[:7]])).logits[0, -1]
    assert found.gap == pytest.approx(float(logits[text[7]] - logits[other[7]]), abs=1e-4)
    assert found.gap > 0


def test_text_prompt_and_text(target: Target) -> None:
    stream = Engine(target).generate("def f(x):\n", GenerationConfig(max_new_tokens=10, eos_token_id=()))
    tokens = list(stream)
    assert "".join(token.text for token in tokens) == target.tokenizer.decode([token.id for token in tokens])
    assert stream.statistics.prompt_tokens == 10
