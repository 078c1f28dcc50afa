"""Write a fitted predictor: ONNX for decoding, the same weights as safetensors, and proof that both agree.

Legend: N rows, H target width, d drafter width, L MoE layers, E experts.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from ecospec_kernels.predict_pool.inputs import SCALARS
from ecospec_runtime.errors import UserError
from ecospec_runtime.predictor import ONNX_FILE, WEIGHTS_FILE, check_interface, open_session
from ecospec_train.predictor_model import PredictorNetwork

INPUTS = ("embedding", "parent", "state", "scalars")
TOLERANCE = 1e-3  # relative to the largest output; float32 in both


def export_network(network: PredictorNetwork, folder: Path) -> None:
    """Write `predictor.onnx` and `predictor.safetensors`; UserError if onnxruntime's outputs differ from torch's."""
    network = network.cpu().eval()
    temporary = folder / f".{ONNX_FILE}"
    export_onnx(network, temporary)
    check_export(network, temporary)
    os.replace(temporary, folder / ONNX_FILE)
    weights = {name: value.contiguous() for name, value in network.state_dict().items()}
    save_file(weights, folder / f".{WEIGHTS_FILE}")
    os.replace(folder / f".{WEIGHTS_FILE}", folder / WEIGHTS_FILE)


def example(network: PredictorNetwork, rows: int) -> tuple[torch.Tensor, ...]:
    """Random inputs of `rows` rows."""
    generator = torch.Generator().manual_seed(rows)
    sizes = (network.shapes.hidden, network.shapes.hidden, network.shapes.state, SCALARS)
    return tuple(torch.randn(rows, size, generator=generator) for size in sizes)


def export_onnx(network: PredictorNetwork, path: Path) -> None:
    """One self-contained ONNX file with a free number of rows, under the names that the runtime expects."""
    rows = torch.export.Dim("n", min=1)
    quiet = logging.getLogger("torch.onnx")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                network, example(network, 3), str(path), dynamo=True, external_data=False, verbose=False,
                dynamic_shapes=({0: rows},) * len(INPUTS), input_names=list(INPUTS),
                output_names=["routing_logits", "acceptance_logit"],
            )  # fmt: skip
    finally:
        quiet.setLevel(level)


def check_export(network: PredictorNetwork, path: Path) -> None:
    """Compare the file with the module on several numbers of rows."""
    session = open_session(path, torch.get_num_threads())
    check_interface(path, session, network.shapes)
    for rows in (1, 2, 49):
        inputs = example(network, rows)
        feed = {name: value.numpy() for name, value in zip(INPUTS, inputs, strict=True)}
        found = session.run(["routing_logits", "acceptance_logit"], feed)
        with torch.inference_mode():
            expected = [value.numpy() for value in network(*inputs)]
        for value, reference in zip(found, expected, strict=True):
            error = float(np.abs(value - reference).max()) / (1 + float(np.abs(reference).max()))
            if not error <= TOLERANCE:  # also true for NaN
                raise UserError(
                    f"{path}: onnxruntime differs from torch by {error:.1e}; try another onnxruntime release"
                )


def sha256(path: Path) -> str:
    """Hash of a file, hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
