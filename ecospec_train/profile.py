"""Measure what a verification pass, a draft and a prediction cost on this machine: the device profile.

A designed experiment through the engine's own path: passes of 1 to 16 rows at several context lengths over text that
every Python installation has. Some read what their own tokens want (running text, tokens from all over), whose unions are
recorded on separate passes, so that hooks do not disturb the timed ones; in others the union is forced, so that it varies apart
from the number of rows. Every pass has rows and experts of its own and the cells of the design take turns in random order,
so that no pass finds its experts warmer in a cache than decoding does. Further passes time each layer's experts by themselves.
Legend: n rows of a pass, P cached tokens, F width of the drafter's features, L MoE layers, C cells of the design.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ecospec_runtime.config import PoolConfig
from ecospec_runtime.console import check_writable, note, write_json
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.drafters import Drafter, load_drafter
from ecospec_runtime.machine import device_slug, versions
from ecospec_runtime.mxfp4 import dtype_name
from ecospec_runtime.placement import agreed
from ecospec_runtime.policies import PolicySpec, build_policy
from ecospec_runtime.pool import Candidates, Pool, pack_masks
from ecospec_runtime.predictor import Predictor, same_drafter
from ecospec_runtime.scoring import Scorer
from ecospec_runtime.target import Target
from ecospec_train.cost_model import PassCost, fit_pass_cost, layer_costs
from ecospec_train.passes import (
    ExpertClock,
    Rows,
    expert_popularity,
    forced_routing,
    plain_steps,
    prefilled,
    run_pass,
    spread_experts,
    text_tokens,
    undisturbed,
    union_of,
)
from ecospec_train.quiet import OtherLoad, is_busy, wait_until_quiet
from ecospec_train.settings import MIN_ROUNDS, ProfileConfig
from ecospec_train.steps import Steps

T = TypeVar("T")

BAD_FIT = 0.05  # held-out relative error above which the profile is not to be trusted
UNSTEADY = 0.10  # relative interquartile range of repeats that says the machine is busy
WARM_UP = 3
TEXT = 8192  # tokens to draw rows from
POPULAR = 512  # tokens of it whose routing says which experts are hot, and so often still in a cache
PLAIN_STEPS = 16  # in each round
DRAFTS_PER_REPEAT = 3
FORCED = (0.15, 0.5, 0.85)  # unions between the fewest experts that n rows can read, top-k, and the most
BETWEEN = 4  # rows of the target's passes between timed drafts
DRAFTED: dict[str, dict[str, int]] = {
    "shallow": {"depth": 1},
    "narrow": {"beam": 1},
    "full": {},
}  # pools that are timed
PREDICTIONS = WHOLE, _ = "predict_", "accept_"  # of experts and acceptance, of acceptance alone: timed in turn
CATCH_UP = 2  # rows the drafter is given per step: about what a step emits


@dataclass
class Cell:
    """One point of the design, and the passes run for it, each on rows of its own."""

    context: int
    n: int
    kind: str  # chain: running text; bush: tokens from all over below one root; same: one token again and again
    unions: list[int] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    forced: float | None = None  # place of the union between its bounds, see `FORCED`; None: what the rows want
    layers_ms: list[list[float]] = field(default_factory=list)  # of further passes: each expert module's own

    def draw(self, text: list[int], rng: np.random.Generator) -> Rows:
        """Fresh rows, so that a pass finds its experts as cold as one of a decode does."""
        start = int(rng.integers(0, len(text) - self.n + 1))
        tokens = text[start : start + self.n] if self.kind == "chain" else rng.choice(text, self.n).tolist()
        tokens = tokens[:1] * self.n if self.kind == "same" else tokens
        return Rows(self.context, tokens, [0] * (self.n - 1) if self.kind == "bush" else list(range(self.n - 1)))

    def layer_union(self, target: Target) -> int:
        """Experts of each layer that a forced pass reads."""
        assert self.forced is not None
        most = min(self.n * target.top_k, target.experts)
        return target.top_k + round(self.forced * (most - target.top_k))

    def routing(
        self, target: Target, popularity_LE: NDArray[np.float64], rng: np.random.Generator
    ) -> AbstractContextManager[None]:
        """Within it passes read this cell's experts, drawn anew without replacement, each as often as text wants it."""
        if self.forced is None:
            return nullcontext()
        union = self.layer_union(target)
        orders = (np.log(popularity_LE) + rng.gumbel(size=popularity_LE.shape)).argsort(axis=1)[:, ::-1].tolist()
        return forced_routing(target, [spread_experts(self.n, target.top_k, union, order) for order in orders])

    @property
    def union(self) -> float:
        """Mean number of distinct (layer, expert) pairs that a pass touches."""
        return float(np.mean(self.unions))

    @property
    def ms(self) -> float:
        """Time of a pass, undisturbed."""
        return undisturbed(self.milliseconds)

    @property
    def spread(self) -> float:
        """Interquartile range of the times over their median."""
        low, middle, high = np.percentile(self.milliseconds, [25, 50, 75])
        return float((high - low) / middle)


