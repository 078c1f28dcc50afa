"""Loading holds the weights once: the peak of the resident set, in processes of their own; the benchmark has the fine figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ecospec_runtime.errors import UserError
from ecospec_runtime.weights import INDEX, checkpoint_files, read_folder
from pipelines.benchmark.loading import measure

SMALL = 200  # megabytes of experts: four layers, so that converting one of them shows as a quarter of the whole
DOUBLED = 1.6  # a second copy, even of the experts alone, is above it


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("case", ["bfloat16", "fp8 to bfloat16"])
def test_no_second_copy(case: str) -> None:
    row = measure(case, SMALL)
    assert row["bytes"] > 0.9e6 * SMALL
    assert 0.9 < row["ratio"] < DOUBLED


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
