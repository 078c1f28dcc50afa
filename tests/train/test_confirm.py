"""Choosing by decoding: paired ratios with their intervals, `off` unless the gain is beyond doubt, nothing foreign decoded."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ecospec_runtime.bench import Sample
from ecospec_runtime.errors import UserError
from ecospec_runtime.policies import parse_policy
from ecospec_train.choice import Candidate, Measured, by_decoding, top
from ecospec_train.confirm import LiveSettings, compare, held_out, interval
from tests.train.invented import make_profile

CANDIDATES = {
    name: Candidate(parse_policy(policy), "")
    for name, policy in (("off", "off"), ("confidence", "confidence:budget=4"), ("best 1", "ratio:budget=4"))
}


def samples(**seconds: list[float]) -> dict[tuple[str, float], list[list[Sample]]]:
    """Of 10 tokens each, by policy and prompt."""
    return {
        (name.replace("_", " "), 0.0): [[Sample(list(range(10)), s, 4, {})] for s in each]
        for name, each in seconds.items()
    }


def test_ratios_are_paired_by_prompt() -> None:
    """Prompts differ tenfold in speed, the ratio hardly: only pairs can see it."""
    off = [1.0, 2.0, 10.0, 0.5]
    ratios = [1.20, 1.22, 1.18, 1.21]
    found = compare(
        CANDIDATES, samples(off=off, confidence=off, best_1=[s / r for s, r in zip(off, ratios, strict=True)]), 0.0
    )
    best = found["best 1"]
    low, high = stats.ttest_1samp(np.log(ratios), 0).confidence_interval(0.95)
    assert (best.low, best.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert best.speedup == pytest.approx(math.exp(np.mean(np.log(ratios))))
    assert best.median == pytest.approx(math.sqrt(1.20 * 1.21))
    assert best.low > 1.15
    assert best.tokens_per_second == pytest.approx(40 / sum(s / r for s, r in zip(off, ratios, strict=True)))
    assert (found["confidence"].low, found["confidence"].high) == (1.0, 1.0)


def test_the_interval_holds_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(500):
        mean, half = interval(rng.normal(0.1, 0.3, size=6).tolist())
        hits += abs(mean - 0.1) <= half
    assert 0.92 < hits / 500 < 0.98


def measured(speedup: float, half: float) -> Measured:
    return Measured(policy="p", speedup=speedup, low=speedup - half, high=speedup + half, median=speedup,
                    tokens_per_second=1.0, prompts=8)  # fmt: skip


@pytest.mark.parametrize(
    ("best", "confidence", "chosen"),
    [
        ((1.30, 0.10), (1.10, 0.05), "ratio"),
        ((1.30, 0.35), (1.10, 0.05), "off"),  # the fastest might be slower than plain decoding
        ((1.05, 0.02), (1.10, 0.05), "confidence"),
        ((0.90, 0.05), (0.80, 0.05), "off"),
    ],
)
def test_off_unless_the_gain_is_beyond_doubt(
    best: tuple[float, float], confidence: tuple[float, float], chosen: str
) -> None:
    live = {"off": measured(1.0, 0.0), "confidence": measured(*confidence), "best 1": measured(*best)}
    found, reason = by_decoding(CANDIDATES, live, make_profile())
    assert found.spec.name == chosen
    assert ("does not pay" in reason) == (chosen == "off")
    assert "\n" not in reason


def test_the_best_few_are_different_policies() -> None:
    def trial(policy: str, **params: Any) -> Any:
        return SimpleNamespace(user_attrs={"result": {"policy": policy}}, params=params)

    ranked = [trial("ratio:budget=8"), trial("ratio:budget=4"), trial("ratio:budget=8"), trial("ratio:budget=8", predictor="b"),
              trial("ratio:budget=2")]  # fmt: skip
    found = top(Candidate(parse_policy("ratio:budget=4"), "a"), ranked, "a", 3)  # what replay settled for goes first
    assert [(str(c.spec), c.predictor) for c in found.values()] == [
        ("ratio:budget=4", "a"), ("ratio:budget=8", "a"), ("ratio:budget=8", "b")
    ]  # fmt: skip
    assert list(found) == ["best 1", "best 2", "best 3"]


def test_only_prompts_that_nothing_has_seen_are_decoded(tmp_path: Path) -> None:
    from ecospec_runtime.prompts import fingerprint_prompts, read_prompts

    path, other = tmp_path / "p.jsonl", tmp_path / "q.jsonl"
    path.write_text("".join(f'{{"prompt": "{letter}"}}\n' for letter in "abcdefgh"))
    other.write_text('{"prompt": "x"}\n{"prompt": "y"}\n{"prompt": ""}\n')
    rows = read_prompts(path)
    manifest = SimpleNamespace(prompts_sha256=fingerprint_prompts(rows), max_prompt_tokens=4)
    inputs: Any = SimpleNamespace(traces=SimpleNamespace(manifest=manifest), confirming_prompts={6, 1, 3})

    class Letters:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(letter) for letter in text]}

    target: Any = SimpleNamespace(tokenizer=Letters())

    def decoded(source: Path, count: int = 16) -> str:
        settings = LiveSettings(target="t", drafter="d", prompts=str(source), count=count, profile=tmp_path)
        return "".join(chr(ids[0]) for ids in held_out(settings, inputs, target))

    assert decoded(path) == "bdg"
    assert decoded(path, 2) == "bd"
    assert decoded(other) == "xy", "another file's prompts are all unseen"
    inputs.confirming_prompts = {1}
    with pytest.raises(UserError, match=r"p\.jsonl: 1 held-out prompt"):
        decoded(path)
