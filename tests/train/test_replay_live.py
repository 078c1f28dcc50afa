"""Replay of harvested traces against the engine itself, pass by pass: the same sets, experts, accepted lengths and tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ecospec_runtime import gate
from ecospec_runtime.acceptance import AcceptanceModel, Calibration, LogisticWeights
from ecospec_runtime.architectures import Architecture, save
from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.engine import Engine
from ecospec_runtime.gate import DraftGate
from ecospec_runtime.policies import build_policy, parse_policy
from ecospec_runtime.pool import Pool
from ecospec_runtime.predictor import Prediction
from ecospec_runtime.prompts import read_prompts
from ecospec_runtime.scoring import Scorer
from ecospec_runtime.statistics import PassRecord
from ecospec_runtime.target import Target
from ecospec_train import harvest as harvest_module
from ecospec_train import replay as replay_module
from ecospec_train.harvest import HarvestConfig, harvest
from ecospec_train.replay import ReplayRows, load_rows, replay, replay_steps
from ecospec_train.replay_rows import prompts_of
from ecospec_train.traces import Traces
from tests.models import tiny_tokenizer
from tests.mtp_layers import deepseek_family
from tests.train.invented import make_profile

SHAPE, LENGTH, SEED = PoolConfig(depth=3, beam=2, width=4), 16, 5
PROFILE = make_profile(per_expert_ms=0.02, draft_fixed_ms=0.4)  # dear enough that gates have something to do
FEW = (3, 14, 30, 46, 62, 78, 94)  # all in the tiny head's vocabulary
TEXTS = ["abcabcab", "x", "for i in x: for i in"]
CASES = [f"{kind} {t}" for kind in ("stub", "eagle3", "mtp", "ngram") for t in (0.0, 0.7)]
EVERYWHERE = ["confidence:budget=6,acceptance=head,min_reach=0.02", "ratio:budget=5,acceptance=temperature,depth=2",
              "throughput:price=0.4,acceptance=head,min_reach=0.03,pause=2"]  # fmt: skip
PAUSING = "throughput:price=40,acceptance=logistic,min_reach=0.3,pause=2"
REMEMBERING = ["throughput:price=10,acceptance=head,min_reach=0.03,pause=1", PAUSING, "utility:trial=1,hold=2,pause=4"]
OF_STUB = [
    "off", "confidence:budget=4,acceptance=raw", "confidence:budget=3,acceptance=logistic,depth=2",
    "confidence:budget=8,acceptance=temperature", "ratio:budget=5,acceptance=head",
    "ratio:budget=6,capacity=3,penalty=2,acceptance=raw,min_reach=0.1", "prefix:overlap=0.6,acceptance=head",
    "prefix:budget=4,acceptance=raw,depth=2", "throughput:price=0.9,acceptance=head,pause=0",
    "throughput:price=0.5,acceptance=raw,depth=2", PAUSING,
    "throughput:price=0.7,acceptance=raw,node_experts=1.2,min_reach=0.2",
    "throughput:price=0.8,acceptance=temperature,capacity=3,penalty=0.5",
    "utility:trial=2,hold=3,pause=3", "utility:overlap=0.9,trial=1,hold=4,acceptance=head,min_reach=0.2",
]  # fmt: skip


class Opinionated:
    """Stands for a predictor: arbitrary but fixed opinions about each token."""

    acceptance = AcceptanceModel(
        best="head", temperature=0.7, logistic=LogisticWeights(bias=1.0),
        sampled={0.5: Calibration(temperature=0.5, logistic=LogisticWeights(log_p=1.5, depth=-0.2), head_share=0.6)},
    )  # fmt: skip

    def __init__(self, target: Target):
        self.shapes = SimpleNamespace(layers=target.moe_layers, experts=target.experts, top_k=2)
        self.manifest = SimpleNamespace(target={"fingerprint": target.fingerprint, "id": ""}, drafter={})

    def predict(self, pool: Pool, embed: object, routing: bool = True) -> Prediction:
        layers, experts = self.shapes.layers, self.shapes.experts
        tokens = np.concatenate(([pool.root_token], pool.tokens))[:, None, None]
        routing = np.sin(tokens * 3.7 + np.arange(layers * experts).reshape(1, layers, experts) ** 2)
        return Prediction(routing.astype(np.float32), np.concatenate(([0.0], pool.log_probs + 1.5)).astype(np.float32))


class Case(NamedTuple):
    """A harvest, and what it was taken with."""

    kind: str
    target: Target
    drafter: Any
    temperature: float
    rows: ReplayRows
    starts: list[tuple[list[int], int]]  # of each recorded prompt: its tokens with the text's first, and its seed


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path,
         tiny_drafter_dir: Path, stub_drafter: Callable[..., Any]) -> Case:  # fmt: skip
    """A target of one family with a drafter of one kind, harvested at one temperature."""
    kind, temperature = request.param.split()[0], float(request.param.split()[1])
    folder = tmp_path_factory.mktemp(kind)
    source = {"eagle3": str(folder / "head"), "mtp": str(folder / "target"), "ngram": "ngram:min=1,max=3", "stub": ""}
    if kind == "mtp":
        deepseek_family(folder)
    elif kind == "ngram":
        save(Architecture("gpt_oss", "", {"num_hidden_layers": 2}), folder / "target")
        tiny_tokenizer().save_pretrained(folder / "target")
    else:
        shutil.copytree(tiny_target_dir, folder / "target")
    if kind == "eagle3":
        say_little(Path(shutil.copytree(tiny_drafter_dir, source["eagle3"])))
    if kind != "stub":
        say_little(folder / "target")
    target = Target.from_pretrained(folder / "target")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prompts = [p.encode(target.tokenizer) for p in read_prompts(str(folder / "prompts.jsonl"), target.tokenizer)]
    config = HarvestConfig(
        target=str(folder / "target"), drafter=source[kind], prompts=str(folder / "prompts.jsonl"), out=folder / "traces",
        max_new_tokens=LENGTH, pool=SHAPE, temperature=temperature, seed=SEED,
    )  # fmt: skip
    if kind == "stub":
        texts = [prompt + continuation(target, prompt, temperature, SEED + i) for i, prompt in enumerate(prompts)]
        ended = last_new_token(texts, prompts)
        drafter = stub_drafter(knowing(texts, ended))
        end_at(folder / "target", ended[-1])
        target = Target.from_pretrained(folder / "target")
    else:
        drafter = load_drafter(source[kind], target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harvest_module, "SHARD_ROWS", 20)
        patch.setattr(harvest_module, "load_drafter", lambda *_: drafter)
        harvest(config)
    traces = Traces(folder / "traces")
    starts = [
        ([*prompts[shard.prompt_id[span[0]]], int(shard.root_token[span[0]])], SEED + int(shard.prompt_id[span[0]]))
        for shard in traces.shards()
        for span in prompts_of(shard)
    ]
    rows = load_rows(traces, Opinionated(target))  # type: ignore[arg-type]
    return Case(kind, target, drafter, temperature, rows, starts)


def continuation(target: Target, prompt: list[int], temperature: float, seed: int) -> list[int]:
    """The target's own text, longer than any pool reaches."""
    settings = GenerationConfig(max_new_tokens=LENGTH + 8, temperature=temperature, seed=seed, eos_token_id=())
    return [token.id for token in Engine(target).generate(prompt, settings)]


