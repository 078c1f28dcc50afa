"""How good and how fast selection is: `python -m pipelines.benchmark.selection`.

1. How far the fast search of `throughput` stays from the exact optimum (a minimum cut), over invented pools with hard routing
   in the shapes of real models. The gap is what is lost of the net gain in tokens of the best set; prices are drawn, or tight:
   just below the one from which on no set pays.
2. How long each policy takes to choose.
3. With `--traces`, `--predictor` and `--profile`: one price for all steps against the best ratio of tokens to time in each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import numpy as np

from ecospec_runtime.config import Config
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.machine import device_name
from ecospec_runtime.policies import POLICIES, Policy, build_policy, parse_policies, parse_policy
from ecospec_runtime.policies.throughput import ThroughputPolicy
from ecospec_runtime.pool import Candidates
from ecospec_runtime.predictor import Predictor
from ecospec_train.closure import exact_set, net_worth
from ecospec_train.replay import ReplayRows, load_rows, replay, replay_at_best_price
from ecospec_train.traces import Traces
from ecospec_train.tune import load_profile
from pipelines.benchmark.pools import MODELS, SHAPES, Model, draw_pool, draw_profile

MEAN, WORST = 0.01, 0.05  # gaps that must hold
TIGHT = 0.9  # of the price from which on nothing pays
LEAST = 0.01  # tokens: what a best set must gain for its gap to count
REPEATS = 5  # of a timed choice, the median counts
RULES = ("one_price", "step_ratio", "step_ratio_draft_free")
GAP_TEXT = """**Gap of `throughput` to its exact optimum**, a minimum cut, over invented pools of 12 to 60 nodes with hard routing, a device in
which experts take 40 to 90 % of a plain step, and prices of 0.8 to 3 times plain decoding's rate, or tight ones: 90 % of that from which
on no set pays. The gap is what the search loses of the best set's net gain in tokens, where that is 0.01 or more."""
TIME_TEXT = "**Time to choose**, ms on one core of a machine with {cores} ({device}, Python {python}): median over pools (90th percentile)."
PRICE_TEXT = """**One price for the whole replay against the best ratio of tokens to time in each step**, replayed on {positions} positions of
recorded traces, speed over plain decoding and nodes per pass. A step that maximises its own ratio does not know what the other steps
make of the time it saves. Nothing pauses."""
ROUNDS = 20  # most rounds of Dinkelbach's iteration; it takes three or four
TIMED = (
    "confidence,ratio:budget=8,ratio:budget=8,capacity=12,prefix,utility,throughput,throughput:node_experts=2,"
    "throughput:capacity=12"
)


