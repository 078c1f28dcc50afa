"""CPU kernel of `draft_propose` (numba): see `reference.py` for the mathematics. Equal logits: the lower id first."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from ecospec_kernels.blocks import LANES, compiled, exp, largest, view, workspace
from ecospec_kernels.draft_layer.cpu import product, rms
from ecospec_kernels.draft_propose.reference import Proposals


@numba.njit(nogil=True)
def _add(logits: int, noise: int, vocabulary: int) -> None:
    x, more = view(logits, vocabulary, np.float32), view(noise, vocabulary, np.float32)
    for i in range(vocabulary):
        x[i] += more[i]


@numba.njit(nogil=True, fastmath={"contract", "reassoc"})
def _sums(logits: int, vocabulary: int, top: float, temperature: float) -> tuple[np.float32, np.float32]:
    """Sum of e = exp((logit - top) / temperature), and of e * (logit - top)."""
    x = view(logits, vocabulary, np.float32)
    scale, peak = np.float32(1.0 / temperature), np.float32(top)
    total, moment = np.float32(0.0), np.float32(0.0)
    for i in range(vocabulary):
        gap = x[i] - peak
        e = exp(gap * scale)
        total += e
        moment += e * gap
    return total, moment


@compiled
def describe(logits: int, n: int, vocabulary: int, width: int, temperatures: int, t_count: int, noise: int,
             noise_stride: int, log_probs: int, ids: int, entropies: int, normalizers: int) -> None:  # fmt: skip
    """What `propose` says of given logits, fp32, to which it adds the noise."""
    entropy, tau = view(entropies, n, np.float32), view(temperatures, t_count, np.float64)
    for t in range(n):
        row, best = logits + t * vocabulary * 4, log_probs + t * width * 4
        if noise:
            _add(row, noise + t * noise_stride, vocabulary)
        largest(row, vocabulary, width, best, ids + t * width * 8)
        values = view(best, width, np.float32)
        top = values[0]
        total, moment = _sums(row, vocabulary, top, 1.0)
        log_total = np.log(total)
        entropy[t] = log_total - moment / total
        for i in range(width):
            values[i] -= top + log_total
        out = view(normalizers + t * t_count * 4, t_count, np.float32)
        for k in range(t_count):
            total, moment = _sums(row, vocabulary, top, tau[k])
            out[k] = np.log(total) - log_total / tau[k]


@compiled
def propose(states: int, n: int, hidden: int, norm: int, eps: float, lm_head: int, bf16: bool, vocabulary: int,
             width: int, temperatures: int, t_count: int, noise: int, noise_stride: int, log_probs: int, ids: int,
             entropies: int, normalizers: int, scratch: int) -> None:  # fmt: skip
    """All outputs dense; `norm` 0: the states are normed already; `noise` 0: none, else `noise_stride` bytes from one state's to
    the next's. `scratch`: see `scratch_size`."""
    normed = scratch if norm else states
    packed = scratch + n * hidden * 4
    logits = packed + n * (hidden + 2 * LANES) * 4
    if norm:
        for t in range(n):
            rms(states + t * hidden * 4, norm, hidden, eps, normed + t * hidden * 4)
    product(normed, n, hidden, lm_head, bf16, vocabulary, packed, logits)
    describe(
        logits, n, vocabulary, width, temperatures, t_count, noise, noise_stride, log_probs, ids, entropies, normalizers
    )


def scratch_size(n: int, hidden: int, vocabulary: int) -> int:
    """fp32 numbers that `propose` needs."""
    return n * (2 * hidden + 2 * LANES + vocabulary)


def _room(n: int, width: int, temperatures: int) -> tuple[Proposals, tuple[int, int, int, int]]:
    """Proposals to be filled in, and where they lie."""
    ids = torch.empty((n, width), dtype=torch.int64)
    room = Proposals(torch.empty((n, width)), ids, torch.empty(n), torch.empty((n, temperatures)))
    return room, (room.log_probs.data_ptr(), ids.data_ptr(), room.entropies.data_ptr(), room.log_normalizers.data_ptr())


def best_tokens(
    logits_nV: Tensor, width: int, temperatures: tuple[float, ...], noise: Tensor | None = None
) -> Proposals:  # fmt: skip
    """Same contract as the reference."""
    logits = (logits_nV.float() if noise is None else logits_nV.float() + noise).contiguous()
    (n, vocabulary), tau = logits.shape, np.array(temperatures, np.float64)
    result, places = _room(n, width, len(tau))
    describe(logits.data_ptr(), n, vocabulary, width, tau.ctypes.data, len(tau), 0, 0, *places)
    return result


def draft_propose(
    states_nH: Tensor, norm_H: Tensor | None, eps: float, lm_head_VH: Tensor, width: int, temperatures: tuple[float, ...],
    noise: Tensor | None = None,
) -> Proposals:  # fmt: skip
    """Same contract as the reference; noise dense."""
    n, hidden = states_nH.shape
    vocabulary, count = lm_head_VH.shape[0], len(temperatures)
    states, tau = states_nH.contiguous(), np.array(temperatures, np.float64)
    result, places = _room(n, width, count)
    propose(
        states.data_ptr(), n, hidden, 0 if norm_H is None else norm_H.data_ptr(), eps, lm_head_VH.data_ptr(),
        lm_head_VH.dtype == torch.bfloat16, vocabulary, width, tau.ctypes.data, count,
        0 if noise is None else noise.data_ptr(), 0 if noise is None or noise.dim() == 1 else 4 * vocabulary,
        *places, workspace(scratch_size(n, hidden, vocabulary)),
    )  # fmt: skip
    return result
