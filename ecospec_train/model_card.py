"""A bundle's README.md: what it is for, what was measured, how to use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ecospec_runtime.bundle import DevicePolicy, Manifest
from ecospec_runtime.inspection import describe_policy, headline
from ecospec_train.plots import pyplot, save
from ecospec_train.reliability import RELIABILITY_PLOT

PLOT = "replay.png"
NAMES = {
    "off": "plain decoding", "confidence": "best fixed budget", "confidence_temperature": "the same, one temperature",
    "chosen": "this bundle's policy", "oracle": "with true routing",
}  # fmt: skip


def plot_replay(policies: dict[str, DevicePolicy], path: Path) -> bool:
    """Bars of replayed speed over plain decoding, one group per device. False, and no file, without matplotlib or results."""
    groups = {slug: replayed(p.results) for slug, p in policies.items()}
    plt = pyplot()
    if plt is None or not all(groups.values()):
        return False
    figure, axes = plt.subplots(len(groups), 1, figsize=(6.4, 2.4 * len(groups)), squeeze=False)
    for axis, (slug, speeds) in zip(axes[:, 0], groups.items(), strict=True):
        names = list(speeds)[::-1]
        axis.barh([NAMES[n] for n in names], [speeds[n] for n in names],
                  color=["#c05621" if n == "chosen" else "#4a7ba6" for n in names])  # fmt: skip
        for i, name in enumerate(names):
            axis.text(speeds[name], i, f" {speeds[name]:.2f}", va="center", fontsize=8)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(f"{slug}: speed over plain decoding, replayed", fontsize=9)
        axis.tick_params(axis="y", labelsize=8)
        axis.margins(x=0.12)
    save(figure, path)
    return True


def replayed(results: dict[str, Any]) -> dict[str, float]:
    """Speed over plain decoding of every policy that `tune` replayed; empty if it left none."""
    runs = results.get("replay") or {}
    base = (runs.get("off") or {}).get("tokens_per_ms")
    return {name: runs[name]["tokens_per_ms"] / base for name in NAMES if name in runs} if base else {}


def model_card(
    manifest: Manifest, policies: dict[str, DevicePolicy], plotted: bool = False, judged: bool = False
) -> str:
    """Markdown with the figures of the fit and of every device's policy; `plotted`, `judged`: `PLOT`, `RELIABILITY_PLOT` lie beside it."""
    t, d = manifest.target, manifest.drafter
    lines = [
        f"# EcoSpec bundle for {t.id}",
        "",
        (
            f"Cost-aware speculative decoding for `{t.id}` ({t.architecture}: {t.moe_layers} MoE layers of {t.experts} experts, "
            f"top-{t.top_k}) with the {d.kind} drafter `{d.id}`. The output is exactly what the target alone would produce."
        ),
        "",
        '    ecospec-runtime generate --bundle . --prompt "..."',
        "    ecospec-runtime inspect .",
        "",
        "## Policies",
        "",
        "| device | policy | plain step | experts' share | replayed speed-up over `off` | over best `confidence` |",
        "|---|---|---|---|---|---|",
    ]
    for slug, tuned in policies.items():
        profile, results = tuned.profile, tuned.results
        lines.append(
            f"| {slug} | `{describe_policy(tuned)}` | {profile.plain_ms:.2f} ms | {profile.expert_share:.0%} "
            f"| {figure(results, 'speedup_vs_off')} | {figure(results, 'speedup_vs_confidence')} |"
        )
    lines += ["", *(f"- {slug}: {tuned.reason}" for slug, tuned in policies.items() if tuned.reason)]
    if plotted:
        lines += ["", f"![Replayed speed of the policies]({PLOT})"]
    lines += ["", "## Predictor, on held-out text", "", "| figure | value |", "|---|---|"]
    lines += [f"| {name} | {value:.4g} |" for name, value in headline(manifest.metrics).items()]
    if judged:
        lines += ["", f"![Estimated and real acceptance]({RELIABILITY_PLOT})"]
    lines += ["", "All figures are in `metrics.json`.", "", *provenance_lines(manifest)]
    return "\n".join(lines) + "\n"


def figure(results: dict[str, Any], key: str) -> str:
    """A replayed ratio, or a dash."""
    value = results.get(key)
    return f"{value:.2f}x" if isinstance(value, int | float) else "-"


def provenance_lines(manifest: Manifest) -> list[str]:
    """Where the bundle came from."""
    p = manifest.provenance
    versions = ", ".join(f"{name} {version}" for name, version in p.versions.items())
    return [
        "## Provenance", "",
        f"- made {p.created} by `{p.command}`, EcoSpec commit {p.git_commit or 'unknown'}",
        f"- target weights `{manifest.target.fingerprint}`, drafter weights `{manifest.drafter.fingerprint}`",
        f"- traces `{p.dataset_sha256}`",
        f"- {versions}",
    ]  # fmt: skip