def cases(model: Model, count: int, seed: int) -> Iterator[tuple[int, Candidates, DeviceProfile, float]]:
    """`count` times: size of the pool, pool, device and price in tokens per ms; a plain step takes 1 ms."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        size = list(SHAPES)[i % len(SHAPES)]
        yield size, draw_pool(rng, model, SHAPES[size]), draw_profile(rng, model), float(rng.uniform(0.8, 3.0))


def critical_price(candidates: Candidates, profile: DeviceProfile) -> float:
    """The price from which on no set pays: the best ratio of expected tokens to added time (Dinkelbach's iteration)."""
    price = 0.0
    while chosen := exact_set(candidates, profile, price):
        tokens = net_worth(candidates, chosen, profile, 0.0)
        ratio = tokens / (tokens - net_worth(candidates, chosen, profile, 1.0))
        if ratio <= price * (1.0 + 1e-6):
            break
        price = ratio
    return price


def gap_row(name: str, count: int, seed: int, tight: bool) -> dict[str, Any]:
    """The search against the minimum cut, over pools of one model; `tight`: at prices close to where nothing pays."""
    losses, gains, wrongly_empty, chosen_nodes = [], [], 0, []
    for _, candidates, profile, price in cases(MODELS[name], count, seed):
        if tight:
            price = TIGHT * critical_price(candidates, profile)
        exact = exact_set(candidates, profile, price)
        found = ThroughputPolicy(price=price).select(candidates, profile, 0)
        best, reached = (net_worth(candidates, nodes, profile, price) for nodes in (exact, found))
        if best < LEAST:
            continue
        wrongly_empty += not found
        losses.append(best - reached)
        gains.append(best)
        chosen_nodes.append(len(exact))
    gaps = np.array(losses) / np.array(gains)
    return {
        "model": name, "tight": tight, "pools": count, "worth_drafting": len(gaps), "mean_gap": float(gaps.mean()),
        "worst_gap": float(gaps.max()), "lost_of_all_gains": sum(losses) / sum(gains), "worst_loss_tokens": max(losses),
        "exact": float((gaps < 1e-6).mean()), "wrongly_empty": wrongly_empty, "nodes": float(np.mean(chosen_nodes)),
    }  # fmt: skip


def timing_rows(count: int, seed: int, sizes: tuple[int, ...] = (36, 60)) -> list[dict[str, Any]]:
    """Median and 90th percentile of the ms that each policy takes, by model and size of the pool."""
    rows = []
    for name, model in MODELS.items():
        rng = np.random.default_rng(seed)
        for size in sizes:
            drawn = [(draw_pool(rng, model, SHAPES[size]), draw_profile(rng, model)) for _ in range(count)]
            for spec in parse_policies(TIMED):
                policy = build_policy(spec)
                times = [choice_ms(policy, candidates, profile) for candidates, profile in drawn]
                rows.append({"policy": str(spec), "model": name, "nodes": size, "median_ms": statistics.median(times),
                             "p90_ms": float(np.quantile(times, 0.9))})  # fmt: skip
    return rows


def choice_ms(policy: Policy, candidates: Candidates, profile: DeviceProfile) -> float:
    """Median time of choosing from one pool."""
    times = []
    for _ in range(REPEATS):
        start = perf_counter()
        policy.select(candidates, profile, 0)
        times.append(1000.0 * (perf_counter() - start))
    return statistics.median(times)


class StepRatioPolicy(Config):
    """Maximises (1 + sum of V) / (time of the step) in each step on its own, by Dinkelbach's iteration: no price is shared."""

    drafting_ms: float = 0.0  # what the step has paid for its draft

    name: ClassVar[str] = "step_ratio"
    drafts: ClassVar[bool] = True
    needs_routing: ClassVar[bool] = True

    def select(self, candidates: Candidates, profile: DeviceProfile, context: int) -> list[int]:
        """See `Policy.select`."""
        step_ms = profile.plain_ms + self.drafting_ms
        price = 1.0 / step_ms
        chosen: list[int] = []
        for _ in range(ROUNDS):
            policy = ThroughputPolicy(price=price)
            found = policy.select(candidates, profile, context)
            outlook = policy.outlook(candidates, found, profile, 0.0)
            rate = (1.0 + outlook.tokens) / (step_ms + outlook.cost / price)
            if rate <= price * (1.0 + 1e-9):
                break
            price, chosen = rate, found
        return chosen

    def parameters(self) -> dict[str, Any]:
        """See `Policy.parameters`."""
        return self.model_dump()


def price_rows(rows: ReplayRows, profile: DeviceProfile, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """One price for the whole replay against the best ratio of each step, by acceptance model; nothing ever pauses."""
    POLICIES[StepRatioPolicy.name] = StepRatioPolicy  # type: ignore[assignment]  # for `replay` in this process only
    off = replay(parse_policy("off"), rows, profile).tokens_per_ms
    shape = rows.pool
    drafting_ms = profile.draft_ms(shape.depth, (shape.depth - 1) * shape.beam, shape.pool_size)
    table = []
    for kind in kinds:
        _, priced = replay_at_best_price(parse_policy(f"throughput:pause=0,acceptance={kind}"), rows, profile)
        row = {"acceptance": kind, "one_price": priced.tokens_per_ms / off, "one_price_nodes": priced.nodes}
        for name, ms in (("step_ratio", drafting_ms), ("step_ratio_draft_free", 0.0)):
            result = replay(parse_policy(f"step_ratio:drafting_ms={ms},acceptance={kind}"), rows, profile)
            row |= {name: result.tokens_per_ms / off, f"{name}_nodes": result.nodes}
        table.append(row)
    return table


def markdown(result: dict[str, Any]) -> str:
    """The tables, each with a line that says what it holds."""
    lines = ["# Selection: how close to the optimum, and how fast", "",
             "Written by `python -m pipelines.benchmark.selection`.", "", GAP_TEXT, "",
             "| model | price | pools that pay | exact | mean gap | worst gap | lost of all gains | worst loss, tokens | wrongly empty |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in result["gaps"]:
        lines.append(f"| {row['model']} | {'tight' if row['tight'] else 'any'} | {row['worth_drafting']} of {row['pools']} "
                     f"| {row['exact']:.1%} | {row['mean_gap']:.3%} | {row['worst_gap']:.2%} | {row['lost_of_all_gains']:.3%} "
                     f"| {row['worst_loss_tokens']:.4f} | {row['wrongly_empty']} |")  # fmt: skip
    if result["times"]:
        sizes = sorted({row["nodes"] for row in result["times"]})
        heads = [f"{name}, {size} nodes" for name in MODELS for size in sizes]
        lines += [
            "",
            TIME_TEXT.format(**result),
            "",
            "| policy | " + " | ".join(heads) + " |",
            "|---" * (len(heads) + 1) + "|",
        ]
        for policy in dict.fromkeys(row["policy"] for row in result["times"]):
            rows = [row for row in result["times"] if row["policy"] == policy]
            lines.append(
                f"| `{policy}` | " + " | ".join(f"{r['median_ms']:.2f} ({r['p90_ms']:.2f})" for r in rows) + " |"
            )
    if result["prices"]:
        lines += ["", PRICE_TEXT.format(**result), "",
                  "| acceptance | one price | nodes | ratio of each step | nodes | the same, draft time left out | nodes |",
                  "|---|---|---|---|---|---|---|"]  # fmt: skip
        for row in result["prices"]:
            cells = [f"{row[key]:.3f}x | {row[key + '_nodes']:.2f}" for key in RULES]
            lines.append(f"| {row['acceptance']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def load_real(args: argparse.Namespace) -> tuple[ReplayRows, DeviceProfile]:
    """Rows of the prompts that the predictor has not seen, and the device."""
    predictor = Predictor.from_folder(args.predictor)
    heldout = set(predictor.manifest.heldout_prompts) or None
    return load_rows(Traces(args.traces), predictor, heldout, args.positions), load_profile(args.profile)


def main() -> None:
    """Print the tables; exit code 1 if a gap passes its bound or a set is wrongly empty."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=int, default=200, help="per model")
    parser.add_argument("--timed", type=int, default=40, help="pools timed per model and size; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("traces", "predictor", "profile", "json", "markdown"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--positions", type=int, default=2000)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "gaps": [gap_row(name, args.pools, args.seed, tight) for tight in (False, True) for name in MODELS],
        "times": timing_rows(args.timed, args.seed) if args.timed else [], "prices": [], "positions": 0, "cores": os.cpu_count(),
        "device": device_name(), "python": platform.python_version(),
    }  # fmt: skip
    if args.traces and args.predictor and args.profile:
        rows, profile = load_real(args)
        result |= {"prices": price_rows(rows, profile, ("temperature", "logistic", "head")), "positions": len(rows)}
    table = markdown(result)
    print(table)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(table, encoding="utf-8")
    if any(row["mean_gap"] > MEAN or row["worst_gap"] > WORST or row["wrongly_empty"] for row in result["gaps"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
