"""The trained predictor at decoding time: which experts each candidate will need, and whether it will be accepted.

A predictor folder holds `predictor.onnx`, the same weights as `predictor.safetensors`, `acceptance.json`, `metrics.json` and
`manifest.json`. The network runs through onnxruntime; trees of a decoding step, where the safetensors hold what the ONNX
file does, by the op `predict_pool`. Row 0 of every input is the root, the pool's nodes follow. Inputs:
`embedding` of the token, `parent` the embedding of its parent's token (zeros for the root), `state` of the drafter that
proposed it (or the target's last hidden state: see `pool.Features`), `scalars` log p, rank, depth and the entropy there.

Legend: N rows (root and nodes), H target width, d width of the state, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, Self

import numpy as np
import onnxruntime
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file

from ecospec_kernels import dispatch
from ecospec_kernels.predict_pool import reference
from ecospec_kernels.predict_pool.inputs import SCALARS, scalars_of
from ecospec_kernels.predict_pool.reference import Weights, recorded
from ecospec_runtime.acceptance import AcceptanceModel
from ecospec_runtime.config import PoolConfig, read_model
from ecospec_runtime.errors import UserError
from ecospec_runtime.pool import Floats, Ints, Pool

ONNX_FILE = "predictor.onnx"
WEIGHTS_FILE = "predictor.safetensors"
METRICS_FILE = "metrics.json"
MANIFEST_FILE = "manifest.json"
AGREE = 1e-3  # most that op and ONNX file may differ, of the largest output: both are fp32

Embed = Callable[[Ints], Floats]  # tokens [N] -> embeddings [N, H] float32


class PredictorShapes(BaseModel):
    """Sizes that the predictor was fitted for."""

    model_config = ConfigDict(extra="forbid")

    hidden: int = Field(gt=0)  # H
    state: int = Field(gt=0)  # d
    layers: int = Field(gt=0)
    experts: int = Field(gt=0)
    top_k: int = Field(gt=0)

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k} of {self.experts} experts")
        return self


class PredictorManifest(BaseModel):
    """Contents of a predictor folder's `manifest.json`: shapes, lineage and hashes."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    shapes: PredictorShapes
    shrinkage: float = Field(default=0.0, ge=0, le=1)  # see `shrink`
    target: dict[str, object]  # as the traces recorded it: id, architecture, fingerprint, ...
    drafter: dict[str, object]
    pool: PoolConfig = PoolConfig()  # of the traces: the trees that decoding must grow for replayed policies to hold
    temperature: float  # of the trajectory that the acceptance labels come from
    traces: str  # fingerprint of the traces
    further_traces: tuple[str, ...] = ()  # of those at other temperatures
    heldout_prompts: list[int]  # prompt ids of the traces that the fit never saw: honest material for tuning
    files: dict[str, str]  # name -> sha256
    config: dict[str, object]  # how it was fitted
    versions: dict[str, str]

    def fitted_on(self, traces: str) -> bool:
        """Whether the fit had a part in the traces of this fingerprint."""
        return traces in (self.traces, *self.further_traces)


class Prediction(NamedTuple):
    """What the network says of root and nodes, unprocessed."""

    routing_logits: Floats | None  # [N, L, E]; None: not asked for
    acceptance_logits: Floats  # [N]


