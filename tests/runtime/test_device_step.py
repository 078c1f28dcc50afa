"""Steps of fixed shape give the engine's text, and nothing in them waits for the device or depends on what it holds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

pytest.importorskip("triton")
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from ecospec_kernels import dispatch
from ecospec_kernels.bitsets import unpack
from ecospec_kernels.expert_mlp.reference import SWIGLU
from ecospec_kernels.select_nodes.reference import ratio, throughput
from ecospec_runtime import compute
from ecospec_runtime.bundle import load_bundle
from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.device_predictor import DevicePredictor
from ecospec_runtime.device_step import (
    BUCKETS,
    DevicePool,
    DeviceState,
    DeviceStep,
    GivenPool,
    ancestors,
    bucket,
    greedy,
    read,
)
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.drafters.eagle3_device import DeviceEagle3, Drafted
from ecospec_runtime.engine import Engine
from ecospec_runtime.errors import UserError
from ecospec_runtime.policies import build_policy, parse_policy
from ecospec_runtime.pool import Pool
from ecospec_runtime.predictor import WEIGHTS_FILE, predicted_masks
from ecospec_runtime.sampling import Draws, Sampler
from ecospec_runtime.target import Target
from ecospec_runtime.verify import tree_mask
from tests.families import FAMILIES, PROMPT, greedy_text, save_family
from tests.ops.cases import under_interpreter

COUNT, CAPACITY, NODES, BUDGET = 14, 40, 9, 5
OPS = ("select_nodes", "tree_attention", "expert_mlp", "argmax_rows", "verify_tree", "commit_path")
SHAPE = PoolConfig(depth=3, beam=2, width=4)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, list[int]]:
    """A target of each family, and a prompt with transformers' greedy text."""
    folder = save_family(request.param, tmp_path_factory.mktemp(request.param))
    return Target.from_pretrained(folder), greedy_text(folder, COUNT)


@pytest.fixture(scope="module")
def qwen(tiny_target_dir: Path) -> tuple[Target, list[int]]:
    """The target of the tiny EAGLE-3 head."""
    target = Target.from_pretrained(tiny_target_dir)
    prompt = random.Random(3).sample(range(1, 96), PROMPT)
    config = GenerationConfig(max_new_tokens=COUNT, eos_token_id=())
    return target, prompt + [token.id for token in Engine(target).generate(prompt, config)]


def pool_of(text: list[int], rng: random.Random, target: Target) -> DevicePool:
    """Up to NODES nodes below the last token that `text` has behind it: the right path under wrong ones, at any place."""
    following = text[:3]
    tokens, parents, right = [], [], -1
    for token in following:
        wrong = [(token + shift) % 96 for shift in rng.sample(range(1, 96), 2)]
        place = rng.randrange(3)
        parents += [right] * 3
        tokens += [*wrong[:place], token, *wrong[place:]]
        right = len(tokens) - 3 + place
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    shape = len(tokens), target.moe_layers, 1
    masks = torch.randint(0, 2**12, shape, generator=generator, dtype=torch.int32)
    reach = torch.rand(len(tokens), generator=generator).sort(descending=True).values
    return DevicePool(
        torch.tensor(tokens), torch.tensor(parents), reach, masks, torch.ones(shape[1:], dtype=torch.int32)
    )


def decoded(text: list[int], step: Callable[[], Any], pools: GivenPool, target: Target) -> tuple[list[int], int]:
    """Tokens of repeated steps over given pools, and how many steps that took."""
    tokens, steps, rng = [], 0, random.Random(1)
    while len(tokens) < COUNT - 3:
        pools.fill(pool_of(text[PROMPT + len(tokens) :], rng, target))
        tokens += read(step(), target.source)
        steps += 1
    return tokens, steps


def given(case: tuple[Target, list[int]], **settings: Any) -> tuple[DeviceStep, GivenPool]:
    """A step over given pools after the prompt, with `ratio` as its rule."""
    target, text = case
    state = DeviceState(target, Engine(target).prefilled(text[:PROMPT]), CAPACITY)
    pools = GivenPool(NODES, target.moe_layers, 1)
    rule = ratio(1.0, target.moe_layers)
    return DeviceStep(target, state, pools, **{"rule": rule, "budget": BUDGET, **settings}), pools


