"""What `gpu_check` runs, stage by stage. Each stage runs in a process of its own, which a broken kernel may take down.

A stage takes a `Run` and returns what it found; `failed` in it lists what is wrong. It hands over what it has after each step, so that
nothing is lost with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import registry
from bench.measure import CudaClock, copy_rate, correctness, timing

MODEL = Path(__file__).resolve().parents[1] / "reference/model"
# Of the reference's experts. On a GPU this model is bound by launches whatever the width; wider ones would only starve the
# kernel of their second product, whose programs are as many as 256 hidden numbers give.
FACTOR = 64
UNITS = 56
PROMPT, PROMPTS, TOKENS = 96, 6, 48
POLICIES = ("off", "confidence:budget=1", "confidence:budget=2", "confidence:budget=4", "confidence:budget=8")
COSTED = ("prefix", "throughput:node_experts=2.8")  # they want a device profile and no predictor: 0.7 of top-4 a node
ENGINE_OPS = ("expert_mlp", "tree_attention", "commit_path")  # that every bf16 decode on a GPU runs


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
    """The same text in float32 under a tree policy as plainly; then bf16, every policy, interleaved prompt by prompt."""
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
    config = ProfileConfig(
        target="",
        drafter="",
        out=Path(),
        tokens=(1, 2, 4, 8),
        contexts=(PROMPT, 2 * PROMPT),
        repeats=3,
        max_seconds=12.0,
        allow_busy=True,
    )
    engine.profile = measured(engine.target, engine.drafter, None, config)
    run.keep(profile=engine.profile.model_dump(mode="json"))
    return COSTED


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
        Stage("times expert_mlp", 70, partial(times, ops=["expert_mlp"])),
        Stage("times tree_attention", 60, partial(times, ops=["tree_attention"])),
        Stage("times others", 35, partial(times, ops=rest)),
        Stage("decode", 50, decode),
    ]
