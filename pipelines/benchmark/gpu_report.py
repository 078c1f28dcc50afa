"""The report of `gpu_check`: one JSON file and a table in Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))


def _cell(text: str, most: int) -> str:
    return text[:most].replace("|", "/")


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _baselines(row: dict[str, Any]) -> str:
    """Each by name: its time and how many times as long as ours, or why it has none."""
    parts = []
    for name, found in row.get("baselines", {}).items():
        if "error" in found:
            parts.append(f"{name}: {_cell(found['error'], 80)}")
        else:
            mark = "" if found["captured"] else ", not captured"
            parts.append(f"{name} {_ms(found['ms'])} ({found['ms'] / max(row['ms'], 1e-9):.2f}{mark})")
    return "; ".join(parts)


def _times(rows: Sequence[dict[str, Any]]) -> str:
    head = ("op", "model", "shape", "ms", "eager ms", "GB/s of floor bytes", "of the copy", "others, ms (over ours)")
    lines = []
    for row in rows:
        which = (f"`{row['op']}`", row["model"], row["shape"])
        if row["failed"]:
            lines.append((*which, f"**FAILED**: {_cell(row['failed'], 160)}", *[""] * 4))
        else:
            rate = f"{row['bytes_per_second'] / 1e9:.0f}"
            lines.append(
                (*which, _ms(row["ms"]), _ms(row["eager_ms"]), rate, f"{row['of_ceiling']:.2f}", _baselines(row))
            )
    return _table(head, lines)


def _decode(stage: dict[str, Any]) -> str:
    head = (
        "policy",
        "tokens/s",
        "over `off`",
        "tokens a pass",
        "nodes",
        "ms a pass: drafting + choosing + verifying",
        "text of `off`",
    )
    rows = [
        (row["label"], f"{row['tokens_per_second']:.0f}", f"{row['speedup_vs_off'] or 0:.2f}", f"{row['accept_length']:.2f}", f"{row['nodes']:.1f}",
         f"{row['draft_ms']:.1f} + {row['select_ms']:.1f} + {row['verify_ms']:.1f}", "yes" if row["identical_to_off"] else f"not on {row['diverging_prompts']} prompts")
        for row in stage["rows"]
    ]  # fmt: skip
    profile = stage.get("profile", "none")
    costs = profile if isinstance(profile, str) else (
        f"plain step {profile['plain_ms']:.2f} ms, {profile['per_token_ms']:.3f} ms a node, {profile['per_expert_ms']:.4f} ms an expert, experts "
        f"{profile['expert_share']:.0%} of a plain step, held-out error {profile['heldout_error']:.1%}")  # fmt: skip
    calls = ", ".join(f"{name} {count}" for name, count in stage["calls"].items())
    return (
        f"The committed reference, its experts widened {stage['factor']} times, bfloat16; {stage['prompts']} pieces of Python's own library, which the "
        f"models may have been trained on, {stage['tokens']} tokens each at temperature 0. No predictor is committed, so policies that need one are "
        f"left out. float32 under a tree policy gave the plain text: {'yes' if stage.get('exact') else 'no'}. Profile: {costs}. Calls: {calls}.\n\n{_table(head, rows)}"
    )


def _step(stage: dict[str, Any]) -> str:
    head = ("dtype", "nodes chosen", "rows of the pass", "eager ms", "graph ms", "tokens a step", "text of the engine")
    rows = [
        (row["dtype"], str(row["budget"]), str(row["rows"]), _ms(row["eager_ms"]), _ms(row["graph_ms"]), f"{row['tokens_per_step']:.2f}",
         "yes" if row["same_text"] else "no") for row in stage["rows"]
    ]  # fmt: skip
    return f"The same model: draft, choose by reach, verify, commit, and the transfer of the tokens to the host.\n\n{_table(head, rows)}"


def markdown(report: dict[str, Any]) -> str:
    """Device, outcome of every stage, then the tables."""
    machine, stages = report["machine"], report["stages"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    by = (
        f"By `make gpu-check`, {report['started']}, {report['seconds']} s, commit {machine['commit'] or 'unknown'}. Capability "
        f"{machine['capability']}, {machine['processors']} processors, {machine['memory_gib']} GiB; driver (clocks, power limit) "
        f"{machine['driver']}, runtime {machine['runtime']}; {versions}."
    )
    outcomes = [
        (s["stage"], str(s["seconds"]), str(len(s.get("cases", s.get("rows", [])))), _cell("; ".join(s["failed"]), 600) or "fine")
        for s in stages
    ]  # fmt: skip
    parts = [f"# {machine['device']}", by, _table(("stage", "seconds", "rows", "result"), outcomes)]
    timed = [s for s in stages if s["stage"].startswith("times") and s.get("rows")]
    if timed:
        how = (
            "As a replayed CUDA graph runs them, caches flushed between calls; `eager` is launched from Python. Copy ceiling, reads and "
            f"writes: {timed[0]['copy_bytes_per_second'] / 1e9:.0f} GB/s. A case whose result is wrong has no time."
        )
        parts += ["## Times", how, _times([row for s in timed for row in s["rows"]])]
    for name, title, part in (("step", "A step as a CUDA graph", _step), ("decode", "Decoding", _decode)):
        parts += [text for s in stages if s["stage"] == name and s.get("rows") for text in (f"## {title}", part(s))]
    return "\n\n".join(parts) + "\n"


def write(report: dict[str, Any], folder: Path) -> Path:
    """Both files, named after the device; returns the table's path."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "-".join(re.findall(r"[a-z0-9]+", report["machine"]["device"].lower())) or "gpu"
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    path = folder / f"{name}.md"
    path.write_text(markdown(report), encoding="utf-8")
    return path
