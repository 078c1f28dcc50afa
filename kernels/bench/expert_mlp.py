"""Time of `expert_mlp` on weights that lie in memory, beside a plain streaming read of the same bytes.

    python kernels/bench/expert_mlp.py [--hidden 256 --units 448 --experts 48 --layers 7 --repeats 30 --small-pages]

Correctness first: each case must agree with the reference. Then, for r = 1-8 rows per touched expert, microseconds per
touched expert, GB/s of weights and the ratio to the streaming read, all measured in turns in the same run on one core.
Each figure is the median over places in memory of the minimum over repeats: a shared machine only ever adds time. The
weights of all layers must exceed the last-level cache severalfold, or the figures mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numba
import numpy as np
import torch
from torch import Tensor

from ecospec_kernels.blocks import view
from ecospec_kernels.expert_mlp import cpu, reference
from ecospec_kernels.pages import use_huge_pages

ROWS, TOP_K, SHARE = (1, 2, 3, 4, 6, 8), 4, 4  # each call touches every SHARE-th expert


@numba.njit(nogil=True)
def _stream(address: int, words: int) -> int:
    """Sum of the 64-bit words: the fastest plain read that a compiler makes."""
    values, total = view(address, words, np.int64), 0
    for i in range(words):
        total += values[i]
    return total


def _read(matrices: tuple[Tensor, ...], experts: list[int]) -> None:
    for matrix in matrices:
        start, size = matrix.data_ptr(), matrix.nbytes // matrix.size(0)
        for e in experts:
            _stream(start + e * size, size // 8)


def _inputs(experts: list[int], rows: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, experts and weights such that each of `experts` gets exactly `rows` tokens."""
    index = torch.tensor(experts).repeat(rows).view(-1, TOP_K)
    x = torch.randn(index.size(0), hidden, generator=torch.Generator().manual_seed(rows)).bfloat16()
    return x, index, torch.full(index.shape, 1 / TOP_K).bfloat16()


def _check(case: tuple[Tensor, ...], matrices: tuple[Tensor, ...]) -> None:
    """The kernel's output is the reference's up to one bf16 rounding."""
    result, expected = cpu.expert_mlp(*case, *matrices), reference.expert_mlp(*case, *matrices)
    scale = float(expected.abs().max())
    torch.testing.assert_close(result.float(), expected.float(), rtol=2**-7, atol=2e-6 * scale)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@torch.inference_mode()
def main() -> None:
    """Parse the sizes, check, time, print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("units", 448), ("experts", 48), ("layers", 7), ("repeats", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--small-pages", action="store_true", help="leave the weights where they were allocated")
    a = parser.parse_args()
    if a.experts % (SHARE * TOP_K):
        parser.error(f"--experts: {a.experts} is not a multiple of {SHARE * TOP_K}")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shapes = (a.experts, 2 * a.units, a.hidden), (a.experts, a.hidden, a.units)
    layers = [
        tuple((torch.randn(shape, generator=generator) * shape[2] ** -0.5).bfloat16() for shape in shapes)
        for _ in range(a.layers)
    ]
    if not a.small_pages:
        print("huge pages:", all(use_huge_pages(matrix) for matrices in layers for matrix in matrices))

    best: dict[str, dict[tuple[int, int], float]] = {}
    for repeat in range(a.repeats + 1):  # the first round checks and compiles
        for part in range(SHARE):
            experts = list(range(part, a.experts, SHARE))
            for rows in (0, *ROWS):
                case = _inputs(experts, rows, a.hidden) if rows else None
                times = best.setdefault(f"{rows} rows" if rows else "read", {})
                for layer, matrices in enumerate(layers):
                    if repeat == 0:
                        _check(case, matrices) if case else _read(matrices, experts)
                        continue
                    run = (lambda c=case, m=matrices: cpu.expert_mlp(*c, *m)) if case else (
                        lambda m=matrices, e=experts: _read(m, e))  # fmt: skip
                    times[layer, part] = min(times.get((layer, part), 1e9), _seconds(run))
    touched, size = a.experts // SHARE, 6 * a.units * a.hidden
    plain = statistics.median(best["read"].values())
    for name, times in best.items():
        t = statistics.median(times.values())
        print(
            f"{name:>7}: {1e6 * t / touched:7.1f} us/expert {touched * size / t / 1e9:6.1f} GB/s, {t / plain:.2f} reads"
        )


if __name__ == "__main__":
    main()
