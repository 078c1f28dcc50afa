"""The deployable folder: predictor, acceptance models, one policy per device, and what they may be used with.

    BUNDLE/manifest.json  predictor.onnx  predictor.safetensors  acceptance.json  metrics.json  policies/<slug>.json  README.md

Loading checks every hash and every compatibility and names what is wrong; nothing is guessed.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ecospec_runtime.acceptance import AcceptanceKind
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.machine import device_slug, other_versions
from ecospec_runtime.policies import PolicySpec, build_policy
from ecospec_runtime.pool import Features
from ecospec_runtime.predictor import Predictor, PredictorManifest

if TYPE_CHECKING:
    from ecospec_runtime.drafters.base import Drafter
    from ecospec_runtime.target import Target

SCHEMA_VERSION: Literal[1] = 1
MANIFEST = "manifest.json"
REQUIRED = ("predictor.onnx", "predictor.safetensors", "acceptance.json")
_CHUNK = 1 << 20


class Strict(BaseModel):
    """Base of everything stored in a bundle: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class TargetInfo(Strict):
    """The target a bundle was made for."""

    id: str
    architecture: str
    fingerprint: str
    moe_layers: int
    experts: int
    top_k: int
    vocab_size: int
    hidden_size: int
    vocabulary_sha256: str | None = None  # None: the target came without a tokenizer


class DrafterInfo(Strict):
    """The drafter whose pools the predictor reads."""

    id: str
    kind: str
    fingerprint: str
    width: int
    features: Features = "drafter_state"  # what `width` numbers the predictor reads beside each node


class FileInfo(Strict):
    """What a file must be."""

    sha256: str
    bytes: int


class Provenance(Strict):
    """Where a bundle came from."""

    created: str
    command: str
    git_commit: str | None
    dataset_sha256: str
    versions: dict[str, str]


class Manifest(Strict):
    """`manifest.json`."""

    schema_version: int = SCHEMA_VERSION
    target: TargetInfo
    drafter: DrafterInfo
    pool: PoolConfig
    predictor: PredictorManifest  # shapes, fit settings and lineage, as `fit` wrote them
    metrics: dict[str, Any]  # what the predictor reached on held-out text
    policies: list[str]  # device slugs, each a file policies/<slug>.json
    files: dict[str, FileInfo]
    provenance: Provenance


class DevicePolicy(Strict):
    """`policies/<slug>.json`: what `tune` chose for one device, and why."""

    schema_version: Literal[1] = SCHEMA_VERSION
    policy: str
    parameters: dict[str, Any]
    acceptance: AcceptanceKind | None = None
    depth: int | None = None
    min_reach: float | None = None
    predictor: str = (
        ""  # sha256 of the manifest of the predictor it was tuned with; empty: uses none, or of an older release
    )
    reason: str = ""  # one line; for `off`: why speculation does not pay here
    profile: DeviceProfile
    results: dict[str, Any]  # replayed tokens per second and speed-up of this policy, `off` and the best `confidence`

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        build_policy(self.spec)
        return self

    @property
    def spec(self) -> PolicySpec:
        """The policy, ready to be built."""
        return PolicySpec(name=self.policy, parameters=self.parameters, acceptance=self.acceptance, depth=self.depth,
                          min_reach=self.min_reach)  # fmt: skip


@dataclass(frozen=True)
class Picked:
    """What a bundle offers a device."""

    spec: PolicySpec
    profile: DeviceProfile | None  # None: this device's is not known, nor one near it
    reason: str  # one line
    warning: str = ""  # one line, if the policy was not tuned for exactly this device


@dataclass(frozen=True)
class Bundle:
    """A loaded and checked bundle."""

    folder: Path
    manifest: Manifest
    policies: dict[str, DevicePolicy]

    def predictor(self, threads: int | None = None) -> Predictor:
        """Open `predictor.onnx` with its acceptance models; `threads` defaults to torch's. Raises UserError."""
        return Predictor.open(self.folder, self.manifest.predictor, threads)

    def tuned_threads(self, device: str, dtype: str) -> list[int]:
        """The thread counts, ascending, for which there are policies of a device and dtype."""
        profiles = [policy.profile for policy in self.policies.values()]
        return sorted(p.threads for p in profiles if (p.device, p.dtype) == (device, dtype))

    def policy_for(self, device: str, dtype: str, threads: int) -> Picked:
        """What to use on a device: the policy tuned for it, with a warning if it was with other versions of what decides speed.

        Else, with a warning, what was tuned for the same device with another dtype or number of threads, the nearest; on a
        device that is not in the bundle, plain decoding, which is never slower.
        """
        slug = device_slug(device, dtype, threads)
        if slug in self.policies:
            tuned = self.policies[slug]
            changed = other_versions(tuned.profile.versions)
            warning = f"{self.folder}: measured with {changed}; speeds may differ: run `ecospec-train profile` and `tune` again"
            return Picked(tuned.spec, tuned.profile, tuned.reason, warning if changed else "")
        missing = f"{self.folder / 'policies'}: no policy for this device ({slug})"
        remedy = "run `ecospec-train profile`, `tune` and `export` here, or name a policy with --policy"
        near = [policy for policy in self.policies.values() if policy.profile.device == device]
        if not near:
            known = ", ".join(self.policies) or "none"
            warning = f"{missing}, only for: {known}; decoding without speculation: {remedy}"
            return Picked(PolicySpec(name="off"), None, f"no policy for this device ({slug})", warning)
        nearest = min(near, key=lambda p: (p.profile.dtype != dtype, abs(math.log(p.profile.threads / threads))))
        warning = f"{missing}; using the one for {nearest.profile.slug}, which may not be the fastest here: {remedy}"
        return Picked(nearest.spec, nearest.profile, nearest.reason, warning)


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def vocabulary_sha256(tokenizer: Any) -> str | None:
    """sha256 over the sorted (token, id) pairs of a tokenizer; None without one."""
    if tokenizer is None:
        return None
    pairs = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=True).encode()).hexdigest()


