"""How good each acceptance model is on held-out text, and what that is worth in replayed speed, beside perfect knowledge.

    python -m pipelines.benchmark.acceptance --traces DIR --predictor DIR --profile FILE --out docs/acceptance.md [--prompts FILE]

Reads the prompts that the predictor's fit never saw; with `--unseen` all, of traces that the fit had no part of (another
temperature, another kind of text). Writes the Markdown, and beside it the same figures as JSON and the
reliability plots as PNG. Texts are told apart by what was generated: `loops` (a tenth of the tokens or more inside a repeat),
which the other groups leave out; `template` (half of the 4-grams or more occur before, in this text or another one); with
the harvest's `--prompts`, `prose` and `code` among the rest by the end of the prompt, else `other`.

Legend: n nodes of a pool, M nodes whose parent is on the target's own path.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecospec_kernels.accept_tree.reference import LOGIT_BOUND
from ecospec_runtime.acceptance import KINDS, acceptance
from ecospec_runtime.config import read_model
from ecospec_runtime.console import check_writable
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.policies import PolicySpec, parse_policy
from ecospec_runtime.pool import Floats, Ints, Pool
from ecospec_runtime.predictor import Embed, Prediction, Predictor
from ecospec_runtime.prompts import fingerprint_prompts, read_prompts
from ecospec_runtime.statistics import loop_share
from ecospec_train.calibrate import calibration_error, log_loss
from ecospec_train.reliability import plot_reliability
from ecospec_train.replay import ReplayRows, load_rows, replay, replay_at_best_price
from ecospec_train.traces import Traces

LOOPS, TEMPLATE, PROSE = 0.1, 0.5, 0.75  # shares from which a text counts as one of loops, template, prose
GRAM = 4
TAIL = 300  # characters of the prompt that tell prose from code
HONEST = "without loops"
NO_LABELS: Floats = np.zeros(0, np.float32)


@dataclass
class Text:
    """One held-out prompt: what was generated, and what was estimated of its candidates."""

    tokens: list[int] = field(default_factory=list)
    estimates: dict[str, list[Floats]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    labels: list[Floats] = field(default_factory=list)


class Told:
    """A predictor whose head knows what the target takes, by pool."""

    def __init__(self, predictor: Predictor):
        self.predictor, self.shapes, self.manifest = predictor, predictor.shapes, predictor.manifest
        self.acceptance = predictor.acceptance
        self.labels: dict[bytes, Floats] = {}

    def learn(self, pool: Pool, label: Floats) -> None:
        """Remember the labels `[n]` of a pool."""
        self.labels[self.key(pool)] = label

    def predict(self, pool: Pool, embed: Embed, routing: bool = True) -> Prediction:
        """What the predictor says, its acceptance logits replaced."""
        sure = LOGIT_BOUND * (2 * self.labels[self.key(pool)] - 1)
        logits = np.concatenate(([0.0], sure)).astype(np.float32)
        return self.predictor.predict(pool, embed, routing)._replace(acceptance_logits=logits)

    @staticmethod
    def key(pool: Pool) -> bytes:
        """What tells pools apart."""
        return pool.tokens.tobytes() + pool.log_probs.tobytes()


def text_groups(texts: list[list[int]], prompts: list[str] | None) -> list[str]:
    """The group of each text; see the module. `prompts` are in the same order."""
    grams = [[tuple(text[i : i + GRAM]) for i in range(len(text) - GRAM + 1)] for text in texts]
    holders: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for i, found in enumerate(grams):
        for gram in found:
            holders[gram].add(i)
    groups = []
    for i, text in enumerate(texts):
        again = [len(holders[gram]) > 1 or gram in grams[i][:place] for place, gram in enumerate(grams[i])]
        if loop_share(text) >= LOOPS:
            groups.append("loops")
        elif again and np.mean(again) >= TEMPLATE:
            groups.append("template")
        else:
            groups.append("other" if prompts is None else prose_or_code(prompts[i]))
    return groups


def prose_or_code(text: str) -> str:
    """Whether the end of a text is mostly plain words."""
    words = text[-TAIL:].split()
    plain = [word.strip(".,;:!?\"'()").isalpha() for word in words]
    return "prose" if plain and np.mean(plain) >= PROSE else "code"


def truth(pool: Pool, next_tokens: Ints) -> tuple[Floats, NDArray[np.bool_]]:
    """Of each node `[n]`: 1 if the target takes it after its parent, and whether that parent is on the target's path.

    `next_tokens` `[n + 1]` is what the target says after root and nodes.
    """
    label = (pool.tokens == next_tokens[pool.parents + 1]).astype(np.float32)
    judged = np.zeros(len(label), bool)
    for i, parent in enumerate(pool.parents.tolist()):
        judged[i] = parent < 0 or (judged[parent] and label[parent] > 0)
    return label, judged


def judged_prompts(traces: Traces, predictor: Predictor, unseen: bool) -> set[int]:
    """The prompts to judge on: what the fit held out, or all of traces that it had no part of. UserError for the wrong case."""
    fitted = predictor.manifest.fitted_on(traces.fingerprint)
    if unseen and fitted:
        raise UserError(f"{traces.path}: the predictor was fitted on them; leave out --unseen")
    if not unseen and not fitted:
        raise UserError(
            f"{traces.path}: not what the predictor was fitted on; add --unseen if it saw none of their prompts"
        )
    if unseen:
        return {i for shard in traces.manifest.shards for i in shard.prompt_ids}
    return set(predictor.manifest.heldout_prompts)


def read_texts(traces: Traces, predictor: Predictor, told: Told, held: set[int]) -> dict[int, Text]:
    """The texts `held` by prompt id, in the order of the traces, scored as decoding scores; `told` learns their labels."""
    embed, model = traces.embedding(), predictor.acceptance.at(traces.manifest.temperature)
    texts: dict[int, Text] = {}
    for shard in traces.shards():
        for row in np.flatnonzero(np.isin(shard.prompt_id, list(held))).tolist():
            pool, text = shard.pool(row), texts.setdefault(int(shard.prompt_id[row]), Text())
            text.tokens.append(pool.root_token)
            label, judged = truth(pool, shard.next_tokens_of(row).astype(np.int64))
            told.learn(pool, label)
            text.labels.append(label[judged])
            logits = predictor.predict(pool, embed, routing=False).acceptance_logits[1:]
            for kind in KINDS:
                given = logits if kind == "head" else None
                estimate = acceptance(pool, kind, model, given)
                text.estimates[kind].append(estimate[judged])
    return texts


def collect(texts: list[Text]) -> tuple[dict[str, Floats], Floats]:
    """Estimates by kind `[M]` and labels `[M]` of some texts."""
    estimates = {kind: np.concatenate([part for text in texts for part in text.estimates[kind]]) for kind in KINDS}
    return estimates, np.concatenate([part for text in texts for part in text.labels])


def replayed(policy: str, rows: ReplayRows, known: ReplayRows, profile: DeviceProfile) -> dict[str, float]:
    """Tokens per ms of `policy` at its best price under every kind, and under perfect acceptance, routing and both.

    `known` are the same rows, scored by `Told`.
    """

    def at_best_price(kind: str, rows: ReplayRows) -> tuple[PolicySpec, float]:
        spec, result = replay_at_best_price(parse_policy(policy).model_copy(update={"acceptance": kind}), rows, profile)
        return spec, result.tokens_per_ms

    specs, rates = {}, {"off": replay(parse_policy("off"), rows, profile).tokens_per_ms}
    for kind in KINDS:
        specs[kind], rates[kind] = at_best_price(kind, rows)
    best = max(KINDS, key=rates.__getitem__)
    rates["perfect routing"] = replay(specs[best], rows, profile, oracle=True).tokens_per_ms
    spec, rates["perfect acceptance"] = at_best_price("head", known)
    rates["both perfect"] = replay(spec, known, profile, oracle=True).tokens_per_ms
    return rates


def measure(
    traces: Traces, predictor: Predictor, profile: DeviceProfile, prompts: list[str] | None, policy: str, held: set[int]
) -> tuple[dict[str, Any], dict[str, tuple[dict[str, Floats], Floats]]]:
    """The figures by group of text, and the estimates and labels that the plots show."""
    told = Told(predictor)
    texts = read_texts(traces, predictor, told, held)
    groups = text_groups([t.tokens for t in texts.values()], [prompts[i] for i in texts] if prompts else None)
    rows = load_rows(traces, predictor, set(texts))
    known = load_rows(traces, told, set(texts))  # type: ignore[arg-type]
    chosen = {"all": set(groups), HONEST: set(groups) - {"loops"}} | {name: {name} for name in sorted(set(groups))}
    figures: dict[str, Any] = {}
    panels = {}
    for name, members in chosen.items():
        own = [i for i, group in enumerate(groups) if group in members]
        estimates, label = collect([list(texts.values())[i] for i in own]) if own else ({}, NO_LABELS)
        if not len(label):
            continue
        panels[name] = estimates, label
        part, told_part = (replace(r, prompts=[r.prompts[i] for i in own]) for r in (rows, known))
        figures[name] = {
            "prompts": len(own), "nodes": len(label),
            "log_loss": {kind: log_loss(value, label) for kind, value in estimates.items()},
            "calibration_error": {kind: calibration_error(value, label) for kind, value in estimates.items()},
            "tokens_per_ms": replayed(policy, part, told_part, profile),
        }  # fmt: skip
    return figures, panels


def table(title: str, figures: dict[str, Any], key: str, best: Any, digits: int) -> list[str]:
    """One figure by group and column, the best of the acceptance kinds in bold."""
    columns = list(next(iter(figures.values()))[key])
    lines = [f"## {title}", "", f"| text | prompts | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for name, found in figures.items():
        values = found[key]
        top = best(values[kind] for kind in KINDS)
        cells = [f"**{v:.{digits}f}**" if c in KINDS and v == top else f"{v:.{digits}f}" for c, v in values.items()]
        lines.append(f"| {name} | {found['prompts']} | {' | '.join(cells)} |")
    return [*lines, ""]


def report(result: dict[str, Any], plot: str | None) -> str:
    """Markdown."""
    figures = result["groups"]
    speeds = {
        name: found | {"speed": {c: v / found["tokens_per_ms"]["off"] for c, v in found["tokens_per_ms"].items()}}
        for name, found in figures.items()
    }
    lines = ["# Acceptance models on held-out text", "", f"Made by `{result['command']}`.", ""]
    lines += table("Log loss, nats per node whose parent is reached", figures, "log_loss", min, 4)
    lines += table("Expected calibration error", figures, "calibration_error", min, 4)
    lines += table(
        f"Speed over plain decoding, replayed with the profile of {result['device']}: `{result['policy']}` at its best price",
        speeds,
        "speed",
        max,
        3,
    )
    if plot:
        lines += [f"![Estimated and real acceptance by kind of text]({plot})", ""]
    return "\n".join(lines)


def prompt_texts(path: Path, traces: Traces) -> list[str]:
    """The harvest's prompts; UserError if these are others."""
    prompts = read_prompts(path)
    if fingerprint_prompts(prompts) != traces.manifest.prompts_sha256:
        raise UserError(f"{path}: not the prompts that {traces.path} was harvested from")
    return [prompt.text for prompt in prompts]


