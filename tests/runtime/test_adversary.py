"""A drafter that is sure of itself and always wrong: drafting stops, is tried now and then, and comes back when it pays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ecospec_runtime import gate
from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.engine import Engine
from ecospec_runtime.policies import build_policy, parse_policy
from ecospec_runtime.target import Target
from tests.pools import make_profile

PROMPT, TOKENS, TURN = [5, 9, 40, 3], 160, 90
SHAPE = PoolConfig(depth=3, beam=2, width=3)
POLICIES = ("throughput:node_experts=1,acceptance=raw", "utility")


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir)


@pytest.fixture(scope="module")
def text(target: Target) -> list[int]:
    stream = Engine(target).generate(PROMPT, GenerationConfig(max_new_tokens=TOKENS + 8, eos_token_id=()))
    return PROMPT + [token.id for token in stream]


def lying(
    target: Target, text: list[int], stub_drafter: Any, policy: str, until: int = TOKENS
) -> tuple[Engine, list[int]]:
    """An engine whose drafter is wrong up to a position and right from there on; and the positions that were drafted at."""

    def propose(context: list[int], path: list[int]) -> list[int]:
        at = 1 + len(context) + len(path)
        right = text[at] if at < len(text) else 0
        return [(right + shift) % 96 for shift in ((0, 1, 2) if at > until else (1, 2, 3))]

    drafter, spec = stub_drafter(propose, confidence=0.99), parse_policy(policy)
    drafted, expand = [], drafter.expand

    def watched(sequence: Any, root: int, config: PoolConfig, *rest: Any) -> Any:
        drafted.append(1 + len(sequence.tokens))
        return expand(sequence, root, config, *rest)

    drafter.expand = watched
    return Engine(target, drafter, None, build_policy(spec), make_profile(0.05, 0.05), SHAPE), drafted


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["liar", "reformed"])
def test_drafting_stops_and_is_tried_again(
    target: Target, text: list[int], stub_drafter: Any, policy: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "LOSS_SHARE", 0.1)  # as if the text were a dozen times as long
    engine, drafted = lying(target, text, stub_drafter, policy, TOKENS if kind == "liar" else TURN)
    stream = engine.generate(PROMPT, GenerationConfig(max_new_tokens=TOKENS, eos_token_id=()))
    assert [token.id for token in stream] == text[len(PROMPT) :][:TOKENS]
    before = [at for at in drafted if at <= TURN]
    assert 3 <= len(before) <= 24, "a few tries in the first steps and between the pauses"
    if kind == "liar":
        assert stream.statistics.accepted == 0
        assert len(drafted) <= 28
        assert drafted[-1] > TURN, "it is tried again"
    else:
        assert stream.statistics.accepted > 20
        assert stream.statistics.passes < TOKENS - 20


@pytest.mark.parametrize("policy", [POLICIES[0], "utility:pause=64"])
def test_what_one_text_showed_holds_for_the_next(
    target: Target, text: list[int], stub_drafter: Any, policy: str
) -> None:
    """Not at another temperature, and not for another engine. Texts that are decoded by turns share it as well."""

    def decode(engine: Engine, temperature: float = 0.0, streams: int = 1) -> int:
        """Number of drafts."""
        settings = GenerationConfig(max_new_tokens=16, temperature=temperature, eos_token_id=())
        running = [engine.generate(PROMPT, settings) for _ in range(streams)]
        for tokens in zip(*running, strict=True):
            assert len({token.id for token in tokens}) == 1
        return sum(stream.statistics.drafts for stream in running)

    engine, drafted = lying(target, text, stub_drafter, policy)
    first = decode(engine)
    assert 0 < first == len(drafted) < 15
    assert decode(engine) == decode(engine) == 0
    assert decode(engine, 0.7) == first
    assert decode(engine.with_policy(policy)) == first
    assert decode(engine.with_policy(policy), streams=3) == first


def test_a_pass_that_fails_is_not_remembered(
    target: Target, text: list[int], stub_drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as a gain nor as a loss."""
    settings = GenerationConfig(max_new_tokens=16, eos_token_id=())
    for policy in POLICIES:
        (engine, _), (fresh, _) = (lying(target, text, stub_drafter, policy) for _ in range(2))
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_verify", lambda *_: 1 / 0)
            for _ in range(5):
                with pytest.raises(ZeroDivisionError):
                    list(engine.generate(PROMPT, settings))
        drafts = []
        for each in (engine, fresh):
            stream = each.generate(PROMPT, settings)
            assert [token.id for token in stream] == text[len(PROMPT) :][:16]
            drafts.append(stream.statistics.drafts)
        assert drafts[0] == drafts[1]