def parse_json_file(path: Path, model: type[BaseModel]) -> Any:
    """Read `path` as `model`; raises UserError that names file and key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: missing; export the bundle again or copy the whole folder") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); copy or export it again") from None
    try:
        return model.model_validate(json.loads(text))
    except UserError as error:  # a nested configuration names its own key
        raise UserError(f"{path}: {error}") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: not valid JSON at line {error.lineno} (truncated?); export the bundle again"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(whole file)"
        raise UserError(
            f"{path}: key '{key}': {first['msg']}; it was written by another version or edited; export it again"
        ) from None


def load_bundle(folder: str | Path) -> Bundle:
    """Read and verify a bundle folder: every file present, of the right size and hash. Raises UserError."""
    root = Path(folder)
    if not root.is_dir():
        raise UserError(f"{root}: no such bundle folder; `ecospec-train export` writes one")
    raw = root / MANIFEST
    if not raw.is_file():
        raise UserError(f"{raw}: missing, so {root} is not a bundle; `ecospec-train export` writes one")
    manifest: Manifest = parse_json_file(raw, Manifest)
    if manifest.schema_version != SCHEMA_VERSION:
        raise UserError(
            f"{raw}: schema_version {manifest.schema_version}, this version of EcoSpec reads {SCHEMA_VERSION}; "
            "export the bundle again"
        )
    expected = (*REQUIRED, *(f"policies/{slug}.json" for slug in manifest.policies))
    for name in expected:
        if name not in manifest.files:
            raise UserError(f"{raw}: key 'files' does not list {name}; export the bundle again")
    for name, info in manifest.files.items():
        _check_file(root / name, info)
    policies = {slug: parse_json_file(root / f"policies/{slug}.json", DevicePolicy) for slug in manifest.policies}
    return Bundle(root, manifest, policies)


def _check_file(path: Path, info: FileInfo) -> None:
    if not path.is_file():
        raise UserError(f"{path}: missing; the manifest lists it. Copy the whole bundle or export it again")
    size = path.stat().st_size
    if size != info.bytes:
        raise UserError(
            f"{path}: {size} bytes, the manifest says {info.bytes} (cut short or edited?); copy or export it again"
        )
    if file_sha256(path) != info.sha256:
        raise UserError(f"{path}: content does not match its sha256 in the manifest (edited?); copy or export it again")


def write_manifest(root: Path, manifest: Manifest) -> Manifest:
    """Fill in size and hash of every file under `root` and write `manifest.json` last, by rename."""
    files = {
        path.relative_to(root).as_posix(): FileInfo(sha256=file_sha256(path), bytes=path.stat().st_size)
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    complete = manifest.model_copy(update={"files": files})
    draft = root / (MANIFEST + ".tmp")
    draft.write_text(complete.model_dump_json(indent=2) + "\n", encoding="utf-8")
    draft.replace(root / MANIFEST)
    return complete


def check_target(bundle: Bundle, target: Target) -> None:
    """Refuse a target that the bundle was not made for; raises UserError that names the difference and the remedy."""
    want, where = bundle.manifest.target, bundle.folder / MANIFEST
    remedy = f"pass --target {want.id}, or fit a bundle for this target"
    for key, name in (
        ("architecture", "architecture"), ("moe_layers", "MoE layers"), ("experts", "experts per layer"),
        ("top_k", "experts per token"), ("vocab_size", "vocabulary size"), ("hidden_size", "hidden size"),
    ):  # fmt: skip
        expected, found = getattr(want, key), getattr(target, key)
        if expected != found:
            raise UserError(f"{where}: made for a target with {name} {expected}, this one has {found}; {remedy}")
    if want.vocabulary_sha256 is not None and want.vocabulary_sha256 != vocabulary_sha256(target.tokenizer):
        raise UserError(f"{where}: the target's tokenizer has another vocabulary than the bundle's; {remedy}")
    if want.fingerprint != target.fingerprint:
        raise UserError(
            f"{where}: the target's weights are not those of the traces (fingerprint {target.fingerprint[:12]}, "
            f"bundle {want.fingerprint[:12]}); {remedy}"
        )


def drafter_of(bundle: Bundle, target: Target) -> str:
    """The drafter that a bundle names; of a layer in its target's own checkpoint, the one in this target's, wherever it lies."""
    from ecospec_runtime.checkpoint import read_config
    from ecospec_runtime.drafters.mtp import layer_names

    drafter = bundle.manifest.drafter
    own = drafter.kind == "mtp" and drafter.id == bundle.manifest.target.id
    if own and layer_names(target.folder, read_config(target.folder, "target")) is not None:
        return target.source
    return drafter.id


def check_drafter(bundle: Bundle, drafter: Drafter) -> None:
    """Refuse a drafter whose pools the predictor has not seen; raises UserError."""
    want, where = bundle.manifest.drafter, bundle.folder / MANIFEST
    for key in ("kind", "features", "width", "fingerprint"):
        expected, found = getattr(want, key), getattr(drafter, key)
        if expected != found:
            raise UserError(
                f"{where}: made for a drafter of {key} {str(expected)[:16]}, this one has {str(found)[:16]}; "
                f"pass --drafter {want.id}, or fit a bundle for this drafter"
            )