def say_little(folder: Path) -> None:
    """Have a target, or its head, choose among `FEW` tokens, so that an untrained drafter is right now and then."""
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["lm_head.weight"]
    ids = torch.arange(len(weight)) + tensors.get("d2t", 0)
    tensors["lm_head.weight"] = 3 * weight * torch.isin(ids, torch.tensor(FEW))[:, None]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def end_at(folder: Path, token: int) -> None:
    """Make `token` the end of a text."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": token}))


def last_new_token(texts: list[list[int]], prompts: list[list[int]]) -> list[int]:
    """The longest beginning of any text that ends with a token its generated part has not held before."""
    found = [
        text[: end + 1]
        for text, prompt in zip(texts, prompts, strict=True)
        for end in range(len(prompt), len(prompt) + LENGTH - 2)
        if text[end] not in text[len(prompt) : end]
    ]
    return max(found, key=lambda text: len(text) - next(len(p) for p in prompts if text[: len(p)] == p))


def knowing(texts: list[list[int]], ended: list[int]) -> Callable[[list[int], list[int]], list[int]]:
    """Proposals that are mostly right first, sometimes second, sometimes never; right around the end of `ended`."""

    def propose(context: list[int], path: list[int]) -> list[int]:
        known = context + path
        ahead = [t[len(known) + 1] for t in texts if t[1 : len(known) + 1] == known and len(t) > len(known) + 1]
        right = (ahead or [7])[0]
        wrong = [(right + shift) % 96 for shift in (1, 2, 3)]
        near_end = abs(len(known) + 1 - len(ended)) < 3 and all(a == b for a, b in zip(known, ended[1:], strict=False))
        mood = 6 if near_end else sum(known) % 7
        return wrong if mood == 0 else [wrong[0], right, wrong[1]] if mood < 3 else [right, *wrong[:2]]

    return propose


def engine_for(case: Case, text: str) -> Engine:
    """An engine that has decoded nothing yet."""
    spec = parse_policy(text)
    scorer = Scorer(Opinionated(case.target), spec.acceptance_kind("head"), case.rows.layers, case.target.experts)  # type: ignore[arg-type]
    return Engine(case.target, case.drafter, scorer, build_policy(spec), PROFILE, SHAPE, depth=spec.depth,
                  min_reach=spec.min_reach, record_routing=True)  # fmt: skip


def live(engine: Engine, case: Case, number: int, count: int) -> list[PassRecord]:
    """The engine's passes over `count` tokens after a recorded prompt and its text's first token."""
    ids, seed = case.starts[number]
    settings = GenerationConfig(max_new_tokens=count, temperature=case.temperature, seed=seed)
    stream = engine.generate(ids, settings)
    emitted = [token.id for token in stream]
    steps = stream.statistics.steps
    assert [token for step in steps for token in step.emitted] == emitted
    return steps


def replayed(case: Case, text: str, numbers: Iterable[int], count: int) -> list[list[PassRecord]]:
    """The passes that replay of some prompts foretells, by prompt."""
    rows = replace(case.rows, prompts=[case.rows.prompts[number] for number in numbers])
    found: list[list[PassRecord]] = [[] for _ in rows.prompts]
    for step in replay_steps(parse_policy(text), rows, PROFILE, max_new_tokens=count):
        found[step.prompt].append(step.record)
    return found


def one_by_one(case: Case, text: str, number: int, count: int) -> tuple[list[PassRecord], list[PassRecord]]:
    """A prompt's passes without a memory of others: decoded and replayed."""
    return live(engine_for(case, text), case, number, count), replayed(case, text, [number], count)[0]


