"""Drafters without states of their own through every stage, from harvest to decoding with the bundle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ecospec_runtime.acceptance import AcceptanceModel, LogisticWeights
from ecospec_runtime.bundle import check_drafter, load_bundle
from ecospec_runtime.cli import app as runtime
from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.engine import Engine
from ecospec_runtime.errors import UserError
from ecospec_runtime.policies import build_policy, parse_policy
from ecospec_runtime.pool import Pool
from ecospec_runtime.predictor import Prediction, same_drafter
from ecospec_runtime.prompts import read_prompts
from ecospec_runtime.scoring import Scorer
from ecospec_runtime.target import Target
from ecospec_train.export import export
from ecospec_train.fit import FitConfig, fit
from ecospec_train.harvest import HarvestConfig, harvest
from ecospec_train.pipeline import PipelineConfig, plan
from ecospec_train.predictor_data import NodeTables
from ecospec_train.profile import drafting_costs, profile
from ecospec_train.replay import ReplayRows, load_rows, replay
from ecospec_train.traces import DrafterRecord, Traces, bytes_per_position
from ecospec_train.tune import tune
from tests.models import beginning_tokenizer
from tests.train.invented import make_profile

SHAPE = {"depth": 3, "beam": 2, "width": 4}
POSITIONS = 12
POLICIES = ("confidence:budget=4", "ratio", "throughput:price=0,pause=0")


class Run(NamedTuple):
    """What the stages left for one kind of drafter."""

    kind: str
    drafter: str
    folder: Path
    prompts: Path


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory, tiny_target_dir: Path) -> Path:
    """The tiny target with a tokenizer that begins every text, so that a language model drafter sees all of it."""
    folder = Path(shutil.copytree(tiny_target_dir, tmp_path_factory.mktemp("begin") / "target"))
    beginning_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    return Target.from_pretrained(target_dir)


@pytest.fixture(scope="module", params=["ngram", "causal_lm"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Run:
    """All stages, once per kind, without MLflow. The language model is the target with noise on it: a MoE that is often right."""
    folder = tmp_path_factory.mktemp(request.param)
    drafter = "ngram:min=1,max=3" if request.param == "ngram" else str(noisy_copy(target_dir, folder / "lm"))
    prompts = folder / "prompts.jsonl"
    texts = [f"def f{i}(x):\n    return f{i}(x + {i})" for i in range(6)] + ["ab"]  # the last: nothing to look up
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    config = PipelineConfig.model_validate({
        "name": "tiny", "target": str(target_dir), "drafter": drafter, "prompts": str(prompts),
        "out": folder / "run", "harvest": {"max_new_tokens": POSITIONS, "pool": SHAPE},
        "fit": {"width": 16, "epochs": 1, "heldout": 0.4},
        "profile": {"tokens": [1, 2, 4], "contexts": [24], "repeats": 3, "allow_busy": True, "pool": SHAPE},
        "tune": {"trials": 1, "positions": 24},
    })  # fmt: skip
    stages: dict[str, Any] = {"harvest": harvest, "fit": fit, "profile": profile, "tune": tune, "export": export}
    for stage in plan(config):
        stages[stage.name](stage.config)
    return Run(request.param, drafter, folder, prompts)


def noisy_copy(folder: Path, out: Path) -> Path:
    """The target with noise on its output layer, and surer of itself."""
    shutil.copytree(folder, out)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        model.lm_head.weight += 0.05 * torch.randn_like(model.lm_head.weight)
        model.lm_head.weight *= 4
    model.save_pretrained(out)
    return out


def prompt_ids(run: Run, target: Target) -> list[list[int]]:
    return [prompt.encode(target.tokenizer) for prompt in read_prompts(str(run.prompts), target.tokenizer)]


def test_the_greedy_text_is_transformers_own(finished: Run, target: Target) -> None:
    bundle, ids = load_bundle(finished.folder / "run/bundle"), prompt_ids(finished, target)[2]
    settings = GenerationConfig(max_new_tokens=64, eos_token_id=())
    inputs = torch.tensor([ids])
    expected = target.model.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=64, pad_token_id=0, eos_token_id=None
    )[0, len(ids) :].tolist()  # fmt: skip
    base = Engine.from_bundle(bundle, target, policy="off")
    for policy in POLICIES:
        stream = base.with_policy(policy).generate(ids, settings)
        assert [token.id for token in stream] == expected
        assert stream.statistics.accepted > (3 if finished.kind == "ngram" else 20), "drafts that are right ..."
        assert stream.statistics.verified > stream.statistics.accepted, "... and drafts that are not"


def test_one_seed_gives_one_text(finished: Run, target: Target) -> None:
    bundle, ids = load_bundle(finished.folder / "run/bundle"), prompt_ids(finished, target)[1]
    base = Engine.from_bundle(bundle, target, policy="off")
    settings = GenerationConfig(max_new_tokens=24, temperature=0.9, top_p=0.95, seed=3, eos_token_id=())
    texts = [[t.id for t in base.with_policy(policy).generate(ids, settings)] for policy in ("off", *POLICIES)]
    assert all(text == texts[0] for text in texts)


def test_traces_and_bundle_say_what_they_carry(finished: Run, target: Target) -> None:
    traces = Traces(finished.folder / "run/traces")
    bundle = load_bundle(finished.folder / "run/bundle")
    for record in (traces.manifest.drafter, bundle.manifest.drafter):
        assert (record.kind, record.features, record.width) == (finished.kind, "target_hidden", 32)
        assert record.id == finished.drafter
    sizes = set()
    for shard in traces.shards():
        assert shard.states.shape == (len(shard), 32), "one hidden state a position"
        assert len(shard.entropies) >= 2 * len(shard)
        sizes |= set(np.diff(shard.node_offsets).tolist())
    assert (0 in sizes) == (finished.kind == "ngram"), "positions without a match are there, and empty"
    drafter = load_drafter(finished.drafter, target)
    check_drafter(bundle, drafter)
    drafter.features = "drafter_state"
    with pytest.raises(UserError, match="made for a drafter of features target_hidden, this one has drafter_state"):
        check_drafter(bundle, drafter)


def test_states_are_the_hidden_states_that_chose_the_root(finished: Run, target: Target) -> None:
    """Of a plain pass over prompt and text, at the root's place minus one, before the final norm."""
    traces, prompts = Traces(finished.folder / "run/traces"), prompt_ids(finished, target)
    tables = NodeTables(traces)
    for shard in traces.shards():
        for row in range(0, len(shard), 7):
            rows = np.flatnonzero(shard.prompt_id == shard.prompt_id[row])
            text = prompts[shard.prompt_id[row]] + shard.root_token[rows].tolist()
            context = int(shard.context[row])
            output = target.forward(
                torch.tensor(text[:context]), torch.arange(context), None, target.new_cache(), aux_layers=(7,)
            )
            assert output.aux is not None
            np.testing.assert_allclose(shard.pool(row).states, output.aux[-1:], rtol=2e-3, atol=2e-3)
    (table,) = tables
    for position in (0, len(table.offsets) - 2):
        span = slice(table.offsets[position], table.offsets[position + 1])
        assert set(table.feature_rows[span]) == {position}


