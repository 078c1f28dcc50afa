"""What policies are worth where experts weigh more or less, by replay: nothing here is timed.

    python -m pipelines.benchmark.sweep --run runs/quickstart --out docs/sweep/qwen3-moe.md [--trials 40] [--positions 2000]

Reads what `make quickstart` left in the run folder. Every policy of `contest.ENTRIES` gets one search with the same number of
trials on the tuning prompts and is reported on the confirming ones, divided as `ecospec-train tune` divides them:

1. with the run's profile changed so that experts take 25, 50 and 75 % of a plain step (`simulated.with_expert_share`);
2. at a share of 50 %, with the routing cut to the heaviest 1, 2, 4, ... experts of a token, an expert's time growing accordingly;
3. experts read at equal accepted length (`equal_length`).

Writes the Markdown, and beside it the same figures as JSON and the curves of part 3 as PNG.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import optuna

from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.machine import versions
from ecospec_runtime.policies import PolicySpec
from ecospec_train.choice import gain, log_gain
from ecospec_train.replay import ReplayResult, ReplayRows, replay, replay_at_best_price
from ecospec_train.search_space import Space
from pipelines.benchmark import equal_length, simulated, sweep_report
from pipelines.benchmark.contest import ENTRIES, OURS, tune_entry
from pipelines.benchmark.run_folder import RunFolder, open_run

SHARES = (0.25, 0.5, 0.75)  # of a plain step
SPARSE_SHARE = 0.5  # at which routing is made sparser
OFF = PolicySpec(name="off")


def compare(
    halves: tuple[ReplayRows, ReplayRows], profile: DeviceProfile, space: Space, trials: int, seed: int
) -> dict[str, Any]:
    """Tune every entry and the routing oracle on the first half; their speed over `off` and under `OURS` on the second.

    `lead` is how many times faster `OURS` is, `error` its relative standard error over prompts (jackknife). The oracle is
    `OURS` that selects by the experts really used and pays nothing for knowing them; its search also tries what `OURS` found.
    """
    tuning, confirming = halves
    off = {half: replay(OFF, rows, profile) for half, rows in (("tuning", tuning), ("confirming", confirming))}
    found: dict[str, tuple[PolicySpec, ReplayResult, ReplayResult]] = {"off": (OFF, off["tuning"], off["confirming"])}
    for entry in ENTRIES:
        spec, tuned = tune_entry(entry, tuning, profile, space, trials, seed)
        found[entry.name] = spec, tuned, replay(spec, confirming, profile)
    ours, _, best = found[OURS.name]
    free = profile.predicting_for_nothing()
    spec, tuned = max(
        tune_entry(OURS, tuning, free, space, trials, seed, oracle=True),
        replay_at_best_price(with_routing(ours), tuning, free, oracle=True),
        key=lambda one: one[1].tokens_per_ms,
    )
    found[sweep_report.ORACLE] = spec, tuned, replay(spec, confirming, free, oracle=True)
    policies = {}
    for name, (spec, tuned, result) in found.items():
        error = None
        if name not in (OURS.name, sweep_report.ORACLE):
            error = log_gain(ours, spec, confirming, profile)[1]
        policies[name] = {
            "policy": str(spec), "tuned_over_off": gain(tuned, off["tuning"]), "over_off": gain(result, off["confirming"]),
            "lead": gain(best, result), "error": error, "result": result.to_dict(),
        }  # fmt: skip
    return {
        "policies": policies,
        "profile": profile.model_dump(),
        "routing_recall": simulated.routing_recall(confirming),
    }


def with_routing(spec: PolicySpec) -> PolicySpec:
    """The policy, looking at the experts of each node even where it had better charge all alike."""
    return spec.model_copy(
        update={"parameters": {k: v for k, v in spec.parameters.items() if not k.endswith("_experts")}}
    )


def by_share(run: RunFolder, halves: tuple[ReplayRows, ReplayRows], trials: int, seed: int) -> list[dict[str, Any]]:
    """Part 1: one comparison for each of `SHARES`."""
    reads, context = run.layers * run.top_k, simulated.mean_context(halves[0])
    cells = []
    for share in SHARES:
        profile = simulated.with_expert_share(run.profile, reads, context, share)
        cells.append({"share": share} | compare(halves, profile, run.space, trials, seed))
    return cells


def by_sparsity(
    run: RunFolder, halves: tuple[ReplayRows, ReplayRows], dense: dict[str, Any], trials: int, seed: int
) -> list[dict[str, Any]]:
    """Part 2: one comparison for 1, 2, 4, ... experts of a token below the run's own number; `dense` is that of the run's own."""
    cells = []
    for top_k in [2**i for i in range(math.ceil(math.log2(run.top_k)))]:
        cut = run.halves(simulated.SparserTraces(run.traces, top_k), simulated.sparser_predictor(run.predictor, top_k))
        dearer = run.profile.model_copy(update={"per_expert_ms": run.profile.per_expert_ms * run.top_k / top_k})
        context = simulated.mean_context(halves[0])
        profile = simulated.with_expert_share(dearer, run.layers * top_k, context, SPARSE_SHARE)
        space = run.space._replace(top_k=top_k)
        cells.append({"top_k": top_k} | compare(cut, profile, space, trials, seed))
    return [*cells, {"top_k": run.top_k} | dense]


def measure(run: RunFolder, trials: int, seed: int, image: Path) -> dict[str, Any]:
    """All three parts; `image` is where the curves are plotted."""
    halves = run.halves()
    print(f"{len(halves[0])} positions to tune on, {len(halves[1])} to report on", flush=True)
    shares = by_share(run, halves, trials, seed)
    print("expert shares: done", flush=True)
    sparsity, why_not = [], ""
    try:
        dense = next(cell for cell in shares if cell["share"] == SPARSE_SHARE)
        sparsity = by_sparsity(run, halves, {k: v for k, v in dense.items() if k != "share"}, trials, seed)
    except UserError as error:
        why_not = str(error).removeprefix(f"{run.traces.path}: ")
    print(f"sparser routing: {why_not or 'done'}", flush=True)
    lengths, found = equal_length.measure(run, halves[1])
    plotted = equal_length.plot(found, image)
    target = run.traces.manifest.target
    context = simulated.mean_context(halves[0])
    return {
        "target": target.model_dump(), "device": run.profile.slug, "versions": versions(), "trials": trials, "seed": seed,
        "prompts": {"tuning": len(halves[0].prompts), "confirming": len(halves[1].prompts)},
        "positions": {"tuning": len(halves[0]), "confirming": len(halves[1])},
        "measured_share": run.profile.expert_share, "heldout_error": run.profile.heldout_error,
        "own_share": simulated.own_share(run.profile, run.layers * run.top_k, context),
        "expert_share": shares, "sparsity": sparsity, "sparsity_note": why_not, "equal_length": lengths,
        "plot": image.name if plotted else None,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder with traces/, predictor/ and profile.json")
    parser.add_argument("--out", type=Path, required=True, help="Markdown file; JSON and PNG go beside it")
    parser.add_argument("--trials", type=int, default=40, help="of every search")
    parser.add_argument("--positions", type=int, default=2000, help="most positions to tune on, and to report on")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        run = open_run(a.run, a.positions, a.seed)
        a.out.parent.mkdir(parents=True, exist_ok=True)
        result = measure(run, a.trials, a.seed, a.out.with_suffix(".png"))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    given = " ".join(f"--{k} {v}" for k, v in vars(a).items())
    result = {"command": f"python -m pipelines.benchmark.sweep {given}"} | result
    a.out.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    a.out.write_text(sweep_report.markdown(result), encoding="utf-8")
    print(a.out)


if __name__ == "__main__":
    main()
