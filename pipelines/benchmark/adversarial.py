"""Whether a bundle's policy loses to plain decoding on text and drafters that it was not tuned for.

    python -m pipelines.benchmark.adversarial --run runs/quickstart --drafter pipelines/reference/model/drafter \
        --foreign runs/foreign/qwen3-moe --out docs/adversarial/qwen3-moe.md

`RUN` is what `make quickstart` left: its bundle, widened target and held-out prompts. Policies run interleaved through the
bench's own loop, every set and temperature with engines of its own: nothing that one has learned helps in another. Texts do
not end before their last token, so that all are equally long. The bundle's predictor and policy were made for its own drafter;
the others enter through an `Engine` built from parts, which `Engine.from_bundle` would refuse. Writes Markdown, and JSON
beside it. Exit code 1 if the bundle's policy is below the bar anywhere.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ecospec_runtime.bench import Contestant, Plan, measure, summarize
from ecospec_runtime.bundle import Bundle, drafter_of, load_bundle
from ecospec_runtime.cli import contestants, split_policies
from ecospec_runtime.console import check_writable, note, quiet_libraries, write_json
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.engine import Engine
from ecospec_runtime.errors import UserError
from ecospec_runtime.machine import describe
from ecospec_runtime.mxfp4 import dtype_name
from ecospec_runtime.prompts import read_prompts
from ecospec_train.choice import Candidate, Measured
from ecospec_train.confirm import compare
from pipelines.benchmark.liar import SHARPER, write_liar

BAR = 0.98  # of plain decoding's speed
RANDOM_PROMPT, LONGEST_PROMPT = 96, 512  # tokens
TUNED = "(tuned)"  # how the label of the bundle's own policy ends
COLUMNS = ("set", "T", "policy", "tok/s", "over `off`", "95 %", "tokens a pass", "passes that drafted", "text of `off`", "bar")  # fmt: skip

LEGEND = (
    "`over off` is the geometric mean over prompts of the speeds' ratio, with Student's interval of its logarithm; `?`: the "
    "bar is inside the interval, these prompts do not settle it; text of `off`: on how many prompts. The sets:"
)


@dataclass(frozen=True)
class TextSet:
    """Prompts and a drafter for them: `engine` has the drafter and decodes plainly."""

    name: str
    about: str  # one line for readers
    engine: Engine
    prompts: Sequence[list[int]]
    temperatures: tuple[float, ...]


def random_prompts(count: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts of token ids drawn uniformly."""
    drawn: list[list[int]] = np.random.default_rng(seed).integers(vocabulary, size=(count, RANDOM_PROMPT)).tolist()
    return drawn


def with_drafter(base: Engine, source: str | Path) -> Engine:
    """`base` with a drafter that its bundle was not made for. UserError where the bundle's predictor cannot read it."""
    drafter, own = load_drafter(source, base.target, dtype_name(base.target)), base.drafter
    for key in ("features", "width"):
        if getattr(drafter, key) != getattr(own, key):
            raise UserError(
                f"drafter {source}: {key} {getattr(drafter, key)}, the bundle's predictor reads {getattr(own, key)}; give "
                "one of the bundle's kind"
            )
    return Engine(base.target, drafter, base.scorer, None, base.profile, base.pool)


def text_sets(base: Engine, natural: Sequence[list[int]], foreign: str | None, liar: Path, seed: int) -> list[TextSet]:
    """The sets; without a `foreign` drafter its set is left out."""
    noise = random_prompts(len(natural), base.target.vocab_size, seed)
    sets = [
        TextSet("random text", f"{RANDOM_PROMPT} token ids drawn uniformly as a prompt", base, noise, (0.0, 0.7)),
        TextSet("high temperature", "held-out prompts, sampled hotter than any trace", base, natural, (1.0, 1.5)),
    ]
    if foreign:
        about = "held-out prompts with a drafter that was trained on other text than the target's"
        sets.append(TextSet("foreign drafter", about, with_drafter(base, foreign), natural, (0.0, 0.7)))
    about = f"held-out prompts with the run's drafter, its outputs exchanged and {SHARPER:g} times as sharp"
    return [*sets, TextSet("liar", about, with_drafter(base, liar), natural, (0.0, 0.7))]


def measure_set(one: TextSet, temperature: float, entrants: Sequence[Contestant], settings: dict[str, Any]) -> list[dict[str, Any]]:  # fmt: skip
    """A row per policy of `entrants`, of which one is `off`; `settings` are further ones of the `Plan`."""
    fresh = [replace(entrant, engine=one.engine.with_policy(entrant.spec)) for entrant in entrants]
    plan = Plan(one.prompts, (temperature,), sampling={"eos_token_id": ()}, **settings)
    note(f"adversarial: {one.name} at temperature {temperature:g}")
    samples = measure(fresh, plan)
    paired = compare({c.label: Candidate(c.spec, "") for c in fresh}, samples, temperature)
    return [{"set": one.name, **row, **judged(paired[row["label"]])} for row in summarize(fresh, plan, samples)]


