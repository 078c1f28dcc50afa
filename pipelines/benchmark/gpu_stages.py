"""What `gpu_check` runs, stage by stage. Each stage runs in a process of its own, which a broken kernel may take down.

A stage takes a `Run` and returns what it found; `failed` in it lists what is wrong. It hands over what it has after each step, so that
nothing is lost with it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import registry
from bench.measure import CudaClock, copy_rate, correctness, first_line, timing

MODEL = Path(__file__).resolve().parents[1] / "reference/model"
# Of the reference's experts. On a GPU this model is bound by launches whatever the width; wider ones would only starve the
# kernel of their second product, whose programs are as many as 256 hidden numbers give.
FACTOR = 64
UNITS = 56
PROMPT, PROMPTS, TOKENS = 96, 6, 48
POLICIES = ("off", "confidence:budget=1", "confidence:budget=2", "confidence:budget=4", "confidence:budget=8")
COSTED = ("prefix", "throughput:node_experts=2.8")  # they want a device profile and no predictor: 0.7 of top-4 a node
BUDGETS = (0, 3, 7, 15)  # nodes of a captured step
STEP_OPS = ("select_nodes", "expert_mlp", "tree_attention", "argmax_rows", "verify_tree", "commit_path")
ENGINE_OPS = (
    "expert_mlp",
    "tree_attention",
    "argmax_rows",
    "verify_tree",
    "commit_path",
)  # that every bf16 decode on a GPU runs


@dataclass
class Run:
    """Where a stage runs, until when, and whom it tells."""

    device: str
    deadline: float  # by time.monotonic()
    save: Callable[[dict[str, Any]], None]
    found: dict[str, Any] = field(default_factory=lambda: {"failed": []})

    def over(self, left: str) -> bool:
        """Whether time has run out, which is a failure: what is left has not been seen."""
        if time.monotonic() < self.deadline:
            return False
        self.found["failed"].append(f"out of time: {left}")
        return True

    def keep(self, **found: Any) -> None:
        """Add to what was found and hand it over."""
        self.found |= found
        self.save(self.found)

    def fail(self, why: str) -> None:
        """Note a failure."""
        self.found["failed"].append(why)


def correct(run: Run, ops: Sequence[str]) -> None:
    """Every small case of these ops against its reference."""
    todo, rows = registry.chosen(ops), []
    for i, case in enumerate(todo):
        if run.over(f"{len(todo) - i} of {len(todo)} cases not run"):
            break
        rows.append(correctness(case, run.device))
        if rows[-1]["failed"]:
            run.fail(f"{case.name}: {rows[-1]['failed']}")
        run.keep(cases=rows)


def times(run: Run, ops: Sequence[str]) -> None:
    """Every real case of these ops: gate, then clock. The ceiling is a large copy on the same device."""
    ceiling, clock = copy_rate(run.device), CudaClock(run.device)
    todo, rows = registry.chosen(ops, timed=True), []
    run.keep(copy_bytes_per_second=ceiling)
    for i, case in enumerate(todo):
        if run.over(f"{len(todo) - i} of {len(todo)} cases not timed"):
            break
        rows.append(timing(case, run.device, clock, ceiling))
        if rows[-1]["failed"]:
            run.fail(f"{case.name}: {rows[-1]['failed']}")
        run.keep(rows=rows)


def loaded(device: str, dtype: str) -> Any:
    """An engine on the widened reference and its head, without policy or predictor."""
    from ecospec_runtime.drafters import load_drafter
    from ecospec_runtime.engine import Engine
    from pipelines.reference.widen import with_width

    target = with_width(MODEL / "target", FACTOR * UNITS, dtype, device)
    return Engine(target, load_drafter(str(MODEL / "drafter"), target, dtype))


def prompts(engine: Any, count: int) -> list[list[int]]:
    """Pieces of Python's own library, which the models may have been trained on."""
    from ecospec_train.passes import text_tokens

    text = text_tokens(engine.target, 2 * count * PROMPT)
    return [text[2 * i * PROMPT : (2 * i + 1) * PROMPT] for i in range(count)]


def decode(run: Run, count: int = PROMPTS, tokens: int = TOKENS, policies: Sequence[str] = POLICIES) -> None:
    """The same text in float32 under a tree policy as plainly; then bf16, every policy, by turns."""
    from ecospec_kernels import dispatch
    from ecospec_runtime.bench import Contestant, Plan, measure, summarize
    from ecospec_runtime.config import GenerationConfig
    from ecospec_runtime.policies import parse_policy

    engine = loaded(run.device, "float32")
    config = GenerationConfig(max_new_tokens=tokens, eos_token_id=())
    for prompt in prompts(engine, min(2, count)):
        plain, tree = (
            [token.id for token in engine.with_policy(policy).generate(prompt, config)]
            for policy in ("off", "confidence:budget=4")
        )
        if plain != tree:
            run.fail("float32: `confidence:budget=4` gives another text than `off`")
    run.keep(exact=not run.found["failed"])
    engine = loaded(run.device, "bfloat16")
    policies = (*policies, *_costed(run, engine))
    dispatch.CALLS.clear()
    specs = {text: parse_policy(text) for text in policies}
    entrants = [
        Contestant(text, spec, spec.acceptance_kind("raw"), engine.with_policy(spec)) for text, spec in specs.items()
    ]
    plan = Plan(prompts(engine, count), max_new_tokens=tokens, sampling={"eos_token_id": ()})
    rows = summarize(entrants, plan, measure(entrants, plan))
    calls = {f"{op} {implementation}": n for (op, implementation), n in sorted(dispatch.CALLS.items())}
    run.keep(rows=rows, calls=calls, factor=FACTOR, prompts=count, tokens=tokens)
    if dispatch.runs_triton(torch.empty(0, device=run.device)):
        for op in ENGINE_OPS:
            if not dispatch.CALLS[op, "fused"]:
                run.fail(f"bfloat16: the engine never ran the Triton kernel of {op}: {calls}")


