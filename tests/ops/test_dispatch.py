"""Which implementation runs, and that the package works with nothing but torch."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ecospec_kernels import dispatch
from ecospec_kernels.expert_mlp.reference import SWIGLU

from .cases import BF16, FP32, random, routing, under_interpreter

KERNELS = Path(dispatch.__file__).parents[1]
BLOCKER = """
import importlib.util, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numba", "llvmlite", "triton", "transformers", "numpy_"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "numba" else real(name, package)
"""
BODY = """
import torch
from ecospec_kernels import dispatch
with torch.no_grad():
    x, w = torch.ones(2, 32, dtype=torch.bfloat16), torch.ones(8, 32, dtype=torch.bfloat16)
    assert dispatch.few_row_linear(x, w)[0, 0] == 32
assert set(dispatch.CALLS) == {("few_row_linear", "reference")}, dispatch.CALLS
print("fine")
"""


def run(code: str, **environment: str) -> str:
    """Run Python code in a process of its own that finds the kernels."""
    env = {"PYTHONPATH": str(KERNELS), "OMP_NUM_THREADS": "1", "PATH": "", **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_numba_the_reference_runs() -> None:
    assert run(BLOCKER + BODY) == "fine"


@pytest.mark.parametrize("override", ["reference", "fused"])
def test_the_environment_switches_cpu_kernels_off(override: str) -> None:
    assert run(BODY, ECOSPEC_KERNELS=override) == "fine"


@pytest.mark.parametrize(
    ("override", "interpreted", "expected"),
    [("fused", "1", "True"), ("fused", "0", "False"), ("", "1", "False"), ("cpu", "1", "False")],
)
def test_triton_takes_cpu_tensors_only_when_asked(override: str, interpreted: str, expected: str) -> None:
    pytest.importorskip("triton")
    code = "import torch; from ecospec_kernels import dispatch; print(dispatch.runs_triton(torch.ones(1)))"
    assert run(code, ECOSPEC_KERNELS=override, TRITON_INTERPRET=interpreted) == expected


def test_an_unknown_override_is_refused() -> None:
    with pytest.raises(AssertionError, match="ECOSPEC_KERNELS=fast in the environment: unset it or set"):
        run(BODY, ECOSPEC_KERNELS="fast")


@torch.no_grad()
def test_a_triton_kernel_runs_where_it_takes_the_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By its `unsupported`; the choice is counted each time and logged once."""
    stand_in = SimpleNamespace(unsupported=lambda x: "empty" if x.numel() == 0 else None)
    monkeypatch.setattr(dispatch, "runs_triton", lambda t: True)
    monkeypatch.setattr(dispatch, "_module", lambda op, implementation: stand_in)
    monkeypatch.setattr(dispatch, "CALLS", Counter())
    dispatch._log.cache_clear()
    caplog.set_level(logging.INFO)
    for x in (torch.ones(2), torch.ones(3), torch.ones(0)):
        dispatch._choose("some_op", False, dispatch._fused("some_op", x))
    assert dispatch.CALLS == {("some_op", "fused"): 2, ("some_op", "reference"): 1}
    assert len([r for r in caplog.records if "some_op" in r.message]) == 2
    with torch.enable_grad():
        assert not dispatch._fused("some_op", torch.ones(2))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], int]:
    """The counter, empty."""
    pytest.importorskip("numba")
    dispatch.CALLS.clear()
    return dispatch.CALLS


@torch.no_grad()
def test_linear_goes_where_it_belongs(calls: dict[tuple[str, str], int], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(1, 2, 32, dtype=BF16), random(2, 16, 32, dtype=BF16)
    dispatch.few_row_linear(x, weight)
    assert calls == {("few_row_linear", "cpu"): 1}
    for unsupported in (
        (x[:, :15], weight[:, :15]),  # odd columns of bf16
        (x, weight[:4]),  # fewer outputs than a block
        (x, weight.T.contiguous().T),  # columns, not rows, are dense
        (x.double(), weight.double()),
        (random(1, 2, 5), random(2, 16, 5)),  # less than a vector
    ):
        calls.clear()
        dispatch.few_row_linear(*unsupported)
        assert calls == {("few_row_linear", "reference"): 1}


@torch.no_grad()
def test_many_rows_leave_hardware_bf16_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(1, dispatch.MAX_ROWS + 1, 32, dtype=BF16), random(2, 16, 32, dtype=BF16)
    monkeypatch.setattr(dispatch, "native_bf16", lambda: True)
    assert not dispatch.supports_linear(x, weight, None)
    assert dispatch.supports_linear(x[:-1], weight, None)
    monkeypatch.setattr(dispatch, "native_bf16", lambda: False)
    assert dispatch.supports_linear(x, weight, None)
    assert not dispatch.supports_linear(x.float(), weight.float(), None)


def test_gradients_go_through_the_reference(calls: dict[tuple[str, str], int]) -> None:
    weight = random(2, 16, 32, dtype=FP32).requires_grad_()
    dispatch.few_row_linear(random(1, 2, 32), weight).sum().backward()
    assert weight.grad is not None and calls == {("few_row_linear", "reference"): 1}


@torch.no_grad()
def test_experts_go_where_they_belong(calls: dict[tuple[str, str], int]) -> None:
    arguments = [random(1, 2, 32), routing(2, 2, 6, 2), random(3, 2, 2), random(4, 6, 32, 32), random(5, 6, 32, 16)]
    dispatch.expert_mlp(*arguments)
    assert calls == {("expert_mlp", "cpu"): 1}
    arguments[3] = arguments[3].mT.contiguous().mT
    dispatch.expert_mlp(*arguments)
    assert calls == {("expert_mlp", "cpu"): 1, ("expert_mlp", "reference"): 1}


@under_interpreter
@torch.no_grad()
def test_experts_go_to_triton_where_it_runs(calls: dict[tuple[str, str], int], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "runs_triton", lambda t: True)
    arguments = [random(1, 2, 32), routing(2, 2, 6, 2), random(3, 2, 2), random(4, 6, 32, 32), random(5, 6, 32, 16)]
    dispatch.expert_mlp(*arguments)
    assert dispatch.fast_experts(*arguments) is not None
    assert calls == {("expert_mlp", "fused"): 2}
    arguments[0] = arguments[0].half()
    assert dispatch.fast_experts(*arguments, SWIGLU) is None
    dispatch.expert_mlp(*arguments)
    assert calls == {("expert_mlp", "fused"): 2, ("expert_mlp", "reference"): 1}