class FixedPredictor:
    """Arbitrary but fixed opinions about each token."""

    shapes = SimpleNamespace(layers=7, experts=12, top_k=2)
    acceptance = AcceptanceModel(best="head", temperature=1.0, logistic=LogisticWeights(bias=1.0))

    def __init__(self, fingerprint: str = ""):
        self.manifest = SimpleNamespace(target={"fingerprint": fingerprint, "id": ""}, drafter={})

    def predict(self, pool: Pool, embed: object, routing: bool = True) -> Prediction:
        tokens = np.concatenate(([pool.root_token], pool.tokens))[:, None, None]
        routing = np.sin(tokens * 3.7 + np.arange(84).reshape(1, 7, 12) ** 2)
        return Prediction(routing.astype(np.float32), np.concatenate(([0.0], pool.log_probs + 0.3)).astype(np.float32))


@pytest.mark.parametrize(
    "text",
    ["confidence:budget=3,acceptance=logistic,depth=2", "ratio:budget=5,acceptance=temperature,min_reach=0.05",
     "throughput:price=0.7,acceptance=head,min_reach=0.1,pause=0"],
)  # fmt: skip
def test_replay_equals_live_decoding(finished: Run, target: Target, text: str) -> None:
    traces = Traces(finished.folder / "run/traces")
    predictor: Any = FixedPredictor(traces.manifest.target.fingerprint)
    spec, device = parse_policy(text), make_profile(per_expert_ms=0.02)
    rows = load_rows(traces, predictor)
    scorer = Scorer(predictor, spec.acceptance_kind("head"), 7, 12)
    engine = Engine(target, load_drafter(finished.drafter, target), scorer, build_policy(spec), device, PoolConfig(**SHAPE),
                    depth=spec.depth, min_reach=spec.min_reach, record_routing=True)  # fmt: skip
    accepted = 0
    for ids, recorded in list(zip(prompt_ids(finished, target), rows.prompts, strict=True))[-3:]:
        result = replay(spec, ReplayRows([recorded], 7, rows.pool, "head", predictor.acceptance), device)
        first = next(iter(Engine(target).generate(ids))).id
        settings = GenerationConfig(max_new_tokens=len(recorded) + 1, eos_token_id=())
        # Replayed alone, each prompt finds a gate that knows no other text: so does each decode.
        stream = engine.with_policy(spec).generate([*ids, first], settings)
        assert len(list(stream)) == len(recorded) + 1
        live = stream.statistics
        assert live.passes == result.passes + (result.tokens == len(recorded))
        assert live.verified == round(result.nodes * result.passes)
        assert live.accepted == result.tokens - result.passes
        unions = [len(layer.unique()) for layers in live.recorded[: result.passes] for layer in layers]
        assert result.experts_per_layer == pytest.approx(np.mean(unions))
        accepted += live.accepted
    assert accepted > 2


