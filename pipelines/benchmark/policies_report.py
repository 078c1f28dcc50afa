"""What the comparison of policies says: figures with their intervals, the bars they are held against, Markdown and a plot.

A ratio of two policies is the geometric mean over prompts, each decoded by both, with Student's t interval of its logarithm.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ecospec_runtime.bench import Sample, rate
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_train.confirm import interval, log_ratios
from ecospec_train.plots import pyplot, save
from ecospec_train.replay import ReplayResult
from pipelines.benchmark.contest import ENTRIES, OURS, PUBLISHED
from pipelines.benchmark.policies_tuning import ORACLE

Samples = Mapping[str, list[list[Sample]]]  # of one temperature: name -> [prompt][repeat]
Row = dict[str, Any]

LEAST = {  # how many times as fast as each rival `OURS` shall be
    "confidence, as published": 1.25, "ratio, as published": 1.20, "confidence": 1.06, "ratio": 1.04, "prefix": 1.03,
    "utility": 1.03, "off": 0.98,
}  # fmt: skip
LEAST_OF_ORACLE, MOST_LOOPS, EXPERT_SHARE = 0.97, 0.10, (0.45, 0.55)
PACKAGES = ("torch", "transformers", "numba", "onnxruntime")
COLORS = {"published": "#9aa5b1", "same": "#4a7ba6", "ours": "#c05621"}
METHOD = """Every policy was tuned alone, by replay, with the same number of trials and seed. *As published*, a policy takes the
drafter's own probability and cuts its tree by budget and depth alone; the others choose among the same fitted acceptance models. Tuning
saw {tuning} harvest prompts that the predictor's fit held out, *replayed* is on {confirming} further ones. The rest was decoded on {prompts}
bench prompts that nothing has seen, policies by turns of a few tokens on every prompt, in one process. Ratios are geometric means over prompts with
95 % intervals of the paired differences. The oracle is `throughput` tuned anew where it knows each token's experts and pays nothing for
that; it can only be replayed. Experts: distinct ones a layer and pass; nodes and ms are a pass; *choosing* is drafting, predicting and
selecting."""
HEADS = ("policy", "tokens/s", "over `off`", "`throughput` over it", "replayed over `off`", "tokens a pass", "nodes", "experts",
         "choosing, ms", "verifying, ms", "in loops", "texts unlike `off`")  # fmt: skip


def figures(
    decoded: Sequence[Row], samples: Samples, tuned: Mapping[str, Row], replayed: Mapping[str, ReplayResult]
) -> list[Row]:
    """One row for `off`, every entry and the oracle, which has no `live`. `decoded` are the bench's rows; `tuned` and `replayed`
    are results on tuning and on confirming prompts."""
    plain = replayed["off"].tokens_per_ms
    live = {row["label"]: row for row in decoded}
    rows = []
    for name in ("off", *(entry.name for entry in ENTRIES), ORACLE):
        row = {"name": name, "policy": replayed[name].policy, "tuning": tuned.get(name),
               "replay": replayed[name].to_dict(), "replayed_over_off": replayed[name].tokens_per_ms / plain}  # fmt: skip
        if name in live:
            row["live"] = live[name] | {"tokens_per_second_by_prompt": [rate([repeats]) for repeats in samples[name]]}
            row["over_off"] = ratio(samples[name], samples["off"])
            row["throughput_over"] = ratio(samples[OURS.name], samples[name])
        rows.append(row)
    return rows


def ratio(samples: list[list[Sample]], rivals: list[list[Sample]]) -> dict[str, float]:
    """How many times faster, with the ends of the interval. Samples are `[prompt][repeat]`, of the same prompts."""
    mean, half = interval(log_ratios(samples, rivals))
    return {"ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}


def bars(rows: Sequence[Row], profile: DeviceProfile) -> list[Row]:
    """What was hoped for: `bar`, `wanted`, `measured` (as text) and `reached`, judged by the middle of the interval."""
    by_name = {row["name"]: row for row in rows}
    ours = by_name[OURS.name]
    found = []
    for name, least in LEAST.items():
        against = by_name[name]["throughput_over"]
        found.append(
            bar(f"`throughput` over {name}", f"at least {least:.2f}x", times(against), against["ratio"] >= least)
        )
    of_oracle = ours["replay"]["tokens_per_ms"] / by_name[ORACLE]["replay"]["tokens_per_ms"]
    loops, (low, high) = by_name["off"]["live"]["loop_share"], EXPERT_SHARE
    return [
        *found,
        bar("`throughput` over its routing oracle, replayed", f"at least {LEAST_OF_ORACLE}x", f"{of_oracle:.3f}x",
            of_oracle >= LEAST_OF_ORACLE),
        bar("tokens in loops", f"at most {MOST_LOOPS:.0%}", f"{loops:.1%}", loops <= MOST_LOOPS),
        bar("experts' share of a plain step", f"{low:.0%} to {high:.0%}", f"{profile.expert_share:.1%}",
            low <= profile.expert_share <= high),
    ]  # fmt: skip


def bar(name: str, wanted: str, measured: str, reached: bool) -> Row:
    """One line of the table of bars."""
    return {"bar": name, "wanted": wanted, "measured": measured, "reached": reached}


def times(value: Mapping[str, float]) -> str:
    """A ratio with its interval."""
    return f"{value['ratio']:.2f}x ({value['low']:.2f} to {value['high']:.2f})"


def shown(policy: str) -> str:
    """A policy's text form with numbers short enough for a table."""
    return re.sub(r"\d+\.\d{4,}(?:e-?\d+)?", lambda number: f"{float(number[0]):.3g}", policy)


