"""A benchmark for people: the table on a terminal, the plots for a model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ecospec_runtime.console import check_folder
from ecospec_runtime.errors import UserError


def table(report: dict[str, Any], narrow: bool = False) -> Table:
    """One line per policy and temperature; the fastest of a temperature is bold. `narrow` leaves the details out."""
    machine = report["machine"]
    title = f"{report['target']} on {machine['device']}, {report['dtype']}, threads: {machine['threads']}"
    out = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    runs = [cells(run) for run in report["runs"]]
    names = [name for name in runs[0] if not narrow or name not in DETAILS]
    for name in names:
        if name == "policy":
            out.add_column(name, no_wrap=not narrow, overflow="fold")
        else:
            out.add_column(name, justify="right", no_wrap=True)
    for run, row in zip(report["runs"], runs, strict=True):
        same = [r["tokens_per_second"] for r in report["runs"] if r["temperature"] == run["temperature"]]
        fastest = run["tokens_per_second"] == max(same)
        out.add_row(*(row[name] for name in names), style="bold" if fastest else None)
    out.caption = "experts: distinct per layer and pass; = off: same text as off, or how many texts are not"
    if not narrow:
        out.caption += "; draft, predict, select, verify: ms per pass"
    out.caption_justify = "left"
    return out


DETAILS = {"prompts", "quartiles", "nodes", "draft", "predict", "select", "verify", "loops"}


def cells(run: dict[str, Any]) -> dict[str, str]:
    """Column name -> text of one row."""
    low, _, high = run["tokens_per_second_quartiles"]
    times = {name: f"{run[name + '_ms']:.2f}" for name in ("draft", "predict", "select", "verify")}
    return {
        "policy": run["label"], "T": f"{run['temperature']:g}", "prompts": str(run["prompts"]),
        "tok/s": f"{run['tokens_per_second']:.1f}", "quartiles": f"{low:.0f}-{high:.0f}",
        "vs off": _times(run["speedup_vs_off"]), "vs conf.": _times(run["speedup_vs_confidence"]),
        "tok/pass": f"{run['accept_length']:.2f}", "nodes": f"{run['nodes']:.1f}",
        "experts": f"{run['experts_per_layer']:.1f}", **times, "loops": f"{run['loop_share']:.0%}", "= off": _agrees(run),
    }  # fmt: skip


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _agrees(run: dict[str, Any]) -> str:
    if run["identical_to_off"] is None:
        return "-"
    return "yes" if run["identical_to_off"] else f"-{run['diverging_prompts']}"


def markdown(report: dict[str, Any]) -> str:
    """The table for a README, with machine and method below it."""
    rows = [cells(run) for run in report["runs"]]
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([row[name] for name in names] for row in rows)]
    versions = ", ".join(f"{name} {version}" for name, version in report["machine"].get("versions", {}).items())
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (f"{text}\n\n{report['target']}, {report['dtype']}, {report['machine']['device']}, threads: "
            f"{report['machine']['threads']}, {versions}; {report['prompts']['count']} prompts x {report['max_new_tokens']} "
            f"tokens. {report['method']}.\n")  # fmt: skip


def check_plots(folder: Path) -> None:
    """UserError without matplotlib or where the folder cannot be made."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plots needs matplotlib; install it with: pip install 'ecospec[train]'") from None
    matplotlib.use("Agg")
    check_folder(folder)


def plots(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write `table.md`, `speedup.png` (bars over `off`) and `experts.png` (accept length against experts).

    UserError without matplotlib.
    """
    check_plots(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(markdown(report), encoding="utf-8")
    return [_speedup(report, folder / "speedup.png"), _experts(report, folder / "experts.png")]


def _speedup(report: dict[str, Any], path: Path) -> Path:
    from matplotlib import pyplot as plt

    temperatures = sorted({r["temperature"] for r in report["runs"]})
    rows = max(sum(r["temperature"] == t for r in report["runs"]) for t in temperatures)
    figure, axes = plt.subplots(1, len(temperatures), figsize=(6 * len(temperatures), 0.32 * rows + 1.4), squeeze=False)
    for axis, temperature in zip(axes[0], temperatures, strict=True):
        runs = [r for r in report["runs"] if r["temperature"] == temperature][::-1]
        base = all(r["speedup_vs_off"] is not None for r in runs)
        values = [r["speedup_vs_off"] if base else r["tokens_per_second"] for r in runs]
        colors = ["#c05621" if r["policy"] not in ("off", "confidence") else "#4a7ba6" for r in runs]
        axis.barh([r["label"] for r in runs], values, color=colors)
        for i, value in enumerate(values):
            axis.text(value, i, f" {value:.2f}", va="center", fontsize=8)
        if base:
            axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xlabel("speed-up over plain decoding" if base else "tokens per second")
        axis.set_title(f"temperature {temperature:g}")
        axis.tick_params(axis="y", labelsize=7)
        axis.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _experts(report: dict[str, Any], path: Path) -> Path:
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4.2))
    first = min(r["temperature"] for r in report["runs"])
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in report["runs"]:
        if run["temperature"] == first:
            groups.setdefault(f"{run['policy']} ({run['acceptance']})", []).append(run)
    for name, runs in groups.items():
        runs.sort(key=lambda r: r["experts_per_layer"])
        x, y = [r["experts_per_layer"] for r in runs], [r["accept_length"] for r in runs]
        axis.plot(x, y, marker="o", linestyle="-" if len(runs) > 1 else "", label=name)
    axis.set_xlabel("distinct experts per layer and pass")
    axis.set_ylabel("tokens per pass")
    axis.set_title(f"what a pass reads, what it yields (temperature {first:g})", fontsize=10)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
