"""A bundle's README.md: what it is for, what was measured, how to use it."""

from __future__ import annotations

from typing import Any

from ecospec_runtime.bundle import DevicePolicy, Manifest
from ecospec_runtime.inspection import describe_policy, headline


def model_card(manifest: Manifest, policies: dict[str, DevicePolicy]) -> str:
    """Markdown with the figures of the fit and of every device's policy."""
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
    lines += ["", "## Predictor, on held-out text", "", "| figure | value |", "|---|---|"]
    lines += [f"| {name} | {value:.4g} |" for name, value in headline(manifest.metrics).items()]
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