def profile(config: ProfileConfig) -> DeviceProfile:
    """Run the experiment, write the profile to `config.out` and return it. UserError for what cannot be loaded."""
    check_writable(config.out)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device: str | None = config.device
    if device == "auto":
        device = ("cuda" if torch.cuda.is_available() else "cpu") if config.device_map is None else None
    target = Target.from_pretrained(config.target, config.dtype, device, device_map=config.device_map, tp=config.tp)
    drafter = load_drafter(config.drafter, target, config.dtype)
    predictor = Predictor.from_folder(config.predictor) if config.predictor is not None else None
    if predictor is not None:
        same_drafter(drafter.fingerprint, f"drafter {config.drafter}", predictor.manifest, config.predictor)
    result = measured(target, drafter, predictor, config)
    write_json(config.out, result.model_dump(mode="json"))
    return result


def measured(target: Target, drafter: Drafter, predictor: Predictor | None, config: ProfileConfig) -> DeviceProfile:
    """The experiment on models that are loaded; says what makes its result doubtful."""
    text = text_tokens(
        target, max(config.contexts) + max(TEXT, len(DRAFTED) * CATCH_UP * DRAFTS_PER_REPEAT * config.repeats + 1)
    )
    if not config.allow_busy and config.tp == 1:  # processes that share the target are no strangers
        wait_until_quiet(
            "stop them, or measure all the same with --allow-busy (allow_busy: true in a pipeline's profile)"
        )
    load = OtherLoad()
    passes, plain = measure_passes(target, drafter, text, config)
    cost = fit_pass_cost(
        np.array([p.n for p in passes], np.float64), np.array([p.union for p in passes]),
        np.array([p.context for p in passes], np.float64), np.array([p.ms for p in passes]), config.seed,
    )  # fmt: skip
    result = base_profile(target, passes, cost, plain, config)
    drafting = measure_drafting(target, drafter, predictor, text, result, config)
    result = result.model_copy(
        update=drafting
        | {"drafter": drafter.fingerprint, "other_load": round(load.cores(), 2) if config.tp == 1 else 0.0}
    )
    for line in complaints(result, passes, predictor is None):
        note(f"profile: {line}")
    return result


def design(config: ProfileConfig) -> list[Cell]:
    """Every context and row count, with rows of each kind and with forced unions."""
    # Processes that share the target number the experts of their parts: there unions come from the rows alone.
    forced = [("chain", share) for share in FORCED] if config.tp == 1 else [("same", None)]
    kinds: list[tuple[str, float | None]] = [("chain", None), ("bush", None), *forced]
    return [
        Cell(context, n, kind, forced=share)
        for context in config.contexts
        for n in config.tokens
        for kind, share in kinds[: 1 if n == 1 else None]
    ]


