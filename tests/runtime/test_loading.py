"""Loading makes no second copy of the weights: the peak of the resident set, in a process of its own.

Weights small enough for a test cannot hold the promised peak of 1.15 times their bytes: `pipelines.benchmark.loading` does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ecospec_runtime.errors import UserError
from ecospec_runtime.weights import INDEX, checkpoint_files, read_folder
from pipelines.benchmark.loading import CHILD, write_checkpoint

LAYERS, WIDTH = 4, 256  # 100 megabytes of experts; the matrix in conversion, a sixth of all, comes on top
COPIED = 1.4  # a second copy, even of two layers' experts, is above it
TWICE = f"import json, sys\nfor sys.argv in json.loads(sys.argv[1]):\n    exec({CHILD!r}, {{}})"  # one start of Python


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_second_copy(tmp_path: Path) -> None:
    """Of weights that are loaded as they are, of FP8 ones that are dequantised on the way, and of MXFP4 ones that stay so."""
    arguments = []
    for quantized, family, dtype in (
        ("", "qwen3_moe", "bfloat16"),
        ("fp8", "qwen3_moe", "bfloat16"),
        ("mxfp4", "gpt_oss", "mxfp4"),
    ):
        folder = write_checkpoint(tmp_path / f"all{quantized}", family, LAYERS, torch.bfloat16, quantized, WIDTH)
        small = write_checkpoint(tmp_path / f"small{quantized}", family, 1, torch.bfloat16, quantized, width=32)
        arguments.append(["", str(folder), dtype, str(small)])
    done = subprocess.run(
        [sys.executable, "-c", TWICE, json.dumps(arguments)], capture_output=True, text=True,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"},  # what malloc keeps for later is no copy
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for row in rows:
        assert 0.9 < row["peak"] / row["bytes"] < COPIED, rows
    assert [round(row["bytes"] / 1e6) > least for row, least in zip(rows, (100, 100, 26), strict=True)] == [True] * 3, (
        rows
    )


def test_reads_what_was_saved(tmp_path: Path) -> None:
    tensors = {
        "wide": torch.randn(70, 300), "half": torch.randn(3, 5).bfloat16(), "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4), "bytes": torch.arange(99, dtype=torch.uint8), "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stored = read_folder([tmp_path / "model.safetensors"])
    assert stored.keys() == tensors.keys() == load_file(tmp_path / "model.safetensors").keys()
    for name, tensor in tensors.items():
        assert stored[name].dtype == tensor.dtype and stored[name].get_shape() == list(tensor.shape)
        assert torch.equal(stored[name][...].view(torch.uint8), tensor.view(torch.uint8)) if tensor.ndim else True
    assert stored["scalar"][...].item() == 2.5
    assert torch.equal(stored["wide"][3:9, ::7], tensors["wide"][3:9, ::7])
    assert torch.equal(stored["wide"].rows(60, 70), tensors["wide"][60:])
    assert stored["bytes"].data(7, 3) == bytes([7, 8, 9])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    assert checkpoint_files(tmp_path, "x") == []
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(UserError, match=r"model-1\.safetensors is missing"):
        checkpoint_files(tmp_path, "x")
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(UserError, match="not a readable index"):
        checkpoint_files(tmp_path, "x")