def main(arguments: list[str] | None = None) -> None:
    """Measure, write Markdown, JSON and plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--traces", "--predictor", "--profile", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--prompts", type=Path, help="the harvest's prompts, to tell prose from code")
    parser.add_argument("--policy", default="throughput", help="whose speed is replayed")
    parser.add_argument(
        "--unseen", action="store_true", help="traces that the predictor was not fitted on; no prompt of them either"
    )
    a = parser.parse_args(arguments)
    try:
        check_writable(a.out)
        traces, predictor = Traces(a.traces), Predictor.from_folder(a.predictor)
        profile = read_model(a.profile, DeviceProfile, "`ecospec-train profile` writes one")
        prompts = prompt_texts(a.prompts, traces) if a.prompts else None
        held = judged_prompts(traces, predictor, a.unseen)
        figures, panels = measure(traces, predictor, profile, prompts, a.policy, held)
    except (UserError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    given = shlex.join(sys.argv[1:] if arguments is None else arguments)
    result = {"command": f"python -m pipelines.benchmark.acceptance {given}", "policy": a.policy,
              "device": profile.slug, "groups": figures}  # fmt: skip
    image = a.out.with_suffix(".png")
    image.parent.mkdir(parents=True, exist_ok=True)
    plotted = plot_reliability({name: panel for name, panel in panels.items() if name != "all"}, image)
    a.out.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    a.out.write_text(report(result, image.name if plotted else None), encoding="utf-8")
    print(a.out)


if __name__ == "__main__":
    main()