def cells(row: Row) -> list[str]:
    """A line of the table of one temperature, see `HEADS`."""
    name = f"{row['name']}<br>`{shown(row['policy'])}`" if row["name"] != row["policy"] else f"`{row['name']}`"
    replayed = f"{row['replayed_over_off']:.2f}x"
    live = row.get("live")
    if live is None:
        return [name, "-", "-", "-", replayed, *(f"{row['replay'][key]:.2f}" for key in ("accept_length", "nodes")),
                f"{row['replay']['experts_per_layer']:.1f}", "-", "-", "-", "-"]  # fmt: skip
    choosing = sum(live[f"{part}_ms"] for part in ("draft", "predict", "select"))
    over = (
        ["1", times(row["throughput_over"])]
        if row["name"] == "off"
        else [times(row["over_off"]), times(row["throughput_over"])]
    )
    if row["name"] == OURS.name:
        over[1] = "1"
    return [name, f"{live['tokens_per_second']:.1f}", *over, replayed, f"{live['accept_length']:.2f}", f"{live['nodes']:.1f}",
            f"{live['experts_per_layer']:.1f}", f"{choosing:.2f}", f"{live['verify_ms']:.2f}", f"{live['loop_share']:.0%}",
            f"{live['diverging_prompts']} of {live['prompts']}"]  # fmt: skip


def markdown(result: Row, image: str | None) -> str:
    """The report: conditions, bars, one table a temperature, plot."""
    tables, settings, machine = result["temperatures"], result["settings"], result["machine"]
    versions = [f"{name} {machine['versions'][name]}" for name in PACKAGES if name in machine["versions"]]
    conditions = (
        f"{machine['device']}, {result['dtype']}, threads: {machine['threads']}, {', '.join(versions)}, Python "
        f"{machine['versions']['python']}; {result['prompts']} prompts x {settings['tokens']} tokens, repeats: "
        f"{settings['repeats']}, {settings['trials']} trials of each policy, seed {settings['seed']}."
    )
    lines = [
        f"# Policies on {result['architecture']}", "", f"Made by `{result['command']}`.", "", conditions, "",
        METHOD.format(prompts=result["prompts"], **tables[0]["prompts"]), "", "## Bars", "", *bar_table(tables),
    ]  # fmt: skip
    for table in tables:
        lines += [
            "",
            f"## Temperature {table['temperature']:g}",
            "",
            *grid(HEADS, map(cells, table["rows"])),
            "",
            agreement(table),
        ]
    if image:
        lines += ["", f"![Speed over plain decoding by policy and temperature]({image})"]
    return "\n".join(lines) + "\n"


def bar_table(tables: Sequence[Row]) -> list[str]:
    """The bars, with a column for what each temperature reached."""
    lines = []
    for several in zip(*(table["bars"] for table in tables), strict=True):
        marks = (f"{one['measured']}, {'reached' if one['reached'] else '**not reached**'}" for one in several)
        lines.append([several[0]["bar"], several[0]["wanted"], *marks])
    return grid(["bar", "wanted", *(f"T = {table['temperature']:g}" for table in tables)], lines)


def agreement(table: Row) -> str:
    """Whether the texts are those of `off`, and what else the machine did."""
    live = [row["live"] for row in table["rows"] if "live" in row and row["name"] != "off"]
    unlike, texts = sum(row["diverging_prompts"] for row in live), sum(row["prompts"] for row in live)
    said = "Every text is that of `off`" if not unlike else f"{unlike} of {texts} texts are not those of `off`"
    return f"{said}. Other processes used {table['other_load']:.2f} cores meanwhile."


def grid(heads: Sequence[str], lines: Any) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines)]


def plot(result: Row, path: Path) -> bool:
    """Bars of the speed over plain decoding, a panel a temperature. False, and no file, without matplotlib."""
    plt = pyplot()
    if plt is None:
        return False
    tables, published = result["temperatures"], {entry.name for entry in PUBLISHED}
    figure, axes = plt.subplots(1, len(tables), figsize=(5.5 * len(tables), 4.2), squeeze=False, sharey=True)
    for axis, table in zip(axes[0], tables, strict=True):
        rows = [row for row in table["rows"] if "live" in row and row["name"] != "off"][::-1]
        kinds = [
            "ours" if row["name"] == OURS.name else "published" if row["name"] in published else "same" for row in rows
        ]
        values = [row["over_off"] for row in rows]
        ends = [[v["ratio"] - v["low"] for v in values], [v["high"] - v["ratio"] for v in values]]
        axis.barh([row["name"] for row in rows], [v["ratio"] for v in values], xerr=ends, capsize=2,
                  color=[COLORS[kind] for kind in kinds], error_kw={"linewidth": 0.9})  # fmt: skip
        for i, value in enumerate(values):
            axis.text(value["high"], i, f"  {value['ratio']:.2f}", va="center", fontsize=8)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xlabel("speed over plain decoding, 95 % interval")
        axis.set_title(f"temperature {table['temperature']:g}", fontsize=10)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.15)
    save(figure, path)
    return True
