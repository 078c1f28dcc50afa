"""The whole engine through the Triton kernels, interpreted: text of the three seed families, greedy and drawn, is the host's."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from ecospec_kernels import dispatch
from ecospec_runtime.cache import TargetCache
from ecospec_runtime.config import GenerationConfig
from ecospec_runtime.engine import Engine
from ecospec_runtime.sampling import Sampler
from ecospec_runtime.target import Target
from ecospec_runtime.verify import children_of, device_walk, follow, walk
from tests.families import FAMILIES, PROMPT, greedy_text, save_family

ROOT = Path(__file__).resolve().parents[2]
COUNT = 7
DRAWN, SEED = 0.7, 5  # of the text without drafts
OPS = {"expert_mlp", "tree_attention", "argmax_rows", "draw_rows", "verify_tree", "commit_path"}
DECODE = """
import json, sys
import torch
from ecospec_kernels import dispatch
from ecospec_runtime import compute
from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.engine import Engine
from ecospec_runtime.policies import build_policy, parse_policy
from ecospec_runtime.target import Target
from tests.conftest import StubDrafter
from tests.oracles import mixed_drafter

found, interprets = {}, dispatch.interprets
for folder, text in json.loads(sys.stdin.read()).items():
    dispatch.interprets = lambda: False  # the check at load runs more rows than the decoding
    target = Target.from_pretrained(folder)
    dispatch.interprets = interprets
    compute.install(target.model)
    drafter = mixed_drafter([text], StubDrafter)
    drafter.aux_layers = (0, 1, 2)
    dispatch.CALLS.clear()
    outcomes = {}
    for policy, count, temperature in (("off", 3, DRAWN), ("confidence:budget=5", COUNT, 0.0)):
        engine = Engine(target, drafter, policy=build_policy(parse_policy(policy)), pool=PoolConfig(depth=3, beam=2, width=4))
        config = GenerationConfig(max_new_tokens=count, eos_token_id=(), temperature=temperature, seed=SEED)
        stream = engine.generate(text[:PROMPT], config)
        outcomes[policy] = [token.id for token in stream], stream.statistics.accepted
    found[folder] = outcomes, sorted(dispatch.CALLS)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Prompt and greedy text of transformers' own model, by the folder of each family's tiny instance in float32."""
    folders = [save_family(name, tmp_path_factory.mktemp(name)) for name in FAMILIES]
    return {str(folder): greedy_text(folder, COUNT) for folder in folders}


def test_the_engine_decodes_through_the_kernels(texts: dict[str, list[int]]) -> None:
    """With a drafter that is right now and then, at any rank, so that paths of a tree are committed; and without one."""
    environment = os.environ | {
        "ECOSPEC_KERNELS": "fused", "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", f"PROMPT, COUNT, DRAWN, SEED = {PROMPT}, {COUNT}, {DRAWN}, {SEED}\n{DECODE}"], input=json.dumps(texts), env=environment,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for folder, text in texts.items():
        outcomes, calls = found[folder]
        config = GenerationConfig(max_new_tokens=3, eos_token_id=(), temperature=DRAWN, seed=SEED)
        drawn = [token.id for token in Engine(Target.from_pretrained(folder)).generate(text[:PROMPT], config)]
        assert outcomes["off"] == [drawn, 0] and drawn != text[PROMPT:][:3], folder
        ids, accepted = outcomes["confidence:budget=5"]
        assert ids == text[PROMPT:] and accepted > 1, (folder, accepted)
        assert {op for op, implementation in calls if implementation == "fused"} == OPS
        assert not {op for op, implementation in calls if implementation != "fused"} & OPS, (folder, calls)


@pytest.mark.parametrize("fused", [False, True])
def test_the_device_walks_as_the_host(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """Random trees of few tokens, so that siblings share some; none at all; and what the argmax alone does not decide."""
    monkeypatch.setattr(dispatch, "runs_triton", lambda t: fused)
    rng = random.Random(0)
    plain = [Sampler(GenerationConfig(temperature=t, seed=5)) for t in (0, 0.5)]
    for size in (0, 1, 5, 12):
        tokens, parents = [rng.randrange(3) for _ in range(size)], [rng.randrange(i + 1) for i in range(size)]
        logits = torch.randn(size + 1, 3, generator=torch.Generator().manual_seed(size))
        for sampler, position in itertools.product(plain, (7, 8, 9)):
            expected = walk(logits, children_of(tokens, parents), sampler, position, set(), False)
            arguments = logits, tokens, parents, sampler, position
            dispatch.CALLS.clear()
            assert follow(*arguments, set()) == device_walk(*arguments) == expected
            name = "argmax_rows" if sampler.greedy else "draw_rows"
            assert dispatch.CALLS[name, "fused" if fused else "reference"] == 1 + fused
        for changes in ({"temperature": 0.0, "logprobs": True}, {"logprobs": True}, {"top_k": 2}, {"top_p": 0.9},
                        {"min_p": 0.1}, {"repetition_penalty": 1.1}):  # fmt: skip
            dispatch.CALLS.clear()
            follow(logits, tokens, parents, Sampler(GenerationConfig(**{"temperature": 1.0, **changes})), 0, set())
            assert not dispatch.CALLS, "the host walks"


@torch.no_grad()
def test_the_cache_keeps_the_same_rows_through_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of one shape, and of two, in two layers; rows that stay, and paths whose first rows do."""
    shapes = [(4, 4), (6, 2)]
    rows = [[torch.randn(1, 2, 9, width) for width in widths] for widths in shapes]
    for fused in (False, True):
        monkeypatch.setattr(dispatch, "runs_triton", lambda t, fused=fused: fused)
        for kept in ([0, 2, 5], [0, 1, 4], [0, 1, 2], []):
            dispatch.CALLS.clear()
            cache = TargetCache()
            for layer, (keys, values) in enumerate(rows):
                cache.inner.update(keys, values, layer)
            cache.keep(3, kept)
            index = [0, 1, 2, *(3 + row for row in kept)]
            for layer, (keys, values) in zip(cache.inner.layers, rows, strict=True):
                assert torch.equal(layer.keys, keys[:, :, index]) and torch.equal(layer.values, values[:, :, index])
            assert dispatch.CALLS["commit_path", "fused"] == (2 if fused and kept[-1:] > [2] else 0)