def test_the_commands_take_the_bundle(finished: Run) -> None:
    bundle, few = str(finished.folder / "run/bundle"), finished.folder / "few.jsonl"
    few.write_text('{"prompt": "ab"}\n{"prompt": "def f(x):"}\n')
    for arguments in (
        ["generate", "--prompt", "def f", "--max-new-tokens", "4"],
        ["bench", "--prompts", str(few), "--max-new-tokens", "4", "--policies", "off,ratio"],
        ["doctor", "--prompts", str(few), "--max-new-tokens", "4"],
    ):
        result = CliRunner().invoke(runtime, [arguments[0], "--bundle", bundle, *arguments[1:]])
        assert result.exit_code == 0, result.output
    result = CliRunner().invoke(runtime, ["inspect", bundle])
    assert f"({finished.kind}, target hidden of width 32)" in " ".join(result.output.split())


def test_texts_without_any_match_are_harvested(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Contexts of 16 tokens never come again in so short a text: every pool is empty."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "xyz"}\n')
    config = HarvestConfig(
        target=str(tiny_target_dir), drafter="ngram:min=16,max=16", prompts=str(tmp_path / "p.jsonl"), out=tmp_path / "t",
        max_new_tokens=4,
    )  # fmt: skip
    manifest = harvest(config)
    (shard,) = Traces(tmp_path / "t").shards()
    assert len(shard) == manifest.rows > 0
    assert len(shard.tokens) == 0
    with pytest.raises(UserError, match="proposed no candidates"):
        fit(FitConfig(traces=tmp_path / "t", out=tmp_path / "f"))
    rows = load_rows(Traces(tmp_path / "t"), None)
    result = replay(parse_policy("confidence:acceptance=raw"), rows, make_profile())
    assert (result.tokens, result.passes, result.nodes) == (len(shard), len(shard), 0)


def test_old_records_carry_drafter_states() -> None:
    record = DrafterRecord.model_validate({"id": "d", "kind": "eagle3", "fingerprint": "f", "width": 8})
    assert record.features == "drafter_state"


def test_shared_states_are_counted_once() -> None:
    pool = PoolConfig(depth=3, beam=2, width=4)
    own, shared = (bytes_per_position(pool, 2, 2, 12, 1000, 1, 1, kind) for kind in ("drafter_state", "target_hidden"))  # type: ignore[arg-type]
    assert own - shared == 5 * 2 * 1000


def test_drafting_costs_count_what_was_grown() -> None:
    """Pools that vary: 1 ms, 0.5 per further level, 0.25 per expanded node, 0.1 per prediction and 0.01 per node."""

    class Sized:
        def __init__(self, levels: int, expanded: int, nodes: int):
            self.levels, self.expanded, self.nodes = levels, expanded, nodes

        def __len__(self) -> int:
            return self.nodes

    pools: Any = {"shallow": [Sized(1, 0, 2), Sized(1, 0, 0)], "narrow": [Sized(4, 3, 9), Sized(2, 1, 3)],
                  "full": [Sized(4, 8, 20), Sized(2, 2, 4)]}  # fmt: skip
    mean = {name: np.mean([[p.levels, p.expanded, len(p)] for p in found], axis=0) for name, found in pools.items()}
    medians = {name: 1 + 0.5 * (m[0] - 1) + 0.25 * m[1] for name, m in mean.items()} | {"select": 0.3}
    medians |= {f"predict_{name}": 0.1 + 0.01 * m[2] for name, m in mean.items()}
    medians |= {f"accept_{name}": 0.04 + 0.002 * m[2] for name, m in mean.items()}
    costs = drafting_costs(medians, pools)
    expected = {"draft_fixed_ms": 1.0, "draft_level_ms": 0.5, "draft_node_ms": 0.25, "predict_ms": 0.1, "predict_node_ms": 0.01,
                "accept_ms": 0.04, "accept_node_ms": 0.002, "select_ms": 0.3}  # fmt: skip
    assert costs == pytest.approx(expected)
    nothing: Any = {name: [Sized(1, 0, 0)] for name in pools}
    assert drafting_costs(dict.fromkeys(medians, 1.0), nothing)["draft_level_ms"] == 0


def test_stages_of_different_drafters_do_not_mix(tmp_path: Path) -> None:
    """Predictor, traces, profile and policy say which drafter they were made with."""
    manifest = SimpleNamespace(drafter={"kind": "ngram", "id": "ngram", "fingerprint": "a" * 64})
    same_drafter("a" * 64, "traces", manifest, tmp_path)  # type: ignore[arg-type]
    same_drafter("", "a profile of an older release", manifest, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"traces .drafter bbbb.* and the predictor .*fitted for the ngram drafter"):
        same_drafter("b" * 64, "traces", manifest, tmp_path)  # type: ignore[arg-type]
