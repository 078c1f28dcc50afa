"""The report of `sweep` as Markdown: what is simulated, three parts of tables, and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelines.benchmark.contest import OURS, PEERS, PUBLISHED
from pipelines.benchmark.equal_length import BLIND, CEILINGS, OWN, RIVALS, SHARING

ORACLE = "throughput, true routing"
BOUNDS = (RIVALS[1], BLIND, OWN[1], *CEILINGS)
BAR = 0.2  # fewer experts than `confidence` as published, at equal accepted length

HEAD_TEXT = """**Everything here is replay of recorded traces**: accepted tokens and experts are real, time is what a device profile says,
changed as each part tells. Nothing is timed.

Target {target[architecture]}, {target[moe_layers]} MoE layers of {target[experts]} experts, top-{target[top_k]}; profile {device}, off by
{heldout_error:.1%} on passes it has not seen. Each policy: one search of {trials} trials (seed {seed}) on {prompts[tuning]} prompts
({positions[tuning]} positions), reported on {prompts[confirming]} others ({positions[confirming]}). `as published` takes the drafter's
own probability and cuts the pool by depth alone; the others choose among the fitted acceptance models and cut the pool by reach too.
{found}."""
SHARE_TEXT = """The run's device profile, with the time of an expert changed so that reading experts takes the given share of a plain step;
all other costs stay (derivation: `simulated.with_expert_share`). As it is, that share is {own:.0%} by the profile's formula; `profile`
measured {measured:.0%} in the experts modules, a part of which does not depend on the number of experts."""
SPARSE_TEXT = """A simulation of sparser routing: every token keeps the heaviest k' of its {top_k} experts, of {experts} in a layer, and an
expert takes {top_k}/k' of its time, so that experts stay {share:.0%} of a plain step. Text and acceptance are those of the denser
target. The predictor names its k' likeliest experts; it was fitted to tell used from unused, not heavy from light. It finds {recall} of
them."""
LENGTH_TEXT = """Distinct experts per layer and pass at equal tokens per pass, interpolated between neighbouring points of a curve; curves begin
with plain decoding. In brackets: fewer than `{published}`. Acceptance, where nothing else is said: `{kind}`. Policies over budgets 1 to 16,
`throughput` over prices, without pausing; `experts only`: the price is charged for experts and for nothing else. `blind to experts`
charges every node the same, which leaves the number of nodes to be chosen and not the experts."""
SAVED_TEXT = "How many fewer experts `throughput` reads than each rival (95 % interval over prompts, bootstrap):"
SHARING_TEXT = """Of the experts of the {nodes} likeliest nodes of a position, the root uses {root:.0%}, a node's own parent {parent:.0%}, and
root and the other {others_of} nodes together {others:.0%} ({chance:.0%}: one other token, by chance)."""


def markdown(result: dict[str, Any]) -> str:
    """The whole report."""
    found = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    head = HEAD_TEXT.format(**result, found=found)
    lines = ["# Policies where experts weigh more or less", "", f"Made by `{result['command']}`.", "", head, ""]
    lines += ["## Share of experts in a plain step", "",
              SHARE_TEXT.format(own=result["own_share"], measured=result["measured_share"]), ""]  # fmt: skip
    lines += contest_table([f"{cell['share']:.0%}" for cell in result["expert_share"]], result["expert_share"])
    lines += sparse_part(result)
    lines += length_part(result["equal_length"])
    if result["plot"]:
        lines += ["", f"![Experts read against tokens per pass]({result['plot']})"]
    return "\n".join(lines) + "\n"


def sparse_part(result: dict[str, Any]) -> list[str]:
    """Part 2, or why there is none."""
    lines = ["", "## Sparser routing", ""]
    cells, target = result["sparsity"], result["target"]
    if not cells:
        return [*lines, f"Left out: {result['sparsity_note']}."]
    recall = ", ".join(f"{cell['routing_recall']:.0%} (k' = {cell['top_k']})" for cell in cells)
    text = SPARSE_TEXT.format(
        top_k=target["top_k"], experts=target["experts"], share=cells[-1]["profile"]["expert_share"], recall=recall
    )
    heads = [f"{cell['top_k']}/{target['experts']}" for cell in cells]
    return [*lines, text, "", *contest_table(heads, cells)]


def contest_table(heads: Sequence[str], cells: Sequence[dict[str, Any]]) -> list[str]:
    """Policies by column: speed over `off`, and how many times faster `throughput` is; then what that says."""
    columns = " | ".join(f"{head}: over `off` | `{OURS.name}` over it" for head in heads)
    lines = [f"| policy | {columns} |", "|---" * (1 + 2 * len(heads)) + "|"]
    for name in cells[0]["policies"]:
        row = []
        for cell in cells:
            found = cell["policies"][name]
            top = max(p["over_off"] for n, p in cell["policies"].items() if n != ORACLE)
            speed = f"{found['over_off']:.3f}x"
            row.append(f"**{speed}**" if found["over_off"] == top else speed)
            error = "" if found["error"] is None else f" ± {found['error']:.3f}"
            row.append("-" if name == OURS.name else f"{found['lead']:.3f}{error}")
        lines.append(f"| {name} | {' | '.join(row)} |")
    return [
        *lines,
        "",
        "± is one standard error over prompts.",
        *(conclusion(*pair) for pair in zip(heads, cells, strict=True)),
    ]


def conclusion(head: str, cell: dict[str, Any]) -> str:
    """The strongest peers in one line."""
    policies = cell["policies"]
    parts = []
    for what, names in (("published", [e.name for e in PUBLISHED]), ("with fitted acceptance", PEERS)):
        best = max(names, key=lambda name: policies[name]["over_off"])
        parts.append(f"{policies[best]['lead']:.3f} times the best peer {what} (`{best.split(',')[0]}`)")
    text = f"- {head}: `{OURS.name}` is {' and '.join(parts)}"
    return f"{text}, {policies[ORACLE]['lead']:.3f} of the routing oracle. Tuned: `{policies[OURS.name]['policy']}`."


def length_part(found: dict[str, Any]) -> list[str]:
    """Part 3."""
    heads, at = found["lengths"], found["experts_at_length"]
    lines = ["", "## Equal accepted length", "", LENGTH_TEXT.format(published=RIVALS[0], kind=found["acceptance"]), "",
             f"| tokens per pass | {' | '.join(f'{length:g}' for length in heads)} |", "|---" * (len(heads) + 1) + "|"]  # fmt: skip
    for name, values in at.items():
        cells = [
            "-"
            if own is None
            else f"{own:.2f}" + (f" ({round(1 - own / base, 2) + 0.0:.0%})" if base and name != RIVALS[0] else "")
            for own, base in zip(values, at[RIVALS[0]], strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", SAVED_TEXT, "", f"| | than | {' | '.join(f'{length:g}' for length in heads)} |",
              "|---" * (len(heads) + 2) + "|"]  # fmt: skip
    for own in OWN:
        for rival, values in found["saved"][own].items():
            cells = ["-" if v is None else f"{v[0]:.1%} ({v[1]:.0%} to {v[2]:.0%})" for v in values]
            lines.append(f"| {own} | {rival} | {' | '.join(cells)} |")
    return [*lines, "", *verdict(found)]


def verdict(found: dict[str, Any]) -> list[str]:
    """Whether the bar is reached, and what bounds the saving."""
    lines = []
    for own in OWN:
        values = dict(zip(found["lengths"], found["saved"][own][RIVALS[0]], strict=True))
        reached = [f"{length:g}" for length, v in values.items() if v is not None and v[0] >= BAR]
        missed = [f"{length:g}" for length, v in values.items() if v is not None and v[0] < BAR]
        text = f"- `{own}`: {BAR:.0%} fewer than `{RIVALS[0]}` at {', '.join(reached) or 'no length'}"
        lines.append(text + (f", less at {', '.join(missed)}." if missed else "."))
    at, base = found["experts_at_length"], found["experts_at_length"][RIVALS[0]]
    parts = []
    for name in BOUNDS:
        fewer = [1 - own / rival for own, rival in zip(at[name], base, strict=True) if own and rival]
        parts.append(f"`{name}` {min(fewer):.0%} to {max(fewer):.0%}" if fewer else f"`{name}` -")
    lines.append(f"- What bounds it: of the experts of `{RIVALS[0]}`, over these lengths, {', '.join(parts)} fewer.")
    shared = found["sharing"]
    text = SHARING_TEXT.format(
        nodes=SHARING, others_of=SHARING - 1, root=shared["root"], parent=shared["parent"], others=shared["others"],
        chance=shared["by chance"],
    )  # fmt: skip
    return [*lines, "", text]