def _costed(run: Run, engine: Any) -> tuple[str, ...]:
    """Gives the engine a short device profile, where it can be measured; the policies that need one."""
    if run.device == "cpu":
        return ()
    try:
        from ecospec_train.profile import ProfileConfig, measured
    except ModuleNotFoundError as error:
        run.keep(profile=f"none, because Python package '{error.name}' is not installed: no prefix, no throughput")
        return ()
    config = ProfileConfig(target="", drafter="", out=Path(), tokens=(1, 2, 4, 8), contexts=(PROMPT, 2 * PROMPT), repeats=3,
                           max_seconds=12.0, allow_busy=True)  # fmt: skip
    try:
        engine.profile = measured(engine.target, engine.drafter, None, config)
    except Exception as error:  # policies that want no profile can still be compared
        run.fail(f"profile: {first_line(error)}")
        return ()
    run.keep(profile=engine.profile.model_dump(mode="json"))
    return COSTED


def step(run: Run, budgets: Sequence[int] = BUDGETS, tokens: int = TOKENS) -> None:
    """A step of fixed shape, launched from Python and as a replayed graph: the engine's text in float32, times in bf16."""
    from ecospec_kernels import dispatch
    from ecospec_runtime.config import GenerationConfig

    rows: list[dict[str, Any]] = []
    for dtype in ("float32", "bfloat16"):
        engine = loaded(run.device, dtype)
        prompt = prompts(engine, 1)[0]
        plain = [
            token.id for token in engine.generate(prompt, GenerationConfig(max_new_tokens=tokens, eos_token_id=()))
        ]
        dispatch.CALLS.clear()
        for budget in budgets:
            if run.over(f"{dtype} with {budget} nodes not reached"):
                return
            rows.append({"dtype": dtype, "budget": budget, **_stepped(engine, prompt, plain, budget)})
            if dtype == "float32" and not rows[-1]["same_text"]:
                run.fail(f"float32: a step with {budget} nodes gives another text than the engine")
            run.keep(rows=rows)
    if dispatch.runs_triton(torch.empty(0, device=run.device)):
        for op in STEP_OPS:
            if not dispatch.CALLS[op, "fused"]:
                run.fail(f"bfloat16: the step never ran the Triton kernel of {op}: {dict(dispatch.CALLS)}")


def _stepped(engine: Any, prompt: list[int], plain: list[int], budget: int) -> dict[str, Any]:
    """Milliseconds of a step, the transfer of its tokens included, and whether every text is the plain one."""
    from ecospec_kernels.select_nodes.reference import ratio
    from ecospec_runtime.config import PoolConfig
    from ecospec_runtime.device_step import BUCKETS, DeviceState, DeviceStep, GraphedStep, read
    from ecospec_runtime.drafters.eagle3_device import DeviceEagle3

    target = engine.target

    def fresh() -> DeviceStep:
        prefilled = engine.prefilled(prompt)
        state = DeviceState(target, prefilled, len(prompt) + len(plain) + BUCKETS[-1])
        if not budget:
            return DeviceStep(target, state)
        head = DeviceEagle3(engine.drafter, prefilled, state, PoolConfig())
        return DeviceStep(target, state, head, ratio(1.0, target.moe_layers, device=target.device), budget)

    def decoded(call: Callable[[], Any]) -> tuple[bool, float, float]:
        found, times = [], []
        while len(found) < len(plain):
            started = time.perf_counter()
            found += read(call(), target.source)
            times.append((time.perf_counter() - started) * 1e3)
        return found[: len(plain)] == plain, statistics.median(times), len(found) / len(times)

    decoded(fresh())  # kernels are compiled
    one = fresh()
    same, eager_ms, per_step = decoded(one)
    row = {"rows": one.rows, "eager_ms": eager_ms, "graph_ms": None, "tokens_per_step": per_step, "same_text": same}
    if target.device.type == "cuda":
        again, row["graph_ms"], _ = decoded(GraphedStep(fresh()))
        row["same_text"] = same and again
    return row


class Stage(NamedTuple):
    """A stage by name, its seconds, and those that may run beside each other."""

    name: str
    seconds: float
    body: Callable[[Run], None]
    beside: bool = False


def stages() -> list[Stage]:
    """In order, the first ones side by side."""
    ops = registry.ops()
    rest = [op for op in ops if op not in ("expert_mlp", "tree_attention")]
    return [
        *(Stage(f"correct {op}", 60, partial(correct, ops=[op]), True) for op in ops),
        Stage("times expert_mlp", 85, partial(times, ops=["expert_mlp"])),
        Stage("times tree_attention", 70, partial(times, ops=["tree_attention"])),
        Stage("times others", 40, partial(times, ops=rest)),
        Stage("step", 30, step),
        Stage("decode", 50, decode),
    ]
