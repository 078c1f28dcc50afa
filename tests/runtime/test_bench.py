"""The benchmark: order, figures from known samples, the report's schema on a tiny model."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from ecospec_runtime.bench import PER_PASS, TURN, Contestant, Plan, Sample, measure, summarize
from ecospec_runtime.cli import app
from ecospec_runtime.config import GenerationConfig
from ecospec_runtime.engine import Engine
from ecospec_runtime.policies import build_policy, parse_policy

KEYS = {
    "policy", "parameters", "acceptance", "tokens", "seconds", "tokens_per_second", "speedup_vs_off",
    "speedup_vs_confidence", "accept_length", "experts_per_layer", "nodes", "draft_ms", "predict_ms", "select_ms",
    "verify_ms", "loop_share", "identical_to_off", "temperature",
}  # fmt: skip


class FakeEngine:
    """Emits fixed tokens and writes down who was asked."""

    def __init__(self, label: str, log: list[tuple[str, int]], seconds: float = 1.0):
        self.label, self.log, self.seconds = label, log, seconds
        self.policy = build_policy(parse_policy(label))

    def prefilled(self, prompt: list[int]) -> Any:
        """A prompt that is read."""
        read = SimpleNamespace(prompt=prompt)
        read.copy = lambda: read
        return read

    def generate(self, prompt: Any, config: Any) -> Any:
        """A stream with statistics."""
        seconds, log, label = self.seconds, self.log, self.label

        class Stream:
            statistics = SimpleNamespace(seconds=seconds, passes=4, **dict.fromkeys(PER_PASS, 1.0))
            tokens = iter(range(config.max_new_tokens))

            def __iter__(self) -> Any:
                return self

            def __next__(self) -> Any:
                token = next(self.tokens)
                log.append((label, prompt.prompt[0]))
                return SimpleNamespace(id=token)

        return Stream()


def contestant(text: str, engine: Any = None, acceptance: str = "raw") -> Contestant:
    """A contestant named by its policy."""
    return Contestant(text, parse_policy(text), acceptance, engine)


def test_policies_take_turns_within_a_prompt_and_start_in_rotation() -> None:
    log: list[tuple[str, int]] = []
    names = ["off", "confidence:budget=2", "ratio"]
    entrants = [contestant(name, FakeEngine(name, log)) for name in names]
    samples = measure(entrants, Plan([[10], [11], [12]], max_new_tokens=TURN + 2))
    turns = [(*turn, len(list(tokens))) for turn, tokens in groupby(log)]
    assert [name for name, _, _ in turns[:3]] == names, "the warm-up"
    for i, prompt in enumerate((10, 11, 12)):
        order = [*names[i:], *names[:i]]
        at = 3 + 6 * i
        assert turns[at : at + 6] == [(name, prompt, count) for count in (TURN, 2) for name in order]
    assert [[s.tokens for s in repeats] for repeats in samples["off", 0.0]] == [[list(range(TURN + 2))]] * 3


def sample(tokens: list[int], seconds: float, passes: int = 2, **means: float) -> Sample:
    """A sample with zero means unless given."""
    return Sample(tokens, seconds, passes, dict.fromkeys(PER_PASS, 0.0) | means)


def test_figures_of_known_samples() -> None:
    entrants = [
        contestant("off"), contestant("confidence:budget=2"), contestant("confidence:budget=9"),
        contestant("confidence:budget=4,acceptance=temperature", acceptance="temperature"), contestant("ratio"),
    ]  # fmt: skip
    plan = Plan([[1], [2]], temperatures=(0.0,), repeats=3)
    ten, five = list(range(10)), [3, 4] * 2 + [7]
    rows: dict[tuple[str, float], list[list[Sample]]] = {
        ("off", 0.0): [[sample(ten, s) for s in (1.0, 9.0, 2.0)], [sample(five, 2.0)] * 3],
        ("confidence:budget=2", 0.0): [[sample(ten, 1.0)] * 3, [sample(five, 1.0)] * 3],
        ("confidence:budget=9", 0.0): [[sample(ten, 3.0)] * 3, [sample(five, 3.0)] * 3],
        ("confidence:budget=4,acceptance=temperature", 0.0): [[sample(ten, 0.1)] * 3, [sample(five, 0.1)] * 3],
        ("ratio", 0.0): [
            [sample(ten, 0.5, passes=1, nodes=4.0)] * 3,
            [sample([*five[:3], 9, 9], 0.5, passes=3, nodes=8.0)] * 3,
        ],
    }
    off, raw, slow, _, ratio = summarize(entrants, plan, rows)
    assert off["seconds"] == 4.0  # the median of the first prompt's repeats is 2
    assert off["tokens_per_second"] == pytest.approx(15 / 4)
    assert off["identical_to_off"] is True
    assert off["speedup_vs_off"] == 1.0
    assert raw["speedup_vs_off"] == pytest.approx(2.0)
    assert slow["speedup_vs_confidence"] == pytest.approx(1 / 3)
    assert ratio["speedup_vs_confidence"] == pytest.approx(2.0)  # against the fastest raw one, not the calibrated one
    assert ratio["identical_to_off"] is False
    assert ratio["diverging_prompts"] == 1
    assert ratio["first_divergence"] == 3
    assert ratio["nodes"] == pytest.approx(7.0)  # weighted by passes


@pytest.mark.parametrize("prompt", ["def f(x):\n    return x", "a"])
def test_decoding_after_a_prompt_that_was_read_before(prompt: str, tiny_bundle: Path) -> None:
    auto = Engine.from_bundle(tiny_bundle)
    off = auto.with_policy("off")
    settings = GenerationConfig(max_new_tokens=20, temperature=0.8, seed=3)
    expected = [token.id for token in off.generate(prompt, settings)]
    read = auto.prefilled(prompt)
    for engine in (auto, off, auto.with_policy("confidence:budget=6"), auto, off):
        stream = engine.generate(read, settings)
        assert [token.id for token in stream] == expected
    streams = [auto.with_policy("throughput").generate(start, settings) for start in (prompt, read)]
    assert [[token.id for token in stream] for stream in streams] == [expected, expected]
    turns = [auto.generate(read.copy(), settings), off.generate(read.copy(), settings)]
    by_turns = [[token.id for token in pair] for pair in zip(*turns, strict=True)]
    assert by_turns == [[token, token] for token in expected]
    fresh, again = (stream.statistics for stream in streams)
    assert (again.drafts, again.accepted, again.verified) == (fresh.drafts, fresh.accepted, fresh.verified)


def test_screening_drops_only_slow_fixed_budgets() -> None:
    """Per acceptance model the fastest three go on; every ratio is over prompts that both ran."""
    seconds = {"off": 9.0, "ratio": 9.0} | {
        f"confidence:budget={m}": s for m, s in ((1, 1.0), (2, 1.05), (3, 1.06), (4, 1.07), (5, 3.0))
    }
    seconds |= {f"confidence:budget={m},acceptance=temperature": s for m, s in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0))}
    log: list[tuple[str, int]] = []
    entrants = []
    for label, each in seconds.items():
        kind = "temperature" if "temperature" in label else "raw"
        entrants.append(contestant(label, FakeEngine(label, log, each), kind))
    plan = Plan([[0], [1], [2]], max_new_tokens=6, screen=1)
    ticks: list[int] = []
    samples = measure(entrants, plan, lambda: ticks.append(1))
    assert len(ticks) == len(entrants) * 3
    rows = {r["label"]: r for r in summarize(entrants, plan, samples)}
    on = {label for label, r in rows.items() if r["prompts"] == 3}
    assert set(rows) - on == {
        "confidence:budget=4", "confidence:budget=5", "confidence:budget=4,acceptance=temperature",
    }  # fmt: skip
    assert all(r["prompts"] == 1 for label, r in rows.items() if label not in on)
    assert rows["confidence:budget=5"]["speedup_vs_off"] == pytest.approx(3.0)
    assert rows["ratio"]["speedup_vs_confidence"] == pytest.approx(1 / 9)


def test_report_of_a_tiny_model(tiny_bundle: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "bench.json"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("def f(x):", "import os", "a = 1")))
    arguments = ["bench", "--bundle", str(tiny_bundle), "--prompts", str(prompts), "--max-new-tokens", "9", "--count", "2",
                 "--policies", "off,confidence:budget=4,confidence:budget=2,acceptance=temperature,depth=2,ratio,auto",
                 "--temperature", "0", "--temperature", "0.7", "--json", str(out), "--plots", str(tmp_path / "plots")]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["machine"]["device"]
    assert report["target"]
    assert report["prompts"]["count"] == 2
    runs = report["runs"]
    assert len(runs) == 10
    assert all(set(run) >= KEYS for run in runs)
    assert {run["temperature"] for run in runs} == {0.0, 0.7}
    assert all(run["identical_to_off"] for run in runs), "float32: the same text under every policy"
    assert all(run["tokens"] == 18 or (run["tokens"] < 18 and run["identical_to_off"]) for run in runs)
    assert all(run["tokens_per_second"] == pytest.approx(run["tokens"] / run["seconds"]) for run in runs)
    assert [run["acceptance"] for run in runs[:5]] == ["raw", "raw", "temperature", "head", "head"]
    assert runs[4]["policy"] == "throughput"
    assert runs[4]["label"] == "throughput (tuned)"
    assert runs[0]["nodes"] == 0
    assert runs[1]["nodes"] > 1
    assert all(2 <= run["experts_per_layer"] <= 12 for run in runs)
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == ["experts.png", "speedup.png", "table.md"]
    lines = (tmp_path / "plots" / "table.md").read_text().splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert "throughput (tuned)" in result.output
