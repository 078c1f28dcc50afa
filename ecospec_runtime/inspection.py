"""What a bundle holds, for people: target, drafter, predictor figures, a policy per device, provenance."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table

from ecospec_runtime.bundle import Bundle


def summary(bundle: Bundle) -> Group:
    """Tables of the manifest and of the policies."""
    m = bundle.manifest
    facts = Table(title=str(bundle.folder), title_justify="left", show_header=False, box=None, padding=(0, 2))
    facts.add_column()
    facts.add_column(overflow="fold")
    t = m.target
    shape = f"{t.moe_layers} MoE layers, {t.experts} experts, top-{t.top_k}, vocabulary {t.vocab_size}"
    rows: list[tuple[str, Any]] = [
        ("target", f"{t.id} ({t.architecture}: {shape})"),
        (
            "drafter",
            f"{m.drafter.id} ({m.drafter.kind}, {m.drafter.features.replace('_', ' ')} of width {m.drafter.width})",
        ),
        (
            "pool",
            f"depth {m.pool.depth}, beam {m.pool.beam}, width {m.pool.width}"
            + (f", reach from {m.pool.min_reach:g}" if m.pool.min_reach else ""),
        ),
        *((f"predictor {name}", f"{value:.4g}") for name, value in headline(m.metrics).items()),
        ("made", f"{m.provenance.created}, commit {m.provenance.git_commit or 'unknown'}"),
        ("command", m.provenance.command),
        ("files", f"{len(m.files)} files, {sum(f.bytes for f in m.files.values()) / 1e6:.1f} MB, every sha256 checked"),
    ]
    for key, value in rows:
        facts.add_row(key, str(value))
    policies = Table(title="policies", title_justify="left")
    for name in ("device", "policy", "plain step", "experts' share", "profile error", "why"):
        policies.add_column(name, overflow="fold")
    for slug, tuned in bundle.policies.items():
        p = tuned.profile
        policies.add_row(slug, describe_policy(tuned), f"{p.plain_ms:.2f} ms", f"{p.expert_share:.0%}",
                         f"{p.heldout_error:.1%}", tuned.reason)  # fmt: skip
    return Group(facts, policies)


def headline(metrics: dict[str, Any]) -> dict[str, float]:
    """The few figures that decide whether a predictor is good enough, if `fit` reported them."""
    bars = metrics.get("bars", {})
    return {key.replace("_", " "): float(value) for key, value in bars.items() if isinstance(value, int | float)}


def describe_policy(tuned: Any) -> str:
    """Text form of a stored policy, as `--policy` takes it, numbers rounded for reading."""
    if tuned.policy == "off":
        return "off"
    parameters = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in tuned.parameters.items()}
    return str(tuned.spec.model_copy(update={"parameters": parameters}))