def measure_passes(
    target: Target, drafter: Drafter, text: list[int], config: ProfileConfig
) -> tuple[list[Cell], tuple[float, float]]:
    """Time passes for every cell of the design in interleaved rounds; each one's union is recorded after it was timed.

    Every round has its plain steps too, so that a machine which slows down slows both: as of `plain_steps`.
    """
    cells = design(config)
    caches = {context: prefilled(target, text[:context]) for context in config.contexts}
    popularity_LE = expert_popularity(target, text[:POPULAR])
    rng = np.random.default_rng(config.seed)
    deadline = time.monotonic() + config.max_seconds
    middle, plain = sorted(config.contexts)[len(config.contexts) // 2], []
    with Steps("profile: passes", config.repeats * len(cells)) as steps:
        for cell in cells[:WARM_UP]:
            run_pass(target, drafter, cell.draw(text, rng), caches[cell.context])
        for round_ in range(config.repeats):
            if round_ >= MIN_ROUNDS and agreed(time.monotonic() > deadline):
                break
            for i in rng.permutation(len(cells)).tolist():
                cell = cells[i]
                rows, cache = cell.draw(text, rng), caches[cell.context]
                with cell.routing(target, popularity_LE, rng):
                    cell.milliseconds.append(run_pass(target, drafter, rows, cache))
                if cell.forced is None:
                    cell.unions.append(union_of(target, rows, cache))
                else:
                    cell.unions.append(target.moe_layers * cell.layer_union(target))
                    if cell.context == middle:
                        with cell.routing(target, popularity_LE, rng), ExpertClock(target) as clock:
                            run_pass(target, drafter, cell.draw(text, rng), cache)
                        cell.layers_ms.append(clock.layers_ms())
                steps.advance()
            plain.append(plain_steps(target, text[round_ * PLAIN_STEPS :], middle, PLAIN_STEPS))
    experts_ms, step_ms = np.median(plain, axis=0).tolist()
    return cells, (experts_ms, step_ms)


def costs_by_layer(target: Target, passes: list[Cell]) -> tuple[float, ...]:
    """`DeviceProfile.layer_costs`, from the cells in which each layer's experts were timed."""
    timed = [cell for cell in passes if cell.layers_ms]
    if not timed:
        return ()
    rows = np.array([cell.n for cell in timed], np.float64)
    unions = np.array([cell.union for cell in timed]) / target.moe_layers
    return layer_costs(rows, unions, np.stack([undisturbed(cell.layers_ms, axis=0) for cell in timed]))


def base_profile(
    target: Target, passes: list[Cell], cost: PassCost, plain: tuple[float, float], config: ProfileConfig
) -> DeviceProfile:  # fmt: skip
    """The profile without the drafter's part; `plain` is what `plain_steps` measured."""
    dtype, threads = dtype_name(target), torch.get_num_threads()
    name = target.hardware
    experts_ms, plain_ms = plain
    result = DeviceProfile(
        device=name, slug=device_slug(name, dtype, threads), dtype=dtype, threads=threads, versions=versions(),
        fixed_ms=cost.fixed, per_token_ms=cost.per_token, per_expert_ms=cost.per_expert,
        layer_costs=costs_by_layer(target, passes), per_context_ms=cost.per_context, heldout_error=cost.heldout_error, plain_ms=plain_ms,
        expert_share=experts_ms / plain_ms,
    )  # fmt: skip
    by_formula = float(np.mean([result.pass_ms(1, round(p.union), p.context) for p in passes if p.n == 1]))
    return result.model_copy(update={"plain_saving_ms": max(0.0, by_formula - plain_ms)})


def measure_drafting(
    target: Target, drafter: Drafter, predictor: Predictor | None, text: list[int], base: DeviceProfile,
    config: ProfileConfig,
) -> dict[str, float]:  # fmt: skip
    """Milliseconds of catching up plus one level, of each further level and expanded node, of prediction and of selection.

    The target runs in between, as it does when decoding: it leaves little else in the processor's caches.
    """
    context, repeats = sorted(config.contexts)[len(config.contexts) // 2], DRAFTS_PER_REPEAT * config.repeats
    end = context + CATCH_UP * len(DRAFTED) * repeats
    ids = torch.tensor(text[: end + 1], device=target.device)
    features = target.forward(ids[:end], torch.arange(end, device=target.device), None, target.new_cache(),
                              aux_layers=drafter.aux_layers, logits=False).aux  # fmt: skip
    features = torch.zeros(end, 0) if features is None else features
    sequence = drafter.start()
    drafter.extend(sequence, ids[1 : context + 1], features[:context])
    rng = np.random.default_rng(config.seed)
    scorer = Scorer(predictor, "head" if predictor else "raw", target.moe_layers, target.experts)
    policy = build_policy(PolicySpec(name="throughput"))
    times: dict[str, list[float]] = {
        name: [] for name in ("select", *(f"{part}{shape}" for part in ("", *PREDICTIONS) for shape in DRAFTED))
    }
    shapes = {name: config.pool.model_copy(update=update) for name, update in DRAFTED.items()}
    pools: dict[str, list[Pool]] = {name: [] for name in DRAFTED}
    cache, at = prefilled(target, text[:context]), context

    with Steps("profile: drafting", repeats) as steps:
        for part, _ in zip(cycle(PREDICTIONS), range(repeats), strict=False):
            routing = predictor is not None and part == WHOLE
            for name, shape in shapes.items():
                between = rng.choice(text, BETWEEN).tolist()
                run_pass(target, drafter, Rows(context, between, list(range(BETWEEN - 1))), cache)
                draft = partial(catch_up_and_expand, drafter, sequence, ids, features, at, shape, scorer.temperatures)
                pool = timed(times[name], draft)
                at += CATCH_UP
                scored = timed(times[f"{part}{name}"], partial(scorer.score, pool, target.embed_host, routing))
                pools[name].append(pool)
            candidates = scored if routing else with_masks(scored, target)
            if len(candidates):
                timed(times["select"], partial(policy.select, candidates, base, context))
            steps.advance()
    return drafting_costs({name: undisturbed(values) if values else 0.0 for name, values in times.items()}, pools)


def drafting_costs(taken: dict[str, float], pools: dict[str, list[Pool]]) -> dict[str, float]:
    """The drafter's part of a profile, from ms by pool shape and the pools that took them: an n-gram drafter's vary."""
    levels, expanded, nodes = (
        {name: float(np.mean([size(pool) for pool in found])) for name, found in pools.items()}
        for size in (lambda pool: pool.levels, lambda pool: pool.expanded, len)
    )
    wider, deeper = expanded["full"] - expanded["narrow"], levels["narrow"] - levels["shallow"]
    per_expanded = max(0.0, taken["full"] - taken["narrow"]) / wider if wider > 0 else 0.0
    further = taken["narrow"] - taken["shallow"] - per_expanded * (expanded["narrow"] - expanded["shallow"])
    level = max(0.0, further) / deeper if deeper > 0 else 0.0
    costs = {
        "draft_fixed_ms": taken["shallow"],
        "draft_level_ms": level,
        "draft_node_ms": per_expanded,
        "select_ms": taken["select"],
    }
    more = nodes["full"] - nodes["shallow"]
    for part in PREDICTIONS:
        few, many = (taken[f"{part}{shape}"] for shape in ("shallow", "full"))
        per_node = max(0.0, many - few) / more if more > 0 else 0.0
        costs |= {f"{part}ms": max(0.0, few - per_node * nodes["shallow"]), f"{part}node_ms": per_node}
    return costs


def catch_up_and_expand(
    drafter: Drafter, sequence: Any, ids: Tensor, features_PF: Tensor, at: int, shape: PoolConfig,
    temperatures: tuple[float, ...],
) -> Pool:  # fmt: skip
    """The drafter's part of a step whose pass began at position `at`: take in what was emitted, expand from its end."""
    end = at + CATCH_UP
    drafter.extend(sequence, ids[at + 1 : end + 1], features_PF[at:end])
    return drafter.expand(sequence, int(ids[end]), shape, temperatures)


def timed(into: list[float], action: Callable[[], T]) -> T:
    """Run `action` and append its milliseconds."""
    start = time.perf_counter()
    value = action()
    into.append((time.perf_counter() - start) * 1e3)
    return value


def with_masks(candidates: Candidates, target: Target) -> Candidates:
    """Invented expert sets of the usual size, so that selection can be timed without a predictor."""
    rng = np.random.default_rng(0)
    shape = (len(candidates), target.moe_layers, target.experts)
    routing = np.argsort(rng.random(shape), axis=-1)[..., : target.top_k]
    return Candidates(**{**vars(candidates), "masks": pack_masks(routing, target.experts)})


def complaints(result: DeviceProfile, passes: list[Cell], blind: bool) -> list[str]:
    """What makes the profile doubtful, one line each."""
    lines = []
    spread = float(np.median([p.spread for p in passes if p.n == 1]))
    if result.heldout_error > BAD_FIT:
        lines.append(
            f"warning: the cost model is off by {result.heldout_error:.1%} on passes it has not seen (want 5 %)"
        )
    if spread > UNSTEADY:
        lines.append(
            f"warning: repeats of a pass vary by {spread:.0%}; the machine seems busy, measure again when idle"
        )
    if is_busy(result.other_load):
        lines.append(
            f"warning: meanwhile other processes used {result.other_load:.1f} of {os.cpu_count()} cores; measure again when idle"
        )
    if blind:
        lines.append("note: no predictor given, so prediction counts as free; pass --predictor to time it")
    return lines