class Predictor:
    """An onnxruntime session with its manifest and the fitted acceptance models."""

    def __init__(self, session: onnxruntime.InferenceSession, manifest: PredictorManifest, acceptance: AcceptanceModel,
                 weights: Weights | None = None):  # fmt: skip
        """`weights`: what the session computes with, if it is known: see `weights_of`."""
        self.session, self.manifest, self.acceptance, self.weights = session, manifest, acceptance, weights
        self.shapes = manifest.shapes

    @classmethod
    def from_folder(cls, folder: str | Path, threads: int | None = None) -> Predictor:
        """Load a predictor folder; `threads` defaults to torch's. UserError names a missing, corrupt or odd file."""
        return cls.open(Path(folder), load_manifest(Path(folder)), threads)

    @classmethod
    def open(cls, folder: Path, manifest: PredictorManifest, threads: int | None = None) -> Predictor:
        """Load a predictor or bundle folder whose manifest is given; else as `from_folder`."""
        acceptance = AcceptanceModel.load(folder)
        session = open_session(folder / ONNX_FILE, threads or torch.get_num_threads())
        check_interface(folder / ONNX_FILE, session, manifest.shapes)
        predictor = cls(session, manifest, acceptance)
        predictor.weights = weights_of(predictor, folder / WEIGHTS_FILE) if dispatch.ENABLED else None
        return predictor

    def predict(self, pool: Pool, embed: Embed, routing: bool = True) -> Prediction:
        """Predict for the root (row 0) and every node of a pool; without `routing` acceptance alone, a small part of the work."""
        if self.weights is not None:
            tokens = np.empty(len(pool) + 1, np.int64)
            tokens[0], tokens[1:] = pool.root_token, pool.tokens
            shrinkage, sizes = self.manifest.shrinkage, (self.shapes.layers, self.shapes.experts)
            routing_NO, acceptance_N = dispatch.predict_pool(self.weights, embed(tokens), pool, shrinkage, routing)
            return Prediction(routing_NO.reshape(-1, *sizes) if routing else None, acceptance_N)
        rows = np.concatenate(([0], pool.state_rows))
        embedding_NH = as_recorded(embed(np.concatenate(([pool.root_token], pool.tokens))))
        parent_NH = embedding_NH[np.concatenate(([0], pool.parents + 1))]
        parent_NH[0] = 0.0
        inputs = embedding_NH, parent_NH, as_recorded(pool.features_of(rows)), scalars_of(pool)
        if not routing:
            return Prediction(None, *self._outputs(["acceptance_logit"], *inputs))
        routing_NLE, acceptance_N = self.run(*inputs)
        shrink(routing_NLE, self.manifest.shrinkage)
        return Prediction(routing_NLE, acceptance_N)

    def run(
        self, embedding_NH: Floats, parent_NH: Floats, state_Nd: Floats, scalars_N4: Floats
    ) -> tuple[Floats, Floats]:  # fmt: skip
        """Run the network on prepared inputs, any number of rows: routing logits `[N, L, E]` and acceptance logits `[N]`."""
        names = ["routing_logits", "acceptance_logit"]
        routing_NLE, acceptance_N = self._outputs(names, embedding_NH, parent_NH, state_Nd, scalars_N4)
        return routing_NLE, acceptance_N

    def _outputs(
        self, names: list[str], embedding_NH: Floats, parent_NH: Floats, state_Nd: Floats, scalars_N4: Floats
    ) -> list[Floats]:  # fmt: skip
        inputs = {
            "embedding": np.ascontiguousarray(embedding_NH, np.float32),
            "parent": np.ascontiguousarray(parent_NH, np.float32),
            "state": np.ascontiguousarray(state_Nd, np.float32),
            "scalars": np.ascontiguousarray(scalars_N4, np.float32),
        }
        options = onnxruntime.RunOptions()
        options.only_execute_path_to_fetches = True
        return self.session.run(names, inputs, options)  # type: ignore[no-any-return]


def as_recorded(values: Floats) -> Floats:
    """Values as traces hold them, in float16: what the network was fitted on, and what replay scores."""
    return recorded(torch.from_numpy(values)).numpy()


