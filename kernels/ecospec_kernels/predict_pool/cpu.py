"""CPU kernel of `predict_pool` (numba): see `reference.py` for the mathematics.

One call, because between two passes of a target nothing of it is left in the caches: a dozen small operations would each
fetch their code and data anew. A row's logits do not depend on the other rows, but for the shrinkage.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from ecospec_kernels.blocks import LANES, bits_of_float, compiled, exp, float_of_bits, largest, view, workspace
from ecospec_kernels.checks import refuse
from ecospec_kernels.draft_layer.cpu import product
from ecospec_kernels.predict_pool.inputs import LOG_P_FLOOR, SCALAR_UNIT, SCALARS, Floats, Tree
from ecospec_kernels.predict_pool.reference import EPSILON, HALF_MAX, OUT_OF_RANGE, Weights, invalid

HALF_NORMAL = 2.0**-14  # the least float16 of full precision; below, they are multiples of 2^-24


@numba.njit
def _recorded(x: Any) -> Any:
    """Rounded to float16, ties to even; NaN stays."""
    x = min(max(x, np.float32(-HALF_MAX)), np.float32(HALF_MAX)) if x == x else x
    if abs(x) < np.float32(HALF_NORMAL):
        return (x + np.float32(0.75)) - np.float32(0.75)
    bits = bits_of_float(x)
    return float_of_bits((bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000))


@numba.njit(nogil=True)
def _record(row: int, width: int, out: int) -> None:
    x, y = view(row, width, np.float32), view(out, width, np.float32)
    for i in range(width):
        y[i] = _recorded(x[i])


@numba.njit(nogil=True, fastmath={"contract", "reassoc"})
def _normalise(row: int, width: int) -> None:
    """To mean 0 and variance 1, in place."""
    x = view(row, width, np.float32)
    total = np.float32(0.0)
    for i in range(width):
        total += x[i]
    mean, squares = total / np.float32(width), np.float32(0.0)
    for i in range(width):
        squares += (x[i] - mean) * (x[i] - mean)
    factor = np.float32(1.0) / np.sqrt(squares / np.float32(width) + np.float32(EPSILON))
    for i in range(width):
        x[i] = (x[i] - mean) * factor


@numba.njit
def finite(x: Any) -> Any:
    """A scalar made finite, as `clean_scalars` does it."""
    if x != x or x == np.inf:
        return np.float32(0.0)
    return np.float32(LOG_P_FLOOR) if x == -np.inf else np.float32(x)


@numba.njit(nogil=True)
def _copy(row: int, width: int, out: int) -> None:
    x, y = view(row, width, np.float32), view(out, width, np.float32)
    for i in range(width):
        y[i] = x[i]


@numba.njit(nogil=True)
def _layer(x: int, n: int, columns: int, places: int, number: int, outputs: int, packed: int, out: int) -> None:
    """out [n, outputs] = x [n, columns] through a layer: `places` holds the addresses of matrices, then of biases."""
    at = view(places, 16, np.int64)
    product(x, n, columns, at[number], False, outputs, packed, out)
    bias = view(at[8 + number], outputs, np.float32)
    for t in range(n):
        row = view(out + 4 * t * outputs, outputs, np.float32)
        for i in range(outputs):
            row[i] += bias[i]


@numba.njit(nogil=True, fastmath={"contract"}, error_model="numpy")  # a check for division by zero would not vectorise
def _silu(row: int, count: int, out: int) -> None:
    x, y = view(row, count, np.float32), view(out, count, np.float32)
    for i in range(count):
        y[i] = x[i] / (np.float32(1.0) + exp(-x[i]))


@numba.njit(nogil=True)
def _add(row: int, count: int, out: int) -> None:
    x, y = view(row, count, np.float32), view(out, count, np.float32)
    for i in range(count):
        y[i] += x[i]


@numba.njit(nogil=True)
def _dot(row: int, weight: int, count: int) -> Any:
    x, w, total = view(row, count, np.float32), view(weight, count, np.float32), np.float32(0.0)
    for i in range(count):
        total += x[i] * w[i]
    return total


@numba.njit(nogil=True)
def _shrink(routing: int, n: int, outputs: int, share: float) -> None:
    rows, leading = view(routing, n * outputs, np.float32).reshape(n, outputs), min(n, 2)
    mean = np.empty(outputs, np.float32)
    for i in range(outputs):
        mean[i] = (rows[0, i] + rows[1, i]) / np.float32(2.0) if leading == 2 else rows[0, i]
        if not np.isfinite(mean[i]):
            return
    for t in range(n):
        for i in range(outputs):
            rows[t, i] += np.float32(share) * mean[i]


@numba.njit(nogil=True)
def _gather(embedding: int, n: int, hidden: int, parent: Any, state_row: Any, log_p: Any, rank: Any, depth: Any, states: int,
             state_count: int, wide: int, entropy: Any, inputs: int) -> None:  # fmt: skip
    """The normalised inputs [n, 2 * hidden + wide + SCALARS] of root and nodes."""
    columns = 2 * hidden + wide + SCALARS
    for t in range(n):
        row = inputs + 4 * t * columns
        _record(embedding + 4 * t * hidden, hidden, row)
        _normalise(row, hidden)
        from_row = state_row[t - 1] if t else 0
        place = row + 8 * hidden
        if state_count == 1 and t:
            _copy(inputs + 8 * hidden, wide, place)
        if state_count > 1 or t == 0:
            _record(states + 4 * (from_row if state_count > 1 else 0) * wide, wide, place)
            _normalise(place, wide)
        scalars = view(place + 4 * wide, SCALARS, np.float32)
        scalars[0] = max(finite(log_p[t - 1]), np.float32(LOG_P_FLOOR)) if t else np.float32(0.0)
        scalars[1] = np.float32(rank[t - 1]) if t else np.float32(0.0)
        scalars[2] = np.float32(depth[t - 1]) if t else np.float32(0.0)
        scalars[3] = finite(entropy[from_row]) if len(entropy) else np.float32(0.0)
        for i in range(SCALARS):
            scalars[i] /= np.float32(SCALAR_UNIT)
    for t in range(n):
        to = inputs + 4 * t * columns + 4 * hidden
        if t:
            _copy(inputs + 4 * (parent[t - 1] + 1) * columns, hidden, to)
        else:
            view(to, hidden, np.float32)[:] = np.float32(0.0)


@compiled
def predict(embedding_NH: Any, parents_n: Any, state_rows_n: Any, log_probs_n: Any, ranks_n: Any, depths_n: Any, states_sd: Any,
             entropies_s: Any, places: Any, widths: Any, shrinkage: float, routing_NO: Any, acceptance_N: Any,
             scratch: int) -> bool:  # fmt: skip
    """Dense arrays, which cost less to hand over than addresses. `places`: see `_layer`. `scratch`: as `scratch_size` counts.

    Without columns of routing only acceptance is computed. False, with nothing written, if a parent or state row is out of range.
    """
    (n, hidden), (state_count, wide), outputs = embedding_NH.shape, states_sd.shape, routing_NO.shape[1]
    known = min(len(entropies_s), state_count) if state_count > 1 else len(entropies_s)
    for t in range(n - 1):
        if not (-1 <= parents_n[t] < n - 1 and 0 <= state_rows_n[t] < known):
            return False
    width, mixed_width, inner_width = widths
    places, routing, acceptance = places.ctypes.data, routing_NO.ctypes.data, acceptance_N.ctypes.data
    columns, most = 2 * hidden + wide + SCALARS, max(width, mixed_width + SCALARS, inner_width)
    inputs = scratch
    x = inputs + 4 * n * columns
    y = x + 4 * n * most
    z = y + 4 * n * most
    part = z + 4 * n * most
    packed = part + 4 * n * max(hidden, wide)
    _gather(embedding_NH.ctypes.data, n, hidden, parents_n, state_rows_n, log_probs_n, ranks_n, depths_n,
             states_sd.ctypes.data, state_count, wide, entropies_s, inputs)  # fmt: skip
    if outputs:
        _layer(inputs, n, columns, places, 0, width, packed, x)
        _silu(x, n * width, y)
        _layer(y, n, width, places, 1, width, packed, z)
        _silu(z, n * width, z)
        _add(z, n * width, x)
        _layer(x, n, width, places, 2, outputs, packed, routing)
        if shrinkage > 0:
            _shrink(routing, n, outputs, shrinkage)
    for t in range(n):
        _copy(inputs + 4 * t * columns, hidden, part + 4 * t * hidden)
    _layer(part, n, hidden, places, 3, mixed_width, packed, x)
    for t in range(n):
        _copy(inputs + 4 * (t * columns + 2 * hidden), wide, part + 4 * t * wide)
    _layer(part, n, wide, places, 4, mixed_width, packed, y)
    _add(y, n * mixed_width, x)
    mixed = mixed_width + SCALARS
    for t in range(n):
        _silu(x + 4 * t * mixed_width, mixed_width, z + 4 * t * mixed)
        _copy(inputs + 4 * ((t + 1) * columns - SCALARS), SCALARS, z + 4 * (t * mixed + mixed_width))
    _layer(z, n, mixed, places, 5, inner_width, packed, x)
    _silu(x, n * inner_width, x)
    at, out = view(places, 16, np.int64), view(acceptance, n, np.float32)
    bias = view(at[8 + 6], 1, np.float32)[0] + view(at[8 + 7], 1, np.float32)[0]
    for t in range(n):
        linear = _dot(inputs + 4 * ((t + 1) * columns - SCALARS), at[6], SCALARS)
        out[t] = bias + linear + _dot(x + 4 * t * inner_width, at[7], inner_width)
    return True


def scratch_size(n: int, hidden: int, wide: int, width: int, mixed_width: int, inner_width: int) -> int:
    """fp32 numbers that `predict` needs."""
    columns, most = 2 * hidden + wide + SCALARS, max(width, mixed_width + SCALARS, inner_width)
    return n * (columns + 3 * most + max(hidden, wide) + max(columns, most) + 2 * LANES)


def _dense(values: Any, dtype: Any) -> Any:
    return np.ascontiguousarray(values, dtype)


def predict_pool(
    w: Weights, embedding_NH: Floats, tree: Tree, shrinkage: float, routing: bool = True
) -> tuple[Floats, Floats]:  # fmt: skip
    """Same contract as the reference."""
    refuse("predict_pool", invalid(w, embedding_NH, tree))
    n, hidden = embedding_NH.shape
    routing_NO, acceptance_N = np.empty((n, len(w.biases[2]) if routing else 0), np.float32), np.empty(n, np.float32)
    done = predict(
        _dense(embedding_NH, np.float32), _dense(tree.parents, np.int64), _dense(tree.state_rows, np.int64),
        _dense(tree.log_probs, np.float32), _dense(tree.ranks, np.int64), _dense(tree.depths, np.int64),
        _dense(tree.states, np.float32), _dense(tree.entropies, np.float32), w.places, w.widths, shrinkage, routing_NO, acceptance_N,
        workspace(scratch_size(n, hidden, tree.states.shape[1], *w.widths)),
    )  # fmt: skip
    if not done:
        raise IndexError(OUT_OF_RANGE)
    return routing_NO, acceptance_N


@numba.njit(nogil=True)
def _prefer(x: int, experts: int, top_k: int, row: int, values: int, chosen: int) -> None:
    """The `top_k` largest of a row and layer, or what stands in for unknown ones: see the reference."""
    logits, place = view(x, experts, np.float32), view(chosen, top_k, np.int64)
    total = np.float32(0.0)
    for i in range(experts):
        total += logits[i] * np.float32(0.0)  # NaN if any is not finite
    if total != total:
        for i in range(top_k):
            place[i] = (row * top_k + i) % experts
        return
    largest(x, experts, top_k, values, chosen)


@compiled
def choose(routing_NLE: Any, top_k: int, out: Any, scratch: int) -> None:
    """See `top_experts`; `scratch`: 12 * top_k bytes."""
    n, layers, experts = routing_NLE.shape
    chosen, values, routing = scratch, scratch + 8 * top_k, routing_NLE.ctypes.data
    place = view(chosen, top_k, np.int64)
    for t in range(n):
        bits = out[t]
        bits[:] = 0
        for layer in range(layers):
            _prefer(routing + 4 * (t * layers + layer) * experts, experts, top_k, t, values, chosen)
            for i in range(top_k):
                bit = layer * experts + place[i]
                bits[bit >> 3] |= np.uint8(1 << (bit & 7))


def top_experts(routing_NLE: Floats, top_k: int) -> NDArray[np.uint8]:
    """Same contract as the reference."""
    n, layers, experts = routing_NLE.shape
    top_k = min(top_k, experts)
    out = np.empty((n, (layers * experts + 7) // 8), np.uint8)
    choose(np.ascontiguousarray(routing_NLE, np.float32), top_k, out, workspace(3 * top_k + 8))
    return out