def assert_text(case: tuple[Target, list[int]], step: DeviceStep, pools: GivenPool, run: Any = None) -> int:
    """Steps give the text that follows, and leave the state behind it; how many they were."""
    target, text = case
    tokens, steps = decoded(text, run or step, pools, target)
    assert tokens == text[PROMPT : PROMPT + len(tokens)]
    assert int(step.state.past) == PROMPT - 1 + len(tokens) and int(step.state.root) == tokens[-1]
    return steps


def test_steps_give_the_engines_text(case: tuple[Target, list[int]]) -> None:
    """Chosen by either rule, in several buckets and spans, and plainly."""
    target, text = case
    stream = Engine(target).generate(text[:PROMPT], GenerationConfig(max_new_tokens=COUNT, eos_token_id=()))
    assert [token.id for token in stream] == text[PROMPT:]
    costly = throughput(0.05, 0.01)
    for settings in ({}, {"budget": 9, "span": 32}, {"rule": costly, "budget": 3}, {"budget": 2}):
        assert assert_text(case, *given(case, **settings)) < COUNT - 3, settings
    assert assert_text(case, *given(case, budget=0)) == COUNT - 3


def test_steps_draw_as_the_engine(case: tuple[Target, list[int]]) -> None:
    """At a temperature, with drafts and plainly; another seed copied into the step's draws gives another text."""
    target, text = case
    draws, texts = Draws(0, 0.7, "cpu"), []
    for seed in (4, 2**40):
        config = GenerationConfig(max_new_tokens=COUNT, eos_token_id=(), temperature=0.7, seed=seed)
        texts.append(text[:PROMPT] + [token.id for token in Engine(target).generate(text[:PROMPT], config)])
        draws.seed.fill_(seed)
        assert assert_text((target, texts[-1]), *given(case, choose=draws)) < COUNT - 3
        assert assert_text((target, texts[-1]), *given(case, choose=draws, budget=0)) == COUNT - 3
    assert texts[0] != texts[1] != text


def test_one_token_prompts(case: tuple[Target, list[int]]) -> None:
    target, text = case
    expected = [token.id for token in Engine(target).generate(text[:1], GenerationConfig(max_new_tokens=5))]
    step = DeviceStep(target, DeviceState(target, Engine(target).prefilled(text[:1]), 8))
    assert [read(step(), target.source)[0] for _ in range(5)] == expected