def weights_of(predictor: Predictor, path: Path) -> Weights | None:
    """The weights in a safetensors file if they give what the predictor's session gives and a kernel takes them, else None."""
    shapes, numbers = predictor.shapes, np.arange(2)
    random = np.random.default_rng(0)
    embedding, states = (random.standard_normal((3, w)).astype(np.float32) for w in (shapes.hidden, shapes.state))
    pool = Pool(numbers, numbers - 1, numbers + 1, numbers, np.array([-1, -2], np.float32), numbers + 1, states,
                np.array([0.5, 1, 2], np.float32), 0)  # fmt: skip
    expected = predictor.predict(pool, lambda _: embedding)
    try:
        weights = Weights(load_file(path))
        found = reference.predict_pool(weights, embedding, pool, predictor.manifest.shrinkage)
    except (OSError, SafetensorError, KeyError, ValueError):  # missing, corrupt, or of other layers or sizes
        return None
    pairs = [(a.ravel(), np.asarray(b).ravel()) for a, b in zip(found, expected, strict=True)]
    same = all(len(a) == len(b) and np.allclose(a, b, rtol=0, atol=AGREE * max(1, np.abs(b).max())) for a, b in pairs)
    return weights if same and weights.fits else None


def load_manifest(folder: Path) -> PredictorManifest:
    """Read and validate `manifest.json`; UserError names the file and key."""
    remedy = f"is {folder} a predictor folder? `ecospec-train fit` writes one"
    return read_model(folder / MANIFEST_FILE, PredictorManifest, remedy)


def same_drafter(fingerprint: str, what: str, predictor: PredictorManifest, folder: Path | None) -> None:
    """Raise UserError if `what`, made with the drafter of this fingerprint, is put beside a predictor of another one.

    An empty fingerprint on either side, of an older file, says nothing.
    """
    made = predictor.drafter
    if fingerprint and made.get("fingerprint") not in ("", None, fingerprint):
        raise UserError(
            f"{what} (drafter {fingerprint[:12]}) and the predictor {folder or ''} (fitted for the {made.get('kind')} drafter "
            f"{made.get('id')}, {str(made.get('fingerprint'))[:12]}) are of different drafters; make both with one"
        )


def open_session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    """Open an ONNX file on the CPU. Threads do not spin between calls, so that they leave the cores to the target."""
    if not path.is_file():
        raise UserError(f"{path}: missing; run `ecospec-train fit` again")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own family of exceptions, without a common base class
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{path}: not a readable ONNX model ({reason}); run `ecospec-train fit` again") from error


def check_interface(path: Path, session: onnxruntime.InferenceSession, shapes: PredictorShapes) -> None:
    """Compare the names and sizes of the ONNX graph with the manifest; UserError at the first difference."""
    found = {port.name: list(port.shape) for port in [*session.get_inputs(), *session.get_outputs()]}
    expected = {
        "embedding": [shapes.hidden], "parent": [shapes.hidden], "state": [shapes.state], "scalars": [SCALARS],
        "routing_logits": [shapes.layers, shapes.experts], "acceptance_logit": [],
    }  # fmt: skip
    for name, sizes in expected.items():
        if name not in found:
            raise UserError(f"{path}: no input or output named {name}; run `ecospec-train fit` again")
        if found[name][1:] != sizes:
            raise UserError(f"{path}: {name} has sizes {found[name][1:]} where manifest.json says {sizes}")


def shrink(routing_logits_NLE: Floats, share: float) -> None:
    """Add `share` of the mean logits of root and first node to every row, in place.

    The nodes of a pool share their context, which these two know best. Independent errors make the predicted union too
    large; this takes the bias away. Both are in every pool that is not empty, so a cut pool gives the same as a full one.
    A mean that is not finite is left out.
    """
    if share > 0:
        mean_LE = routing_logits_NLE[:2].mean(0)
        if np.isfinite(mean_LE).all():
            routing_logits_NLE += np.float32(share) * mean_LE


def predicted_masks(routing_logits_NLE: Floats, top_k: int) -> list[int]:
    """The `top_k` likeliest experts per row and layer, as one bit set per row; of equally likely ones the lower first.

    A (row, layer) with a non-finite logit is unknown: see `predict_pool`.
    """
    packed = dispatch.top_experts(routing_logits_NLE, top_k)
    return [int.from_bytes(row.tobytes(), "little") for row in packed]
