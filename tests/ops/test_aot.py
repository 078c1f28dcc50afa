"""The table of compiled kernels: each op's smallest form for each chip, and kernels that the table must refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
KERNELS = Path(__file__).resolve().parents[2] / "kernels"
STUB = """
from ecospec_kernels import aot  # before Triton: see there
import triton, triton.language as tl
from ecospec_kernels.launch import Configuration

@triton.jit
def product(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i[:, None] * N + i[None, :])
    tl.store(y + i[:, None] * N + i[None, :], tl.dot(a, a))

aot.shipped = lambda backend: [Configuration("product", product, {"x": "*bf16", "y": "*fp32"}, {"N": 128}, w, 2) for w in (1, 8)]
aot.CHIPS["small"] = aot.CHIPS["sm_90"]._replace(shared=4096)
raise SystemExit(aot.main(["--chips", "sm_90,small"]))
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A Python process that finds the kernels; this one may interpret them, and so could not compile."""
    environment = os.environ | {"PYTHONPATH": str(KERNELS)}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_the_usual_forms_fit_every_chip(chip: str) -> None:
    """bf16, few tokens; `make kernels-aot` compiles all forms."""
    done = run("-m", "ecospec_kernels.aot", "--chips", chip, "--only", "bf16 rows=16")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:-1]]
    assert len(rows) >= 4 and all(row[0] == chip and int(row[-3]) > 16 and row[-2] == "0" for row in rows)


def test_spills_and_too_much_shared_memory_are_refused(tmp_path: Path) -> None:
    stub = tmp_path / "stub.py"  # Triton reads the source of its kernels
    stub.write_text(STUB, encoding="utf-8")
    done = run(str(stub))
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[1:-1]]
    assert [line[-1] == "<-" for line in lines] == [True, False, True, True]
    assert int(lines[0][5]) > 0 and lines[3][5] == "0" and int(lines[3][6]) > 4096


def test_unknown_chips_are_named() -> None:
    done = run("-m", "ecospec_kernels.aot", "--chips", "sm_90,sm_30")
    assert done.returncode == 2 and "--chips: sm_30: known are sm_80" in done.stderr