def judged(found: Measured) -> dict[str, Any]:
    """Speed over `off`, and whether it reaches the bar; `settled`: its interval lies on one side of it."""
    return {
        "over_off": found.speedup, "low": found.low, "high": found.high, "holds": found.speedup >= BAR,
        "settled": not found.low < BAR <= found.high,
    }  # fmt: skip


def broken(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the bundle's own policy that are below the bar."""
    return [row for row in rows if row["label"].endswith(TUNED) and not row["holds"]]


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table."""
    bar = "" if row["policy"] == "off" else ("yes" if row["holds"] else "no") + ("" if row["settled"] else " ?")
    same = row["prompts"] - row["diverging_prompts"]
    return [
        row["set"], f"{row['temperature']:g}", f"`{row['label']}`", f"{row['tokens_per_second']:.1f}",
        f"{row['over_off']:.3f}", f"{row['low']:.3f}-{row['high']:.3f}", f"{row['accept_length']:.2f}",
        f"{row['drafted']:.1%}", f"{same} of {row['prompts']}", bar,
    ]  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    """The table, what its sets are and what became of the bar."""
    rows, machine = report["rows"], report["machine"]
    tuned = [row for row in rows if row["label"].endswith(TUNED)]
    worst = min(tuned, key=lambda row: row["over_off"])
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    conditions = (
        f"{report['target']}, {report['dtype']}, {machine['device']}, threads: {machine['threads']}, {versions}; "
        f"{report['prompts']} prompts x {report['max_new_tokens']} tokens, policies by turns of a few tokens on every prompt. "
        f"The bundle's policy is `{report['policy']}`."
    )
    verdict = (
        f"**Bar: at least {BAR} of plain decoding. Held in {len(tuned) - len(broken(rows))} of {len(tuned)}; "
        f"least {worst['over_off']:.3f} ({worst['set']}, temperature {worst['temperature']:g}).**"
    )
    table = [f"| {' | '.join(line)} |" for line in (COLUMNS, ["---"] * len(COLUMNS), *map(cells, rows))]
    sets = [f"- {name}: {about}" for name, about in report["sets"].items()]
    lines = ["# Text and drafters that the policy was not tuned for", "", f"Written by `{report['command']}`.", "",
             conditions, "", verdict, "", *table, "", LEGEND, "", *sets, ""]  # fmt: skip
    return "\n".join(lines)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Load, measure every set; the report. UserError for what is missing or does not fit."""
    for part in ("bundle", "target", "bench.jsonl"):
        if not (args.run / part).exists():
            raise UserError(f"{args.run / part}: missing; `make quickstart RUN={args.run}` writes it")
    named = split_policies(",".join(filter(None, ("off", "auto", args.policies))))
    bundle: Bundle = load_bundle(args.run / "bundle")
    base = Engine.from_bundle(bundle, args.run / "target", args.drafter, "off", args.dtype)
    tokenizer = base.target.tokenizer
    natural = [
        row.encode(tokenizer, LONGEST_PROMPT) for row in read_prompts(args.run / "bench.jsonl", tokenizer, args.prompts)
    ]
    if len(natural) < 2:
        raise UserError(f"{args.run / 'bench.jsonl'}: an interval needs at least 2 prompts; give more")
    settings = {"max_new_tokens": args.tokens, "repeats": args.repeats, "seed": args.seed}
    entrants = contestants(bundle, base, named)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        liar = write_liar(args.drafter or drafter_of(bundle, base.target), Path(folder), args.seed)
        sets = text_sets(base, natural, args.foreign, liar, args.seed)
    for one in sets:
        for temperature in one.temperatures:
            rows += measure_set(one, temperature, entrants, settings)
    return {
        "schema_version": 1, "machine": describe(base.target.device), "target": base.target.source,
        "dtype": dtype_name(base.target), "policy": str(next(c.spec for c in entrants if c.label.endswith(TUNED))), "bar": BAR,
        "prompts": len(natural), **settings, "sets": {one.name: one.about for one in sets}, "rows": rows,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Measure; write Markdown and JSON. Exit code 1 below the bar, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a quickstart")
    parser.add_argument("--drafter", help="default: the one the bundle names")
    parser.add_argument("--foreign", help="a drafter of other text, such as `pipelines.reference.foreign` trains")
    parser.add_argument("--out", type=Path, required=True, help="Markdown file; the JSON lies beside it")
    parser.add_argument(
        "--policies", default="", help="further ones to compare, e.g. confidence:budget=4,acceptance=raw"
    )
    for name, value in (("--prompts", 16), ("--tokens", 128), ("--repeats", 1), ("--seed", 0)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args(arguments)
    quiet_libraries()
    try:
        check_writable(args.out)
        report = run(args)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    given = shlex.join(sys.argv[1:] if arguments is None else arguments)
    report = {"command": f"python -m pipelines.benchmark.adversarial {given}", **report}
    write_json(args.out.with_suffix(".json"), report)
    args.out.write_text(markdown(report), encoding="utf-8")
    print(markdown(report))
    if broken(report["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
