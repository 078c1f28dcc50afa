"""Where a Triton kernel cannot run, every op says so before it does anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from bench import registry
from ecospec_kernels import launch

KERNELS = Path(launch.__file__).parents[1]
MESSAGE = "{}: the Triton kernel runs on CUDA and ROCm devices, not on {} tensors: .*ecospec_kernels.dispatch.*TRITON_INTERPRET=1"
EVERY = """
from bench import registry
for op in registry.ops():
    case = registry.chosen([op])[0]
    try:
        case.twin("fused")(*case.make("cpu"))
    except ValueError as error:
        print(error)
"""


def elsewhere(value: Any) -> Any:
    """The same argument without data."""
    if isinstance(value, Tensor):
        return value.to("meta")
    return type(value)(*map(elsewhere, value)) if hasattr(value, "_fields") else value


@pytest.mark.parametrize("op", registry.ops())
def test_tensors_that_no_kernel_can_read_are_refused(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without data; and on the CPU where kernels are compiled."""
    case = registry.chosen([op])[0]
    call, arguments = case.twin("fused"), case.make("cpu")
    with pytest.raises(ValueError, match=MESSAGE.format(op, "meta")):
        call(*map(elsewhere, arguments))
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch, "empty", None)  # nothing is done before
    with pytest.raises(ValueError, match=MESSAGE.format(op, "cpu")):
        call(*arguments)


def test_without_the_interpreter_every_op_says_why() -> None:
    environment = os.environ | {"PYTHONPATH": str(KERNELS), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", EVERY], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == registry.ops()
    assert all("not on cpu tensors" in line for line in lines)
