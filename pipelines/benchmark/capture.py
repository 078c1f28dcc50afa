"""What reading routing and hidden states costs, beside the same passes without.

    python -m pipelines.benchmark.capture [--target pipelines/reference/model/target --repeats 60 --context 64]

For each dtype and for passes of 1 and 8 tokens (a chain, and a tree with its mask): the time of a plain pass and what
capturing the hidden states that a drafter asks for (three layers), the routing (one tensor for all layers) and both adds.
The variants take turns within a round, in rotating order; each counts its best of five passes in CPU time, and a figure is
the median over rounds of the ratio to the plain pass of the same round, so that what else the machine does cancels. The last
column is the middle half of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from ecospec_runtime.errors import UserError
from ecospec_runtime.target import Target
from ecospec_runtime.verify import tree_mask

VARIANTS = ("plain", "hidden", "routing", "both")
LIMIT = 0.05
PASSES = 5  # of a variant in a round, of which the best counts


def main() -> None:
    """Parse, measure, print one line per dtype, pass and variant; exit code 1 if one adds more than `LIMIT`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="pipelines/reference/model/target")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--context", type=int, default=64, help="cached tokens")
    parser.add_argument("--threads", type=int, default=1)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    worst = 0.0
    print(f"{'dtype':9} {'tokens':>6} {'variant':8} {'plain ms':>8} {'added':>7}  middle half")
    for dtype in ("bfloat16", "float32"):
        try:
            target = Target.from_pretrained(a.target, dtype)
        except UserError as error:
            raise SystemExit(f"error: {error}") from None
        for tokens in (1, 8):
            times = measure(target, tokens, a.context, a.repeats)
            plain = statistics.median(times["plain"])
            for variant in VARIANTS[1:]:
                ratios = [t / p - 1 for t, p in zip(times[variant], times["plain"], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                worst = max(worst, middle)
                print(f"{dtype:9} {tokens:6d} {variant:8} {1e3 * plain:8.2f} {middle:+7.1%}  {low:+.1%} to {high:+.1%}")
    print(f"largest: {worst:+.1%} of a plain pass, {'within' if worst <= LIMIT else 'above'} the limit of {LIMIT:.0%}")
    raise SystemExit(worst > LIMIT)


def measure(target: Target, tokens: int, context: int, repeats: int) -> dict[str, list[float]]:
    """CPU seconds of a pass of each variant in each round."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, target.vocab_size, (context + tokens,), generator=generator)
    cache = target.new_cache()
    target.forward(ids[:context], torch.arange(context), None, cache, logits=False)
    parents = [(row - 1) // 2 for row in range(1, tokens)]
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    arguments = (ids[context:], torch.tensor(depths) + context, tree_mask(parents, context) if parents else None, cache)
    layers = tuple(sorted({2, target.layers // 2, target.layers - 3}))
    settings: dict[str, dict[str, Any]] = {
        "plain": {}, "hidden": {"aux_layers": layers}, "routing": {"routing": True},
        "both": {"aux_layers": layers, "routing": True},
    }  # fmt: skip
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for repeat in range(repeats + 3):  # the first rounds warm up
        for i in range(len(VARIANTS)):
            variant = VARIANTS[(i + repeat) % len(VARIANTS)]
            best = float("inf")
            for timed in (False, *[True] * PASSES):  # the first pass installs the hooks, which a decode does once
                start = time.process_time()
                output = target.forward(*arguments, **settings[variant])
                assert (output.routing is not None) == ("routing" in settings[variant])
                if timed:
                    best = min(best, time.process_time() - start)
                target.commit(cache, context, [])
            if repeat >= 3:
                times[variant].append(best)
    return times


if __name__ == "__main__":
    main()
