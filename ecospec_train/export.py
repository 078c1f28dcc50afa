"""Predictor and tuned policies become one deployable bundle with a model card: `ecospec-train export`."""

from __future__ import annotations

import errno
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ecospec_runtime.bundle import (
    Bundle,
    DevicePolicy,
    DrafterInfo,
    Manifest,
    Provenance,
    TargetInfo,
    file_sha256,
    load_bundle,
    parse_json_file,
    vocabulary_sha256,
    write_manifest,
)
from ecospec_runtime.errors import UserError, first_line
from ecospec_runtime.machine import git_commit, versions
from ecospec_runtime.predictor import MANIFEST_FILE, METRICS_FILE, PredictorManifest, load_manifest, same_drafter
from ecospec_train.model_card import PLOT, model_card, plot_replay
from ecospec_train.reliability import RELIABILITY_PLOT
from ecospec_train.settings import ExportConfig

PREDICTOR_FILES = ("predictor.onnx", "predictor.safetensors", "acceptance.json", METRICS_FILE)


def export(config: ExportConfig) -> Bundle:
    """Write a bundle and load it back. Raises UserError for missing or foreign inputs, or a folder that is something else."""
    for folder in config.predictor:
        load_manifest(folder)  # says what is wrong with a folder that is none
    policies = collect_policies(config.policy)
    predictor = pick_predictor(config.predictor, policies)
    fitted = load_manifest(predictor)
    for slug, policy in policies.items():
        same_drafter(policy.profile.drafter, f"the policy for {slug}", fitted, predictor)
    target = TargetInfo.model_validate(fitted.target | {"vocabulary_sha256": None})
    target.id = config.target or target.id
    target.vocabulary_sha256 = vocabulary_sha256(load_tokenizer(target.id))
    drafter = DrafterInfo.model_validate(fitted.drafter)
    drafter.id = config.drafter or drafter.id
    metrics = parse_metrics(predictor / METRICS_FILE)
    with replacing(config.out) as folder:
        for name in PREDICTOR_FILES:
            source = predictor / name
            if not source.is_file():
                raise UserError(f"{source}: missing; run `ecospec-train fit` again")
            shutil.copyfile(source, folder / name)
        judged = (predictor / RELIABILITY_PLOT).is_file()
        if judged:
            shutil.copyfile(predictor / RELIABILITY_PLOT, folder / RELIABILITY_PLOT)
        (folder / "policies").mkdir()
        for slug, policy in policies.items():
            (folder / "policies" / f"{slug}.json").write_text(policy.model_dump_json(indent=2) + "\n", encoding="utf-8")
        manifest = Manifest(
            target=target, drafter=drafter, pool=fitted.pool, predictor=fitted, metrics=metrics,
            policies=list(policies), files={}, provenance=provenance(fitted),
        )  # fmt: skip
        card = model_card(manifest, policies, plot_replay(policies, folder / PLOT), judged)
        (folder / "README.md").write_text(card, encoding="utf-8")
        write_manifest(folder, manifest)
    return load_bundle(config.out)


def collect_policies(folders: tuple[Path, ...]) -> dict[str, DevicePolicy]:
    """Device slug -> policy over the `policies/*.json` of all folders. Raises UserError if there are none, or two for a device."""
    found: dict[str, DevicePolicy] = {}
    for folder in folders:
        files = sorted((folder / "policies").glob("*.json"))
        if not files:
            raise UserError(f"{folder}: holds no policies/<device>.json; run `ecospec-train tune --out {folder}` first")
        for path in files:
            policy: DevicePolicy = parse_json_file(path, DevicePolicy)
            slug = policy.profile.slug
            if slug in found:
                raise UserError(f"{path}: a second policy for the device {slug}; pass only one --policy folder for it")
            found[slug] = policy
    return found


def pick_predictor(folders: tuple[Path, ...], policies: dict[str, DevicePolicy]) -> Path:
    """The folder whose predictor the policies were tuned with. Raises UserError if they were tuned with several, or another.

    Policies that use none, and files of older releases, do not say.
    """
    wanted = {policy.predictor: slug for slug, policy in policies.items() if policy.predictor}
    if not wanted:
        return folders[0]
    if len(wanted) > 1:
        raise UserError(
            f"the policies for {' and '.join(wanted.values())} were tuned with different predictors, and a bundle holds one; "
            "tune them again with the same --predictor"
        )
    ((digest, slug),) = wanted.items()
    for folder in folders:
        if file_sha256(folder / MANIFEST_FILE) == digest:
            return folder
    raise UserError(
        f"the policy for {slug} was tuned with another predictor than {', '.join(map(str, folders))}; pass that one as "
        "--predictor, or run `ecospec-train tune` again with this one"
    )


def load_tokenizer(target: str) -> Any:
    """The target's tokenizer, whose vocabulary the bundle is bound to. Raises UserError if it cannot be found."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError, KeyError) as error:
        line = first_line(error)
        raise UserError(
            f"target {target}: its tokenizer cannot be read ({line}); pass --target with its place"
        ) from None


def parse_metrics(path: Path) -> dict[str, Any]:
    """The figures of a fit."""
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); run `ecospec-train fit` again") from None
    if not isinstance(metrics, dict):
        raise UserError(f"{path}: not a JSON object; run `ecospec-train fit` again")
    return metrics


def provenance(fitted: PredictorManifest) -> Provenance:
    """When, by what, from which code and which traces."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return Provenance(
        created=datetime.now(UTC).isoformat(timespec="seconds"), command=command, git_commit=git_commit(),
        dataset_sha256=fitted.traces, versions=versions(),
    )  # fmt: skip


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A fresh folder beside `out` that takes its place once filled. Refuses to replace anything but a bundle."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "manifest.json").is_file())):
        raise UserError(f"{out}: exists and is not a bundle; choose another --out or remove it")
    draft = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); choose another --out") from None
    try:
        yield draft
        if out.exists():
            shutil.rmtree(out)
        draft.rename(out)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(f"{out}: no space left on the device; free some or choose another --out") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