def test_padding_repeats_the_root(case: tuple[Target, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It wants the root's experts, so that none more is read."""
    target, text = case
    for nodes in (4, NODES):  # rows of nodes that the pool lacks, and those behind the budget
        step, pools = given(case, budget=NODES)
        pool = pool_of(text[PROMPT:], random.Random(0), target)
        pools.fill(DevicePool(*(part[:nodes] for part in pool[:4]), pool.root_mask))
        seen: list[Tensor] = []
        monkeypatch.setattr(dispatch, "fast_experts", lambda *a, seen=seen: seen.append(a[1]))
        step()
        assert step.rows == 16 and len(seen) == target.moe_layers
        assert all(torch.equal(index[1 + nodes :], index[:1].expand(15 - nodes, -1)) for index in seen)
    assert any(not torch.equal(index[row], index[0]) for index in seen for row in range(1, 1 + NODES))


def gathered(hidden: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gate: Any = SWIGLU,
             up_bias: Tensor | None = None, down_bias: Tensor | None = None) -> Tensor:  # fmt: skip
    """`expert_mlp` in operations whose shapes follow from the arguments': what its kernel's launches do."""
    inner = torch.einsum("nd,nkmd->nkm", hidden, gate_up[index])
    inner = gate.apply(inner if up_bias is None else inner + up_bias[index])
    y = torch.einsum("nkm,nkdm->nkd", inner, down[index])
    return ((y if down_bias is None else y + down_bias[index]) * weight[..., None]).sum(1)


def traced(step: DeviceStep, *more: Tensor) -> tuple[Any, list[Tensor]]:
    """The step's operations, recorded on tensors without data, as a function of the buffers, which it writes; and those."""
    state, pools = step.state, step.pools
    buffers = [*state.registers, *(t for layer in state.cache.layers for t in (layer.keys, layer.values)), *more]
    given_pool = list(pools.pool) if isinstance(pools, GivenPool) else []

    def run(*arguments: Tensor) -> Any:
        held = dict(zip(map(id, buffers + given_pool), arguments, strict=True))
        owners = [state, *state.cache.layers, pools]
        saved = [dict(vars(owner)) for owner in owners]
        for owner in owners:
            for name, value in vars(owner).items():
                if id(value) in held:
                    setattr(owner, name, held[id(value)])
        if given_pool:
            pools.pool = DevicePool(*(held[id(t)] for t in given_pool))  # type: ignore[union-attr]
        try:
            return step()
        finally:
            for owner, values in zip(owners, saved, strict=True):
                vars(owner).update(values)

    arguments = buffers + given_pool
    return make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments), arguments


def assert_static(graph: Any) -> None:
    """No operation hands a number to the host or makes a shape of data."""
    names = Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    assert sum(names.values()) > 100, "the model was traced"
    assert not {name for name in names if "_local_scalar_dense" in name or "nonzero" in name}
    for node in graph.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.dynamic_output_shape in tags and node.target is torch.ops.aten.index.Tensor:  # by bools only
            assert not any(index.meta["val"].dtype == torch.bool for index in node.args[1] if index is not None)
        else:
            assert not {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(tags), node.target


def test_a_recorded_step_decodes_by_replays(case: tuple[Target, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded once and without data, as by a CUDA graph, it decodes the whole text."""
    monkeypatch.setattr(dispatch, "fast_experts", gathered)
    step, pools = given(case)
    graph, arguments = traced(step)
    assert_static(graph)
    assert assert_text(case, step, pools, lambda: graph(*arguments)) < COUNT - 3


def test_what_waits_is_found(qwen: tuple[Target, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts' reference asks which experts occur: that cannot be recorded."""
    monkeypatch.setattr(dispatch, "ENABLED", False)
    with pytest.raises(GuardOnDataDependentSymNode):
        traced(given(qwen)[0])


class Launches:
    """Stands for a Triton kernel: takes note of grids and numbers, computes nothing."""

    def __init__(self, name: str, seen: list[Any]):
        self.name, self.seen = name, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *a, **k: self.seen.append(
            (self.name, grid, [x for x in (*a, *k.values()) if not isinstance(x, Tensor)])
        )


def test_launches_depend_on_shapes_alone(case: tuple[Target, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel of the step is launched from tensors that have no data to look at."""
    step, _ = given(case)  # reads the prompt, before nothing computes any more
    monkeypatch.setattr(dispatch, "runs_triton", lambda t: True)
    monkeypatch.setattr(
        FakeTensor, "data_ptr", lambda self: id(self), raising=False
    )  # `tree_attention` asks whether values are keys
    seen: list[Any] = []
    for op in OPS:
        fused = dispatch._module(op, "fused")
        for module in (fused, getattr(fused, "kernels", fused)):
            for name, kernel in list(vars(module).items()):
                if isinstance(kernel, InterpretedFunction | JITFunction):
                    monkeypatch.setattr(module, name, Launches(f"{op}.{name}", seen))
    compute._attention(step.target.model)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            step()
    finally:
        step.target.model.set_attn_implementation("eager" if step.target.config.model_type == "gpt_oss" else "sdpa")
    assert {name.split(".")[0] for name, *_ in seen} == set(OPS)


@under_interpreter
def test_steps_through_the_kernels(case: tuple[Target, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, they give the same text."""
    step, pools = given(case)
    target, text = case
    monkeypatch.setattr(dispatch, "runs_triton", lambda t: True)
    compute._attention(target.model)
    dispatch.CALLS.clear()
    tokens: list[int] = []
    try:
        for seed in range(3):
            pools.fill(pool_of(text[PROMPT + len(tokens) :], random.Random(seed), target))
            tokens += read(step(), target.source)
    finally:
        target.model.set_attn_implementation("eager" if target.config.model_type == "gpt_oss" else "sdpa")
    assert tokens == text[PROMPT : PROMPT + len(tokens)] and len(tokens) > 3
    assert {op for op, _ in dispatch.CALLS} == set(OPS) and {kind for _, kind in dispatch.CALLS} == {"fused"}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_head_drafts_within_the_step(
    qwen: tuple[Target, list[int]], tiny_drafter_dir: Path, temperature: float
) -> None:
    """Trees are the host's at every step, whatever was accepted between, noise of the draws included."""
    target, text = qwen
    config = GenerationConfig(max_new_tokens=COUNT, eos_token_id=(), temperature=temperature, seed=4)
    text = text[:PROMPT] + [token.id for token in Engine(target).generate(text[:PROMPT], config)]
    draws = Draws(config.seed, temperature, "cpu") if temperature else None
    drafter: Any = load_drafter(str(tiny_drafter_dir), target, "float32")
    engine = Engine(target, drafter, policy=build_policy(parse_policy("confidence:budget=3")), pool=SHAPE)
    step, pools = given((target, text), choose=draws or greedy)
    head = DeviceEagle3(drafter, engine.prefilled(text[:PROMPT]), step.state, SHAPE, draws=draws)
    step.pools = SimpleNamespace(aux_layers=head.aux_layers, propose=pools.propose, extend=head.extend)

    def compare() -> Any:
        length = int(step.state.past) + 1
        past = engine.prefilled(text[:length])
        sequence = drafter.start()
        drafter.extend(sequence, text[1:length], torch.cat(past.features))
        host = drafter.expand(sequence, text[length - 1], SHAPE, (), Sampler(config))
        device = head.grow(step.state.past)
        for name in ("tokens", "parents", "depths", "ranks", "state_rows"):
            assert getattr(device, name).tolist() == getattr(host, name).tolist(), name
        for name in ("log_probs", "states", "entropies"):
            wanted = torch.from_numpy(getattr(host, name))
            torch.testing.assert_close(getattr(device, name), wanted, rtol=1e-4, atol=1e-4)

    def stepped() -> Any:
        compare()
        return step()

    assert assert_text((target, text), step, pools, stepped) < COUNT - 3
    compare()


def predictor_of(bundle: Path, target: Target, drafter: Any) -> DevicePredictor:
    return DevicePredictor.load(bundle, load_bundle(bundle).manifest.predictor, target, drafter)


def shown(masks: Tensor, experts: int) -> Tensor:
    """Predicted sets [N, L, W] as bool [N, L, E]."""
    return unpack(masks)[..., :experts]


def test_predictions_are_the_hosts(qwen: tuple[Target, list[int]], tiny_drafter_dir: Path, tiny_bundle: Path) -> None:
    """On the same pools, step by step: the sets of onnxruntime's logits, up to experts whose logits are as good as equal."""
    target, text = qwen
    drafter: Any = load_drafter(str(tiny_drafter_dir), target, "float32")
    prompt = Engine(target, drafter, policy=build_policy(parse_policy("confidence:budget=3"))).prefilled(text[:PROMPT])
    state, host = DeviceState(target, prompt, CAPACITY), load_bundle(tiny_bundle).predictor()
    device = predictor_of(tiny_bundle, target, drafter)
    device.shrinkage = host.manifest.shrinkage = 0.25
    trees: list[tuple[Tensor, Drafted]] = []

    def predict(root: Tensor, tree: Drafted) -> tuple[Tensor, Tensor]:
        trees.append((root.clone(), tree))
        return device(root, tree)

    step = DeviceStep(target, state, DeviceEagle3(drafter, prompt, state, SHAPE, predict), ratio(1.0, 7), BUDGET)
    for _ in range(4):
        step()
    root, odd = trees[0][0], Drafted(*(part.clone() for part in trees[0][1]))
    odd.log_probs[1], odd.log_probs[2], odd.entropies[2] = -torch.inf, torch.nan, torch.inf
    odd.states[odd.state_rows[-1]], odd.states[1, 1] = torch.nan, 1e6
    for token, tree in [*trees, (root, odd)]:
        fields = {name: getattr(tree, name).numpy() for name in Drafted._fields if name != "reach"}
        pool = Pool(root_token=int(token), **fields)
        logits = torch.from_numpy(host.predict(pool, target.embed_host).routing_logits)
        expected = predicted_masks(logits.numpy(), target.top_k)
        bits = torch.tensor([[mask >> bit & 1 for bit in range(7 * 12)] for mask in expected]).view(-1, 7, 12).bool()
        nodes, own = device(token, tree)
        found = shown(torch.cat((own[None], nodes)), 12)
        assert found.sum(-1).eq(target.top_k).all()
        edge = logits.topk(target.top_k).values[..., -1:]
        differ = found != bits
        assert not (differ & ~((logits - edge).abs() < 1e-5)).any()
        assert differ.sum() <= 4 and len(bits.flatten(1).unique(dim=0)) > len(tree.tokens) // 2
    assert logits.isfinite().all(-1).logical_not().any(), "an unknown node was among them"


def test_foreign_predictors_are_refused(qwen: tuple[Target, list[int]], tiny_drafter_dir: Path, tiny_bundle: Path, tmp_path: Path) -> None:  # fmt: skip
    target = qwen[0]
    drafter: Any = load_drafter(str(tiny_drafter_dir), target, "float32")
    manifest = load_bundle(tiny_bundle).manifest.predictor
    for message, width, fingerprint in (
        ("made for hidden=32 state=32", 33, drafter.fingerprint), ("are of different drafters", 32, "other"),
    ):  # fmt: skip
        other: Any = SimpleNamespace(fingerprint=fingerprint, width=width)
        with pytest.raises(UserError, match=message):
            DevicePredictor.load(tmp_path, manifest, target, other)
    weights = load_file(tiny_bundle / WEIGHTS_FILE)
    for damage in (
        None,
        b"",
        save({"middle.bias": weights["middle.bias"]}),
        save(weights | {"routing.bias": torch.zeros(5)}),
    ):
        if damage is not None:
            (tmp_path / WEIGHTS_FILE).write_bytes(damage)
        with pytest.raises(UserError, match="not the weights of a predictor"):
            DevicePredictor.load(tmp_path, manifest, target, drafter)


def test_draft_and_step_are_recorded_together(
    qwen: tuple[Target, list[int]], tiny_drafter_dir: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One recording of draft, predict, select, verify and commit decodes the whole text."""
    target, text = qwen
    monkeypatch.setattr(dispatch, "fast_experts", gathered)
    drafter: Any = load_drafter(str(tiny_drafter_dir), target, "float32")
    prompt = Engine(target, drafter, policy=build_policy(parse_policy("confidence:budget=3"))).prefilled(text[:PROMPT])
    state = DeviceState(target, prompt, CAPACITY)
    head = DeviceEagle3(drafter, prompt, state, SHAPE, predictor_of(tiny_bundle, target, drafter))
    step = DeviceStep(target, state, head, ratio(1.0, 7), BUDGET)
    graph, arguments = traced(step, head.keys, head.values)
    assert_static(graph)
    tokens: list[int] = []
    while len(tokens) < COUNT - 3:
        tokens += read(graph(*arguments), "it")
    assert tokens[: COUNT - 3] == text[PROMPT : PROMPT + COUNT - 3]
    with pytest.raises(ValueError, match=r"min_reach 0\.1 makes trees of any size"):
        DeviceEagle3(drafter, prompt, state, PoolConfig(min_reach=0.1))


def test_rows_see_their_path() -> None:
    rng = random.Random(0)
    for rows in BUCKETS:
        for nodes in {0, rows // 2, rows - 1}:
            parents = [rng.randrange(i + 1) for i in range(nodes)] if nodes != rows - 1 else list(range(nodes))
            sees = ancestors(torch.tensor([-1, *parents, *[-1] * (rows - 1 - nodes)]))
            assert torch.equal(sees[: nodes + 1, : nodes + 1], tree_mask(parents, 0))
            assert (
                not sees[:, nodes + 1 :].any()
                and sees[nodes + 1 :].sum() == sees[nodes + 1 :, 0].sum() == rows - nodes - 1
            )


def test_damage_is_reported_by_the_read(qwen: tuple[Target, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = given(qwen, budget=0)
    weight = qwen[0].model.get_output_embeddings().weight.data
    monkeypatch.setitem(weight.__dict__, "kept", weight.clone())
    try:
        weight[3, 4] = torch.nan
        with pytest.raises(UserError, match="NaN or Inf in hidden states or logits"):
            read(step(), "it")
    finally:
        weight.copy_(weight.__dict__["kept"])


def test_wrong_sizes_are_refused(qwen: tuple[Target, list[int]]) -> None:
    target, text = qwen
    step, pools = given(qwen)
    read_once: Any = Engine(target).prefilled(text[:PROMPT])
    assert read(DeviceStep(target, DeviceState(target, read_once, PROMPT))(), "it") == text[PROMPT : PROMPT + 1]
    assert [bucket(rows) for rows in (1, 2, 3, 33, 64)] == [1, 2, 4, 64, 64]
    for message, wrong in (
        ("65 rows of a pass are more than 64", lambda: bucket(65)),
        ("a budget of 2 nodes needs pools", lambda: DeviceStep(target, step.state, None, None, 2)),
        ("a budget of -1 nodes: 0 or more", lambda: given(qwen, budget=-1)),
        ("a budget of -1 nodes: 0 or more", lambda: DeviceStep(target, step.state, budget=-1)),
        ("a span of 0 rows is not within 8 and 40", lambda: given(qwen, span=0)),
        ("a span of 41 rows is not within 8 and 40", lambda: given(qwen, span=41)),
        ("a span of 4 rows is not within 8 and 40", lambda: given(qwen, span=4)),
        (r"a span of 8\.5 rows: a whole number", lambda: given(qwen, span=8.5)),
        (r"a budget of 1\.5 nodes: a whole number", lambda: given(qwen, budget=1.5)),
        (r"a cache of 40\.0 rows: a whole number", lambda: DeviceState(target, read_once, 40.0)),
        ("a pool of 10 nodes does not fit 9", lambda: pools.fill(DevicePool(*[torch.zeros(10)] * 5))),
        *((f"a prompt of {PROMPT} tokens does not fit {rows} rows", lambda rows=rows: DeviceState(target, read_once, rows))
          for rows in (PROMPT - 1, PROMPT - 2, 0, -3)),
        ("0 nodes, 7 layers and 1 words: each must be at least 1", lambda: GivenPool(0, 7, 1)),
        ("9 nodes, 7 layers and -1 words: each must be at least 1", lambda: GivenPool(9, 7, -1)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            wrong()


@pytest.mark.parametrize(("name", "change"), [
    ("tokens", lambda t: t[:, None]), ("parents", lambda t: t[:1]), ("parents", lambda t: t.repeat(2)),
    ("parents", lambda t: t.int()), ("reach", lambda t: t[:-1]), ("reach", lambda t: t.double()), ("masks", lambda t: t[:, :1]),
    ("masks", lambda t: t.repeat(1, 1, 2)), ("masks", lambda t: t.long()), ("masks", lambda t: t[:1]),
    ("root_mask", lambda t: t[:1]), ("root_mask", lambda t: t.long()), ("masks", lambda t: t.to("meta")),
])  # fmt: skip
def test_a_pool_whose_parts_do_not_fit_is_not_copied(qwen: tuple[Target, list[int]], name: str, change: Any) -> None:
    target, text = qwen
    pools, rng = GivenPool(NODES, target.moe_layers, 1), random.Random(0)
    pools.fill(pool_of(text[PROMPT:], rng, target))
    before = [part.clone() for part in pools.pool]
    other = pool_of(text[PROMPT + 1 :], rng, target)
    with pytest.raises(ValueError, match=f"^{name} of a pool of {NODES} nodes: "):
        pools.fill(other._replace(**{name: change(getattr(other, name))}))
    assert all(map(torch.equal, pools.pool, before))