def in_a_row(case: Case, text: str, count: int) -> tuple[list[list[PassRecord]], list[list[PassRecord]]]:
    """The passes of all prompts, each with the memory of those before it: decoded and replayed."""
    engine, numbers = engine_for(case, text), range(len(case.rows.prompts))
    return [live(engine, case, number, count) for number in numbers], replayed(case, text, numbers, count)


def lengths(case: Case, number: int) -> list[int]:
    """Numbers of tokens to decode after a prompt: one that does not matter where the text ends by itself, else all there
    are; and a shorter one."""
    recorded = len(case.rows.prompts[number])
    return [recorded if recorded == LENGTH else LENGTH + SHAPE.depth, *([recorded - 3] if number == 1 else [])]


def test_every_pass_is_the_engines(case: Case) -> None:
    """Also up to the end that a number of tokens sets, or an end token within an accepted path."""
    accepted = branched = past_end = 0
    for text in EVERYWHERE + (OF_STUB if case.kind == "stub" else []):
        passes: list[PassRecord] = []
        for number in range(len(case.rows.prompts)):
            for count in lengths(case, number):
                expected, foretold = one_by_one(case, text, number, count)
                assert foretold == expected, f"{text}, prompt {number}, {count} tokens"
                passes += expected
        assert any(step.drafted for step in passes) == (text != "off")
        accepted += sum(step.accepted for step in passes)
        branched += sum(len(set(step.parents)) < len(step.parents) for step in passes)
        past_end += sum(
            step.emitted[-1] in case.rows.end_tokens and len(step.emitted) <= step.accepted for step in passes
        )
    assert branched > 5
    assert accepted > (80 if case.kind == "stub" else 8)
    assert past_end > 0 or case.kind != "stub"


@pytest.mark.parametrize("text", REMEMBERING)
def test_every_pass_of_texts_decoded_in_a_row_is_the_engines(
    case: Case, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine has seen of drafting carries over to the next text, and would be missed on either side."""
    monkeypatch.setattr(gate, "LOSS_SHARE", 0.2)  # rests that end within texts so short
    for count in (LENGTH - 3, LENGTH):
        decoded, foretold = in_a_row(case, text, count)
        assert foretold == decoded
    for alone in zip(*(one_by_one(case, text, i, LENGTH) for i in range(len(decoded))), strict=True):
        assert list(alone) != decoded


@pytest.mark.parametrize("case", CASES[:1], indirect=True)
def test_totals_are_sums_of_steps(case: Case) -> None:
    spec = parse_policy(PAUSING)
    steps, result = list(replay_steps(spec, case.rows, PROFILE)), replay(spec, case.rows, PROFILE)
    assert 0 < sum(step.record.drafted for step in steps) == result.drafts < len(steps) == result.passes
    assert result.tokens == sum(len(step.record.emitted) for step in steps)
    assert (result.ms, result.draft_ms) == (sum(step.ms for step in steps), sum(step.draft_ms for step in steps))
    assert {step.prompt for step in steps} == set(range(len(case.rows.prompts)))


@pytest.mark.parametrize("case", CASES[:1], indirect=True)
@pytest.mark.parametrize("broken", ["union", "gate", "end"])
def test_a_wrong_replay_is_noticed(case: Case, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails when replay forgets an expert, never pauses, or reads past an end token."""
    texts = {"gate": [PAUSING], "union": OF_STUB[1:2], "end": OF_STUB[1:5]}[broken]
    found = [in_a_row(case, text, LENGTH) for text in texts]
    assert all(decoded == foretold for decoded, foretold in found)
    if broken == "union":
        as_mask = replay_module.as_mask
        monkeypatch.setattr(replay_module, "as_mask", lambda experts: as_mask(experts) & (as_mask(experts) - 1))
    elif broken == "gate":
        monkeypatch.setattr(replay_module, "gate_of", lambda policy, depth: DraftGate(pause=0))
    else:
        case = case._replace(rows=replace(case.rows, end_tokens=()))
    everyone = range(len(case.rows.prompts))
    assert [replayed(case, text, everyone, LENGTH) for text in texts] != [decoded for decoded, _ in found]
