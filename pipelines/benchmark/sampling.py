"""How often a drafted token is the one that the target draws, with and without the noise of the draw in the drafter's logits.

    python -m pipelines.benchmark.sampling --target DIR --drafter DIR --prompts FILE --out docs/sampling.md

Follows the target's own sampled text and drafts one level at every position. Beside the shares of positions at which the
first, or one of the first two, of the drafter's tokens is drawn stands the sum of min(p, q) over tokens, the acceptance of
speculative sampling by rejection with one token drawn from the drafter (Leviathan et al., arXiv 2211.17192).

Legend: V vocabulary, n rows of a text.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.console import check_writable, write_json
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.drafters.base import Drafter
from ecospec_runtime.errors import UserError
from ecospec_runtime.machine import device_name
from ecospec_runtime.pool import Pool
from ecospec_runtime.prompts import read_prompts
from ecospec_runtime.sampling import Sampler
from ecospec_runtime.target import Target
from ecospec_train.recording import follow_target

TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.5)
ONE_LEVEL = PoolConfig(depth=1, beam=1, width=256)
FIGURES = ("first_blind", "two_blind", "rejection", "first", "two")
HEADS = ("first token", "one of two", "rejection sampling", "first token, with noise", "one of two, with noise")


def compare(target: Target, drafter: Drafter, prompt: list[int], tokens: int, sampler: Sampler) -> list[list[float]]:
    """`FIGURES` of every generated position but the first."""
    text = follow_target(target, prompt, tokens, sampler, drafter.aux_layers)
    places = range(len(prompt) + 1, len(text.tokens))
    with torch.inference_mode():
        again = target.forward(
            torch.tensor(text.tokens[:-1]), torch.arange(len(text.tokens) - 1), None, target.new_cache()
        )
        sequence = drafter.start()
        drafter.extend(sequence, torch.tensor(text.tokens[1:]), text.features)
    assert again.logits is not None
    logits_nV = again.logits.numpy(force=True)
    roots = [place - 2 for place in places]  # row j holds token j + 1 and proposes token j + 2
    blind, guessing = (drafter.expand_many(sequence, roots, ONE_LEVEL, (), s) for s in (None, sampler))
    rows = []
    for place, unaware, aware in zip(places, blind, guessing, strict=True):
        drawn = text.tokens[place]
        first, two = (drawn in aware.tokens[:count] for count in (1, 2))
        if sampler.greedy:
            rows.append([drawn in unaware.tokens[:1], drawn in unaware.tokens[:2], float("nan"), first, two])
            continue
        p_V = sampler.probabilities(logits_nV[place - 1])
        chances = p_V[unaware.tokens[:2]]
        rows.append([chances[0], chances.sum(), overlap(p_V, unaware, sampler.config.temperature), first, two])
    return rows


def overlap(p_V: np.ndarray, pool: Pool, temperature: float) -> float:
    """Sum of min(p, q) over the tokens of a pool of one level, q being the drafter's distribution at the temperature."""
    q = np.exp((pool.log_probs - pool.log_probs.max()) / temperature)
    return float(np.minimum(p_V[pool.tokens], q / q.sum()).sum())


def measure(target: Target, drafter: Drafter, prompts: list[list[int]], tokens: int) -> dict[str, dict[str, float]]:
    """Means of `FIGURES` by temperature."""
    result = {}
    for temperature in TEMPERATURES:
        rows: list[list[float]] = []
        for i, prompt in enumerate(prompts):
            sampler = Sampler(GenerationConfig(temperature=temperature, seed=i))
            rows += compare(target, drafter, prompt, tokens, sampler)
        means = dict(zip(FIGURES, np.mean(rows, axis=0).tolist(), strict=True))
        result[f"{temperature:g}"] = means | {"positions": len(rows)}
    return result


def report(result: dict[str, Any]) -> str:
    """The Markdown."""
    lines = [
        "# How often a draft is what the target draws", "",
        f"Written by `{result['command']}`: {result['prompts']} held-out prompts, float32, {result['device']}, {result['versions']}.", "",
        ("A token is drawn as the argmax of logits / T plus Gumbel noise keyed by (seed, position). `with noise`: the drafter adds the same "
        "noise to its own logits, so it guesses the draw; the text is the same. Without it, its most probable tokens are drawn with the "
        "probability that the target gives them. `rejection sampling` is the sum of min(p, q): what one token, drawn from the "
        "drafter, is accepted with by the usual rule, which can do no better with a single token."), "",
        "| T | positions | " + " | ".join(HEADS) + " |", "|---" * (2 + len(HEADS)) + "|",
    ]  # fmt: skip
    for temperature, means in result["temperatures"].items():
        cells = ("-" if np.isnan(means[name]) else f"{means[name]:.3f}" for name in FIGURES)
        lines.append(f"| {temperature} | {means['positions']} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> None:
    """Measure; write Markdown and JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--target", "--drafter", "--prompts"):
        parser.add_argument(name, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=32, help="prompts, the first of the file")
    parser.add_argument("--tokens", type=int, default=48)
    a = parser.parse_args(arguments)
    try:
        check_writable(a.out)
        target = Target.from_pretrained(a.target, "float32")
        drafter = load_drafter(a.drafter, target, "float32")
        prompts = [p.encode(target.tokenizer, 192) for p in read_prompts(a.prompts, target.tokenizer)[: a.count]]
    except (UserError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    given = " ".join(f"--{k} {v}" for k, v in vars(a).items())
    result = {
        "command": f"python -m pipelines.benchmark.sampling {given}", "prompts": len(prompts), "device": device_name(),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}",
        "temperatures": measure(target, drafter, prompts, a.tokens),
    }  # fmt: skip
    write_json(a.out.with_suffix(".json"), json.loads(json.dumps(result).replace("NaN", "null")))
    a.out.write_text(report(result), encoding="utf-8")
    print(a.out)


if __name__ == "__main__":
    main()
