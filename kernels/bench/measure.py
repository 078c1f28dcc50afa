"""The gate and the clock: a case whose result is wrong is not timed."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from bench.case import LIKE, Case, Device, Inputs, distance

COPIES, REPLAYS, WARM_UPS = 8, 5, 3  # calls in a captured graph, replays that are timed, calls before the capture
CEILING_BYTES = 2 << 30  # of the tensor that is copied
FLUSHED = 256 << 20  # bytes written between two calls, at least: more than any second-level cache


class Clock(Protocol):
    """Milliseconds of a call."""

    def graph(self, call: Callable[[], Any]) -> float:
        """As a captured graph replays it, no cache holding anything of it. RuntimeError if it cannot be captured."""
        ...

    def eager(self, call: Callable[[], Any]) -> float:
        """As Python launches it."""
        ...


class CudaClock:
    """CUDA events around replays of a graph of several calls, and what lies between calls taken off."""

    def __init__(self, device: Device):
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self.flushed = torch.empty(max(FLUSHED, 4 * cache), dtype=torch.uint8, device=device)
        self.between = self._replayed(lambda: None)

    def graph(self, call: Callable[[], Any]) -> float:
        """See `Clock`."""
        return max(0.0, self._replayed(call) - self.between)

    def eager(self, call: Callable[[], Any]) -> float:
        """See `Clock`."""
        from triton.testing import do_bench

        return float(do_bench(call, warmup=5, rep=20, return_mode="median"))

    def _replayed(self, call: Callable[[], Any]) -> float:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are compiled and libraries choose their workspaces
            for _ in range(WARM_UPS):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(COPIES):
                self.flushed.zero_()
                call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(1 + REPLAYS):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / COPIES)
        return statistics.median(times[1:])


def copy_rate(device: Device) -> float:
    """Bytes per second, read and written, of a large copy: the ceiling for everything else here."""
    source = torch.ones(CEILING_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(1 + 2 * REPLAYS):
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * CEILING_BYTES / (statistics.median(times[1:]) / 1e3)


def poisoned(call: Callable[[], Any]) -> Any:
    """Run a call while `torch.empty` gives NaN, or the largest integer: an output that is not written shows."""
    torch.use_deterministic_algorithms(True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)


def gated(case: Case, device: Device) -> tuple[Inputs, Any]:
    """Inputs of a case and its reference's result, once the fused twin has given the same. AssertionError if it has not."""
    inputs = case.make(device)
    expected = case.observed(case.twin("reference"), inputs)
    case.check(poisoned(lambda: case.observed(case.twin("fused"), inputs)), expected, inputs)
    return inputs, expected


def _same(case: Case, result: Any, expected: Any, inputs: Inputs) -> bool:
    """Whether a baseline computes what the op does."""
    if isinstance(expected, Tensor) and expected.is_floating_point():
        return distance(result, expected) <= LIKE
    try:
        case.check(result, expected, inputs)
    except AssertionError:
        return False
    return True


def first_line(error: BaseException) -> str:
    """A message in one line, with the error's kind unless it is a failed comparison."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, AssertionError) and text else f"{type(error).__name__}: {text}"


@torch.no_grad()
def correctness(case: Case, device: Device) -> dict[str, Any]:
    """`{"name", "failed"}`: why the case fails, or None."""
    try:
        gated(case, device)
    except Exception as error:  # whatever a kernel or its compiler says is this case's result
        return {"name": case.name, "failed": first_line(error)}
    return {"name": case.name, "failed": None}


@torch.no_grad()
def timing(case: Case, device: Device, clock: Clock, ceiling: float) -> dict[str, Any]:
    """A row of the table of times. `failed`: why there is no time, or None; `ceiling` in bytes per second."""
    assert case.work is not None
    row: dict[str, Any] = {
        "op": case.op,
        "model": case.model,
        "shape": case.shape,
        **case.work._asdict(),
        "failed": None,
    }
    try:
        inputs, expected = gated(case, device)
        fused = case.twin("fused")
        ms = clock.graph(lambda: fused(*inputs))
        rate = case.work.floor / max(ms, 1e-9) * 1e3
        row |= {
            "ms": ms,
            "eager_ms": clock.eager(lambda: fused(*inputs)),
            "bytes_per_second": rate,
            "of_ceiling": rate / ceiling,
        }
        row["baselines"] = {
            name: _baseline(case, call, inputs, expected, clock) for name, call in case.baselines.items()
        }
    except Exception as error:
        row["failed"] = first_line(error)
    finally:
        inputs = expected = None  # type: ignore[assignment]
        gc.collect()
        with suppress(RuntimeError):  # a lost device is reported already
            torch.cuda.empty_cache()
    return row


def _baseline(case: Case, call: Callable[..., Any], inputs: Inputs, expected: Any, clock: Clock) -> dict[str, Any]:
    """`{"ms", "captured"}` of another implementation, or `{"error"}`: it is not ours to fail."""
    try:
        if case.alike and not _same(case, case.observed(call, inputs), expected, inputs):
            return {"error": "gives another result"}
        try:
            return {"ms": clock.graph(lambda: call(*inputs)), "captured": True}
        except RuntimeError:
            return {"ms": clock.eager(lambda: call(*inputs)), "captured": False}
    except Exception as error:
        return {"error": first_line(error)}
