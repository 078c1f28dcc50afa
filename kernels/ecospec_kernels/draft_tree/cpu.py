"""CPU kernel of `draft_tree` (numba): see `reference.py` for what is grown; layer and proposals are those of their own ops.

The whole tree is one call: a level of a small head takes less time than the handful of array operations between two.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from ecospec_kernels.blocks import compiled, read_row, view, workspace
from ecospec_kernels.draft_layer.cpu import layer as draft_layer
from ecospec_kernels.draft_layer.cpu import optional
from ecospec_kernels.draft_layer.cpu import scratch_size as layer_scratch
from ecospec_kernels.draft_layer.reference import Rope
from ecospec_kernels.draft_propose.cpu import propose
from ecospec_kernels.draft_propose.cpu import scratch_size as propose_scratch
from ecospec_kernels.draft_tree.reference import Floats, Shape, Tree, TreeWeights, log_reach


@numba.njit(nogil=True)
def _best_children(scores: Floats, width: int, chosen: int) -> None:
    """Places of the `width` largest scores, falling, into int64 at `chosen`; ties in their order, NaN last."""
    out, count = view(chosen, width, np.int64), 0
    for i in range(scores.size):
        score = scores[i]
        if score != score:
            continue
        j = count
        while j > 0 and score > scores[out[j - 1]]:
            j -= 1
        if j < width:
            for k in range(min(count, width - 1), j, -1):
                out[k] = out[k - 1]
            out[j] = i
            count = min(count + 1, width)
    for i in range(scores.size):
        if count < width and scores[i] != scores[i]:
            out[count] = i
            count += 1


@compiled
def _tree(before: int, root: int, hidden: int, heads: int, groups: int, dim: int, inner: int, bf16: bool, eps: float,
          normed_residual: bool, input_norm: int, hidden_norm: int, post_norm: int, qkv_w: int, out_w: int,
          gate_up_w: int, down_w: int, qkv_bias: int, out_bias: int, output_norm: int, final_norm: int, lm_head: int,
          vocabulary: int, embedding: int, embedding_bf16: bool, target_ids: int, cos: int, sin: int, keys: int, values: int, cache_stride: int,
          past: int, depth: int, beam: int, width: int, cut: bool, least: float, temperatures: int, t_count: int,
          noise: int, recent_stride: int, states: int, entropies: int, normalizers: int, nodes: int, log_probs: int,
          scratch: int) -> tuple[int, int, int]:  # fmt: skip
    """Levels, states and nodes. `nodes`: tokens, parents, depths, ranks and state rows, int64 [5, depth * width]; all dense.

    `scratch`: recent keys, recent values, embeddings, proposing states, then what layer and proposals need.
    """
    most = depth * width
    recent_keys, recent_values = scratch, scratch + groups * recent_stride
    embed = recent_values + groups * recent_stride
    proposing = embed + beam * hidden * 4
    rest = proposing + beam * hidden * 4
    row, floating, word = hidden * 4, 4, 8
    more = vocabulary * 4 if noise else 0
    all_ids, orders, all_reach = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.float32)
    found_ids, found = np.empty(max(beam, 2) * width, np.int64), np.empty(max(beam, 2) * width, np.float32)
    all_log_probs, scores = np.empty(most, np.float32), np.empty(beam * width, np.float32)
    seen, seen_before = np.zeros((2, beam * beam * depth), np.uint8)
    for at, source in ((states, before), (states + row, root)):
        view(at, hidden, np.float32)[:] = view(source, hidden, np.float32)
    propose(states, 2, hidden, final_norm, eps, lm_head, bf16, vocabulary, width, temperatures, t_count, noise, more,
             found.ctypes.data, found_ids.ctypes.data, entropies, normalizers, rest)  # fmt: skip
    for i in range(width):
        all_ids[i], orders[i], all_log_probs[i] = found_ids[width + i], i, found[width + i]
        all_reach[i] = found[width + i]
    for b in range(beam):
        view(proposing + b * row, hidden, np.float32)[:] = view(root, hidden, np.float32)
    ids = view(target_ids, vocabulary, np.int64)
    levels, expanded = 1, 0
    first_rows = np.ones(depth, np.int64)  # of each level: the first state that proposed it
    for level in range(1, depth):
        first, last = (level - 1) * width, level * width  # of the level that expands; of the new one
        expanding = 0
        while expanding < beam and (not cut or all_reach[first + expanding] >= least):
            expanding += 1
        if expanding == 0:
            break
        recent = expanded + expanding
        seen, seen_before = seen_before, seen
        for b in range(expanding):
            read_row(embedding + ids[all_ids[first + b]] * hidden * (2 if embedding_bf16 else 4), hidden,
                     embedding_bf16, embed + b * row)  # fmt: skip
            parent = orders[first + b] // width
            for j in range(expanded):
                seen[b * recent + j] = seen_before[parent * expanded + j]
            for j in range(expanding):
                seen[b * recent + expanded + j] = b == j
        done = first_rows[level] = 2 + expanded
        new = states + done * row
        draft_layer(embed, proposing, expanding, hidden, heads, groups, dim, inner, bf16, eps, normed_residual, input_norm,
               hidden_norm, post_norm, qkv_w, out_w, gate_up_w, down_w, qkv_bias, out_bias, output_norm,
               cos + (level - 1) * dim * floating, sin + (level - 1) * dim * floating, 0, keys, values, cache_stride, past, recent_keys, recent_values,
               recent_stride, recent, seen.ctypes.data, new, rest)  # fmt: skip
        propose(new, expanding, hidden, final_norm, eps, lm_head, bf16, vocabulary, width, temperatures, t_count,
                 noise + (1 + level) * more, 0, found.ctypes.data, found_ids.ctypes.data, entropies + done * floating,
                 normalizers + done * t_count * floating, rest)  # fmt: skip
        for b in range(expanding):
            for i in range(width):
                scores[b * width + i] = all_reach[first + b] + found[b * width + i]
        _best_children(scores[: expanding * width], width, orders.ctypes.data + last * word)
        for i in range(width):
            place = orders[last + i]
            all_ids[last + i], all_reach[last + i] = found_ids[place], scores[place]
            all_log_probs[last + i] = found[place]
        for b in range(beam):
            parent = orders[last + b] // width
            view(proposing + b * row, hidden, np.float32)[:] = view(new + parent * row, hidden, np.float32)
        levels, expanded = level + 1, recent
    table = view(nodes, 5 * most, np.int64).reshape(5, most)
    kept, places, count = view(log_probs, most, np.float32), np.empty(most, np.int64), 0
    for i in range(levels * width):
        level, parent = i // width, orders[i] // width
        up = (level - 1) * width + parent
        if (cut and not all_reach[i] >= least) or (level > 0 and places[up] < 0):
            places[i] = -1
            continue
        table[0, count] = ids[all_ids[i]]
        table[1, count] = places[up] if level > 0 else -1
        table[2, count] = level + 1
        table[3, count] = orders[i] % width
        table[4, count] = first_rows[level] + parent if level > 0 else 1
        kept[count], places[i] = all_log_probs[i], count
        count += 1
    return levels, 2 + expanded, count


def draft_tree(
    w: TreeWeights, before_H: Tensor, root_H: Tensor, rope: Rope, keys_GPD: Tensor, values_GPD: Tensor, shape: Shape,
    temperatures: tuple[float, ...], noise_dV: Tensor | None = None,
) -> Tree:  # fmt: skip
    """Same contract as the reference; noise, and rows of cache and rope, dense."""
    layer, hidden, vocabulary = w.layer, root_H.shape[0], w.lm_head_VH.shape[0]
    past, groups, dim = keys_GPD.shape[1], layer.kv_heads, layer.head_dim
    width, inner = min(shape.width, vocabulary), layer.down.shape[1]
    beam, t_count = min(shape.beam, width), len(temperatures)
    most, rows, recent = shape.depth * width, 2 + (shape.depth - 1) * beam, shape.depth * beam
    states, statistics = np.empty((rows, hidden), np.float32), np.empty(rows * (1 + t_count) + most, np.float32)
    nodes, tau = np.empty((5, most), np.int64), np.array(temperatures, np.float64)
    entropies = statistics.ctypes.data
    normalizers = entropies + 4 * rows
    attention = layer.heads * dim
    inside = max(
        layer_scratch(beam, hidden, attention, layer.qkv.shape[0], inner, past, recent),
        propose_scratch(max(beam, 2), hidden, vocabulary),
    )
    levels, used, count = _tree(
        before_H.data_ptr(), root_H.data_ptr(), hidden, layer.heads, groups, dim, inner,
        layer.qkv.dtype == torch.bfloat16, layer.eps, layer.norm_before_residual, layer.input_norm.data_ptr(),
        layer.hidden_norm.data_ptr(), layer.post_norm.data_ptr(), layer.qkv.data_ptr(), layer.out.data_ptr(),
        layer.gate_up.data_ptr(), layer.down.data_ptr(), *optional(layer),
        0 if w.final_norm_H is None else w.final_norm_H.data_ptr(), w.lm_head_VH.data_ptr(), vocabulary,
        w.embedding.data_ptr(), w.embedding.dtype == torch.bfloat16, w.target_ids.ctypes.data, rope[0].data_ptr(),
        rope[1].data_ptr(), keys_GPD.data_ptr(), values_GPD.data_ptr(), 4 * keys_GPD.stride(0), past, shape.depth, beam,
        width, shape.min_reach > 0.0, float(log_reach(shape.min_reach)), tau.ctypes.data, t_count,
        0 if noise_dV is None else noise_dV.data_ptr(), 4 * recent * dim,
        states.ctypes.data, entropies, normalizers, nodes.ctypes.data, normalizers + 4 * rows * t_count,
        workspace(2 * groups * recent * dim + 2 * beam * hidden + inside),
    )  # fmt: skip
    tokens, parents, depths, ranks, state_rows = nodes[:, :count]
    return Tree(
        tokens, parents, depths, ranks, statistics[rows * (1 + t_count) :][:count], state_rows, states[:used],
        statistics[:used], statistics[rows : rows * (1 + t_count)].reshape(rows, t_count)[:used], levels,
    )  # fmt: skip
