"""A bundle for the tiny target and drafter: a random predictor and a tuned-looking policy for this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ecospec_runtime.acceptance import AcceptanceModel, LogisticWeights
from ecospec_runtime.bundle import DevicePolicy
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.machine import device_name, device_slug, versions
from ecospec_runtime.predictor import PredictorManifest, PredictorShapes
from ecospec_runtime.target import Target

METRICS = {"bars": {"union_error": 0.031, "acceptance_loss_vs_raw": 0.6}, "best_acceptance": "head"}


def this_slug() -> str:
    """Slug of this machine for the tiny target's float32."""
    return device_slug(device_name(), "float32", torch.get_num_threads())


def tiny_profile(slug: str | None = None) -> DeviceProfile:
    """A profile under which drafting pays."""
    return DeviceProfile(
        device=device_name(), slug=slug or this_slug(), dtype="float32", threads=torch.get_num_threads(),
        versions=versions(), fixed_ms=5.0, per_token_ms=0.01, per_expert_ms=0.02, draft_fixed_ms=0.1, draft_level_ms=0.1,
        heldout_error=0.02, plain_ms=5.3, expert_share=0.05,
    )  # fmt: skip


def write_predictor(folder: Path, target_dir: Path, drafter_dir: Path) -> Path:
    """A predictor folder with random weights whose manifest names the given target and drafter."""
    from ecospec_train.fit import write_folder  # brings Lightning, which most tests of the runtime do without
    from ecospec_train.predictor_export import export_network
    from ecospec_train.predictor_model import PredictorNetwork

    target = Target.from_pretrained(target_dir)
    drafter = load_drafter(drafter_dir, target)
    shapes = PredictorShapes(hidden=target.hidden_size, state=drafter.width, layers=target.moe_layers,
                             experts=target.experts, top_k=target.top_k)  # fmt: skip
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    export_network(PredictorNetwork(shapes, 16), folder)
    keys = ("architecture", "fingerprint", "moe_layers", "experts", "top_k", "vocab_size", "hidden_size")
    manifest = PredictorManifest(
        shapes=shapes, target={"id": str(target_dir)} | {key: getattr(target, key) for key in keys},
        drafter={"id": str(drafter_dir), "kind": drafter.kind, "fingerprint": drafter.fingerprint,
                 "width": drafter.width},
        temperature=0.0, traces="0" * 64, heldout_prompts=[], files={}, config={}, versions=versions(),
    )  # fmt: skip
    model = AcceptanceModel(best="head", temperature=0.7, logistic=LogisticWeights())
    write_folder(folder, model, METRICS, manifest)
    return folder


def write_policy(folder: Path, **changes: Any) -> Path:
    """A folder as `tune` leaves it, with one policy for this machine."""
    values: dict[str, Any] = {
        "policy": "throughput", "parameters": {"price": 0.15}, "acceptance": "head", "depth": 3,
        "reason": "replay: 1.30x off", "profile": tiny_profile(),
        "results": {"speedup_vs_off": 1.3, "speedup_vs_confidence": 1.1},
    }  # fmt: skip
    policy = DevicePolicy(**(values | changes))
    (folder / "policies").mkdir(parents=True)
    (folder / "policies" / f"{policy.profile.slug}.json").write_text(policy.model_dump_json())
    return folder


def write_bundle(folder: Path, target_dir: Path, drafter_dir: Path, **changes: Any) -> Path:
    """Export a bundle to `folder / "bundle"`; `changes` go into its policy."""
    from ecospec_train.export import ExportConfig, export

    predictor = folder / "predictor"
    if not predictor.exists():
        write_predictor(predictor, target_dir, drafter_dir)
    policy = write_policy(folder / "policy", **changes)
    export(ExportConfig(predictor=(predictor,), policy=(policy,), out=folder / "bundle"))
    return folder / "bundle"
